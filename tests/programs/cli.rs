//! The program as its users meet it: exit statuses, pipes, Ctrl-C, what is printed where, and what is left on disk.

use crate::programs;
use dynamicinfer::formats::{MappedFile, safetensors};
use dynamicinfer::tokenizer::{Special, Tokenizer, from_hf_dir};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};
use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A place of its own for each test: working directory, and a cache directory inside it.
struct Place(tempfile::TempDir);

struct Done {
    code: i32,
    out: String,
    err: String,
}

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn file(&self, name: &str, content: &[u8]) -> String {
        std::fs::write(self.path().join(name), content).unwrap();
        self.path().join(name).to_str().unwrap().to_owned()
    }

    fn command<A: AsRef<OsStr>>(&self, args: &[A]) -> Command {
        let mut command = Command::new(programs::program(args));
        command.args(args).current_dir(self.path()).stdin(Stdio::null());
        command.env("XDG_CACHE_HOME", self.path().join("cache")).env("RUST_BACKTRACE", "0");
        for variable in ["DYNAMICINFER_LOG", "DYNAMICINFER_ASSETS"] {
            command.env_remove(variable);
        }
        command
    }

    fn run<A: AsRef<OsStr>>(&self, args: &[A]) -> Done {
        self.run_with(args, b"")
    }

    fn run_with<A: AsRef<OsStr>>(&self, args: &[A], stdin: &[u8]) -> Done {
        let mut command = self.command(args);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // A child that does not read it ends before; that is its right.
        let _ = child.stdin.take().unwrap().write_all(stdin);
        let done = child.wait_with_output().unwrap();
        let shown: Vec<_> = args.iter().map(|a| a.as_ref().to_string_lossy()).collect();
        let err = String::from_utf8(done.stderr).unwrap();
        assert!(!err.contains("panicked"), "{shown:?}: {err}");
        let code = done.status.code().unwrap_or_else(|| panic!("{shown:?} ended by {}: {err}", done.status));
        Done { code, out: String::from_utf8(done.stdout).unwrap(), err }
    }

    /// The answer of a call that succeeds.
    fn json<A: AsRef<OsStr>>(&self, args: &[A]) -> Json {
        let done = self.run(args);
        assert_eq!(done.code, 0, "{}", done.err);
        serde_json::from_str(&done.out).unwrap()
    }

    /// The packed models in the cache.
    fn stores(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path().join("cache/dynamicinfer/models")).unwrap();
        entries.map(|e| e.unwrap().path()).collect()
    }
}

