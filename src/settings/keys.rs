//! The table of all settings.

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
pub const KEYS: [Key; 57] = [
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
        "serve.lan",
        Kind::Switch,
        "false",
        false,
        "let serve.listen be an address that other machines reach, such as 0.0.0.0:8093; nothing is encrypted there",
    ),
    key(
        "serve.token_file",
        Kind::Text,
        "\"\"",
        false,
        "file with the bearer tokens for TCP, one a line; empty for ~/.local/state/dynamicinfer/token, which is created",
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
        "unknown fields of requests for answers and vectors: refuse, or ignore (logged once per client and field)",
    ),
    key("serve.ui", Kind::Switch, "true", true, "a page at / to chat, to watch the daemon and to change its budget"),
    key("serve.name", Kind::Text, "\"\"", false, "the model's name in requests; empty for its file's name"),
    key(
        "serve.models",
        Kind::Text,
        "\"\"",
        true,
        "folder of models that requests may name, besides fetched ones and those of [model.NAME]; empty for none",
    ),
    key(
        "serve.on_demand",
        Kind::Switch,
        "true",
        true,
        "load the model that a request names, in the place of one without requests; false answers from the loaded one alone",
    ),
    key(
        "serve.keep_alive",
        Kind::Whole(0, 1 << 30),
        "0",
        true,
        "seconds after which an unused model is freed, until a request needs it again; 0 keeps it",
    ),
    key(
        "serve.min_residency",
        Kind::Whole(0, 86_400),
        "30",
        true,
        "seconds within which no model is loaded twice for requests that name others in turn",
    ),
    key(
        "serve.swap_seconds",
        Kind::Whole(1, 3600),
        "60",
        true,
        "seconds that a request waits for its model to be loaded, before it is answered 503",
    ),
    key("serve.system", Kind::Text, "\"\"", false, "system message of conversations that have none; empty for none"),
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
        "tokens of a prompt and its answer together; 0 for the model's own if keys and values of all answers then take a \
         quarter of the memory that is free at most, else fewer, down to 4096; with a GPU 4096 at most",
    ),
    key(
        "serve.prompt_cache_bytes",
        Kind::Whole(0, 1 << 40),
        "268435456",
        false,
        "bytes for texts that lost their slot, from which later prompts go on; 0 for none",
    ),
    key(
        "serve.prompt_cache_every",
        Kind::Whole(256, 1 << 24),
        "8192",
        false,
        "tokens of a prompt after each of which a recurrent model keeps its states, besides those at the ends of messages",
    ),
    key(
        "serve.prompt_cache",
        Kind::Text,
        "\"\"",
        false,
        "directory in which such texts also stay from one start to the next; empty for none",
    ),
    key(
        "serve.prompt_cache_disk_bytes",
        Kind::Whole(0, 1 << 50),
        "4294967296",
        false,
        "bytes that the files of that directory may take",
    ),
    key(
        "serve.isolate",
        Kind::Choice(&["auto", "on", "off"]),
        "\"auto\"",
        true,
        "answer a prompt only from texts of the same token: auto (over TCP, if there are several tokens), on (the socket, too) or off",
    ),
    key(
        "serve.deterministic",
        Kind::Switch,
        "false",
        false,
        "run each answer as if it were alone: slower, and bit-identical",
    ),
    key(
        "serve.speculation",
        Kind::Choice(&["auto", "on", "off"]),
        "\"auto\"",
        false,
        "guess an answer's next tokens from its own text: auto (where that is faster), on (wherever it repeats itself) or off",
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
        "serve.responses_bytes",
        Kind::Whole(0, 1 << 40),
        "67108864",
        false,
        "bytes of answers of /v1/responses that are kept in memory, so that previous_response_id finds them; 0 keeps none",
    ),
    key("serve.responses_seconds", Kind::Whole(1, 1 << 30), "3600", false, "seconds for which such an answer is kept"),
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
