//! The daemon as its clients meet it: over its socket, with the demo model.

mod api;
mod bad_requests;
mod clients;
mod daemon;
#[path = "../support/ended.rs"]
mod ended;
mod failures;
mod files;
mod forms;
mod life;
mod limits;
mod log;
mod memory;
mod messages;
mod native;
mod neighbours;
mod options;
#[path = "../support/programs.rs"]
mod programs;
mod ram;
mod responses;
mod schemas;
mod signals;
mod soak;
mod stops;
mod strangers;
mod templates;
mod ui;
mod web;
mod words;
