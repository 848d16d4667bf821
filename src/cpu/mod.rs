//! The CPU's kernels and its thread pool: the host half of the FFN, and all of it on a machine without a GPU.
//!
//! A kernel is two primitives over rows of weights in the form of [`crate::formats::rows`], for one or many
//! columns (tokens) at once: `dot` (gate, up, q, k, v, o, head: row times input) and `axpy` (down: output plus
//! activation times row). [`Kernels`] holds the versions for this machine, chosen once at run time.

// What is unsafe where an instruction may be missing is not where it is a function in plain Rust.
#![cfg_attr(emulated, allow(unused_unsafe))]

/// Defines a dot over rows from one over a row and a column, for instruction sets without tiles of registers.
macro_rules! dot_rows {
    ($(#[$attribute:meta])? $name:ident, $row:ident) => {
        $(#[$attribute])?
        unsafe fn $name(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
            for r in 0..count {
                for b in 0..x.n {
                    // SAFETY: the caller's promises.
                    unsafe { *y.add(b * stride + r) = $row(rows.row(r), x, b) };
                }
            }
        }
    };
}

/// Splits `count` into tiles of the sizes in the list, which go from the largest to 1, and runs the body for each, with its size and
/// start.
macro_rules! tiles {
    ($count:expr, [$($size:literal),*], |$n:ident, $start:ident| $body:block) => {{
        let mut $start = 0;
        while $start < $count {
            let left = $count - $start;
            $(if left >= $size {
                const $n: usize = $size;
                $body
                $start += $size;
                continue;
            })*
        }
    }};
}

pub mod aligned;
mod arch;
pub mod attend;
mod avx2;
mod avx512;
mod columns;
#[cfg(all(emulated, target_arch = "x86_64"))]
pub mod emulated;
pub mod floats;
pub mod gemm;
pub mod peak;
mod portable;
pub mod recurrence;
pub mod reference;
mod rounding;
pub mod shadow;
pub mod sign;
pub mod sixteen;
pub mod thread_pool;

pub use columns::Columns;
pub use floats::FloatPanels;
pub use gemm::Panels;
pub use rounding::Bits;
pub use sixteen::SixteenPanels;
pub use thread_pool::ThreadPool;

pub use crate::formats::rows::Rows;

use crate::config;
use crate::formats::blocks::BlockType;
use crate::formats::rows::{GROUP, Input, PACK, Quant};
use floats::{Form, Room, Tiles};
use gemm::{Across, Fill, Gemm, ScaledAcross};
use recurrence::Recurrences;
use serde::{Deserialize, Serialize};
use sixteen::Sixteen;
use std::ops::Range;

/// Most columns for which the FFN runs neuron block by neuron block and reads each once; with more columns it is bound by arithmetic
/// and runs by tiles (`engine/ffn/`).
pub const MAX_COLUMNS: usize = 32;

/// So few columns each have the bits that they have alone, with AVX-512 and weights of whole matrices that are quantised.
pub const FEW_COLUMNS: usize = 7;

/// `y[b * stride + r] = row r · x[b]`, for `count` rows and each column b.
///
/// # Safety
/// `rows` are `Quant::row_bytes(x.cols)` readable bytes each (of all but q8_0 and q4_0 the numbers are enough; kernels read no
/// byte behind them), of the function's own type; `y` is
/// writable at every index named; the CPU has the instructions the function was compiled for.
pub type Dot = unsafe fn(rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize);

/// With fewer columns than this, turning rows of floats for a tile takes longer than the row kernels do.
const MIN_FLOATS: usize = 48;

/// Rows that [`Kernels::products`] gives a [`Gemm`] at a time.
const MAX_GEMM_ROWS: usize = 256;

/// Most rows that one `axpy` call adds: the output is loaded and stored once for all of them.
pub const MAX_AXPY_ROWS: usize = 4;

/// `out[b] += sum over r of a[r * n + b] * row r`, for each column b of n. For grouped types `out` is in the order of
/// `rows::axpy_place`; `rows::add_axpy` puts it right. `ahead`: bytes from the last row to what will be read next, for kernels that
/// read rows from memory and not after a [`Touch`]; 0 leaves the choice to the kernel.
///
/// # Safety
/// The rows are `Quant::row_bytes(cols)` readable bytes each (of f32 and f16 the numbers are enough); `a.len()` is `rows.len()` times n
/// and `out.len()` n times `cols`.
pub type Axpy = unsafe fn(rows: &[*const u8], ahead: usize, a: &[f32], cols: usize, out: &mut [f32]);

/// Reads a row from front to back without using it, so that it is in the caches when it is used. `ahead` as in [`Rows`]; 0 leaves the
/// choice to the kernel.
///
/// # Safety
/// `row` points at `bytes` readable bytes.
pub type Touch = unsafe fn(row: *const u8, bytes: usize, ahead: usize);

/// The [`Touch`] of instruction sets whose kernels read rows one by one, in the order of memory anyway.
unsafe fn touch_nothing(_: *const u8, _: usize, _: usize) {}

/// The smallest multiple of `ahead` that is at least `least`: for grouped rows a number of whole rows, so that their scales are
/// prefetched, too.
#[cfg(target_arch = "x86_64")]
#[inline]
fn whole_rows(ahead: usize, least: usize) -> usize {
    if ahead == 0 { least } else { ahead * least.div_ceil(ahead) }
}

/// Prefetches the line that holds the byte at `at` into L2: on a Zen 4 rows that lie apart came at 18 GB/s that way and at 14 with
/// prefetches into L1, which allows few misses at a time. Many prefetches in a row are dropped, so each stands beside a load.
#[inline]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint; no address is wrong.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Evicts these bytes from the CPU's caches, so that the next read comes from memory. Only on x86-64, whose kernels are limited by memory.
pub fn flush(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the lines are readable, and every processor has the instructions.
    unsafe {
        use std::arch::x86_64::{_mm_clflush, _mm_mfence};
        bytes.iter().step_by(64).for_each(|line| _mm_clflush(line));
        _mm_mfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// A table by type, of what our own types have and what block types have.
const fn by_type<T: Copy>(own: [T; Quant::OWN.len()], blocks: [T; BlockType::COUNT]) -> [T; Quant::COUNT] {
    let mut all = [own[0]; Quant::COUNT];
    let mut i = 0;
    while i < Quant::COUNT {
        all[i] = if i < own.len() { own[i] } else { blocks[i - own.len()] };
        i += 1;
    }
    all
}

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// The instruction set that they need.
    pub isa: Isa,
    dots: [Dot; Quant::COUNT],
    axpys: [Axpy; Quant::COUNT],
    gemms: [Option<Gemm>; Quant::COUNT],
    /// The same with inputs of seven bits, where that is faster.
    gemms_seven: [Option<Gemm>; Quant::COUNT],
    /// With so many columns or more a whole matrix of a quantised type is multiplied faster as a [`Gemm`] than row by row; by type.
    fewest_codes: [usize; Quant::COUNT],
    /// Columns of a panel of [`Panels`].
    panel_width: usize,
    /// Fills a panel of [`Panels`].
    fill_panel: Fill,
    /// Products with [`Panels`] that are summed over rows; `None` if there is none that is faster than in f32.
    across: Option<Across>,
    /// By type, products with few columns that are summed over rows.
    scaled: [Option<ScaledAcross>; Quant::COUNT],
    /// Products of floats of two bytes with many columns in codes of 16 bits; `None` if there are none that are faster than in f32.
    pub sixteen: Option<Sixteen>,
    /// Products with many columns in f32.
    pub tiles: Tiles,
    /// The recurrences of linear attention.
    pub recurrences: Recurrences,
    /// How exact products with many columns are.
    pub prefill: Prefill,
    /// With [`Prefill::Int8`], whether the columns that meet weights which are floats of two bytes are rounded where that is faster: the many of
    /// a prompt to codes of 16 bits, as then are weights which are small beside their neighbours ([`sixteen`]), and a long one to f16.
    pub rounds_floats: bool,
    /// With [`Prefill::Int8`], whether a prompt's inputs get seven bits in place of eight where they meet weights of types for which that is
    /// faster.
    pub seven_bits: bool,
    /// Brings a row into the caches before it is used; does nothing for instruction sets whose kernels read rows one by one.
    pub touch: Touch,
    /// By type, whether a down row is best added to one column's output as it is read from memory, with prefetches; otherwise `touch`
    /// reads it first.
    adds_as_read: [bool; Quant::COUNT],
    /// Whether chosen neurons come as fast as all of them where few are left out. This decides what is computed, and so the last bits of
    /// sums: it does not differ between [`Kernels::kinds`] of which one was taken in part.
    pub lists_as_fast: bool,
    /// By type, the down rows that are added to one column's output at a time: more than one where storing the output takes the most
    /// time.
    rows_together: [usize; Quant::COUNT],
}

/// How products with more than [`MAX_COLUMNS`] columns, those of a prompt, are computed. With fewer, `Int8` may take the same route: the
/// row kernels round their input in the same way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prefill {
    /// In f32 throughout: weights as they are, inputs not rounded.
    Exact,
    /// Inputs as int8, each 32 with a step of their own, where weights are quantised (of seven bits where [`Kernels::bits`] says so); where they
    /// are floats f32, or what [`Kernels::rounds_floats`] says.
    #[default]
    Int8,
    /// The same with one step for all numbers of an input, as integer units without steps for groups want it (W8A8).
    Int8PerTensor,
}

impl Prefill {
    /// The name that the option has.
    pub const fn name(self) -> &'static str {
        match self {
            Prefill::Exact => "exact",
            Prefill::Int8 => "int8",
            Prefill::Int8PerTensor => "int8-per-tensor",
        }
    }
}

/// The form in which a product with many columns takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ManyForm {
    /// As [`Kernels::dot`] does.
    Rows,
    /// [`Panels`].
    Codes,
    /// [`SixteenPanels`].
    Sixteen,
    /// [`FloatPanels`].
    Floats,
}

