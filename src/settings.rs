//! Settings: a flag wins over the environment, that over the user's file, that over the system's file, that over the default; each
//! value remembers where it comes from. An unknown key is an error that suggests the nearest known one.

use crate::error::{Error, Result, excerpt};
use crate::formats::read_text;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Which values a key may have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Any text; an empty one means that the key is not set.
    Text,
    /// A whole number from the first of these to the second, both included.
    Whole(u64, u64),
    /// A number from the first of these to the second, both included.
    Number(f64, f64),
    /// True or false.
    Switch,
    /// One of these words, in any case.
    Choice(&'static [&'static str]),
}

/// One key: `section.name`.
pub struct Key {
    /// `section.name`, such as `serve.queue`.
    pub name: &'static str,
    /// Which values it takes.
    pub kind: Kind,
    /// Its default, written as in a TOML file: a text has its quotes.
    pub default: &'static str,
    /// What it means, with its unit, for the file of defaults and `config show`.
    pub about: &'static str,
    /// Whether SIGHUP takes a new value while the daemon runs.
    pub live: bool,
}

const fn key(name: &'static str, kind: Kind, default: &'static str, live: bool, about: &'static str) -> Key {
    Key { name, kind, default, about, live }
}

/// Every key. `configs/default.toml` is written from this table, and a test keeps it so.
pub const KEYS: [Key; 42] = [
    key("serve.model", Kind::Text, "\"\"", false, "MODEL to load at the start; empty for none"),
    key(
        "serve.socket",
        Kind::Text,
        "\"\"",
        false,
        "Unix socket; empty for $XDG_RUNTIME_DIR/dynamicinfer.sock, or /tmp/dynamicinfer-UID/dynamicinfer.sock",
    ),
    key(
        "serve.listen",
        Kind::Text,
        "\"\"",
        false,
        "TCP port of this machine to listen at, besides the socket: 8093, localhost:8093; empty for none",
    ),
    key(
        "serve.token_file",
        Kind::Text,
        "\"\"",
        false,
        "file with the bearer token for TCP; empty for ~/.local/state/dynamicinfer/token, which is created",
    ),
    key(
        "serve.allow_origin",
        Kind::Text,
        "\"\"",
        true,
        "web origin that may use TCP: http://localhost:3000; empty refuses all browsers",
    ),
    key(
        "serve.steering",
        Kind::Choice(&["unix", "all", "off"]),
        "\"unix\"",
        true,
        "clients that may change models, budget, policy and thresholds: unix (those of the socket), all (those over TCP, too) or off (none)",
    ),
    key(
        "serve.unknown_fields",
        Kind::Choice(&["refuse", "ignore"]),
        "\"refuse\"",
        true,
        "unknown fields of chats, completions, responses and embeddings: refuse, or ignore (logged once per client and field)",
    ),
    key(
        "serve.ui",
        Kind::Switch,
        "false",
        true,
        "a page at /ui to watch the daemon and change its budget; over TCP its password is the token",
    ),
    key("serve.name", Kind::Text, "\"\"", false, "the model's name in requests; empty for its file's name"),
    key("serve.queue", Kind::Whole(1, 65_536), "64", false, "requests that may wait; more are answered 429"),
    key(
        "serve.parallel",
        Kind::Whole(1, 32),
        "8",
        false,
        "answers that run at once; each has its own keys and \
         values",
    ),
    key(
        "serve.context",
        Kind::Whole(0, 1 << 24),
        "0",
        false,
        "tokens of a prompt and its answer together; 0 for the model's own, 4096 at most",
    ),
    key(
        "serve.deterministic",
        Kind::Switch,
        "false",
        false,
        "run each answer as if it were alone: slower, and bit-identical",
    ),
    key(
        "serve.body_bytes",
        Kind::Whole(1024, 1 << 30),
        "8388608",
        true,
        "bytes of a request's body; more is answered 413",
    ),
    key(
        "serve.bodies_bytes",
        Kind::Whole(1024, 1 << 40),
        "67108864",
        false,
        "bytes of all request bodies in memory; more is answered 503",
    ),
    key(
        "serve.body_seconds",
        Kind::Whole(1, 3600),
        "60",
        true,
        "seconds that a request's body may take from its first byte to its last, before it is answered 408",
    ),
    key(
        "serve.connections",
        Kind::Whole(1, 1 << 20),
        "4096",
        false,
        "open connections of the Unix socket; more wait to be accepted",
    ),
    key(
        "serve.tcp_connections",
        Kind::Whole(1, 1 << 20),
        "256",
        false,
        "open connections of the TCP port; more wait to be accepted",
    ),
    key(
        "serve.token_seconds",
        Kind::Whole(1, 3600),
        "5",
        true,
        "seconds within which a TCP connection must send the token",
    ),
    key(
        "serve.stall_seconds",
        Kind::Whole(1, 3600),
        "30",
        true,
        "seconds that a client may stop reading, or writing its request, before it is cut",
    ),
    key(
        "serve.rest_seconds",
        Kind::Whole(1, 3600),
        "2",
        false,
        "seconds that a client may stop reading while others wait for its place, before its answer ends with an error",
    ),
    key(
        "serve.slowdown",
        Kind::Number(1.0, 100.0),
        "2.0",
        false,
        "factor by which other clients' prompts may delay the next token of an answer",
    ),
    key(
        "serve.ping_seconds",
        Kind::Whole(1, 3600),
        "15",
        true,
        "seconds after which a silent stream sends a comment, so that clients and proxies keep it open",
    ),
    key(
        "serve.drain_seconds",
        Kind::Whole(0, 3600),
        "30",
        true,
        "seconds that running answers have to finish after SIGTERM",
    ),
    key(
        "engine.threads",
        Kind::Whole(0, 1024),
        "0",
        false,
        "threads to compute with; 0 for one per core, one less with a GPU",
    ),
    key(
        "engine.kv",
        Kind::Choice(&["f16", "f32", "q8_0", "q4_0"]),
        "\"f16\"",
        false,
        "type of the key/value cache: f16, f32, q8_0 or q4_0",
    ),
    key(
        "engine.prefill",
        Kind::Choice(&["exact", "int8", "int8-per-tensor"]),
        "\"int8\"",
        false,
        "precision of prompts of more than 32 tokens on the processor",
    ),
    key(
        "engine.predictor",
        Kind::Text,
        "\"auto\"",
        false,
        "predictor that selects the neurons of each token: dense, exact, sign, mlp or auto",
    ),
    key(
        "engine.audit",
        Kind::Whole(0, 1 << 20),
        "64",
        false,
        "compare the predictor with the true activations every this many passes, for `top`; 0 for never",
    ),
    key(
        "engine.quant",
        Kind::Text,
        "\"\"",
        false,
        "type of the weights if a model must be packed; empty for the nearest to its own",
    ),
    key(
        "engine.activation",
        Kind::Text,
        "\"\"",
        false,
        "activation function of models that name none; empty for the files'",
    ),
    key(
        "engine.device",
        Kind::Choice(&["cpu", "cuda", "auto", "virtual"]),
        "\"cpu\"",
        false,
        "device that computes besides the processor: cpu (none), cuda, auto (a usable GPU) or virtual",
    ),
    key(
        "engine.vram",
        Kind::Text,
        "\"\"",
        false,
        "memory budget on the device: 8GiB; empty for most of the free \
         memory",
    ),
    key("engine.ram", Kind::Text, "\"\"", false, "host memory limit of a model: 32GiB; empty for the free memory"),
    key("engine.policy", Kind::Text, "\"full\"", false, "migration policy during decoding"),
    key(
        "sampling.temperature",
        Kind::Number(0.0, 100.0),
        "0.8",
        false,
        "temperature of requests that set none (so with all of this section); 0 takes the likeliest token",
    ),
    key(
        "sampling.top_k",
        Kind::Whole(0, 1 << 24),
        "40",
        false,
        "choose among this many of the likeliest tokens; 0 for all",
    ),
    key(
        "sampling.top_p",
        Kind::Number(0.0, 1.0),
        "0.95",
        false,
        "choose among the likeliest tokens of this total probability",
    ),
    key("sampling.min_p", Kind::Number(0.0, 1.0), "0.05", false, "drop tokens below this share of the likeliest"),
    key(
        "sampling.repeat_penalty",
        Kind::Number(0.01, 100.0),
        "1.0",
        false,
        "divide the logits of repeated tokens by this",
    ),
    key("chat.system", Kind::Text, "\"\"", false, "system message of `chat`; empty for none"),
    key(
        "chat.history",
        Kind::Whole(0, 100_000),
        "1000",
        false,
        "lines that `chat` remembers between runs; 0 keeps none",
    ),
];

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

