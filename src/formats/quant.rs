//! Decodes the quantised blocks of ggml.
//!
//! Block layouts and the order of the arithmetic are those of ggml-quants.c (`dequantize_row_*`), so that every result
//! has the same bits as ggml's own. `d` and `dmin` are f16.
//!
//! ```text
//! Q8_0   32 numbers   d | q i8[32]                                                          34 bytes
//! Q4_0   32 numbers   d | q u8[16]: number j low, 16+j high                                 18 bytes
//! Q4_K  256 numbers   d | dmin | scales u8[12] | q u8[128]                                 144 bytes
//! Q5_K  256 numbers   d | dmin | scales u8[12] | fifth bits u8[32] | q u8[128]             176 bytes
//! Q6_K  256 numbers   low 4 bits u8[128] | high 2 bits u8[64] | scales i8[16] | d          210 bytes
//! ```

use super::DType;
use half::f16;
use half::slice::HalfFloatSliceExt;

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
        DType::BF16 => bf16s(src, out),
        DType::Q8_0 => blocks(src, out, q8_0),
        DType::Q4_0 => blocks(src, out, q4_0),
        DType::Q4_K => blocks(src, out, q4_k),
        DType::Q5_K => blocks(src, out, q5_k),
        DType::Q6_K => blocks(src, out, q6_k),
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

fn bf16s(src: &[u8], out: &mut [f32]) {
    for (x, bytes) in out.iter_mut().zip(src.as_chunks().0) {
        *x = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
    }
}

/// `block` for every block of `BYTES` bytes and `LEN` numbers.
fn blocks<const BYTES: usize, const LEN: usize>(src: &[u8], out: &mut [f32], block: fn(&[u8; BYTES], &mut [f32; LEN])) {
    for (src, out) in src.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        block(src, out);
    }
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn q8_0(src: &[u8; 34], out: &mut [f32; 32]) {
    let d = f16_at(src, 0);
    for (x, &q) in out.iter_mut().zip(&src[2..]) {
        *x = f32::from(q as i8) * d;
    }
}

fn q4_0(src: &[u8; 18], out: &mut [f32; 32]) {
    let d = f16_at(src, 0);
    let (low, high) = out.split_at_mut(16);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(&src[2..]) {
        *low = f32::from((q & 15) as i8 - 8) * d;
        *high = f32::from((q >> 4) as i8 - 8) * d;
    }
}

/// The 6-bit scale and minimum of each group of 32: eight of either, in twelve bytes. The first four groups have
/// bytes of their own; the rest take four bits from the last bytes and two from the tops of the first ones.
fn scales_and_mins(packed: &[u8]) -> [(f32, f32); 8] {
    std::array::from_fn(|j| {
        let (scale, min) = if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
        };
        (f32::from(scale), f32::from(min))
    })
}

fn q4_k(src: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(src, 0), f16_at(src, 2));
    let scales = scales_and_mins(&src[4..16]);
    // 64 numbers share 32 bytes: one group in the low halves, the next in the high ones.
    for (pair, (out, q)) in out.chunks_exact_mut(64).zip(src[16..].chunks_exact(32)).enumerate() {
        let (low, high) = out.split_at_mut(32);
        let ((low_scale, low_min), (high_scale, high_min)) = (scales[2 * pair], scales[2 * pair + 1]);
        let (low_d, low_m) = (d * low_scale, dmin * low_min);
        let (high_d, high_m) = (d * high_scale, dmin * high_min);
        for ((low, high), &q) in low.iter_mut().zip(high).zip(q) {
            *low = low_d * f32::from(q & 15) - low_m;
            *high = high_d * f32::from(q >> 4) - high_m;
        }
    }
}

fn q5_k(src: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (f16_at(src, 0), f16_at(src, 2));
    let scales = scales_and_mins(&src[4..16]);
    let fifth = &src[16..48];
    // As Q4_K; bit g of fifth[i] belongs to number i of group g.
    for (pair, (out, q)) in out.chunks_exact_mut(64).zip(src[48..].chunks_exact(32)).enumerate() {
        let (low, high) = out.split_at_mut(32);
        let ((low_scale, low_min), (high_scale, high_min)) = (scales[2 * pair], scales[2 * pair + 1]);
        let (low_d, low_m) = (d * low_scale, dmin * low_min);
        let (high_d, high_m) = (d * high_scale, dmin * high_min);
        for (((low, high), &q), &fifth) in low.iter_mut().zip(high).zip(q).zip(fifth) {
            let fifth = fifth >> (2 * pair);
            *low = low_d * f32::from(q & 15 | (fifth & 1) << 4) - low_m;
            *high = high_d * f32::from(q >> 4 | (fifth >> 1 & 1) << 4) - high_m;
        }
    }
}

fn q6_k(src: &[u8; 210], out: &mut [f32; 256]) {
    let d = f16_at(src, 208);
    let scale = |i: usize| d * f32::from(src[192 + i] as i8);
    for (part, out) in out.chunks_exact_mut(128).enumerate() {
        let low = &src[64 * part..64 * part + 64];
        let top = &src[128 + 32 * part..128 + 32 * part + 32];
        // Four runs of 32 numbers share the 32 bytes of `top`, two bits each; every 16 numbers have a scale.
        for (run, out) in out.chunks_exact_mut(32).enumerate() {
            let low = &low[32 * (run % 2)..32 * (run % 2) + 32];
            let (low_shift, top_shift) = (4 * (run / 2), 2 * run);
            for (half, out) in out.chunks_exact_mut(16).enumerate() {
                let scale = scale(8 * part + 2 * run + half);
                let (low, top) = (&low[16 * half..16 * half + 16], &top[16 * half..16 * half + 16]);
                for ((x, &low), &top) in out.iter_mut().zip(low).zip(top) {
                    let q = low >> low_shift & 15 | (top >> top_shift & 3) << 4;
                    *x = scale * f32::from(q as i8 - 32);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fixture's tensors, raw: quant_blocks.safetensors holds blocks as bytes, which the model reader skips.
    fn fixture() -> (serde_json::Value, Vec<u8>) {
        let bytes = std::fs::read("tests/fixtures/quant_blocks.safetensors").unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        (serde_json::from_slice(&bytes[8..8 + header]).unwrap(), bytes[8 + header..].to_vec())
    }

    fn tensor<'a>((header, data): &'a (serde_json::Value, Vec<u8>), name: &str) -> &'a [u8] {
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
        for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::Q4_0, DType::Q4_K, DType::Q5_K, DType::Q6_K] {
            let name = dtype.name();
            let ours = decoded(dtype, tensor(&fixture, &format!("{name}.raw")));
            let theirs = decoded(DType::F32, tensor(&fixture, &format!("{name}.values")));
            assert_eq!(ours.len(), theirs.len(), "{name}");
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
        for dtype in [DType::F16, DType::BF16, DType::Q8_0, DType::Q6_K] {
            let aligned = tensor(&fixture, &format!("{}.raw", dtype.name()));
            let mut shifted = vec![0u8];
            shifted.extend_from_slice(aligned);
            let [a, b] = [decoded(dtype, aligned), decoded(dtype, &shifted[1..])];
            assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "{}", dtype.name());
        }
    }

    #[test]
    fn nothing_decodes_to_nothing() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::Q8_0, DType::Q4_K] {
            dequantize(dtype, &[], &mut []);
        }
    }

    #[test]
    #[should_panic(expected = "bytes of 32 Q8_0 numbers")]
    fn a_wrong_length_is_a_bug_of_the_caller() {
        dequantize(DType::Q8_0, &[0; 33], &mut [0.0; 32]);
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
