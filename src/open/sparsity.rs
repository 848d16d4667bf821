//! Chooses which neurons the engine computes: opens the predictor of each layer.

use super::artifacts::{self, Kind as File};
use super::calibration;
use super::listener::Listener;
use crate::engine::{Choice, Engine, Sparsity};
use crate::error::{Error, Result, printable};
use crate::formats::predictor_file::{self, PredictorFile};
use crate::formats::profile_file;
use crate::model::Model;
use crate::predictor::{self, Exact, Kind, Predictor, Sign};
use crate::profile::Profile;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

/// Which neurons are computed.
#[derive(Clone, Debug, Default)]
pub struct SparsityOptions {
    /// Predictor that says which neurons a token needs, by layer.
    pub predictor: PredictorChoice,
    /// Probability from which on a neuron is computed, 0 to 1; `None` takes the predictor file's.
    pub threshold: Option<f32>,
    /// Number of layers before its own from whose residual a layer is predicted; 0 is its own.
    pub ahead: usize,
    /// For silu and gelu models: share of the neurons to leave out, those of the smallest |act(gate)|, 0 to below 1; `None` is half.
    pub sparsity: Option<f32>,
    /// Predictor file to take instead of the model's own.
    pub predictor_file: Option<PathBuf>,
    /// Texts on which the sign predictor is calibrated first, if that was not done yet; none for not at all.
    pub calibrate: Vec<PathBuf>,
}

/// Kinds of predictors and the layers they are for (all that no other entry names, if none are named); a later entry overrides an earlier
/// one. Without a kind it is a trained one where the model has it, else the signs where they are calibrated for it, else dense; that is the
/// default. As text: `auto`, `mlp,dense@0,exact@3-5`.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictorChoice(Vec<(Option<Kind>, Option<RangeInclusive<usize>>)>);

impl Default for PredictorChoice {
    fn default() -> PredictorChoice {
        PredictorChoice(vec![(None, None)])
    }
}

impl PredictorChoice {
    /// Whether it is about one model: some part of it takes a file that was made for it, or names layers.
    pub fn is_of_one_model(&self) -> bool {
        self.0.iter().any(|(kind, layers)| matches!(kind, Some(Kind::Mlp | Kind::Sign)) || layers.is_some())
    }
}

/// One kind for all layers.
impl From<Kind> for PredictorChoice {
    fn from(kind: Kind) -> PredictorChoice {
        PredictorChoice(vec![(Some(kind), None)])
    }
}

impl std::str::FromStr for PredictorChoice {
    type Err = String;
    fn from_str(text: &str) -> Result<PredictorChoice, String> {
        let entry = |entry: &str| -> Result<_, String> {
            let (kind, layers) = entry.split_once('@').map_or((entry, None), |(kind, layers)| (kind, Some(layers)));
            let unknown = |_| format!("'{kind}' is not a predictor; take auto, dense, exact, sign or mlp");
            let kind = match kind.eq_ignore_ascii_case("auto") {
                true => None,
                false => Some(kind.parse::<Kind>().map_err(unknown)?),
            };
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
        Ok(PredictorChoice(text.split(',').map(entry).collect::<Result<_, _>>()?))
    }
}

impl SparsityOptions {
    /// Whether every neuron may be computed: nothing was asked for that leaves some out.
    pub(super) fn may_be_dense(&self) -> bool {
        let SparsityOptions { predictor, threshold, ahead, sparsity, predictor_file, calibrate } = self;
        let numbers = threshold.is_none() && *ahead == 0 && sparsity.is_none();
        let dense = predictor.0.iter().all(|(kind, _)| matches!(kind, None | Some(Kind::Dense)));
        dense && numbers && predictor_file.is_none() && calibrate.is_empty()
    }

