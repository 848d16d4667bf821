//! From `--predictor` and its companions to what the engine computes.

use super::companions::{self, Kind as File};
use crate::engine::{Choice, Engine, Sparsity};
use crate::error::{Error, Result};
use crate::formats::predictor_file::{self, PredictorFile};
use crate::formats::profile_file;
use crate::predictor::{self, Exact, Kind, Predictor, Sign};
use crate::profile::Profile;
use clap::Args;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Args, Clone, Default)]
pub struct SparsityArgs {
    /// What tells which neurons a token needs: dense (all), exact, sign, mlp or auto; by layer as `mlp,dense@0,exact@3-5`
    ///
    /// exact computes every gate first, then what fired: nothing is lost, a third is always read. sign compares sign bits
    /// of gates and input and needs no training. mlp is trained with `train-predictor`. auto takes the best there is for a
    /// ReLU model and dense for others.
    #[arg(long, value_name = "KIND[@LAYERS],...")]
    predictor: Option<Plan>,
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
}

/// What a verb does when nobody says.
#[derive(Clone, Copy, PartialEq)]
pub enum Unsaid {
    Auto,
    Dense,
}

/// Kinds and the layers they are for; a later entry overrules an earlier one. No kind means auto.
#[derive(Clone)]
struct Plan(Vec<(Option<Kind>, Option<RangeInclusive<usize>>)>);

impl std::str::FromStr for Plan {
    type Err = String;
    fn from_str(text: &str) -> Result<Plan, String> {
        let entry = |entry: &str| -> Result<_, String> {
            let (kind, layers) = entry.split_once('@').map_or((entry, None), |(kind, layers)| (kind, Some(layers)));
            let kind = if kind == "auto" { None } else { Some(kind.parse::<Kind>()?) };
            let layers = match layers {
                None => None,
                Some(layers) => {
                    let number = |text: &str| text.parse().map_err(|_| format!("'{layers}' is no layer or A-B"));
                    let (first, last) = layers.split_once('-').unwrap_or((layers, layers));
                    Some(number(first)?..=number(last)?)
                }
            };
            Ok((kind, layers))
        };
        Ok(Plan(text.split(',').map(entry).collect::<Result<_, _>>()?))
    }
}

impl SparsityArgs {
    /// With `predictor` where no other was typed.
    pub fn or_predictor(&self, predictor: &str) -> Result<SparsityArgs> {
        let said = predictor.parse().map_err(|why| Error::Usage(format!("engine.predictor: {why}")))?;
        Ok(SparsityArgs { predictor: Some(self.predictor.clone().unwrap_or(said)), ..self.clone() })
    }

    /// Tells the engine which neurons to compute.
    pub fn apply(&self, engine: &mut Engine, unsaid: Unsaid) -> Result<()> {
        if let Some(threshold) = self.threshold.filter(|t| !(0.0..=1.0).contains(t)) {
            return Err(Error::Usage(format!("--threshold {threshold}: take a probability, 0 to 1")));
        }
        if let Some(share) = self.sparsity.filter(|s| !(0.0..1.0).contains(s)) {
            return Err(Error::Usage(format!("--sparsity {share}: take a share, 0 to below 1")));
        }
        let layers = engine.model.config.layers;
        if self.ahead >= layers {
            return Err(Error::Usage(format!("--ahead {}: the model has {layers} layers", self.ahead)));
        }
        let unsaid = Plan(vec![(if unsaid == Unsaid::Auto { None } else { Some(Kind::Dense) }, None)]);
        let plan = self.predictor.as_ref().unwrap_or(&unsaid);
        let mut kinds = vec![None; layers];
        for (kind, range) in &plan.0 {
            let range = range.clone().unwrap_or(0..=layers - 1);
            let (first, last) = (*range.start(), *range.end());
            let part = kinds.get_mut(range).ok_or_else(|| {
                Error::Usage(format!("--predictor: layers {first}-{last}; the model has 0 to {}", layers - 1))
            })?;
            part.fill(*kind);
        }
        let mut found = Found { args: self, engine, file: None, exact: None, sign: None, mlp: None };
        let choices = (0..layers).map(|layer| found.choice(layer, kinds[layer])).collect::<Result<Vec<_>>>()?;
        let sparsity = Sparsity::new(choices, self.ahead).map_err(|why| {
            Error::Usage(format!(
                "{why}; take an --ahead that it was made for, or make one: train-predictor, calibrate"
            ))
        })?;
        engine.set_sparsity(sparsity);
        Ok(())
    }
}

/// One predictor for all layers, the best there is if none is named, with its layers' magnitude cuts.
pub fn one(engine: &Engine, kind: Option<Kind>, file: Option<PathBuf>) -> Result<(Arc<dyn Predictor>, Vec<f32>)> {
    let args = SparsityArgs { predictor: None, threshold: None, ahead: 0, sparsity: None, predictor_file: file };
    let mut found = Found { args: &args, engine, file: None, exact: None, sign: None, mlp: None };
    let kind = match kind {
        Some(kind) => kind,
        None => match found.best()? {
            Kind::Dense => Kind::Exact,
            kind => kind,
        },
    };
    let ready = match kind {
        Kind::Dense => return Err(Error::Usage("dense predicts nothing; take mlp, sign or exact".into())),
        Kind::Exact => found.exact()?,
        Kind::Sign => found.sign()?,
        Kind::Mlp => found.mlp()?,
    };
    Ok((ready.predictor, ready.cuts))
}

