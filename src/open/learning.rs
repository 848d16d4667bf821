//! What runs teach about a model without a profile: the scheduler's thread counts which neurons are active, and a file in the model's
//! directory keeps it for the next start.

use super::activity::{Activity, Source};
use super::artifacts;
use crate::background::{Learner, Learnt};
use crate::clock::{self, Duration, Instant, Seldom};
use crate::error::Result;
use crate::formats::history_file;
use crate::model::Model;
use std::sync::Arc;

/// Tokens after which a run in which nothing moves need not go on learning.
pub(super) const ENOUGH: u64 = 2048;
/// Time between two writes while the model runs.
const EVERY: Duration = Duration::from_secs(600);

/// Counts on from `activity`, which is no profile, and keeps the counts in the model's file.
pub(super) fn learner(model: &Arc<Model>, activity: &Activity) -> Learner {
    let (layers, movable) = (model.config.layers().len(), model.config.movable());
    let learnt = match activity.source {
        Source::Learnt { tokens, .. } => {
            let frequencies: Vec<_> =
                (0..layers).map(|l| model.layers[l].order.into_store(activity.frequencies(l))).collect();
            Learnt::new(&frequencies, tokens)
        }
        Source::Profile(_) | Source::Nothing => Learnt::new(&vec![vec![0.0; movable]; layers], 0),
    };
    let (model, mut due) = (model.clone(), Due { last: clock::now(), written: 0 });
    let keep = move |learnt: &Learnt, ends: bool| {
        static WARNED: Seldom = Seldom::new();
        let (new, now) = (learnt.new_tokens(), clock::now());
        if !due.is_due(new, ends, now) {
            return;
        }
        // Also where it fails, so that a full disk is not written to again at once.
        due = Due { last: now, written: new };
        if let Err(error) = write(&model, learnt)
            && WARNED.is_due(clock::unix_seconds())
        {
            tracing::warn!("what was learnt about neurons is not kept: {error}");
        }
    };
    Learner { learnt, keep: Box::new(keep) }
}

/// Writes what was learnt, in place of what was known before.
fn write(model: &Model, learnt: &Learnt) -> Result<()> {
    let c = &model.config;
    let frequencies: Vec<Vec<f32>> =
        model.layers.iter().zip(learnt.frequencies()).map(|(layer, f)| layer.order.into_published(&f)).collect();
    let header = history_file::Header {
        fingerprint: model.fingerprint().to_owned(),
        model: c.name.clone(),
        layers: c.layers().len(),
        hidden: c.hidden,
        ffn: c.movable(),
        tokens: learnt.tokens(),
        sections: Vec::new(),
    };
    history_file::write(&artifacts::update_path(model, artifacts::history(model))?, header, &frequencies)
}

/// The last write: when it was, and how many tokens had been counted since the start.
struct Due {
    last: Instant,
    written: u64,
}

impl Due {
    /// Whether counts of `new` tokens are to be written: every [`EVERY`] and at the end, if there are new ones.
    fn is_due(&self, new: u64, ends: bool, now: Instant) -> bool {
        new > self.written && (ends || now.duration_since(self.last) >= EVERY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_written_every_ten_minutes_and_at_the_end_if_there_are_new_ones() {
        let start = clock::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let first = Due { last: start, written: 0 };
        assert!(!first.is_due(5, false, at(599)) && first.is_due(5, false, at(600)) && first.is_due(5, true, at(1)));
        assert!(!first.is_due(0, true, at(9999)), "nothing was decoded");
        let second = Due { last: at(600), written: 5 };
        assert!(!second.is_due(5, true, at(9999)), "nothing is new");
        assert!(!second.is_due(9, false, at(1199)) && second.is_due(9, false, at(1200)));
    }
}
