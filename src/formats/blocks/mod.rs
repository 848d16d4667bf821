//! The types in which GGUF files store numbers by blocks, a file each with decoder and encoder, and the decoding of all
//! source types.
//!
//! A block is a run of numbers with what they share. Layouts and the order of the arithmetic are those of ggml-quants.c
//! (`dequantize_row_*`), so that every result has the same bits as ggml's own. Encoders are ours: they search for the scales of the least
//! squared error (`fit.rs`, and `groups.rs` for blocks of 256 numbers). A new type is a file here and a line in
//! `each_block_type`; it works at once, slowly (`cpu/portable.rs`), and fast with a file for each instruction set.

mod bf16;
mod fifth_bits;
mod fit;
mod groups;
mod halves;
mod iq4_nl;
mod iq4_xs;
mod k_scales;
mod levels;
mod mxfp4;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;

pub use bf16::BF16;
pub use fit::Weighted;
pub use iq4_nl::{IQ4_NL, LEVELS as IQ4_LEVELS};
pub use iq4_xs::IQ4_XS;
pub use mxfp4::{LEVELS as MXFP4_LEVELS, MXFP4};
pub use q2_k::Q2_K;
pub use q3_k::Q3_K;
pub use q4_0::Q4_0;
pub use q4_1::Q4_1;
pub use q4_k::Q4_K;
pub use q5_0::Q5_0;
pub use q5_1::Q5_1;
pub use q5_k::Q5_K;
pub use q6_k::Q6_K;
pub use q8_0::Q8_0;

use super::DType;
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Calls a macro with the names of all block types.
macro_rules! each_block_type {
    ($then:ident) => {
        $then! { BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4 }
    };
}
pub(crate) use each_block_type;

/// Numbers of the longest block.
const MAX_NUMBERS: usize = 256;

/// A block type, as code.
pub trait Block: 'static {
    /// The type.
    const TYPE: BlockType;
    /// Its number in GGUF files.
    const GGML: u32;
    /// Its name in a neuron store, in flags and in messages.
    const NAME: &'static str;
    /// Numbers of a block.
    const NUMBERS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Where the f16 scales of a block begin. In a block of finite scales every number is finite; a type of which that is not true has a
    /// [`Block::fault`] of its own.
    const SCALES: &'static [usize];

    /// Decodes a block, [`Block::BYTES`] long, into its [`Block::NUMBERS`].
    fn decode(block: &[u8], out: &mut [f32]);

    /// Encodes [`Block::NUMBERS`] finite values so that the sum of their squared errors, each times its weight, is as small as the search
    /// finds it. The weights are from 0 to 1. However large the values are, the block has no [`Block::fault`].
    fn encode(values: Weighted, block: &mut [u8]);

    /// The scale that makes the block damaged, if one does: infinite or no number. In a block without one every number is finite.
    fn fault(block: &[u8]) -> Option<f32> {
        Self::SCALES.iter().map(|&at| f16_at(block, at)).find(|scale| !scale.is_finite())
    }
}

/// A block type, as data.
#[derive(Clone, Copy)]
pub struct Form {
    /// Its number in GGUF files.
    pub ggml: u32,
    /// Its name in a neuron store, in flags and in messages.
    pub name: &'static str,
    /// Its name in GGUF's tools.
    pub ggml_name: &'static str,
    /// Numbers of a block.
    pub numbers: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Where the f16 scales of a block begin.
    pub scales: &'static [usize],
    /// Decodes whole blocks.
    decode: fn(&[u8], &mut [f32]),
    encode: fn(&[f32], Option<&[f32]>, &mut [u8]),
    fault: fn(&[u8]) -> Option<f32>,
}

impl Form {
    /// Bits of a number, the block's scales included.
    pub fn bits(&self) -> f64 {
        8.0 * self.bytes as f64 / self.numbers as f64
    }

    const fn of<T: Block>(ggml_name: &'static str) -> Form {
        Form {
            ggml: T::GGML,
            name: T::NAME,
            ggml_name,
            numbers: T::NUMBERS,
            bytes: T::BYTES,
            scales: T::SCALES,
            decode: decode_all::<T>,
            encode: encode_all::<T>,
            fault: T::fault,
        }
    }
}

macro_rules! block_type {
    ($($name:ident),*) => {
        /// A type of GGUF's blocks.
        #[allow(non_camel_case_types, missing_docs)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum BlockType { $($name),* }

        impl BlockType {
            /// All of them, in the order of their discriminants.
            pub const ALL: [BlockType; BlockType::COUNT] = [$(BlockType::$name),*];
            /// How many there are.
            pub const COUNT: usize = [$(stringify!($name)),*].len();

            /// What it is.
            pub const fn form(self) -> Form {
                match self { $(BlockType::$name => Form::of::<$name>(stringify!($name))),* }
            }
        }
    };
}
each_block_type!(block_type);