    /// Tells the engine which neurons to compute. `told` hears of a choice that costs speed or quality. With a device the predictor file may
    /// be for looking ahead alone ([`ahead`]).
    ///
    /// # Errors
    /// [`Error::Usage`] for options that this model does not allow or that nothing would look at, [`Error::BadFile`] for a predictor that is
    /// damaged or another model's.
    pub(super) fn apply(&self, engine: &mut Engine, with_device: bool, told: &dyn Listener) -> Result<()> {
        let is_mixture = engine.model.config.is_routed();
        if !engine.model.has_neurons() && !engine.model.config.neurons_inside() {
            return if self.may_be_dense() { Ok(()) } else { Err(Error::Usage(self.no_neurons(&engine.model))) };
        }
        if is_mixture {
            self.check_inside()?;
        }
        let layers = engine.model.config.layers().len();
        self.check_numbers(layers)?;
        let kinds = self.kinds(layers)?;
        self.calibrate_first(engine, &kinds, told)?;
        let mut found = Found::new(self, &engine.model);
        found.check_use(&kinds, with_device)?;
        let choices = (0..layers).map(|layer| found.choice(layer, kinds[layer])).collect::<Result<Vec<_>>>()?;
        found.warn(&kinds, told)?;
        let sparsity = Sparsity::new(choices, self.ahead).map_err(|why| {
            Error::Usage(format!(
                "{why}; take an --ahead that it was made for, or make one: train-predictor, calibrate"
            ))
        })?;
        engine.set_sparsity(sparsity);
        Ok(())
    }

    /// Refuses what [`SparsityOptions::apply`] would refuse, as far as the outline of a model says it that is not packed yet.
    ///
    /// # Errors
    /// As [`SparsityOptions::apply`].
    pub(super) fn check_found(&self, outline: &Model, with_device: bool) -> Result<()> {
        let layers = outline.config.layers().len();
        self.check_numbers(layers)?;
        let kinds = self.kinds(layers)?;
        if !self.calibrate.is_empty() {
            // What will be there once the packed model has been calibrated is not known yet.
            return Ok(());
        }
        let mut found = Found::new(self, outline);
        found.check_use(&kinds, with_device)?;
        kinds.into_iter().try_for_each(|kind| found.check_there(kind))
    }

    /// Refuses numbers that are out of range.
    fn check_numbers(&self, layers: usize) -> Result<()> {
        if let Some(threshold) = self.threshold.filter(|t| !(0.0..=1.0).contains(t)) {
            return Err(Error::Usage(format!("--threshold {threshold}: take a probability, 0 to 1")));
        }
        if let Some(share) = self.sparsity.filter(|s| !(0.0..1.0).contains(s)) {
            return Err(Error::Usage(format!("--sparsity {share}: take a share, 0 to below 1")));
        }
        if self.ahead >= layers {
            return Err(Error::Usage(format!("--ahead {}: the model has {layers} layers", self.ahead)));
        }
        Ok(())
    }

    /// The kind that was asked for each layer.
    fn kinds(&self, layers: usize) -> Result<Vec<Option<Kind>>> {
        let mut kinds = vec![None; layers];
        let (of_all, of_some): (Vec<_>, Vec<_>) = self.predictor.0.iter().partition(|(_, range)| range.is_none());
        for (kind, range) in of_all.into_iter().chain(of_some) {
            let range = range.clone().unwrap_or(0..=layers - 1);
            let (first, last) = (*range.start(), *range.end());
            let part = kinds.get_mut(range).ok_or_else(|| {
                Error::Usage(format!("--predictor: layers {first}-{last}; the model has 0 to {}", layers - 1))
            })?;
            part.fill(*kind);
        }
        Ok(kinds)
    }

    /// Why predictors have no use for a model whose neurons do not stand by themselves.
    fn no_neurons(&self, model: &Model) -> String {
        let activation = model.config.activation;
        if model.config.per_layer > 0 {
            return "a model with embeddings for each layer is read in place, and all of its neurons are computed; leave out \
                    the options of predictors"
                .into();
        }
        match model.config.is_routed() {
            true if activation.is_sparse() => {
                "the neurons of this mixture's experts do not stand by themselves: pack it first (dynamicinfer pack MODEL -o FILE.neurons) and \
                 take that file, or leave out the options of predictors"
                    .into()
            }
            true => format!(
                "this is a mixture of experts with {activation}: its routers choose what is computed, and no neuron inside is ever off; leave \
                 out the options of predictors"
            ),
            false => {
                "this store holds clusters of neurons, all of which are computed; pack the model by neuron (without --quant clusters), \
                 or leave out the options of predictors"
                    .into()
            }
        }
    }