fn keys(value: &Json) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn wrong_use_is_2_and_says_what_is_wrong() {
    let place = Place::new();
    let (model, opt) = (fixture("relullama"), fixture("opt"));
    let ids = place.file("ids.json", b"[1, 2, 3, 320]");
    let one = place.file("one.json", b"[1]");
    let not_ids = place.file("text.json", b"\"text\"");
    let trace = place.file("x.trace", b"a diary");
    let few = place.file("few.jsonl", br#"{"context": "a", "choices": ["b"], "answer": 0}"#);
    let cases: &[(&[&str], &str)] = &[
        (&[], "Usage: dynamicinfer"),
        (&["fly"], "unrecognized subcommand 'fly'"),
        (&["run"], "<MODEL>"),
        (&["run", "nothing-there", "x"], "there is no model at 'nothing-there': MODEL is a Hugging Face directory"),
        (&["run", "no\x1b[31mthing", "x"], r"there is no model at 'no\u{1b}[31mthing'"),
        (&["run", &model, "x", "--temp", "nan"], "--temperature is NaN; it must be a number from -1 to 100"),
        (&["run", &model, "x", "--temp", "1e9"], "--temperature is 1000000000"),
        (&["run", &model, "x", "--temp", "warm"], "invalid value 'warm' for '--temp <T>'"),
        (&["run", &model, "x", "--temperature", "-2"], "--temperature is -2; it must be a number from -1 to 100"),
        (&["run", &model, "x", "--top-p", "1.5"], "--top-p is 1.5; it must be a number from 0 to 1"),
        (&["run", &model, "x", "--min-p", "-0.1"], "--min-p is -0.1"),
        (&["run", &model, "x", "--top-k=-1"], "'--top-k <K>'"),
        (&["run", &model, "x", "--repeat-penalty", "0"], "--repeat-penalty is 0; "),
        (&["run", &model, "x", "--presence-penalty", "inf"], "--presence-penalty is inf; "),
        (&["run", &model, "x", "--frequency-penalty", "-1e30"], "--frequency-penalty is -1"),
        (&["run", &model, "x", "--repeat-last-n", "99999999999"], "--repeat-last-n is 99999999999; "),
        (&["run", &model, "x", "-n", "-2"], "-n -2: give -1 or more"),
        (&["run", &model, "x", "--seed", "x"], "'--seed <N>'"),
        (&["run", &model, "x", "-t", "0"], "--threads 0: take 1 to 1024"),
        (&["run", &model, "x", "-t", "1025"], "--threads 1025: take 1 to 1024"),
        (&["run", &model, "x", "--isa", "mmx"], "it must be avx512, avxvnni, avx2 or portable"),
        (&["run", &model, "x", "--kv", "q4"], "[possible values: f16, f32, q8_0, q4_0]"),
        (&["run", &model, "x", "--quant", "q9"], "'q9' is not a store type; take one of f32, f16, q8_0, q4_0, bf16, "),
        (&["run", &model, "x", "--activation", "tanh"], "activation 'tanh' is not known; known are relu"),
        (&["run", &model, "x", "--chat"], "this model has no chat template"),
        (&["run", &model, "x", "--system", "y"], "leave out --system"),
        (
            &["run", &model, "Once upon a time", "-c", "2"],
            "and the context 2: shorten it, or raise -c (this model was trained for 256)",
        ),
        (&["run", &model, "x", "-c", "0"], "and the context 0: "),
        (&["run", &opt, "x", "-c", "257"], "a context of 257: this model has 256 positions and no more"),
        (
            &["eval", &opt, "--token-ids", &ids, "-c", "257"],
            "a context of 257: this model has 256 positions and no more",
        ),
        (&["bench", &opt, "-p", "257", "-n", "0"], "a context of 257: this model has 256 positions and no more"),
        (&["bench", &model, "-p", "0", "-n", "0"], "nothing to measure: -p and -n are both 0"),
        (&["bench", &model, "-r", "0"], "-r 0: give at least one repeat"),
        (
            &["bench", &opt, "-p", "0", "-n", "8", "-d", "0,250"],
            "a context of 258: this model has 256 positions and no more",
        ),
        (&["eval", &model], "--text"),
        (&["eval", &model, "--text", &ids, "--token-ids", &ids], "cannot be used with"),
        (&["eval", &model, "--token-ids", &ids, "-c", "1"], "-c 1: a window needs at least 2 tokens"),
        (
            &["eval", &model, "--token-ids", &ids, "--logits", "left.safetensors"],
            "token 320 is not below the vocabulary size 320",
        ),
        (&["eval", &model, "--token-ids", &one], "scoring needs at least two tokens"),
        (&["eval", &model, "--token-ids", &not_ids], "text.json: it is not a JSON array of token ids"),
        (&["eval", &model, "--choices", &few], "few.jsonl line 1: answer 0 of 1 choices"),
        (&["eval", &model, "--choices", &one], "one.json line 1: not a question"),
        (&["pack", &model, "-o", &ids], "ids.json already exists; add --force to replace it"),
        (&["pack", &model, "--order", &one], "one.json: it is not a list of neuron numbers per layer"),
        (&["synth", "-o", "x.bin", "--layers", "1"], "--output x.bin: the ending chooses the form: .neurons or .gguf"),
        (&["synth", "-o", "x.neurons", "--heads", "3"], "--hidden 2048 is not a multiple of --heads 3"),
        (&["synth", "-o", "x.neurons", "--vocab", "9"], "--vocab 9 is below 259"),
        (
            &["synth", "-o", "x.gguf", "--hidden", "48", "--heads", "3", "--kv-heads", "3", "--quant", "q4_0"],
            "q4_0 needs sizes that are multiples of 32",
        ),
        (&["synth", "-o", "x.gguf", "--active", "0.9"], "--active 0.9: take a share from 0.01 to 0.5"),
        (&["synth", "-o", "x.gguf", "--active", "0.1", "--activation", "silu"], "relu or relu2, not silu"),
        (&["run", &model, "x", "--sparsity", "0.5"], "--sparsity is for silu and gelu models; of relu"),
        (
            &["bench", &model, "--threshold", "0.5"],
            "--threshold: nothing is predicted here; add --predictor mlp or sign",
        ),
        (&["bench", &model, "--ahead", "1"], "--ahead: nothing is predicted here"),
        (&["run", &model, "x", "--machine", "rtx-4090"], "--machine needs a device; add --device cuda (or virtual)"),
        (&["run", &model, "x", "--lookahead", "2"], "--lookahead needs a device"),
        (&["run", &model, "x", "--placement", "random"], "--placement needs a device"),
        (&["run", &model, "x", "--trace", &ids], "ids.json: the file has other contents"),
        (&["eval", &model, "--token-ids", &one, "--logits", &ids], "--logits "),
        (&["record", &model, "--text", &ids, "-o", &trace], "x.trace: the file has other contents"),
        (&["profile", &model, "--text", &ids, "--fresh", "-o", &ids], "ids.json: the file has other contents"),
        (&["calibrate", &model, "--text", &ids, "-o", &ids], "ids.json: the file has other contents"),
        (&["plan", &model], "the plan needs a target: --vram 8GiB"),
        (&["measure", "-t", "0"], "--threads 0: give 1 to 1024"),
        (&["completions", "cmd.exe"], "[possible values: bash,"),
    ];
    for (args, want) in cases {
        let done = place.run(args);
        assert_eq!(done.code, 2, "{args:?}: {}", done.err);
        assert!(done.err.contains(want), "{args:?}: no {want:?} in: {}", done.err);
        assert_eq!(done.out, "", "{args:?}");
    }
    let mut left: Vec<_> = std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(
        left,
        ["cache", "few.jsonl", "ids.json", "one.json", "text.json", "x.trace"],
        "a refused call writes nothing"
    );
    // No machine has the memory for this context; asked for it, the program does not try.
    for args in [["run", &model, "x", "-c"], ["eval", &model, "--token-ids=one.json", "-c"]] {
        for context in ["18446744073709551615", "9223372036854775808", "1000000000000"] {
            let done = place.run(&[&args[..], &[context]].concat());
            assert_eq!(done.code, 6, "{context}: {}", done.err);
            assert!(done.err.contains(&format!("a context of {context} needs ")), "{}", done.err);
        }
    }
}

#[test]
fn bad_files_are_5_and_what_cannot_be_read_is_1() {
    let place = Place::new();
    let bad = |name: &str, bytes: &[u8]| place.file(name, bytes);
    let model = fixture("relullama");
    assert_eq!(place.run(&["pack", &model, "-o", "good.neurons"]).code, 0);
    let good = std::fs::read(place.path().join("good.neurons")).unwrap();
    let mut flipped = good.clone();
    flipped[8192] ^= 1;
    let flipped = bad("flipped.neurons", &flipped);
    std::fs::create_dir(place.path().join("empty")).unwrap();
    std::fs::create_dir(place.path().join("json")).unwrap();
    bad("json/config.json", b"{\"model_type\": \"llama\", ");
    let fifo = place.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["show", &bad("a.gguf", b"GGUF\x03\0\0\0")], 5, "a.gguf: "),
        (&["show", &bad("b.gguf", b"")], 5, "b.gguf: "),
        (&["run", &bad("c.gguf", b"<!DOCTYPE html>"), "x"], 5, "it is a web page, the download link was wrong"),
        (&["run", &bad("cut.neurons", &good[..good.len() - 1]), "x"], 5, "cut.neurons: file length: says "),
        (&["run", &bad("magic.neurons", &good[..7]), "x"], 5, "magic.neurons: "),
        (&["bench", &bad("no-header.neurons", &good[..64])], 5, "no-header.neurons: "),
        (&["eval", "cut.neurons", "--text", "a.gguf"], 5, "it was cut or not finished; pack the model again"),
        (&["show", "--verify", &flipped], 5, "the file is damaged; pack the model again"),
        (&["run", "empty", "x"], 5, "not a model directory: there is no config.json"),
        (&["pack", "json"], 5, "config.json: not understood: "),
        (&["show", "fifo"], 5, "not a regular file: it is a pipe, device or socket"),
        (&["run", "/dev/zero", "x"], 5, "not a regular file: it is a pipe, device or socket"),
        (&["eval", &model, "--text", "nowhere.txt"], 1, "cannot open nowhere.txt: No such file or directory"),
        (&["pack", &model, "-o", "nowhere/x.neurons"], 1, "nowhere/x.neurons"),
        (
            &["eval", &model, "--token-ids", &bad("ids.json", b"[1, 2]"), "--logits", "nowhere/x"],
            1,
            "--logits nowhere/x: the folder nowhere does not exist; create it first",
        ),
    ];
    for (args, code, want) in cases {
        let done = place.run(args);
        assert_eq!(done.code, *code, "{args:?}: {}", done.err);
        let last = done.err.lines().last().unwrap();
        assert!(last.starts_with("dynamicinfer: ") && last.contains(want), "{args:?}: no {want:?} in: {}", done.err);
        assert_eq!(done.out, "", "{args:?}");
    }
    assert_eq!(place.run(&["show", "--verify", "good.neurons"]).code, 0);
}

