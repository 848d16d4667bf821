//! The wire formats of OpenAI, Anthropic and ollama: requests are made into jobs, events into answers. There is no HTTP here: the daemon
//! uses it, and so does `chat` without a daemon.

pub mod anthropic;
mod anthropic_stream;
mod arguments;
pub mod call_format;
pub mod call_grammar;
pub mod chat;
pub mod completions;
pub mod dialogue;
pub mod embeddings;
pub mod error;
pub mod fields;
pub mod forms;
pub mod habits;
pub mod infill;
mod infill_events;
pub mod items;
pub mod json_scan;
pub mod keep_alive;
mod list_grammar;
mod literals;
pub mod messages;
pub mod model;
pub mod ollama;
mod ollama_lines;
mod ollama_options;
pub mod places;
pub mod probe;
pub mod reader;
pub mod reading;
pub mod request;
mod response_object;
pub mod responses;
pub mod schema;
pub mod schema_bounds;
pub mod schema_parts;
pub mod stored;
pub mod stream;
pub mod tools;
pub mod unknown;
mod writing;

pub use error::{ApiError, ErrorForm, NOT_FOUND, TOO_LONG};
pub use model::ServedModel;
pub use request::{Asker, Generates, parse, parse_with};
pub use stream::{Answer, Collector, Prepared, Wire};
pub use unknown::Unknown;

use crate::tokenizer::chat_template;
use std::process::ExitCode;

/// Called first in `main`, with the program's first argument. Chat templates and JSON schemas come from strangers and are run in a child
/// process, which is this same program with a special first argument: then its work is done here and its exit code returned. `None` if this
/// is not such a child.
pub fn child(argument: Option<&str>) -> Option<ExitCode> {
    match argument {
        Some(chat_template::CHILD_ARGUMENT) => Some(chat_template::child_main()),
        Some(schema::CHILD_ARGUMENT) => Some(schema::child_main()),
        _ => None,
    }
}
