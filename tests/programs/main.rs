//! The programs as people meet them: options, output, terminals.

mod cli;
#[path = "../support/ended.rs"]
mod ended;
#[path = "../support/gguf.rs"]
mod gguf_file;
mod habits;
mod ids;
mod long_work;
#[path = "../support/programs.rs"]
mod programs;
#[cfg(feature = "pull")]
mod pull;
mod start;
#[path = "../support/mod.rs"]
mod support;
mod terminal;
