//! Laws of several sequences in one pass: each gets the logits that it gets alone, whatever runs beside it, when it joins and
//! when it leaves.

use crate::support::{RATES, assumed_machine, error, on_device, opened};
use dynamicinfer::cache::Tier;
use dynamicinfer::cpu::{Kernels, MAX_COLUMNS};
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::sampler::argmax;
use dynamicinfer::engine::{BatchToken, Choice, Engine, Logits, Sparsity};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::{KvCache, KvType};
use dynamicinfer::open::{VramBudget, place};
use dynamicinfer::placement::memory_plan::{Footprint, KvPlace, PartName, Request};
use dynamicinfer::prng::Prng;

/// Rope, learned positions, a sliding window, biases, both kinds of sparse FFN, attention beside the FFN, normed queries, experts, norms on
/// both sides with two rotations, a layer without experts in a mixture,
/// short convolutions, linear attention beside attention with a gate, values from the keys' matrix, keys of other layers.
const FAMILIES: [&str; 33] = [
    "llama",
    "opt",
    "mistral",
    "qwen2",
    "bamboo",
    "falcon",
    "falcon-40b",
    "minicpm",
    "qwen3",
    "qwen3-moe",
    "qwen2-moe",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "gemma4-e2b",
    "glm4-moe",
    "qwen35",
    "qwen35-moe",
    "qwen3-next",
    "nemotron-h",
    "nemotron-h-moe",
    "lfm2",
    "lfm2-moe",
    "deepseek-v2",
    "deepseek-v3.gguf",
    "glm4-moe-lite",
    "arcee",
    "nemotron",
    "granite",
    "phi4-mini.gguf",
    "starcoder2",
    "olmo2",
    "glm4.gguf",
];
const CONTEXT: usize = 96;
/// Sums of f32 in another order: tiles of several columns and units of a longer list of neurons.
const TOLERANCE: f32 = 2e-5;

fn engine(name: &str, exact: bool) -> Engine {
    let dir = tempfile::tempdir().unwrap();
    let model = opened(dir.path(), name, Quant::F32);
    let layers = model.config.layers().len();
    let mut engine = Engine::new(model, 2, Kernels::best());
    // Of whole matrices every neuron is computed.
    if exact && (engine.model.has_neurons() || engine.model.config.is_mixture()) {
        engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
    }
    engine
}

fn cache(engine: &Engine) -> KvCache {
    cache_of(engine, KvType::F32)
}

fn cache_of(engine: &Engine, kind: KvType) -> KvCache {
    KvCache::new(&engine.model.config, CONTEXT, kind).unwrap()
}

/// A prompt of its own for each timeline, of another length each.
fn prompt(of: usize) -> Vec<u32> {
    (0..3 + 5 * of as u32).map(|i| 5 + (i * 37 + of as u32 * 11) % 90).collect()
}

/// Greedy tokens and the logits that each was taken from.
fn alone(engine: &mut Engine, kind: KvType, prompt: &[u32], n: usize) -> Vec<(u32, Vec<f32>)> {
    let mut kv = cache_of(engine, kind);
    let mut logits = engine.forward(&mut kv, prompt, Logits::Last).to_vec();
    let mut out = Vec::new();
    for _ in 0..n {
        let token = argmax(&logits).unwrap();
        out.push((token, logits));
        logits = engine.forward(&mut kv, &[token], Logits::Last).to_vec();
    }
    out
}

/// Timeline i joins before step `i * 3`, its prompt in pieces beside the others' tokens, and makes `20 - i` tokens. Each step's logits are
/// those of the run alone.
fn joining_and_leaving(engine: &mut Engine, kind: KvType, what: &str) {
    // A sum in another order may round to another f16.
    let tolerance = if kind == KvType::F16 { 5e-4 } else { TOLERANCE };
    let runs: Vec<_> = (0..4).map(|i| alone(engine, kind, &prompt(i), 20 - i)).collect();
    let vocab = engine.model.config.vocab;
    let mut caches: Vec<KvCache> = runs.iter().map(|_| cache_of(engine, kind)).collect();
    let (mut read, mut made) = (vec![0; runs.len()], vec![0; runs.len()]);
    let (mut most, mut beside) = (0, 0);
    for step in 0.. {
        let answers = |i: &usize| read[*i] == prompt(*i).len() && made[*i] + 1 < runs[*i].len();
        let mut order: Vec<usize> = (0..runs.len()).filter(answers).collect();
        // Another order of columns at each step.
        if step % 2 == 1 {
            order.reverse();
        }
        let mut columns: Vec<BatchToken> =
            order.iter().map(|&i| BatchToken { sequence: i, token: runs[i][made[i]].0 }).collect();
        most = most.max(columns.len());
        order.iter().for_each(|&i| made[i] += 1);
        for i in (0..runs.len()).filter(|i| i * 3 <= step) {
            let prompt = prompt(i);
            let piece = &prompt[read[i]..prompt.len().min(read[i] + 3 + i)];
            if !piece.is_empty() {
                beside += order.len();
                order.push(i);
                columns.extend(piece.iter().map(|&token| BatchToken { sequence: i, token }));
                read[i] += piece.len();
            }
        }
        if columns.is_empty() {
            assert!(step > 9);
            break;
        }
        let logits = engine.forward_batch(&mut caches, &columns, Logits::Last);
        assert_eq!(logits.len(), order.len() * vocab);
        for (&i, logits) in order.iter().zip(logits.chunks_exact(vocab)) {
            if read[i] < prompt(i).len() {
                continue;
            }
            let (token, alone) = &runs[i][made[i]];
            assert!(error(logits, alone) < tolerance, "{what}: step {step} of {i}: {}", error(logits, alone));
            if kind == KvType::F32 {
                assert_eq!(argmax(logits), Some(*token), "{what}: step {step} of {i}");
            }
        }
    }
    assert!(most == 4 && beside > 6, "they never ran together: {most} {beside}");
}

