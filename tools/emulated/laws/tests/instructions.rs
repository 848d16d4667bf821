//! Each vector instruction in plain Rust gives what the processor's own gives, on random operands, wherever the machine at hand has it; and
//! each that a kernel uses is compared.

#![cfg(target_arch = "x86_64")]

use dynamicinfer::cpu::emulated::{self, Lanes};
use dynamicinfer::prng::Prng;
use std::arch::x86_64 as real;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Operands that each instruction is tried on.
const TRIALS: usize = 300;

/// What an instruction takes, with the processor's type for it.
trait Operand: Copy {
    type Real;
    fn random(rng: &mut Prng) -> Self;
    fn real(self) -> Self::Real;
}

/// What an instruction gives, as bytes that are compared: of a float that is none, only that.
trait Outcome {
    fn bytes(&self) -> Vec<u8>;
}

/// Numbers at whose sides conversions and comparisons change.
const CORNERS: [f32; 16] = [
    0.0,
    -0.0,
    0.5,
    -1.5,
    2.5,
    1e-40,
    -3e-39,
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    2147483520.0,
    2147483648.0,
    -2147483648.0,
    8388607.5,
];

/// A float: any bits, an ordinary number, one of few bits, so that sums lie half-way between two numbers, or a corner.
fn float(rng: &mut Prng, kind: u64) -> f32 {
    let bits = rng.next_u64() as u32;
    let ordinary = bits & 0x807f_ffff | (117 + rng.below(20) as u32) << 23;
    match kind {
        0 => f32::from_bits(bits),
        1 => f32::from_bits(ordinary),
        2 => f32::from_bits(ordinary & 0xffff_f000),
        _ => CORNERS[rng.below(CORNERS.len() as u64) as usize],
    }
}

/// Bytes of a register: floats of one kind or of all, any bytes, bytes at whose sides sums change, or places of lanes.
fn bytes<const N: usize>(rng: &mut Prng) -> [u8; N] {
    let mut bytes = [0; N];
    match rng.below(8) {
        kind @ 0..=4 => bytes.chunks_exact_mut(4).for_each(|lane| {
            let kind = if kind == 4 { rng.below(4) } else { kind };
            lane.copy_from_slice(&float(rng, kind).to_le_bytes());
        }),
        5 => bytes.fill_with(|| rng.next_u64() as u8),
        6 => bytes.fill_with(|| [0, 1, 0x7f, 0x80, 0x81, 0xff][rng.below(6) as usize]),
        // In lanes of 32 bits, so that they are counts of shifts, too.
        _ => bytes.iter_mut().step_by(4).for_each(|byte| *byte = rng.below(70) as u8),
    }
    bytes
}

macro_rules! registers {
    ($($name:ident $n:literal $($float:ty)?;)*) => {$(
        impl Operand for emulated::$name {
            type Real = real::$name;
            fn random(rng: &mut Prng) -> Self {
                Lanes::<[u8; $n]>::of(bytes(rng))
            }
            fn real(self) -> real::$name {
                // SAFETY: as many bytes.
                unsafe { std::mem::transmute(self) }
            }
        }
        impl Outcome for emulated::$name {
            fn bytes(&self) -> Vec<u8> {
                let bytes: [u8; $n] = self.lanes();
                $(
                    let lanes = bytes.as_chunks::<{ size_of::<$float>() }>().0.iter().map(|lane| <$float>::from_le_bytes(*lane));
                    let bytes: Vec<u8> = lanes.flat_map(|lane| if lane.is_nan() { <$float>::NAN } else { lane }.to_le_bytes()).collect();
                )?
                bytes.to_vec()
            }
        }
    )*};
}
registers! {
    __m128i 16;
    __m256i 32;
    __m512i 64;
    __m128 16 f32;
    __m256 32 f32;
    __m512 64 f32;
    __m256d 32 f64;
}

