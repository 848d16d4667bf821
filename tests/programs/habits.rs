//! What people type from habit, and what they find: names, cases and sizes, packed copies, help, a program without its checkout.

use serde_json::Value as Json;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A home of its own for each test.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Home {
        Home(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
        command.args(args).current_dir(self.0.path()).stdin(Stdio::null()).env_clear();
        command.env("PATH", "/usr/bin:/bin").env("HOME", self.0.path()).env("XDG_RUNTIME_DIR", self.0.path());
        command
    }

    /// Status, stdout, stderr.
    fn run(&self, args: &[&str]) -> (i32, String, String) {
        self.ended(self.command(args))
    }

    fn ended(&self, mut command: Command) -> (i32, String, String) {
        let done = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (out, err) = (text(done.stdout), text(done.stderr));
        assert!(!err.contains("panicked"), "{err}");
        (done.status.code().unwrap(), out, err)
    }

    /// The answer of a call that succeeds.
    fn json(&self, args: &[&str]) -> Json {
        let (code, out, err) = self.run(args);
        assert_eq!(code, 0, "{args:?}: {err}");
        serde_json::from_str(&out).unwrap()
    }

    /// The text that a model goes on with.
    fn text(&self, model: &str, more: &[&str]) -> Json {
        let args = ["run", model, "Once upon", "--json", "--temp", "0", "-n", "6"];
        self.json(&[&args[..], more].concat())["text"].clone()
    }

    /// The packed models as `ls` lists them.
    fn list(&self) -> Vec<Json> {
        self.json(&["ls", "--json"]).as_array().unwrap().clone()
    }

    fn names(&self) -> Vec<String> {
        self.list().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    }

    fn copy(&self, model: &str, to: &str) -> PathBuf {
        std::fs::copy(fixture(model), self.path(to)).unwrap();
        self.path(to)
    }
}

#[test]
fn flags_of_other_programs_are_answered_with_what_to_type_here() {
    let home = Home::new();
    let cases: &[(&[&str], &str)] = &[
        (&["run", "-m", "demo", "-p", "x"], "unknown option -m: the model needs no flag"),
        (&["-m", "demo"], "unknown option -m: the model needs no flag"),
        (&["run", "demo", "-p", "x"], "unknown option -p: the prompt follows the model"),
        (&["run", "demo", "--prompt=x"], "unknown option --prompt"),
        (&["run", "demo", "-f", "x.txt"], "dynamicinfer run MODEL < FILE"),
        (&["run", "demo", "-ngl", "99", "x"], "--device cuda"),
        (&["bench", "demo", "-ngl99"], "the GPU holds neurons, not layers"),
        (&["serve", "demo", "--n-gpu-layers", "9"], "--device cuda"),
        (&["serve", "demo", "--port", "80"], "--listen 127.0.0.1:8080"),
        // An option that the verb has is what it is there, and behind -- stands text.
        (&["bench", "demo", "-p", "many"], "invalid value 'many' for '--n-prompt"),
        (&["run", "demo", "--fly", "--", "-m"], "unexpected argument '--fly'"),
    ];
    for (args, want) in cases {
        let (code, out, err) = home.run(args);
        assert!(code == 2 && out.is_empty() && err.contains(want), "{args:?}: {code} {err}");
    }
}

#[test]
fn types_sizes_and_choices_are_read_in_any_case() {
    let home = Home::new();
    let model = fixture("relullama");
    let plain = home.text(&model, &["--quant", "q8_0", "--kv", "f32", "--predictor", "exact", "--activation", "relu"]);
    let loud = home.text(&model, &["--quant", "Q8_0", "--kv", "F32", "--predictor", "EXACT", "--activation", "ReLU"]);
    assert_eq!(plain, loud);
    assert_eq!(home.list().len(), 1, "one type, one copy");
    let device = ["--device", "Virtual", "--vram", "64m", "--policy", "LRU", "--machine", "rtx-4090"];
    home.text(&model, &device);
    let plan = |vram: &str| {
        let args =
            ["plan", "--shape", "llama-7b", "--machine", "rtx-4090", "--json", "--quant", "Q4_0", "--vram", vram];
        home.json(&args)["budget_bytes"].clone()
    };
    assert_eq!((plan("8G"), plan("8gib"), plan("8GB")), (plan("8GiB"), (8u64 << 30).into(), 8_000_000_000u64.into()));
}

