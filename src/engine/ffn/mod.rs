//! The FFN in its forms: over neuron blocks, over many columns, of whole matrices, of experts, and of what comes from disk.

mod ahead;
mod buffers;
mod cached;
mod chosen;
mod compute;
mod experts;
mod fired;
mod firing_experts;
mod many;
mod neurons;
mod predicted_experts;
mod scaled_experts;
mod shared;
mod units;
mod whole;
mod work;

pub use buffers::FfnBuffers;
pub(super) use cached::Tools as CachedTools;
pub use cached::{CachedFfn, HostBudget};
pub use chosen::{Chosen, Scorer};
pub use compute::{Compute, Tile};
pub use experts::{ExpertBuffers, ExpertsRead, experts, experts_left, experts_wanted};
pub use many::{activations, active, down, products};
pub use neurons::ffn;
pub use predicted_experts::OnDevice;
pub use shared::{shared_expert, shared_weight};
pub use work::{Counts, Neurons, Selection, Work, activate_gated};