macro_rules! numbers {
    ($($name:ty: |$rng:ident| $random:expr, |$this:ident| $bytes:expr;)*) => {$(
        impl Operand for $name {
            type Real = $name;
            fn random($rng: &mut Prng) -> $name {
                $random
            }
            fn real(self) -> $name {
                self
            }
        }
        impl Outcome for $name {
            fn bytes(&self) -> Vec<u8> {
                let $this = *self;
                $bytes.to_le_bytes().to_vec()
            }
        }
    )*};
}
numbers! {
    u8: |rng| rng.next_u64() as u8, |a| a;
    u16: |rng| rng.next_u64() as u16, |a| a;
    u32: |rng| rng.next_u64() as u32, |a| a;
    u64: |rng| rng.next_u64(), |a| a;
    i8: |rng| rng.next_u64() as i8, |a| a;
    i16: |rng| rng.next_u64() as i16, |a| a;
    i32: |rng| rng.next_u64() as i32, |a| a;
    i64: |rng| rng.next_u64() as i64, |a| a;
    f32: |rng| { let kind = rng.below(4); float(rng, kind) }, |a| if a.is_nan() { f32::NAN } else { a };
    f64: |rng| f64::from(rng.next_u64() as u32), |a| a;
}

/// Memory that an instruction reads or writes, for registers of every size at every place of a line.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Memory([u8; 192]);

/// One comparison after another.
struct Law {
    rng: Prng,
    compared: BTreeSet<&'static str>,
    missing: BTreeSet<&'static str>,
}

impl Law {
    /// Asserts that the first `bytes` of both are the same.
    fn same<R: Outcome, S>(name: &str, found: R, expected: S, bytes: usize) {
        assert_eq!(size_of::<R>(), size_of::<S>(), "{name}");
        // SAFETY: as many bytes, of which any are a value.
        let expected: R = unsafe { std::mem::transmute_copy(&expected) };
        assert_eq!(found.bytes()[..bytes], expected.bytes()[..bytes], "{name}");
    }

    fn none<R: Outcome, S>(&mut self, name: &str, _: usize, found: impl Fn() -> R, expected: impl Fn() -> S) {
        Law::same(name, found(), expected(), size_of::<R>());
    }

    fn one<A: Operand, R: Outcome, S>(
        &mut self,
        name: &str,
        bytes: usize,
        found: impl Fn(A) -> R,
        expected: impl Fn(A::Real) -> S,
    ) {
        for _ in 0..TRIALS {
            let a = A::random(&mut self.rng);
            Law::same(name, found(a), expected(a.real()), bytes.min(size_of::<R>()));
        }
    }

    fn two<A: Operand, B: Operand, R: Outcome, S>(
        &mut self,
        name: &str,
        bytes: usize,
        found: impl Fn(A, B) -> R,
        expected: impl Fn(A::Real, B::Real) -> S,
    ) {
        for _ in 0..TRIALS {
            let (a, b) = (A::random(&mut self.rng), B::random(&mut self.rng));
            Law::same(name, found(a, b), expected(a.real(), b.real()), bytes.min(size_of::<R>()));
        }
    }

    fn three<A: Operand, B: Operand, C: Operand, R: Outcome, S>(
        &mut self,
        name: &str,
        _: usize,
        found: impl Fn(A, B, C) -> R,
        expected: impl Fn(A::Real, B::Real, C::Real) -> S,
    ) {
        for _ in 0..TRIALS {
            let (a, b, c) = (A::random(&mut self.rng), B::random(&mut self.rng), C::random(&mut self.rng));
            Law::same(name, found(a, b, c), expected(a.real(), b.real(), c.real()), size_of::<R>());
        }
    }

    fn four<A: Operand, B: Operand, C: Operand, D: Operand, R: Outcome, S>(
        &mut self,
        name: &str,
        _: usize,
        found: impl Fn(A, B, C, D) -> R,
        expected: impl Fn(A::Real, B::Real, C::Real, D::Real) -> S,
    ) {
        for _ in 0..TRIALS {
            let (a, b) = (A::random(&mut self.rng), B::random(&mut self.rng));
            let (c, d) = (C::random(&mut self.rng), D::random(&mut self.rng));
            Law::same(name, found(a, b, c, d), expected(a.real(), b.real(), c.real(), d.real()), size_of::<R>());
        }
    }

