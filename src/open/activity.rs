//! How often a model's neurons are active: one answer for the placement, its slots and the scheduler's first frequencies.

use super::artifacts;
use super::listener::Listener;
use crate::formats::history_file;
use crate::model::Model;
use crate::profile::Profile;
use std::path::{Path, PathBuf};

/// Where activation counts come from, the best source first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An activation profile, counted on texts that the user has named.
    Profile(PathBuf),
    /// What earlier runs of the model have learnt.
    Learnt {
        /// The file.
        path: PathBuf,
        /// Tokens in which it was learnt; 0 where an older file does not say it.
        tokens: u64,
    },
    /// None: every neuron counts the same.
    Nothing,
}

/// Activation counts of all that moves by itself, neurons or experts, in the published order.
#[derive(Clone, Debug)]
pub struct Activity {
    /// How often each was needed, `[layers][movable]`; nothing of a layer that has none.
    pub counts: Vec<Vec<u64>>,
    /// How often each was active, where it is needed more often than that.
    active: Option<Vec<Vec<u64>>>,
    /// Tokens that the counts are of.
    pub tokens: u64,
    /// Where they come from.
    pub source: Source,
}

/// Frequencies become counts of so many tokens at least, so that rare neurons are told apart.
const MIN_SCALE: u64 = 1 << 12;
/// Without a source one token in so many is assumed to need a neuron.
const ASSUMED: u64 = 10;

impl Activity {
    /// The model's own profile; without one what earlier runs have `learnt`, if that is wanted; else the same count for all. Files that
    /// cannot be used are passed over with a warning. `by_gates`: as of [`artifacts::counts`].
    pub fn find(model: &Model, by_gates: bool, learnt: bool, told: &dyn Listener) -> Activity {
        if let Some((path, profile)) = artifacts::profile_if_good(model, told) {
            if let Some(note) = artifacts::lacks_inside(model, &profile, &path) {
                told.note(&note);
            }
            return Activity::of_profile(model, &path, &profile, by_gates);
        }
        learnt.then(|| Activity::learnt(model, told)).flatten().unwrap_or_else(|| Activity::unknown(model))
    }

    /// The same without counts of layers that have nothing movable.
    fn of_movable(mut self, model: &Model) -> Activity {
        for counts in [Some(&mut self.counts), self.active.as_mut()].into_iter().flatten() {
            let layers = counts.iter_mut().enumerate();
            layers.filter(|(layer, _)| model.config.movable_of(*layer) == 0).for_each(|(_, counts)| counts.clear());
        }
        self
    }

    /// The counts of a profile that was read from `path`.
    pub fn of_profile(model: &Model, path: &Path, profile: &Profile, by_gates: bool) -> Activity {
        let counts = |by_gates| artifacts::counts(model, profile, by_gates);
        let active = (by_gates && model.config.neurons_inside()).then(|| counts(false));
        Activity { counts: counts(by_gates), active, tokens: profile.tokens(), source: Source::Profile(path.into()) }
            .of_movable(model)
    }

    /// What earlier runs have learnt; `None` if there is nothing. A file that cannot be used is set aside with a warning.
    pub fn learnt(model: &Model, told: &dyn Listener) -> Option<Activity> {
        let file = artifacts::find_own(model, artifacts::history(model), history_file::open, told)?;
        let tokens = file.header.tokens;
        let scale = tokens.max(MIN_SCALE);
        let count = |f: f32| (f64::from(f) * scale as f64).round() as u64;
        let layer = |layer| Some(history_file::read(&file, layer).ok()?.into_iter().map(count).collect());
        let counts = (0..model.config.layers().len()).map(layer).collect::<Option<_>>()?;
        let source = Source::Learnt { path: file.path().into(), tokens };
        Some(Activity { counts, active: None, tokens: scale, source }.of_movable(model))
    }

    /// Every neuron counts the same.
    fn unknown(model: &Model) -> Activity {
        let counts = vec![vec![1; model.config.movable()]; model.config.layers().len()];
        Activity { counts, active: None, tokens: ASSUMED, source: Source::Nothing }.of_movable(model)
    }

    /// Share of all neurons that are active for a token, 0 to 1.
    pub fn active_share(&self) -> f64 {
        let counts = self.active.as_ref().unwrap_or(&self.counts);
        let all = counts.iter().map(Vec::len).sum::<usize>() as f64 * self.tokens.max(1) as f64;
        counts.iter().flatten().sum::<u64>() as f64 / all
    }

    /// In how many tokens of what it was counted, in words.
    pub fn counted(&self) -> String {
        match &self.source {
            Source::Profile(path) => format!("{} tokens of {}", self.tokens, path.display()),
            Source::Learnt { path, tokens } => format!("{tokens} tokens of earlier runs, {}", path.display()),
            Source::Nothing => "no profile: all count the same".into(),
        }
    }

    /// How often each neuron of a layer is active, 0 to 1, `[movable]`; 0 in a layer that has nothing movable.
    pub fn frequencies(&self, layer: usize) -> Vec<f32> {
        let counts = self.active.as_ref().unwrap_or(&self.counts);
        let mut frequencies: Vec<f32> = counts[layer].iter().map(|&n| n as f32 / self.tokens.max(1) as f32).collect();
        frequencies.resize(counts.iter().map(Vec::len).max().unwrap_or(0), 0.0);
        frequencies
    }
}
