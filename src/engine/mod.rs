//! Running a model: the way of one token is [`decode`], everything else serves it.

pub mod attention;
pub mod decode;
pub mod ffn;
mod health;
pub mod hybrid;
pub mod observer;
mod on_device;
pub mod prefill;
pub mod report;
pub mod sampler;
pub mod session;
pub mod sparsity;
pub mod streaming;

pub use decode::{Column, Engine, Logits};
pub use ffn::{Counts, Selection, Work};
pub use health::Failure;
pub use hybrid::{Between, Hybrid, Migrator, MigratorCounts};
pub use observer::{AuditCounts, LiveAudit, Observer, Seen};
pub use on_device::room_bytes;
pub use prefill::ChunkCounts;
pub use report::Report;
pub use session::Session;
pub use sparsity::{Choice, Sparsity};
pub use streaming::{ChunkCosts, ChunkRates};