#[test]
fn help_names_every_verb_and_completions_know_them() {
    let place = Place::new();
    let verbs = ["run", "show", "pack", "bench", "eval", "profile", "measure", "plan", "completions"];
    let [help, all] = ["--help", "--help-all"].map(|page| place.run(&[page]));
    assert_eq!((help.code, help.err.as_str(), all.code, all.err.as_str()), (0, "", 0, ""));
    assert!(help.out.lines().count() <= 24 && help.out.lines().all(|line| line.len() <= 80), "{}", help.out);
    assert_eq!(place.run(&["help"]).out, help.out);
    for verb in verbs {
        assert!(help.out.split_whitespace().any(|word| word == verb), "{verb} in: {}", help.out);
        assert!(all.out.lines().any(|line| line.trim_start().starts_with(verb)), "{verb} in: {}", all.out);
        let own = place.run(&[verb, "--help"]);
        assert_eq!(own.code, 0);
        assert!(own.out.contains(&format!("Usage: dynamicinfer {verb}")), "{}", own.out);
    }
    assert_eq!(place.run(&["--version"]).out, format!("dynamicinfer {}\n", env!("CARGO_PKG_VERSION")));
    for shell in ["bash", "zsh", "fish"] {
        let script = place.run(&["completions", shell]);
        assert_eq!(script.code, 0);
        assert!(verbs.iter().all(|verb| script.out.contains(verb)), "{shell}");
    }
}

#[test]
fn a_prompt_may_come_from_a_pipe_and_need_not_be_text() {
    let place = Place::new();
    let model = fixture("relullama");
    let args = ["run", &model, "--json", "--temp", "0", "-n", "12"];
    let text = |done: Done| {
        assert_eq!(done.code, 0, "{}", done.err);
        serde_json::from_str::<Json>(&done.out).unwrap()["text"].clone()
    };
    let given = text(place.run(&[&args[..], &["Once upon a time"]].concat()));
    assert_ne!(given, json!(""));
    assert_eq!(text(place.run_with(&args, b"Once upon a time")), given);
    assert_eq!(text(place.run_with(&args, b"Once upon a time\n")), given, "echo's newline is not meant");
    // Without --json the same text streams to stdout, and only talk goes to stderr.
    let streamed = place.run(&["run", &model, "--temp", "0", "-n", "12", "Once upon a time"]);
    assert_eq!((streamed.code, streamed.out), (0, format!("{}\n", given.as_str().unwrap())));
    assert!(
        streamed.err.contains("\n[ prompt: ") && streamed.err.contains(" t/s | generation: 12 tokens, "),
        "{}",
        streamed.err
    );
    let refused = place.run_with(&args, b"Once \xff upon");
    assert_eq!(refused.code, 2);
    assert!(
        refused.err.contains("the prompt is not UTF-8 text: invalid utf-8 sequence of 1 bytes from index 5"),
        "{}",
        refused.err
    );
    // As arguments such bytes are refused too, wherever they stand; as a model's path they are a path.
    let odd = || OsString::from_vec(b"o\xffd".to_vec());
    assert_eq!(place.run(&[odd()]).code, 2);
    assert_eq!(place.run(&["run".into(), OsString::from(&model), odd()]).code, 2);
    // Layers may differ from the first one.
    for (name, says) in [
        ("glm4-moe.gguf", "8 experts of 32 neurons a layer, 3 for a token and one of 32 for all"),
        ("deepseek-v3.gguf", "8 experts of 16 neurons a layer, 3 for a token and one of 16 for all"),
        ("lfm2-moe.gguf", "3 layers have a short convolution instead"),
        ("qwen35-moe.gguf", "layers have linear attention (a gated delta net) instead"),
        ("gemma3.gguf", "gelu_tanh"),
        ("gemma4.gguf", "4 heads of 32, 1 key/value heads, attention window 8; 2 layers have heads of 16"),
        ("gemma4-moe.gguf", "6 experts of 16 neurons a layer, 2 for a token and one of 32 for all"),
    ] {
        let shown = place.run(&["show".to_owned(), fixture(name)]);
        assert!(shown.code == 0 && shown.out.contains(says), "{name}: {}{}", shown.out, shown.err);
        if !["gemma3.gguf", "gemma4.gguf"].contains(&name) {
            let planned = place.run(&["plan".to_owned(), fixture(name), "--vram".into(), "2MiB".into()]);
            assert!(planned.code == 0 && planned.out.contains("(100.0 %)"), "{name}: {}{}", planned.out, planned.err);
            let on_processor =
                planned.out.contains("the processor computes attention, or what stands in its place, in ");
            assert_eq!(on_processor, name != "glm4-moe.gguf", "{name}: {}", planned.out);
        }
        for device in [&[][..], &["--device", "virtual", "--vram", "4MiB"]] {
            let mut args = vec!["run".to_owned(), fixture(name), "Once".into(), "-n3".into(), "--ignore-eos".into()];
            args.extend(device.iter().map(|&arg| arg.to_owned()));
            let run = place.run(&args);
            assert_eq!(run.code, 0, "{name} {device:?}: {}", run.err);
        }
    }
    // Embeddings for each layer: in place, on the processor alone.
    let e2b = fixture("gemma4-e2b.gguf");
    let run = place.run(&["run", &e2b, "Once", "-n3", "--ignore-eos"]);
    assert_eq!(run.code, 0, "{}", run.err);
    for (args, says) in [
        (&["--device", "virtual", "--vram", "4MiB"][..], "it has embeddings for each layer; leave out the device"),
        (&["--predictor", "exact"], "all of its neurons are computed; leave out the options of predictors"),
        (&["--quant", "q8_0"], "--quant: a model with embeddings for each layer is read where it lies"),
    ] {
        let refused = place.run(&[&["run", &e2b, "Once"], args].concat());
        assert!(refused.code == 2 && refused.err.contains(says), "{args:?}: {}", refused.err);
    }
    for (args, says) in [
        (&["pack", &e2b, "-o", "e2b.neurons"][..], "which no store holds"),
        (&["plan", &e2b, "--vram", "2MiB"], "it has embeddings for each layer"),
        (&["calibrate", &e2b, "--text", &fixture("README.md")], "where no neuron stands by itself"),
    ] {
        let refused = place.run(args);
        assert!(refused.code == 2 && refused.err.contains(says), "{args:?}: {}", refused.err);
    }
    let link = place.path().join(odd());
    std::os::unix::fs::symlink(&model, &link).unwrap();
    assert_eq!(place.run(&["run".as_ref(), link.as_os_str(), "x".as_ref(), "-n2".as_ref()]).code, 0);
    let shown = place.json(&["show".as_ref(), link.as_os_str(), "--json".as_ref()]);
    assert!(shown["path"].as_str().unwrap().ends_with("o\u{fffd}d"));
    assert_eq!(place.run(&["show", "nothing-there"].map(OsStr::new)).code, 2);
    assert_eq!(place.run(&["show".as_ref(), OsStr::from_bytes(b"\xff")]).code, 2);
}

