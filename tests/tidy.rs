//! The house rules that a compiler does not know. Each complaint reads `path:line: what, and what to do instead`.

#[path = "tidy/imports.rs"]
mod imports;
#[path = "tidy/words.rs"]
mod words;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Each top-level module and those it may use, in the order of lib.rs; none may use one that stands below it. A new
/// pair is a decision about the architecture: change ARCHITECTURE.md with it.
const MODULES: [(&str, &[&str]); 37] = [
    ("clock", &[]),
    ("config", &[]),
    ("error", &[]),
    ("exp", &[]),
    ("ids", &[]),
    ("interrupt", &["error"]),
    ("prng", &[]),
    // A stranger's work in a process of its own; it does not know what work.
    ("child", &["error"]),
    // Reads of a file, whatever it holds; the virtual disk draws, and a disk's costs are measured.
    ("disk", &["clock", "prng"]),
    ("formats", &["error"]),
    // Names of models on the hub, and which files they mean; the only connection to another machine.
    ("hub", &["error", "formats"]),
    // A file of settings is opened as every file that a user names.
    ("settings", &["error", "formats"]),
    ("tokenizer", &["child", "clock", "error", "formats"]),
    // Kernels cannot fail and know no files: only how a row lies in memory. Which of them run can be asked for from outside.
    ("cpu", &["clock", "config", "exp", "formats"]),
    ("model", &["error", "exp", "formats", "hub", "ids", "tokenizer"]),
    // A real device is timed by the clock.
    ("device", &["clock", "cpu", "formats", "ids", "model", "prng"]),
    ("cache", &["device", "ids"]),
    ("ops", &["cpu", "formats", "ids", "model", "prng"]),
    ("predictor", &["cpu", "error", "formats", "ids", "model", "ops"]),
    ("profile", &["error", "formats", "ids", "model"]),
    // Decides, and knows no thread or clock.
    ("scheduler", &["cache", "device", "ids", "prng"]),
    // Neurons from disk: a policy of the scheduler chooses what stays, and the format what a block's checksum is.
    ("host_cache", &["cache", "clock", "device", "disk", "formats", "ids", "scheduler"]),
    // The engine sees tokens as numbers, no text; and nothing here knows the command line.
    (
        "engine",
        &[
            "cache",
            "clock",
            "cpu",
            "device",
            "error",
            "exp",
            "formats",
            "host_cache",
            "ids",
            "model",
            "ops",
            "predictor",
            "prng",
            "scheduler",
        ],
    ),
    // What lies on a device, as plain data: the model gives sizes, the engine those of its working memory.
    ("placement", &["cache", "clock", "engine", "error", "formats", "ids", "model", "prng", "scheduler"]),
    // Answers for many: tokens and text, no HTTP.
    ("generation", &["cache", "clock", "cpu", "device", "engine", "error", "model", "tokenizer"]),
    // A thread beside the engine's: it decides by `scheduler` and predicts, and the engine knows it as a `Migrator`.
    ("background", &["cache", "clock", "cpu", "device", "engine", "ids", "model", "predictor", "scheduler"]),
    // What this machine can do, measured with the engine's own kernels and a device's.
    ("machine", &["clock", "cpu", "device", "engine", "error", "formats", "model", "ops", "prng"]),
    ("pack", &["error", "formats", "ids", "model", "profile"]),
    (
        "training",
        &[
            "clock",
            "cpu",
            "engine",
            "error",
            "formats",
            "ids",
            "interrupt",
            "model",
            "ops",
            "predictor",
            "prng",
            "profile",
            "tokenizer",
        ],
    ),
    // Bench compares with what the memory of this machine can do.
    (
        "evaluation",
        &[
            "cache",
            "clock",
            "cpu",
            "device",
            "engine",
            "error",
            "formats",
            "interrupt",
            "machine",
            "model",
            "predictor",
            "prng",
            "tokenizer",
        ],
    ),
    // The only place where an engine is put together; it knows no command line.
    (
        "open",
        &[
            "background",
            "cache",
            "clock",
            "config",
            "cpu",
            "device",
            "disk",
            "engine",
            "error",
            "evaluation",
            "formats",
            "host_cache",
            "hub",
            "ids",
            "interrupt",
            "machine",
            "model",
            "pack",
            "placement",
            "predictor",
            "profile",
            "scheduler",
            "tokenizer",
            "training",
        ],
    ),
    // The wire format without the wire: `chat` without a daemon uses it as the daemon does.
    ("api", &["child", "clock", "engine", "error", "generation", "settings", "tokenizer"]),
    ("client", &["clock", "error", "interrupt"]),
    // Models come from a loader that cli hands in; the engine is asked on its own thread only.
    (
        "serve",
        &[
            "api",
            "cache",
            "child",
            "clock",
            "config",
            "engine",
            "error",
            "formats",
            "generation",
            "model",
            "scheduler",
            "settings",
            "tokenizer",
        ],
    ),
    (
        "cli",
        &[
            "api",
            "cache",
            "child",
            "client",
            "clock",
            "config",
            "cpu",
            "device",
            "disk",
            "engine",
            "error",
            "evaluation",
            "formats",
            "generation",
            "hub",
            "ids",
            "interrupt",
            "machine",
            "model",
            "open",
            "pack",
            "placement",
            "predictor",
            "profile",
            "scheduler",
            "serve",
            "settings",
            "tokenizer",
            "training",
        ],
    ),
    // Research, which nothing but its own program uses.
    (
        "lab",
        &[
            "cache",
            "cpu",
            "device",
            "engine",
            "error",
            "formats",
            "ids",
            "interrupt",
            "model",
            "ops",
            "pack",
            "placement",
            "predictor",
            "prng",
            "profile",
            "scheduler",
            "tokenizer",
        ],
    ),
    (
        "lab_cli",
        &[
            "cli",
            "clock",
            "config",
            "cpu",
            "engine",
            "error",
            "evaluation",
            "formats",
            "ids",
            "interrupt",
            "lab",
            "machine",
            "model",
            "open",
            "pack",
            "placement",
            "predictor",
            "profile",
            "scheduler",
            "tokenizer",
        ],
    ),
];

