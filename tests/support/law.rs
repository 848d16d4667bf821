//! What the laws of two memories share: fixtures in every type, seeds, and logits of a text.

use super::{error, packed};
use dynamicinfer::cache::{Frames, Migration, NeuronCache, NotBegun, Refused};
use dynamicinfer::cpu::{Isa, Kernels};
use dynamicinfer::device::Device;
use dynamicinfer::engine::{Choice, Engine, Logits, Migrator, Observer, Seen, Sparsity, Split};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::{LayerId, SlotId, StoreId};
use dynamicinfer::model::config::Activation;
use dynamicinfer::model::layer::Mixer;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model, ModelConfig};
use dynamicinfer::pack::mix::Mix;
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::prng::Prng;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub const FAMILIES: [&str; 16] = [
    "relullama",
    "prosparse",
    "bamboo",
    "opt",
    "llama-relu2",
    "falcon",
    "relufalcon",
    "minicpm",
    "gemma3 with relu",
    "gemma3 with relu, normed behind only",
    "lfm2 with relu",
    "gemma4 with relu",
    "arcee",
    "nemotron",
    "olmo2 with relu",
    "glm4 with relu",
];
/// Half of the cases in f32, where nothing but the order of sums differs.
pub const QUANTS: [Quant; 6] = [Quant::F32, Quant::F32, Quant::F32, Quant::F16, Quant::Q8, Quant::Q4];

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

/// Moves experts or neurons at random: any layer, any slot, before any layer of any token.
pub struct Restless {
    pub prng: Prng,
    /// Clusters of a layer.
    pub clusters: u64,
    /// Fewer moves than this before a layer.
    pub most: u64,
    /// Moves that were begun.
    pub begun: Arc<Mutex<u64>>,
}

impl Migrator for Restless {
    fn apply(
        &mut self,
        _: usize,
        _: bool,
        device: &mut dyn Device,
        cache: &mut NeuronCache,
        _: Option<&mut dyn Frames>,
        _: &mut Sparsity,
    ) {
        let layers = cache.layers.len() as u64;
        for _ in 0..self.prng.below(self.most) {
            let layer = self.prng.below(layers) as usize;
            let slots = cache.layers[layer].table.slots().len() as u64;
            if slots == 0 {
                continue;
            }
            let slot = SlotId(self.prng.below(slots) as u32);
            let neuron = StoreId(self.prng.below(self.clusters) as u32);
            match cache.migrate(device, Migration { layer: LayerId::new(layer), slot, neuron }) {
                Ok(()) => *self.begun.lock().unwrap() += 1,
                Err(NotBegun::Refused(Refused::OutOfRange)) => panic!("slot {slot:?}, cluster {neuron:?}"),
                Err(NotBegun::Refused(Refused::Busy | Refused::AlreadyThere) | NotBegun::Full) => {}
            }
        }
    }
}

impl Restless {
    /// Fills the slots of some layers, from the cluster on that `first` draws for a layer, and moves others from then on, or nothing does.
    pub fn unsettle(
        self,
        split: &mut Split,
        prng: &mut Prng,
        slots: &[usize],
        first: impl Fn(&mut Prng, usize) -> usize,
    ) {
        for (l, &slots) in slots.iter().enumerate() {
            if prng.below(2) == 0 {
                let first = first(prng, l);
                let some: Vec<StoreId> =
                    (0..slots).map(|i| StoreId::new((first + i) % self.clusters as usize)).collect();
                split.cache.load(&mut *split.device, l, &some).expect("they fit and none is named twice");
                split.cache.settle(&mut *split.device);
            }
        }
        split.cache.barrier = prng.below(3) == 0;
        if prng.below(4) != 0 {
            split.migrator = Some(Box::new(self));
        }
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

/// What a law compares with: the dense logits of a text, computed by the CPU alone.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub stores: &'a Stores,
    pub family: usize,
    pub quant: usize,
    pub kind: KvType,
    /// Tokens of each pass.
    pub sizes: &'a [usize],
}

/// A gate sum of the dense model.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    pub layer: usize,
    pub token: usize,
    pub neuron: usize,
    pub sum: f32,
}

/// All gate sums of a text.
#[derive(Default)]
struct Gates(Vec<Gate>);