#[test]
fn json_answers_have_the_documented_keys() {
    let place = Place::new();
    let model = fixture("relullama");
    let run = place.json(&["run", &model, "Once", "--json", "-n", "5", "--ignore-eos", "--seed", "7"]);
    let wanted = "text finish_reason seed prompt_tokens generated_tokens prompt_tokens_per_s generation_tokens_per_s \
                  predictor computed_share audited_tokens";
    assert_eq!(keys(&run).join(" "), wanted);
    // A ReLU model without any file beside it is computed whole.
    assert_eq!(run["predictor"], "dense");
    let sign = ["--predictor", "sign", "--audit", "4"];
    let audited = place.json(&[&["run", &model, "Once", "--json", "-n", "9", "--ignore-eos"][..], &sign].concat());
    assert_eq!(audited["audited_tokens"], 2);
    assert!((0.1..=1.0).contains(&audited["recall"].as_f64().unwrap()), "{audited}");
    assert_eq!(
        (&run["seed"], &run["finish_reason"], &run["generated_tokens"]),
        (&json!(7), &json!("length"), &json!(5))
    );
    assert!(
        run["prompt_tokens_per_s"].as_f64().unwrap() > 0.0 && run["generation_tokens_per_s"].as_f64().unwrap() > 0.0
    );
    let none = place.json(&["run", &model, "Once", "--json", "-n", "0"]);
    assert_eq!(
        (&none["text"], &none["generated_tokens"], &none["generation_tokens_per_s"]),
        (&json!(""), &json!(0), &Json::Null)
    );
    let full = place.json(&["run", &model, "Once", "--json", "-n", "-1", "-c", "20", "--ignore-eos"]);
    assert_eq!(full["finish_reason"], "context");
    // The last token is sampled from a full context and needs no place in it.
    assert_eq!(full["prompt_tokens"].as_u64().unwrap() + full["generated_tokens"].as_u64().unwrap(), 21);

    let wanted = "path packed in_place store copies quant types bits_per_weight bytes parameters neuron_block_bytes ffn_share block_checksums kv_bytes_per_token fingerprint tokenizer \
                  chat_template config";
    let shown = place.json(&["show", &model, "--json"]);
    assert_eq!(keys(&shown).join(" "), wanted);
    let store = &place.stores()[0];
    let packed = place.json(&["show", store.to_str().unwrap(), "--json"]);
    assert_eq!(keys(&packed).join(" "), wanted);
    assert_eq!((&shown["packed"], &packed["packed"]), (&json!(true), &json!(true)), "run has packed it");
    assert_eq!((&shown["store"], &packed["store"]), (&packed["path"], &packed["path"]));
    for same in ["quant", "parameters", "fingerprint", "tokenizer", "config"] {
        assert_eq!(shown[same], packed[same], "{same}");
    }
    assert_eq!((&shown["block_checksums"], &packed["block_checksums"]), (&json!(true), &json!(true)));
    assert_eq!(shown["parameters"], json!(2 * 320 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96)));
    assert_eq!(shown["config"]["activation"], "relu");
    assert_eq!(packed["bytes"].as_u64().unwrap(), store.metadata().unwrap().len());

    let ids = place.file("ids.json", b"[5, 6, 7, 8, 9, 10]");
    let eval = place.json(&["eval", &model, "--token-ids", &ids, "--json", "-c", "4"]);
    assert_eq!(keys(&eval).join(" "), "nll perplexity bits_per_byte tokens windows context");
    assert_eq!((&eval["tokens"], &eval["windows"], &eval["context"]), (&json!(4), &json!(2), &json!(4)));
    let nll = eval["nll"].as_f64().unwrap();
    assert!((nll.exp() - eval["perplexity"].as_f64().unwrap()).abs() < 1e-6 * nll.exp());
    let sparse =
        place.json(&["eval", &model, "--token-ids", &ids, "--json", "-c", "4", "--predictor", "exact,dense@0"]);
    let wanted = "nll perplexity bits_per_byte tokens windows context predictor computed_share active_share recall precision \
                  top1_agreement kl dense_perplexity layers";
    assert_eq!(keys(&sparse).join(" "), wanted);
    assert_eq!((&sparse["predictor"], &sparse["recall"]), (&json!("dense@0,exact@1"), &json!(1.0)));
    assert_eq!(keys(&sparse["layers"][1]).join(" "), "computed_share active_share recall precision");
}

