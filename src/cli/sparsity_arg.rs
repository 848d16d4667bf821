//! `--predictor` and what belongs to it, as typed.

use super::settings_arg::chosen;
use crate::error::Result;
pub use crate::open::sparsity::one;
use crate::open::{PredictorChoice, SparsityOptions};
use crate::predictor::Kind;
use crate::settings::Settings;
use clap::Args;
use std::path::PathBuf;

#[derive(Args, Clone, Default, PartialEq)]
pub struct SparsityArgs {
    /// What tells which neurons a token needs: dense (all), exact, sign, mlp or auto; by layer as `mlp,dense@0,exact@3-5`, where a part
    /// without layers is for all that no other part names
    ///
    /// exact computes every gate first, then what fired: nothing is lost, a third is always read. sign compares sign bits
    /// of gates and input and needs no training; calibrated, it misses less. mlp is trained with `train-predictor`. auto, the default, takes
    /// for a ReLU model the trained one if there is one, else sign if it is calibrated, else dense; dense for others.
    #[arg(long, value_name = "KIND[@LAYERS],...")]
    predictor: Option<PredictorChoice>,
    /// Probability from which on a neuron is computed, 0 to 1 [default: the predictor file's]
    #[arg(long)]
    threshold: Option<f32>,
    /// Predict a layer from the residual this many layers before it
    #[arg(long, default_value_t = 0)]
    ahead: usize,
    /// Of silu and gelu models: share of the neurons to leave out, those of the smallest |act(gate)| [default: 0.5]
    #[arg(long)]
    sparsity: Option<f32>,
    /// Predictor file to take instead of the model's own
    #[arg(long, value_name = "FILE")]
    predictor_file: Option<PathBuf>,
    /// Texts to calibrate the sign predictor on first, once, where the model has no trained one
    #[arg(long, value_name = "FILE,...", value_delimiter = ',')]
    calibrate: Vec<PathBuf>,
}

impl SparsityArgs {
    /// The same for another model than the one that it was typed for: without what belongs to a model's predictor. Returns also the flags that are
    /// left out.
    pub fn for_another_model(&self) -> (SparsityArgs, Vec<&'static str>) {
        let predictor = self.predictor.clone().filter(|choice| !choice.is_of_one_model());
        let typed = [
            ("--predictor", predictor.is_none() && self.predictor.is_some()),
            ("--threshold", self.threshold.is_some()),
            ("--ahead", self.ahead > 0),
            ("--sparsity", self.sparsity.is_some()),
            ("--predictor-file", self.predictor_file.is_some()),
            ("--calibrate", !self.calibrate.is_empty()),
        ];
        let left = typed.into_iter().filter(|(_, typed)| *typed).map(|(flag, _)| flag).collect();
        (SparsityArgs { predictor, ..SparsityArgs::default() }, left)
    }

    /// What was typed; without a predictor the best there is.
    pub fn options(&self) -> SparsityOptions {
        self.options_or(PredictorChoice::default())
    }

    /// What was typed; without a predictor every neuron is computed.
    pub fn options_or_dense(&self) -> SparsityOptions {
        self.options_or(Kind::Dense.into())
    }

    /// What was typed; without a predictor what the setting `engine.predictor` says.
    ///
    /// # Errors
    /// [`Error::Usage`] for a setting that is none.
    pub fn options_or_setting(&self, settings: &Settings) -> Result<SparsityOptions> {
        let predictor = chosen(settings, "engine.predictor", self.predictor.clone(), str::parse)?;
        Ok(SparsityArgs { predictor, ..self.clone() }.options())
    }

    fn options_or(&self, unsaid: PredictorChoice) -> SparsityOptions {
        SparsityOptions {
            predictor: self.predictor.clone().unwrap_or(unsaid),
            threshold: self.threshold,
            ahead: self.ahead,
            sparsity: self.sparsity,
            predictor_file: self.predictor_file.clone(),
            calibrate: self.calibrate.clone(),
        }
    }
}
