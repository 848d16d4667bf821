//! Laws of several timelines in one pass: each gets the logits that it gets alone, whatever runs beside it, when it joins and
//! when it leaves.

mod support;

use dynamicinfer::cpu::{Kernels, MAX_COLUMNS};
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::sampler::argmax;
use dynamicinfer::engine::{Choice, Column, Engine, Logits, Sparsity};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::prng::Prng;
use support::{RATES, error, on_device, packed};

/// Rope, learned positions, a sliding window, biases, and both kinds of sparse FFN.
const FAMILIES: [&str; 5] = ["llama", "opt", "mistral", "qwen2", "bamboo"];
const CONTEXT: usize = 96;
/// Sums of f32 in another order: tiles of several columns and units of a longer list of neurons.
const TOLERANCE: f32 = 2e-5;

fn engine(name: &str, exact: bool) -> Engine {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::open(&packed(dir.path(), name, Quant::F32)).unwrap();
    let layers = model.config.layers;
    let mut engine = Engine::new(model, 2, Kernels::best());
    if exact {
        engine.set_sparsity(Sparsity::new(vec![Choice::Exact { cut: 0.0 }; layers], 0).unwrap());
    }
    engine
}

fn cache(engine: &Engine) -> KvCache {
    KvCache::new(&engine.model.config, CONTEXT, KvType::F32).unwrap()
}

/// A prompt of its own for each timeline, of another length each.
fn prompt(of: usize) -> Vec<u32> {
    (0..3 + 5 * of as u32).map(|i| 5 + (i * 37 + of as u32 * 11) % 90).collect()
}

/// Greedy tokens and the logits that each was taken from.
fn alone(engine: &mut Engine, prompt: &[u32], n: usize) -> Vec<(u32, Vec<f32>)> {
    let mut kv = cache(engine);
    let mut logits = engine.forward(&mut kv, prompt, Logits::Last).to_vec();
    let mut out = Vec::new();
    for _ in 0..n {
        let token = argmax(&logits).unwrap();
        out.push((token, logits));
        logits = engine.forward(&mut kv, &[token], Logits::Last).to_vec();
    }
    out
}

/// Timeline i joins before step `i * 3` and makes `12 - i` tokens. Each step's logits are those of the run alone.
fn joining_and_leaving(engine: &mut Engine, what: &str) {
    let runs: Vec<_> = (0..4).map(|i| alone(engine, &prompt(i), 12 - i)).collect();
    let vocab = engine.model.config.vocab;
    let mut caches: Vec<KvCache> = runs.iter().map(|_| cache(engine)).collect();
    let mut made = vec![0; runs.len()];
    let mut most = 0;
    for step in 0.. {
        for (i, run) in runs.iter().enumerate().filter(|(i, _)| i * 3 == step) {
            let logits = engine.forward(&mut caches[i], &prompt(i), Logits::Last);
            assert!(error(logits, &run[0].1) < TOLERANCE, "{what}: the prompt of {i}");
        }
        // Another order of columns at each step.
        let there = |i: &usize| i * 3 <= step && made[*i] + 1 < runs[*i].len();
        let mut order: Vec<usize> = (0..runs.len()).filter(there).collect();
        if step % 2 == 1 {
            order.reverse();
        }
        if order.is_empty() && step > 9 {
            break;
        }
        let columns: Vec<Column> = order.iter().map(|&i| Column { cache: i, token: runs[i][made[i]].0 }).collect();
        if columns.is_empty() {
            continue;
        }
        most = most.max(columns.len());
        let logits = engine.forward_batch(&mut caches, &columns, Logits::All);
        for (&i, logits) in order.iter().zip(logits.chunks_exact(vocab)) {
            made[i] += 1;
            let (token, alone) = &runs[i][made[i]];
            assert!(error(logits, alone) < TOLERANCE, "{what}: step {step} of {i}: {}", error(logits, alone));
            assert_eq!(argmax(logits), Some(*token), "{what}: step {step} of {i}");
        }
    }
    assert_eq!(most, 4, "they never ran together");
}

#[test]
fn a_timeline_gets_the_same_logits_in_company_as_alone() {
    for name in FAMILIES {
        for exact in [false, true] {
            joining_and_leaving(&mut engine(name, exact), &format!("{name}, exact {exact}"));
        }
    }
}

