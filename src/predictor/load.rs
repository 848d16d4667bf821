//! Makes a predictor out of a predictor file.

use super::{Calibration, Kind, Mlp, Predictor, Sign, sign};
use crate::error::{Error, Result};
use crate::formats::predictor_file::{self, PredictorFile};
use crate::model::Model;
use std::path::Path;
use std::sync::Arc;

/// Bytes of a file up to which it is read whole and compared with its checksums when it is opened, which takes some milliseconds. Larger
/// files are checked by `show --verify`.
const VERIFY_UP_TO: u64 = 64 << 20;

/// Opens a predictor file of `model`.
///
/// # Errors
/// [`Error::BadFile`] if it is damaged, of another kind, or made for another model; [`Error::Io`].
pub fn open(path: &Path, model: &Model) -> Result<Arc<dyn Predictor>> {
    let file = predictor_file::open(path)?;
    check_model(&file, model)?;
    if file.file_bytes() <= VERIFY_UP_TO {
        file.verify(|_| ())?;
    }
    let header = &file.header;
    match header.kind.parse() {
        Ok(Kind::Mlp) => Ok(Arc::new(Mlp::new(file, model)?)),
        Ok(Kind::Sign) => {
            let table = |t: &predictor_file::Table| {
                let calibration = Calibration::new(t.scores.clone(), t.probabilities.clone());
                ((t.layer, t.ahead), (calibration, t.threshold.unwrap_or(header.threshold)))
            };
            let tables: sign::Tables = header.tables.iter().map(table).collect();
            Ok(Arc::new(Sign::new(model, tables)))
        }
        _ => {
            let why = format!("'{}' is neither mlp nor sign; {}", header.kind, remedy(&header.kind));
            Err(Error::bad(path, "kind", why))
        }
    }
}

/// What to do about a bad file of this kind.
fn remedy(kind: &str) -> &'static str {
    if kind == Kind::Sign.name() {
        "make it again with `dynamicinfer calibrate MODEL`"
    } else {
        "make it again with `dynamicinfer train-predictor MODEL`"
    }
}

/// Checks that the file was made for this model.
fn check_model(file: &PredictorFile, model: &Model) -> Result<()> {
    let (h, c) = (&file.header, &model.config);
    let bad = |field: &str, why: String| Err(Error::bad(file.path(), field, format!("{why}; {}", remedy(&h.kind))));
    let experts = c.neurons() / c.widest_ffn();
    let sizes =
        [("layers", h.layers, c.layers().len()), ("hidden", h.hidden, c.hidden), ("ffn", h.ffn, c.widest_ffn())];
    for (field, found, wanted) in sizes.into_iter().chain([("experts", h.experts, experts)]) {
        if found != wanted {
            return bad(field, format!("is {found}, the model has {wanted}: it belongs to {}", h.model));
        }
    }
    if h.fingerprint != model.fingerprint() {
        return bad("fingerprint", format!("is another model's: it belongs to {}, not to {}", h.model, c.name));
    }
    Ok(())
}