impl BlockType {
    /// The type with this number in GGUF files.
    pub fn of_ggml(number: u32) -> Option<BlockType> {
        BlockType::ALL.into_iter().find(|kind| kind.form().ggml == number)
    }

    /// Decodes whole blocks, `[out.len() / numbers * bytes]`.
    pub fn decode(self, src: &[u8], out: &mut [f32]) {
        (self.form().decode)(src, out);
    }

    /// Encodes values into whole blocks, `[values.len() / numbers * bytes]`, with a small sum of squared errors. `importance`, of as many
    /// numbers, none of them negative, says how much the error of each value counts; without it all count alike. Values are finite. What is
    /// beyond f16 must have been refused before, except for BF16 and MXFP4: its block would be finite, and wrong.
    ///
    /// # Panics
    /// Where the lengths do not belong together.
    pub fn encode(self, values: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        let form = self.form();
        assert!(
            values.len().is_multiple_of(form.numbers),
            "{} numbers are not whole {} blocks",
            values.len(),
            form.name
        );
        assert_eq!(
            out.len(),
            values.len() / form.numbers * form.bytes,
            "bytes of {} {} numbers",
            values.len(),
            form.name
        );
        assert!(importance.is_none_or(|all| all.len() == values.len()), "importance of {} numbers", values.len());
        (form.encode)(values, importance, out);
    }

    /// The first block whose scale is no finite number: its index and the scale.
    pub fn first_fault(self, src: &[u8]) -> Option<(usize, f32)> {
        let form = self.form();
        src.chunks_exact(form.bytes).enumerate().find_map(|(i, block)| (form.fault)(block).map(|scale| (i, scale)))
    }
}

fn decode_all<T: Block>(src: &[u8], out: &mut [f32]) {
    for (src, out) in src.chunks_exact(T::BYTES).zip(out.chunks_exact_mut(T::NUMBERS)) {
        T::decode(src, out);
    }
}

fn encode_all<T: Block>(values: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let mut weights = [1.0; MAX_NUMBERS];
    let weights = &mut weights[..T::NUMBERS];
    for (i, (values, out)) in values.chunks_exact(T::NUMBERS).zip(out.chunks_exact_mut(T::BYTES)).enumerate() {
        if let Some(importance) = importance {
            put_weights(&importance[i * T::NUMBERS..][..T::NUMBERS], weights);
        }
        T::encode(Weighted { values, weights }, out);
    }
}

/// Importance as shares of the block's largest, so that no product of them and values is too large or too small for an f32. Where all is
/// 0 the block still has to be stored, and all numbers count alike.
fn put_weights(importance: &[f32], weights: &mut [f32]) {
    let top = importance.iter().fold(0f32, |top, &w| top.max(w));
    if top > 0.0 && top < f32::INFINITY {
        weights.iter_mut().zip(importance).for_each(|(weight, w)| *weight = w.max(0.0) / top);
    } else {
        weights.fill(1.0);
    }
}

/// Decodes `src`, whole blocks of `dtype`, into `out`, one f32 per number.
///
/// # Panics
/// Where `src` is not as long as `out.len()` numbers are. The readers have checked every tensor's length.
pub fn dequantize(dtype: DType, src: &[u8], out: &mut [f32]) {
    assert!(out.len().is_multiple_of(dtype.block_len()), "{} numbers are not whole {} blocks", out.len(), dtype.name());
    assert_eq!(src.len(), dtype.row_bytes(out.len()), "bytes of {} {} numbers", out.len(), dtype.name());
    match dtype {
        DType::F32 => f32s(src, out),
        DType::F16 => f16s(src, out),
        DType::Block(kind) => kind.decode(src, out),
    }
}

/// The index of the first NaN or infinity. No weight of a usable model is either, and one would silently turn every
/// answer into noise.
pub fn first_non_finite(numbers: &[f32]) -> Option<usize> {
    // Numbers per run: long enough for vector code to pay, short enough that looking at the one bad run again costs nothing.
    const RUN: usize = 4096;
    for (i, run) in numbers.chunks(RUN).enumerate() {
        // Without a branch per number, which would keep it from being vectorised.
        let any = run.iter().fold(false, |any, x| any | !x.is_finite());
        if any {
            return run.iter().position(|x| !x.is_finite()).map(|j| i * RUN + j);
        }
    }
    None
}

