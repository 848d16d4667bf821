//! The command line: one file per verb. Data goes to stdout, messages to stderr.

/// As the standard one, for the modules below: the text may hold a path, a name or an answer that is not ours ([`say`]).
macro_rules! eprintln {
    ($($text:tt)*) => { $crate::cli::say(format_args!($($text)*)) };
}

pub(crate) mod bench;
mod calibrate;
pub(crate) mod chart;
mod chat;
mod chat_backend;
mod chat_commands;
mod chat_session;
pub(crate) mod completions;
mod config;
#[cfg(feature = "cuda")]
mod cuda;
mod daemon_verbs;
pub(crate) mod device_arg;
mod doctor;
pub(crate) mod eval;
#[cfg(feature = "cuda")]
mod gpu_check;
pub(crate) mod habits;
pub(crate) mod help;
pub(crate) mod lab_arg;
mod loader_arg;
mod log_line;
mod log_writer;
mod ls;
pub(crate) mod machine_arg;
mod measure;
pub(crate) mod model_arg;
pub(crate) mod output;
mod pack;
mod plan;
mod plan_ram;
mod plan_subject;
pub(crate) mod policy_arg;
mod printing;
mod profile;
mod profile_plots;
mod program;
pub(crate) mod progress;
#[cfg(feature = "pull")]
mod pull;
mod rm;
pub(crate) mod run;
mod sampling_arg;
pub(crate) mod serve;
mod settings_arg;
mod show;
pub(crate) mod size;
pub(crate) mod sparsity_arg;
#[cfg(feature = "tui")]
mod top;
mod trace_arg;
mod train_predictor;
mod verbs;
mod wrap;

pub use crate::open::embedded::{File, carry};
pub(crate) use printing::{print, print_json, safe_json, say};
pub use program::main;
pub(crate) use program::{Program, start};

use crate::error::human_bytes;
use printing::{name, print_as_it_is};
#[cfg(test)]
pub(crate) use verbs::command;
