//! Registers from memory and to it. An address that an instruction wants aligned is checked; lanes that a mask leaves out are not touched.

use super::{__m128, __m128i, __m256, __m256i, __m512, __m512i, Lanes};

/// Loads and stores of whole registers; of `aligned` ones addresses are multiples of their size.
macro_rules! whole {
    ($($name:ident($t:ty) -> $v:ident, $aligned:literal;)*) => {$(
        /// # Safety
        /// As many bytes as the register has are readable there.
        #[inline]
        pub unsafe fn $name(at: *const $t) -> $v {
            assert!(!$aligned || at.cast::<$v>().is_aligned(), "{} of {at:?}", stringify!($name));
            // SAFETY: the caller's promise.
            unsafe { at.cast::<$v>().read_unaligned() }
        }
    )*};
    ($($name:ident($t:ty) <- $v:ident, $aligned:literal;)*) => {$(
        /// # Safety
        /// As many bytes as the register has are writable there.
        #[inline]
        pub unsafe fn $name(at: *mut $t, a: $v) {
            assert!(!$aligned || at.cast::<$v>().is_aligned(), "{} to {at:?}", stringify!($name));
            // SAFETY: the caller's promise.
            unsafe { at.cast::<$v>().write_unaligned(a) }
        }
    )*};
}
whole! {
    _mm_load_ps(f32) -> __m128, true;
    _mm_load_si128(__m128i) -> __m128i, true;
    _mm_loadu_si128(__m128i) -> __m128i, false;
    _mm256_load_ps(f32) -> __m256, true;
    _mm256_load_si256(__m256i) -> __m256i, true;
    _mm256_loadu_ps(f32) -> __m256, false;
    _mm256_loadu_si256(__m256i) -> __m256i, false;
    _mm512_load_ps(f32) -> __m512, true;
    _mm512_load_si512(__m512i) -> __m512i, true;
    _mm512_loadu_ps(f32) -> __m512, false;
    _mm512_loadu_si512(__m512i) -> __m512i, false;
}
whole! {
    _mm_storeu_si128(__m128i) <- __m128i, false;
    _mm256_store_ps(f32) <- __m256, true;
    _mm256_store_si256(__m256i) <- __m256i, true;
    _mm256_storeu_ps(f32) <- __m256, false;
    _mm256_storeu_si256(__m256i) <- __m256i, false;
    _mm512_store_ps(f32) <- __m512, true;
    _mm512_store_si512(__m512i) <- __m512i, true;
    _mm512_storeu_ps(f32) <- __m512, false;
}

/// # Safety
/// Eight bytes are readable there.
#[inline]
pub unsafe fn _mm_loadl_epi64(at: *const __m128i) -> __m128i {
    // SAFETY: the caller's promise.
    __m128i::of([unsafe { at.cast::<u64>().read_unaligned() }, 0])
}

#[inline]
pub fn _mm256_broadcast_ss(at: &f32) -> __m256 {
    __m256::of([*at; 8])
}

/// # Safety
/// The numbers whose bits are set in the mask are readable, the first of them at `at`.
#[inline]
unsafe fn masked<T: Copy + Default, const N: usize>(mask: u64, at: *const T) -> [T; N] {
    // SAFETY: the caller's promise.
    std::array::from_fn(|i| if mask >> i & 1 == 1 { unsafe { at.add(i).read_unaligned() } } else { T::default() })
}

/// # Safety
/// The numbers whose bits are set in the mask are writable, the first of them at `at`.
#[inline]
unsafe fn put_masked<T: Copy, const N: usize>(mask: u64, at: *mut T, lanes: [T; N]) {
    for (i, lane) in lanes.into_iter().enumerate().filter(|(i, _)| mask >> i & 1 == 1) {
        // SAFETY: the caller's promise.
        unsafe { at.add(i).write_unaligned(lane) };
    }
}

/// The top bits of the lanes.
#[inline]
fn signs(mask: __m256i) -> u64 {
    let lanes: [u32; 8] = mask.lanes();
    lanes.iter().enumerate().fold(0, |mask, (i, lane)| mask | u64::from(lane >> 31) << i)
}

/// # Safety
/// The numbers that the mask names are readable.
#[inline]
pub unsafe fn _mm256_maskload_ps(at: *const f32, mask: __m256i) -> __m256 {
    // SAFETY: the caller's promise.
    __m256::of(unsafe { masked::<f32, 8>(signs(mask), at) })
}

/// # Safety
/// The numbers that the mask names are writable.
#[inline]
pub unsafe fn _mm256_maskstore_ps(at: *mut f32, mask: __m256i, a: __m256) {
    // SAFETY: the caller's promise.
    unsafe { put_masked::<f32, 8>(signs(mask), at, a.lanes()) }
}

macro_rules! by_mask_register {
    ($($name:ident($mask:ty, $t:ty; $n:tt) -> $v:ident;)*) => {$(
        /// # Safety
        /// The numbers that the mask names are readable.
        #[inline]
        pub unsafe fn $name(k: $mask, at: *const $t) -> $v {
            // SAFETY: the caller's promise.
            $v::of(unsafe { masked::<$t, $n>(k.into(), at) })
        }
    )*};
    ($($name:ident($mask:ty, $t:ty; $n:tt) <- $v:ident;)*) => {$(
        /// # Safety
        /// The numbers that the mask names are writable.
        #[inline]
        pub unsafe fn $name(at: *mut $t, k: $mask, a: $v) {
            // SAFETY: the caller's promise.
            unsafe { put_masked::<$t, $n>(k.into(), at, a.lanes()) }
        }
    )*};
}
by_mask_register! {
    _mm256_maskz_loadu_epi16(u16, i16; 16) -> __m256i;
    _mm256_maskz_loadu_epi32(u8, i32; 8) -> __m256i;
    _mm512_maskz_loadu_epi16(u32, i16; 32) -> __m512i;
    _mm512_maskz_loadu_epi32(u16, i32; 16) -> __m512i;
    _mm512_maskz_loadu_ps(u16, f32; 16) -> __m512;
}
by_mask_register! {
    _mm256_mask_storeu_ps(u8, f32; 8) <- __m256;
    _mm512_mask_storeu_ps(u16, f32; 16) <- __m512;
}
