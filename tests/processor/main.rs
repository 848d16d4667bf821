//! What the processor computes: every kernel, the FFN, prompts, batches, keys and values.

mod batch;
mod ffn;
mod floats;
mod gemm;
mod instruction_sets;
mod kernels;
mod kv_types;
mod prefill;
mod sparse;
#[path = "../support/mod.rs"]
mod support;
