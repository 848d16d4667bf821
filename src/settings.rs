//! Settings: a flag wins over the environment, that over the user's file, that over the system's file, that over the default; each
//! value remembers where it comes from. An unknown key is an error that suggests the nearest known one.

mod keys;

pub use keys::{KEYS, Key, Kind};

use crate::error::{Error, Result, excerpt};
use crate::formats::read_text;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It is not set: the value is [`Key::default`].
    Default,
    /// This configuration file.
    File(PathBuf),
    /// The environment variable of this name.
    Environment(String),
    /// The command line's flag of this name.
    Flag(&'static str),
    /// `load`, for the model that it loads.
    Load,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => write!(f, "default"),
            Origin::File(path) => write!(f, "{}", path.display()),
            Origin::Environment(name) => write!(f, "${name}"),
            Origin::Flag(name) => write!(f, "{name}"),
            Origin::Load => write!(f, "load"),
        }
    }
}

/// The values of all [`KEYS`], each with its origin, and the presets. Methods that take a key's name panic if there is no such key.
#[derive(Clone, Debug)]
pub struct Settings {
    values: BTreeMap<&'static str, (toml::Value, Origin)>,
    presets: BTreeMap<String, Preset>,
}

/// A model with settings of its own: `[model.NAME]` of a settings file.
#[derive(Clone, Debug, PartialEq)]
pub struct Preset {
    /// MODEL: a path or a name.
    pub path: String,
    values: BTreeMap<&'static str, toml::Value>,
    file: PathBuf,
}

impl Settings {
    /// Reads those of `files` that exist (later ones win), then `named`, which must exist, then what `environment` has for each
    /// [`variable`].
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown key or a value that its key does not take, [`Error::Io`] for a file that cannot be read.
    pub fn read(
        files: &[PathBuf],
        named: Option<&Path>,
        environment: impl Fn(&str) -> Option<String>,
    ) -> Result<Settings> {
        let default = |key: &Key| (key.name, (parse(key, key.default).expect("defaults are good"), Origin::Default));
        let mut settings = Settings { values: KEYS.iter().map(default).collect(), presets: BTreeMap::new() };
        for path in files.iter().filter(|path| path.exists()).map(PathBuf::as_path).chain(named) {
            settings.read_file(path)?;
        }
        for key in &KEYS {
            let name = variable(key.name);
            if let Some(text) = environment(&name) {
                settings.set(key.name, &text, Origin::Environment(name))?;
            }
        }
        Ok(settings)
    }

    fn read_file(&mut self, path: &Path) -> Result<()> {
        let refuse = |why: String| Error::Usage(format!("{}: {why}", path.display()));
        let text = read_text(path).map_err(|error| match error {
            Error::BadFile(bad) => refuse(bad.reason),
            other => other,
        })?;
        let table: toml::Table = toml::from_str(&text).map_err(|e| refuse(format!("not TOML: {e}")))?;
        for (section, values) in table {
            let sections = KEYS.iter().map(|key| key.name.split('.').next().expect("keys have sections"));
            let toml::Value::Table(values) = values else {
                return Err(refuse(format!("'{section}' is outside a section; write it as [section] name = value")));
            };
            if section == "model" {
                self.read_presets(path, values).map_err(refuse)?;
                continue;
            }
            if !KEYS.iter().any(|key| key.name.starts_with(&format!("{section}."))) {
                return Err(refuse(unknown("section", &section, sections.chain(["model"]))));
            }
            for (name, value) in values {
                let name = format!("{section}.{name}");
                let key = find(&name).map_err(refuse)?;
                let value = check(key, value).map_err(refuse)?;
                self.values.insert(key.name, (value, Origin::File(path.to_owned())));
            }
        }
        Ok(())
    }

