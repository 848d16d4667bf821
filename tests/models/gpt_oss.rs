//! gpt-oss: biases, sinks, YaRN, windows and clamped SwiGLU against transformers, where its experts come from, and what of its files is refused.

use crate::gguf_file::{File, Tensor, fixture, text};
use crate::reference::{check, expected, relative_error};
use dynamicinfer::cpu::{Isa, Kernels};
use dynamicinfer::engine::{Engine, Logits, Session};
use dynamicinfer::formats::gguf::Value;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::tokenizer::channels::{Channel, Seen};
use dynamicinfer::tokenizer::{Special, Tokenizer};
use std::path::{Path, PathBuf};

const FILE: &str = "gpt-oss.mxfp4.gguf";
const STEM: &str = "gpt-oss.mxfp4";

/// The same model with all of its matrices in f32.
fn exact(dir: &Path) -> PathBuf {
    let path = dir.join("gpt-oss.f32.gguf");
    std::fs::write(&path, File::read(FILE).in_f32().bytes()).unwrap();
    path
}

fn open(path: &Path) -> Model {
    Model::in_place(Source::open(path, None).unwrap()).unwrap()
}

#[test]
fn it_agrees_with_transformers_on_every_instruction_set() {
    let dir = tempfile::tempdir().unwrap();
    let path = exact(dir.path());
    for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
        let error = check(open(&path), &expected(STEM), kernels, 2);
        println!("{}: relative error {error:.1e}", kernels.isa.name());
        assert!(error <= 5e-5, "{}: relative error {error}", kernels.isa.name());
    }
}

/// The prompt is longer than what row kernels take at a time, so the test above has it go through matrix products and tiles.
#[test]
fn a_prompt_in_pieces_gives_the_logits_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let expected = expected(STEM);
    for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
        let mut engine = Engine::new(open(&exact(dir.path())), 1, kernels);
        for piece in [1, 7, 32] {
            let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
            let pieces = expected.prompt.chunks(piece);
            let found: Vec<f32> =
                pieces.flat_map(|piece| engine.forward(&mut session.kv, piece, Logits::All).to_vec()).collect();
            let error = relative_error(&found, &expected.prompt_logits);
            assert!(error <= 5e-5, "{} by {piece}: relative error {error}", kernels.isa.name());
        }
    }
}

/// int8 inputs of its quantised matrices move this model, whose choices of experts are close, by as much as llama.cpp's move it.
#[test]
fn as_it_is_published_it_stays_near_the_answer_of_its_numbers() {
    let expected = expected(STEM);
    for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
        let mut engine = Engine::new(open(&fixture(FILE)), 2, kernels);
        for piece in [1, 40] {
            let mut session = Session::new(&engine, 64, KvType::F16).unwrap();
            let pieces = expected.prompt.chunks(piece);
            let found: Vec<f32> =
                pieces.flat_map(|piece| engine.forward(&mut session.kv, piece, Logits::All).to_vec()).collect();
            let apart: f64 = found.iter().zip(&expected.prompt_logits).map(|(a, b)| f64::from(a - b).powi(2)).sum();
            let all: f64 = expected.prompt_logits.iter().map(|b| f64::from(*b).powi(2)).sum();
            let error = (apart / all).sqrt();
            println!(
                "{} by {piece}: {error:.1e}, at most {:.1e}",
                kernels.isa.name(),
                relative_error(&found, &expected.prompt_logits)
            );
            assert!(error <= 0.1, "{} by {piece}: {error}", kernels.isa.name());
        }
    }
}