#[test]
fn the_same_seed_gives_the_same_text_with_any_number_of_threads() {
    let place = Place::new();
    let model = fixture("relullama");
    let text = |seed: &str, threads: &str| {
        let args = [
            "run",
            &model,
            "Once upon",
            "--json",
            "-n",
            "60",
            "--ignore-eos",
            "--temp",
            "1",
            "--seed",
            seed,
            "-t",
            threads,
        ];
        place.json(&args)["text"].as_str().unwrap().to_owned()
    };
    let first = text("11", "1");
    assert!(first.len() > 60);
    for threads in ["1", "2", "3"] {
        assert_eq!(text("11", threads), first, "{threads} threads");
    }
    assert_ne!(text("12", "1"), first);
    // The seed of a run that names none is told, and repeats it.
    let unseeded = place.json(&["run", &model, "Once upon", "--json", "-n", "60", "--ignore-eos", "--temp", "1"]);
    assert_eq!(text(&unseeded["seed"].to_string(), "2"), unseeded["text"].as_str().unwrap());
}

#[test]
fn evaluation_of_a_text_and_of_its_tokens_agree() {
    let place = Place::new();
    let model = fixture("relullama");
    let text = "Once upon a time there was a giant, and he had three sons.\n".repeat(6);
    let file = place.file("text.txt", text.as_bytes());
    let tokenizer = Tokenizer::new(from_hf_dir(model.as_ref()).unwrap(), model.as_ref()).unwrap();
    let ids = tokenizer.encode_prompt(&text, Special::AsText).unwrap();
    let id_file = place.file("ids.json", serde_json::to_string(&ids).unwrap().as_bytes());
    let by_text = place.json(&["eval", &model, "--text", &file, "--json", "-c", "100"]);
    let by_ids =
        place.json(&["eval", &model, "--token-ids", &id_file, "--json", "-c", "100", "--logits", "logits.safetensors"]);
    assert_eq!(by_text, by_ids);
    // The logits are one row a token, and the score follows from them.
    let path = place.path().join("logits.safetensors");
    let mapped = MappedFile::open(&path).unwrap();
    let infos = safetensors::parse(mapped.bytes(), &path).unwrap();
    assert_eq!(infos.len(), 1);
    assert_eq!((infos[0].name.as_str(), &infos[0].shape), ("logits", &vec![ids.len(), 320]));
    let raw = &mapped.bytes()[infos[0].offset as usize..];
    let numbers: Vec<f64> = raw.as_chunks::<4>().0.iter().map(|&b| f64::from(f32::from_le_bytes(b))).collect();
    let (mut sum, mut scored) = (0.0, 0);
    for (t, row) in numbers.chunks(320).enumerate() {
        if t + 1 < ids.len() && (t + 1) % 100 != 0 {
            sum += row.iter().map(|l| l.exp()).sum::<f64>().ln() - row[ids[t + 1] as usize];
            scored += 1;
        }
    }
    assert_eq!(by_ids["tokens"], json!(scored));
    let nll = by_ids["nll"].as_f64().unwrap();
    assert!((nll - sum / f64::from(scored)).abs() < 1e-6, "{nll} {sum} {scored}");

    let questions = [
        json!({"context": "Once upon a", "choices": ["time", "zzz", "qqq"], "answer": 0}),
        json!({"context": "", "choices": ["a", "b"], "answer": 1}),
    ];
    let lines = format!("{}\n\n{}\n", questions[0], questions[1]);
    let choices = place.json(&["eval", &model, "--choices", &place.file("q.jsonl", lines.as_bytes()), "--json"]);
    assert_eq!(keys(&choices).join(" "), "questions accuracy accuracy_per_byte chance");
    assert_eq!(choices["questions"], 2);
    assert!((choices["chance"].as_f64().unwrap() - (1.0 / 3.0 + 0.5) / 2.0).abs() < 1e-12);
}

#[test]
fn a_model_is_packed_once_and_again_when_it_changed() {
    let place = Place::new();
    let model = place.path().join("model.gguf");
    std::fs::copy(fixture("relullama.gguf"), &model).unwrap();
    let ids = place.file("ids.json", b"[5, 6, 7, 8]");
    let call = || {
        let done = place.run(&["eval", "model.gguf", "--token-ids", &ids, "--json"]);
        assert_eq!(done.code, 0, "{}", done.err);
        let stores = place.stores();
        assert_eq!(stores.len(), 1, "{stores:?}");
        let meta = stores[0].metadata().unwrap();
        (done, (meta.ino(), meta.mtime(), meta.mtime_nsec()), stores[0].clone())
    };
    let (first, stamp, store) = call();
    let (second, same, _) = call();
    assert_eq!((&second.out, second.err.as_str(), same), (&first.out, "", stamp));
    // Another model under the same name.
    std::fs::copy(fixture("bamboo.gguf"), &model).unwrap();
    let (changed, new, _) = call();
    assert_eq!(changed.err, "model.gguf has changed since it was packed; packing it again\n");
    assert_ne!((&changed.out, new), (&first.out, stamp));
    // A damaged store is noticed and made again.
    let bytes = std::fs::read(&store).unwrap();
    std::fs::write(&store, &bytes[..bytes.len() / 2]).unwrap();
    let (mended, _, _) = call();
    assert!(
        mended.err.contains("it was cut or not finished; pack the model again")
            && mended.err.ends_with("packing it again\n"),
        "{}",
        mended.err
    );
    assert_eq!(mended.out, changed.out);
    assert_eq!(std::fs::read(&store).unwrap(), bytes);
    // Another type is another store.
    assert_eq!(place.run(&["eval", "model.gguf", "--token-ids", &ids, "--quant", "q8_0"]).code, 0);
    assert_eq!(place.stores().len(), 2);
    // A store is taken as it is.
    let packed = store.to_str().unwrap();
    assert_eq!(place.run(&["eval", packed, "--token-ids", &ids, "--json"]).out, changed.out);
    let refused = place.run(&["eval", packed, "--token-ids", &ids, "--quant", "q4_0"]);
    assert_eq!(refused.code, 2);
    assert!(refused.err.contains("not q4_0; pack the original again"), "{}", refused.err);
}