#[test]
fn a_timeline_gets_the_same_logits_in_company_as_alone() {
    for name in FAMILIES {
        for exact in [false, true] {
            joining_and_leaving(&mut engine(name, exact), KvType::F32, &format!("{name}, exact {exact}"));
        }
    }
}

#[test]
fn it_does_so_with_neurons_on_a_device() {
    let mut engine = engine("relullama", true);
    let slots = vec![engine.model.config.widest_ffn() / 3; engine.model.config.layers().len()];
    let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
    // SAFETY: the engine has both.
    engine.split = Some(unsafe { on_device(&engine.model, device, &slots) }.unwrap());
    joining_and_leaving(&mut engine, KvType::F32, "relullama on a device");
}

/// Of four sequences, none to all have their keys and values on the device: where there are too few places for a pass, attention is
/// the CPU's, and a place that changes hands is filled anew.
#[test]
fn it_does_so_with_keys_and_values_of_some_timelines_on_a_device() {
    for name in ["relullama", "opt", "mistral"] {
        let mut engine = engine(name, name == "relullama");
        let slots = vec![engine.model.config.widest_ffn() / 3; engine.model.config.layers().len()];
        let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
        // SAFETY: the engine has both.
        engine.split = Some(unsafe { on_device(&engine.model, device, &slots) }.unwrap());
        for sequences in [1, 4, 0, 3, 2] {
            let model = engine.model.clone();
            let split = engine.split.as_mut().unwrap();
            split.set_sequences(&model, CONTEXT, 0).unwrap();
            let without = split.bytes();
            split.set_sequences(&model, CONTEXT, sequences).unwrap();
            let each = KvCache::bytes_for(&model.config, CONTEXT, KvType::F16);
            let small = 64 * (8 + model.config.attention(0).unwrap().head_dim as u64 * 4);
            let bytes = split.bytes() - without;
            let least = sequences as u64 * each;
            assert!(bytes >= least && bytes <= least + small, "{sequences} sequences: {bytes} bytes");
            joining_and_leaving(&mut engine, KvType::F16, &format!("{name}, {sequences} on the device"));
        }
    }
}

/// A budget has room for the keys and values of some sequences; another one has it for fewer, and gives them back.
#[test]
fn a_budget_decides_how_many_timelines_lie_on_the_device() {
    let mut engine = engine("relullama", true);
    let (layers, ffn) = (engine.model.config.layers().len(), engine.model.config.widest_ffn());
    let footprint = Footprint::of_model(&engine.model, CONTEXT, KvType::F16);
    let request = Request {
        vram: None,
        ram: None,
        ffn_share: None,
        kv: KvPlace::Spare,
        sequences: 3,
        predictor_bytes: 0,
        computed_share: 1.0,
        ilp_seconds: None,
        chunk: None,
        host: None,
        streamed_layers: Some(0),
        skips_host: false,
    };
    let machine = assumed_machine();
    let budgeter = VramBudget { footprint, counts: vec![vec![1; ffn]; layers], machine, request };
    let full = budgeter.plan(u64::MAX).unwrap().full_bytes;
    let (embeddings, kv) = (footprint.embeddings_bytes, footprint.kv_bytes);
    let plan = budgeter.plan(full).unwrap();
    assert_eq!((plan.sequences, plan.total_bytes), (3, full));
    let neurons = budgeter.placed(&vec![ffn; layers]);
    place(&mut engine, Box::new(VirtualDevice::new(full, RATES)), &plan, &budgeter.machine, &neurons, true).unwrap();
    let least = plan.without_neurons_bytes;
    for (vram, sequences) in [(full, 3), (full - embeddings - 1, 2), (full - embeddings - kv, 2), (least, 0), (full, 3)]
    {
        let plan = budgeter.set(&mut engine, vram).unwrap();
        let split = engine.split.as_ref().unwrap();
        assert_eq!((plan.sequences, split.sequences()), (sequences, sequences), "{vram} of {full}");
        let sizes = (PartName::Kv, sequences as u64 * kv, (3 - sequences as u64) * kv);
        assert!(plan.parts.iter().any(|p| (p.name, p.bytes[Tier::Device], p.bytes[Tier::Host]) == sizes));
        let memory = split.device.memory();
        assert!(memory.budget == vram && memory.used <= vram, "{memory:?}");
        joining_and_leaving(&mut engine, KvType::F16, &format!("{sequences} by the budget"));
    }
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
            columns.push(BatchToken { sequence: i, token });
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
    let mut columns: Vec<BatchToken> = long.iter().map(|&token| BatchToken { sequence: 0, token }).collect();
    columns.insert(7, BatchToken { sequence: 1, token: 9 });
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
            original.rewind(prompt.len());
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
        used.rewind(prng.below(30) as usize);
        let mut fresh = cache(&engine);
        fresh.copy_from(&used, used.len);
        let want = engine.forward(&mut fresh, &tokens, Logits::Last).to_vec();
        assert_eq!(engine.forward(&mut used, &tokens, Logits::Last), &want[..]);
    }
}
