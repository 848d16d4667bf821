//! Where the files that accompany a model lie: its activation profile, its predictors and what the scheduler has learnt. They are
//! found by the model's fingerprint, so that the same model packed in another type or order shares them.
//!
//! 1. Beside the packed store, `STORE.KIND`: `m.activation.profile` for `m.neurons`; else beside what a store in the cache was packed from.
//! 2. In the user's data directory, `models/NAME-FINGERPRINT/KIND`; new ones are written here.
//! 3. In the source checkout, or in the program itself, `profiles/models/*/KIND`: those of the models that come with the program.

use super::listener::Listener;
use crate::error::{Error, Result, printable};
use crate::formats::sections::{Header, SectionFile};
use crate::formats::{history_file, predictor_file, profile_file};
use crate::model::Model;
use crate::profile::Profile;
use std::path::{Path, PathBuf};

/// The files that accompany a model; each kind has one file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Activation profile: how often each neuron is active on texts.
    Profile,
    /// Tables of the sign predictor.
    SignPredictor,
    /// Trained predictor networks.
    MlpPredictor,
    /// Frequencies of neurons that the scheduler has learnt from texts.
    History,
    /// The same of the neurons inside a mixture's experts, where they move by themselves.
    NeuronHistory,
}

impl Kind {
    /// Name of the file in a model's directory, such as `activation.profile`; beside a store it follows the store's name.
    pub const fn file_name(self) -> &'static str {
        match self {
            Kind::Profile => "activation.profile",
            Kind::SignPredictor => "sign.predictor",
            Kind::MlpPredictor => "mlp.predictor",
            Kind::History => "activation.history",
            Kind::NeuronHistory => "neurons.history",
        }
    }
}

/// A file header that says which model the file belongs to.
pub trait Owned: Header {
    /// Fingerprint of that model (`neuron_store::Header::fingerprint`).
    fn fingerprint(&self) -> &str;
    /// Whether it is about what lies on a device by itself, be it neurons inside experts.
    const OF_MOVABLE: bool;

    /// That model's name, for messages.
    fn model(&self) -> &str;
    /// That model's layers, hidden size and neurons or experts per layer.
    fn shape(&self) -> [usize; 3];
}

/// Implements [`Owned`] for a header with fields of these names.
macro_rules! owned {
    ($header:ty, $of_movable:literal, $($clusters:tt)+) => {
        impl Owned for $header {
            const OF_MOVABLE: bool = $of_movable;

            fn fingerprint(&self) -> &str {
                &self.fingerprint
            }

            fn model(&self) -> &str {
                &self.model
            }

            fn shape(&self) -> [usize; 3] {
                [self.layers, self.hidden, self.$($clusters)+]
            }
        }
    };
}

owned!(predictor_file::Header, false, clusters());
owned!(profile_file::Header, false, ffn);
owned!(history_file::Header, true, ffn);

/// The model's activation profile and its path; `None` if it has none, and for clusters, all of which every token needs.
///
/// # Errors
/// [`Error::BadFile`] for a profile that is damaged or another model's.
pub fn profile(model: &Model) -> Result<Option<(PathBuf, Profile)>> {
    if model.config.has_clusters() {
        return Ok(None);
    }
    match find(model, Kind::Profile, profile_file::open)? {
        Some(file) => Ok(Some((file.path().to_owned(), Profile::read(&file)?))),
        None => Ok(None),
    }
}

/// How often each neuron or expert that moves by itself was needed by a profile, `[layers][movable]`. Inside experts a neuron is needed where it
/// fires; where no network says which may (`by_gates`), one row of its three is read for every token that has the expert. A neuron of which the
/// profile says nothing is needed as often as its expert.
pub fn counts(model: &Model, profile: &Profile, by_gates: bool) -> Vec<Vec<u64>> {
    let (c, each) = (&model.config, model.config.movable() / model.config.clusters());
    let of = |layer| {
        let chosen = profile.counts(layer).into_iter().flat_map(|count| std::iter::repeat_n(count, each));
        match profile.inside(layer).filter(|inside| each > 1 && inside.len() == c.movable()) {
            None => chosen.collect(),
            Some(inside) if by_gates => {
                chosen.zip(inside).map(|(chosen, fires)| (chosen + 2 * fires).div_ceil(3)).collect()
            }
            Some(inside) => inside,
        }
    };
    (0..c.layers().len()).map(of).collect()
}