/// The first block of `src` with a number that is not finite, of quantised blocks a scale, and that number. `src` is whole blocks. Takes no
/// memory.
pub fn first_fault(dtype: DType, src: &[u8]) -> Option<(usize, f32)> {
    // Numbers that are decoded at a time, where one of them is the fault.
    const RUN: usize = 1024;
    if let (DType::Block(kind), true) = (dtype, dtype.block_len() > 1) {
        return kind.first_fault(src);
    }
    let mut numbers = [0.0; RUN];
    for (i, src) in src.chunks(RUN * dtype.block_bytes()).enumerate() {
        if all_finite(dtype, src) {
            continue;
        }
        let numbers = &mut numbers[..src.len() / dtype.block_bytes()];
        dequantize(dtype, src, numbers);
        return first_non_finite(numbers).map(|at| (i * RUN + at, numbers[at]));
    }
    None
}

/// Whether all numbers of a type without blocks are finite, by their bits: an exponent of ones is that of infinity and NaN. Without a branch
/// per number, so that it is vectorised.
fn all_finite(dtype: DType, src: &[u8]) -> bool {
    let halves = |exponent: u16| {
        let is_special = |half: &[u8; 2]| u16::from_le_bytes(*half) & exponent == exponent;
        !src.as_chunks().0.iter().fold(false, |any, half| any | is_special(half))
    };
    match dtype {
        DType::F32 => {
            let is_special = |number: &[u8; 4]| u32::from_le_bytes(*number) & 0x7f80_0000 == 0x7f80_0000;
            !src.as_chunks().0.iter().fold(false, |any, number| any | is_special(number))
        }
        DType::F16 => halves(0x7c00),
        DType::Block(_) => halves(0x7f80),
    }
}

fn f32s(src: &[u8], out: &mut [f32]) {
    for (x, bytes) in out.iter_mut().zip(src.as_chunks().0) {
        *x = f32::from_le_bytes(*bytes);
    }
}

fn f16s(src: &[u8], out: &mut [f32]) {
    // Through aligned memory: safetensors data may begin at an odd address.
    const RUN: usize = 256;
    let mut halves = [f16::ZERO; RUN];
    for (out, src) in out.chunks_mut(RUN).zip(src.chunks(2 * RUN)) {
        let halves = &mut halves[..out.len()];
        for (h, bytes) in halves.iter_mut().zip(src.as_chunks().0) {
            *h = f16::from_le_bytes(*bytes);
        }
        halves.convert_to_f32_slice(out);
    }
}

/// The f16 nearest to a number, and the largest of its sign for what is beyond f16.
fn finite_half(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const()))
}

/// Writes an f16 at byte `at`.
fn put_f16(bytes: &mut [u8], at: usize, x: f16) {
    bytes[at..at + 2].copy_from_slice(&x.to_le_bytes());
}

/// The f16 at byte `at`, as f32.
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

#[cfg(test)]
mod laws;

#[cfg(test)]
mod tests {
    use super::*;

    /// The fixture's tensors, raw: quant_blocks.safetensors holds blocks as bytes, which the model reader skips.
    pub(super) fn fixture() -> (serde_json::Value, Vec<u8>) {
        let bytes = std::fs::read("tests/fixtures/quant_blocks.safetensors").unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        (serde_json::from_slice(&bytes[8..8 + header]).unwrap(), bytes[8 + header..].to_vec())
    }

