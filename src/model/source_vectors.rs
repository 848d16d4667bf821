//! The vectors of a published model as numbers: biases, norms, and what a mixer has beside its matrices.

use super::recurrence::Recurrence;
use super::role::Role;
use super::source::Source;
use crate::error::{Error, Result};
use crate::formats::{DType, TensorView, blocks};

/// How the name of a tensor ends that holds the logarithms of what the decays' logarithms are the negatives of.
const LOGARITHM: &str = "A_log";

impl Source {
    /// What a layer's mixer has beside its matrices, if it is no attention.
    ///
    /// # Errors
    /// As [`Source::weight`] and [`Source::vector`].
    pub fn recurrence(&self, layer: usize) -> Result<Recurrence> {
        let mixer = self.config.mixer(layer);
        let [taps, channels] = mixer.taps();
        if taps == 0 {
            return Ok(Recurrence::default());
        }
        let vector = |role| self.vector(self.weight(role, layer)?);
        let bias = |role| self.vector(self.find(role, layer, "bias", &self.shape(role, layer)[..1])?);
        let by_channel = vector(Role::Taps)?;
        let Some(linear) = mixer.linear() else {
            let taps = (0..taps * channels).map(|i| by_channel[i % channels * taps + i / channels]).collect();
            return Ok(Recurrence { taps, ..Default::default() });
        };
        let order = self.names.channel_order(&linear);
        let from = |channel: usize| order.as_ref().map_or(channel, |order| order[channel]);
        let taps = (0..taps * channels).map(|i| by_channel[from(i % channels) * taps + i / channels]).collect();
        let mut decay = vector(Role::Decay)?;
        if self.names.of(Role::Decay, layer).ends_with(LOGARITHM) {
            decay.iter_mut().for_each(|decay| *decay = -decay.exp());
        }
        let (mut conv_bias, mut skip) = (Vec::new(), Vec::new());
        if linear.is_mamba() {
            let bias = bias(Role::Taps)?;
            conv_bias = (0..channels).map(|channel| bias[from(channel)]).collect();
            skip = vector(Role::Skip)?;
        }
        let step_bias = bias(Role::StepBias)?;
        Ok(Recurrence { taps, conv_bias, step_bias, decay, norm: vector(Role::StateNorm)?, skip })
    }

    /// A role's bias as numbers, in the order of [`Source::rows`].
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is missing, has another shape, or holds a number that is not finite.
    pub fn bias(&self, role: Role, layer: usize) -> Result<Vec<f32>> {
        let rows = self.shape(role, layer)[0];
        let bias = self.vector(self.find(role, layer, "bias", &[rows])?)?;
        Ok(match self.row_order(role, layer) {
            Some(order) => order.iter().map(|&from| bias[from]).collect(),
            None => bias,
        })
    }

    /// A norm's weight as numbers.
    ///
    /// # Errors
    /// As [`Source::weight`] and [`Source::vector`].
    pub fn norm(&self, role: Role, layer: usize) -> Result<Vec<f32>> {
        let mut weight = self.vector(self.weight(role, layer)?)?;
        weight.iter_mut().for_each(|weight| *weight += self.names.norm_offset);
        let order = match role {
            Role::QNorm | Role::KNorm => self.names.head_order(weight.len()),
            _ => None,
        };
        Ok(match order {
            Some(order) => order.iter().map(|&from| weight[from]).collect(),
            None => weight,
        })
    }

    /// A vector as numbers.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is quantised or holds a number that is not finite.
    pub fn vector(&self, view: TensorView<'_>) -> Result<Vec<f32>> {
        check_vector(view)?;
        let mut out = vec![0.0; view.info.shape.iter().product()];
        blocks::dequantize(view.info.dtype, view.data, &mut out);
        finite(&out, view)?;
        Ok(out)
    }

    /// The biases of all experts' gate, up or down, `[experts, rows]`.
    ///
    /// # Errors
    /// As [`Source::bias`].
    pub fn expert_biases(&self, role: Role, layer: usize) -> Result<Vec<f32>> {
        self.vector(self.find_expert_biases(role, layer)?)
    }
}

/// Checks that a vector is of floats.
///
/// # Errors
/// [`Error::BadFile`] with its name and type.
pub(super) fn check_vector(view: TensorView<'_>) -> Result<()> {
    if matches!(view.info.dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Ok(());
    }
    let why = format!("is {}; a vector must be F32, F16 or BF16", view.info.dtype.name());
    Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why))
}

/// Checks that no number that was read from a tensor is NaN or infinite.
///
/// # Errors
/// [`Error::BadFile`] with the tensor's name and the first such number.
pub fn finite(values: &[f32], view: TensorView<'_>) -> Result<()> {
    match blocks::first_non_finite(values) {
        None => Ok(()),
        Some(at) => {
            let why = format!("holds {} (number {at} of those read): the model is damaged", values[at]);
            Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why))
        }
    }
}
