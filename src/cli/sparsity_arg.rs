//! `--predictor` and its options.

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
    /// Predictor that selects the neurons of each token: dense (all), exact, sign, mlp or auto
    ///
    /// exact computes every gate, then only the active neurons: exact results, and a third of the weights is always read. sign compares the
    /// sign bits of gates and input; it needs no training, and misses fewer neurons if calibrated. mlp is trained by `train-predictor`. auto
    /// (the default) takes, for a ReLU model, mlp if it is trained, else sign if it is calibrated, else dense; for other models dense. By
    /// layer: `mlp,dense@0,exact@3-5`; a part without layers is for all layers that no other part names.
    #[arg(long, value_name = "KIND")]
    predictor: Option<PredictorChoice>,
    /// Compute neurons from this probability on, 0 to 1 [default: from the predictor file]
    #[arg(long, value_name = "P")]
    threshold: Option<f32>,
    /// Predict a layer from the residual this many layers before it
    #[arg(long, value_name = "LAYERS", default_value_t = 0)]
    ahead: usize,
    /// Silu and gelu models: share of the neurons to leave out, those with the smallest |act(gate)| [default: 0.5]
    #[arg(long, value_name = "SHARE")]
    sparsity: Option<f32>,
    /// Predictor file to use instead of the model's own
    #[arg(long, value_name = "FILE")]
    predictor_file: Option<PathBuf>,
    /// Calibrate the sign predictor on these texts first, once, if no mlp is trained
    #[arg(long, value_name = "FILE,...", value_delimiter = ',')]
    calibrate: Vec<PathBuf>,
}

impl SparsityArgs {
    /// The options for another model: without those that refer to one model's predictor. Also returns the flags that are left out.
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

    /// The options given; without a predictor the default, auto.
    pub fn options(&self) -> SparsityOptions {
        self.options_or(PredictorChoice::default())
    }

    /// The options given; without a predictor every neuron is computed.
    pub fn options_or_dense(&self) -> SparsityOptions {
        self.options_or(Kind::Dense.into())
    }

    /// The options given; without a predictor the setting `engine.predictor`.
    ///
    /// # Errors
    /// [`Error::Usage`] for an invalid setting.
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
