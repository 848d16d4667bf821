//! The laws of the FFN over chosen neurons, on every instruction set, for every row type and kind of FFN: what is left out
//! counts as zero, what is chosen is computed as in the dense pass, and no result depends on the number of threads.

use dynamicinfer::cpu::{Columns, Isa, Kernels, ThreadPool};
use dynamicinfer::engine::ffn::{Compute, FfnBuffers, Neurons, Tile, activations, down, ffn};
use dynamicinfer::engine::{Counts, Selection, Work};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::neuron_store::{Header, Writer};
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::ids::StoreId;
use dynamicinfer::lab::synth::Shape;
use dynamicinfer::model::Model;
use dynamicinfer::model::config::{Activation, Ffn};
use dynamicinfer::ops::gates::gates;
use dynamicinfer::prng::Prng;

/// One pack and a tail of groups, whole blocks of every type; odd numbers of neurons.
const HIDDEN: usize = 768;
const NEURONS: usize = 333;

const KINDS: [Ffn; 3] = [Ffn::Gated, Ffn::GatedBoth, Ffn::Plain];

fn numbers(rng: &mut Prng, n: usize, size: f64) -> Vec<f32> {
    (0..n).map(|_| ((rng.next_f64() * 2.0 - 1.0) * size) as f32).collect()
}

/// Types of gate, up and down: all alike, and mixed as files mix them.
fn types() -> Vec<[Quant; 3]> {
    let block = Quant::Block;
    let mixed = [
        [block(BlockType::Q4_K), block(BlockType::Q4_K), block(BlockType::Q6_K)],
        [block(BlockType::IQ4_XS), block(BlockType::Q5_K), Quant::Q8],
        [Quant::Q8, block(BlockType::Q4_K), Quant::Q4],
        [Quant::F16, block(BlockType::MXFP4), block(BlockType::BF16)],
    ];
    Quant::OWN.map(|quant| [quant; 3]).into_iter().chain(mixed).collect()
}

/// A model of one layer with random weights; a plain FFN has biases, as in OPT.
fn model(kind: Ffn, activation: Activation, quants: [Quant; 3]) -> Model {
    let mut rng = Prng::new(7);
    let shape = Shape {
        hidden: HIDDEN,
        layers: 1,
        ffn: NEURONS,
        heads: HIDDEN / 32,
        kv_heads: 1,
        vocab: 259,
        context: 16,
        activation,
        seed: 1,
        active: None,
        outliers: 0,
        experts: None,
    };
    let mut described = shape.described().unwrap();
    described.ffn_kind = kind;
    described.ffn_bias = kind == Ffn::Plain;
    described.tied = true;
    let config = described.resolve().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.neurons");
    let mut writer = Writer::create(&path).unwrap();
    let mut add = |name: &str, quant: Quant, count: usize, cols: usize| {
        let section = writer.add_rows(name, quant, count, cols);
        let mut row = vec![0; quant.row_bytes(cols)];
        for r in 0..count {
            rows::encode(quant, &numbers(&mut rng, cols, 1.0 / (HIDDEN as f64).sqrt()), &mut row);
            writer.write(section, (r * row.len()) as u64, &row).unwrap();
        }
    };
    let quant = quants[1];
    add("embed", quant, config.vocab, HIDDEN);
    add("out_norm", Quant::F32, 1, HIDDEN);
    for part in ["attn_norm", "ffn_norm"] {
        add(&format!("layer.0.{part}"), Quant::F32, 1, HIDDEN);
    }
    add("layer.0.qkv", quant, config.mixer(0).rows(), HIDDEN);
    add("layer.0.o", quant, HIDDEN, config.mixer(0).cols());
    if config.ffn_bias {
        add("layer.0.up_bias", Quant::F32, 1, NEURONS);
        add("layer.0.down_bias", Quant::F32, 1, HIDDEN);
    }
    let parts = &quants[3 - kind.rows()..];
    let (section, mut at) = (writer.add_neurons("layer.0.ffn", parts, NEURONS, HIDDEN), 0);
    for quant in parts.iter().copied().cycle().take(NEURONS * parts.len()) {
        let mut row = vec![0; quant.row_bytes(HIDDEN)];
        rows::encode(quant, &numbers(&mut rng, HIDDEN, 1.0 / (HIDDEN as f64).sqrt()), &mut row);
        writer.write(section, at, &row).unwrap();
        at += row.len() as u64;
    }
    let json = serde_json::to_value(&described).unwrap();
    let header = Header { fingerprint: "0".repeat(32), sources: Vec::new(), quant, config: json, sections: Vec::new() };
    writer.finish(header).unwrap();
    // The map outlives the name.
    Model::open(&path).unwrap()
}

/// One FFN and what it takes to run it.
struct Bench<'a> {
    model: &'a Model,
    kernels: Kernels,
    pool: ThreadPool,
    input: Vec<f32>,
    n: usize,
}