#[test]
fn fetched_models_are_listed_beside_packed_ones_and_removed_by_their_names() {
    let home = Home::new();
    let folder = home.path(".cache/huggingface/hub/models--owner--model");
    for dir in ["refs", "blobs", "snapshots/abc"] {
        std::fs::create_dir_all(folder.join(dir)).unwrap();
    }
    std::fs::write(folder.join("refs/main"), "abc").unwrap();
    for (name, file) in [("one", "relullama.gguf"), ("two", "qwen2.gguf")] {
        std::fs::copy(fixture(file), folder.join("blobs").join(name)).unwrap();
        let link = folder.join("snapshots/abc").join(format!("{name}.gguf"));
        std::os::unix::fs::symlink(format!("../../blobs/{name}"), link).unwrap();
    }
    assert_eq!(home.names(), ["owner/model:one.gguf", "owner/model:two.gguf"]);
    // A sparse model is packed as it is run.
    home.text("owner/model:one.gguf", &[]);
    let kinds: Vec<_> = home.list().iter().map(|one| one["kind"].clone()).collect();
    assert_eq!(kinds, ["packed", "fetched", "fetched"]);
    let (code, _, said) = home.run(&["rm", "-n", "owner/model:one.gguf"]);
    assert!(code == 0 && said.matches("would remove").count() == 2, "{said}");
    assert_eq!(home.list().len(), 3);
    assert_eq!(home.run(&["rm", "owner/model:one.gguf"]).0, 0);
    assert_eq!(home.names(), ["owner/model"]);
    assert_eq!(home.run(&["rm", "model"]).0, 2, "a name without its owner removes nothing");
    assert_eq!(home.run(&["rm", "owner/model"]).0, 0);
    assert!(home.list().is_empty() && !folder.exists());
}

#[test]
fn a_model_answers_to_the_name_that_ls_prints() {
    let home = Home::new();
    home.copy("relullama.gguf", "my.gguf");
    let text = home.text("my.gguf", &[]);
    let name = home.names().remove(0);
    assert_eq!(home.text(&name, &[]), text);
    assert_eq!(home.json(&["show", &name, "--json"])["store"], home.list()[0]["path"]);
    // Two types of it have the type behind their names, and the bare name is refused with both.
    let small = home.text("my.gguf", &["--quant", "q8_0"]);
    let mut names = home.names();
    names.sort();
    assert_eq!(names, [format!("{name}:f16"), format!("{name}:q8_0")]);
    assert_eq!((home.text(&names[0], &[]), home.text(&names[1].to_uppercase(), &[])), (text.clone(), small));
    let (code, _, err) = home.run(&["run", &name, "x"]);
    assert!(code == 2 && names.iter().all(|name| err.contains(name.as_str())), "{err}");
    // What it was packed from is not needed for that.
    std::fs::remove_file(home.path("my.gguf")).unwrap();
    assert_eq!(home.text(&names[0], &[]), text);
    let (code, _, err) = home.run(&["run", "nobody", "x"]);
    assert!(code == 2 && err.contains("a name that `dynamicinfer ls` lists"), "{err}");
}

