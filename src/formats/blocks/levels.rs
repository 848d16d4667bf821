//! What codes mean before they are multiplied by a scale.

/// The levels of a type.
pub(super) trait Levels {
    /// The level nearest to `x`.
    fn nearest(x: f32) -> f32;
    /// The code of the level nearest to `x`.
    fn code(x: f32) -> u8;
}

/// The whole numbers from `MIN` to `MAX`; the code counts from 0.
pub(super) struct Whole<const MIN: i32, const MAX: i32>;

impl<const MIN: i32, const MAX: i32> Levels for Whole<MIN, MAX> {
    #[inline(always)]
    fn nearest(x: f32) -> f32 {
        // Comparisons and not `clamp`, whose NaN costs instructions; here NaN becomes a limit.
        let x = if x > MIN as f32 { x } else { MIN as f32 };
        let x = if x < MAX as f32 { x } else { MAX as f32 };
        // Adding this pushes the fraction out of an f32. `round` is a call where SSE4.1 may not be used.
        const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
        (x + MAGIC) - MAGIC
    }

    #[inline(always)]
    fn code(x: f32) -> u8 {
        (Self::nearest(x) as i32 - MIN) as u8
    }
}

/// Sixteen levels in rising order, as [`Levels`] of codes that are their places.
pub(super) trait Table {
    /// The levels.
    const LEVELS: [f32; 16];
    /// Where one level ends and the next begins.
    const BOUNDS: [f32; 15] = {
        let mut bounds = [0.0; 15];
        let mut i = 0;
        while i < 15 {
            bounds[i] = (Self::LEVELS[i] + Self::LEVELS[i + 1]) / 2.0;
            i += 1;
        }
        bounds
    };
}

impl<T: Table> Levels for T {
    #[inline(always)]
    fn nearest(x: f32) -> f32 {
        // Step by step, without a branch or a look into memory by number, so that it becomes vector code.
        let mut level = T::LEVELS[0];
        for i in 0..15 {
            level = if x > T::BOUNDS[i] { T::LEVELS[i + 1] } else { level };
        }
        level
    }

    #[inline(always)]
    fn code(x: f32) -> u8 {
        T::BOUNDS.iter().map(|bound| u8::from(x > *bound)).sum()
    }
}

/// Levels as [`Table`] takes them.
pub(super) const fn as_floats(levels: [i8; 16]) -> [f32; 16] {
    let mut floats = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        floats[i] = levels[i] as f32;
        i += 1;
    }
    floats
}