impl Bench<'_> {
    fn columns(&self) -> Columns {
        let mut x = Columns::default();
        x.set_for(&self.input, self.n, self.model.layers[0].ffn.input_quants());
        x
    }

    fn run(&mut self, work: Work, cut: f32) -> (Vec<f32>, Counts) {
        let (x, mut hidden) = (self.columns(), self.residual());
        let mut tiles: Vec<Tile> = (0..self.pool.threads()).map(|_| Tile::default()).collect();
        let buffers = &mut FfnBuffers::default();
        let Model { config, layers, .. } = self.model;
        let compute = Compute { pool: &mut self.pool, kernels: &self.kernels, config, tiles: &mut tiles };
        let counts = ffn(compute, &layers[0], &x, work, cut, buffers, &mut hidden);
        (hidden, counts)
    }

    fn residual(&self) -> Vec<f32> {
        numbers(&mut Prng::new(3), self.n * HIDDEN, 0.1)
    }

    fn gates_and_activations(&mut self) -> (Vec<f32>, Vec<f32>) {
        let x = self.columns();
        let (mut gates, mut acts) = (vec![f32::NAN; self.n * NEURONS], vec![f32::NAN; self.n * NEURONS]);
        let Model { config, layers, .. } = self.model;
        let compute = Compute { pool: &mut self.pool, kernels: &self.kernels, config, tiles: &mut [] };
        activations(compute, &layers[0], &x, &mut gates, &mut acts);
        (gates, acts)
    }

    /// The FFN with these activations: the truth for any choice of neurons.
    fn down(&mut self, acts: &[f32]) -> Vec<f32> {
        let mut hidden = self.residual();
        let mut tiles: Vec<Tile> = (0..self.pool.threads()).map(|_| Tile::default()).collect();
        let (config, layer) = (&self.model.config, &self.model.layers[0]);
        let (all, columns) = (Neurons::All(config.widest_ffn()), &mut Columns::default());
        let compute = Compute { pool: &mut self.pool, kernels: &self.kernels, config, tiles: &mut tiles };
        down(compute, layer, all, acts, self.n, columns, &mut hidden);
        hidden
    }
}

/// Runs `law` for every row type, kind of FFN and instruction set, with one and with three columns.
fn everywhere(activation: Activation, law: impl Fn(&mut Bench, &str)) {
    for quants in types() {
        for kind in KINDS {
            let model = model(kind, activation, quants);
            for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
                for n in [1, 3] {
                    let input = numbers(&mut Prng::new(5), n * HIDDEN, 1.7);
                    let what =
                        format!("{} {kind:?} {} {n} columns", quants.map(Quant::name).join(" "), kernels.isa.name());
                    law(&mut Bench { model: &model, kernels, pool: ThreadPool::new(2), input, n }, &what);
                }
            }
        }
    }
}

fn assert_close(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len());
    let top = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    let off = a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(off <= 1e-5 * top, "{what}: off by {off} of {top}");
}

fn every_neuron(n: usize) -> Selection {
    Selection { neurons: (0..NEURONS as u32).map(StoreId).collect(), masks: vec![(1 << n) - 1; NEURONS] }
}

/// About a third of the neurons, with random masks; some masks are empty.
fn some_neurons(n: usize) -> Selection {
    let mut rng = Prng::new(11);
    let neurons: Vec<StoreId> = (0..NEURONS as u32).map(StoreId).filter(|_| rng.below(3) == 0).collect();
    let masks = neurons.iter().map(|_| rng.below(1 << n) as u32).collect();
    Selection { neurons, masks }
}

/// `values` ([n, ffn]) where the selection wants them and `keep(index)` holds, else zero.
fn masked(values: &[f32], selection: &Selection, keep: impl Fn(usize) -> bool) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    for (&neuron, &mask) in selection.neurons.iter().zip(&selection.masks) {
        for b in 0..values.len() / NEURONS {
            let at = b * NEURONS + neuron.index();
            if mask >> b & 1 == 1 && keep(at) {
                out[at] = values[at];
            }
        }
    }
    out
}

/// An engine takes kinds of kernels by a measurement, type by type, for dots and for down rows: what is computed and what comes out must
/// not depend on it. Of silu most neurons are listed, so that lists may be read as streams.
#[test]
fn kinds_that_are_taken_in_part_change_no_bit() {
    for kinds in Isa::ALL.map(Kernels::kinds).into_iter().filter(|kinds| kinds.len() > 1) {
        for activation in [Activation::Relu, Activation::Silu] {
            for (quants, kind) in types().into_iter().flat_map(|quants| KINDS.map(|kind| (quants, kind))) {
                let (model, mut results) = (model(kind, activation, quants), Vec::new());
                let most: Vec<StoreId> = (0..NEURONS as u32).map(StoreId).filter(|id| id.0 % 5 != 0).collect();
                let most = Selection { masks: vec![1; most.len()], neurons: most };
                for taken in 0..4 {
                    let mut kernels = kinds[0].1;
                    for quant in quants {
                        kernels.take_dots(quant, &kinds[taken % 2].1);
                        kernels.take_axpys(quant, &kinds[taken / 2].1);
                    }
                    let input = numbers(&mut Prng::new(5), HIDDEN, 1.7);
                    let mut bench = Bench { model: &model, kernels, pool: ThreadPool::new(2), input, n: 1 };
                    let works = [Work::All, Work::Selected(&most)].map(|work| {
                        let (out, counts) = bench.run(work, 0.0);
                        (out.into_iter().map(f32::to_bits).collect::<Vec<u32>>(), counts)
                    });
                    results.push(works);
                }
                let same = results.iter().all(|result| *result == results[0]);
                assert!(same, "{} {kind:?} {activation:?}", quants.map(Quant::name).join(" "));
            }
        }
    }
}