    /// Takes the presets of a file. One with a name that an earlier file has replaces it.
    fn read_presets(&mut self, file: &Path, presets: toml::Table) -> Result<(), String> {
        for (name, preset) in presets {
            let shown = excerpt(&name);
            let toml::Value::Table(mut fields) = preset else {
                return Err(format!("'model.{shown}' is outside a preset; write [model.NAME] path = MODEL"));
            };
            let path = match fields.remove("path") {
                Some(toml::Value::String(path)) if !path.is_empty() => path,
                _ => return Err(format!("model.{shown} has no path; write path = MODEL, a path or a name")),
            };
            let known = || KEYS.iter().filter_map(|key| of_model(key.name)).chain(["path"]);
            let mut values = BTreeMap::new();
            for (field, value) in fields {
                let key = KEYS.iter().find(|key| of_model(key.name) == Some(&field));
                let key = key.ok_or_else(|| unknown(&format!("key of model.{shown}"), &field, known()))?;
                values.insert(key.name, check(key, value).map_err(|why| format!("model.{shown}: {why}"))?);
            }
            self.presets.insert(name, Preset { path, values, file: file.to_owned() });
        }
        Ok(())
    }

    /// The names of all presets.
    pub fn presets(&self) -> impl Iterator<Item = &str> {
        self.presets.keys().map(String::as_str)
    }

    /// The preset of this name.
    pub fn preset(&self, name: &str) -> Option<&Preset> {
        self.presets.get(name)
    }

    /// These settings for a preset's model. What a flag or `load` has set stays.
    #[must_use]
    pub fn with_preset(&self, preset: &Preset) -> Settings {
        let mut settings = self.clone();
        for (name, value) in &preset.values {
            if !matches!(self.origin(name), Origin::Flag(_) | Origin::Load) {
                settings.values.insert(name, (value.clone(), Origin::File(preset.file.clone())));
            }
        }
        settings
    }

    /// Sets a key from text, as a flag or a variable gives it.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown key or a value that it does not take.
    pub fn set(&mut self, name: &str, text: &str, origin: Origin) -> Result<()> {
        let key = find(name).map_err(Error::Usage)?;
        let value = parse(key, text).map_err(|why| Error::Usage(format!("{origin}: {why}")))?;
        self.values.insert(key.name, (value, origin));
        Ok(())
    }

    /// These settings with `values` for one model: of the engine, the sampler, and the context.
    ///
    /// # Errors
    /// [`Error::Usage`] for a key that is about the daemon itself; as [`Settings::set`].
    pub fn for_load(&self, values: &BTreeMap<String, String>) -> Result<Settings> {
        let mut settings = self.clone();
        for (name, text) in values {
            if of_model(name).is_none() {
                let why = "`load` accepts keys of [engine] and [sampling], serve.context and serve.system";
                return Err(Error::Usage(format!("'{}' is not a setting of a model; {why}", excerpt(name))));
            }
            settings.set(name, text, Origin::Load)?;
        }
        Ok(settings)
    }

    /// Sets a key to the value that the command line's `flag` was given; `None` leaves it as it is.
    ///
    /// # Errors
    /// As [`Settings::set`].
    pub fn flag(&mut self, name: &str, flag: &'static str, value: Option<impl ToString>) -> Result<()> {
        value.map_or(Ok(()), |value| self.set(name, &value.to_string(), Origin::Flag(flag)))
    }

    fn value(&self, name: &str) -> &toml::Value {
        &self.values[name].0
    }

    /// The origin of the value of the key `name`.
    pub fn origin(&self, name: &str) -> &Origin {
        &self.values[name].1
    }