/// An instruction set that there are kernels for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// AVX2, FMA, F16C and AVX-VNNI, which only products with many columns use.
    AvxVnni,
    /// AVX2, FMA and F16C.
    Avx2,
    /// Plain Rust, for every processor.
    Portable,
}

impl Isa {
    /// All of them, the fastest first.
    pub const ALL: [Isa; 4] = [Isa::Avx512, Isa::AvxVnni, Isa::Avx2, Isa::Portable];

    /// The name that `DYNAMICINFER_ISA` takes and that messages use.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }

    /// The instruction set that `DYNAMICINFER_ISA` names, `None` if that is not set. The error says that there is none of that name, or
    /// that this machine does not have it.
    pub fn asked_for() -> Result<Option<Isa>, String> {
        let Some(name) = config::instruction_set() else { return Ok(None) };
        match Isa::ALL.into_iter().find(|isa| isa.name() == name) {
            None => {
                Err(format!("DYNAMICINFER_ISA={name} is no instruction set: take avx512, avxvnni, avx2 or portable"))
            }
            Some(isa) if !isa.is_supported() => {
                Err(format!("DYNAMICINFER_ISA={name}: this processor does not have it; take another or unset it"))
            }
            Some(isa) => Ok(Some(isa)),
        }
    }

    /// Whether this processor has all the instructions.
    pub fn is_supported(self) -> bool {
        if cfg!(all(emulated, target_arch = "x86_64")) {
            return true;
        }
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Isa::Avx2.is_supported() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                Isa::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

impl Kernels {
    /// The kernels of the instruction set that [`config::instruction_set`] names, else of the best that this machine has.
    ///
    /// # Panics
    /// If this machine does not have what is asked for: [`Isa::asked_for`] says so in words.
    pub fn best() -> Kernels {
        match Isa::asked_for() {
            Ok(asked) => asked.or_else(|| Isa::ALL.into_iter().find(|isa| isa.is_supported())).and_then(Kernels::of),
            Err(why) => panic!("{why}"),
        }
        .expect("portable kernels run everywhere")
    }

    /// The kernels of an instruction set that differ in nothing but how they ask the memory for rows, by name: their results are the same
    /// bits. First those that [`Kernels::of`] gives; none if this machine does not have the instructions. `near` asks for the next row at
    /// most, but for every line of GGUF's blocks, 8 KiB before it is read; `far` for every line of all types, 4 KiB before.
    pub fn kinds(isa: Isa) -> Vec<(&'static str, Kernels)> {
        match Kernels::of(isa) {
            #[cfg(target_arch = "x86_64")]
            Some(_) if isa == Isa::Avx512 => avx512::kinds().into(),
            Some(kernels) => vec![(isa.name(), kernels)],
            None => Vec::new(),
        }
    }

    /// Takes the dots of `other`, of the same instruction set, for rows of this type.
    pub fn take_dots(&mut self, quant: Quant, other: &Kernels) {
        debug_assert_eq!(self.isa, other.isa, "results would be others");
        self.dots[quant.index()] = other.dots[quant.index()];
    }

    /// Takes the way in which `other`, of the same instruction set, adds down rows of this type.
    pub fn take_axpys(&mut self, quant: Quant, other: &Kernels) {
        let i = quant.index();
        debug_assert_eq!(
            (self.isa, self.rows_together[i]),
            (other.isa, other.rows_together[i]),
            "results would be others"
        );
        (self.axpys[i], self.adds_as_read[i]) = (other.axpys[i], other.adds_as_read[i]);
    }

    /// The kernels of `isa`; `None` if this machine does not have it.
    pub fn of(isa: Isa) -> Option<Kernels> {
        if !isa.is_supported() {
            return None;
        }
        Some(match isa {
            Isa::Portable => portable::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => avx2::KERNELS_VNNI,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::kernels(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => return None,
        })
    }

    /// The same for prompts of another exactness.
    pub const fn with(self, prefill: Prefill) -> Kernels {
        Kernels { prefill, ..self }
    }

    /// The dot product for rows of this type.
    pub fn dot(&self, quant: Quant) -> Dot {
        self.dots[quant.index()]
    }

    /// The int8 product of rows of this type with many columns, whose codes have so many bits; `None` if there is none that is faster than
    /// [`Kernels::dot`], or with seven bits none that is faster than with eight.
    pub fn gemm(&self, quant: Quant, bits: Bits) -> Option<Gemm> {
        match bits {
            Bits::Eight => self.gemms[quant.index()],
            Bits::Seven => self.gemms_seven[quant.index()],
        }
    }

    /// How many bits the codes of `n` columns have that whole matrices of this type meet as [`ManyForm::Codes`].
    pub fn bits(&self, quant: Quant, n: usize) -> Bits {
        let seven = self.seven_bits && self.prefill == Prefill::Int8 && n > MAX_COLUMNS;
        if seven && self.gemm(quant, Bits::Seven).is_some() { Bits::Seven } else { Bits::Eight }
    }

    /// The form in which products of whole matrices of this type take `n` columns.
    pub fn form(&self, quant: Quant, n: usize) -> ManyForm {
        match (self.prefill, self.gemm(quant, Bits::Eight)) {
            (Prefill::Int8, None) if n >= MIN_FLOATS && self.sixteen_for(quant).is_some() => ManyForm::Sixteen,
            (Prefill::Int8, Some(_)) if n >= self.fewest_codes[quant.index()] => ManyForm::Codes,
            _ if n <= MAX_COLUMNS => ManyForm::Rows,
            (Prefill::Exact, _) => ManyForm::Floats,
            (_, Some(_)) => ManyForm::Codes,
            (Prefill::Int8, None) if quant.input() != Input::Floats || n < MIN_FLOATS => ManyForm::Rows,
            _ => ManyForm::Floats,
        }
    }

    /// The products of this type with many columns in codes of 16 bits, where it has some.
    fn sixteen_for(&self, quant: Quant) -> Option<(Form, Sixteen)> {
        let form = Form::of(quant).filter(|form| form.bytes() == 2 && self.rounds_floats)?;
        Some((form, self.sixteen?))
    }

    /// `y[b * stride + r] = row r · x[b]`, for `count` rows of type `quant` and each column b, in the form that they were given.
    ///
    /// # Safety
    /// As [`Dot`].
    pub unsafe fn products(&self, quant: Quant, rows: Rows, count: usize, x: &Columns, y: *mut f32, stride: usize) {
        if x.form(self, quant) == ManyForm::Rows {
            // SAFETY: the caller's promises.
            return unsafe { self.dot(quant)(rows, count, x, y, stride) };
        }
        let mut room = [std::ptr::null(); MAX_GEMM_ROWS];
        for first in (0..count).step_by(MAX_GEMM_ROWS) {
            let pointers = &mut room[..MAX_GEMM_ROWS.min(count - first)];
            pointers.iter_mut().enumerate().for_each(|(r, row)| *row = rows.row(first + r));
            // SAFETY: the caller's promises.
            unsafe { self.many(quant, pointers, x, y.add(first), stride) };
        }
    }

    /// The same for rows that lie anywhere; not for columns in [`ManyForm::Rows`].
    ///
    /// # Safety
    /// As [`Dot`], of which each pointer is a row.
    pub unsafe fn many(&self, quant: Quant, rows: &[*const u8], x: &Columns, y: *mut f32, stride: usize) {
        let bits = self.bits(quant, x.n);
        // SAFETY: the caller's promises.
        unsafe {
            match (x.form(self, quant), self.gemm(quant, bits), self.sixteen_for(quant)) {
                (ManyForm::Codes, Some(gemm), _) => {
                    gemm(rows, x.panels(bits), y, stride);
                    x.shadow.add_rows(quant, rows, x.cols, y, stride);
                }
                (ManyForm::Sixteen, _, Some((form, sixteen))) => sixteen.rows(form, rows, x.sixteen(), y, stride),
                (ManyForm::Floats, ..) => self.tiles.rows(quant, rows, x.floats(), y, stride),
                _ => unreachable!("few columns, or kernels for them"),
            }
        }
    }

    /// The form in which sums over `count` rows of this type take their columns, of which there are many.
    pub fn form_across(&self, quant: Quant, count: usize) -> ManyForm {
        let codes = self.across.is_some() && quant.input() != Input::Floats && count.is_multiple_of(GROUP);
        match self.prefill {
            Prefill::Int8 if self.sixteen_for(quant).is_some() => ManyForm::Sixteen,
            Prefill::Int8 | Prefill::Int8PerTensor if codes => ManyForm::Codes,
            _ => ManyForm::Floats,
        }
    }

    /// `y[b * stride + j] += sum over k of number k of column b times number range.start + j of row k`, for columns that
    /// [`Columns::set_across`] has taken; the rest is as in [`Tiles::across`].
    ///
    /// # Safety
    /// As [`Tiles::across`].
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn across<'a>(
        &self,
        quant: Quant,
        row: impl Fn(usize) -> &'a [u8],
        cols: usize,
        range: Range<usize>,
        x: &Columns,
        room: &mut Room,
        y: *mut f32,
        stride: usize,
    ) {
        // SAFETY: the caller's promises.
        unsafe {
            match (self.form_across(quant, x.cols), self.across, self.sixteen) {
                (ManyForm::Sixteen, _, Some(sixteen)) => {
                    sixteen.across(&self.tiles, quant, row, cols, range, x.sixteen(), room, y, stride);
                }
                (ManyForm::Codes, Some(multiply), _) => {
                    let codes = x.panels(Bits::Eight);
                    self.tiles.across_codes(multiply, quant, &row, cols, range.clone(), codes, room, y, stride);
                    x.shadow.add_across(quant, row, cols, range, y, stride);
                }
                _ => self.tiles.across(quant, row, cols, range, x.floats(), room, y, stride),
            }
        }
    }

    /// Products with few columns that are summed over rows of `cols` numbers of this type; `None` where there are none, or nothing is to be
    /// rounded.
    pub fn scaled_across(&self, quant: Quant, cols: usize) -> Option<ScaledAcross> {
        self.scaled[quant.index()].filter(|_| self.prefill == Prefill::Int8 && cols.is_multiple_of(PACK))
    }

    /// How many down rows of this type are best added to one column's output by a call of `axpy`; at most [`MAX_AXPY_ROWS`].
    pub fn rows_together(&self, quant: Quant) -> usize {
        self.rows_together[quant.index()]
    }

    /// Whether a down row of this type is added to one column's output without [`Kernels::touch`] before it.
    pub fn adds_as_read(&self, quant: Quant) -> bool {
        self.adds_as_read[quant.index()]
    }

    /// The kernel that adds multiples of rows of this type to an output.
    pub fn axpy(&self, quant: Quant) -> Axpy {
        self.axpys[quant.index()]
    }
}
