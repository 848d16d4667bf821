//! Opens an engine from plain options: finds and packs the model, reads its predictors and profile, plans and opens a device, places
//! neurons on it and starts the scheduler's thread. Everything that runs a model comes through here; nothing here knows a command line.

pub mod activity;
pub mod artifacts;
pub mod calibration;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
pub mod cuda;
pub mod device;
mod device_check;
pub mod embedded;
mod kernels;
mod learning;
mod listener;
pub mod machine;
pub mod model;
pub mod offered;
mod opening;
mod options;
pub mod place;
mod planned;
mod ram;
mod ram_budget;
mod ram_plan;
pub mod report;
pub mod sparsity;
pub mod stores;
mod vram_budget;

pub use device::DeviceSession;
pub use device_check::check_device_can;
pub use listener::{Listener, PackProgress, Packing, Quiet};
pub use model::{ModelOptions, check_context};
pub use opening::{Opened, check, open, open_model, processor, read_in};
pub use options::{DeviceKind, DeviceOptions, EngineOptions, LookaheadOn, Placement, RamOptions};
pub use place::place;
pub use ram::{layer_blocks, too_little};
pub use ram_budget::set_ram;
pub use ram_plan::{RamAnswer, RamQuestion, ram_plan};
pub use report::DeviceReport;
pub use sparsity::{PredictorChoice, SparsityOptions};
pub use vram_budget::{VramBudget, pinnable};
