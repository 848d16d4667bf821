//! The table of tensors of a GGUF file.

use super::reader::Reader;
use crate::error::{Error, Result};
use crate::formats::blocks::BlockType;
use crate::formats::{DType, TensorInfo};

/// ggml's own limit (`GGML_MAX_NAME` is 64 with its NUL): no other program could load a longer one either.
const MAX_NAME_BYTES: u64 = 63;
/// ggml's tensors have four dimensions.
const MAX_DIMS: u32 = 4;
/// The shortest tensor entry: length, one character, dimension count, one dimension, type, offset.
pub const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// A tensor as its entry says it: `info.offset` counts from the start of the data.
pub(super) struct Record {
    /// Name, type, shape, length and offset.
    pub info: TensorInfo,
    /// Where the entry begins in the file.
    pub at: u64,
}

pub(super) fn tensor_records(r: &mut Reader, count: u64, powerinfer: bool) -> Result<Vec<Record>> {
    // Again, now that the metadata has been read: fewer bytes are left.
    r.fits(count, &"tensor count", MIN_TENSOR_BYTES, 8)?;
    let mut records: Vec<Record> = Vec::with_capacity(count as usize);
    for i in 0..count {
        let at = r.at;
        let name = r.name(&format_args!("tensor {} of {count}", i + 1), MAX_NAME_BYTES)?;
        records.push(Record { info: tensor_record(r, name, powerinfer)?, at: at as u64 });
    }
    let mut by_name: Vec<&Record> = records.iter().collect();
    by_name.sort_by(|a, b| a.info.name.cmp(&b.info.name));
    for pair in by_name.windows(2) {
        if pair[0].info.name == pair[1].info.name {
            let reason = format!("the tensor is there twice, first at byte {}: the file is corrupt", pair[0].at);
            return Err(Error::bad_at(r.path, &pair[1].info.name, pair[1].at, reason));
        }
    }
    Ok(records)
}

fn tensor_record(r: &mut Reader, name: &str, powerinfer: bool) -> Result<TensorInfo> {
    let at = r.at;
    let dims: u32 = r.number(&name)?;
    if dims == 0 || dims > MAX_DIMS {
        return Err(r.bad(&name, at, format!("has {dims} dimensions, allowed are 1 to {MAX_DIMS}")));
    }
    let shape_at = r.at;
    let mut ne = [1u64; MAX_DIMS as usize];
    for dim in &mut ne[..dims as usize] {
        *dim = r.number(&name)?;
    }
    let ne = &ne[..dims as usize];
    let type_at = r.at;
    let id: u32 = r.number(&name)?;
    let dtype = dtype(id, powerinfer).map_err(|reason| r.bad(&name, type_at, reason))?;
    let bytes = tensor_bytes(ne, dtype).map_err(|reason| r.bad(&name, shape_at, reason))?;
    let offset = r.number(&name)?;
    let shape = ne.iter().rev().map(|&n| n as usize).collect();
    Ok(TensorInfo { name: name.to_owned(), dtype, shape, offset, bytes })
}

/// Bytes of a tensor with dimensions `ne`, fastest first.
fn tensor_bytes(ne: &[u64], dtype: DType) -> Result<u64, String> {
    if ne.contains(&0) {
        return Err(format!("has the shape {ne:?} with no numbers in it"));
    }
    let block = dtype.block_len() as u64;
    if !ne[0].is_multiple_of(block) {
        return Err(format!("has rows of {} numbers, but {} stores blocks of {block}", ne[0], dtype.name()));
    }
    // Signed 64-bit sizes are what every other reader counts with.
    let sizes = ne[1..].iter().try_fold(ne[0] / block, |product, &n| product.checked_mul(n));
    let bytes = sizes.and_then(|blocks| blocks.checked_mul(dtype.block_bytes() as u64));
    bytes
        .filter(|&n| n <= i64::MAX as u64)
        .ok_or_else(|| format!("has the impossible shape {ne:?}: the file is corrupt"))
}

/// The types that this program reads, by ggml's number.
fn dtype(id: u32, powerinfer: bool) -> Result<DType, String> {
    match id {
        0 => return Ok(DType::F32),
        1 => return Ok(DType::F16),
        _ => {}
    }
    if let Some(kind) = BlockType::of_ggml(id) {
        return Ok(DType::Block(kind));
    }
    Err(match other_type(id, powerinfer) {
        Some(name @ ("I8" | "I16" | "I32" | "I64")) => {
            format!(
                "holds {name} numbers, which no weights are: give the model file, not a PowerInfer index made from it"
            )
        }
        Some(name) => {
            format!(
                "is stored as {name}, which is not supported: convert the model to F16, BF16, Q8_0, a 4- or 5-bit type (Q4_0, Q4_1, \
                 Q5_0, Q5_1, IQ4_NL, IQ4_XS, MXFP4) or a K quant (Q2_K to Q6_K)"
            )
        }
        None => format!("has the unknown type {id}: the file is corrupt or too new"),
    })
}

/// Names of ggml's types that have no file in `blocks` (ggml.h, 2026-08), for messages.
fn other_type(id: u32, powerinfer: bool) -> Option<&'static str> {
    Some(match id {
        // PowerInfer left llama.cpp in October 2023, before the IQ types took these numbers.
        16 if powerinfer => "I8",
        17 if powerinfer => "I16",
        18 if powerinfer => "I32",
        4 => "Q4_2 (removed from ggml in 2023)",
        5 => "Q4_3 (removed from ggml in 2023)",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31..=33 => "Q4_0 in a repacked form (removed from ggml in 2024)",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36..=38 => "IQ4_NL in a repacked form (removed from ggml in 2024)",
        40 => "NVFP4",
        41 => "Q1_0",
        42 => "Q2_0",
        _ => return None,
    })
}