    /// An instruction that reads memory, with an operand or none (`()`).
    fn load<A: Operand, R: Outcome, S>(
        &mut self,
        name: &str,
        step: usize,
        found: impl Fn(*const u8, A) -> R,
        expected: impl Fn(*const u8, A::Real) -> S,
    ) {
        for trial in 0..TRIALS {
            let (memory, a) = (Memory(bytes(&mut self.rng)), A::random(&mut self.rng));
            let at = memory.0[trial * step % 128..].as_ptr();
            Law::same(name, found(at, a), expected(at, a.real()), size_of::<R>());
        }
    }

    /// An instruction that writes it: both find and leave the same there.
    fn store<A: Operand, B: Operand>(
        &mut self,
        name: &str,
        step: usize,
        found: impl Fn(*mut u8, A, B),
        expected: impl Fn(*mut u8, A::Real, B::Real),
    ) {
        for trial in 0..TRIALS {
            let (a, b) = (A::random(&mut self.rng), B::random(&mut self.rng));
            let mut left = Memory(bytes(&mut self.rng));
            let mut right = left;
            found(left.0[trial * step % 128..].as_mut_ptr(), a, b);
            expected(right.0[trial * step % 128..].as_mut_ptr(), a.real(), b.real());
            assert_eq!(left.0, right.0, "{name}");
        }
    }
}

/// As an operand that is none.
impl Operand for () {
    type Real = ();
    fn random(_: &mut Prng) {}
    fn real(self) {}
}

