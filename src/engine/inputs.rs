//! What goes into the matrix products of a prompt: looked at to choose fixed steps, and given them.

use crate::cpu::shadow::{Magnitudes, Scale};

/// An input of a layer's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// Of queries, keys and values.
    Qkv,
    /// Of attention's output matrix.
    Output,
    /// Of gate and up.
    Ffn,
    /// Of down.
    Down,
}

impl Input {
    /// All of a layer, in the order of its table.
    pub const ALL: [Input; 4] = [Input::Qkv, Input::Output, Input::Ffn, Input::Down];
}

/// One of each of a layer's inputs.
pub type OfLayer<T> = [T; Input::ALL.len()];

/// The inputs of dense layers.
#[derive(Default)]
pub(super) struct Inputs {
    /// The layer that is computed.
    pub layer: usize,
    /// Their fixed steps, `[layers]`; empty where each chunk has its own.
    pub scales: Vec<OfLayer<Scale>>,
    /// Magnitudes that occurred, `[layers]`; empty unless they are recorded.
    pub seen: Vec<OfLayer<Magnitudes>>,
}

impl Inputs {
    /// Looks at an input of the current layer, and returns its fixed step.
    pub fn take(&mut self, input: Input, values: &[f32]) -> Option<Scale> {
        if let Some(seen) = self.seen.get_mut(self.layer) {
            seen[input as usize].add(values);
        }
        self.scales.get(self.layer).map(|scales| scales[input as usize])
    }
}
