//! Where the fixed time of a layer's FFN goes on the host beside a device: what a share takes with hardly a neuron, and its parts by themselves.
//! Hidden 4096 and 11,008 neurons in f16, of which 1,064 are wanted and 522 are the host's, as in runs/2026-11-26-h200. Calls of a driver are
//! not in it: there is no device here.
//!
//! Run: cargo bench --bench stage

use dynamicinfer::cache::SlotTable;
use dynamicinfer::cpu::{Columns, Kernels, ThreadPool};
use dynamicinfer::engine::ffn::{Compute, FfnBuffers, ffn};
use dynamicinfer::engine::{Selection, Work};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::{SlotId, StoreId};
use dynamicinfer::lab::synth::{Shape, write_store};
use dynamicinfer::model::Model;
use dynamicinfer::model::config::Activation;
use dynamicinfer::prng::Prng;
use std::hint::black_box;
use std::time::{Duration, Instant};

const HIDDEN: usize = 4096;
const NEURONS: usize = 11_008;
const WANTED: usize = 1064;
/// Neurons of the host's share: none but one, and those of two rows of the run.
const SHARES: [usize; 4] = [1, 64, 244, 522];
/// Units into which the largest of these is cut, and numbers that a thread adds at a time, as `engine::ffn` has them.
const UNITS: usize = 64;
const ADDED: usize = 1024;
const PASSES: usize = 401;

/// Median time of `work`, us.
fn median_us(mut work: impl FnMut()) -> f64 {
    let mut us: Vec<f64> = (0..PASSES)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    us.sort_by(f64::total_cmp);
    us[PASSES / 2]
}

fn list(rng: &mut Prng, n: usize) -> Selection {
    let mut left = n;
    let mut neurons = Vec::new();
    for neuron in 0..NEURONS {
        if rng.below((NEURONS - neuron) as u64) < left as u64 {
            neurons.push(StoreId::new(neuron));
            left -= 1;
        }
    }
    Selection { masks: vec![1; neurons.len()], neurons }
}

fn main() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("layer.neurons");
    let shape = Shape {
        hidden: HIDDEN,
        layers: 1,
        ffn: NEURONS,
        heads: 32,
        kv_heads: 32,
        vocab: 512,
        context: 16,
        activation: Activation::Relu,
        seed: 1,
        active: None,
        outliers: 0,
        experts: None,
    };
    write_store(&shape, Quant::F16, &path, &|_, _| Ok(())).expect("there is room for a store");
    let model = Model::open(&path).expect("it was just written");
    model.store().unwrap().load();
    let (kernels, mut rng) = (Kernels::best(), Prng::new(2));
    println!("median of {PASSES}, us, {}", kernels.isa.name());
    for threads in [1, 2] {
        let mut pool = ThreadPool::new(threads);
        pool.spin(Duration::from_millis(1));
        println!("\n{threads} threads");
        shares(&model, &kernels, &mut pool, &mut rng);
        parts(&mut pool, &mut rng);
    }
}

/// Whole shares, whose neurons are in the caches as far as they fit, or are others in each pass.
fn shares(model: &Model, kernels: &Kernels, pool: &mut ThreadPool, rng: &mut Prng) {
    let layer = &model.layers[0];
    let input: Vec<f32> = (0..HIDDEN).map(|_| rng.next_f64() as f32 - 0.5).collect();
    let (mut x, mut buffers, mut hidden) = (Columns::default(), FfnBuffers::default(), vec![0.0; HIDDEN]);
    x.set_for(&input, 1, layer.ffn.input_quants());
    for n in SHARES {
        let lists: Vec<Selection> = (0..PASSES).map(|_| list(rng, n)).collect();
        let mut run = |list: &Selection| {
            let work = Work::Selected(list);
            hidden.fill(0.0);
            let compute = Compute { pool, kernels, config: &model.config, tiles: &mut [] };
            ffn(compute, layer, &x, work, 0.0, &mut buffers, &mut hidden);
        };
        let same = median_us(|| run(&lists[0]));
        let mut next = lists.iter();
        let others = median_us(|| run(next.next().expect("one for each pass")));
        println!("  {n:4} neurons: {same:7.1} the same each time, {others:7.1} others each time");
    }
}

/// What every share takes, by itself.
fn parts(pool: &mut ThreadPool, rng: &mut Prng) {
    let row = |name: &str, us: f64| println!("  {name:44} {us:6.2}");
    let joins = median_us(|| pool.run(UNITS, |_, _| ()));
    row("a fork and join (there are two)", joins);
    let mut buffers = vec![0f32; UNITS * HIDDEN];
    let cells: Vec<parking_lot::Mutex<&mut [f32]>> = buffers.chunks_mut(HIDDEN).map(parking_lot::Mutex::new).collect();
    let fills = median_us(|| pool.run(UNITS, |_, unit| cells[unit].lock().fill(0.0)));
    row("zeros in the buffers of 64 units", fills - joins);
    drop(cells);
    let (sum, rest) = buffers.split_at_mut(HIDDEN);
    let slices: Vec<parking_lot::Mutex<&mut [f32]>> = sum.chunks_mut(ADDED).map(parking_lot::Mutex::new).collect();
    let sums = median_us(|| {
        pool.run(HIDDEN / ADDED, |_, slice| {
            let mut sum = slices[slice].lock();
            for part in rest.chunks_exact(HIDDEN) {
                sum.iter_mut().zip(&part[slice * ADDED..]).for_each(|(sum, x)| *sum += x);
            }
        });
    });
    row("their sum", sums - joins);
    drop(slices);
    let (mut masks, wanted) = (vec![0u32; NEURONS], list(rng, WANTED));
    row("masks of the wanted neurons", {
        median_us(|| {
            masks.fill(0);
            wanted.neurons.iter().zip(&wanted.masks).for_each(|(n, &mask)| masks[n.index()] = mask);
            black_box(&mut masks);
        })
    });
    let mut table = SlotTable::new(NEURONS / 2, NEURONS);
    for slot in 0..NEURONS / 2 {
        table.fill(SlotId::new(slot), StoreId::new(2 * slot)).expect("a neuron has one slot");
        table.landed(SlotId::new(slot));
    }
    let mut host = Selection::default();
    row("which of them are the host's", {
        median_us(|| {
            host.neurons.clear();
            host.masks.clear();
            for (&n, &mask) in
                wanted.neurons.iter().zip(&wanted.masks).filter(|(n, _)| !table.location(**n).is_device())
            {
                host.neurons.push(n);
                host.masks.push(mask);
            }
            black_box(&mut host);
        })
    });
    let mut partial = vec![1f32; HIDDEN];
    row("zeros in the share's output", median_us(|| black_box(&mut partial).fill(0.0)));
}
