//! What packing says of an activation that does not fit the model: a warning for each that can be told, and none for models
//! that are what they are packed as.

use crate::gguf_file::{File, fixture};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::evaluation::fit::{Fit, measure};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::lab::synth::{Shape, write_gguf};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{Activation, NamedActivation};
use dynamicinfer::pack::{PackOptions, pack};
use std::path::{Path, PathBuf};
use std::process::Command;

fn named(activation: &str) -> NamedActivation {
    NamedActivation::by_name(activation, None).unwrap()
}

fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets").join(name)
}

/// What the model shows when it is packed with `activation`, or with what its file says.
fn fit(model: &Path, activation: Option<&str>, quant: Quant) -> Option<Fit> {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("m.neurons");
    let source = Source::open(model, activation.map(named)).unwrap();
    pack(&source, &store, &PackOptions { types: quant.into(), orders: None }, &|_, _| Ok(())).unwrap();
    let fit = measure(&store, 2, Kernels::best()).unwrap();
    println!("{} as {activation:?}, {}: {fit:?}", model.display(), quant.name());
    fit
}

/// What it is taken for, if that is not what it is packed with.
fn doubt(model: &Path, activation: Option<&str>, quant: Quant) -> Option<String> {
    fit(model, activation, quant).and_then(|fit| fit.doubt()).map(|doubt| doubt.rather.to_string())
}

/// Random weights in f32; with `active`, sparse by the law of `synth`.
fn synthetic(dir: &Path, active: Option<f64>, seed: u64) -> PathBuf {
    let path = dir.join(format!("synthetic-{seed}-{}.gguf", active.is_some()));
    let shape = Shape {
        hidden: 256,
        layers: 5,
        ffn: 1024,
        heads: 4,
        kv_heads: 2,
        vocab: 1000,
        context: 512,
        activation: Activation::Relu,
        active,
        seed,
        outliers: 0,
        experts: None,
    };
    write_gguf(&shape, Quant::F32, &path, &|_, _| Ok(())).unwrap();
    path
}

