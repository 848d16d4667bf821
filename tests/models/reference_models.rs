//! Tiny models of every family and both file formats against the transformers library (tests/fixtures/models/README.md):
//! the logits of the whole prompt within 1e-3 of the largest, and the same 64 greedy tokens, with an f32 store and f32
//! keys and values, on every instruction set and by both the decode kernels and the prefill GEMM.

use crate::reference;
use dynamicinfer::Error;
use dynamicinfer::cpu::{Isa, Kernels};

use crate::reference::{expected, fixtures, relative_error};
use dynamicinfer::engine::session::CHUNK;
use dynamicinfer::engine::{Engine, Logits, Session};
use dynamicinfer::formats::neuron_store::NeuronStore;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::Permutation;
use dynamicinfer::model::source::{Source, source_files};
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use std::path::Path;

fn open(file: &str, quant: Quant, dir: &Path) -> Model {
    let source = Source::open(&fixtures().join(file), None).unwrap();
    if source.config.only_in_place().is_some() {
        return Model::in_place(source).unwrap();
    }
    let store = dir.join("model.neurons");
    pack(&source, &store, &PackOptions { types: quant.into(), orders: None }, &|_, _| Ok(())).unwrap();
    let model = Model::open(&store).unwrap();
    model.store().unwrap().verify(|_| ()).unwrap();
    model
}

/// Largest relative error over prompt and last token; panics where a greedy token differs.
fn check(file: &str, stem: &str, quant: Quant, kernels: Kernels, threads: usize) -> f32 {
    let dir = tempfile::tempdir().unwrap();
    reference::check(open(file, quant, dir.path()), &expected(stem), kernels, threads)
}