/// The disk of a file is measured, and how neurons are better read; a file that is too short says nothing.
#[test]
fn a_disk_is_measured_by_a_file_on_it() {
    let place = Place::new();
    let long = place.file("long", &vec![7; 12 << 20]);
    let measured = place.run(&["measure", "--disk", &long, "--json"]);
    assert_eq!(measured.code, 0, "{}", measured.err);
    let measured: Json = serde_json::from_str(&measured.out).unwrap();
    let rates = measured["rates"].as_array().unwrap();
    assert!(rates.len() > 12 && rates.iter().all(|rate| rate["gb_s"].as_f64().unwrap() > 0.0), "{measured}");
    let of_parts = measured["two_parts"].as_array().unwrap();
    assert!(of_parts.iter().all(|of| of["times"]["parts_us"].as_f64().unwrap() > 0.0), "{measured}");
    let table = place.run(&["measure", "--disk", &long]);
    assert!(
        table.code == 0 && table.out.contains("128 at once") && table.out.contains("in two parts"),
        "{}",
        table.out
    );
    assert!(table.out.lines().all(|line| line.chars().count() <= 80), "{}", table.out);
    let short = place.run(&["measure", "--disk", &place.file("short", &[7; 5000])]);
    assert!(short.code == 2 && short.err.contains("too short"), "{}", short.err);
}

/// A mix is packed by whoever runs it, as one type is; its layers' neurons differ in size, and a device has slots for them.
#[test]
fn a_mix_is_packed_once_by_whoever_runs_it_and_runs_with_a_device() {
    let place = Place::new();
    std::fs::copy(fixture("k256.q6_k.gguf"), place.path().join("model.gguf")).unwrap();
    let ids = place.file("ids.json", serde_json::to_string(&(3..43).collect::<Vec<u32>>()).unwrap().as_bytes());
    let eval = |model: &str, more: &[&str]| {
        place.run(&[&["eval", model, "--activation", "relu", "--token-ids", &ids, "--json"][..], more].concat())
    };
    let nll = |said: &Done| {
        assert_eq!(said.code, 0, "{}", said.err);
        serde_json::from_str::<Json>(&said.out).unwrap()["nll"].as_f64().unwrap()
    };
    let first = eval("model.gguf", &["--quant", "Q4_K_M"]);
    let again = eval("model.gguf", &["--quant", "q4_k_m"]);
    assert_eq!((nll(&again), again.err.as_str()), (nll(&first), ""));
    let [store] = &place.stores()[..] else { panic!("{:?}", place.stores()) };
    let packed = store.to_str().unwrap();
    assert_eq!(nll(&eval(packed, &["--quant", "q4_k_m"])), nll(&first));
    let refused = eval(packed, &["--quant", "q5_k_m"]);
    assert!(refused.code == 2 && refused.err.contains("not q5_k_m; pack the original again"), "{}", refused.err);
    let on_device = eval("model.gguf", &["--quant", "q4_k_m", "--device", "virtual", "--ffn-share", "0.5"]);
    assert!((nll(&on_device) - nll(&first)).abs() < 1e-3, "{} {}", nll(&on_device), nll(&first));
    assert_eq!(place.stores().len(), 1);
}

#[test]
fn the_demo_is_found_in_the_assets() {
    let place = Place::new();
    let assets = place.path().join("given");
    std::fs::create_dir(&assets).unwrap();
    std::os::unix::fs::symlink(fixture("relullama"), assets.join("demo")).unwrap();
    let shown = place.command(&["show", "demo", "--json"]).env("DYNAMICINFER_ASSETS", &assets).output().unwrap();
    assert_eq!(shown.status.code(), Some(0));
    let shown: Json = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["path"].as_str().unwrap(), assets.join("demo").to_str().unwrap());
}

#[test]
fn a_models_own_name_is_neither_a_terminals_command_nor_a_path() {
    let place = Place::new();
    let dir = place.path().join("named");
    std::fs::create_dir(&dir).unwrap();
    for entry in std::fs::read_dir(fixture("llama")).unwrap() {
        let entry = entry.unwrap();
        std::os::unix::fs::symlink(entry.path(), dir.join(entry.file_name())).unwrap();
    }
    let mut config: Json = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
    config["_name_or_path"] = json!("../../\u{1b}]0;owned\u{7}\nred");
    std::fs::remove_file(dir.join("config.json")).unwrap();
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let shown = place.run(&["show", "named"]);
    assert_eq!(shown.code, 0, "{}", shown.err);
    assert!(!shown.out.contains(|c: char| c.is_control() && c != '\n'), "{:?}", shown.out);
    assert!(shown.out.contains(r"../../\u{1b}]0;owned\u{7}\nred"), "{}", shown.out);
    // A dead process's temporary in the working directory is removed, also for a bare file name.
    let mut gone = Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let temporary = place.path().join(format!("_]0;owned__red.f16.neurons.{}.tmp", gone.id()));
    std::fs::write(&temporary, "half").unwrap();
    let packed = place.run(&["pack", "named"]);
    assert_eq!(packed.code, 0, "{}", packed.err);
    assert!(!packed.err.contains(|c: char| c.is_control() && c != '\n'), "{:?}", packed.err);
    assert!(place.path().join("_]0;owned__red.f16.neurons").is_file());
    assert!(!temporary.exists());
}

