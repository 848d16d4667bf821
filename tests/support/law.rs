//! What the laws of two memories share: fixtures in every type, seeds, and logits of a text.

use super::packed;
use dynamicinfer::engine::{Choice, Engine, Logits, Observer, Sparsity};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::prng::Prng;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Mutex;

pub const FAMILIES: [&str; 5] = ["relullama", "prosparse", "bamboo", "opt", "llama-relu2"];
/// Half of the cases in f32, where nothing but the order of sums differs.
pub const QUANTS: [Quant; 6] = [Quant::F32, Quant::F32, Quant::F32, Quant::F16, Quant::Q8, Quant::Q4];

/// How far logits of grouped types may be off. Their inputs are rounded to int8: a sum that is taken in another order, and differs
/// in its last bit, can round to the next code. Without any device, 49 of 180 q8_0 runs over stores that are permuted, and
/// otherwise the same, differ by 1e-3 to 1e-2 from the plain one. The strict law for these types is that of a layer, below.
pub const FLIPPED: f32 = 2e-2;
/// What keys and values in f16 may put logits off: a number that rounds up instead of down differs by half of this share of itself, and
/// there are two layers of them.
pub const ROUNDED: f32 = 1e-3;

/// The seeds of a test: all below `count`, or the one that is to be repeated.
pub fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("HYBRID_SEED") {
        Ok(seed) => vec![seed.parse().expect("HYBRID_SEED is a number")],
        Err(_) => (0..count).collect(),
    }
}

/// Runs `case` for each seed; a failure names its own.
pub fn with_seeds(test: &str, count: u64, case: impl Fn(u64) + std::panic::RefUnwindSafe) {
    for seed in seeds(count) {
        if let Err(panic) = std::panic::catch_unwind(|| case(seed)) {
            eprintln!("seed {seed}; repeat it with\n  HYBRID_SEED={seed} cargo test {test}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Packed fixtures, by family and type.
pub struct Stores {
    dir: tempfile::TempDir,
    paths: Mutex<HashMap<(usize, usize), PathBuf>>,
}

impl Stores {
    pub fn new() -> Stores {
        Stores { dir: tempfile::tempdir().unwrap(), paths: Mutex::default() }
    }

    pub fn open(&self, family: usize, quant: usize) -> Model {
        let mut paths = self.paths.lock().unwrap();
        let path =
            paths.entry((family, quant)).or_insert_with(|| packed(self.dir.path(), FAMILIES[family], QUANTS[quant]));
        Model::open(path).unwrap()
    }
}

/// Logits of every token, run in passes of `sizes`.
pub fn logits(engine: &mut Engine, kind: KvType, sizes: &[usize], mut observer: Option<&mut dyn Observer>) -> Vec<f32> {
    let ids: Vec<u32> = (0..sizes.iter().sum::<usize>() as u32).map(|i| 5 + i * 37 % 90).collect();
    let mut kv = KvCache::new(&engine.model.config, ids.len(), kind).unwrap();
    let (mut out, mut rest) = (Vec::new(), &ids[..]);
    for &n in sizes {
        let (now, after) = rest.split_at(n);
        match &mut observer {
            None => out.extend_from_slice(engine.forward(&mut kv, now, Logits::All)),
            Some(observer) => out.extend_from_slice(engine.forward_observed(&mut kv, now, Logits::All, *observer)),
        }
        rest = after;
    }
    out
}

pub fn all_exact(layers: usize) -> Sparsity {
    Sparsity::new(vec![Choice::Exact { cut: 0.0 }; layers], 0).unwrap()
}

/// Slots of a layer with `ffn` neurons: nothing, everything and all between.
pub fn slots(prng: &mut Prng, ffn: usize) -> usize {
    match prng.below(4) {
        0 => 0,
        1 => ffn,
        _ => prng.below(ffn as u64 + 1) as usize,
    }
}