#[test]
fn show_and_ls_agree_on_what_is_packed_and_copies_of_deleted_models_are_removed() {
    let home = Home::new();
    let kept = home.copy("opt.gguf", "kept.gguf");
    home.copy("relullama.gguf", "gone.gguf");
    assert_eq!(home.json(&["show", "gone.gguf", "--json"])["packed"], false);
    home.text("gone.gguf", &[]);
    home.text("kept.gguf", &["--quant", "q8_0"]);
    let shown = home.json(&["show", "gone.gguf", "--json"]);
    let of = |name: &str| home.list().into_iter().find(|one| one["source"].as_str().unwrap().ends_with(name)).unwrap();
    assert_eq!((&shown["packed"], &shown["store"]), (&true.into(), &of("gone.gguf")["path"]));
    // A copy of another type than `run` takes is one, too.
    let shown = home.json(&["show", "kept.gguf", "--json"]);
    assert_eq!((&shown["packed"], &shown["copies"][0]), (&false.into(), &of("kept.gguf")["name"]));
    assert_eq!(of("kept.gguf")["source"].as_str().unwrap(), kept.canonicalize().unwrap().to_str().unwrap());

    assert!(home.run(&["rm", "--unused"]).2.contains("nothing to remove"));
    std::fs::remove_file(home.path("gone.gguf")).unwrap();
    let (_, table, _) = home.run(&["list"]);
    assert!(table.contains("gone: ") && table.contains("1 can be removed: dynamicinfer rm --unused"), "{table}");
    assert!(home.run(&["rm", "--unused", "--dry-run"]).2.contains("would remove"));
    assert_eq!(home.list().len(), 2);
    let (code, _, err) = home.run(&["rm", "--unused"]);
    assert!(code == 0 && err.contains("removed"), "{err}");
    let left = home.list();
    assert_eq!((left.len(), &left[0]["source_exists"]), (1, &true.into()));
    // By its name, or by what it was packed from.
    assert_eq!(home.run(&["rm", "nobody"]).0, 2);
    assert_eq!(home.run(&["rm", "kept.gguf"]).0, 0);
    assert!(home.list().is_empty() && kept.exists());
    let files = |dir: &str| std::fs::read_dir(home.path(dir)).unwrap().count();
    assert_eq!((files(".cache/dynamicinfer/models"), files(".cache/dynamicinfer/sources")), (0, 0));
}

/// Copying a model or giving it another date had it packed again: minutes for a large one.
#[test]
fn a_model_is_not_packed_again_while_its_content_is_the_same() {
    let home = Home::new();
    let file = home.copy("relullama.gguf", "m.gguf");
    let stamp = |home: &Home| {
        let meta = std::fs::metadata(home.list()[0]["path"].as_str().unwrap()).unwrap();
        (meta.ino(), meta.mtime(), meta.mtime_nsec())
    };
    let date = |path: &Path, seconds| {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds)).unwrap();
    };
    let text = home.text("m.gguf", &[]);
    let packed = stamp(&home);
    for seconds in [1_000_000_000, 1_100_000_000] {
        date(&file, seconds);
        let (_, _, err) = home.run(&["run", "m.gguf", "x", "-n", "1"]);
        assert!(!err.contains("packing"), "{err}");
        assert_eq!((home.text("m.gguf", &[]), stamp(&home)), (text.clone(), packed));
    }
    // As long as before, and other numbers: the last weights of the file.
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.len() - 64;
    bytes[at..].iter_mut().for_each(|byte| *byte &= 0x8f);
    std::fs::write(&file, bytes).unwrap();
    date(&file, 1_200_000_000);
    let (_, _, err) = home.run(&["run", "m.gguf", "x", "-n", "1"]);
    assert!(err.contains("has changed since it was packed; packing it again"), "{err}");
    assert_ne!(stamp(&home), packed);
}