/// A file's name went to the terminal as it was, from `ls` and from messages; one that is no UTF-8 ended `ls --json` by a panic.
#[test]
fn a_files_name_is_no_terminals_command() {
    let place = Place::new();
    let models = place.path().join("cache/dynamicinfer/models");
    std::fs::create_dir_all(&models).unwrap();
    let name = b"\x1b]0;owned\x07\xc2\x9b2J\xe2\x80\xae\nNAME\xff.neurons";
    std::fs::write(models.join(OsStr::from_bytes(name)), "no model").unwrap();
    let acts = |c: char| c.is_control() && c != '\n' || ('\u{202a}'..='\u{202e}').contains(&c);
    let list = place.run(&["ls"]);
    assert!(list.code == 0 && list.out.contains("owned") && !list.out.contains(acts), "{:?}", list.out);
    assert!(!list.out.contains("\nNAME"), "a name is one line: {}", list.out);
    let json = place.run(&["ls", "--json"]);
    assert!(json.code == 0 && !json.out.contains(acts), "{} {:?}", json.err, json.out);
    let listed: Json = serde_json::from_str(&json.out).unwrap();
    assert!(listed[0]["path"].as_str().unwrap().contains("\u{1b}]0;owned"), "{listed}");
    let path = OsStr::from_bytes(b"\x1b]0;owned\x07\xc2\x9b");
    let calls: [&[&OsStr]; 4] = [
        &["show".as_ref(), path],
        &["run".as_ref(), path, "x".as_ref()],
        &["pack".as_ref(), "demo".as_ref(), "-o".as_ref(), OsStr::from_bytes(b"no\x1b]0;owned/x")],
        &["ps".as_ref(), "--socket".as_ref(), path],
    ];
    for args in calls {
        let done = place.run(args);
        assert!(done.code != 0 && done.err.contains("owned") && !done.err.contains(acts), "{args:?}: {:?}", done.err);
    }
    let unexpected = place.run(&["ls".as_ref(), path]);
    assert!(unexpected.code == 2 && !unexpected.err.contains(acts), "{:?}", unexpected.err);
}

#[test]
fn output_into_a_closed_pipe_ends_quietly() {
    let place = Place::new();
    let model = fixture("relullama");
    let ids = place.file("ids.json", b"[5, 6, 7, 8]");
    let calls: [&[&str]; 7] = [
        &["show", &model],
        &["show", &model, "--json"],
        &["run", &model, "Once", "-n", "-1", "--ignore-eos", "--predictor", "dense"],
        &["run", &model, "Once", "-n", "5", "--json", "--predictor", "dense"],
        &["eval", &model, "--token-ids", &ids],
        &["completions", "bash"],
        &["--help"],
    ];
    for args in calls {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let done = place.command(args).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!((done.status.code(), String::from_utf8(done.stderr).unwrap().as_str()), (Some(0), ""), "{args:?}");
    }
}

fn interrupt(child: &Child) {
    kill_process(Pid::from_child(child), Signal::INT).unwrap();
}

/// What it says on stderr once it has ended with the status of Ctrl-C.
fn interrupted(mut child: Child, what: &str) -> String {
    let mut err = String::new();
    let stderr = child.stderr.take();
    drop(child.stdout.take());
    stderr.unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{what}: {err}");
    let last = err.lines().last();
    assert!(matches!(last, Some("dynamicinfer: interrupted" | "dynamicinfer-lab: interrupted")), "{what}: {err}");
    err
}

/// Waits until a file whose name has `part` is in the directory; fails if the child ends before.
fn wait_for_file(child: &mut Child, dir: &Path, part: &str) {
    loop {
        let ended = child.try_wait().unwrap();
        let mut names = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name());
        if names.any(|name| name.to_string_lossy().contains(part)) {
            return;
        }
        assert!(ended.is_none(), "it ended before there was a file {part}");
        std::thread::yield_now();
    }
}

#[test]
fn ctrl_c_is_130_and_leaves_nothing_half_done() {
    let place = Place::new();
    let model = fixture("relullama");
    let args = ["run", &model, "Once upon a time", "-n", "-1", "-c", "200000", "--ignore-eos", "--seed", "1"];
    let mut child = place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 16];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    interrupt(&child);
    // What was made until then is whole and its speed is told.
    let mut rest = Vec::new();
    child.stdout.as_mut().unwrap().read_to_end(&mut rest).unwrap();
    assert!(String::from_utf8([&first[..], &rest].concat()).unwrap().ends_with('\n'));
    let err = interrupted(child, "run");
    assert!(err.contains("| ended by interrupted | seed 1 ]"), "{err}");
    assert_eq!(place.stores().len(), 1);

    let out = place.path().join("out");
    std::fs::create_dir(&out).unwrap();
    let large = ["--hidden=1024", "--layers=16", "--ffn=4096", "--vocab=4000"];
    for name in ["out/x.neurons", "out/x.gguf"] {
        let args = [&["synth", "-o", name][..], &large].concat();
        let mut child = place.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        wait_for_file(&mut child, &out, ".tmp");
        interrupt(&child);
        interrupted(child, name);
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), 0, "{name}");
    }
    let ids: Vec<u32> = (0..100_000).map(|i| i * 7 % 320).collect();
    let ids = place.file("ids.json", serde_json::to_string(&ids).unwrap().as_bytes());
    let args = ["eval", &model, "--token-ids", &ids, "--logits", "out/logits.safetensors"];
    let mut child = place.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_file(&mut child, &out, "logits");
    interrupt(&child);
    interrupted(child, "eval");
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 0);
}