/// What stands beside the library: the two programs.
const PROGRAMS: [&str; 2] = ["bin", "main"];

/// Text that may stand in some files only. Pieces are joined so that this file does not break its own rules.
struct Rule {
    needles: &'static [&'static str],
    /// Where it is checked: a beginning of the path.
    below: &'static str,
    /// Files that may.
    except: &'static [&'static str],
    instead: &'static str,
}

const RULES: [Rule; 11] = [
    Rule {
        needles: &[
            "env::var",
            "option_env!",
            "env::current_exe",
            "env::current_dir",
            "try_from_env",
            "from_default_env",
        ],
        below: "src/",
        except: &["src/config.rs"],
        instead: "only src/config.rs reads the environment: add a function there and pass its answer on",
    },
    Rule {
        needles: &["env::args"],
        below: "src/",
        except: &["src/cli/program.rs"],
        instead: "only src/cli reads the command line: take the value as a parameter",
    },
    Rule {
        needles: &["Instant::now", "SystemTime::now"],
        below: "src/",
        except: &["src/clock.rs"],
        instead: "only src/clock.rs looks at the time: use crate::clock::now or unix_seconds",
    },
    Rule {
        needles: &["thread_rng", "rand::random", "RandomState"],
        below: "src/",
        // A seed for a run that names none; it is printed.
        except: &["src/config.rs"],
        instead: "randomness has a seed: take a crate::prng::Prng",
    },
    Rule {
        needles: &["cudarc", "libloading"],
        below: "src/",
        except: &["src/device/cuda/"],
        instead: "only src/device/cuda speaks to the driver: use device::cuda::Card and CudaDevice",
    },
    Rule {
        needles: &["TcpStream::connect", "ureq"],
        below: "src/",
        except: &["src/hub/fetch.rs"],
        instead: "only src/hub/fetch.rs opens a connection to another machine, for the verb `pull`",
    },
    Rule {
        // Nothing moves but by a `Move`, and nothing else chooses by itself.
        needles: &["ChooseMoves for", "Move::new(", "Move {"],
        below: "src/",
        except: &["src/scheduler/policy/"],
        instead: "policies are files of src/scheduler/policy, in the list of its mod.rs",
    },
    Rule {
        needles: &["println!", "print!(", "eprintln!", "eprint!("],
        below: "src/",
        except: &["src/cli/", "src/lab_cli/"],
        instead: "only src/cli and src/lab_cli talk to the user: return the value or use tracing",
    },
    Rule {
        needles: &[concat!("thread::", "sleep")],
        below: "",
        except: &[],
        instead: "nothing sleeps: wait for the event itself, or take the clock as a parameter",
    },
    Rule {
        needles: &["_timeout(", "wait_for(", "tick(", "after(", "spin_loop"],
        below: "src/generation/worker.rs",
        except: &[],
        instead: "the engine's thread looks at nothing in intervals: it is woken by what it waits for",
    },
    Rule {
        needles: &[
            concat!("to", "do!("),
            concat!("unimplemen", "ted!("),
            concat!("db", "g!("),
            concat!("FIX", "ME"),
            concat!("XX", "X"),
        ],
        below: "",
        except: &[],
        instead: "finish it, refuse the case in words, or write an issue",
    },
];

