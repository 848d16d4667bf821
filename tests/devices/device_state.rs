//! What lies on the device beside neurons: keys and values follow what happens to the host's, and predictors choose what they choose there.

use crate::support::law::{Case, FAMILIES, Stores, logits, slots, with_seeds};
use crate::support::{ON_DEVICE, RATES, error, on_device};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::{Choice, Engine, Logits, Sparsity};
use dynamicinfer::model::{KvCache, KvType};
use dynamicinfer::predictor::{Predictor, Sign};
use dynamicinfer::prng::Prng;
use std::sync::Arc;

/// Runs `tokens` and returns the logits of the last.
fn forward(engine: &mut Engine, kv: &mut KvCache, tokens: &[u32]) -> Vec<f32> {
    engine.forward(kv, tokens, Logits::Last).to_vec()
}

#[test]
fn keys_and_values_on_the_device_follow_what_happens_to_the_hosts() {
    let stores = Stores::new();
    with_seeds("keys_and_values_on_the_device_follow_what_happens_to_the_hosts", 60, |seed| {
        let mut prng = Prng::new(seed);
        // Those whose activation has no step.
        let family = [0, 2, 3, 4][(seed % 4) as usize];
        let open = || Engine::new(stores.open(family, 1), 1, Kernels::best());
        let (mut with, mut without) = (open(), open());
        let limit = Case { stores: &stores, family, quant: 1, kind: KvType::F16, sizes: &[34, 3, 34, 1, 2] }.limit();
        let slots = vec![with.model.config.widest_ffn() / 2; with.model.config.layers().len()];
        let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
        // SAFETY: the engine has both.
        with.split = Some(unsafe { on_device(&with.model, device, &slots) }.unwrap());
        // More sequences than the device has room for.
        let new = |_| KvCache::new(&with.model.config, ON_DEVICE, KvType::F16).unwrap();
        let mut ours: Vec<KvCache> = (0..3).map(new).collect();
        let mut theirs: Vec<KvCache> = (0..3).map(new).collect();
        for _ in 0..40 {
            let at = prng.below(3) as usize;
            match prng.below(6) {
                0 => {
                    let len = prng.below(ours[at].len as u64 + 1) as usize;
                    ours[at].rewind(len);
                    theirs[at].rewind(len);
                }
                1 => {
                    let from = (at + 1) % 3;
                    let len = prng.below(ours[from].len as u64 + 1) as usize;
                    for caches in [&mut ours, &mut theirs] {
                        let [to, from] = caches.get_disjoint_mut([at, from]).unwrap();
                        to.copy_from(from, len);
                    }
                }
                what => {
                    let n = if what == 2 { 34 } else { 1 + prng.below(3) as usize };
                    let n = n.min(ON_DEVICE - ours[at].len);
                    if n == 0 {
                        continue;
                    }
                    let tokens: Vec<u32> = (0..n).map(|_| 5 + prng.below(90) as u32).collect();
                    let found = forward(&mut with, &mut ours[at], &tokens);
                    let expected = forward(&mut without, &mut theirs[at], &tokens);
                    let off = error(&found, &expected);
                    assert!(off <= limit, "{n} tokens at {}: off by {off}", ours[at].len - n);
                }
            }
        }
    });
}

#[test]
fn a_predictor_on_the_device_chooses_what_it_chooses_on_the_host() {
    let stores = Stores::new();
    with_seeds("a_predictor_on_the_device_chooses_what_it_chooses_on_the_host", 30, |seed| {
        let mut prng = Prng::new(seed);
        let (family, quant) = (seed as usize % FAMILIES.len(), 1);
        let model = stores.open(family, quant);
        let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
        let ahead = (seed as usize % 3).min(layers - 1);
        let sign: Arc<dyn Predictor> = Arc::new(Sign::uncalibrated(&model));
        let choice = Choice::Predicted { predictor: sign, threshold: 0.5, activation_threshold: 0.0 };
        // Some layers are there whole: the host does not see what is chosen in them.
        let mut slots: Vec<usize> = (0..layers).map(|_| slots(&mut prng, ffn)).collect();
        slots[seed as usize % layers] = ffn;
        let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
        // SAFETY: as above.
        let mut split = unsafe { on_device(&model, device, &slots) }.unwrap();
        for (l, &slots) in slots.iter().enumerate() {
            let neurons: Vec<u32> = (0..slots as u32).collect();
            split.cache.load(&mut *split.device, l, bytemuck::cast_slice(&neurons)).unwrap();
        }
        split.cache.settle(&mut *split.device);
        let mut engine = Engine::new(model, 1, Kernels::best());
        engine.set_sparsity(Sparsity::new(vec![choice; layers], ahead).unwrap());
        let sizes = [3, 1, 1, 8, 1];
        let expected = logits(&mut engine, KvType::F32, &sizes, None);
        let computed = std::mem::take(&mut engine.report).computed;
        let before = split.bytes();
        split.upload_predictors(engine.sparsity(), &engine.model.config).unwrap();
        assert!(split.bytes() > before, "the predictor is not on the device");
        engine.split = Some(split);
        let off = error(&logits(&mut engine, KvType::F32, &sizes, None), &expected);
        assert!(off <= 1e-5 && engine.report.computed == computed, "off by {off}");
        assert!(computed.iter().sum::<u64>() < (14 * layers * ffn) as u64, "nothing was left out");
    });
}
