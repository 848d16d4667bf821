//! How keys and values are stored.

use crate::error::{Error, Result};
use crate::formats::blocks::{BlockType, Q4_0, Q8_0};
use crate::formats::rows::Quant;
use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use serde::{Deserialize, Serialize};

/// A type of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// 2 bytes a number (IEEE 754 half precision).
    F16,
    /// 4 bytes a number.
    F32,
    /// A byte a number, and an f16 scale for each 32 of a head: GGUF's blocks.
    Q8_0,
    /// Half a byte a number, and an f16 scale for each 32 of a head: GGUF's blocks.
    Q4_0,
}

impl KvType {
    /// All of them, the most exact first.
    pub const ALL: [KvType; 4] = [KvType::F32, KvType::F16, KvType::Q8_0, KvType::Q4_0];

    /// The name that options, settings and files have for it.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
            KvType::Q8_0 => "q8_0",
            KvType::Q4_0 => "q4_0",
        }
    }

    /// The type of keys and values as rows that kernels read, each of a head at a position.
    pub const fn quant(self) -> Quant {
        match self {
            KvType::F16 => Quant::F16,
            KvType::F32 => Quant::F32,
            KvType::Q8_0 => Quant::Block(BlockType::Q8_0),
            KvType::Q4_0 => Quant::Block(BlockType::Q4_0),
        }
    }

    /// Whether a device's kernels read it; of other types attention is the host's.
    pub const fn on_device(self) -> bool {
        matches!(self, KvType::F16)
    }

    /// Bytes of the keys, or of the values, of a head at a position.
    pub const fn head_bytes(self, head_dim: usize) -> usize {
        self.quant().number_bytes(head_dim)
    }

    /// Whether heads of `head_dim` numbers can be stored so.
    ///
    /// # Errors
    /// [`Error::Usage`] with the types that can.
    pub fn check(self, head_dim: usize) -> Result<()> {
        let unit = self.quant().unit();
        if head_dim.is_multiple_of(unit) {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "keys and values in {} need heads of a multiple of {unit} numbers; this model's have {head_dim}: take f16 or f32",
            self.name()
        )))
    }

    /// Stores the numbers of a head, rounded to the nearest that the type has.
    pub(super) fn put(self, values: &[f32], to: &mut [u8]) {
        match self {
            KvType::F16 => {
                let halves: &mut [u16] = bytemuck::cast_slice_mut(to);
                halves.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values);
            }
            KvType::F32 => to.copy_from_slice(bytemuck::cast_slice(values)),
            KvType::Q8_0 => Q8_0::put_nearest(values, to),
            KvType::Q4_0 => Q4_0::put_nearest(values, to),
        }
    }
}