/// What a person still reads in one sitting: lines of a test file, and of a source file without the tests at its end.
const MAX_FILE: usize = 900;
const MAX_SOURCE: usize = 600;
/// Lines of a function, and the median that all functions of the crate stay below.
const MAX_FUNCTION: usize = 90;
const MEDIAN_FUNCTION: usize = 10;

/// The phases of a layer may be called by one page only, and what they are made of by their executors: a second description of a layer
/// would have to be kept like the first.
const PHASE_CALLS: [&str; 5] = [".begin_layer(pass", ".attention(pass", ".select(pass", ".ffn(pass", ".end_layer(pass"];
const FORWARD_PAGE: &str = "src/engine/forward.rs";
const LAYER_PARTS: [&str; 2] = ["attention(pool", "ffn::ffn("];
const EXECUTORS: [&str; 2] = ["src/engine/host.rs", "src/engine/split/"];

/// Functions of a file as rustfmt writes them: name, first line and number of lines. A function ends where a brace stands as far in as
/// its first line does.
fn functions(text: &str) -> Vec<(String, usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (i, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let words = ["pub(super) ", "pub(crate) ", "pub ", "const ", "async ", "unsafe ", "extern \"C\" "];
        let mut rest = code;
        while let Some(word) = words.iter().find_map(|word| rest.strip_prefix(word)) {
            rest = word;
        }
        let Some(name) = rest.strip_prefix("fn ") else { continue };
        let name = name.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        let indent = &line[..line.len() - code.len()];
        let closes = |l: &&str| {
            l.strip_prefix(indent).is_some_and(|l| l.starts_with('}') || l.starts_with(')') && l.ends_with(';'))
        };
        let length = match line.ends_with('}') || line.ends_with(';') {
            true => 1,
            false => 1 + lines[i + 1..].iter().position(closes).map_or(0, |at| at + 1),
        };
        found.push((name.to_owned(), i + 1, length));
    }
    found
}

