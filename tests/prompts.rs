//! THE LAW of two memories for prompts: whatever of a chunk's neurons lies in slots, is copied for it or is the CPU's, the logits are the
//! dense model's, and so are the counts of active neurons that the scheduler is told.

mod support;

use dynamicinfer::cache::NeuronCache;
use dynamicinfer::cpu::{Kernels, MAX_COLUMNS};
use dynamicinfer::device::{Faults, VirtualDevice};
use dynamicinfer::engine::{Engine, Migrator, Observer, Seen, Sparsity};
use dynamicinfer::model::KvType;
use dynamicinfer::prng::Prng;
use std::sync::{Arc, Mutex};
use support::law::{FAMILIES, FLIPPED, QUANTS, ROUNDED, Stores, all_exact, logits, slots, with_seeds};
use support::{RATES, error, on_device, streaming};

/// Layer, first position and tokens of a chunk, and in how many of them each neuron was active.
type Counted = (usize, usize, usize, Vec<u32>);

/// Hears how often neurons were active in prompts.
#[derive(Default)]
struct Hearing(Arc<Mutex<Vec<Counted>>>);

impl Migrator for Hearing {
    fn apply(&mut self, _cache: &mut NeuronCache, _sparsity: &mut Sparsity) {}

    fn prompt(&mut self, layer: usize, first: usize, tokens: usize, counts: &[u32]) {
        self.0.lock().unwrap().push((layer, first, tokens, counts.to_vec()));
    }
}

/// The same counts, from what an observer sees.
#[derive(Default)]
struct Watching(Vec<Counted>);

impl Observer for Watching {
    fn layer(&mut self, seen: &Seen<'_>) {
        let ffn = seen.activations.len() / seen.n;
        let active = |i: usize| seen.activations.iter().skip(i).step_by(ffn).filter(|a| **a != 0.0).count() as u32;
        if seen.n > MAX_COLUMNS {
            self.0.push((seen.layer, seen.first, seen.n, (0..ffn).map(active).collect()));
        }
    }
}

#[test]
fn logits_after_a_long_prompt_are_the_dense_ones_wherever_its_neurons_are_computed() {
    let stores = Stores::new();
    let (seen, told) = (Mutex::new([0f32; 2]), Mutex::new([0u64; 4]));
    let flipped = Mutex::new([0; 2]);
    let name = "logits_after_a_long_prompt_are_the_dense_ones_wherever_its_neurons_are_computed";
    with_seeds(name, 160, |seed| {
        let mut prng = Prng::new(seed);
        let (family, quant) = (prng.below(5) as usize, prng.below(6) as usize);
        let model = stores.open(family, quant);
        let (layers, ffn) = (model.config.layers, model.config.ffn);
        let first = MAX_COLUMNS + 1 + prng.below(100) as usize;
        let second = MAX_COLUMNS + 1 + prng.below(80) as usize;
        let sizes =
            [vec![first], vec![first, 1, second, 2], vec![5, first, second], vec![256]][prng.below(4) as usize].clone();
        let slots: Vec<usize> = (0..layers).map(|_| slots(&mut prng, ffn)).collect();
        let late = [0.0, 0.5][prng.below(2) as usize];
        let faults = Faults { late, lost: 0.0, reorder: prng.below(2) == 0, seed };
        let device = VirtualDevice::new(u64::MAX, RATES).with_faults(faults);
        // SAFETY: as above.
        let mut hybrid = unsafe { on_device(&model, Box::new(device), &slots) }.unwrap();
        for (l, &slots) in slots.iter().enumerate() {
            let filled = prng.below(slots as u64 + 1) as u32;
            let step = [1, 5, 7, 11][prng.below(4) as usize];
            let neurons: Vec<u32> = (0..filled).map(|i| (i * step + 3) % ffn as u32).collect();
            hybrid.cache.load(l, &neurons).unwrap();
        }
        // Some are still on their way when the prompt comes.
        if prng.below(2) == 0 {
            hybrid.cache.settle();
        }
        let streams = prng.below(4) != 0;
        if streams {
            streaming(&mut hybrid, &model, 4 + prng.below(40) as usize, [0.0, 0.3, 0.9][prng.below(3) as usize]);
        }
        let kind = [KvType::F32, KvType::F16][prng.below(2) as usize];
        let mut engine = Engine::new(model, 1 + prng.below(2) as usize, Kernels::best());
        let mut watching = Watching::default();
        // With somebody who looks on, a prompt is the CPU's; without, the device's.
        let expected = logits(&mut engine, kind, &sizes, Some(&mut watching));
        let hearing = Hearing::default();
        let heard = hearing.0.clone();
        hybrid.migrator = Some(Box::new(hearing));
        engine.hybrid = Some(hybrid);
        engine.set_sparsity(all_exact(layers));
        let found = logits(&mut engine, kind, &sizes, None);
        let (off, grouped) = (error(&found, &expected), QUANTS[quant].is_grouped());
        let most = match (grouped, kind) {
            // Ten times as many logits as of a short text: of 80,000 one is further off (0.05 with AVX2), so that what holds for most
            // is asked below. What kernels of grouped types compute is compared with the scalar truth
            // (tools/cuda_on_cpu/tests/dense_ffn.rs).
            (true, _) => 15.0 * FLIPPED,
            (false, KvType::F32) => 1e-5,
            (false, KvType::F16) => 2.0 * ROUNDED,
        };
        if grouped {
            let mut flipped = flipped.lock().unwrap();
            flipped[0] += usize::from(off > FLIPPED);
            flipped[1] += 1;
        }
        assert!(off <= most, "{} {} {sizes:?}: off by {off}", FAMILIES[family], QUANTS[quant].name());
        let heard = heard.lock().unwrap();
        assert_eq!(heard.len(), watching.0.len());
        let mut flips = 0;
        for (heard, seen) in heard.iter().zip(&watching.0) {
            assert_eq!((heard.0, heard.1, heard.2), (seen.0, seen.1, seen.2));
            flips += heard.3.iter().zip(&seen.3).map(|(a, b)| u64::from(a.abs_diff(*b))).sum::<u64>();
        }
        // A sum in another order may fall on the other side of zero.
        let pairs: u64 = watching.0.iter().map(|(.., counts)| counts.iter().map(|&c| u64::from(c)).sum::<u64>()).sum();
        assert!(flips <= if most > 1e-4 { pairs / 100 + 2 } else { 2 }, "{flips} of {pairs} are counted otherwise");
        let chunks = engine.hybrid.as_ref().unwrap().chunks;
        let long = sizes.iter().filter(|n| **n > MAX_COLUMNS).sum::<usize>();
        let all = [chunks.resident, chunks.streamed, chunks.on_cpu];
        assert_eq!(all.iter().sum::<u64>(), (long * layers * ffn) as u64);
        assert!(streams || chunks.streamed == 0);
        let mut told = told.lock().unwrap();
        told.iter_mut().zip(all.into_iter().chain([pairs])).for_each(|(sum, n)| *sum += n);
        let mut seen = seen.lock().unwrap();
        seen[usize::from(grouped)] = seen[usize::from(grouped)].max(off);
    });
    let (told, seen) = (*told.lock().unwrap(), *seen.lock().unwrap());
    eprintln!("resident, streamed, on the CPU, active: {told:?}; worst {seen:?}");
    if std::env::var_os("HYBRID_SEED").is_none() {
        assert!(told.iter().all(|&n| n > 300_000), "{told:?}: a part was not tried");
        let [far, of] = *flipped.lock().unwrap();
        assert!(far * 8 < of, "{far} of {of} grouped cases are further off than {FLIPPED}");
    }
}
