//! The vectors of a mixer that is no attention.

/// What a mixer that is no attention has beside its matrices. What it does not have is empty.
#[derive(Clone, Debug, Default)]
pub struct Recurrence {
    /// The taps of its convolution, the oldest position's first, `[taps, channels]`.
    pub taps: Vec<f32>,
    /// What is added to the sums of its taps, `[channels]`.
    pub conv_bias: Vec<f32>,
    /// What is added to alpha before its softplus, `[value_heads]`.
    pub step_bias: Vec<f32>,
    /// What that softplus is multiplied by to be the logarithm of the decay, `[value_heads]`.
    pub decay: Vec<f32>,
    /// The weights of the norm of what heads make: one for each number of a head, `[head_dim]`, or of all heads, `[value_heads * head_dim]`.
    pub norm: Vec<f32>,
    /// A head's values are added to its output, multiplied by this, `[value_heads]`.
    pub skip: Vec<f32>,
}

impl Recurrence {
    /// Its vectors with the names that a store has for them.
    pub fn sections(&self) -> [(&'static str, &[f32]); 6] {
        [
            ("taps", &self.taps),
            ("conv_bias", &self.conv_bias),
            ("step_bias", &self.step_bias),
            ("decay", &self.decay),
            ("state_norm", &self.norm),
            ("skip", &self.skip),
        ]
    }
}