#[test]
fn a_model_with_a_chat_template_answers_and_raw_goes_on_with_the_text() {
    let home = Home::new();
    let qwen = fixture("qwen2");
    let tokens = |more: &[&str]| {
        let args = ["run", &qwen, "Once upon", "--json", "--temp", "0", "-n", "2"];
        home.json(&[&args[..], more].concat())["prompt_tokens"].as_u64().unwrap()
    };
    let (answered, raw, with_system) = (tokens(&[]), tokens(&["--raw"]), tokens(&["--system", "Be brief."]));
    assert!(raw < answered && answered < with_system, "{raw} {answered} {with_system}");
    assert_eq!(tokens(&["--chat"]), answered);
    // One without a template goes on with the text, as ever.
    let llama = fixture("relullama");
    assert_eq!(home.text(&llama, &[]), home.text(&llama, &["--raw"]));
    for refused in [["--system", "x"].as_slice(), &["--chat"]] {
        let (code, _, err) = home.run(&[&["run", &llama, "x"], refused].concat());
        assert!(code == 2 && err.contains("this model has no chat template; leave out --"), "{err}");
    }
}

/// Installed by `cargo install` it found neither the demo nor the machines' profiles.
#[test]
fn a_program_without_its_checkout_has_the_demo_and_the_machines() {
    let home = Home::new();
    std::fs::create_dir(home.path("nothing")).unwrap();
    let alone = |args: &[&str]| {
        let mut command = home.command(args);
        command.env("DYNAMICINFER_ASSETS", home.path("nothing"));
        home.ended(command)
    };
    let (code, out, err) = alone(&["run", "demo", "Once upon a time", "--json", "--temp", "0", "-n", "12"]);
    assert_eq!(code, 0, "{err}");
    let answer: Json = serde_json::from_str(&out).unwrap();
    assert_eq!(answer["predictor"], "mlp", "its trained predictor comes with it");
    let text = home.json(&["run", "demo", "Once upon a time", "--json", "--temp", "0", "-n", "12"]);
    assert_eq!(answer["text"], text["text"]);
    let (code, out, err) = alone(&["plan", "demo", "--vram", "16MiB", "--machine", "rtx-4090"]);
    assert!(code == 0 && out.contains("machine rtx-4090: measured nothing"), "{err}");
    assert!(alone(&["doctor"]).1.contains("demo model dynamicinfer run demo"));
    let (code, _, err) = alone(&["plan", "demo", "--vram", "16MiB", "--machine", "nobodys"]);
    assert!(code == 2 && err.contains("rtx-3060-12gb"), "{err}");
    assert!(alone(&["run", "demo-silu", "x"]).2.contains("set DYNAMICINFER_ASSETS"));
}

