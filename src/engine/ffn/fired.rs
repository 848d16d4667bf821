//! Which neurons fire, by their gates.

use super::work::Selection;
use crate::exp::silu;
use crate::ids::StoreId;
use crate::model::config::{Activation, ModelConfig};

/// Neurons whose activations are computed before any is compared: loops without branches vectorise.
const TOGETHER: usize = 64;

impl Selection {
    /// Becomes the neurons that fire for some column: |act(gate)| above `activation_threshold`; `gates` is `[n, ffn]`.
    pub fn fired(&mut self, config: &ModelConfig, gates: &[f32], (n, ffn): (usize, usize), activation_threshold: f32) {
        assert_eq!(gates.len(), n * ffn);
        self.neurons.clear();
        self.masks.clear();
        self.neurons.resize(ffn, StoreId(0));
        self.masks.resize(ffn, 0);
        let (mut len, mut values) = (0, [0f32; TOGETHER]);
        for first in (0..ffn).step_by(TOGETHER) {
            let count = TOGETHER.min(ffn - first);
            let mut masks = [0u32; TOGETHER];
            for b in 0..n {
                let gates = &gates[b * ffn + first..][..count];
                apply(config.activation, gates, &mut values[..count]);
                for (mask, value) in masks.iter_mut().zip(&values[..count]) {
                    *mask |= u32::from(value.abs() > activation_threshold) << b;
                }
            }
            // Written without branches: which neurons fire is hard to guess.
            for (i, &mask) in masks[..count].iter().enumerate() {
                self.neurons[len] = StoreId((first + i) as u32);
                self.masks[len] = mask;
                len += usize::from(mask != 0);
            }
        }
        self.neurons.truncate(len);
        self.masks.truncate(len);
    }
}

/// The activation function of each gate.
fn apply(activation: Activation, gates: &[f32], out: &mut [f32]) {
    match activation {
        Activation::Silu => out.iter_mut().zip(gates).for_each(|(out, &gate)| *out = silu(gate)),
        other => out.iter_mut().zip(gates).for_each(|(out, &gate)| *out = other.apply(gate)),
    }
}
