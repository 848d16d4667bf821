//! Exponentials without branches or calls: loops over them vectorise.

/// e^x for x up to 0, to 2 in the last place; 0 below -87. Without branches or calls: a loop over it vectorises.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // 2^n times e^r with |r| up to half of ln 2, which comes in two parts for its bits.
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds
    let least = if x < -87.0 { -87.0 } else { x };
    let shifted = least * std::f32::consts::LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = least - n * 0.693_359_4 + n * 2.121_944_4e-4;
    // The series of e^r: what is left out is below 2^-26.
    let series =
        1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(MAGIC.to_bits()).wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { series * power }
}

/// x times the sigmoid of x, as exactly as [`exp`]. Without branches or calls, too.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    let small = exp(if x > 0.0 { -x } else { x });
    (if x > 0.0 { x } else { x * small }) / (1.0 + small)
}

/// The sigmoid of x, as exactly as [`exp`]. Without branches or calls, too.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let small = exp(if x > 0.0 { -x } else { x });
    (if x > 0.0 { 1.0 } else { small }) / (1.0 + small)
}

#[cfg(test)]
mod tests {
    use super::{exp, sigmoid, silu};

    #[test]
    fn exponentials_are_those_of_f64() {
        for i in 0..=870_000 {
            let x = -(i as f32) * 1e-4;
            let truth = f64::from(x).exp();
            let off = (f64::from(exp(x)) - truth).abs() / truth;
            assert!(off < 2.5e-7, "e^{x} is {truth} and not {}: {off}", exp(x));
        }
        assert_eq!((exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)), (1.0, 0.0, 0.0));
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sigmoid_units_are_those_of_f64() {
        for i in -1_000_000..=1_000_000 {
            let x = i as f32 * 1e-4;
            let truth = f64::from(x) / (1.0 + f64::from(-x).exp());
            let off = (f64::from(silu(x)) - truth).abs();
            assert!(off <= 4e-7 * truth.abs() + 2e-36, "silu({x}) is {truth} and not {}", silu(x));
            let truth = 1.0 / (1.0 + f64::from(-x).exp());
            let off = (f64::from(sigmoid(x)) - truth).abs();
            assert!(off <= 4e-7 * truth + 2e-36, "sigmoid({x}) is {truth} and not {}", sigmoid(x));
        }
        assert_eq!((silu(0.0), silu(f32::INFINITY), silu(-200.0)), (0.0, f32::INFINITY, 0.0));
        assert!(silu(f32::NAN).is_nan());
    }
}
