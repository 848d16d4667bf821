//! Snapshots of the daemon's figures, and the differences between two.

use crate::client::Client;
use crate::clock::{self, Instant};
use crate::error::Result;
use serde_json::Value;
use std::collections::HashMap;

/// The daemon's figures at one moment.
pub struct Look {
    pub at: Instant,
    /// Samples of /metrics by name and labels, without `dynamicinfer_`.
    pub numbers: HashMap<String, f64>,
    pub ps: Value,
    /// By layer, what is computed and where; null without a model.
    pub cache: Value,
    /// The policy and what its scheduler did; null without a model.
    pub policy: Value,
}

impl Look {
    pub fn take(client: &Client) -> Result<Look> {
        let text = client.call("GET", "/metrics", None)?;
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            // What is no number cannot be drawn as a share of another.
            let value = value.parse().ok().filter(|value: &f64| value.is_finite())?;
            Some((name.strip_prefix("dynamicinfer_").unwrap_or(name).to_owned(), value))
        };
        let numbers = text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect();
        let ps = client.get("/v1/x/ps")?;
        let ready = ps["state"] == "ready";
        let ask = |path: &str| if ready { client.get(path) } else { Ok(Value::Null) };
        let (cache, policy) = (ask("/v1/x/cache")?, ask("/v1/x/policy")?);
        Ok(Look { at: clock::now(), numbers, ps, cache, policy })
    }

    pub fn number(&self, name: &str) -> f64 {
        self.numbers.get(name).copied().unwrap_or_default()
    }

    /// Whether a part of the model's neurons or experts is left on disk.
    pub fn has_disk(&self) -> bool {
        self.number("ram_budget_bytes") > 0.0
    }

    /// Whether a device has a part in the model.
    pub fn has_device(&self) -> bool {
        self.number("vram_budget_bytes") > 0.0
    }
}

/// Two moments, and what was added between them.
pub struct Interval<'a> {
    pub before: &'a Look,
    pub now: &'a Look,
}

impl Interval<'_> {
    /// Growth per second.
    pub fn rate(&self, name: &str) -> f64 {
        let seconds = (self.now.at - self.before.at).as_secs_f64().max(1e-3);
        // A model that was loaded anew, and another daemon, count from nothing.
        self.added(name).max(0.0) / seconds
    }

    pub fn added(&self, name: &str) -> f64 {
        self.now.number(name) - self.before.number(name)
    }

    /// a / b of what was added; `None` if nothing was.
    pub fn share(&self, part: &str, all: &[&str]) -> Option<f64> {
        let whole: f64 = all.iter().map(|name| self.added(name)).sum();
        (whole > 0.0).then(|| self.added(part) / whole)
    }

    /// Active neurons that the device computed, of all, 0 to 1.
    pub fn hits(&self) -> Option<f64> {
        self.share("hits_total", &["hits_total", "misses_total"])
    }

    /// Needed neurons or experts that were in host memory, of all, 0 to 1.
    pub fn in_memory(&self) -> Option<f64> {
        self.share("ram_hits_total", &["ram_hits_total", "ram_misses_total"])
    }

    /// How fast a path was while it was busy, GB/s, and what it can do; `None` for what is not known.
    pub fn path(&self, path: &str) -> (Option<f64>, Option<f64>) {
        let labelled = |name: &str| format!("{name}{{path=\"{path}\"}}");
        let seconds = self.added(&labelled("path_seconds_total"));
        let rate = self.added(&labelled("path_bytes_total")) / seconds / 1e9;
        let limit = self.now.number(&labelled("path_limit_bytes_per_second")) / 1e9;
        (Some(rate).filter(|_| seconds > 0.0), Some(limit).filter(|limit| *limit > 0.0))
    }
}
