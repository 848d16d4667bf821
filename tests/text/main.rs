//! Texts: tokens, templates, calls of functions, and the worker that answers.

mod calls;
mod clients;
#[path = "../support/gguf.rs"]
mod gguf;
mod jinja2;
mod speculation;
#[path = "../support/mod.rs"]
mod support;
mod templates;
mod tokens;
mod worker;