    pub(super) fn tensor<'a>((header, data): &'a (serde_json::Value, Vec<u8>), name: &str) -> &'a [u8] {
        let range = &header[name]["data_offsets"];
        &data[range[0].as_u64().unwrap() as usize..range[1].as_u64().unwrap() as usize]
    }

    fn decoded(dtype: DType, src: &[u8]) -> Vec<f32> {
        let mut out = vec![f32::NAN; src.len() / dtype.block_bytes() * dtype.block_len()];
        dequantize(dtype, src, &mut out);
        out
    }

    #[test]
    fn every_type_decodes_to_the_bits_that_gguf_py_gives() {
        let fixture = fixture();
        for dtype in BlockType::ALL.map(DType::Block).into_iter().chain([DType::F16]) {
            let name = dtype.name();
            let ours = decoded(dtype, tensor(&fixture, &format!("{name}.raw")));
            let theirs = decoded(DType::F32, tensor(&fixture, &format!("{name}.values")));
            assert!(!ours.is_empty() && ours.len() == theirs.len(), "{name}: {} of {}", ours.len(), theirs.len());
            for (i, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(same, "{name}[{i}]: {a} ({:08x}), gguf-py has {b} ({:08x})", a.to_bits(), b.to_bits());
            }
        }
    }

    #[test]
    fn every_half_float_decodes() {
        let src: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let [f16s, bf16s] = [decoded(DType::F16, &src), decoded(DType::BF16, &src)];
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16s[bits as usize], bf16s[bits as usize]);
            let expected = f16::from_bits(bits);
            assert!(half == expected.to_f32() || half.is_nan() && expected.is_nan(), "f16 {bits:04x}: {half}");
            assert_eq!(brain.to_bits(), u32::from(bits) << 16, "bf16 {bits:04x}");
        }
    }

    #[test]
    fn bytes_at_an_odd_address_decode_alike() {
        let fixture = fixture();
        for dtype in BlockType::ALL.map(DType::Block).into_iter().chain([DType::F16]) {
            let aligned = tensor(&fixture, &format!("{}.raw", dtype.name()));
            let mut shifted = vec![0u8];
            shifted.extend_from_slice(aligned);
            let [a, b] = [decoded(dtype, aligned), decoded(dtype, &shifted[1..])];
            assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", dtype.name());
        }
    }

    #[test]
    fn nothing_decodes_to_nothing() {
        for dtype in BlockType::ALL.map(DType::Block).into_iter().chain([DType::F32, DType::F16]) {
            dequantize(dtype, &[], &mut []);
        }
    }

    /// Bytes of no meaning, the same at each call.
    pub(super) fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        (0..bytes).map(|_| next()).collect()
    }

    #[test]
    fn a_block_is_damaged_if_and_only_if_a_number_of_it_may_not_be_finite() {
        for kind in BlockType::ALL {
            let form = kind.form();
            let mut faults = 0;
            let bytes = noise(form.bytes * 16_384);
            for block in bytes.chunks_exact(form.bytes) {
                let mut numbers = vec![0.0; form.numbers];
                kind.decode(block, &mut numbers);
                let fault = kind.first_fault(block);
                faults += usize::from(fault.is_some());
                assert!(fault.is_some() || first_non_finite(&numbers).is_none(), "{}: {block:?}", form.name);
                assert!(fault.is_none_or(|(at, scale)| at == 0 && !scale.is_finite()), "{}: {fault:?}", form.name);
            }
            assert!((1..8192).contains(&faults), "{}: {faults} of 16384 random blocks are damaged", form.name);
        }
    }

    #[test]
    fn a_damaged_block_is_found_among_good_ones() {
        for kind in BlockType::ALL {
            let form = kind.form();
            let mut blocks = vec![0; 3 * form.bytes];
            assert_eq!(kind.first_fault(&blocks), None, "{}", form.name);
            blocks[2 * form.bytes..].fill(0xFF);
            let (at, scale) = kind.first_fault(&blocks).expect(form.name);
            assert!(at == 2 && scale.is_nan(), "{}: block {at}, {scale}", form.name);
        }
    }

    #[test]
    fn no_two_types_share_a_number_or_a_name() {
        for (i, a) in BlockType::ALL.into_iter().enumerate() {
            assert_eq!(BlockType::of_ggml(a.form().ggml), Some(a));
            for b in &BlockType::ALL[..i] {
                assert!(a.form().name != b.form().name && a.form().ggml_name != b.form().ggml_name);
            }
        }
    }

    #[test]
    #[should_panic(expected = "bytes of 32 Q8_0 numbers")]
    fn a_wrong_length_is_a_bug_of_the_caller() {
        dequantize(DType::Q8_0, &[0; 33], &mut [0.0; 32]);
    }

    #[test]
    fn the_first_fault_of_floats_is_found_wherever_it_is() {
        for (dtype, bad) in
            [(DType::F32, &[0u8, 0, 0x80, 0xff][..]), (DType::F16, &[1, 0x7c]), (DType::BF16, &[0x80, 0x7f])]
        {
            let bytes = dtype.block_bytes();
            let good: Vec<u8> = (0..3000 * bytes).map(|i| (i * 7 % 0x3c) as u8).collect();
            assert_eq!(first_fault(dtype, &good), None, "{}", dtype.name());
            for at in [0, 1, 1023, 1024, 2500, 2999] {
                let mut src = good.clone();
                src[at * bytes..(at + 1) * bytes].copy_from_slice(bad);
                let (found, number) = first_fault(dtype, &src).unwrap();
                assert!(found == at && !number.is_finite(), "{} {at}: {found} {number}", dtype.name());
            }
        }
    }

    #[test]
    fn the_first_non_finite_number_is_found_wherever_it_is() {
        for at in [0, 1, 4095, 4096, 9_999] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut numbers = vec![f32::MAX; 10_000];
                numbers[at] = bad;
                *numbers.last_mut().unwrap() = f32::NAN;
                assert_eq!(first_non_finite(&numbers), Some(at));
            }
        }
        assert_eq!(first_non_finite(&[f32::MIN, f32::MIN_POSITIVE, 1e-45, -0.0]), None);
        assert_eq!(first_non_finite(&[]), None);
    }
}
