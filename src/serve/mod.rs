//! The daemon: HTTP over a Unix socket, and optionally over TCP on this machine.
//!
//! Connections are tasks of a small runtime; they check, tokenise and hand jobs to the engine's thread ([`crate::generation`]). What
//! answers look like is in [`crate::api`]; here are sockets, limits, signals and routes.

mod body;
mod common;
mod connection;
mod control;
mod daemon;
mod embeddings;
mod generate;
mod limits;
mod loader;
mod loading;
mod log;
mod metrics;
mod ollama;
mod owner;
mod residency;
mod responses;
mod routes;
mod signals;
pub mod socket;
mod systemd;
mod tcp;
mod ui;
mod unknown;
mod usher;
mod wants;

pub use control::{budgets, with_sizes};
pub use daemon::Daemon;
pub use loader::{AtEnd, Load, Offered, Opened, PathLimits, SetBudget};
pub use routes::ROUTES;
pub use signals::run;
