//! An NVIDIA card as a [`super::Device`], through the driver API, which is loaded at run time.
//!
//! Every operation is put on one of two streams and returns at once. If the driver refuses something, that becomes the device's
//! [`super::Fault`]: from then on nothing runs and no wait blocks. Streams wait for each other only by events of our own, one for each thing
//! that is waited for, so that copies and kernels wait where they are asked to and nowhere else.

mod buffers;
mod card;
mod copies;
mod device;
mod driver;
mod graphs;
mod kernels;
mod launches;
mod memory;
mod moves;
mod nvrtc;
mod pins;
mod spans;
mod tiles;

pub use card::{Card, OLDEST_CARD, OLDEST_DRIVER, Unusable};
pub use device::{CudaDevice, Options, PATIENCE, Pinned};
pub use kernels::Delivery;
pub use nvrtc::SHOWN;
pub use tiles::Trial;
