//! Laws of prompts: read in chunks they give what they give token by token; exact prompts are as exact as f32; the answer does not depend on
//! the threads; and what is predicted after a prompt in int8 is what is predicted after an exact one.

use crate::support::{error, opened};
use dynamicinfer::cpu::{Isa, Kernels, Prefill};
use dynamicinfer::engine::session::{CHUNK, MAX_CHUNK};
use dynamicinfer::engine::{Engine, Logits, Session};
use dynamicinfer::error::Error;
use dynamicinfer::evaluation::evaluate::{Likelihood, Windows, likelihood};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::tokenizer::{Special, Tokenizer};
use std::path::{Path, PathBuf};

fn engine(name: &str, quant: Quant, threads: usize, kernels: Kernels) -> Engine {
    let dir = tempfile::tempdir().unwrap();
    Engine::new(opened(dir.path(), name, quant), threads, kernels)
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 5 + (i * 37 + i / 90 * 11) % 90).collect()
}

/// Logits after a prompt that is read as a session reads it.
fn in_chunks(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let mut session = Session::new(engine, tokens.len(), KvType::F32).unwrap();
    session.append(engine, tokens, |_| Ok(())).unwrap().to_vec()
}

/// The same, a few tokens at a time: `each` of them.
fn by_few(engine: &mut Engine, tokens: &[u32], each: usize) -> Vec<f32> {
    let mut kv = KvCache::new(&engine.model.config, tokens.len(), KvType::F32).unwrap();
    let mut logits = Vec::new();
    for few in tokens.chunks(each) {
        logits = engine.forward(&mut kv, few, Logits::Last).to_vec();
    }
    logits
}

/// Rope, a sliding window, biases, attention beside the FFN, normed queries, many queries to a key, experts, one of them for every token.
const FAMILIES: [&str; 17] = [
    "llama",
    "mistral",
    "qwen2",
    "falcon",
    "falcon-40b",
    "qwen3",
    "qwen3-moe",
    "qwen2-moe",
    "gemma3",
    "glm4-moe",
    "deepseek-v2",
    "deepseek-v3.gguf",
    "qwen35",
    "nemotron-h",
    "lfm2",
    "nemotron",
    "granite",
];

#[test]
fn a_prompt_in_chunks_gives_what_it_gives_token_by_token() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        for name in FAMILIES {
            let kernels = Kernels::of(isa).unwrap().with(Prefill::Exact);
            let mut engine = engine(name, Quant::F32, 2, kernels);
            // Plain kernels are slow: one family and the short prompts are enough.
            if isa == Isa::Portable && name != "llama" {
                continue;
            }
            let mut lengths = if isa == Isa::Portable { vec![1, 33] } else { vec![1, 33, 256, 257] };
            if name == "qwen3-moe" {
                lengths.push(MAX_CHUNK + 1);
            }
            for n in lengths {
                let tokens = tokens(n);
                let off = error(&in_chunks(&mut engine, &tokens), &by_few(&mut engine, &tokens, 1));
                assert!(off < 3e-5, "{name}, {n} tokens, {}: {off}", isa.name());
            }
        }
    }
}

#[test]
fn a_long_prompt_in_chunks_gives_what_it_gives_by_few() {
    // The last chunk lacks a token.
    let (mut engine, tokens) = (engine("llama", Quant::F32, 2, Kernels::best()), tokens(4095));
    let off = error(&in_chunks(&mut engine, &tokens), &by_few(&mut engine, &tokens, 32));
    assert!(off < 3e-5, "{off}");
}

/// Stopped before any layer of any chunk, a prompt leaves the sequence where the chunk before ended, and can be read on from there.
#[test]
fn a_prompt_that_is_stopped_between_layers_is_read_on_as_if_nothing_had_been() {
    for name in ["llama", "qwen3-moe"] {
        let mut engine = engine(name, Quant::F32, 2, Kernels::best());
        let (chunk, layers) = (engine.chunk(), engine.model.config.layers().len());
        assert_eq!(chunk, if name == "llama" { CHUNK } else { MAX_CHUNK });
        let tokens = tokens(2 * chunk + 40);
        let whole = in_chunks(&mut engine, &tokens);
        // Once before each layer, and once after each chunk.
        for asked in 0..3 * (layers + 1) {
            let mut session = Session::new(&engine, tokens.len(), KvType::F32).unwrap();
            let (mut looks, mut read) = (0, 0);
            let stopped = session.append(&mut engine, &tokens, |done| {
                assert!(done >= read && (done.is_multiple_of(chunk) || done == tokens.len()), "{done}");
                (looks, read) = (looks + 1, done);
                if looks > asked { Err(Error::Interrupted) } else { Ok(()) }
            });
            assert!(matches!(stopped, Err(Error::Interrupted)), "{name} {asked}");
            // Who was stopped between two chunks has the first of them.
            let chunks = asked / (layers + 1) + usize::from(asked % (layers + 1) == layers);
            let had = (chunks * chunk).min(tokens.len());
            assert_eq!((session.kv.len, session.tokens.len()), (had, had), "{name} {asked}");
            if had < tokens.len() {
                let rest = session.append(&mut engine, &tokens[had..], |_| Ok(())).unwrap();
                assert!(*rest == whole[..], "{name} {asked}");
            }
        }
    }
}