/// The model, its predictor and nothing else is written; a store that is packed beside it finds the predictor.
#[test]
fn a_sparse_model_comes_with_its_predictor_and_says_what_both_reach() {
    let place = Place::new();
    let shape = ["--hidden=128", "--layers=2", "--ffn=512", "--heads=2", "--kv-heads=2", "--vocab=300"];
    let args = [&["synth", "-o", "s.gguf", "--active", "0.1", "--json"][..], &shape].concat();
    let made = place.run(&args);
    assert_eq!(made.code, 0, "{}", made.err);
    let report: serde_json::Value = serde_json::from_str(&made.out).unwrap();
    assert_eq!(report["predictor"], "s.mlp.predictor");
    let share =
        |path: &str| report["statistics"].pointer(path).and_then(|v| v.as_f64()).unwrap_or_else(|| panic!("{path}"));
    assert!((0.08..0.12).contains(&share("/active_share")), "{report}");
    assert!(share("/predictor/0/recall") >= 0.95, "{report}");
    assert!(
        made.err.contains("active: ") && made.err.contains("from the layer's own residual: recall 9"),
        "{}",
        made.err
    );
    let mut files: Vec<_> = std::fs::read_dir(place.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    files.retain(|name| name.to_string_lossy().starts_with("s."));
    files.sort();
    assert_eq!(files, ["s.gguf", "s.mlp.predictor"]);
    // The predictor is no less precious than the model.
    std::fs::remove_file(place.path().join("s.gguf")).unwrap();
    let again = place.run(&args);
    assert_eq!(again.code, 2);
    assert!(again.err.contains("s.mlp.predictor is there already; add --force"), "{}", again.err);
    assert_eq!(place.run(&[&args[..], &["--force"]].concat()).code, 0);
    assert_eq!(place.run(&["pack", "s.gguf", "-o", "s.neurons"]).code, 0);
    let ran = place.run(&["run", "s.neurons", "a", "-n", "4", "--temp", "0", "--predictor", "mlp"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.err.contains("mlp: "), "{}", ran.err);
}

/// Peak memory, while it runs: the file itself, keys and values, and 100 MB. A second copy of the weights would show.
#[test]
#[cfg(target_os = "linux")]
fn a_run_takes_the_file_its_keys_and_values_and_100_mb() {
    let place = Place::new();
    let shape = ["--hidden=1024", "--layers=8", "--ffn=3072", "--heads=16", "--kv-heads=16", "--vocab=4000"];
    let made = place.run(&[&["synth", "-o", "m.neurons", "--quant", "f16"][..], &shape].concat());
    assert_eq!(made.code, 0, "{}", made.err);
    let file = std::fs::metadata(place.path().join("m.neurons")).unwrap().len();
    assert!(file > 200 << 20, "a copy must be larger than what is allowed beside: {file}");
    let prompt = "a long prompt, ".repeat(60);
    let args = ["run", "m.neurons", &prompt, "-c", "2048", "-n", "-1", "--ignore-eos", "-t", "2"];
    let mut child = place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // By then the prompt is read and tokens come.
    let mut some = [0; 200];
    child.stdout.as_mut().unwrap().read_exact(&mut some).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    interrupt(&child);
    drop(child.stdout.take());
    child.wait().unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
    let peak = line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() * 1024;
    let kv = 8 * 2 * 1024 * 2048 * 2;
    println!("peak {} MB, file {} MB, keys and values {} MB", peak / 1_000_000, file / 1_000_000, kv / 1_000_000);
    assert!(peak > file, "the file is in memory: {peak}");
    assert!(peak <= file + kv + 100_000_000, "{peak} bytes for a file of {file}");
}

/// The limit on what a tokenizer's rules may take counted what the library logs of each step: with everything logged the demo model was
/// refused.
#[test]
fn a_model_loads_however_much_is_logged() {
    let place = Place::new();
    let mut command = place.command(&["run", "demo", "Once upon a time", "-n", "4", "--seed", "1"]);
    let logged = command.env("DYNAMICINFER_LOG", "trace").output().unwrap();
    let said = String::from_utf8_lossy(&logged.stderr);
    assert_eq!(logged.status.code(), Some(0), "{}", said.lines().last().unwrap_or_default());
    assert!(said.contains("TRACE"), "it was asked for");
}

/// Its measurement of the memory's speed takes 2 GiB, which a container or a `ulimit` may not have.
#[test]
fn bench_runs_where_less_memory_can_be_had_than_it_would_read() {
    let place = Place::new();
    let limited = |kib: u64, args: &[&str]| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -v $0; exec \"$@\"", &kib.to_string(), env!("CARGO_BIN_EXE_dynamicinfer")]);
        shell.args(args).env("XDG_CACHE_HOME", place.path().join("cache")).current_dir(place.path());
        shell.output().unwrap()
    };
    let bench = ["bench", "demo", "-p", "0", "-n", "4", "-r", "1", "-t", "1", "-o", "json"];
    let done = limited(1 << 20, &bench);
    assert_eq!(done.status.code(), Some(0), "{}", String::from_utf8_lossy(&done.stderr));
    let rows: Json = serde_json::from_slice(&done.stdout).unwrap();
    assert!(rows[0]["machine_gb_s"].as_f64().unwrap() > 0.1, "{rows}");
    let measured = limited(1 << 20, &["measure", "-t", "1"]);
    assert_eq!(measured.status.code(), Some(0), "{}", String::from_utf8_lossy(&measured.stderr));
}

#[test]
fn an_instruction_set_that_is_asked_for_is_used_or_refused() {
    let place = Place::new();
    let with = |isa: &str, args: &[&str]| place.command(args).env("DYNAMICINFER_ISA", isa).output().unwrap();
    let bench = ["bench", "demo", "-p", "0", "-n", "1", "-r", "1", "-t", "1", "-o", "json"];
    let rows: Json = serde_json::from_slice(&with("portable", &bench).stdout).unwrap();
    assert_eq!(rows[0]["instruction_set"], "portable");
    // Every set that this processor has runs prompts.
    for isa in dynamicinfer::cpu::Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let hashes = with(isa.name(), &["logits-hash", "demo", "-p", "48,64", "--sequences", "1", "-t", "1", "--json"]);
        let hashes: Json = serde_json::from_slice(&hashes.stdout).unwrap();
        assert_eq!(hashes.as_array().map(Vec::len), Some(3), "{}: {hashes}", isa.name());
        let examined = with(isa.name(), &["doctor"]);
        let said = String::from_utf8(examined.stdout).unwrap();
        assert!(examined.status.success() && said.contains(isa.name()), "{}: {said}", isa.name());
    }
    let refused = with("mmx", &["ls"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && said.contains("take avx512, avxvnni, avx2 or portable"), "{said}");
}