/// The values of all [`KEYS`], each with its origin. Methods that take a key's name panic if there is no such key.
#[derive(Clone, Debug)]
pub struct Settings(BTreeMap<&'static str, (toml::Value, Origin)>);

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
        let mut settings = Settings(KEYS.iter().map(default).collect());
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
            if !KEYS.iter().any(|key| key.name.starts_with(&format!("{section}."))) {
                return Err(refuse(unknown("section", &section, sections)));
            }
            for (name, value) in values {
                let name = format!("{section}.{name}");
                let key = find(&name).map_err(refuse)?;
                let value = check(key, value).map_err(refuse)?;
                self.0.insert(key.name, (value, Origin::File(path.to_owned())));
            }
        }
        Ok(())
    }

    /// Sets a key from text, as a flag or a variable gives it.
    ///
    /// # Errors
    /// [`Error::Usage`] for an unknown key or a value that it does not take.
    pub fn set(&mut self, name: &str, text: &str, origin: Origin) -> Result<()> {
        let key = find(name).map_err(Error::Usage)?;
        let value = parse(key, text).map_err(|why| Error::Usage(format!("{origin}: {why}")))?;
        self.0.insert(key.name, (value, origin));
        Ok(())
    }

    /// These settings with `values` for one model: of the engine, the sampler, and the context.
    ///
    /// # Errors
    /// [`Error::Usage`] for a key that is about the daemon itself; as [`Settings::set`].
    pub fn for_load(&self, values: &BTreeMap<String, String>) -> Result<Settings> {
        let mut settings = self.clone();
        for (name, text) in values {
            if !(name.starts_with("engine.") || name.starts_with("sampling.") || name == "serve.context") {
                let why = "`load` accepts keys of [engine] and [sampling], and serve.context";
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
        &self.0[name].0
    }

    /// The origin of the value of the key `name`.
    pub fn origin(&self, name: &str) -> &Origin {
        &self.0[name].1
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

    /// Takes those values over from `other` that may change while the daemon runs ([`Key::live`]). Returns the names of the other keys
    /// whose values differ: they keep their old values until a restart.
    pub fn reload(&mut self, other: &Settings) -> Vec<&'static str> {
        let mut left = Vec::new();
        for key in &KEYS {
            if self.value(key.name) == other.value(key.name) {
                continue;
            }
            if key.live {
                self.0.insert(key.name, other.0[key.name].clone());
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
    text
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