#[test]
fn all_neurons_listed_are_the_dense_pass() {
    everywhere(Activation::Relu, |bench, what| {
        let (dense, counts) = bench.run(Work::All, 0.0);
        let all = NEURONS as u64;
        let gates = if bench.model.config.ffn_kind == Ffn::Plain { 0 } else { all };
        assert_eq!(counts, Counts { gates, ups: all, downs: all, active: 0 }, "{what}");
        let acts = bench.gates_and_activations().1;
        assert_close(&bench.down(&acts), &dense, what);
        let (listed, counts) = bench.run(Work::Selected(&every_neuron(bench.n)), 0.0);
        assert_close(&listed, &dense, what);
        let down = (0..NEURONS).filter(|i| (0..bench.n).any(|b| acts[b * NEURONS + i] != 0.0)).count() as u64;
        assert_eq!(counts.downs, down, "{what}");
        assert_eq!(counts.gates, gates, "{what}");
        assert!(down < all && counts.rows() > counts.downs, "{what}: {counts:?}");
    });
}

#[test]
fn neurons_left_out_count_as_zero() {
    everywhere(Activation::Relu, |bench, what| {
        let selection = some_neurons(bench.n);
        let acts = bench.gates_and_activations().1;
        let truth = bench.down(&masked(&acts, &selection, |_| true));
        assert_close(&bench.run(Work::Selected(&selection), 0.0).0, &truth, what);
    });
}

#[test]
fn known_gates_leave_out_nothing_that_fires() {
    everywhere(Activation::Relu, |bench, what| {
        let dense = bench.run(Work::All, 0.0).0;
        let (x, mut known) = (bench.columns(), vec![f32::NAN; bench.n * NEURONS]);
        let Model { config, layers, .. } = bench.model;
        gates(&mut bench.pool, &bench.kernels, config, &layers[0], &x, &mut known);
        assert_eq!(known, bench.gates_and_activations().0, "{what}");
        let (sparse, counts) = bench.run(Work::Gates(&known), 0.0);
        assert_close(&sparse, &dense, what);
        assert_eq!(counts.gates, 0, "{what}");
        assert!(counts.downs < NEURONS as u64, "{what}");
    });
}

#[test]
fn a_cut_leaves_out_gates_of_small_magnitude() {
    for activation in [Activation::Silu, Activation::Relu] {
        everywhere(activation, |bench, what| {
            let (known, acts) = bench.gates_and_activations();
            let fires = |at: usize| activation.apply(known[at]).abs() > 0.2;
            let all = every_neuron(bench.n);
            let truth = bench.down(&masked(&acts, &all, fires));
            let (listed, counts) = bench.run(Work::Selected(&all), 0.2);
            assert_close(&listed, &truth, what);
            // Where most of a list fires, all rows may be read: that is faster than leaving some out.
            let streams = !activation.is_sparse();
            assert!(counts.downs < NEURONS as u64 || streams, "{what}");
            assert_close(&bench.run(Work::Gates(&known), 0.2).0, &truth, what);
        });
    }
}

#[test]
fn a_column_gets_what_it_would_get_alone() {
    everywhere(Activation::Silu, |bench, what| {
        let selection = some_neurons(bench.n);
        let together = bench.run(Work::Selected(&selection), 0.0).0;
        for b in 0..bench.n {
            let alone = Selection {
                masks: selection.masks.iter().map(|mask| mask >> b & 1).collect(),
                neurons: selection.neurons.clone(),
            };
            let column = b * HIDDEN..(b + 1) * HIDDEN;
            let residual = bench.residual()[column.clone()].to_vec();
            let input = bench.input[column.clone()].to_vec();
            let mut single =
                Bench { model: bench.model, kernels: bench.kernels, pool: ThreadPool::new(1), input, n: 1 };
            let mut out = single.run(Work::Selected(&alone), 0.0).0;
            // The same change of another residual.
            out.iter_mut().zip(single.residual()).zip(&residual).for_each(|((o, s), r)| *o += r - s);
            assert_close(&out, &together[column], what);
        }
    });
}

#[test]
fn no_result_depends_on_the_number_of_threads() {
    everywhere(Activation::Relu, |bench, what| {
        let selection = some_neurons(bench.n);
        let known = bench.gates_and_activations().0;
        let works = [Work::All, Work::Selected(&selection), Work::Gates(&known)];
        let two = works.map(|work| bench.run(work, 0.1));
        for threads in [1, 3] {
            bench.pool = ThreadPool::new(threads);
            assert_eq!(works.map(|work| bench.run(work, 0.1)), two, "{what} {threads} threads");
        }
    });
}
