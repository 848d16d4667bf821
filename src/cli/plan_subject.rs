//! The subject of `plan`: a model or a shape, how often its neurons are active, and its predictors.

use super::model_arg::{ModelArgs, Terminal, parse_activation};
use crate::cpu::sign;
use crate::error::{Error, Result};
use crate::formats::predictor_file::{self, PredictorFile};
use crate::formats::rows::Quant;
use crate::model::{KvType, Model, ModelConfig, NamedActivation};
use crate::open::activity::Activity;
use crate::open::artifacts::{self, Kind};
use crate::pack::Types;
use crate::placement::problem::power_law;
use crate::placement::shapes::{footprint, shape};
use crate::predictor;
use std::path::PathBuf;

/// MODEL or a shape, and its options.
#[derive(clap::Args)]
pub(super) struct SubjectArgs {
    /// Hugging Face directory, .gguf, .neurons file, name from `ls`, or `demo`
    #[arg(required_unless_present = "shape", conflicts_with = "shape")]
    pub model: Option<PathBuf>,
    /// Built-in model shape, such as llama-7b; an unknown name lists all
    ///
    /// llama-7b, llama-13b and llama-70b have ReLU and activations by a power law. The mixtures, whose experts are all used alike, are
    /// qwen3-30b-a3b, qwen3.5-35b-a3b, gpt-oss-20b, gpt-oss-120b, mixtral-8x7b and smallthinker-21b.
    #[arg(long, value_name = "NAME")]
    pub shape: Option<String>,
    /// Type of the weights: f32, f16, q8_0, q4_k or others; for a model also a mix such as q4_k_m [default: nearest to the model's; for a
    /// shape f16, for a mixture of 4 bits those]
    #[arg(long)]
    pub quant: Option<Types>,
    /// Activation function of a model that names none: relu, drelu, silu and others, as in `pack`
    #[arg(long, value_parser = parse_activation, conflicts_with = "shape")]
    pub activation: Option<NamedActivation>,
    /// Activation profile to use instead of the model's own
    #[arg(long, value_name = "FILE", conflicts_with = "shape")]
    pub profile: Option<PathBuf>,
    /// Predictors on the device: auto is the trained ones, else signs, and none for models without ReLU
    #[arg(long, value_enum, ignore_case = true, default_value_t = PredictorArg::Auto)]
    pub predictor: PredictorArg,
}

impl SubjectArgs {
    /// The type of a shape's weights.
    ///
    /// # Errors
    /// [`Error::Usage`] for a mix: which of a shape's matrices has which type is not known.
    pub fn quant_of_shape(&self) -> Result<Option<Quant>> {
        let one = |types: Types| {
            types
                .one()
                .ok_or_else(|| Error::Usage(format!("--quant {types}: a shape has one type; give one, such as q4_k")))
        };
        self.quant.map(one).transpose()
    }
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq)]
pub(super) enum PredictorArg {
    Auto,
    Mlp,
    Sign,
    None,
}

/// The subject of a plan.
pub(super) struct Subject {
    pub config: ModelConfig,
    /// Type of the weights, in words.
    pub quant: String,
    /// None of a shape.
    pub model: Option<Model>,
    /// `[layers][ffn]`
    pub counts: Vec<Vec<u64>>,
    /// In how many tokens; 0 where they were not counted.
    pub tokens: u64,
    /// Where they are from.
    pub counted: String,
    /// Share of the neurons that are active for a token.
    pub active_share: f64,
}

/// Assumed share of active neurons of a ReLU model without counts: that of the demo model, and about that published for large ones.
const ACTIVE_SHARE: f64 = 0.1;