#[test]
fn help_stands_in_groups_with_the_common_ones_first_and_without_what_is_internal() {
    let home = Home::new();
    let at = |text: &str, what: &str| text.find(what).unwrap_or_else(|| panic!("no {what:?} in: {text}"));
    let (_, help, _) = home.run(&["--help"]);
    let order = ["Use a model:", "  run ", "Watch and steer the daemon", "Prepare a model", "Measure and compare"];
    assert!(order.windows(2).all(|pair| at(&help, pair[0]) < at(&help, pair[1])), "{help}");
    for verb in ["run", "chat", "serve", "bench"] {
        let (_, help, _) = home.run(&[verb, "--help"]);
        assert!(
            at(&help, "Options:") < at(&help, "Sparsity:") && at(&help, "Sparsity:") < at(&help, "Device:"),
            "{help}"
        );
        for internal in [
            "--fail-after",
            "--wall-clock",
            "--printed-loss",
            "--isa",
            "--barrier",
            "--vram-schedule",
            "--prompt-parts",
        ] {
            assert!(!help.contains(internal), "{verb} {internal}");
        }
        let more = format!("More options: dynamicinfer {verb} --help-all");
        assert!(help.trim_end().ends_with(&more), "{help}");
        let (code, all, _) = home.run(&[verb, "--help-all"]);
        assert!(code == 0 && all.contains("--prompt-chunk") && all.contains("Experiments:"), "{all}");
    }
    let (_, run, _) = home.run(&["run", "--help"]);
    assert!(at(&run, "--n-predict") < at(&run, "Sampling:") && at(&run, "Sampling:") < at(&run, "--top-k"), "{run}");
    assert_eq!(home.run(&["completions", "man", "pages"]).0, 0);
    let pages: Vec<String> = std::fs::read_dir(home.path("pages"))
        .unwrap()
        .map(|page| page.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert!(
        pages.contains(&"dynamicinfer-run.1".into()) && !pages.iter().any(|page| page.contains("help")),
        "{pages:?}"
    );
}

#[test]
fn a_verb_or_an_option_of_the_other_program_is_named() {
    let home = Home::new();
    let cases: [(&[&str], &str); 6] = [
        (&["simulate", "--papers"], "'simulate' is a verb of dynamicinfer-lab: dynamicinfer-lab simulate --help"),
        (&["help", "replay"], "'replay' is a verb of dynamicinfer-lab: dynamicinfer-lab replay --help"),
        (&["man", "pages"], "'man' is a part of completions: dynamicinfer completions man DIR"),
        (&["eval", "demo", "--barrier"], "--barrier is an option of dynamicinfer-lab: dynamicinfer-lab eval --help"),
        (
            &["run", "demo", "x", "--vram-schedule=9=4MiB"],
            "--vram-schedule is an option of dynamicinfer-lab: dynamicinfer-lab run --help",
        ),
        (
            &["run", "demo", "x", "--device", "virtual", "--placement", "random"],
            "--placement random is of dynamicinfer-lab",
        ),
    ];
    for (args, want) in cases {
        let (code, out, err) = home.run(args);
        assert!(
            code == 2 && out.is_empty() && err.starts_with(&format!("dynamicinfer: {want}")),
            "{args:?}: {code} {err}"
        );
    }
    let lab = |args: &[&str]| {
        let mut command = home.command(args);
        let environment: Vec<_> =
            command.get_envs().map(|(name, value)| (name.to_owned(), value.map(Into::into))).collect();
        command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer-lab"));
        command.args(args).current_dir(home.path("")).stdin(Stdio::null()).env_clear();
        command.envs(
            environment.into_iter().filter_map(|(name, value): (_, Option<std::ffi::OsString>)| Some((name, value?))),
        );
        home.ended(command)
    };
    let (code, _, err) = lab(&["chat", "demo"]);
    assert!(
        code == 2 && err.contains("dynamicinfer-lab: 'chat' is a verb of dynamicinfer: dynamicinfer chat --help"),
        "{err}"
    );
    let bench = ["bench", "demo", "-p", "0", "-n", "2", "-r", "1", "--output", "json"];
    let (code, out, err) = lab(&[
        &bench[..],
        &["--device", "virtual", "--ffn-share", "0.5", "--machine", "demo-pc", "--barrier", "--placement", "random"],
    ]
    .concat());
    assert!(code == 0 && out.contains("avg_ts"), "{code} {err}");
    let (_, help, _) = lab(&["bench", "--help-all"]);
    assert!(help.contains("--barrier") && help.contains("static (the plan's), random, none"), "{help}");
    assert_eq!(lab(&["completions", "man", "pages"]).0, 0);
    assert!(home.path("pages/dynamicinfer-lab-simulate.1").is_file());
    let (code, script, _) = lab(&["completions", "bash"]);
    assert!(code == 0 && script.contains("dynamicinfer-lab"), "{code}");
}

#[test]
fn the_settings_file_opens_a_model_as_the_options_do() {
    let home = Home::new();
    let talk = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = home.command(&[&["chat", "demo", "--here"], args].concat());
        command.envs(variables.iter().copied());
        home.ended(command)
    };
    // Nothing is said, so the model is opened and the talk ends.
    assert_eq!(talk(&[("DYNAMICINFER_ENGINE_RAM", "1GiB")], &[]).0, 0);
    let (code, _, err) = talk(&[("DYNAMICINFER_ENGINE_RAM", "1MiB")], &[]);
    assert!(code == 6 && err.contains("--ram 1.00 MiB is below the"), "{code} {err}");
    assert_eq!(talk(&[("DYNAMICINFER_ENGINE_RAM", "1MiB")], &["--ram", "1G"]).0, 0, "an option comes first");
    let (code, _, err) = talk(&[("DYNAMICINFER_ENGINE_DEVICE", "virtual")], &[]);
    assert!(code == 2 && err.contains("--device virtual needs a budget"), "{code} {err}");
    for (key, value, want) in [
        ("DEVICE", "gpu", "$DYNAMICINFER_ENGINE_DEVICE: engine.device is \"gpu\"; it must be cpu or cuda"),
        ("QUANT", "q9", "engine.quant ($DYNAMICINFER_ENGINE_QUANT): 'q9' is not a store type"),
        ("ACTIVATION", "tanh", "engine.activation ($DYNAMICINFER_ENGINE_ACTIVATION): activation 'tanh' is not known"),
    ] {
        let (code, _, err) = talk(&[(&format!("DYNAMICINFER_ENGINE_{key}"), value)], &[]);
        assert!(code == 2 && err.contains(want), "{code} {err}");
    }
    let (code, _, err) = talk(&[("DYNAMICINFER_SAMPLING_TOP_P", "1.5")], &[]);
    assert!(code == 2 && err.contains("sampling.top_p is 1.5; it must be a number from 0 to 1"), "{err}");
}

