//! Threads, kernels and memory that all forms of the FFN compute with.

use crate::cpu::floats::Room;
use crate::cpu::{Kernels, ThreadPool};
use crate::model::config::ModelConfig;

/// A thread's memory for unpacked weights.
#[derive(Default)]
pub struct Tile {
    /// Numbers.
    pub numbers: Vec<f32>,
    /// What is multiplied across rows.
    pub(super) room: Room,
}

/// Threads with their memory, kernels, and the shape of the model.
pub struct Compute<'a> {
    /// The threads that compute.
    pub pool: &'a mut ThreadPool,
    /// The CPU kernels that are used.
    pub kernels: &'a Kernels,
    /// The model's shape.
    pub config: &'a ModelConfig,
    /// One for each thread. An FFN of neurons needs none for up to [`MAX_COLUMNS`](crate::cpu::MAX_COLUMNS) columns.
    pub tiles: &'a mut [Tile],
}

impl Compute<'_> {
    /// The same for one more call.
    pub fn again(&mut self) -> Compute<'_> {
        Compute { pool: self.pool, kernels: self.kernels, config: self.config, tiles: self.tiles }
    }
}