const MODELS: [(&str, &str); 100] = [
    ("llama", "llama"),
    ("llama-tied", "llama-tied"),
    ("llama-linear-rope", "llama-linear-rope"),
    ("llama-gelu", "llama-gelu"),
    ("llama-gelu-tanh", "llama-gelu-tanh"),
    ("llama-relu2", "llama-relu2"),
    ("mistral", "mistral"),
    ("qwen2", "qwen2"),
    ("relullama", "relullama"),
    ("prosparse", "prosparse"),
    ("bamboo", "bamboo"),
    ("opt", "opt"),
    ("falcon", "falcon"),
    ("falcon-40b", "falcon-40b"),
    ("relufalcon", "relufalcon"),
    ("minicpm", "minicpm"),
    ("llama.gguf", "llama"),
    ("llama-tied.gguf", "llama-tied"),
    ("mistral.gguf", "mistral"),
    ("qwen2.gguf", "qwen2"),
    ("relullama.gguf", "relullama"),
    ("relullama.powerinfer.gguf", "relullama"),
    ("bamboo.gguf", "bamboo"),
    ("opt.gguf", "opt"),
    ("falcon.gguf", "falcon"),
    ("falcon-40b.gguf", "falcon-40b"),
    ("relufalcon.powerinfer.gguf", "relufalcon"),
    ("minicpm.gguf", "minicpm"),
    ("k256.q6_k.gguf", "k256.q6_k"),
    ("qwen3", "qwen3"),
    ("qwen3.gguf", "qwen3"),
    ("qwen3-moe", "qwen3-moe"),
    ("qwen3-moe.gguf", "qwen3-moe"),
    ("mixtral", "mixtral"),
    ("mixtral.gguf", "mixtral"),
    ("mixtral.split.gguf", "mixtral"),
    ("turbosparse-mixtral", "turbosparse-mixtral"),
    ("turbosparse-mixtral.gguf", "turbosparse-mixtral"),
    ("smallthinker", "smallthinker"),
    ("smallthinker.gguf", "smallthinker"),
    ("smallthinker-softmax", "smallthinker-softmax"),
    ("smallthinker-softmax.gguf", "smallthinker-softmax"),
    ("smallthinker-4b", "smallthinker-4b"),
    ("smallthinker-4b.gguf", "smallthinker-4b"),
    ("qwen2-moe", "qwen2-moe"),
    ("qwen2-moe.gguf", "qwen2-moe"),
    ("gemma3", "gemma3"),
    ("gemma3.gguf", "gemma3"),
    ("gemma3-27b", "gemma3-27b"),
    ("gemma4", "gemma4"),
    ("gemma4.gguf", "gemma4"),
    ("gemma4-moe", "gemma4-moe"),
    ("gemma4-moe.gguf", "gemma4-moe"),
    ("gemma4-e2b", "gemma4-e2b"),
    ("gemma4-e2b.gguf", "gemma4-e2b"),
    ("glm4-moe", "glm4-moe"),
    ("glm4-moe.gguf", "glm4-moe"),
    ("qwen35", "qwen35"),
    ("qwen35.gguf", "qwen35"),
    ("qwen35-vl", "qwen35-vl"),
    ("qwen35-moe", "qwen35-moe"),
    ("qwen35-moe.gguf", "qwen35-moe"),
    ("qwen3-next", "qwen3-next"),
    ("qwen3-next.gguf", "qwen3-next"),
    ("nemotron-h", "nemotron-h"),
    ("nemotron-h.gguf", "nemotron-h"),
    ("nemotron-h-moe", "nemotron-h-moe"),
    ("nemotron-h-moe.gguf", "nemotron-h-moe"),
    ("lfm2", "lfm2"),
    ("lfm2.gguf", "lfm2"),
    ("lfm2-moe", "lfm2-moe"),
    ("lfm2-moe.gguf", "lfm2-moe"),
    ("ernie4.5-moe", "ernie4.5-moe"),
    ("ernie4.5-moe.gguf", "ernie4.5-moe"),
    ("dots1", "dots1"),
    ("dots1.gguf", "dots1"),
    ("smollm3", "smollm3"),
    ("smollm3.gguf", "smollm3"),
    ("deepseek-v2", "deepseek-v2"),
    ("deepseek-v2.gguf", "deepseek-v2"),
    ("deepseek-v3", "deepseek-v3"),
    ("deepseek-v3.gguf", "deepseek-v3"),
    ("glm4-moe-lite", "glm4-moe-lite"),
    ("glm4-moe-lite.gguf", "glm4-moe-lite"),
    ("arcee", "arcee"),
    ("arcee.gguf", "arcee"),
    ("nemotron", "nemotron"),
    ("nemotron.gguf", "nemotron"),
    ("granite", "granite"),
    ("granite.gguf", "granite"),
    ("phi4", "phi4"),
    ("phi4.gguf", "phi4"),
    ("phi4-mini", "phi4-mini"),
    ("phi4-mini.gguf", "phi4-mini"),
    ("starcoder2", "starcoder2"),
    ("starcoder2.gguf", "starcoder2"),
    ("olmo2", "olmo2"),
    ("olmo2.gguf", "olmo2"),
    ("glm4", "glm4"),
    ("glm4.gguf", "glm4"),
];

#[test]
fn every_family_and_format_agrees_with_transformers() {
    for (file, stem) in MODELS {
        let error = check(file, stem, Quant::F32, Kernels::best(), 2);
        println!("{file}: relative error {error:.1e}");
        // gelu and its tanh form differ by as little as 2.1e-4 of the largest logit, in Falcon: tell them apart.
        assert!(error <= 5e-5, "{file}: relative error {error}");
    }
}

