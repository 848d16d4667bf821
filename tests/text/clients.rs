//! Several texts share a device: each finds its neurons again when it goes on, and a batch is served for all its texts.

use dynamicinfer::cache::{Slot, Tier};
use dynamicinfer::engine::{BatchToken, Engine, Logits, Observer, Seen};
use dynamicinfer::ids::PublishedId;
use dynamicinfer::lab::bound::Keeping;
use dynamicinfer::model::KvCache;
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, open};
use dynamicinfer::predictor::Kind;
use dynamicinfer::tokenizer::Special;
use std::path::Path;

/// The first tokens of a text after which its neurons are expected to have come.
const SETTLING: usize = 20;
const TOKENS: usize = 120;

/// The demo model on the virtual device with half of its neurons there; the text of the demo, and a list of sums.
fn opened() -> (Opened, [Vec<u32>; 2]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut options = EngineOptions { context: Some(2 * TOKENS), ..EngineOptions::new(root.join("assets/demo")) };
    options.sparsity.predictor = Kind::Mlp.into();
    options.device = Some(DeviceOptions {
        ffn_share: Some(0.5),
        machine: Some(root.join("profiles/machines/demo-pc.toml")),
        history: false,
        ..DeviceOptions::new(DeviceKind::Virtual)
    });
    let opened = open(&options, &Quiet).unwrap();
    let story = std::fs::read_to_string(root.join("assets/demo/heldout.txt")).unwrap();
    let sums: String = (0..200).map(|i| format!("{i} + {} = {}; ", 2 * i + 1, 3 * i + 1)).collect();
    let tokenizer = opened.tokenizer().unwrap();
    let tokens = |text: &str| tokenizer.encode_prompt(text, Special::AsText).unwrap()[..TOKENS].to_vec();
    let texts = [tokens(&story), tokens(&sums)];
    (opened, texts)
}

/// Neurons that were computed, on the host and on the device.
fn computed(engine: &Engine) -> [u64; 2] {
    let of = engine.split.as_ref().unwrap().cache.counters.computed;
    [of[Tier::Host], of[Tier::Device]]
}

/// The device's share of what was computed since `before`, in percent.
fn share(engine: &Engine, before: [u64; 2]) -> f64 {
    let [host, device] = [0, 1].map(|tier| (computed(engine)[tier] - before[tier]) as f64);
    100.0 * device / (host + device)
}

/// Decodes some tokens of a text, after those that its cache has, one by one. Returns the device's share after the first
/// [`SETTLING`] tokens of them, in percent.
fn go_on(engine: &mut Engine, kv: &mut KvCache, text: &[u32], tokens: usize) -> f64 {
    let mut before = [0; 2];
    for i in 0..tokens {
        if i == SETTLING {
            before = computed(engine);
        }
        engine.forward(kv, &text[kv.len..][..1], Logits::Last);
    }
    share(engine, before)
}

#[test]
fn two_clients_in_turns_have_what_each_has_alone() {
    let alone = [0, 1].map(|client: usize| {
        let (Opened { mut engine, .. }, texts) = opened();
        let mut kv = KvCache::new(&engine.model.config, 2 * TOKENS, dynamicinfer::model::KvType::F16).unwrap();
        [0, 1].map(|_| go_on(&mut engine, &mut kv, &texts[client], TOKENS / 2))
    });
    let (Opened { mut engine, .. }, texts) = opened();
    let cache = || KvCache::new(&engine.model.config, 2 * TOKENS, dynamicinfer::model::KvType::F16).unwrap();
    let mut caches = [cache(), cache()];
    for (turn, client) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let here = go_on(&mut engine, &mut caches[client], &texts[client], TOKENS / 2);
        let alone = alone[client][turn];
        println!("turn {turn}, client {client}: {here:.2} % on the device, alone {alone:.2} %");
        assert!(here > alone - 1.0, "{here} % beside another, alone {alone} %");
    }
    assert_eq!(engine.split.as_ref().unwrap().migrator.as_ref().unwrap().counts().sequences, 2);
}

/// By layer and neuron, the tokens for which it is active.
struct Uses(Vec<Vec<Vec<u32>>>);

impl Observer for Uses {
    fn layer(&mut self, seen: &Seen<'_>) {
        for (neuron, uses) in self.0[seen.layer].iter_mut().enumerate() {
            if seen.activations[neuron] != 0.0 && uses.last() != Some(&(seen.first as u32)) {
                uses.push(seen.first as u32);
            }
        }
    }
}

#[test]
fn a_batch_of_two_texts_has_nine_tenths_of_what_who_knows_the_future_could_give_it() {
    let (Opened { mut engine, .. }, texts) = opened();
    let config = engine.model.config.clone();
    let cache = || KvCache::new(&config, 2 * TOKENS, dynamicinfer::model::KvType::F16).unwrap();
    // Who lies where at the beginning.
    let begin = engine.split.as_ref().unwrap().cache.layers.iter().map(|layer| {
        let resident = |slot: &Slot| match slot {
            Slot::Resident(neuron) => Some(PublishedId(neuron.0)),
            Slot::Free | Slot::Filling(_) => None,
        };
        layer.table.slots().iter().filter_map(resident).collect::<Vec<_>>()
    });
    let (begin, block): (Vec<_>, _) = (begin.collect(), engine.model.layers[0].block().bytes());
    let mut caches = [cache(), cache()];
    for (&first, &second) in texts[0].iter().zip(&texts[1]) {
        let batch = [BatchToken { sequence: 0, token: first }, BatchToken { sequence: 1, token: second }];
        engine.forward_batch(&mut caches, &batch, Logits::Last);
    }
    let ours = share(&engine, [0; 2]);
    let counters = engine.split.as_ref().unwrap().cache.counters;
    let mut uses = Uses(vec![vec![Vec::new(); config.widest_ffn()]; config.layers().len()]);
    let mut merged = uses.0.clone();
    let (Opened { engine: mut other, .. }, _) = opened();
    other.split = None;
    for text in &texts {
        let mut kv = cache();
        for &token in text {
            other.forward_observed(&mut kv, &[token], Logits::Last, &mut uses);
        }
        for (all, here) in merged.iter_mut().flatten().zip(uses.0.iter_mut().flatten()) {
            all.append(here);
            all.sort_unstable();
            all.dedup();
        }
    }
    // As `lab::bound::bound`: kept uses, and as many loads as the link of demo-pc carries in the time that the passes took.
    let loads = (0.1831 * counters.pass_ns as f64 / block as f64) as u64;
    let (mut all, mut kept) = (0, 0);
    for (layer, begin) in merged.iter().zip(&begin) {
        all += layer.iter().map(|uses| uses.len() as u64).sum::<u64>();
        let mut keeping = Keeping::new(layer.len(), begin, begin.len(), TOKENS);
        for token in 0..TOKENS {
            let used = |uses: &Vec<u32>| uses.binary_search(&(token as u32)).is_ok();
            let now: Vec<u32> = (0..layer.len()).filter(|&n| used(&layer[n])).map(|n| n as u32).collect();
            keeping.token(token, &now);
        }
        kept += keeping.kept;
    }
    let bound = 100.0 * (kept + loads).min(all) as f64 / all as f64;
    println!("{ours:.1} % on the device, {bound:.1} % by who knows the future");
    assert!(ours >= 0.9 * bound, "{ours} % of at most {bound} %");
}