    /// Refuses what predictors of neurons inside experts cannot do.
    fn check_inside(&self) -> Result<()> {
        let sign = self.predictor.0.iter().any(|(kind, _)| *kind == Some(Kind::Sign));
        let given = [
            (sign, "--predictor sign is for dense models; a mixture takes mlp, exact or dense"),
            (self.ahead > 0, "--ahead: inside experts a layer is predicted from its own residual; leave it out"),
            (
                !self.calibrate.is_empty(),
                "--calibrate is for the signs of dense models; train-predictor makes a mixture's predictor",
            ),
        ];
        if let Some((_, why)) = given.into_iter().find(|(given, _)| *given) {
            return Err(Error::Usage(why.into()));
        }
        Ok(())
    }

    /// Calibrates the signs on the texts that were given, if a layer is to run by them and they are not calibrated yet.
    fn calibrate_first(&self, engine: &mut Engine, kinds: &[Option<Kind>], told: &dyn Listener) -> Result<()> {
        if self.calibrate.is_empty() || !engine.model.config.activation.is_sparse() {
            return Ok(());
        }
        let mut found = Found::new(self, &engine.model);
        let unsaid = kinds.contains(&None) && !found.has_mlp()?;
        if !(unsaid || kinds.contains(&Some(Kind::Sign))) || found.is_calibrated()? {
            return Ok(());
        }
        calibration::calibrate(engine, &self.calibrate, told)
    }
}

/// The predictor that looks ahead for the scheduler: of the kind that is chosen for the layers, from the file that the user has named.
/// `None` if only the true gates would say it: nothing but the layer itself multiplies all of them.
///
/// # Errors
/// As [`one`].
pub(super) fn ahead(engine: &Engine, options: &SparsityOptions) -> Result<Option<Arc<dyn Predictor>>> {
    let mut found = Found::new(options, &engine.model);
    let chosen = options.predictor.0.iter().filter_map(|(kind, _)| *kind).find(|k| matches!(k, Kind::Sign | Kind::Mlp));
    let kind = match chosen {
        Some(kind) => kind,
        None if found.has_mlp()? => Kind::Mlp,
        None => found.best()?,
    };
    // The engine's own, so that one prediction can be used for both.
    let used = |layer| engine.sparsity().predictor(layer).map(|(predictor, _)| predictor);
    if let Some(used) = (0..engine.model.config.layers().len()).filter_map(used).find(|used| used.kind() == kind) {
        return Ok(Some(used.clone()));
    }
    let ready = match kind {
        Kind::Dense | Kind::Exact | Kind::Router => return Ok(None),
        Kind::Sign => found.sign()?,
        Kind::Mlp => found.mlp()?,
    };
    Ok(Some(ready.predictor))
}

/// One predictor for all layers, and the layers' activation thresholds, `[layers]`, which leave out `sparsity` of the neurons of a model
/// without exact zeros (half of them where it is not said). Without a `kind` it is the best that there is (the
/// exact one where that is dense); without a `file` the model's own is taken.
///
/// # Errors
/// [`Error::Usage`] for a predictor that this model does not have, [`Error::BadFile`] for one that is damaged or another model's.
pub fn one(
    engine: &Engine,
    kind: Option<Kind>,
    file: Option<PathBuf>,
    sparsity: Option<f32>,
) -> Result<(Arc<dyn Predictor>, Vec<f32>)> {
    let options = SparsityOptions { predictor_file: file, sparsity, ..SparsityOptions::default() };
    let activation = engine.model.config.activation;
    options.check_numbers(engine.model.config.layers().len())?;
    if sparsity.is_some() && (activation.is_sparse() || !matches!(kind, None | Some(Kind::Exact))) {
        return Err(Error::Usage(
            "--sparsity is for silu and gelu models and the exact predictor; a trained one has the share that it was trained for".into(),
        ));
    }
    let mut found = Found::new(&options, &engine.model);
    let kind = match kind {
        Some(kind) => kind,
        None => match found.best()? {
            Kind::Dense => Kind::Exact,
            kind => kind,
        },
    };
    let ready = match kind {
        Kind::Dense | Kind::Router => {
            return Err(Error::Usage("dense predicts nothing; take mlp, sign or exact".into()));
        }
        Kind::Exact => found.exact()?,
        Kind::Sign => found.sign()?,
        Kind::Mlp => found.mlp()?,
    };
    Ok((ready.predictor, ready.activation_thresholds))
}

/// A predictor with its layers' activation thresholds.
#[derive(Clone)]
struct Ready {
    predictor: Arc<dyn Predictor>,
    activation_thresholds: Vec<f32>,
}

/// Predictors, each opened when the first layer asks for it.
struct Found<'a> {
    options: &'a SparsityOptions,
    model: &'a Model,
    /// Whether there is an mlp file; `None` before it was looked for.
    file: Option<bool>,
    /// Whether [`Found::check_there`] has found activation thresholds.
    thresholds_are_there: bool,
    exact: Option<Ready>,
    sign: Option<Ready>,
    mlp: Option<Ready>,
}

