//! Laws of keys and values in every type: a text goes on from a copied, cut or reused cache as it went on from its own, and fewer bits cost
//! little.

mod support;

use dynamicinfer::Error;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::{KvCache, KvType};
use dynamicinfer::open::{EngineOptions, Quiet, open};
use dynamicinfer::prng::Prng;
use dynamicinfer::tokenizer::Special;
use std::path::Path;
use support::{error, opened};

const CONTEXT: usize = 256;

/// The demo model, whose heads have 64 numbers, and a text of its own kind.
fn demo() -> (Engine, Vec<u32>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let text = std::fs::read_to_string(root.join("heldout.txt")).unwrap();
    let options = EngineOptions { context: Some(CONTEXT), ..EngineOptions::new(root) };
    let opened = open(&options, &Quiet).unwrap();
    let tokens = opened.tokenizer().unwrap().encode_prompt(&text, Special::AsText).unwrap();
    (opened.engine, tokens)
}

fn cache(engine: &Engine, context: usize, kind: KvType) -> KvCache {
    KvCache::new(&engine.model.config, context, kind).unwrap()
}

/// Cuts, copies and other texts in between change no bit: what stood in a cache before is never read.
#[test]
fn a_text_goes_on_alike_from_a_copied_a_cut_and_a_reused_cache() {
    let (mut engine, text) = demo();
    let mut prng = Prng::new(7);
    for kind in KvType::ALL {
        let mut used = cache(&engine, CONTEXT, kind);
        for _ in 0..12 {
            used.truncate(prng.below(80) as usize);
            // A smaller cache, in which another text stood.
            let mut copy = cache(&engine, CONTEXT / 2, kind);
            engine.forward(&mut copy, &text[100..180], Logits::None);
            copy.copy_from(&used, used.len);
            // One by one, a few at once, and more than sparse kernels take.
            let n = [1, 5, 40][prng.below(3) as usize];
            let next = &text[prng.below(200) as usize..][..n];
            let want = engine.forward(&mut copy, next, Logits::Last).to_vec();
            assert_eq!(engine.forward(&mut used, next, Logits::Last), &want[..], "{}", kind.name());
        }
    }
}

/// A prompt in one chunk attends by tiles, token by token it attends by rows.
#[test]
fn a_prompt_reads_alike_in_every_way() {
    let (mut engine, text) = demo();
    for kind in KvType::ALL {
        let (mut whole, mut single) = (cache(&engine, CONTEXT, kind), cache(&engine, CONTEXT, kind));
        engine.forward(&mut whole, &text[..150], Logits::None);
        text[..150].iter().for_each(|&token| {
            engine.forward(&mut single, &[token], Logits::None);
        });
        let [whole, single] =
            [&mut whole, &mut single].map(|kv| engine.forward(kv, &text[150..151], Logits::Last).to_vec());
        // A key may round to a neighbouring code.
        let limit = if matches!(kind, KvType::F32) { 2e-3 } else { 6e-2 };
        assert!(error(&whole, &single) < limit, "{}: {}", kind.name(), error(&whole, &single));
    }
}

/// The mean difference of a token's logits from those with keys and values in f32, in standard deviations of the logits, is as small as the
/// bits say.
#[test]
fn fewer_bits_cost_little() {
    let (mut engine, text) = demo();
    let vocab = engine.model.config.vocab;
    let mut logits = |kind: KvType| {
        let mut kv = cache(&engine, CONTEXT, kind);
        engine.forward(&mut kv, &text[..200], Logits::All).to_vec()
    };
    let exact = logits(KvType::F32);
    let mut off = |kind: KvType| {
        let found = logits(kind);
        let each = found.chunks_exact(vocab).zip(exact.chunks_exact(vocab)).map(|(a, b)| {
            let mean = b.iter().sum::<f32>() / vocab as f32;
            let size = b.iter().map(|x| (x - mean).powi(2)).sum::<f32>();
            (a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / size).sqrt()
        });
        each.sum::<f32>() / 200.0
    };
    let [f16, q8, q4] = [KvType::F16, KvType::Q8_0, KvType::Q4_0].map(&mut off);
    eprintln!("off by {f16} in f16, {q8} in q8_0, {q4} in q4_0");
    assert!(f16 < q8 && q8 < q4, "{f16} {q8} {q4}");
    assert!(q8 < 0.01 && q4 < 0.15, "{q8} {q4}");
    let bytes = |kind| KvCache::bytes_for(&engine.model.config, 1000, kind) as f64;
    assert!(bytes(KvType::Q8_0) / bytes(KvType::F16) < 0.54 && bytes(KvType::Q4_0) / bytes(KvType::F16) < 0.29);
}

#[test]
fn heads_that_are_no_whole_blocks_are_refused_with_what_can_be_taken() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::new(opened(dir.path(), "llama", Quant::F32), 1, Kernels::best());
    for kind in KvType::ALL {
        match (kind, KvCache::new(&engine.model.config, 8, kind)) {
            (KvType::F16 | KvType::F32, made) => assert!(made.is_ok()),
            (_, Err(Error::Usage(why))) => {
                assert!(why.contains("this model's have 16") && why.contains("f16 or f32"), "{why}")
            }
            _ => panic!("{} was taken", kind.name()),
        }
    }
}