#[test]
fn functions_and_files_are_short() {
    let files = source_files();
    let (mut complaints, mut lengths) = (Vec::new(), Vec::new());
    for (path, text) in files.iter().filter(|(path, _)| path.starts_with("src/")) {
        let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for (name, line, length) in functions(text) {
            lengths.push(length);
            if length > MAX_FUNCTION {
                complaints
                    .push(format!("{path}:{line}: {name} has {length} lines, {MAX_FUNCTION} at most: name its steps"));
            }
        }
        let lines = text.lines().count();
        if lines > MAX_SOURCE {
            complaints.push(format!(
                "{path}: {lines} lines without its tests, {MAX_SOURCE} at most: split it by what it is about"
            ));
        }
    }
    assert!(lengths.len() > 2000, "only {} functions were found: the search is broken", lengths.len());
    lengths.sort_unstable();
    let median = lengths[lengths.len() / 2];
    assert!(median < MEDIAN_FUNCTION, "the median of functions has {median} lines; it stays below {MEDIAN_FUNCTION}");
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn functions_are_measured_as_they_stand() {
    let text = "pub fn one() -> u8 { 1 }\n\nimpl X {\n    pub(super) unsafe fn two(\n        a: u8,\n    ) -> u8 {\n        if a > 1 {\n            2\n        }\n    }\n}\n";
    assert_eq!(functions(text), [("one".to_owned(), 1, 1), ("two".to_owned(), 4, 7)]);
}

#[test]
fn one_page_says_what_a_layer_is() {
    let files = source_files();
    let mut complaints = Vec::new();
    for (path, text) in files.iter().filter(|(path, _)| path.starts_with("src/")) {
        for (i, line) in text.lines().enumerate() {
            let code = code_of(line);
            if path != FORWARD_PAGE && PHASE_CALLS.iter().any(|call| code.contains(call)) {
                complaints.push(format!(
                    "{path}:{}: calls a phase; only {FORWARD_PAGE} says which phases a layer has",
                    i + 1
                ));
            }
            if !EXECUTORS.iter().any(|e| path.starts_with(e)) && LAYER_PARTS.iter().any(|part| code.contains(part)) {
                complaints.push(format!(
                    "{path}:{}: computes a part of a layer; that is for an executor: {EXECUTORS:?}",
                    i + 1
                ));
            }
        }
    }
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
    // What nothing calls any more would let a second page through.
    let page = &files.iter().find(|(path, _)| path == FORWARD_PAGE).expect("the forward page").1;
    PHASE_CALLS.iter().for_each(|call| assert!(page.contains(call), "{FORWARD_PAGE} has no {call}"));
}

#[test]
fn the_source_keeps_the_house_rules() {
    let files = source_files();
    assert!(files.len() > 50, "only {} source files were found: the walk is broken", files.len());
    let complaints: Vec<String> = files.iter().flat_map(|(path, text)| check(path, text)).collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn the_module_table_is_that_of_lib_rs() {
    let files = source_files();
    let lib = &files.iter().find(|(path, _)| path == "src/lib.rs").expect("src/lib.rs").1;
    let listed: Vec<&str> = lib.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    let known: Vec<&str> = MODULES.iter().map(|(name, _)| *name).collect();
    assert_eq!(listed, known, "src/lib.rs and MODULES in tests/tidy.rs name other modules or another order");
    for (at, (name, uses)) in MODULES.iter().enumerate() {
        for used in *uses {
            let above = known[..at].contains(used);
            assert!(
                above,
                "tests/tidy.rs: {name} may use {used}, which does not stand above it; turn the dependency round"
            );
        }
    }
}

/// An exception that nothing needs any more would let the next offence through.
#[test]
fn every_exception_is_needed() {
    let files = source_files();
    for rule in &RULES {
        for except in rule.except {
            let needed = files.iter().any(|(path, text)| {
                path.starts_with(except)
                    && text.lines().any(|line| rule.needles.iter().any(|n| code_of(line).contains(n)))
            });
            assert!(needed, "tests/tidy.rs: {except} no longer has {:?}; take it out of `except`", rule.needles);
        }
    }
}

#[test]
fn planted_offences_are_caught() {
    let one = |path: &str, text: &str| -> String {
        let complaints = check(path, text);
        assert_eq!(complaints.len(), 1, "{text:?} in {path} gives {complaints:?}");
        complaints[0].clone()
    };
    assert_eq!(
        one("src/cpu/x.rs", "//! Rows.\n\nuse crate::model::Matrix;\n"),
        "src/cpu/x.rs:3: cpu uses model; it may use [\"clock\", \"config\", \"exp\", \"formats\"]: move the code, pass the value in, or change \
         the table in tests/tidy.rs and ARCHITECTURE.md"
    );
    assert!(
        one("src/formats/x.rs", "use crate::{error::Error, engine::{Engine, Logits}};\n")
            .contains("formats uses engine")
    );
    assert!(
        one("src/formats.rs", "use crate::{\n    engine::Engine,\n};\n").starts_with("src/formats.rs:2: formats uses")
    );
    assert!(one("src/main.rs", "dynamicinfer::lab::synth()\n").contains("main uses lab"));
    assert!(one("src/bin/x.rs", "dynamicinfer::lab::synth()\n").contains("bin uses lab"));
    assert!(one("src/cli/x.rs", "use crate::lab::synth;\n").contains("cli uses lab"));
    assert!(one("src/open/x.rs", "use crate::lab::synth;\n").contains("open uses lab"));
    assert!(one("src/model/x.rs", "use super::super::lab::pack;\n").contains("write crate::"));
    assert!(one("src/new/x.rs", "\n").contains("new is not in the table"));
    assert_eq!(
        one("src/lab/x.rs", "let t = std::time::Instant::now();\n"),
        "src/lab/x.rs:1: Instant::now: only src/clock.rs looks at the time: use crate::clock::now or unix_seconds"
    );
    assert!(one("src/lab/x.rs", "let v = std::env::var_os(\"HOME\");\n").contains("src/config.rs"));
    assert!(one("src/engine/x.rs", "std::env::args()\n").contains("command line"));
    assert!(one("src/cli/x.rs", "unsafe { cudarc::driver::sys::cuInit(0) }\n").contains("src/device/cuda"));
    assert!(one("src/lab/x.rs", "impl ChooseMoves for Mine {\n").contains("src/scheduler/policy"));
    assert!(one("src/scheduler/x.rs", "moves.push(Move::new(slot, neuron));\n").contains("src/scheduler/policy"));
    assert!(one("src/engine/x.rs", "eprintln!(\"slow\");\n").contains("tracing"));
    assert!(one("src/generation/worker.rs", "let c = self.commands.recv_timeout(MS);\n").contains("woken"));
    assert!(one("tests/x.rs", concat!("std::thread::", "sleep(d);\n")).contains("nothing sleeps"));
    assert!(one("benches/x.rs", concat!("to", "do!()\n")).contains("finish it"));
    assert!(one("tests/x.rs", concat!("// FIX", "ME: rounding\n")).contains("finish it"));
    assert!(one("tests/x.rs", concat!("#[ign", "ore]\nfn f() {}\n")).contains("reason"));
    assert!(one("src/lab/x.rs", &"\n".repeat(MAX_FILE + 1)).contains("split it"));

    let nothing = |path: &str, text: &str| assert_eq!(check(path, text), Vec::<String>::new(), "{text:?} in {path}");
    nothing(
        "src/cpu/x.rs",
        "use crate::formats::rows; // not crate::model\nuse super::Columns;\npub(crate) fn f() {}\n",
    );
    nothing("src/lib.rs", "pub use error::{Error, Result};\n");
    nothing("src/formats/x.rs", "/// See [`crate::model`].\nuse crate::{Error, Result};\n");
    nothing("src/clock.rs", "Instant::now()\n");
    nothing("tests/x.rs", concat!("let start = Instant::now();\n#[ign", "ore = \"takes an hour\"]\n"));
}

/// Folders whose code decodes tokens, and the files in them that may name a lock: the pool takes one to sleep and to wake;
/// the worker, its handle and its outboxes have the channels to their askers, and its files the one to the thread that reads and writes them,
/// which are tried and never waited for while a token is made.
const TOKEN_PATH: [&str; 7] =
    ["src/cache/", "src/cpu/", "src/device/", "src/engine/", "src/generation/", "src/ops/", "src/predictor/"];
const MAY_LOCK: [&str; 5] = [
    "src/cpu/thread_pool.rs",
    "src/generation/handle.rs",
    "src/generation/outbox.rs",
    "src/generation/prompt_files.rs",
    "src/generation/worker.rs",
];

#[test]
fn no_lock_is_named_on_the_way_of_a_token() {
    let locks = |text: &str| -> Vec<usize> {
        let names =
            ["Mutex", "RwLock", "Condvar", "Barrier", "OnceLock", "LazyLock", "mpsc", "crossbeam", ".lock()", "park("];
        let line = |(i, line): (usize, &str)| names.iter().any(|n| code_of(line).contains(n)).then_some(i + 1);
        text.lines().enumerate().filter_map(line).collect()
    };
    let mut looked_at = 0;
    for (path, text) in source_files() {
        if !TOKEN_PATH.iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        looked_at += 1;
        let may = MAY_LOCK.contains(&path.as_str());
        assert_eq!(!locks(&text).is_empty(), may, "{path}:{:?}: a lock; hand over by cache/exchange.rs", locks(&text));
    }
    assert!(looked_at > 30, "only {looked_at} files: the folders have moved");
}

/// All complaints about one file. `path` is relative to the repository.
fn check(path: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut complain = |line: usize, what: String| complaints.push(format!("{path}:{line}: {what}"));
    let code: Vec<&str> = text.lines().map(code_of).collect();

    if let Some(module) = module_of(path) {
        for (line, used) in uses(&code) {
            match MODULES.iter().find(|(name, _)| *name == module) {
                _ if used == module || module == "lib" => {}
                _ if PROGRAMS.contains(&module) && matches!(used.as_str(), "cli" | "lab_cli") => {}
                Some((_, may)) if may.contains(&used.as_str()) => {}
                row => complain(
                    line,
                    format!(
                        "{module} uses {used}; it may use {:?}: move the code, pass the value in, or change the table in \
                         tests/tidy.rs and ARCHITECTURE.md",
                        row.map_or(&["cli", "lab_cli"][..], |(_, may)| may)
                    ),
                ),
            }
        }
        if module != "lib" && !PROGRAMS.contains(&module) && !MODULES.iter().any(|(name, _)| *name == module) {
            complain(1, format!("{module} is not in the table of modules; add it to lib.rs and to tests/tidy.rs"));
        }
        for (i, line) in code.iter().enumerate() {
            if line.contains("super::super::") {
                complain(i + 1, "leaves its folder upwards; write crate::... so that the module table sees it".into());
            }
        }
    }

    for rule in RULES.iter().filter(|r| path.starts_with(r.below) && !r.except.iter().any(|e| path.starts_with(e))) {
        for (i, line) in text.lines().enumerate() {
            // A mark of unfinished work counts in comments too.
            let line = if rule.below.is_empty() { line } else { code_of(line) };
            if let Some(needle) = rule.needles.iter().find(|n| line.contains(**n)) {
                complain(i + 1, format!("{}: {}", needle.trim_end_matches('('), rule.instead));
            }
        }
    }
    for (i, line) in code.iter().enumerate() {
        if line.contains(concat!("#[ign", "ore]")) {
            complain(i + 1, "a test is left out without a reason; write #[ignore = \"why, and how to run it\"]".into());
        }
    }
    if code.len() > MAX_FILE {
        complain(
            MAX_FILE + 1,
            format!("the file has {} lines, {MAX_FILE} at most; split it by what it is about", code.len()),
        );
    }
    complaints
}

/// The top-level module of a file below src: `src/cpu/thread_pool.rs` and `src/cpu.rs` are cpu's.
fn module_of(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("src/")?;
    Some(rest.split('/').next()?.trim_end_matches(".rs"))
}

/// The line without its comment. `://` is a web address.
fn code_of(line: &str) -> &str {
    match line.match_indices("//").find(|(at, _)| !line[..*at].ends_with(':')) {
        Some((at, _)) => &line[..at],
        None => line,
    }
}

/// The top-level modules named by `crate::x` and `crate::{x, y::z}`, each with its line.
fn uses(code: &[&str]) -> Vec<(usize, String)> {
    let text = code.join("\n");
    let mut found = BTreeSet::new();
    for root in ["crate::", "dynamicinfer::"] {
        for (at, _) in text.match_indices(root) {
            let start = at + root.len();
            for (offset, name) in names(&text[start..]) {
                let line = 1 + text[..start + offset].matches('\n').count();
                // The crate's root exports these two of error.
                let name = if matches!(name, "Error" | "Result") { "error" } else { name };
                found.insert((line, name.to_owned()));
            }
        }
    }
    found.into_iter().collect()
}

/// First names of a path or of each path in a group, with their offsets: `x::y` gives x, `{x::{y, z}, w}` gives x and w.
fn names(path: &str) -> Vec<(usize, &str)> {
    let name_at = |at: usize| {
        let rest = &path[at..];
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        (end > 0).then(|| (at, &rest[..end]))
    };
    if !path.starts_with('{') {
        return name_at(0).into_iter().collect();
    }
    let (mut depth, mut expects, mut found) = (0, false, Vec::new());
    for (at, c) in path.char_indices() {
        match c {
            '{' => (depth, expects) = (depth + 1, depth == 0),
            '}' if depth == 1 => break,
            '}' => depth -= 1,
            ',' if depth == 1 => expects = true,
            c if expects && !c.is_whitespace() => {
                found.extend(name_at(at));
                expects = false;
            }
            _ => {}
        }
    }
    found
}

/// Every Rust file of the repository with its path, in the order of paths.
fn source_files() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["src", "tests", "benches", "fuzz/fuzz_targets"] {
        collect(root, &root.join(folder), &mut files);
    }
    files.sort();
    files
}

fn collect(root: &Path, folder: &Path, files: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(root, &path, files);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            files.push((name, fs::read_to_string(&path).unwrap()));
        }
    }
}
