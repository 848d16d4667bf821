//! One layer's FFN, dense against sparse, from memory: how long it takes when a share of the neurons is left out, and how
//! fast the bytes come that had to be read. Random models and random choices of neurons, all seeded.
//!
//! Run: cargo bench --bench ffn [-- TYPE...]

use dynamicinfer::cpu::{Columns, Kernels, ThreadPool};
use dynamicinfer::engine::ffn::{Compute, FfnBuffers, Tile, ffn};
use dynamicinfer::engine::{Selection, Work};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::StoreId;
use dynamicinfer::lab::synth::{Shape, write_store};
use dynamicinfer::machine::measure::{READ_BYTES, ReadBuffer};
use dynamicinfer::model::Model;
use dynamicinfer::model::config::Activation;
use dynamicinfer::prng::Prng;
use std::time::Instant;

const HIDDEN: usize = 2048;
const NEURONS: usize = 5504;
/// Bytes of FFN weights that pass between two uses of a layer, at least: several times the caches.
const BYTES_BETWEEN: usize = 250 << 20;
const PASSES: usize = 9;
const SPARSITIES: [usize; 12] = [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99];

/// SiLU: every neuron fires, so all three rows of the neurons that are listed are needed, and no others.
fn model(quant: Quant, dir: &std::path::Path) -> Model {
    let layers = BYTES_BETWEEN.div_ceil(3 * NEURONS * quant.row_bytes(HIDDEN));
    let activation = Activation::Silu;
    let shape = Shape {
        hidden: HIDDEN,
        layers,
        ffn: NEURONS,
        heads: 16,
        kv_heads: 2,
        vocab: 512,
        context: 16,
        activation,
        seed: 1,
        active: None,
        outliers: 0,
        experts: None,
    };
    let path = dir.join(format!("{}.neurons", quant.name()));
    write_store(&shape, quant, &path, &|_, _| Ok(())).expect("there is room for a store");
    let model = Model::open(&path).expect("it was just written");
    model.store().unwrap().load();
    model
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let kernels = Kernels::best();
    let machine = ReadBuffer::new(READ_BYTES, None).expect("memory for the bandwidth measurement");
    println!("{HIDDEN} x {NEURONS}, {}; median of {PASSES} passes over all layers", kernels.isa.name());
    for quant in [Quant::F16, Quant::Q8, Quant::Q4] {
        if !wanted.is_empty() && !wanted.iter().any(|w| w == quant.name()) {
            continue;
        }
        let model = model(quant, dir.path());
        for threads in [1, 2] {
            let read = machine.measure(threads).gb_per_s;
            println!("\n{} on {threads} threads; the machine reads {read:.1} GB/s", quant.name());
            println!("sparsity   ms/layer   GB/s   of machine   of dense time");
            let mut run = Run { model: &model, kernels, pool: ThreadPool::new(threads), rng: Prng::new(2) };
            let (dense, bytes) = run.time(None);
            let row = |name: &str, seconds: f64, bytes: f64| {
                let rate = bytes / seconds / 1e9;
                let (share, ratio) = (100.0 * rate / read, seconds / dense);
                println!("{name:>8}   {:8.3}   {rate:4.1}   {share:8.0} %   {ratio:13.2}", seconds * 1e3);
            };
            row("dense", dense, bytes);
            for sparsity in SPARSITIES {
                let (seconds, bytes) = run.time(Some(sparsity));
                row(&format!("{sparsity} %"), seconds, bytes);
            }
        }
    }
}

struct Run<'a> {
    model: &'a Model,
    kernels: Kernels,
    pool: ThreadPool,
    rng: Prng,
}

impl Run<'_> {
    /// Seconds and needed bytes of a layer, dense or with `sparsity` percent of the neurons left out.
    fn time(&mut self, sparsity: Option<usize>) -> (f64, f64) {
        let config = &self.model.config;
        let input: Vec<f32> = (0..HIDDEN).map(|_| self.rng.next_f64() as f32 - 0.5).collect();
        let (mut x, mut buffers, mut hidden) = (Columns::default(), FfnBuffers::default(), vec![0.0; HIDDEN]);
        let mut tiles: Vec<Tile> = (0..self.pool.threads()).map(|_| Tile::default()).collect();
        let layers = self.model.layers.len();
        let mut passes = Vec::new();
        let mut rows = 0;
        for _ in 0..PASSES {
            let lists: Vec<Selection> = (0..layers).map(|_| self.choose(sparsity.unwrap_or(0))).collect();
            rows = 0;
            let start = Instant::now();
            for (layer, list) in self.model.layers.iter().zip(&lists) {
                let work = if sparsity.is_some() { Work::Selected(list) } else { Work::All };
                x.set_for(&input, 1, layer.ffn.input_quants());
                let compute = Compute { pool: &mut self.pool, kernels: &self.kernels, config, tiles: &mut tiles };
                rows += ffn(compute, layer, &x, work, 0.0, &mut buffers, &mut hidden).rows();
            }
            passes.push(start.elapsed().as_secs_f64() / layers as f64);
        }
        passes.sort_by(f64::total_cmp);
        (passes[PASSES / 2], rows as f64 / layers as f64 * self.model.layers[0].block().up().bytes as f64)
    }

    /// Exactly the wanted share of the neurons, chosen at random.
    fn choose(&mut self, sparsity: usize) -> Selection {
        let mut left = NEURONS * (100 - sparsity) / 100;
        let mut neurons = Vec::new();
        for neuron in 0..NEURONS {
            if self.rng.below((NEURONS - neuron) as u64) < left as u64 {
                neurons.push(StoreId::new(neuron));
                left -= 1;
            }
        }
        Selection { masks: vec![1; neurons.len()], neurons }
    }
}