/// Logits of all tokens of one chunk: those of the last alone would come from a head that multiplies one column, as in decoding.
fn of_all(engine: &mut Engine, tokens: &[u32]) -> Vec<f32> {
    let mut kv = KvCache::new(&engine.model.config, tokens.len(), KvType::F32).unwrap();
    engine.forward(&mut kv, tokens, Logits::All).to_vec()
}

/// The portable kernels multiply GGUF's blocks by f32; so do exact prompts, with every instruction set. Prompts in int8 do not.
#[test]
fn exact_prompts_of_quantised_weights_are_as_exact_as_f32() {
    // Stores of smaller blocks have other types for the head, of which the portable kernels round inputs, too.
    let quant = Quant::Block(BlockType::Q8_0);
    let tokens = tokens(60);
    let truth = of_all(&mut engine("llama", quant, 1, Kernels::of(Isa::Portable).unwrap()), &tokens);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
        let off = |prefill| {
            let kernels = Kernels::of(isa).unwrap().with(prefill);
            error(&of_all(&mut engine("llama", quant, 2, kernels), &tokens), &truth)
        };
        let (exact, int8) = (off(Prefill::Exact), off(Prefill::Int8));
        assert!(exact < 3e-5, "{} {}: {exact}", quant.name(), isa.name());
        assert!(isa == Isa::Portable || int8 > 10.0 * exact, "{} {}: int8 {int8}", quant.name(), isa.name());
        assert!(int8 < 0.1, "{} {}: int8 {int8}", quant.name(), isa.name());
    }
}

#[test]
fn a_prompt_has_the_same_bits_with_any_number_of_threads() {
    for quant in [Quant::F16, Quant::Q8, Quant::Q4] {
        for prefill in [Prefill::Exact, Prefill::Int8, Prefill::Int8PerTensor] {
            let tokens = tokens(300);
            let logits = |threads| {
                let kernels = Kernels::best().with(prefill);
                in_chunks(&mut engine("llama", quant, threads, kernels), &tokens)
            };
            let one = logits(1);
            for threads in [2, 3] {
                let same = one.iter().zip(&logits(threads)).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{} {prefill:?}, {threads} threads", quant.name());
            }
        }
    }
}

/// The demo model's own text, after prompts of 256 tokens.
fn after_prompts(store: &Path, tokens: &[u32], kernels: Kernels) -> Likelihood {
    let mut engine = Engine::new(Model::open(store).unwrap(), 2, kernels);
    let windows = Windows { context: 356, prompt: 256, kv: KvType::F16 };
    likelihood(&mut engine, tokens, None, windows, None, |_, _| ()).unwrap()
}

/// A demo packed in a type, and four prompts of its held-out text with what follows them.
fn demo(name: &str, quant: Quant, dir: &Path) -> (PathBuf, Vec<u32>) {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let source = Source::open(&root.join("assets").join(name), None).unwrap();
    let store = dir.join(format!("{name}-{}.neurons", quant.name()));
    pack(&source, &store, &PackOptions { types: quant.into(), orders: None }, &|_, _| Ok(())).unwrap();
    let model = Model::open(&store).unwrap();
    let tokenizer = Tokenizer::new(model.tokenizer().unwrap(), &store).unwrap();
    let text = std::fs::read_to_string(root.join("assets/demo/heldout.txt")).unwrap();
    let mut tokens = tokenizer.encode_prompt(&text, Special::AsText).unwrap();
    tokens.truncate(4 * 356);
    (store, tokens)
}

/// The full size of it, forty prompts and 200 tokens after each, is in `runs/`.
#[test]
fn what_follows_a_prompt_in_int8_is_as_likely_as_after_an_exact_one() {
    let dir = tempfile::tempdir().unwrap();
    let (store, tokens) = demo("demo", Quant::Q8, dir.path());
    let [exact, int8] =
        [Prefill::Exact, Prefill::Int8].map(|prefill| after_prompts(&store, &tokens, Kernels::best().with(prefill)));
    assert_eq!((exact.tokens, int8.tokens, exact.windows), (4 * 100, 4 * 100, 4));
    let off = int8.perplexity / exact.perplexity - 1.0;
    eprintln!("perplexity {} after exact prompts, {:+.4} % after int8", exact.perplexity, 100.0 * off);
    assert!(off != 0.0, "the prompts were read alike");
    assert!(off.abs() < 0.003, "{:+.3} %", 100.0 * off);
}

/// By default, with every instruction set, a file of floats keeps what it has: a hundredth of a percent is what the same text differs by on two
/// processors anyway.
#[test]
fn what_follows_a_prompt_of_floats_is_as_likely_as_after_an_exact_one() {
    let dir = tempfile::tempdir().unwrap();
    for (name, quant) in [
        ("demo", Quant::F16),
        ("demo", Quant::Block(BlockType::BF16)),
        ("demo-silu", Quant::F16),
        ("demo-moe", Quant::F16),
    ] {
        let (store, tokens) = demo(name, quant, dir.path());
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported() && *isa != Isa::Portable) {
            let mut kernels = Kernels::of(isa).unwrap();
            // As the program has them without a device.
            kernels.rounds_floats = true;
            let [exact, rounded] =
                [Prefill::Exact, Prefill::Int8].map(|prefill| after_prompts(&store, &tokens, kernels.with(prefill)));
            let off = rounded.perplexity / exact.perplexity - 1.0;
            let what = format!("{name} {} {}: {:+.5} %", quant.name(), isa.name(), 100.0 * off);
            eprintln!("{what} of {}", exact.perplexity);
            assert!(off != 0.0 && off.abs() < 1e-4, "{what}");
        }
    }
}
