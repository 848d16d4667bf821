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
mod limits;
mod log;
mod metrics;
mod routes;
mod signals;
pub mod socket;
mod systemd;
mod tcp;
mod ui;
mod unknown;

pub use control::{budgets, with_sizes};
pub use daemon::{AtEnd, Daemon, Load, Opened, PathLimits, SetBudget};
pub use routes::ROUTES;
pub use signals::run;