impl<'a> Found<'a> {
    fn new(options: &'a SparsityOptions, model: &'a Model) -> Found<'a> {
        Found { options, model, file: None, thresholds_are_there: false, exact: None, sign: None, mlp: None }
    }

    fn choice(&mut self, layer: usize, kind: Option<Kind>) -> Result<Choice> {
        let kind = match kind {
            Some(kind) => kind,
            None => self.unsaid()?,
        };
        let ready = match kind {
            Kind::Dense | Kind::Router => return Ok(Choice::Dense),
            // Inside experts gates choose where no network does.
            Kind::Exact if self.inside() => return Ok(Choice::Dense),
            Kind::Exact => {
                let ready = self.exact()?;
                if self.options.ahead == 0 {
                    return Ok(Choice::Exact { activation_threshold: ready.activation_thresholds[layer] });
                }
                ready
            }
            Kind::Sign => self.sign()?,
            Kind::Mlp => self.mlp()?,
        };
        let ahead = if layer < self.options.ahead { 0 } else { self.options.ahead };
        let threshold = self.options.threshold.unwrap_or_else(|| ready.predictor.threshold(layer, ahead));
        Ok(Choice::Predicted {
            predictor: ready.predictor,
            threshold,
            activation_threshold: ready.activation_thresholds[layer],
        })
    }

    /// The kind that `auto` means for this model: nothing is left out by guesses that were not compared with it.
    fn unsaid(&mut self) -> Result<Kind> {
        Ok(match self.best()? {
            Kind::Sign if !self.is_calibrated()? => Kind::Dense,
            kind => kind,
        })
    }

    /// Whether predictors are for neurons inside experts.
    fn inside(&self) -> bool {
        self.model.config.neurons_inside()
    }

    /// Whether the signs are calibrated for this model.
    fn is_calibrated(&self) -> Result<bool> {
        Ok(self.open(File::SignPredictor)?.is_some())
    }

    /// Says where a layer is slower than it could be, or worse.
    fn warn(&mut self, kinds: &[Option<Kind>], told: &dyn Listener) -> Result<()> {
        if self.inside() {
            if kinds.contains(&None) && self.unsaid()? == Kind::Dense {
                told.note(
                    "note: this mixture has no predictor yet, so every gate of an expert is read; train-predictor MODEL --text FILE makes one",
                );
            }
            return Ok(());
        }
        let calibrated = self.is_calibrated()?;
        if kinds.contains(&Some(Kind::Sign)) && !calibrated {
            told.note(
                "warning: the sign predictor is not calibrated for this model: expect it to miss a quarter of the active neurons and to raise \
                 perplexity by 2 % or more (the demo's: 1.8 %); --calibrate FILE does it now, and once",
            );
        }
        if kinds.contains(&None) && self.unsaid()? == Kind::Dense && self.model.config.activation.is_sparse() {
            told.note(
                "note: this model has no predictor yet, so every neuron is computed; --calibrate FILE makes one in minutes, \
                 train-predictor MODEL --text FILE a better one",
            );
        }
        Ok(())
    }

    /// The best kind that this model can have, calibrated or not; that of the file, if the user named one.
    fn best(&mut self) -> Result<Kind> {
        if !self.model.config.activation.is_sparse() {
            return Ok(Kind::Dense);
        }
        if let Some(kind) = self.kind_of_named()? {
            return Ok(kind);
        }
        Ok(if self.has_mlp()? { Kind::Mlp } else { Kind::Sign })
    }

    /// The kind of predictor that the file holds that the user named.
    fn kind_of_named(&self) -> Result<Option<Kind>> {
        let Some(path) = &self.options.predictor_file else { return Ok(None) };
        let file = predictor_file::open(path)?;
        file.header.kind.parse().map(Some).map_err(|why| Error::bad(path, "kind", why))
    }

    /// Refuses options that would change nothing: an option that is given is expected to act.
    fn check_use(&mut self, kinds: &[Option<Kind>], with_device: bool) -> Result<()> {
        let options = self.options;
        let kinds = kinds.iter().map(|kind| kind.map_or_else(|| self.unsaid(), Ok)).collect::<Result<Vec<Kind>>>()?;
        let refused = |why: String| Err(Error::Usage(why));
        if options.sparsity.is_some() {
            let activation = self.model.config.activation;
            if activation.is_sparse() {
                return refused(format!(
                    "--sparsity is for silu and gelu models; of {activation} the zeros are left out"
                ));
            }
            if !kinds.contains(&Kind::Exact) {
                return refused(
                    "--sparsity says how many neurons the exact predictor leaves out; add --predictor exact (an mlp predictor has the share that \
                     it was trained for: train-predictor --sparsity)"
                        .into(),
                );
            }
        }
        let predicts = |kind: &Kind| match kind {
            Kind::Sign | Kind::Mlp => true,
            Kind::Exact => options.ahead > 0,
            Kind::Dense | Kind::Router => false,
        };
        if !kinds.iter().any(predicts) {
            let given = [("--threshold", options.threshold.is_some()), ("--ahead", options.ahead > 0)];
            if let Some((name, _)) = given.iter().find(|(_, given)| *given) {
                let has_sign = self.model.config.activation.is_sparse() && !self.inside();
                let sign = if has_sign { " or sign" } else { "" };
                return refused(format!("{name}: nothing is predicted here; add --predictor mlp{sign}"));
            }
        }
        if let Some(kind) = self.kind_of_named()?.filter(|kind| !kinds.contains(kind)) {
            // The scheduler of a device looks ahead with it where the layers themselves need no predictor.
            let others = kinds.iter().any(|kind| matches!(kind, Kind::Sign | Kind::Mlp));
            if others || !with_device {
                let path = options.predictor_file.as_deref().unwrap_or("".as_ref());
                let (path, name) = (printable(&path.to_string_lossy()), kind.name());
                return refused(format!("--predictor-file {path} holds a {name} predictor; add --predictor {name}"));
            }
        }
        Ok(())
    }

    /// Whether there is a trained predictor.
    fn has_mlp(&mut self) -> Result<bool> {
        if self.file.is_none() {
            self.file = Some(self.open(File::MlpPredictor)?.is_some());
        }
        Ok(self.file == Some(true))
    }

    fn exact(&mut self) -> Result<Ready> {
        if self.exact.is_none() {
            let activation_thresholds = self.activation_thresholds()?;
            self.exact = Some(Ready {
                predictor: Arc::new(Exact::new(self.model, &activation_thresholds)),
                activation_thresholds,
            });
        }
        Ok(self.exact.clone().expect("made above"))
    }

    /// Activation thresholds of the layers, `[layers]`: zero for ReLU, else from the profile.
    fn activation_thresholds(&self) -> Result<Vec<f32>> {
        let model = self.model;
        if model.config.activation.is_sparse() {
            return Ok(vec![0.0; model.config.layers().len()]);
        }
        let share = self.options.sparsity.unwrap_or(0.5) as f64;
        let file = artifacts::find(model, File::Profile, profile_file::open)?.ok_or_else(|| {
            Error::Usage(format!(
                "{} gives few exact zeros, so neurons are left out by magnitude, and a profile says below which; make one: \
                 dynamicinfer profile MODEL --text FILE",
                model.config.activation
            ))
        })?;
        let profile = Profile::read(&file)?;
        let activation_threshold = |layer| {
            profile.threshold_for_sparsity(layer, share).ok_or_else(|| {
                Error::bad(
                    file.path(),
                    "magnitudes",
                    "the profile has none; make it again with `dynamicinfer profile MODEL --text FILE`",
                )
            })
        };
        (0..model.config.layers().len()).map(activation_threshold).collect()
    }

    /// Checks that a layer of this kind has what it works with: a profile, a file, an activation with zeros.
    fn check_there(&mut self, kind: Option<Kind>) -> Result<()> {
        match kind.map_or_else(|| self.unsaid(), Ok)? {
            Kind::Dense | Kind::Router => Ok(()),
            Kind::Exact if self.thresholds_are_there => Ok(()),
            Kind::Exact => {
                self.activation_thresholds()?;
                self.thresholds_are_there = true;
                Ok(())
            }
            Kind::Sign => self.check_sign(),
            Kind::Mlp => self.mlp_file().map(|_| ()),
        }
    }

    fn check_sign(&self) -> Result<()> {
        match self.model.config.activation {
            activation if activation.is_sparse() => Ok(()),
            activation => Err(Error::Usage(format!(
                "--predictor sign: it predicts the sign of the gate, and {activation} lets negative ones through; take exact or mlp"
            ))),
        }
    }

    fn mlp_file(&self) -> Result<PredictorFile> {
        self.open(File::MlpPredictor)?.ok_or_else(|| {
            Error::Usage(
                "--predictor mlp: there is none for this model yet; make one: dynamicinfer train-predictor MODEL \
                 --text FILE"
                    .into(),
            )
        })
    }

    fn sign(&mut self) -> Result<Ready> {
        if self.sign.is_none() {
            let model = self.model;
            self.check_sign()?;
            let predictor = match self.open(File::SignPredictor)? {
                Some(file) => predictor::open(file.path(), model)?,
                None => Arc::new(Sign::uncalibrated(model)),
            };
            self.sign = Some(Ready { predictor, activation_thresholds: vec![0.0; model.config.layers().len()] });
        }
        Ok(self.sign.clone().expect("made above"))
    }

    fn mlp(&mut self) -> Result<Ready> {
        if self.mlp.is_none() {
            let file = self.mlp_file()?;
            self.mlp = Some(Ready {
                predictor: predictor::open(file.path(), self.model)?,
                activation_thresholds: file.header.activation_thresholds.clone(),
            });
        }
        Ok(self.mlp.clone().expect("made above"))
    }

    /// The file that the user named, if it is of this kind, else the model's own.
    fn open(&self, kind: File) -> Result<Option<PredictorFile>> {
        if let Some(path) = &self.options.predictor_file {
            let file = predictor_file::open(path)?;
            if kind.file_name().starts_with(&file.header.kind) {
                artifacts::check_owner(&file, self.model)?;
                return Ok(Some(file));
            }
        }
        artifacts::find(self.model, kind, predictor_file::open)
    }
}