    /// The value of a [`Kind::Text`] or [`Kind::Choice`] key; `None` if it is empty, which means that it is not set.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.value(name).as_str().filter(|text| !text.is_empty())
    }

    /// The value of a [`Kind::Whole`] key; 0 for a key of another kind.
    pub fn whole(&self, name: &str) -> u64 {
        self.value(name).as_integer().unwrap_or_default() as u64
    }

    /// The value of a [`Kind::Number`] key; 0 for a key of another kind.
    pub fn number(&self, name: &str) -> f64 {
        self.value(name).as_float().unwrap_or_default()
    }

    /// The value of a [`Kind::Switch`] key; false for a key of another kind.
    pub fn switch(&self, name: &str) -> bool {
        self.value(name).as_bool().unwrap_or_default()
    }

    /// Each key with its value as a TOML file would have it and the value's origin, in the order of [`KEYS`].
    pub fn all(&self) -> impl Iterator<Item = (&'static Key, String, &Origin)> {
        KEYS.iter().map(|key| (key, self.value(key.name).to_string(), self.origin(key.name)))
    }

    /// Takes the presets over from `other`, and those values that may change while the daemon runs ([`Key::live`]). Returns the names of the
    /// other keys whose values differ: they keep their old values until a restart.
    pub fn reload(&mut self, other: &Settings) -> Vec<&'static str> {
        self.presets.clone_from(&other.presets);
        let mut left = Vec::new();
        for key in &KEYS {
            if self.value(key.name) == other.value(key.name) {
                continue;
            }
            if key.live {
                self.values.insert(key.name, other.values[key.name].clone());
            } else {
                left.push(key.name);
            }
        }
        left
    }
}

/// The environment variable of a key: `DYNAMICINFER_SERVE_QUEUE` for `serve.queue`.
pub fn variable(name: &str) -> String {
    format!("DYNAMICINFER_{}", name.replace('.', "_").to_uppercase())
}

/// The last part of a key's name, if the key is about one model and not about the daemon.
fn of_model(name: &str) -> Option<&str> {
    let (section, last) = name.split_once('.')?;
    let is = ["engine", "sampling"].contains(&section) || ["serve.context", "serve.system"].contains(&name);
    is.then_some(last)
}

fn find(name: &str) -> Result<&'static Key, String> {
    let found = KEYS.iter().find(|key| key.name == name);
    found.ok_or_else(|| unknown("key", name, KEYS.iter().map(|key| key.name)))
}

fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> String {
    let hint = nearest(name, known).map_or(String::new(), |near| format!("; did you mean '{near}'?"));
    format!("unknown {what} '{}'{hint} `dynamicinfer config show` lists all", excerpt(name))
}

/// What to say of each of these environment variables that is neither a key's ([`variable`]) nor one of the `others`.
pub fn unknown_variables(names: &[String], others: &[&str]) -> Vec<String> {
    let known: Vec<String> =
        KEYS.iter().map(|key| variable(key.name)).chain(others.iter().map(|name| (*name).to_owned())).collect();
    let strange = names.iter().filter(|name| !known.contains(name));
    strange.map(|name| unknown("environment variable", name, known.iter().map(String::as_str))).collect()
}

/// The one of the `known` words that is most like `word` (Jaro-Winkler); `None` if none is above 0.75.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let score = |k: &&str| (strsim::jaro_winkler(word, k) * 1e6) as u64;
    known.filter(|k| strsim::jaro_winkler(word, k) > 0.75).max_by_key(score)
}

fn parse(key: &Key, text: &str) -> Result<toml::Value, String> {
    let value = match key.kind {
        // A default is written as in a file, a variable or flag as it is meant.
        Kind::Text | Kind::Choice(_) => toml::Value::String(text.trim_matches('"').to_owned()),
        Kind::Whole(..) => match text.parse::<i64>() {
            Ok(number) => toml::Value::Integer(number),
            Err(_) => toml::Value::String(text.to_owned()),
        },
        Kind::Number(..) => match text.parse::<f64>() {
            Ok(number) => toml::Value::Float(number),
            Err(_) => toml::Value::String(text.to_owned()),
        },
        Kind::Switch => match text {
            "true" | "1" | "yes" => toml::Value::Boolean(true),
            "false" | "0" | "no" => toml::Value::Boolean(false),
            other => toml::Value::String(other.to_owned()),
        },
    };
    check(key, value)
}