fn refusal(file: &File, dir: &Path) -> String {
    let path = dir.join("model.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    match Source::open(&path, None) {
        Ok(_) => panic!("it was opened"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_is_not_known_of_its_files_is_refused_by_name() {
    type Change = fn(&mut File);
    let cases: [(Change, &str); 14] = [
        (|f| f.remove("gpt-oss.rope.scaling.type"), "gpt-oss.rope.scaling.type: is missing; gpt-oss has yarn"),
        (
            |f| f.set("gpt-oss.rope.scaling.type", text("linear")),
            "gpt-oss.rope.scaling.type: is linear; gpt-oss has yarn",
        ),
        (|f| f.remove("gpt-oss.rope.scaling.factor"), "gpt-oss.rope.scaling.factor: missing"),
        (|f| f.remove("gpt-oss.rope.scaling.original_context_length"), "original_context_length: missing"),
        (|f| f.set("gpt-oss.rope.scaling.yarn_beta_fast", Value::F32(-1.0)), "yarn_beta_fast: -1 is not a positive"),
        (|f| f.set("gpt-oss.rope.scaling.yarn_ext_factor", Value::F32(0.5)), "yarn_ext_factor: is 0.5; only 1 is"),
        (|f| f.set("gpt-oss.expert_gating_func", Value::U32(1)), "expert_gating_func: is 1; only 3"),
        (|f| f.remove("gpt-oss.attention.sliding_window"), "gpt-oss.attention.sliding_window: missing"),
        (|f| f.set("gpt-oss.attention.sliding_window_pattern", Value::U32(4)), "sliding_window_pattern: is 4; only 2"),
        (|f| f.drop_tensor("blk.1.attn_sinks.weight"), "blk.1.attn_sinks.weight: the tensor is missing"),
        (|f| f.drop_tensor("blk.2.ffn_gate_inp.bias"), "blk.2.ffn_gate_inp.bias: the tensor is missing"),
        (|f| f.drop_tensor("blk.0.ffn_down_exps.bias"), "blk.0.ffn_down_exps.bias: the tensor is missing"),
        (|f| f.drop_tensor("blk.3.attn_output.bias"), "blk.3.attn_output.bias: the tensor is missing"),
        (
            |f| f.tensor("blk.3.ffn_up_exps.bias").shape = vec![32, 6],
            "blk.3.ffn_up_exps.bias: has shape [32, 6], the model's configuration needs [6, 32]",
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (change, wanted) in cases {
        let mut file = File::read(FILE);
        change(&mut file);
        let message = refusal(&file, dir.path());
        assert!(message.contains(wanted), "{message}");
    }
    let silu = Source::open(&fixture(FILE), Some(Activation::Silu.into())).map(drop).unwrap_err().to_string();
    assert!(silu.contains("gpt-oss has an activation of its own"), "{silu}");
}

/// Another family's reader would leave them out and answer wrongly.
#[test]
fn biases_of_experts_that_a_family_does_not_have_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["blk.0.ffn_up_exps.bias", "blk.0.ffn_gate_inp.bias"] {
        let mut file = File::read("qwen3-moe.gguf");
        file.tensors.push(Tensor { name: name.into(), kind: 0, shape: vec![8], data: vec![0; 32] });
        let message = refusal(&file, dir.path());
        assert!(message.contains("its experts have biases, which is not supported for qwen3moe"), "{message}");
    }
}

#[test]
fn a_directory_and_packing_are_refused_with_what_to_do_instead() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), r#"{"model_type": "gpt_oss"}"#).unwrap();
    let message = Source::open(dir.path(), None).map(drop).unwrap_err().to_string();
    assert!(message.contains("model_type: gpt-oss is read as a GGUF only"), "{message}");
    let (source, store) = (Source::open(&fixture(FILE), None).unwrap(), dir.path().join("m.neurons"));
    let packed = pack(&source, &store, &PackOptions { types: Quant::F16.into(), orders: None }, &|_, _| Ok(()));
    let message = packed.map(drop).unwrap_err().to_string();
    assert!(
        message.contains("have clamped_swish, which no neuron is off by: nothing is gained by packing it"),
        "{message}"
    );
}

/// No other family has sinks, but a file may: they are computed where it is read in place, and no store has a place for them.
#[test]
fn sinks_of_another_family_are_read_and_not_packed() {
    let dir = tempfile::tempdir().unwrap();
    let mut file = File::read("mistral.gguf");
    for layer in 0..2 {
        let data = [5f32, -1.0, 0.5, 2.0].iter().flat_map(|sink| sink.to_le_bytes()).collect();
        file.tensors.push(Tensor { name: format!("blk.{layer}.attn_sinks.weight"), kind: 0, shape: vec![4], data });
    }
    let path = dir.path().join("sinks.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    let logits = |path: &Path| {
        let mut engine = Engine::new(open(path), 1, Kernels::best());
        let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
        engine.forward(&mut session.kv, &[3, 1, 4, 1, 5, 9], Logits::All).to_vec()
    };
    assert!(relative_error(&logits(&path), &logits(&fixture("mistral.gguf"))) > 0.05);
    let (source, store) = (Source::open(&path, None).unwrap(), dir.path().join("m.neurons"));
    let packed = pack(&source, &store, &PackOptions { types: Quant::F16.into(), orders: None }, &|_, _| Ok(()));
    let message = packed.map(drop).unwrap_err().to_string();
    assert!(message.contains("has sinks, which no store holds: it is read where it lies"), "{message}");
}

/// `<|end|>` ends what the model thinks, and its answer follows.
#[test]
fn its_turns_end_with_return_and_call_and_not_with_end() {
    let source = Source::open(&fixture(FILE), None).unwrap();
    let spec = source.tokenizer.unwrap();
    let tokenizer = Tokenizer::new(spec.clone(), Path::new(FILE)).unwrap();
    let ends: Vec<&str> = spec.eos.iter().map(|&id| tokenizer.token_text(id).unwrap()).collect();
    assert_eq!(ends, ["<|return|>", "<|call|>"]);
}

#[test]
fn of_an_answer_in_channels_a_reader_sees_the_last_one() {
    let source = Source::open(&fixture(FILE), None).unwrap();
    let tokenizer = Tokenizer::new(source.tokenizer.unwrap(), Path::new(FILE)).unwrap();
    let markers = tokenizer.markers().unwrap();
    let bytes_of = |id: u32| tokenizer.token_bytes(id).unwrap();
    let ids_of = |text: &str| tokenizer.encode(text, Special::Parse).unwrap();
    let seen_after = |prompt: &str, answer: &str| {
        let mut channel = Channel::after(markers, &ids_of(prompt), bytes_of);
        let ids = ids_of(answer);
        let bytes = |id: u32| (id, tokenizer.token_bytes(id).unwrap());
        let shown = ids.into_iter().map(bytes).filter(|&(id, bytes)| channel.take(markers, id, bytes) == Seen::Bytes);
        String::from_utf8(shown.flat_map(|(_, bytes)| bytes.to_vec()).collect()).unwrap()
    };
    let seen = |answer: &str| seen_after("<|start|>user<|message|>Why?<|end|><|start|>assistant", answer);
    let thought = "<|channel|>analysis<|message|>final? No.<|end|><|start|>assistant";
    let call = "<|channel|>commentary to=functions.f <|message|>{}<|call|>";
    assert_eq!(seen(&format!("{thought}<|channel|>final<|message|>Yes, final.<|return|>")), "Yes, final.");
    assert_eq!(seen(&format!("{thought}{call}")), "");
    assert_eq!(seen("<|channel|>final <|message|>a<|end|>b<|start|>c<|message|>d<|channel|>final<|message|>e"), "ae");
    assert_eq!(seen("a text without channels"), "a text without channels");
    // Prompts that end inside a message or its head.
    let rest = "thinks<|end|><|start|>assistant<|channel|>final<|message|>says";
    assert_eq!(seen_after("<|start|>assistant<|channel|>analysis<|message|>", rest), "says");
    assert_eq!(seen_after("<|start|>assistant<|channel|>", &format!("analysis<|message|>{rest}")), "says");
    assert_eq!(seen_after("<|start|>assistant<|channel|>final<|message|>", "says"), "says");
    assert_eq!(seen_after("<|start|>user<|message|>Why", " not?"), " not?");
    assert_eq!(seen_after("Once upon", " a time"), " a time");
}
