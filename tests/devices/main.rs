//! A device beside the host: the laws of residency, moves, decisions and prompts.

mod attention_streaming;
mod decisions;
mod device;
mod device_fault;
mod device_state;
#[path = "../support/gguf.rs"]
mod gguf_file;
mod hybrid;
mod long_chunks_on_a_device;
mod mixtures_on_a_device;
mod neurons_inside_on_a_device;
mod predicted_experts;
#[path = "../support/programs.rs"]
mod programs;
mod prompt_parts;
mod prompts;
mod scheduler;
#[path = "../support/mod.rs"]
mod support;
mod timeline;
#[path = "../support/timeline.rs"]
mod timeline_laws;