#[test]
fn it_does_so_with_neurons_on_a_device() {
    let mut engine = engine("relullama", true);
    let slots = vec![engine.model.config.ffn / 3; engine.model.config.layers];
    let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
    // SAFETY: the engine has both.
    engine.hybrid = Some(unsafe { on_device(&engine.model, device, &slots) }.unwrap());
    joining_and_leaving(&mut engine, "relullama on a device");
}

#[test]
fn as_many_timelines_as_columns_run_together() {
    for exact in [false, true] {
        let mut engine = engine("relullama", exact);
        let vocab = engine.model.config.vocab;
        let mut caches: Vec<KvCache> = (0..MAX_COLUMNS).map(|_| cache(&engine)).collect();
        let mut expected = Vec::new();
        let mut columns = Vec::new();
        for (i, kv) in caches.iter_mut().enumerate() {
            let (prompt, token) = (prompt(i % 7), 5 + i as u32);
            let mut own = cache(&engine);
            engine.forward(&mut own, &prompt, Logits::None);
            expected.extend_from_slice(engine.forward(&mut own, &[token], Logits::Last));
            engine.forward(kv, &prompt, Logits::None);
            columns.push(Column { cache: i, token });
        }
        let together = engine.forward_batch(&mut caches, &columns, Logits::All);
        for (i, (got, want)) in together.chunks_exact(vocab).zip(expected.chunks_exact(vocab)).enumerate() {
            assert!(error(got, want) < TOLERANCE, "column {i}: {}", error(got, want));
        }
    }
}

/// A part of one timeline's prompt may go along with the others' tokens.
#[test]
fn a_prompt_goes_along_with_decoding() {
    let mut engine = engine("llama", false);
    let vocab = engine.model.config.vocab;
    let (long, short) = (prompt(3), prompt(0));
    let mut own = cache(&engine);
    let last_of_long = engine.forward(&mut own, &long, Logits::Last).to_vec();
    let mut caches = vec![cache(&engine), cache(&engine)];
    engine.forward(&mut caches[1], &short, Logits::None);
    let mut own = cache(&engine);
    engine.forward(&mut own, &short, Logits::None);
    let after_short = engine.forward(&mut own, &[9], Logits::Last).to_vec();
    // The short timeline's token stands in the middle of the long one's prompt.
    let mut columns: Vec<Column> = long.iter().map(|&token| Column { cache: 0, token }).collect();
    columns.insert(7, Column { cache: 1, token: 9 });
    let logits = engine.forward_batch(&mut caches, &columns, Logits::Last);
    assert_eq!(logits.len(), 2 * vocab);
    assert!(error(&logits[..vocab], &after_short) < TOLERANCE);
    assert!(error(&logits[vocab..], &last_of_long) < TOLERANCE);
    assert_eq!((caches[0].len, caches[1].len), (long.len(), short.len() + 1));
}

#[test]
fn a_copied_beginning_continues_as_the_original_does() {
    for kind in [KvType::F16, KvType::F32] {
        let mut engine = engine("llama", false);
        let prompt = prompt(4);
        let mut original = KvCache::new(&engine.model.config, CONTEXT, kind).unwrap();
        engine.forward(&mut original, &prompt, Logits::None);
        let mut copy = KvCache::new(&engine.model.config, CONTEXT / 2, kind).unwrap();
        engine.forward(&mut copy, &[1, 2, 3], Logits::None);
        for len in [1, 7, prompt.len() - 1] {
            copy.copy_from(&original, len);
            original.truncate(prompt.len());
            let (rest, mut again) = (&prompt[len..], KvCache::new(&engine.model.config, CONTEXT, kind).unwrap());
            again.copy_from(&original, len);
            let want = engine.forward(&mut again, rest, Logits::Last).to_vec();
            assert_eq!(engine.forward(&mut copy, rest, Logits::Last), &want[..]);
        }
    }
}

/// No result depends on what stood in a cache before.
#[test]
fn a_truncated_cache_is_as_good_as_a_new_one() {
    let mut engine = engine("llama", true);
    let mut prng = Prng::new(3);
    let mut used = cache(&engine);
    for _ in 0..20 {
        let tokens: Vec<u32> = (0..1 + prng.below(20)).map(|_| 5 + prng.below(90) as u32).collect();
        used.truncate(prng.below(30) as usize);
        let mut fresh = cache(&engine);
        fresh.copy_from(&used, used.len);
        let want = engine.forward(&mut fresh, &tokens, Logits::Last).to_vec();
        assert_eq!(engine.forward(&mut used, &tokens, Logits::Last), &want[..]);
    }
}