/// The subject of a plan: for a device, which places neurons inside experts one by one, or for disk, from which whole experts are read.
pub(super) fn subject(args: &SubjectArgs, on_device: bool) -> Result<Subject> {
    if let Some(name) = &args.shape {
        let config = shape(name)?;
        let (_, quant) = footprint(name, args.quant_of_shape()?, 1, KvType::F16)?;
        let (counts, counted, active_share) = match config.is_mixture() {
            true => (
                vec![vec![1; config.clusters()]; config.layers().len()],
                "assumed: every expert is used alike",
                config.used_share(),
            ),
            false => (
                power_law(config.layers().len(), config.widest_ffn()),
                "assumed: 40 % of a layer's neurons make 80 %",
                ACTIVE_SHARE,
            ),
        };
        return Ok(Subject { config, quant, model: None, counts, tokens: 0, counted: counted.into(), active_share });
    }
    let model = args.model.clone().expect("clap asks for a model or a shape");
    let of_neurons = matches!(args.predictor, PredictorArg::Mlp | PredictorArg::Sign);
    let named = ModelArgs { model, quant: args.quant, activation: args.activation };
    let model = if of_neurons { named.open_neurons_for_device()? } else { named.open_for_device()? };
    let all_computed = model.config.has_clusters();
    let profile = match &args.profile {
        Some(_) if all_computed => {
            let why = "--profile: every token needs all of this model's clusters, so a profile has no effect; \
                 leave it out";
            return Err(Error::Usage(why.into()));
        }
        Some(path) => Some((path.clone(), artifacts::profile_at(&model, path)?)),
        None => artifacts::profile(&model)?,
    };
    let (layers, clusters) = (model.config.layers().len(), model.config.clusters());
    let activity = match &profile {
        Some((path, profile)) if on_device => {
            if let Some(note) = artifacts::lacks_inside(&model, profile, path) {
                eprintln!("{note}");
            }
            let by_gates = args.predictor == PredictorArg::None
                || artifacts::find(&model, Kind::MlpPredictor, predictor_file::open)?.is_none();
            Some(Activity::of_profile(&model, path, profile, by_gates))
        }
        None if on_device && !all_computed => Activity::learnt(&model, &Terminal),
        _ => None,
    };
    let (counts, tokens, counted, active_share) = if all_computed {
        (vec![vec![1; clusters]; layers], 0, "every token needs all clusters".into(), 1.0)
    } else if let Some(activity) = activity {
        let (counted, active_share) = (activity.counted(), activity.active_share());
        (activity.counts, activity.tokens, counted, active_share)
    } else if let Some((path, profile)) = profile {
        let counts: Vec<Vec<u64>> = (0..layers).map(|layer| profile.counts(layer)).collect();
        let (active, tokens) = (counts.iter().flatten().sum::<u64>() as f64, profile.tokens());
        let share = active / (tokens.max(1) as f64 * (model.config.movable_layers() * clusters) as f64);
        (counts, tokens, format!("{tokens} tokens of {}", path.display()), share)
    } else {
        let (of, what) = match on_device {
            true => (model.config.movable(), cluster(&model.config)),
            false => (clusters, model.config.parts().noun()),
        };
        eprintln!(
            "this model has no activation profile, so every {what} counts the same; make one: dynamicinfer \
             profile MODEL --text FILE"
        );
        let of = |layer| if on_device && model.config.movable_of(layer) == 0 { Vec::new() } else { vec![1; of] };
        let counts = (0..layers).map(of).collect();
        (counts, 0, format!("no profile: every {what} counts the same"), ACTIVE_SHARE)
    };
    let (config, quant) = (model.config.clone(), model.quant.name().to_owned());
    Ok(Subject { config, quant, model: Some(model), counts, tokens, counted, active_share })
}

/// The default predictors.
pub(super) struct Prediction {
    /// Bytes that a token reads of them.
    pub bytes: u64,
    /// Bytes of their file; 0 where there is none.
    pub file_bytes: u64,
    pub name: &'static str,
    /// Share of the neurons that they have computed for a token.
    pub computed_share: f64,
    /// Share of those that are active; 1 where it was not measured: as many as are active then.
    pub precision: f64,
    /// Whether they were made to look one layer ahead, too.
    pub ahead: bool,
    /// Where that figure is from.
    pub counted: &'static str,
}

/// Share of the neurons that sign bits have computed where they were not calibrated: what they took of the demo model.
const SIGNS_COMPUTE: f64 = 0.6;

const NO_NETWORK: &str =
    "--predictor mlp: this model has none yet; make one: dynamicinfer train-predictor MODEL --text FILE";

/// What is placed by itself.
fn cluster(c: &ModelConfig) -> &'static str {
    if c.neurons_inside() { "neuron" } else { c.parts().noun() }
}

/// Of the neurons of experts, of which a token has the share `routed`, by the network that was trained.
fn inside(trained: Option<PredictorFile>, wanted: PredictorArg, routed: f64) -> Result<Prediction> {
    // The processor runs it, next to the router, so it needs no device memory.
    let bytes = 0;
    match trained {
        None if wanted == PredictorArg::Mlp => Err(Error::Usage(NO_NETWORK.into())),
        None => Ok(Prediction {
            bytes,
            file_bytes: 0,
            name: "gates",
            computed_share: routed,
            precision: 1.0,
            ahead: false,
            counted: "what the router chooses",
        }),
        Some(file) => Ok(Prediction {
            bytes,
            file_bytes: file.file().bytes().len() as u64,
            name: "trained",
            computed_share: routed * computed(&file),
            precision: precise(&file),
            ahead: false,
            counted: "what the router chooses, and of that as its file says",
        }),
    }
}

