//! The weights of norms.

use super::config::{ModelConfig, Norm};

/// The weights of a norm, `[hidden]` each.
#[derive(Clone, Debug, Default)]
pub struct NormWeights {
    /// What the normed numbers are multiplied by.
    pub weight: Vec<f32>,
    /// What is added to them; empty for RMS norms.
    pub bias: Vec<f32>,
}

impl NormWeights {
    /// Of a layer that does not norm.
    pub(crate) const NONE: NormWeights = NormWeights { weight: Vec::new(), bias: Vec::new() };

    /// Of an FFN that is not there: the norm of anything is 0.
    pub(super) fn zeros(c: &ModelConfig) -> NormWeights {
        let zeros = vec![0.0; c.hidden];
        NormWeights { bias: if matches!(c.norm, Norm::Layer(_)) { zeros.clone() } else { Vec::new() }, weight: zeros }
    }

    /// The same norm with a result that is `scale` times as large.
    pub(super) fn scaled(mut self, scale: f32) -> NormWeights {
        self.weight.iter_mut().chain(&mut self.bias).for_each(|weight| *weight *= scale);
        self
    }
}