/// Compares instructions, if the machine has the features: by how many operands they take, each with the constants that it is tried with.
macro_rules! compare {
    (@ $law:ident none($bytes:expr) $name:ident $(<$imm:tt>)?) => {
        $law.none(stringify!($name), $bytes, || emulated::$name$(::<$imm>)?(), || unsafe { real::$name$(::<$imm>)?() })
    };
    (@ $law:ident one($bytes:expr) $name:ident $(<$imm:tt>)?) => {
        $law.one(stringify!($name), $bytes, emulated::$name$(::<$imm>)?, |a| unsafe { real::$name$(::<$imm>)?(a) })
    };
    (@ $law:ident two($bytes:expr) $name:ident $(<$imm:tt>)?) => {
        $law.two(stringify!($name), $bytes, emulated::$name$(::<$imm>)?, |a, b| unsafe { real::$name$(::<$imm>)?(a, b) })
    };
    (@ $law:ident three($bytes:expr) $name:ident $(<$imm:tt>)?) => {
        $law.three(stringify!($name), $bytes, emulated::$name$(::<$imm>)?, |a, b, c| unsafe { real::$name$(::<$imm>)?(a, b, c) })
    };
    (@ $law:ident four($bytes:expr) $name:ident $(<$imm:tt>)?) => {
        $law.four(stringify!($name), $bytes, emulated::$name$(::<$imm>)?, |a, b, c, d| unsafe { real::$name$(::<$imm>)?(a, b, c, d) })
    };
    (@ $law:ident load($step:expr) $name:ident) => {
        $law.load(
            stringify!($name),
            $step,
            |at, ()| unsafe { emulated::$name(at.cast()) },
            |at, ()| unsafe { real::$name(at.cast()) },
        )
    };
    // Masks come before the address or behind it.
    (@ $law:ident load_by($mask:ty) $name:ident) => {
        $law.load(
            stringify!($name),
            1,
            |at, k: $mask| unsafe { emulated::$name(k, at.cast()) },
            |at, k| unsafe { real::$name(k, at.cast()) },
        )
    };
    (@ $law:ident load_by_register($step:expr) $name:ident) => {
        $law.load(
            stringify!($name),
            $step,
            |at, k: emulated::__m256i| unsafe { emulated::$name(at.cast(), k) },
            |at, k| unsafe { real::$name(at.cast(), k) },
        )
    };
    (@ $law:ident store($v:ident, $step:expr) $name:ident) => {
        $law.store(
            stringify!($name),
            $step,
            |at, (), a: emulated::$v| unsafe { emulated::$name(at.cast(), a) },
            |at, (), a| unsafe { real::$name(at.cast(), a) },
        )
    };
    (@ $law:ident store_by($v:ident, $mask:ty) $name:ident) => {
        $law.store(
            stringify!($name),
            1,
            |at, k: $mask, a: emulated::$v| unsafe { emulated::$name(at.cast(), k, a) },
            |at, k, a| unsafe { real::$name(at.cast(), k, a) },
        )
    };
    ($law:ident: [$($features:tt)+] { $($kind:ident $with:tt { $($name:ident $([$($imm:tt)+])?,)* })* }) => {
        let has = $(std::arch::is_x86_feature_detected!($features) &&)+ true;
        $($(
            $law.compared.insert(stringify!($name));
            if has {
                compare!(# $law $kind $with $name [$($($imm)+)?]);
            } else {
                $law.missing.insert(stringify!($name));
            }
        )*)*
    };
    (# $law:ident $kind:ident () $($name:tt)+) => { compare!(# $law $kind (usize::MAX) $($name)+) };
    (# $law:ident $kind:ident $with:tt $name:ident []) => { compare!(@ $law $kind $with $name) };
    (# $law:ident $kind:ident $with:tt $name:ident [$($imm:tt)+]) => { $(compare!(@ $law $kind $with $name <$imm>);)+ };
}

fn compare_128(law: &mut Law) {
    compare!(law: ["ssse3" "sse4.1"] {
        none() { _mm_setzero_si128, }
        one() {
            _mm_cvtsi128_si32, _mm_cvtsi128_si64, _mm_cvtsi32_si128, _mm_cvtsi64_si128, _mm_cvtss_f32, _mm_minpos_epu16,
            _mm_extract_epi32[0 2 3], _mm_extract_epi64[0 1], _mm_movehdup_ps, _mm_set1_epi16, _mm_set1_epi32,
            _mm_set1_epi8, _mm_shuffle_epi32[0b10_01_10_01 0b11_11_10_01 0b00_01_10_11], _mm_slli_epi16[0 4 15 16],
            _mm_srli_epi16[0 4 15 16], _mm_srli_epi32[0 2 31 32],
        }
        two() {
            _mm_add_epi64, _mm_add_epi8, _mm_add_ps, _mm_add_ss, _mm_and_si128, _mm_max_epu16, _mm_max_ps, _mm_max_ss, _mm_movehl_ps,
            _mm_or_si128, _mm_sad_epu8, _mm_set_epi64x, _mm_shuffle_epi8, _mm_sub_epi8, _mm_unpackhi_epi64,
            _mm_unpacklo_epi64, _mm_xor_si128,
        }
        four() { _mm_setr_epi32, }
        load(1) { _mm_loadl_epi64, _mm_loadu_si128, }
        load(16) { _mm_load_ps, _mm_load_si128, }
        store(__m128i, 1) { _mm_storeu_si128, }
    });
    compare!(law: ["avx2"] { two() { _mm_srlv_epi32, _mm_srlv_epi64, } });
    compare!(law: ["f16c"] { one() { _mm_cvtph_ps, } });
}

fn compare_256(law: &mut Law) {
    compare!(law: ["avx2"] {
        none() { _mm256_setzero_ps, _mm256_setzero_si256, }
        one() {
            _mm256_abs_epi8, _mm256_broadcastsi128_si256, _mm256_broadcastss_ps, _mm256_castpd_ps,
            _mm256_castps256_ps128, _mm256_castps_pd, _mm256_castps_si256, _mm256_castsi256_ps,
            _mm256_castsi256_si128, _mm256_cvtepi32_ps, _mm256_cvtepi8_epi32, _mm256_cvtepu16_epi32,
            _mm256_cvtepu8_epi32, _mm256_cvtps_epi32, _mm256_extractf128_ps[0 1], _mm256_extracti128_si256[0 1],
            _mm256_permute4x64_epi64[0b11_01_10_00 0b00_11_01_10], _mm256_set1_epi16, _mm256_set1_epi32,
            _mm256_set1_epi64x, _mm256_set1_epi8, _mm256_set1_pd, _mm256_set1_ps, _mm256_slli_epi16[0 6 15 16],
            _mm256_slli_epi32[0 8 31 32], _mm256_srai_epi16[0 8 15 16], _mm256_srli_epi16[0 4 15 16],
            _mm256_srli_epi32[0 4 31 32],
        }
        one(16) { _mm256_castps128_ps256, }
        two() {
            _mm256_add_epi16, _mm256_add_epi32, _mm256_add_epi64, _mm256_add_epi8, _mm256_add_ps, _mm256_and_ps,
            _mm256_and_si256, _mm256_andnot_ps, _mm256_cmpeq_epi8, _mm256_cmpgt_epi32, _mm256_div_ps,
            _mm256_insertf128_ps[0 1], _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_max_epi32, _mm256_max_epu16, _mm256_max_ps,
            _mm256_min_ps, _mm256_mul_ps, _mm256_mulhrs_epi16, _mm256_or_si256, _mm256_packs_epi16,
            _mm256_packs_epi32, _mm256_permute2f128_ps[0x00 0x11 0x20 0x81],
            _mm256_permute2x128_si256[0x20 0x31 0x13 0x08], _mm256_permutevar8x32_epi32, _mm256_permutevar8x32_ps,
            _mm256_sad_epu8, _mm256_set_m128i, _mm256_shuffle_epi8, _mm256_shuffle_ps[0b10_00_10_00 0x44 0xee 0x1b],
            _mm256_sign_epi8, _mm256_sll_epi16, _mm256_sll_epi32, _mm256_sllv_epi32, _mm256_srl_epi16,
            _mm256_srlv_epi32, _mm256_srlv_epi64, _mm256_sub_epi16, _mm256_sub_epi32, _mm256_sub_epi8,
            _mm256_unpackhi_epi16, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpackhi_epi8,
            _mm256_unpackhi_pd, _mm256_unpackhi_ps, _mm256_unpacklo_epi16, _mm256_unpacklo_epi32,
            _mm256_unpacklo_epi64, _mm256_unpacklo_epi8, _mm256_unpacklo_pd, _mm256_unpacklo_ps, _mm256_xor_ps,
            _mm256_xor_si256,
        }
        four() { _mm256_setr_epi64x, }
        load(1) { _mm256_loadu_ps, _mm256_loadu_si256, }
        load(32) { _mm256_load_ps, _mm256_load_si256, }
        load_by_register(1) { _mm256_maskload_ps, }
        store(__m256, 1) { _mm256_storeu_ps, }
        store(__m256, 32) { _mm256_store_ps, }
        store(__m256i, 1) { _mm256_storeu_si256, }
        store(__m256i, 32) { _mm256_store_si256, }
        store_by(__m256, emulated::__m256i) { _mm256_maskstore_ps, }
    });
    compare!(law: ["avx"] {
        two() {
            _mm256_cmp_ps[
                { emulated::_CMP_EQ_OQ } { emulated::_CMP_LT_OQ } { emulated::_CMP_LE_OQ } { emulated::_CMP_GT_OQ }
                { emulated::_CMP_GE_OQ }
            ],
        }
    });
    compare!(law: ["fma"] { three() { _mm256_fmadd_ps, _mm256_fmsub_ps, _mm256_fnmadd_ps, } });
    compare!(law: ["f16c"] { one() { _mm256_cvtph_ps, } });
}

fn compare_512(law: &mut Law) {
    compare!(law: ["avx512f" "avx512bw" "avx512dq" "avx512vl"] {
        none() { _mm512_setzero_ps, _mm512_setzero_si512, }
        one() {
            _mm512_abs_ps, _mm512_broadcast_i32x4, _mm512_broadcast_i64x4, _mm512_castps512_ps256, _mm512_castps_si512,
            _mm512_castsi512_ps, _mm512_castsi512_si128, _mm512_castsi512_si256, _mm512_cvtepi32_epi16,
            _mm512_cvtepi32_epi8, _mm512_cvtepi32_ps, _mm512_cvtepi64_epi32, _mm512_cvtepi8_epi32,
            _mm512_cvtepu16_epi32, _mm512_cvtepu8_epi32, _mm512_cvtph_ps, _mm512_cvtps_epi32,
            _mm512_extractf32x8_ps[0 1], _mm512_extracti64x4_epi64[0 1], _mm512_reduce_add_ps, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_epi8,
            _mm512_set1_ps, _mm512_slli_epi16[0 8 15 16], _mm512_slli_epi32[0 8 31 32], _mm512_srai_epi32[0 4 31 32],
            _mm512_srli_epi16[0 4 15 16], _mm512_srli_epi32[0 4 31 32], _mm512_zextsi256_si512,
        }
        one(16) { _mm512_castps128_ps512, _mm512_castsi128_si512, }
        one(32) { _mm512_castps256_ps512, _mm512_castsi256_si512, }
        two() {
            _mm512_add_epi32, _mm512_add_epi64, _mm512_add_epi8, _mm512_add_ps, _mm512_and_si512,
            _mm512_insertf32x8[0 1], _mm512_inserti64x4[0 1], _mm512_max_epu16, _mm512_max_ps, _mm512_min_ps, _mm512_mul_ps,
            _mm512_mulhrs_epi16, _mm512_mullo_epi32, _mm512_or_si512, _mm512_packs_epi32, _mm512_permutexvar_epi32,
            _mm512_permutexvar_epi64, _mm512_permutexvar_ps, _mm512_rolv_epi32, _mm512_rorv_epi32, _mm512_shuffle_epi8,
            _mm512_shuffle_i32x4[0b01_00_01_00 0b10_00_10_00 0b11_01_11_01 0b00_01_10_11],
            _mm512_shuffle_i64x2[0b01_01_00_00 0b10_00_10_00 0b00_01_10_11], _mm512_srlv_epi32, _mm512_sub_epi32,
            _mm512_sub_epi8, _mm512_sub_ps, _mm512_test_epi8_mask, _mm512_unpackhi_epi16, _mm512_unpackhi_epi32,
            _mm512_unpackhi_epi64, _mm512_unpackhi_epi8, _mm512_unpacklo_epi16, _mm512_unpacklo_epi32,
            _mm512_unpacklo_epi64, _mm512_unpacklo_epi8, _mm512_xor_ps, _mm512_xor_si512,
            _mm512_cmp_ps_mask[
                { emulated::_CMP_EQ_OQ } { emulated::_CMP_LT_OQ } { emulated::_CMP_LE_OQ } { emulated::_CMP_GT_OQ }
                { emulated::_CMP_GE_OQ }
            ],
        }
        three() {
            _mm256_ternarylogic_epi32[0xCA 0x1e 0x00 0xff], _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_fnmadd_ps,
            _mm512_mask_broadcast_i32x4, _mm512_mask_set1_epi32, _mm512_mask_srli_epi32[0 4 31 32], _mm512_maskz_div_ps,
            _mm512_maskz_mul_ps, _mm512_permutex2var_epi16, _mm512_permutex2var_epi32,
            _mm512_ternarylogic_epi32[0xCA 0x6a 0x00 0xff],
        }
        four() { _mm512_mask_add_epi8, }
        load(1) { _mm512_loadu_ps, _mm512_loadu_si512, }
        load(64) { _mm512_load_ps, _mm512_load_si512, }
        load_by(u8) { _mm256_maskz_loadu_epi32, }
        load_by(u32) { _mm512_maskz_loadu_epi16, }
        load_by(u16) { _mm256_maskz_loadu_epi16, _mm512_maskz_loadu_epi32, _mm512_maskz_loadu_ps, }
        store(__m512, 1) { _mm512_storeu_ps, }
        store(__m512, 64) { _mm512_store_ps, }
        store(__m512i, 64) { _mm512_store_si512, }
        store_by(__m256, u8) { _mm256_mask_storeu_ps, }
        store_by(__m512, u16) { _mm512_mask_storeu_ps, }
    });
    compare!(law: ["avx512vnni"] { three() { _mm512_dpbusd_epi32, _mm512_dpwssd_epi32, } });
    compare!(law: ["avx512vpopcntdq"] { one() { _mm512_popcnt_epi64, } });
    compare!(law: ["avxvnni"] { three() { _mm256_dpbusd_avx_epi32, _mm256_dpwssd_avx_epi32, } });
}

impl<const N: usize, T: Operand<Real = T>> Operand for [T; N] {
    type Real = [T; N];
    fn random(rng: &mut Prng) -> Self {
        std::array::from_fn(|_| T::random(rng))
    }
    fn real(self) -> Self {
        self
    }
}

/// What takes many numbers, or a number by reference; and what differs in which of two NaN is left.
fn compare_others(law: &mut Law) {
    macro_rules! setr {
        ($($features:tt $name:ident($t:ty; $n:literal): $($x:ident)+;)*) => {$(
            law.compared.insert(stringify!($name));
            if std::arch::is_x86_feature_detected!($features) {
                law.one(
                    stringify!($name),
                    usize::MAX,
                    |[$($x),+]: [$t; $n]| emulated::$name($($x),+),
                    |[$($x),+]| unsafe { real::$name($($x),+) },
                );
            } else {
                law.missing.insert(stringify!($name));
            }
        )*};
    }
    setr! {
        "sse2" _mm_setr_epi8(i8; 16): a b c d e f g h i j k l m n o p;
        "sse2" _mm_setr_epi16(i16; 8): a b c d e f g h;
        "avx" _mm256_setr_epi8(i8; 32):
            a b c d e f g h i j k l m n o p a2 b2 c2 d2 e2 f2 g2 h2 i2 j2 k2 l2 m2 n2 o2 p2;
        "avx" _mm256_setr_epi32(i32; 8): a b c d e f g h;
        "avx512f" _mm512_setr_epi64(i64; 8): a b c d e f g h;
        "avx512f" _mm512_setr_ps(f32; 16): a b c d e f g h i j k l m n o p;
    }
    law.compared.extend(["_mm256_broadcast_ss", "_mm512_reduce_max_ps"]);
    if std::arch::is_x86_feature_detected!("avx") {
        law.one(
            "_mm256_broadcast_ss",
            usize::MAX,
            |a: f32| emulated::_mm256_broadcast_ss(&a),
            |a| unsafe { real::_mm256_broadcast_ss(&a) },
        );
    }
    // The order of its comparisons is the compiler's: numbers alone, of which none is a zero with a sign.
    if std::arch::is_x86_feature_detected!("avx512f") {
        let plain = |numbers: [f32; 16]| numbers.map(|a| if a.is_nan() || a == 0.0 { 1.0 } else { a });
        law.one(
            "_mm512_reduce_max_ps",
            usize::MAX,
            |a: [f32; 16]| emulated::_mm512_reduce_max_ps(emulated::__m512::of(plain(a))),
            |a| unsafe { real::_mm512_reduce_max_ps(real::_mm512_loadu_ps(plain(a).as_ptr())) },
        );
    }
    // The same instruction, encoded otherwise: processors with AVX-512 have it where they do not have AVX-VNNI.
    if std::arch::is_x86_feature_detected!("avx512vnni") && std::arch::is_x86_feature_detected!("avx512vl") {
        law.three("_mm256_dpbusd_epi32", 0, emulated::_mm256_dpbusd_avx_epi32, |a, b, c| unsafe {
            real::_mm256_dpbusd_epi32(a, b, c)
        });
        law.three("_mm256_dpwssd_epi32", 0, emulated::_mm256_dpwssd_avx_epi32, |a, b, c| unsafe {
            real::_mm256_dpwssd_epi32(a, b, c)
        });
        law.missing.remove("_mm256_dpbusd_avx_epi32");
        law.missing.remove("_mm256_dpwssd_avx_epi32");
    }
}

#[test]
fn every_instruction_gives_what_the_processor_gives() {
    let mut law = Law { rng: Prng::new(7), compared: BTreeSet::new(), missing: BTreeSet::new() };
    compare_128(&mut law);
    compare_256(&mut law);
    compare_512(&mut law);
    compare_others(&mut law);
    if !law.missing.is_empty() {
        println!("not compared, as this processor does not have them: {:?}", law.missing);
    }
    let used: BTreeSet<String> = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cpu"))
        .iter()
        .flat_map(|source| instructions(&std::fs::read_to_string(source).unwrap()))
        .collect();
    assert!(used.len() > 200, "the sources of kernels are read");
    let without: Vec<&String> = used.iter().filter(|name| !law.compared.contains(name.as_str())).collect();
    assert!(without.is_empty(), "used by kernels or emulated, and not compared: write rows for {without:?}");
}

/// All files of Rust in a folder and those below it.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// The names of instructions in a text, but for those that compute nothing.
fn instructions(text: &str) -> BTreeSet<String> {
    const NOTHING: [&str; 3] = ["_mm_clflush", "_mm_mfence", "_mm_prefetch"];
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let named = words.filter(|word| ["_mm_", "_mm256_", "_mm512_"].iter().any(|start| word.starts_with(start)));
    named.filter(|word| !NOTHING.contains(word)).map(str::to_owned).collect()
}