/// `config show` printed words as settings that every other verb then refused, and a variable with a typing error did nothing in silence.
#[test]
fn a_setting_that_is_none_is_told_of_by_whoever_reads_it_first() {
    let home = Home::new();
    let ended = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = home.command(args);
        command.envs(variables.iter().copied());
        home.ended(command)
    };
    for (key, value) in [
        ("KV", "q4"),
        ("PREDICTOR", "magic"),
        ("QUANT", "q9"),
        ("ACTIVATION", "tanh"),
        ("VRAM", "8 apples"),
        ("RAM", "-1"),
        ("POLICY", "magic"),
    ] {
        let variable = format!("DYNAMICINFER_ENGINE_{key}");
        let (code, out, err) = ended(&["config", "show"], &[(&variable, value)]);
        assert!(code == 2 && out.is_empty() && err.contains(&format!("${variable}")), "{code} {err}");
    }
    let (code, _, err) = ended(&["ls"], &[("DYNAMICINFER_IAS", "avx2"), ("DYNAMICINFER_ASSETS", "/nowhere")]);
    assert_eq!(code, 0);
    assert!(err.contains("'DYNAMICINFER_IAS'; did you mean 'DYNAMICINFER_ISA'?"), "{err}");
    assert!(err.contains("$DYNAMICINFER_ASSETS is /nowhere, which is not a folder"), "{err}");
}

#[test]
fn a_plan_says_how_fast_it_would_be_and_what_bounds_it() {
    let home = Home::new();
    let plan = |vram: &str| {
        let shape = ["plan", "--shape", "llama-7b", "--quant", "q4_0", "--machine", "rtx-4090", "--vram", vram];
        let (code, out, err) = home.run(&shape);
        assert_eq!(code, 0, "{err}");
        let details = home.json(&[&shape[..], &["--json"]].concat())["details"]["expected"].clone();
        (out, details)
    };
    let (small, all) = (plan("2500MiB"), plan("16GiB"));
    assert!(
        small.0.contains("expected, by assumed rates: at most ")
            && small.0.contains("bound by the processor's memory rate")
    );
    assert!(all.0.contains("bound by the device's memory rate"), "{}", all.0);
    let speed = |of: &Json, what: &str| of[what].as_f64().unwrap();
    assert!(speed(&all.1, "tokens_per_s") > speed(&small.1, "tokens_per_s"));
    assert!(speed(&small.1, "tokens_per_s") > speed(&small.1, "cpu_tokens_per_s"));
    // All of it on the device: what a token reads, by the device's rate, is the time.
    assert_eq!(speed(&all.1, "host_ms"), 0.0);
    let ms = 1e3 / speed(&all.1, "tokens_per_s");
    assert!((ms - speed(&all.1, "device_ms") - speed(&all.1, "wait_ms")).abs() < 1e-9, "{}", all.1);
}