/// That a profile does not say which neurons inside experts fire, where that is what they are placed by, and what to do.
pub fn lacks_inside(model: &Model, profile: &Profile, path: &Path) -> Option<String> {
    let lacks = model.config.neurons_inside() && profile.inside(0).is_none();
    let old: Vec<_> =
        profile.texts.iter().filter(|text| text.inside.is_none()).map(|text| printable(&text.info.name)).collect();
    lacks.then(|| {
        format!(
            "note: {} does not say which neurons inside experts fire, so they are placed by how often their experts are chosen; count its texts \
             again ({}): dynamicinfer profile MODEL --text FILE...",
            path.display(),
            old.join(", ")
        )
    })
}

/// What the frequencies that a device learns are kept as.
pub fn history(model: &Model) -> Kind {
    if model.config.neurons_inside() { Kind::NeuronHistory } else { Kind::History }
}

/// Reads the profile in a file that the user named.
///
/// # Errors
/// [`Error::BadFile`] for a profile that is damaged or another model's.
pub fn profile_at(model: &Model, path: &Path) -> Result<Profile> {
    let file = profile_file::open(path)?;
    check_owner(&file, model)?;
    Profile::read(&file)
}

/// The model's own file of this kind, opened and checked by `open`; `None` if there is none.
///
/// # Errors
/// [`Error::BadFile`] for a file of this model that is damaged or another model's: going on without it would change what runs.
pub fn find<H: Owned>(
    model: &Model,
    kind: Kind,
    open: impl Fn(&Path) -> Result<SectionFile<H>>,
) -> Result<Option<SectionFile<H>>> {
    let users = known_to_user(model).then(|| user_dir(model)).flatten().map(|dir| dir.join(kind.file_name()));
    let source = model.packed_from().map(|path| beside(path, kind));
    let places = [Some(beside(model.path(), kind)), source, users];
    if let Some(path) = places.into_iter().flatten().find(|path| path.exists()) {
        let file = open(&path)?;
        check_owner(&file, model)?;
        return Ok(Some(file));
    }
    // The checkout has files of several models and versions: those of others are skipped.
    for path in checkouts().iter().flat_map(|dir| files_below(dir, kind)) {
        match open(&path) {
            Ok(file) if file.header.shape() == shape(model) && check_owner(&file, model).is_ok() => {
                return Ok(Some(file));
            }
            Ok(_) => {}
            Err(error) => tracing::debug!("passed over: {error}"),
        }
    }
    Ok(None)
}

/// As [`find`], of a file that this program made by itself and can make again. One that is damaged is set aside under the name
/// `FILE.damaged`, with a warning, and the model runs without it; one that cannot be read now stays, with a warning.
pub fn find_own<H: Owned>(
    model: &Model,
    kind: Kind,
    open: impl Fn(&Path) -> Result<SectionFile<H>>,
    told: &dyn Listener,
) -> Option<SectionFile<H>> {
    // At most one lies at each of the places where `find` looks first.
    for _ in 0..3 {
        let error = match find(model, kind, &open) {
            Ok(file) => return file,
            Err(error) => error,
        };
        let Error::BadFile(bad) = &error else {
            told.note(&format!("warning: {error}; going on without it"));
            return None;
        };
        let aside = damaged(&bad.path);
        match std::fs::rename(&bad.path, &aside) {
            Ok(()) => {
                told.note(&format!("warning: {error}; it was set aside as {}", printable(&aside.to_string_lossy())))
            }
            Err(why) => {
                told.note(&format!("warning: {error}; it cannot be set aside ({why}), going on without it"));
                return None;
            }
        }
    }
    None
}

/// The name of a file that is set aside.
fn damaged(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".damaged");
    path.with_file_name(name)
}

/// As [`profile`], where the profile decides about speed alone, such as what is read first: without one that cannot be used the model runs
/// as well, and `told` gets a warning.
pub fn profile_if_good(model: &Model, told: &dyn Listener) -> Option<(PathBuf, Profile)> {
    profile(model).unwrap_or_else(|error| {
        told.note(&format!("warning: {error}; going on without a profile"));
        None
    })
}

