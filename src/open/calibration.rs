//! Calibrates the sign predictor for a model that is about to run, so that it does not run with the alphas of a paper about other models.

use super::Listener;
use super::artifacts::{self, Kind};
use crate::engine::Engine;
use crate::error::{Result, human_bytes};
use crate::formats::read_text;
use crate::interrupt;
use crate::lab::samples::{Plan, collect};
use crate::lab::train::{Job, Options, calibrate_sign};
use crate::tokenizer::{Special, Tokenizer};
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
    let mut tokens = Vec::new();
    for path in texts {
        tokens.extend(tokenizer.encode_prompt(&read_text(path)?, Special::AsText)?);
    }
    let output = artifacts::write_path(&model, Kind::SignPredictor)?;
    let plan = Plan::new(&model, tokens.len(), TOKENS)?;
    told.note(&format!(
        "calibrating the sign predictor on {} tokens, once ({} on disk meanwhile)",
        plan.extent.tokens(),
        human_bytes(plan.extent.file_bytes())
    ));
    let names: Vec<_> = texts.iter().map(|path| path.file_name().unwrap_or_default().to_string_lossy()).collect();
    let options = Options {
        // A run computes by each layer's own residual; tables that look ahead, for the scheduler, are what `calibrate` is for.
        ahead: Vec::new(),
        recall: RECALL,
        budget: u64::MAX,
        seed: 0,
        activation_thresholds: vec![0.0; model.config.layers],
        made: serde_json::json!({ "texts": names, "tokens": plan.extent.tokens() }),
    };
    let path = output.with_extension("samples");
    let samples = collect(engine, &tokens, &plan, &options.activation_thresholds, &path, |_, _| interrupt::check());
    let made = samples.and_then(|samples| {
        let (threads, kernels) = (engine.threads(), &engine.kernels);
        let job = Job { model: &model, kernels, threads, samples: &samples, options: &options, output: &output };
        calibrate_sign(job, &|_, _| interrupt::check())
    });
    // Left behind, it costs disk space and nothing else.
    let _ = std::fs::remove_file(&path);
    made.map(drop)
}
