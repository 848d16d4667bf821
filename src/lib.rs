//! A runtime-adaptive neuron-cache inference engine. `ARCHITECTURE.md` is the map of this crate; the modules stand in
//! dependency order.

#![warn(missing_docs)]

pub mod clock;
pub mod config;
pub mod error;
pub mod exp;
pub mod ids;
pub mod interrupt;
pub mod prng;

pub mod child;

pub mod disk;
pub mod formats;
pub mod hub;
pub mod settings;
pub mod tokenizer;

pub mod cpu;
pub mod model;

pub mod device;

pub mod cache;
pub mod ops;
pub mod predictor;
pub mod profile;
pub mod scheduler;

pub mod host_cache;

pub mod engine;
pub mod placement;

pub mod generation;

pub mod background;
pub mod machine;
pub mod pack;
pub mod training;

pub mod evaluation;
pub mod open;

pub mod api;
#[cfg(feature = "server")]
pub mod client;
#[cfg(feature = "server")]
pub mod serve;

#[cfg(feature = "cli")]
pub mod cli;

pub mod lab;
#[cfg(feature = "lab")]
pub mod lab_cli;

pub use error::{Error, Result};
pub use open::{EngineOptions, open};