impl Observer for Gates {
    fn layer(&mut self, seen: &Seen<'_>) {
        let ffn = seen.gates.len() / seen.n;
        let of =
            |(i, &sum): (usize, &f32)| Gate { layer: seen.layer, token: seen.first + i / ffn, neuron: i % ffn, sum };
        self.0.extend(seen.gates.iter().enumerate().map(of));
    }
}

/// How logits agree with the dense ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// As [`error`].
    pub off: f32,
    /// The limit that holds for it.
    pub limit: f32,
    /// Gates that lie within rounding of the activation's step and fell on its other side: the dense model with this activation has the
    /// same logits.
    pub flipped: Option<Activation>,
}

impl Case<'_> {
    pub fn name(&self) -> String {
        format!("{} {} {:?} {:?}", FAMILIES[self.family], QUANTS[self.quant].name(), self.kind, self.sizes)
    }

    /// The dense model on the CPU, with another activation than its own.
    pub fn with(&self, activation: Activation) -> Engine {
        self.engine(self.quant, Some(activation))
    }

    fn engine(&self, quant: usize, activation: Option<Activation>) -> Engine {
        let mut model = self.stores.open(self.family, quant);
        model.config.activation = activation.unwrap_or(model.config.activation);
        Engine::new(model, 1, Kernels::best())
    }

    /// As [`summed`].
    pub fn summed(&self) -> f32 {
        summed(&self.stores.open(self.family, self.quant).config, self.sizes)
    }

    /// How far the types of this case put the dense logits off by rounding: inputs of grouped weights to int8, keys and values to f16. A
    /// sum that differs in its last bit can round to the next number, and so does everything after it; but two ways to compute the same
    /// differ by no more than rounding does. Both grouped types round their inputs alike, and q4_0 its weights far more: q8_0 stands for
    /// both.
    fn rounded(&self) -> f32 {
        let grouped = QUANTS[self.quant].is_grouped();
        let rounding = if grouped { Q8 } else { self.quant };
        let without = if grouped { F32 } else { self.quant };
        if rounding == without && self.kind == KvType::F32 {
            return 0.0;
        }
        let with = logits(&mut self.engine(rounding, None), self.kind, self.sizes, None);
        error(&with, &logits(&mut self.engine(without, None), KvType::F32, self.sizes, None))
    }

    /// How far off logits may be that are computed otherwise than the dense ones, and that no gate explains.
    pub fn limit(&self) -> f32 {
        self.summed() + self.rounded()
    }

    /// Whether `found` agrees with `expected`, the dense logits. Where they are further apart than sums and rounding can put them, a gate
    /// has to be the reason that lies within rounding of the activation's step, and the logits have to be those of the dense model whose
    /// step leaves that gate on the other side: ReLU has no step, fatrelu(t) jumps by t.
    ///
    /// # Panics
    /// If they do not agree.
    pub fn agrees(&self, found: &[f32], expected: &[f32], limit: f32) -> Agreement {
        let off = error(found, expected);
        if off <= limit {
            return Agreement { off, limit, flipped: None };
        }
        let activation = self.stores.open(self.family, self.quant).config.activation;
        let Activation::Fatrelu(step) = activation else {
            panic!("{}: off by {off}, and sums and rounding allow {limit}", self.name());
        };
        let mut gates = Gates::default();
        logits(&mut self.engine(self.quant, None), self.kind, self.sizes, Some(&mut gates));
        let top = gates.0.iter().fold(0f32, |top, gate| top.max(gate.sum.abs()));
        let mut near: Vec<Gate> = gates.0.into_iter().filter(|gate| (gate.sum - step).abs() <= limit * top).collect();
        near.sort_by(|a, b| (a.sum - step).abs().total_cmp(&(b.sum - step).abs()));
        let near = &near[..near.len().min(NEAREST)];
        for gate in near {
            // Beyond this gate's sum: the nearest ones of its side, up to this one, flip.
            let moved = if gate.sum > step { gate.sum } else { gate.sum.next_down() };
            let flipped = Some(Activation::Fatrelu(moved));
            let left = error(found, &logits(&mut self.engine(self.quant, flipped), self.kind, self.sizes, None));
            if left <= limit {
                eprintln!("{}: {gate:?} falls on the other side of {step}: {off} becomes {left}", self.name());
                return Agreement { off, limit, flipped };
            }
        }
        panic!(
            "{}: off by {off} where {limit} is allowed; none of the gates at the step explains it: {near:?}",
            self.name()
        );
    }
}

