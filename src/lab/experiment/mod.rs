//! Declared experiments: a question, what is varied, and what is expected, in a file that is written before the run (docs/predictors.md).
//! This module knows no model and no command line: it says which arms there are, in which order rows are made, which of them count, and
//! what they show together.

pub mod rows;
pub mod sentence;
pub mod summary;
mod value;
pub mod words;

pub use value::Value;

use crate::error::{Error, Result, excerpt};
use crate::formats::MappedFile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Bytes of an experiment's file at most; a usual one has some fifty lines.
const MAX_FILE_BYTES: usize = 64 << 10;
/// Rows at most: with more of them, an axis probably has a zero too many.
const MAX_ROWS: usize = 10_000;

/// How a row is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Prefill and decode speed (`bench`); with a device its times are those of that device's clock.
    Bench,
    /// Likelihood of a text (`eval --text`).
    Evaluate,
    /// Multiple-choice questions (`eval --choices`).
    Choices,
    /// A trace replayed under a policy, compared with the offline bound (`replay`).
    Replay,
    /// Decoding simulated on another machine (`simulate`).
    Simulate,
}

/// Range in which a metric must lie for a row to count, its ends included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Smallest value that counts; `None` is no lower limit.
    pub min: Option<f64>,
    /// Largest value that counts; `None` is no upper limit.
    pub max: Option<f64>,
}

/// A plot of the summary: one line for each combination of the axes other than `x`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlotSpec {
    /// Heading of the plot.
    pub title: String,
    /// Name of the axis that is varied along x.
    pub x: String,
    /// Name of the metric whose medians are drawn.
    pub y: String,
}

/// An experiment as its TOML file declares it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Name of the experiment, 1 to 64 letters, digits, dots, `_` or `-`; its results go to `experiment-NAME`.
    pub name: String,
    /// What the experiment is to answer.
    pub question: String,
    /// The answer that the author expected before the run.
    pub expectation: String,
    /// How each row is measured: all of these methods together give its metrics.
    pub methods: Vec<Method>,
    /// Rows of each arm; 1 if the file does not say.
    #[serde(default = "one")]
    pub repeats: usize,
    /// Rows of the first arm that are made first and thrown away, whenever the program starts.
    #[serde(default)]
    pub warm_up: usize,
    /// Seed of synthetic traces, to which the number of the repeat is added; 1 if the file does not say.
    #[serde(default = "one_seed")]
    pub seed: u64,
    /// Options that all arms share.
    #[serde(default)]
    pub fixed: toml::Table,
    /// Options that override `fixed` on a machine without a usable card.
    #[serde(default)]
    pub without_card: toml::Table,
    /// Options that are varied, each with the list of its values; every combination of values is an arm.
    pub axes: toml::Table,
    /// Limits by metric; a row with a metric that is outside or missing does not count.
    #[serde(default)]
    pub check: BTreeMap<String, Limits>,
    /// Metrics that the summary's table shows; all if the list is empty.
    #[serde(default)]
    pub show: Vec<String>,
    /// Plots of the summary.
    #[serde(default)]
    pub plots: Vec<PlotSpec>,
}

fn one() -> usize {
    1
}

fn one_seed() -> u64 {
    1
}

/// One combination of the axes' values, in the file's order.
pub type Arm = Vec<(String, Value)>;

/// An arm as text, such as `vram=2MiB policy=full`.
pub fn arm_name(arm: &[(String, Value)]) -> String {
    arm.iter().map(|(axis, value)| format!("{axis}={value}")).collect::<Vec<_>>().join(" ")
}

impl Spec {
    /// Reads and checks an experiment's file; returns it with the file's text.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the field that is wrong.
    pub fn read(path: &Path) -> Result<(Spec, String)> {
        let file = MappedFile::open(path)?;
        if file.bytes().len() > MAX_FILE_BYTES {
            return Err(bad(path, "", "too long for an experiment"));
        }
        let text = std::str::from_utf8(file.bytes()).map_err(|_| bad(path, "", "is not text"))?;
        Ok((Spec::from_text(text, path)?, text.to_owned()))
    }

    /// An experiment from the text of its file, which errors call `path`.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the field that is wrong.
    pub fn from_text(text: &str, path: &Path) -> Result<Spec> {
        let spec: Spec =
            toml::from_str(text).map_err(|e| bad(path, "", &format!("not an experiment: {}", excerpt(e.message()))))?;
        spec.check().map_err(|(field, why)| bad(path, field, &why))?;
        Ok(spec)
    }