/// Fused and interleaved queries, keys and values are told apart, norms of other names are found, `down` is turned.
#[test]
fn a_directory_and_its_gguf_twin_are_packed_into_the_same_rows() {
    let twins = [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "relullama",
        "bamboo",
        "opt",
        "falcon",
        "falcon-40b",
        "minicpm",
        "gemma3",
        "gemma4",
        "lfm2",
        "arcee",
        "nemotron",
        "granite",
        "phi4",
        "phi4-mini",
        "starcoder2",
        "olmo2",
        "glm4",
    ];
    let twins = twins.map(|twin| (twin, format!("{twin}.gguf")));
    for (model, gguf) in twins.into_iter().chain([("relufalcon", "relufalcon.powerinfer.gguf".into())]) {
        let dir = tempfile::tempdir().unwrap();
        let store = |file: &str| {
            let path = dir.path().join(file);
            let source = Source::open(&fixtures().join(file), None).unwrap();
            pack(&source, &path, &PackOptions { types: Quant::F32.into(), orders: None }, &|_, _| Ok(())).unwrap();
            NeuronStore::open(&path).unwrap()
        };
        let (one, other) = (store(model), store(&gguf));
        let rows = |store: &NeuronStore| {
            let sections = store.header.sections.iter().filter(|s| s.name != "tokenizer");
            sections.map(|s| (s.name.clone(), store.bytes(s).to_vec())).collect::<Vec<_>>()
        };
        assert!(rows(&one) == rows(&other), "{model} and {gguf}");
    }
}

#[test]
fn quantised_ggufs_agree_with_transformers_on_their_dequantised_weights() {
    for file in ["llama.q4_0", "llama-linear-rope.q8_0", "k256.q4_k_m", "k256.q6_k"] {
        let error = check(&format!("{file}.gguf"), file, Quant::F32, Kernels::best(), 1);
        println!("{file}: relative error {error:.1e}");
        assert!(error <= 1e-3, "{file}: relative error {error}");
    }
}

#[test]
fn every_instruction_set_agrees() {
    for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
        for stem in ["llama", "opt", "bamboo", "qwen3-moe", "smallthinker", "qwen2-moe"] {
            let error = check(stem, stem, Quant::F32, kernels, 1);
            assert!(error <= 1e-3, "{stem} on {}: relative error {error}", kernels.isa.name());
        }
    }
}

#[test]
fn prefill_by_gemm_equals_decode_by_kernels_in_every_store_type() {
    for (file, quant) in [("relullama", Quant::F32), ("opt", Quant::F16), ("bamboo", Quant::Q8), ("qwen2", Quant::Q4)] {
        let dir = tempfile::tempdir().unwrap();
        let model = open(file, quant, dir.path());
        let tokens: Vec<u32> = (0..100).map(|i| (i * 37 + 11) % model.config.vocab as u32).collect();
        let mut engine = Engine::new(model, 2, Kernels::best());
        let mut by_gemm = Session::new(&engine, 128, KvType::F32).unwrap();
        let mut by_kernels = Session::new(&engine, 128, KvType::F32).unwrap();
        let wide = engine.forward(&mut by_gemm.kv, &tokens, Logits::All).to_vec();
        let mut narrow = Vec::new();
        for chunk in tokens.chunks(7) {
            narrow.extend_from_slice(engine.forward(&mut by_kernels.kv, chunk, Logits::All));
        }
        // Kernels of grouped types round their inputs to int8, the GEMM does not.
        let tolerance = if quant.is_grouped() { 0.1 } else { 1e-4 };
        let error = relative_error(&narrow, &wide);
        assert!(error <= tolerance, "{file} {}: relative error {error}", quant.name());
    }
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    drop(open("relullama", Quant::Q8, dir.path()));
    let run = |threads: usize| {
        let model = Model::open(&dir.path().join("model.neurons")).unwrap();
        let mut engine = Engine::new(model, threads, Kernels::best());
        let mut session = Session::new(&engine, 64, KvType::F16).unwrap();
        let tokens: Vec<u32> = (0..40).collect();
        session.append(&mut engine, &tokens, |_| Ok(())).unwrap();
        engine.forward(&mut session.kv, &[7], Logits::Last).to_vec()
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
}

#[test]
fn a_permuted_store_gives_the_same_logits_and_keeps_the_permutation() {
    let dir = tempfile::tempdir().unwrap();
    let source = Source::open(&fixtures().join("opt"), None).unwrap();
    let (layers, ffn) = (source.config.layers().len(), source.config.widest_ffn() as u32);
    let orders: Vec<Vec<u32>> = (0..layers as u32).map(|l| (0..ffn).map(|n| (n * 5 + l) % ffn).collect()).collect();
    let orders: Vec<Permutation> = orders.iter().map(|order| Permutation::new(order).unwrap()).collect();
    let path = dir.path().join("permuted.neurons");
    pack(&source, &path, &PackOptions { types: Quant::F32.into(), orders: Some(orders.clone()) }, &|_, _| Ok(()))
        .unwrap();
    let permuted = Model::open(&path).unwrap();
    for (layer, order) in permuted.layers.iter().zip(&orders) {
        assert_eq!(&layer.order, order);
    }
    let logits = |model: Model| {
        let mut engine = Engine::new(model, 1, Kernels::best());
        let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
        engine.forward(&mut session.kv, &[3, 1, 4, 1, 5, 9], Logits::All).to_vec()
    };
    let error = relative_error(&logits(permuted), &logits(open("opt", Quant::F32, dir.path())));
    assert!(error < 1e-5, "relative error {error}");
}

#[test]
fn a_prompt_in_chunks_gives_the_logits_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let model = open("relullama", Quant::F32, dir.path());
    let tokens: Vec<u32> = (0..CHUNK as u32 + 10).map(|i| (i * 37 + 11) % model.config.vocab as u32).collect();
    let mut engine = Engine::new(model, 2, Kernels::best());
    let mut session = Session::new(&engine, tokens.len(), KvType::F32).unwrap();
    assert!(engine.forward(&mut session.kv, &tokens[..1], Logits::None).is_empty());
    session.rewind(0);
    let whole = engine.forward(&mut session.kv, &tokens, Logits::Last).to_vec();
    session.rewind(0);
    let by_chunks = session.append(&mut engine, &tokens, |_| Ok(())).unwrap();
    let error = relative_error(by_chunks, &whole);
    assert!(error < 1e-4, "relative error {error}");
    assert_eq!(session.tokens, tokens);
}