/// The same with `share` of each gate taken off its up: where a gate fires, its up is mostly negative. Half of the gates fire,
/// and as dReLU 17.6 % of the neurons are active for a share of one half (1/2 - asin(1/sqrt 5)/pi of those that fire).
fn planted(dir: &Path, share: f32, seed: u64) -> PathBuf {
    let from = synthetic(dir, None, seed);
    let mut file = File::read(from.to_str().unwrap());
    let floats =
        |data: &[u8]| data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect::<Vec<_>>();
    for layer in 0..5 {
        let gates = floats(&file.tensor(&format!("blk.{layer}.ffn_gate.weight")).data);
        let up = file.tensor(&format!("blk.{layer}.ffn_up.weight"));
        let changed = floats(&up.data).into_iter().zip(gates).map(|(up, gate)| up - share * gate);
        up.data = changed.flat_map(f32::to_le_bytes).collect();
    }
    let path = dir.join(format!("planted-{seed}.gguf"));
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

#[test]
fn models_that_are_what_they_are_packed_as_raise_no_doubt() {
    for quant in [Quant::F16, Quant::Q4] {
        for model in [
            asset("demo"),
            asset("demo-silu"),
            fixture("bamboo"),
            fixture("relullama"),
            fixture("prosparse"),
            fixture("llama"),
        ] {
            assert_eq!(doubt(&model, None, quant), None, "{} {}", model.display(), quant.name());
        }
    }
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..8 {
        // Signs are coins whatever the function, and random weights make no text likely.
        for activation in ["relu", "silu", "drelu"] {
            assert_eq!(
                doubt(&synthetic(dir.path(), None, seed), Some(activation), Quant::F16),
                None,
                "{activation}, seed {seed}"
            );
        }
        assert_eq!(
            doubt(&synthetic(dir.path(), Some(0.1), seed), Some("relu"), Quant::F16),
            None,
            "sparse, seed {seed}"
        );
        assert_eq!(doubt(&planted(dir.path(), 0.5, seed), Some("drelu"), Quant::F16), None, "planted, seed {seed}");
    }
}

#[test]
fn a_trained_model_packed_as_another_is_told_by_the_text() {
    for quant in [Quant::F16, Quant::Q4] {
        for (model, own, wrong) in [("demo", "relu", "drelu"), ("demo", "relu", "silu"), ("demo-silu", "silu", "drelu")]
        {
            assert_eq!(
                doubt(&asset(model), Some(wrong), quant).as_deref(),
                Some(own),
                "{model} as {wrong}, {}",
                quant.name()
            );
        }
    }
}

/// A limit of the check: this model makes the text as likely with either, and a third of its gates are above zero with both.
#[test]
fn a_silu_model_that_relu_suits_as_well_raises_no_doubt() {
    let fit = fit(&asset("demo-silu"), Some("relu"), Quant::F16).unwrap();
    assert!(fit.doubt().is_none());
    let loss = |name: &str| fit.losses.iter().find(|(activation, _)| *activation == named(name)).unwrap().1;
    assert!((loss("relu") - loss("silu")).abs() < 0.05, "{fit:?}");
}

#[test]
fn ups_that_lean_say_drelu_without_a_text() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..4 {
        let model = planted(dir.path(), 0.5, seed);
        for wrong in ["relu", "silu"] {
            let fit = fit(&model, Some(wrong), Quant::F16).unwrap();
            let doubt = fit.doubt().unwrap();
            assert_eq!(doubt.rather, named("drelu"), "{wrong}, seed {seed}");
            assert!(doubt.why.contains("of its ups are negative"), "{}", doubt.why);
        }
        let plain = fit(&model, Some("relu"), Quant::F16).unwrap().numbers;
        let both = fit(&model, Some("drelu"), Quant::F16).unwrap().numbers;
        assert!((plain.firing - 0.5).abs() < 0.05 && (plain.active - 0.5).abs() < 0.05, "{plain:?}");
        assert!((both.active - 0.176).abs() < 0.04, "{both:?}");
    }
}

#[test]
fn few_gates_above_zero_say_relu() {
    let dir = tempfile::tempdir().unwrap();
    for wrong in ["silu", "gelu"] {
        assert_eq!(
            doubt(&synthetic(dir.path(), Some(0.1), 1), Some(wrong), Quant::F16).as_deref(),
            Some("relu"),
            "{wrong}"
        );
    }
}

#[test]
fn an_ffn_without_a_gate_is_not_measured() {
    assert!(fit(&fixture("opt"), None, Quant::F16).is_none());
}

#[test]
fn packing_warns_of_what_does_not_fit_and_is_silent_of_what_does() {
    let dir = tempfile::tempdir().unwrap();
    let said = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
        command.args(args).current_dir(dir.path()).env("XDG_CACHE_HOME", dir.path().join("cache"));
        let done = command.output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.success(), "{args:?}: {said}");
        said
    };
    let (demo, silu) = (asset("demo"), asset("demo-silu"));
    let (demo, silu) = (demo.to_str().unwrap(), silu.to_str().unwrap());
    let warning = "warning: packed with drelu, and it looks like a model with relu: a plain text costs ";
    let advice = "pack it again with --activation relu";
    let packed = said(&["pack", demo, "--activation", "drelu", "-o", "wrong.neurons"]);
    assert!(packed.contains(warning) && packed.contains(advice), "{packed}");
    let packed = said(&["pack", demo, "-o", "right.neurons"]);
    assert!(!packed.contains("warning") && !packed.contains("not checked"), "{packed}");
    // `run` packs by itself, once.
    let wrong = ["run", silu, "Once", "-n", "1", "--activation", "drelu"];
    let first = said(&wrong);
    assert!(first.contains("warning: packed with drelu, and it looks like a model with silu"), "{first}");
    assert!(!said(&wrong).contains("warning"));
    assert!(!said(&["run", silu, "Once", "-n", "1"]).contains("warning"));
}
