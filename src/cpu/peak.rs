//! What the multiplying units of a thread reach with nothing to load: the measure of every product with many columns.

use super::Isa;
use crate::clock;

/// What is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Codes of eight bits.
    Int8,
    /// Codes of sixteen.
    Int16,
    /// f32.
    F32,
}

impl Unit {
    /// All of them, the fastest first.
    pub const ALL: [Unit; 3] = [Unit::Int8, Unit::Int16, Unit::F32];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Int8 => "int8",
            Unit::Int16 => "int16",
            Unit::F32 => "f32",
        }
    }
}

/// 10^9 multiplications and additions per second, each counted, of this thread in the time that it has a core, with the instructions of
/// `isa`. Twelve sums stand side by side; it takes a few milliseconds. `None` where there are no such loops.
#[cfg(target_arch = "x86_64")]
pub fn gops(isa: Isa, unit: Unit) -> Option<f64> {
    use std::hint::black_box;
    const TURNS: usize = 200_000;
    if isa == Isa::Portable || !isa.is_supported() {
        return None;
    }
    let start = clock::computed();
    // SAFETY: this machine has the instructions.
    let numbers = unsafe {
        match (isa, unit) {
            (Isa::Avx512, Unit::F32) => floats_512(black_box(TURNS)),
            (Isa::Avx512, Unit::Int16) => words_512(black_box(TURNS)),
            (Isa::Avx512, Unit::Int8) => codes_512(black_box(TURNS)),
            (_, Unit::F32) => floats_256(black_box(TURNS)),
            (Isa::AvxVnni, Unit::Int16) => words_256(black_box(TURNS)),
            (Isa::AvxVnni, Unit::Int8) => codes_256(black_box(TURNS)),
            (_, Unit::Int16) => added_words_256(black_box(TURNS)),
            _ => pairs_256(black_box(TURNS)),
        }
    };
    Some(2e-9 * (TURNS * SUMS * numbers) as f64 / (clock::computed() - start).as_secs_f64())
}

/// As there are no such loops.
#[cfg(not(target_arch = "x86_64"))]
pub fn gops(_: Isa, _: Unit) -> Option<f64> {
    let _ = clock::computed;
    None
}

/// Products of an instruction that [`gops`] repeats.
pub const fn width(isa: Isa, unit: Unit) -> usize {
    let bytes = if matches!(isa, Isa::Avx512) { 64 } else { 32 };
    match unit {
        Unit::Int8 => bytes,
        Unit::Int16 => bytes / 2,
        Unit::F32 => bytes / 4,
    }
}

/// The clock of this thread's core while it computes, GHz: by a chain of multiplications, each of which waits for the one before and takes
/// three cycles on every processor that has AVX2. A millisecond or two.
#[cfg(target_arch = "x86_64")]
pub fn clock_ghz() -> Option<f64> {
    const TURNS: u32 = 100_000;
    const CHAIN: u32 = 8;
    let start = clock::computed();
    let mut number = std::hint::black_box(3u64);
    for _ in 0..TURNS {
        // SAFETY: registers only.
        unsafe {
            std::arch::asm!(
                "imul {n:e}, {n:e}", "imul {n:e}, {n:e}", "imul {n:e}, {n:e}", "imul {n:e}, {n:e}",
                "imul {n:e}, {n:e}", "imul {n:e}, {n:e}", "imul {n:e}, {n:e}", "imul {n:e}, {n:e}",
                n = inout(reg) number, options(nomem, nostack)
            );
        }
    }
    std::hint::black_box(number);
    Some(f64::from(3 * CHAIN * TURNS) / (clock::computed() - start).as_nanos() as f64)
}

/// As there is no such chain.
#[cfg(not(target_arch = "x86_64"))]
pub fn clock_ghz() -> Option<f64> {
    None
}

/// Sums side by side: enough for two instructions a cycle that take four or five cycles each.
#[cfg(target_arch = "x86_64")]
const SUMS: usize = 12;

/// A function that adds products in registers, and returns how many numbers an instruction multiplies.
#[cfg(target_arch = "x86_64")]
macro_rules! in_registers {
    ($name:ident, $features:literal, $numbers:literal, $zero:ident, $one:expr, |$sum:ident, $a:ident, $b:ident| $add:expr) => {
        #[cfg_attr(not(emulated), target_feature(enable = $features))]
        unsafe fn $name(turns: usize) -> usize {
            use crate::cpu::arch::*;
            use std::hint::black_box;
            let mut sums = [0; SUMS].map(|_| black_box($zero()));
            let ($a, $b) = (black_box($one), black_box($one));
            for _ in 0..turns {
                for $sum in &mut sums {
                    *$sum = $add;
                }
            }
            black_box(sums);
            $numbers
        }
    };
}

#[cfg(target_arch = "x86_64")]
in_registers!(codes_512, "avx512f,avx512vnni", 64, _mm512_setzero_si512, _mm512_set1_epi8(1), |sum, a, b| {
    _mm512_dpbusd_epi32(*sum, a, b)
});
#[cfg(target_arch = "x86_64")]
in_registers!(codes_256, "avx2,avxvnni", 32, _mm256_setzero_si256, _mm256_set1_epi8(1), |sum, a, b| {
    _mm256_dpbusd_avx_epi32(*sum, a, b)
});
// Its sums in 16 bits have to be added by more instructions: no product with many columns can come near.
#[cfg(target_arch = "x86_64")]
in_registers!(pairs_256, "avx2", 32, _mm256_setzero_si256, _mm256_set1_epi8(1), |sum, a, b| {
    _mm256_maddubs_epi16(*sum, _mm256_or_si256(a, b))
});
#[cfg(target_arch = "x86_64")]
in_registers!(words_512, "avx512f,avx512vnni", 32, _mm512_setzero_si512, _mm512_set1_epi16(1), |sum, a, b| {
    _mm512_dpwssd_epi32(*sum, a, b)
});
#[cfg(target_arch = "x86_64")]
in_registers!(words_256, "avx2,avxvnni", 16, _mm256_setzero_si256, _mm256_set1_epi16(1), |sum, a, b| {
    _mm256_dpwssd_avx_epi32(*sum, a, b)
});
// Products that are not of the sum would be computed once.
#[cfg(target_arch = "x86_64")]
in_registers!(added_words_256, "avx2", 16, _mm256_setzero_si256, _mm256_set1_epi16(1), |sum, a, b| {
    _mm256_add_epi32(*sum, _mm256_madd_epi16(*sum, _mm256_or_si256(a, b)))
});
#[cfg(target_arch = "x86_64")]
in_registers!(floats_512, "avx512f", 16, _mm512_setzero_ps, _mm512_set1_ps(1.0), |sum, a, b| {
    _mm512_fmadd_ps(a, b, *sum)
});
#[cfg(target_arch = "x86_64")]
in_registers!(floats_256, "avx2,fma", 8, _mm256_setzero_ps, _mm256_set1_ps(1.0), |sum, a, b| {
    _mm256_fmadd_ps(a, b, *sum)
});
