//! Writes GGUF v3 files, with which `synth` gives the same model to other programs.

use super::rows::{self, GROUP, Quant};
use crate::error::{Error, Result};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The usual name ending.
pub const EXTENSION: &str = "gguf";

const ALIGN: u64 = 32;

/// A metadata value.
pub enum Value<'a> {
    /// GGUF type 4, UINT32.
    U32(u32),
    /// GGUF type 6, FLOAT32.
    F32(f32),
    /// GGUF type 7, BOOL.
    Bool(bool),
    /// GGUF type 8, STRING.
    Str(&'a str),
    /// An array (GGUF type 9) of STRING.
    Strings(&'a [String]),
    /// An array (GGUF type 9) of FLOAT32.
    F32s(&'a [f32]),
    /// An array (GGUF type 9) of INT32.
    I32s(&'a [i32]),
}

/// ggml's number for a type.
fn type_number(quant: Quant) -> u32 {
    match quant {
        Quant::F32 => 0,
        Quant::F16 => 1,
        Quant::Q4 => 2,
        Quant::Q8 => 8,
        Quant::Block(kind) => kind.form().ggml,
    }
}

/// Bytes of a row as GGUF stores it.
pub const fn row_bytes(quant: Quant, cols: usize) -> usize {
    match quant {
        Quant::F32 => cols * 4,
        Quant::F16 => cols * 2,
        Quant::Q8 => cols / GROUP * 34,
        Quant::Q4 => cols / GROUP * 18,
        Quant::Block(_) => quant.number_bytes(cols),
    }
}

/// Writes `values` as a GGUF row to `out`, which is [`row_bytes`] long. The codes are those of the neuron store, in ggml's order.
pub fn encode_row(quant: Quant, values: &[f32], out: &mut [u8]) {
    let cols = values.len();
    let mut row = vec![0; quant.row_bytes(cols)];
    rows::encode(quant, values, &mut row);
    match quant {
        Quant::F32 | Quant::F16 | Quant::Block(_) => out.copy_from_slice(&row[..out.len()]),
        Quant::Q8 => {
            for (g, (block, scale)) in out.chunks_exact_mut(34).zip(rows::scales(quant, &row, cols)).enumerate() {
                block[..2].copy_from_slice(&scale.to_le_bytes());
                block[2..].iter_mut().enumerate().for_each(|(i, b)| *b = row[rows::code_position(g * GROUP + i, cols)]);
            }
        }
        Quant::Q4 => {
            for (g, (block, scale)) in out.chunks_exact_mut(18).zip(rows::scales(quant, &row, cols)).enumerate() {
                block[..2].copy_from_slice(&scale.to_le_bytes());
                let code = |j: usize| rows::q4_code(&row, g * GROUP + j, cols);
                for (j, byte) in block[2..].iter_mut().enumerate() {
                    *byte = code(j) | code(j + 16) << 4;
                }
            }
        }
    }
}

struct Tensor {
    name: String,
    quant: Quant,
    /// Row-major, outermost first.
    shape: Vec<usize>,
    offset: u64,
}

/// Writes one GGUF file: takes metadata and tensor shapes, then [`GgufWriter::begin`], then the tensors' data in any order, then
/// [`GgufWriter::finish`]. Dropped before that, it removes what it wrote.
pub struct GgufWriter {
    path: PathBuf,
    /// The temporary file's path; empty until it was created.
    temporary: PathBuf,
    metadata: Vec<u8>,
    keys: u64,
    tensors: Vec<Tensor>,
    data_bytes: u64,
    open: Option<(File, u64)>,
    finished: bool,
}

impl GgufWriter {
    /// A writer for the file at `path`, which is not touched before [`GgufWriter::begin`].
    pub fn new(path: &Path) -> GgufWriter {
        GgufWriter {
            path: path.to_owned(),
            temporary: PathBuf::new(),
            metadata: Vec::new(),
            keys: 0,
            tensors: Vec::new(),
            data_bytes: 0,
            open: None,
            finished: false,
        }
    }

    /// Adds a key to the metadata, before [`GgufWriter::begin`]; each key is to be added once.
    pub fn set(&mut self, key: &str, value: Value<'_>) {
        let out = &mut self.metadata;
        put_str(out, key);
        let array = |out: &mut Vec<u8>, kind: u32, len: usize| {
            out.extend(9u32.to_le_bytes());
            out.extend(kind.to_le_bytes());
            out.extend((len as u64).to_le_bytes());
        };
        match value {
            Value::U32(v) => {
                out.extend(4u32.to_le_bytes());
                out.extend(v.to_le_bytes());
            }
            Value::F32(v) => {
                out.extend(6u32.to_le_bytes());
                out.extend(v.to_le_bytes());
            }
            Value::Bool(v) => {
                out.extend(7u32.to_le_bytes());
                out.push(v.into());
            }
            Value::Str(v) => {
                out.extend(8u32.to_le_bytes());
                put_str(out, v);
            }
            Value::Strings(v) => {
                array(out, 8, v.len());
                v.iter().for_each(|s| put_str(out, s));
            }
            Value::F32s(v) => {
                array(out, 6, v.len());
                v.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
            Value::I32s(v) => {
                array(out, 5, v.len());
                v.iter().for_each(|x| out.extend(x.to_le_bytes()));
            }
        }
        self.keys += 1;
    }

    /// Announces a tensor of this shape, outermost dimension first, and returns its number. All are announced before
    /// [`GgufWriter::begin`].
    pub fn add(&mut self, name: &str, quant: Quant, shape: &[usize]) -> usize {
        assert!(self.open.is_none(), "tensors are announced before data is written");
        let cols = *shape.last().expect("a tensor has a dimension");
        let rows: usize = shape[..shape.len() - 1].iter().product();
        let offset = self.data_bytes.next_multiple_of(ALIGN);
        self.data_bytes = offset + (rows * row_bytes(quant, cols)) as u64;
        self.tensors.push(Tensor { name: name.into(), quant, shape: shape.into(), offset });
        self.tensors.len() - 1
    }

    /// Creates the temporary file and writes the header; data may follow.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn begin(&mut self) -> Result<()> {
        let mut head = Vec::new();
        head.extend(b"GGUF");
        head.extend(3u32.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend(self.keys.to_le_bytes());
        head.extend(&self.metadata);
        for tensor in &self.tensors {
            put_str(&mut head, &tensor.name);
            head.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&d| head.extend((d as u64).to_le_bytes()));
            head.extend(type_number(tensor.quant).to_le_bytes());
            head.extend(tensor.offset.to_le_bytes());
        }
        head.resize(head.len().next_multiple_of(ALIGN as usize), 0);
        let start = head.len() as u64;
        let (file, temporary) = super::temporary::create(&self.path)?;
        self.temporary = temporary;
        let io = |e| Error::io("write", &self.temporary)(e);
        file.write_all_at(&head, 0).map_err(io)?;
        file.set_len(start + self.data_bytes.next_multiple_of(ALIGN)).map_err(io)?;
        self.open = Some((file, start));
        Ok(())
    }

    /// Writes rows, as [`encode_row`] makes them, from row `first` of the tensor with number `tensor` on.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn write(&self, tensor: usize, first: usize, rows: &[u8]) -> Result<()> {
        let (file, start) = self.open.as_ref().expect("begin comes first");
        let t = &self.tensors[tensor];
        let at = t.offset + (first * row_bytes(t.quant, *t.shape.last().expect("a dimension"))) as u64;
        file.write_all_at(rows, start + at).map_err(Error::io("write", &self.temporary))
    }

    /// Gives the file its name, once all data is on the disk.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be synced or renamed; what was written is then removed.
    pub fn finish(mut self) -> Result<()> {
        let (file, _) = self.open.take().expect("begin comes first");
        file.sync_all().map_err(Error::io("write", &self.temporary))?;
        super::temporary::rename(&self.temporary, &self.path).map_err(Error::io("rename to", &self.path))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for GgufWriter {
    fn drop(&mut self) {
        if !self.finished && !self.temporary.as_os_str().is_empty() {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

fn put_str(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}