#[test]
fn a_context_that_cannot_be_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::new(open("opt", Quant::F32, dir.path()), 1, Kernels::best());
    let refused = |context: usize| Session::new(&engine, context, KvType::F16).map(|_| ()).unwrap_err();
    assert!(matches!(refused(257), Error::Usage(why) if why.contains("has 256 positions")));
    let session = Session::new(&engine, 256, KvType::F16).unwrap();
    assert!(matches!(session.check(&engine, &[0; 257]), Err(Error::Usage(_))));
    assert!(matches!(session.check(&engine, &[320]), Err(Error::Usage(_))));
    session.check(&engine, &[0; 256]).unwrap();
    for context in [1 << 56, usize::MAX] {
        for kind in [KvType::F16, KvType::F32] {
            let refused = KvCache::new(&engine.model.config, context, kind).map(|_| ());
            assert!(matches!(refused, Err(Error::Memory(_))), "{context}");
        }
    }
}

/// OPT as it was published: GPT-2's two vocabulary files and no tokenizer.json.
#[test]
fn vocab_and_merges_are_a_tokenizer_and_belong_to_the_source() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixtures().join("opt").join(file), dir.path().join(file)).unwrap();
    }
    std::fs::write(dir.path().join("vocab.json"), r#"{"a": 0, "b": 1, "ab": 2}"#).unwrap();
    assert!(Source::open(dir.path(), None).unwrap().tokenizer.is_none());
    std::fs::write(dir.path().join("merges.txt"), "#version: 0.2\na b\n").unwrap();
    let source = Source::open(dir.path(), None).unwrap();
    assert!(source.tokenizer.is_some());
    let names: Vec<&str> = source.files().iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["config.json", "merges.txt", "model.safetensors", "vocab.json"]);
    // What replaces a file while the model is packed makes the store stale.
    std::fs::write(dir.path().join("merges.txt"), "#version: 0.2\na b\n\n").unwrap();
    let store = dir.path().join("model.neurons");
    pack(&source, &store, &PackOptions { types: Quant::F32.into(), orders: None }, &|_, _| Ok(())).unwrap();
    assert_ne!(Model::open(&store).unwrap().store().unwrap().header.sources, source_files(dir.path()).unwrap());
}
