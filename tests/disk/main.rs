//! What lies on disk: experts and neurons that are read when they are needed.

mod checksums;
mod experts_from_disk;
#[path = "../support/gguf.rs"]
mod gguf_file;
mod host_cache;
#[path = "../support/mod.rs"]
mod support;
mod three_tiers;