fn check(key: &Key, value: toml::Value) -> Result<toml::Value, String> {
    let value = match (key.kind, value) {
        (Kind::Number(..), toml::Value::Integer(n)) => toml::Value::Float(n as f64),
        (Kind::Choice(words), toml::Value::String(text)) => {
            let known = words.iter().find(|word| word.eq_ignore_ascii_case(&text));
            toml::Value::String(known.map_or(text, |word| (*word).to_owned()))
        }
        (_, value) => value,
    };
    let good = match (key.kind, &value) {
        (Kind::Text, toml::Value::String(_)) | (Kind::Switch, toml::Value::Boolean(_)) => true,
        (Kind::Choice(words), toml::Value::String(text)) => words.contains(&text.as_str()),
        (Kind::Whole(least, most), toml::Value::Integer(n)) => {
            u64::try_from(*n).is_ok_and(|n| (least..=most).contains(&n))
        }
        (Kind::Number(least, most), toml::Value::Float(n)) => (least..=most).contains(n),
        _ => false,
    };
    if good {
        return Ok(value);
    }
    let wanted = match key.kind {
        Kind::Text => "a text".to_owned(),
        Kind::Whole(least, most) => format!("a whole number from {least} to {most}"),
        Kind::Number(least, most) => format!("a number from {least} to {most}"),
        Kind::Switch => "true or false".to_owned(),
        Kind::Choice(words) => words.join(" or "),
    };
    Err(format!("{} is {}; it must be {wanted}", key.name, excerpt(value)))
}

