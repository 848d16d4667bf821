//! Models as their files are: every family and form, what is refused, and what is made of them.

mod bad_models;
mod clusters;
#[path = "../support/damaged.rs"]
mod damaged;
mod described;
#[path = "../support/drawn.rs"]
mod drawn;
mod drelu;
mod experts;
mod experts_by_neuron;
mod forms;
#[path = "../support/gguf.rs"]
mod gguf_file;
mod gguf_parts;
mod gpt_oss;
mod latent;
mod mixes;
mod neuron_store;
mod not_finite;
mod odd_models;
mod open;
mod own_files;
mod prompt_cache;
#[path = "../support/reference.rs"]
mod reference;
mod reference_models;
#[path = "../support/mod.rs"]
mod support;
