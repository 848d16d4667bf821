//! The daemon as its clients meet it: over its socket, with the demo model.

mod anthropic;
mod api;
mod bad_requests;
mod clients;
mod daemon;
#[path = "../support/damaged.rs"]
mod damaged;
#[path = "../support/ended.rs"]
mod ended;
mod failures;
mod files;
mod forms;
mod forms_of_answers;
mod infill;
mod life;
mod limits;
mod log;
mod memory;
mod messages;
mod native;
mod neighbours;
mod not_finite;
mod ollama;
mod options;
#[path = "../support/programs.rs"]
mod programs;
mod prompts;
mod ram;
mod recorded;
mod responses;
mod schemas;
mod signals;
mod soak;
mod stops;
mod strangers;
mod swaps;
mod templates;
mod ui;
mod web;
mod words;