/// The text of `configs/default.toml`: every key with its default and meaning.
pub fn default_file() -> String {
    let mut text = String::from(
        "# Every setting with its default. Copy what you change to ~/.config/dynamicinfer/config.toml, or for all users to\n\
         # /etc/dynamicinfer/config.toml. A flag wins over the environment (DYNAMICINFER_SERVE_QUEUE=8), that over the user's\n\
         # file, that over the system's. Marked (live): SIGHUP takes a new value while the daemon runs.\n",
    );
    let mut section = "";
    for key in &KEYS {
        let (in_section, name) = key.name.split_once('.').expect("keys have sections");
        if in_section != section {
            text += &format!("\n[{in_section}]\n");
            section = in_section;
        }
        let live = if key.live { " (live)" } else { "" };
        text += &format!("# {}{live}\n{name} = {}\n", key.about, key.default);
    }
    text + "\n# A model with settings of its own, which requests, `load`, `serve` and `chat` name: keys of [engine] and [sampling], context, system.\n\
            # [model.NAME]\n# path = \"OWNER/MODEL\"\n# context = 8192\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn flag_wins_over_environment_over_user_over_system_over_default() {
        let dir = tempfile::tempdir().unwrap();
        let system = file(&dir, "system.toml", "[serve]\nqueue = 1\nparallel = 1\ncontext = 1\nname = \"a\"\n");
        let user = file(&dir, "user.toml", "[serve]\nqueue = 2\nparallel = 2\ncontext = 2\n");
        let environment = |name: &str| match name {
            "DYNAMICINFER_SERVE_QUEUE" => Some("3".into()),
            "DYNAMICINFER_SERVE_PARALLEL" => Some("3".into()),
            _ => None,
        };
        let mut settings = Settings::read(&[system, user], None, environment).unwrap();
        settings.flag("serve.queue", "--queue", Some(4)).unwrap();
        settings.flag("serve.name", "--name", None::<String>).unwrap();
        let whole = |name| (settings.whole(name), settings.origin(name).to_string());
        assert_eq!(whole("serve.queue"), (4, "--queue".into()));
        assert_eq!(whole("serve.parallel"), (3, "$DYNAMICINFER_SERVE_PARALLEL".into()));
        assert_eq!(whole("serve.context").0, 2);
        assert!(whole("serve.context").1.ends_with("user.toml"));
        assert_eq!(settings.text("serve.name"), Some("a"));
        assert_eq!(whole("serve.drain_seconds"), (30, "default".into()));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_neighbour() {
        let dir = tempfile::tempdir().unwrap();
        let message = |text: &str| {
            let path = file(&dir, "c.toml", text);
            Settings::read(&[], Some(&path), |_| None)
                .unwrap_err()
                .to_string()
                .replace(path.to_str().unwrap(), "c.toml")
        };
        assert_eq!(
            message("[serve]\nqeue = 1\n"),
            "c.toml: unknown key 'serve.qeue'; did you mean 'serve.queue'? `dynamicinfer config show` lists all"
        );
        assert!(message("[server]\nqueue = 1\n").contains("unknown section 'server'; did you mean 'serve'?"));
        assert_eq!(
            message("[serve]\nqueue = 0\n"),
            "c.toml: serve.queue is 0; it must be a whole number from 1 to 65536"
        );
        assert!(message("[serve]\nqueue = \"8\"\n").contains("must be a whole number"));
        assert!(message("queue = 1\n").contains("outside a section"));
        assert!(message("[serve\n").contains("not TOML"));
        let missing = dir.path().join("none.toml");
        assert!(Settings::read(std::slice::from_ref(&missing), None, |_| None).is_ok());
        assert!(Settings::read(&[], Some(&missing), |_| None).is_err());
        let variable = |name: &str| (name == "DYNAMICINFER_SERVE_DETERMINISTIC").then(|| "perhaps".into());
        let error = Settings::read(&[], None, variable).unwrap_err().to_string();
        assert_eq!(
            error,
            "$DYNAMICINFER_SERVE_DETERMINISTIC: serve.deterministic is \"perhaps\"; it must be true or false"
        );
    }

    #[test]
    fn a_preset_sets_what_no_flag_has_set_and_a_wrong_one_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let text = "[engine]\nthreads = 3\n[model.coder]\npath = \"Qwen\"\ncontext = 512\nthreads = 2\ntemperature = 1\nsystem = \"Be brief.\"\n";
        let path = file(&dir, "c.toml", text);
        let mut settings = Settings::read(&[], Some(&path), |_| None).unwrap();
        settings.flag("serve.context", "--ctx-size", Some(64)).unwrap();
        let preset = settings.preset("coder").unwrap();
        let own = settings.with_preset(preset);
        assert_eq!((preset.path.as_str(), settings.presets().collect::<Vec<_>>()), ("Qwen", vec!["coder"]));
        assert_eq!((own.whole("serve.context"), own.whole("engine.threads")), (64, 2));
        assert_eq!((own.number("sampling.temperature"), own.text("serve.system")), (1.0, Some("Be brief.")));
        assert_eq!((settings.whole("engine.threads"), settings.preset("other")), (3, None));
        for (text, why) in [
            ("[model]\nx = 1\n", "'model.x' is outside a preset"),
            ("[model.x]\ncontext = 1\n", "model.x has no path"),
            ("[model.x]\npath = \"a\"\nqueue = 1\n", "unknown key of model.x 'queue'"),
            ("[model.x]\npath = \"a\"\ntemprature = 1\n", "did you mean 'temperature'?"),
            ("[model.x]\npath = \"a\"\ntop_p = 2\n", "model.x: sampling.top_p is 2.0; it must be"),
        ] {
            let error = Settings::read(&[], Some(&file(&dir, "bad.toml", text)), |_| None).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_variable_that_nothing_reads_is_named_with_its_neighbour() {
        let names = ["DYNAMICINFER_SERVE_QUEUE", "DYNAMICINFER_LOG", "DYNAMICINFER_SERVE_QEUE"].map(String::from);
        let said = unknown_variables(&names, &["DYNAMICINFER_LOG"]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("'DYNAMICINFER_SERVE_QEUE'; did you mean 'DYNAMICINFER_SERVE_QUEUE'?"));
    }

    #[test]
    fn a_reload_takes_what_is_live_and_names_the_rest() {
        let mut settings = Settings::read(&[], None, |_| None).unwrap();
        let mut other = settings.clone();
        other.flag("serve.drain_seconds", "x", Some(1)).unwrap();
        other.flag("serve.queue", "x", Some(1)).unwrap();
        assert_eq!(settings.reload(&other), ["serve.queue"]);
        assert_eq!((settings.whole("serve.drain_seconds"), settings.whole("serve.queue")), (1, 64));
    }

    #[test]
    fn the_default_file_is_the_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/default.toml");
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == default_file(),
            "configs/default.toml is not what `dynamicinfer config default` prints; write it again"
        );
        let settings = Settings::read(&[], Some(&path), |_| None).unwrap();
        assert_eq!(settings.all().count(), KEYS.len());
    }
}