/// What sums in another order may put logits off, as [`error`] counts it. A sum of n numbers that round by 2^-24 of themselves at most
/// is off by some sqrt(n) of it; along a token's way these errors add up like random numbers, and of the hundred thousand logits that
/// a law looks at the furthest is 4.5 deviations off.
pub fn summed(c: &ModelConfig, sizes: &[usize]) -> f32 {
    let positions = sizes.iter().sum::<usize>();
    let mixed = |mixer: Mixer| match mixer {
        Mixer::Attention(attention) => c.hidden + attention.head_dim + positions + mixer.cols(),
        // A product of three sums is as far off as all of them together.
        Mixer::Convolution(convolution) => 3 * c.hidden + convolution.taps + mixer.cols(),
        // A state is a sum over positions, read by a sum over a key's numbers, with a product of both at the end.
        Mixer::Linear(linear) => 3 * (c.hidden + linear.taps) + 3 * linear.key_dim + positions + mixer.cols(),
    };
    let terms = c.mixers().map(mixed).sum::<usize>() + c.layers().len() * (c.hidden + c.widest_ffn()) + c.hidden;
    4.5 * (terms as f32).sqrt() * 2f32.powi(-24)
}

/// Stores of GGUF fixtures whose tensors keep their types, with `down` coded again as different ones, and of mixes, whose layers differ in
/// the type of `down`; and their names.
pub fn mixed_stores(dir: &Path) -> Vec<(String, PathBuf)> {
    let down = |quant| Types::Own { down: quant };
    let mixes = [
        ("k256.q4_k_m", down(Quant::Block(BlockType::Q5_K))),
        ("k256.q6_k", down(Quant::Block(BlockType::Q5_K))),
        ("k256.q4_k_m", down(Quant::Q8)),
        ("k256.q6_k", down(Quant::Block(BlockType::IQ4_XS))),
        ("k256.q6_k", Types::Mix(Mix::Q4KM)),
        ("k256.q6_k", Types::Mix(Mix::Q3KM)),
    ];
    let store = |(file, types): (&str, Types)| {
        let name = format!("{file} as {types}");
        let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|dir| dir.join("tests/fixtures/models"));
        let from = folders.map(|dir| dir.join(format!("{file}.gguf"))).find(|path| path.exists()).expect("a fixture");
        let source = Source::open(&from, Some(Activation::Relu.into())).unwrap();
        let path = dir.join(format!("{file}-{}.neurons", types.to_string().replace(' ', "-")));
        let options = PackOptions { types, orders: None };
        pack(&source, &path, &options, &|_, _| Ok(())).unwrap();
        (name, path)
    };
    mixes.map(store).into()
}

/// How far the inputs' rounding to int8, and that of keys and values, puts a model's dense logits off: portable kernels take floats.
pub fn rounded(path: &Path, kind: KvType, sizes: &[usize]) -> f32 {
    let dense = |isa: Option<Isa>, kind| {
        let kernels = isa.map_or_else(Kernels::best, |isa| Kernels::of(isa).expect("they run everywhere"));
        logits(&mut Engine::new(Model::open(path).unwrap(), 1, kernels), kind, sizes, None)
    };
    error(&dense(None, kind), &dense(Some(Isa::Portable), KvType::F32))
}

/// Gates at a step that are looked at: each costs a run of the dense model.
const NEAREST: usize = 12;
/// Places in [`QUANTS`].
const F32: usize = 0;
const Q8: usize = 4;

pub fn all_exact(layers: usize) -> Sparsity {
    Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap()
}

/// Slots of a layer with `ffn` neurons: nothing, everything and all between.
pub fn slots(prng: &mut Prng, ffn: usize) -> usize {
    match prng.below(4) {
        0 => 0,
        1 => ffn,
        _ => prng.below(ffn as u64 + 1) as usize,
    }
}
