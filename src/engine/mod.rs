//! Running a model: `forward` says what a layer is; `host` and [`split`] carry it out.

pub mod attention;
pub mod batch;
mod convolution;
mod embed;
pub mod ffn;
mod forward;
mod health;
mod host;
pub mod inputs;
mod latent;
mod linear_attention;
mod mixer;
mod mixture;
mod norms;
pub mod observer;
mod per_layer;
mod positions;
mod probe;
pub mod report;
pub mod routing;
pub mod sampler;
pub mod session;
pub mod sparsity;
pub mod split;
mod state;

pub use batch::{BatchToken, Logits};
pub use ffn::{CachedFfn, Counts, HostBudget, Selection, Work};
pub use health::{Failure, unread};
pub use observer::{AuditCounts, LiveAudit, Observer, Seen, SeenAttention, SeenExperts};
pub use report::Report;
pub use session::Session;
pub use sparsity::{Choice, Foresight, Sparsity};
pub use split::streaming::{ChunkCosts, Division, ExpertCosts, Missing};
pub use split::{
    ChunkCounts, DividedLayer, Lookahead, Migrator, MigratorCounts, Split, attention_layer_bytes, attention_made_bytes,
    pinned_bytes, predictor_bytes, workspace_bytes,
};
pub use state::Engine;