    fn check(&self) -> std::result::Result<(), (&'static str, String)> {
        crate::formats::machine_profile::check_name(&self.name).map_err(|why| ("name", why))?;
        for (field, text) in [("question", &self.question), ("expectation", &self.expectation)] {
            if text.trim().is_empty() {
                return Err((field, "is empty; write it before the run".into()));
            }
        }
        if self.methods.is_empty() {
            return Err(("methods", "is empty; take bench, evaluate, choices, replay or simulate".into()));
        }
        for (name, values) in &self.axes {
            let values = values.as_array().ok_or(("axes", format!("{name} is no list of values")))?;
            if values.is_empty() || values.iter().any(|v| value(v).is_none()) {
                return Err(("axes", format!("{name} needs numbers, texts or booleans, one at least")));
            }
            if self.fixed.contains_key(name) || self.without_card.contains_key(name) {
                return Err(("axes", format!("{name} is fixed, too")));
            }
        }
        for (field, table) in [("fixed", &self.fixed), ("without_card", &self.without_card)] {
            if let Some((name, _)) = table.iter().find(|(_, v)| value(v).is_none()) {
                return Err((field, format!("{name} is no number, text or boolean")));
            }
        }
        let rows =
            self.axes.values().map(|v| v.as_array().map_or(1, Vec::len)).try_fold(self.repeats, usize::checked_mul);
        if self.axes.is_empty() || rows.is_none_or(|n| n == 0 || n > MAX_ROWS) {
            return Err(("axes", format!("make {rows:?} rows; it must be 1 to {MAX_ROWS}")));
        }
        match self.plots.iter().find(|p| !self.axes.contains_key(&p.x)) {
            Some(plot) => Err(("plots", format!("x = {}: that is no axis", excerpt(&plot.x)))),
            None => Ok(()),
        }
    }

    /// Every combination of the axes' values; the last axis varies fastest.
    pub fn arms(&self) -> Vec<Arm> {
        self.axes.iter().fold(vec![Vec::new()], |arms, (name, values)| {
            let values: Vec<Value> = values.as_array().into_iter().flatten().filter_map(value).collect();
            let with = |arm: &Arm| {
                let arm = arm.clone();
                let name = name.clone();
                values.clone().into_iter().map(move |v| [&arm[..], &[(name.clone(), v)]].concat())
            };
            arms.iter().flat_map(with).collect()
        })
    }

    /// The experiment for a machine without a card: `without_card` overrides `fixed`.
    pub fn on_no_card(mut self) -> Spec {
        self.fixed.extend(std::mem::take(&mut self.without_card));
        self
    }

    /// Options that all arms share.
    pub fn fixed(&self) -> Arm {
        settings(&self.fixed)
    }

    /// Options that override the fixed ones without a card.
    pub fn without_card(&self) -> Arm {
        settings(&self.without_card)
    }

    /// (arm, repeat) of all rows in the order in which they are made. Each repeat runs all arms and begins with another one, so that
    /// changes of the machine during the run, and which arm follows which, affect all arms alike.
    pub fn order(&self) -> Vec<(usize, usize)> {
        let arms = self.arms().len();
        (0..self.repeats).flat_map(|repeat| (0..arms).map(move |i| ((i + repeat) % arms, repeat))).collect()
    }

    /// Why a row with these metrics does not count; `None` if it does.
    pub fn refusal(&self, metrics: &rows::Metrics) -> Option<String> {
        self.check.iter().find_map(|(name, limits)| {
            let Some(Some(found)) = metrics.get(name) else { return Some(format!("there is no {name}")) };
            match (limits.min, limits.max) {
                (Some(min), _) if *found < min => Some(format!("{name} is {found}, below {min}")),
                (_, Some(max)) if *found > max => Some(format!("{name} is {found}, above {max}")),
                _ => None,
            }
        })
    }
}

fn bad(path: &Path, field: &str, why: &str) -> Error {
    Error::bad(path, field, format!("{why}; docs/predictors.md says what it holds"))
}

fn settings(table: &toml::Table) -> Arm {
    table.iter().filter_map(|(name, v)| Some((name.clone(), value(v)?))).collect()
}

fn value(v: &toml::Value) -> Option<Value> {
    match v {
        toml::Value::String(v) => Some(Value::Text(v.clone())),
        toml::Value::Integer(v) => Some(Value::Whole(*v)),
        toml::Value::Float(v) => Some(Value::Number(*v)),
        toml::Value::Boolean(v) => Some(Value::Flag(*v)),
        _ => None,
    }
}
