//! Calibrates the sign predictor for a model that is about to run, so that it does not run with the alphas of a paper about other models; and
//! the activation profile that is counted on the way, here and where predictors are made by a command.

use super::artifacts::{self, Kind};
use super::listener::Listener;
use crate::engine::Engine;
use crate::error::{Result, human_bytes, printable};
use crate::formats::read_text;
use crate::interrupt;
use crate::model::{KvType, Model};
use crate::tokenizer::Tokenizer;
use crate::training::profile::{JoinedTexts, ProfileCounter};
use crate::training::samples::{Plan, WINDOW, collect_and_count};
use crate::training::train::{Job, Options, calibrate_sign};
use std::path::PathBuf;

/// Tokens to look at: each tells something of every neuron, a table has some fifty numbers, and a 7B model takes minutes for as many.
const TOKENS: usize = 4_096;
/// As `calibrate`: signs say less than networks, so the last active neurons cost more.
const RECALL: f64 = 0.9;

/// Calibrates on the texts and keeps the file where every later run finds it.
///
/// # Errors
/// [`crate::Error::Io`] for a text that cannot be read and where the file cannot be written, [`crate::Error::Usage`] for texts of too few tokens,
/// [`crate::Error::Interrupted`] after Ctrl-C.
pub fn calibrate(engine: &mut Engine, texts: &[PathBuf], told: &dyn Listener) -> Result<()> {
    let model = engine.model.clone();
    let tokenizer = Tokenizer::new(model.tokenizer()?, model.path())?;
    let mut joined = JoinedTexts::default();
    for path in texts {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        joined.add(&name, &read_text(path)?, &tokenizer)?;
    }
    let tokens = &joined.tokens;
    let output = artifacts::write_path(&model, Kind::SignPredictor)?;
    let plan = Plan::new(&model, tokens.len(), TOKENS)?;
    told.note(&format!(
        "calibrating the sign predictor on {} tokens, once ({} on disk meanwhile)",
        plan.extent.tokens(),
        human_bytes(plan.extent.file_bytes())
    ));
    let names: Vec<_> = joined.names().collect();
    let options = Options {
        // A run computes by each layer's own residual; tables that look ahead, for the scheduler, are what `calibrate` is for.
        ahead: Vec::new(),
        recall: RECALL,
        budget: u64::MAX,
        seed: 0,
        activation_thresholds: vec![0.0; model.config.layers().len()],
        made: serde_json::json!({ "texts": names, "tokens": plan.extent.tokens() }),
    };
    let path = output.with_extension("samples");
    let mut profile = profile_counter(&model, &joined);
    let thresholds = &options.activation_thresholds;
    let counting = (&plan, profile.as_mut());
    let samples = collect_and_count(engine, tokens, counting, thresholds, &path, |_, _| interrupt::check());
    if samples.is_ok() {
        keep_profile(&model, profile, told);
    }
    let made = samples.and_then(|samples| {
        let (threads, kernels) = (engine.threads(), &engine.kernels);
        let job = Job { model: &model, kernels, threads, samples: &samples, options: &options, output: &output };
        calibrate_sign(job, &|_, _| interrupt::check())
    });
    // Left behind, it costs disk space and nothing else.
    let _ = std::fs::remove_file(&path);
    made.map(drop)
}

/// A profile to count while samples are taken from these texts; `None` for a model that has one, or whose activation thresholds are not known.
pub fn profile_counter(model: &Model, texts: &JoinedTexts) -> Option<ProfileCounter> {
    // One that is damaged stays where it is.
    let has_none = matches!(artifacts::profile(model), Ok(None));
    has_none.then(|| ProfileCounter::new(model, texts, WINDOW.min(model.config.context), KvType::F16)).flatten()
}

/// Keeps a profile that was counted on the way to something else, and says where. A failure is only a warning.
pub fn keep_profile(model: &Model, counted: Option<ProfileCounter>, told: &dyn Listener) {
    let Some(profile) = counted.and_then(ProfileCounter::finish) else { return };
    let written = artifacts::update_path(model, Kind::Profile).and_then(|path| profile.write(&path).map(|()| path));
    told.note(&match written {
        Ok(path) => format!("{}: activation profile written", printable(&path.to_string_lossy())),
        Err(error) => format!("warning: the activation profile is not written: {error}"),
    });
}
