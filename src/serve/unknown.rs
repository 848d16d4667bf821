//! Unknown fields of requests for answers and vectors: whether they are ignored, and the log of those that were.

use crate::api::Unknown;
use crate::error::printable;
use crate::settings::Settings;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use tracing::warn;

/// Pairs of client and field that are remembered, at most; then they are forgotten, and may be logged again.
const MAX_REMEMBERED: usize = 4096;

/// The clients whose requests had fields that were ignored, each with the field.
#[derive(Default)]
pub struct IgnoredFields(Mutex<BTreeSet<(u64, String)>>);

/// What becomes of the unknown fields of such a request, by the setting.
pub fn unknown_fields(settings: &Settings) -> Unknown {
    Unknown::new(settings.text("serve.unknown_fields") == Some("ignore"))
}

impl IgnoredFields {
    /// Logs the fields of a request that were ignored, each once for each client.
    pub fn note(&self, client: u64, unknown: Unknown) {
        for field in unknown.into_ignored() {
            let field = printable(&field);
            let mut known = self.0.lock();
            if known.len() >= MAX_REMEMBERED {
                known.clear();
            }
            if known.insert((client, field.clone())) {
                warn!(client, field, "an unknown field is ignored");
            }
        }
    }
}