/// Without a device signs that were not calibrated are not used.
pub(super) fn prediction(subject: &Subject, wanted: PredictorArg, on_device: bool) -> Result<Prediction> {
    let c = &subject.config;
    let find = |kind| match &subject.model {
        Some(model) => artifacts::find(model, kind, predictor_file::open),
        None => Ok(None),
    };
    if c.is_mixture() {
        let routed = c.used_share();
        if c.neurons_inside() && on_device && wanted != PredictorArg::Sign {
            let trained = if wanted == PredictorArg::None { None } else { find(Kind::MlpPredictor)? };
            return inside(trained, wanted, routed);
        }
        if matches!(wanted, PredictorArg::Mlp | PredictorArg::Sign) {
            return Err(Error::Usage(match c.is_routed() {
                true if c.neurons_inside() && on_device => {
                    "--predictor sign: a mixture packed by neuron has mlp or none".into()
                }
                true => "--predictor: this model is a mixture of experts, whose routers predict; leave it out".into(),
                false => {
                    "--predictor: this store holds clusters, which are computed whole; pack the model by neuron".into()
                }
            }));
        }
        let computed_share = routed;
        return Ok(Prediction {
            bytes: 0,
            file_bytes: 0,
            name: "router",
            computed_share,
            precision: 1.0,
            ahead: true,
            counted: "what the router chooses",
        });
    }
    let none = Prediction {
        bytes: 0,
        file_bytes: 0,
        name: "none",
        computed_share: 1.0,
        precision: 1.0,
        ahead: false,
        counted: "every neuron",
    };
    let trained = match wanted {
        PredictorArg::Auto | PredictorArg::Mlp => find(Kind::MlpPredictor)?,
        _ => None,
    };
    match (wanted, trained) {
        (PredictorArg::Auto, _) if !c.activation.is_sparse() => Ok(none),
        (_, Some(file)) => {
            let mlp = predictor::open(file.path(), subject.model.as_ref().expect("it has a file"))?;
            // A bias alone is not sent to a device.
            let counts = |layer: &usize| !on_device || mlp.form(*layer, 0).is_some();
            let bytes = (0..c.layers().len()).filter(counts).map(|layer| mlp.weight_bytes(layer, 0)).sum();
            let (file_bytes, computed_share, ahead) =
                (file.file().bytes().len() as u64, computed(&file), looks_ahead(&file));
            let (precision, counted) = (precise(&file), "as its file says");
            Ok(Prediction { bytes, file_bytes, name: "trained", computed_share, precision, ahead, counted })
        }
        (PredictorArg::Mlp, None) => Err(Error::Usage(NO_NETWORK.into())),
        (PredictorArg::None, None) => Ok(none),
        (PredictorArg::Auto | PredictorArg::Sign, None) => {
            let bytes = (c.layers().len() * c.widest_ffn() * sign::lines(c.hidden) * size_of::<sign::BitLine>()) as u64;
            Ok(match find(Kind::SignPredictor)? {
                Some(file) => {
                    let (file_bytes, computed_share, ahead) =
                        (file.file().bytes().len() as u64, computed(&file), looks_ahead(&file));
                    let (precision, counted) = (precise(&file), "as their file says");
                    Prediction { bytes, file_bytes, name: "signs", computed_share, precision, ahead, counted }
                }
                None if !on_device && wanted == PredictorArg::Auto => none,
                None => {
                    let (file_bytes, computed_share, precision) = (0, SIGNS_COMPUTE, 1.0);
                    let (ahead, counted) = (false, "assumed");
                    Prediction { bytes, file_bytes, name: "signs", computed_share, precision, ahead, counted }
                }
            })
        }
    }
}

/// Whether a predictor was made to look one layer ahead, too.
fn looks_ahead(file: &PredictorFile) -> bool {
    file.header.tables.iter().any(|table| table.ahead == 1)
}

/// Mean share of the neurons that a predictor had computed that were active, as [`computed`].
fn precise(file: &PredictorFile) -> f64 {
    let own: Vec<f64> = file.header.tables.iter().filter(|t| t.ahead == 0).map(|t| f64::from(t.precision)).collect();
    if own.is_empty() { 1.0 } else { own.iter().sum::<f64>() / own.len() as f64 }
}

/// Mean share of the neurons that a predictor had computed on the texts that it was made with.
fn computed(file: &PredictorFile) -> f64 {
    let own: Vec<f64> =
        file.header.tables.iter().filter(|t| t.ahead == 0).map(|t| f64::from(t.computed_share)).collect();
    if own.is_empty() { 1.0 } else { own.iter().sum::<f64>() / own.len() as f64 }
}
