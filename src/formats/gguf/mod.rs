//! Tensors and metadata of a GGUF file, versions 2 and 3, PowerInfer's variant (magic `PWRI`) too.
//!
//! ```text
//! magic "GGUF" | version u32 | tensor count u64 | key count u64
//! key count    x  key string | type u32 | value
//! tensor count x  name string | dimension count u32 | dimensions u64, fastest first | type u32 | offset u64
//! padding to general.alignment, then the tensors' data, each padded to it
//! ```
//!
//! A string is a u64 length and its bytes. Everything is little endian. The layout is ggml/docs/gguf.md of llama.cpp.

mod header;
mod metadata;
mod parts;
mod reader;
mod split;
mod tensors;

pub use header::{Gguf, parse};
pub use metadata::{Array, Metadata, Value};
pub use parts::{MAX_PARTS, PartName, parts_of};
pub use split::{files_of, first_part, open};