/// A predictor with its threshold and its layers' magnitude cuts.
#[derive(Clone)]
struct Ready {
    predictor: Arc<dyn Predictor>,
    cuts: Vec<f32>,
}

/// Predictors, opened when the first layer asks for them.
struct Found<'a> {
    args: &'a SparsityArgs,
    engine: &'a Engine,
    /// Whether there is an mlp file, once it was looked for.
    file: Option<bool>,
    exact: Option<Ready>,
    sign: Option<Ready>,
    mlp: Option<Ready>,
}

impl Found<'_> {
    fn choice(&mut self, layer: usize, kind: Option<Kind>) -> Result<Choice> {
        let kind = match kind {
            Some(kind) => kind,
            None => self.best()?,
        };
        let ready = match kind {
            Kind::Dense => return Ok(Choice::Dense),
            Kind::Exact => {
                let ready = self.exact()?;
                if self.args.ahead == 0 {
                    return Ok(Choice::Exact { cut: ready.cuts[layer] });
                }
                ready
            }
            Kind::Sign => self.sign()?,
            Kind::Mlp => self.mlp()?,
        };
        let ahead = if layer < self.args.ahead { 0 } else { self.args.ahead };
        let threshold = self.args.threshold.unwrap_or_else(|| ready.predictor.threshold(layer, ahead));
        Ok(Choice::Predicted { predictor: ready.predictor, threshold, cut: ready.cuts[layer] })
    }

    /// What `auto` means for this model.
    fn best(&mut self) -> Result<Kind> {
        if !self.engine.model.config.activation.is_sparse() {
            return Ok(Kind::Dense);
        }
        if self.file.is_none() {
            self.file = Some(self.open(File::MlpPredictor)?.is_some());
        }
        Ok(if self.file == Some(true) { Kind::Mlp } else { Kind::Sign })
    }

    fn exact(&mut self) -> Result<Ready> {
        if self.exact.is_none() {
            let cuts = self.cuts()?;
            self.exact = Some(Ready { predictor: Arc::new(Exact::new(&self.engine.model, &cuts)), cuts });
        }
        Ok(self.exact.clone().expect("made above"))
    }

    /// |act(gate)| per layer above which neurons are computed: zero for ReLU, else from the profile.
    fn cuts(&self) -> Result<Vec<f32>> {
        let model = &self.engine.model;
        if model.config.activation.is_sparse() {
            return Ok(vec![0.0; model.config.layers]);
        }
        let share = self.args.sparsity.unwrap_or(0.5) as f64;
        let file = companions::find(model, File::Profile, profile_file::open)?.ok_or_else(|| {
            Error::Usage(format!(
                "{} gives few exact zeros, so neurons are left out by magnitude, and a profile says below which; make one: \
                 dynamicinfer profile MODEL --text FILE",
                model.config.activation
            ))
        })?;
        let profile = Profile::read(&file)?;
        let cut = |layer| {
            profile.cut_for(layer, share).ok_or_else(|| {
                Error::bad(
                    file.path(),
                    "magnitudes",
                    "the profile has none; make it again with `dynamicinfer profile MODEL --text FILE`",
                )
            })
        };
        (0..model.config.layers).map(cut).collect()
    }

    fn sign(&mut self) -> Result<Ready> {
        if self.sign.is_none() {
            let model = &self.engine.model;
            if !model.config.activation.is_sparse() {
                return Err(Error::Usage(format!(
                    "--predictor sign: it predicts the sign of the gate, and {} lets negative ones through; take exact or mlp",
                    model.config.activation
                )));
            }
            let predictor = match self.open(File::SignPredictor)? {
                Some(file) => predictor::open(file.path(), model)?,
                None => Arc::new(Sign::uncalibrated(model)),
            };
            self.sign = Some(Ready { predictor, cuts: vec![0.0; model.config.layers] });
        }
        Ok(self.sign.clone().expect("made above"))
    }

    fn mlp(&mut self) -> Result<Ready> {
        if self.mlp.is_none() {
            let model = &self.engine.model;
            let file = self.open(File::MlpPredictor)?.ok_or_else(|| {
                Error::Usage(
                    "--predictor mlp: there is none for this model yet; make one: dynamicinfer train-predictor MODEL \
                     --text FILE"
                        .into(),
                )
            })?;
            self.mlp = Some(Ready { predictor: predictor::open(file.path(), model)?, cuts: file.header.cuts.clone() });
        }
        Ok(self.mlp.clone().expect("made above"))
    }

    /// The file that was named, if it is of this kind, else the model's own.
    fn open(&self, kind: File) -> Result<Option<PredictorFile>> {
        if let Some(path) = &self.args.predictor_file {
            let file = predictor_file::open(path)?;
            if kind.file_name().starts_with(&file.header.kind) {
                companions::check_owner(&file, &self.engine.model)?;
                return Ok(Some(file));
            }
        }
        companions::find(&self.engine.model, kind, predictor_file::open)
    }
}