/// Checks that the file was made for this model.
///
/// # Errors
/// [`Error::BadFile`] with the command that makes the right file.
pub fn check_owner<H: Owned>(file: &SectionFile<H>, model: &Model) -> Result<()> {
    let (its, ours) = (file.header.fingerprint(), model.fingerprint());
    if its == ours {
        let its = file.header.shape();
        // What is learnt of neurons inside experts is of so many; all else of a mixture is of its experts.
        let [layers, hidden, clusters] = shape(model);
        if its == [layers, hidden, if H::OF_MOVABLE { model.config.movable() } else { clusters }] {
            return Ok(());
        }
        let why = format!("layers, hidden size and neurons are {its:?}, and not the model's; {}", H::REMEDY);
        return Err(Error::bad(file.path(), "layers", why));
    }
    let (noun, owner) = (H::NOUN, file.header.model());
    let why = format!(
        "is {}, the model's is {}: this {noun} belongs to another model ({}); {}",
        printable(its),
        printable(ours),
        printable(owner),
        H::REMEDY
    );
    Err(Error::bad(file.path(), "fingerprint", why))
}

/// Path for a new file of this kind in the user's data directory, which is created.
///
/// # Errors
/// [`Error::Usage`] without a data directory, [`Error::Io`] where it cannot be created.
pub fn write_path(model: &Model, kind: Kind) -> Result<PathBuf> {
    let dir = user_dir(model).ok_or_else(|| {
        Error::Usage("there is no data directory to write to: set HOME or XDG_DATA_HOME, or name a file with -o".into())
    })?;
    std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    Ok(dir.join(kind.file_name()))
}

/// Path at which to replace a file of this kind: beside the store if there is one, which [`find`] would take first, else as [`write_path`].
///
/// # Errors
/// As [`write_path`].
pub fn update_path(model: &Model, kind: Kind) -> Result<PathBuf> {
    let beside = beside(model.path(), kind);
    if beside.exists() { Ok(beside) } else { write_path(model, kind) }
}

fn beside(store: &Path, kind: Kind) -> PathBuf {
    let mut name = store.file_stem().unwrap_or_default().to_owned();
    name.push(".");
    name.push(kind.file_name());
    store.with_file_name(name)
}

/// A model's layers, hidden size and neurons or experts per layer.
fn shape(model: &Model) -> [usize; 3] {
    let c = &model.config;
    [c.layers().len(), c.hidden, c.clusters()]
}

/// Whether the user's data directory has files of a model of this name. Its fingerprint, for which a model in place is read as a whole, need
/// not be known for that.
fn known_to_user(model: &Model) -> bool {
    let begins = format!("{}-", file_name(&model.config.name));
    let entries = crate::config::data_dir().and_then(|dir| std::fs::read_dir(dir.join("models")).ok());
    entries.is_some_and(|entries| entries.flatten().any(|e| e.file_name().to_string_lossy().starts_with(&begins)))
}

fn user_dir(model: &Model) -> Option<PathBuf> {
    let fingerprint: String = model.fingerprint().chars().take(12).collect();
    let name = format!("{}-{}", file_name(&model.config.name), file_name(&fingerprint));
    Some(crate::config::data_dir()?.join("models").join(name))
}

/// A model's name as a directory name: `org/model` becomes `model`, and no name leads out of the parent directory.
fn file_name(name: &str) -> String {
    // File systems allow 255 bytes; this leaves room for the fingerprint.
    const MAX_NAME: usize = 100;
    let last = name.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let safe: String = last.trim_start_matches('.').chars().map(plain).take(MAX_NAME).collect();
    if safe.is_empty() { "model".into() } else { safe }
}

/// `profiles/models` of the checkouts in which the assets were found, and of what the program carries.
fn checkouts() -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = Vec::new();
    for assets in crate::config::asset_dirs().into_iter().chain(super::embedded::written()) {
        let dir = assets.with_file_name("profiles").join("models");
        if dir.is_dir() && !dirs.contains(&dir) {
            dirs.push(dir);
        }
    }
    dirs
}

/// The existing files `dir/*/KIND`, sorted by name.
fn files_below(dir: &Path, kind: Kind) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|e| e.path().join(kind.file_name())).filter(|p| p.is_file()).collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_models_name_never_leads_out_of_its_directory() {
        for (name, want) in [
            ("org/model", "model"),
            ("../..", "model"),
            (".hidden", "hidden"),
            ("a b\u{1b}[31m", "a_b__31m"),
            ("", "model"),
            ("käse", "k_se"),
        ] {
            assert_eq!(file_name(name), want);
        }
        assert_eq!(file_name(&"x".repeat(999)).len(), 100);
    }
}
