//! What the tests of devices share: models that are on disk or made up, and a virtual device's rates.
#![allow(dead_code)]

pub mod chance;
pub mod device;
pub mod law;
pub mod watched;

use dynamicinfer::cpu::aligned::Aligned;
use dynamicinfer::device::{Device, Faults, OutOfMemory, Rates, VirtualDevice};
use dynamicinfer::engine::session::CHUNK;
use dynamicinfer::engine::{ChunkCosts, ExpertCosts, Split};
use dynamicinfer::formats::machine_profile::{MachineProfile, Rate};
use dynamicinfer::formats::predictor_file::Header;
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::ids::Permutation;
use dynamicinfer::lab::synth::Shape;
use dynamicinfer::model::config::{Activation, Ffn, NamedActivation};
use dynamicinfer::model::layer::Norms;
use dynamicinfer::model::recurrence::Recurrence;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::weights::{Layer, Matrix, NormWeights};
use dynamicinfer::model::{BlockLayout, FfnWeights, Model, ModelConfig as Config, NeuronBlocks, Stacked};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::placement::memory_plan::{KvPlace, Request};
use dynamicinfer::prng::Prng;
use std::path::{Path, PathBuf};

/// Of the order of a consumer GPU's.
pub const RATES: Rates = Rates {
    device_gb_s: 900.0,
    device_gflops: 6000.0,
    link_gb_s: 25.0,
    host_gb_s: 60.0,
    host_gflops: 500.0,
    call_us: 5.0,
    copy_us: 1.5,
    sync_us: 8.0,
};

/// A dense ReLU model of random weights.
pub fn synth(layers: usize, [hidden, ffn]: [usize; 2], context: usize, seed: u64) -> Shape {
    Shape {
        hidden,
        layers,
        ffn,
        heads: hidden / 32,
        kv_heads: hidden / 32,
        vocab: 300,
        context,
        activation: Activation::Relu,
        active: None,
        seed,
        outliers: 0,
        experts: None,
    }
}

/// Tokens of a prompt that every vocabulary has.
pub fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| 5 + i * 37 % 90).collect()
}

/// A virtual device's rates on a machine.
pub fn rates(m: &MachineProfile) -> Rates {
    Rates {
        device_gb_s: m.device_gb_s,
        device_gflops: m.device_gflops,
        link_gb_s: m.link_gb_s,
        host_gb_s: m.dram_gb_s,
        host_gflops: m.host_gflops,
        call_us: m.call_us,
        copy_us: m.copy_us,
        sync_us: m.sync_us,
    }
}

/// A PC of the checkout, its rates divided, while calls, copies and waits take what they do.
pub fn slower(name: &str, times: f64) -> MachineProfile {
    let m = MachineProfile::read(&Path::new("profiles/machines").join(format!("{name}.toml"))).unwrap();
    MachineProfile {
        dram_gb_s: m.dram_gb_s / times,
        host_gflops: m.host_gflops / times,
        device_gb_s: m.device_gb_s / times,
        device_gflops: m.device_gflops / times,
        link_gb_s: m.link_gb_s / times,
        ..m
    }
}

/// A plan for a budget, with all of attention on the device.
pub fn request(vram: u64) -> Request {
    Request {
        vram: Some(vram),
        ram: None,
        ffn_share: None,
        kv: KvPlace::Auto,
        sequences: 1,
        predictor_bytes: 777,
        computed_share: 0.1,
        ilp_seconds: None,
        chunk: None,
        host: None,
        streamed_layers: Some(0),
        skips_host: false,
    }
}

/// A fixture's published files: those of `NAME`, of `NAME with ACTIVATION`, or of `NAME .., normed behind only`, which leaves the norms before
/// attention and FFN out.
fn fixture(name: &str) -> Source {
    let (named, behind_only) = match name.strip_suffix(", normed behind only") {
        Some(named) => (named, true),
        None => (name, false),
    };
    let (named, activation) = named.split_once(" with ").map_or((named, None), |(named, by)| (named, Some(by)));
    let activation = activation.map(|name| NamedActivation::by_name(name, None).unwrap());
    // Also the tests of tools/cuda_on_cpu use these.
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|dir| dir.join("tests/fixtures/models"));
    let from = folders.into_iter().map(|dir| dir.join(named)).find(|dir| dir.exists()).expect("a fixture of this name");
    let mut source = Source::open(&from, activation).unwrap();
    if behind_only {
        source.described.form.norms = Norms::After;
        source.config = source.described.resolve().unwrap();
    }
    source
}

/// The header of networks for this model, without tables.
pub fn predictor_header(model: &Model) -> Header {
    let c = &model.config;
    Header {
        fingerprint: model.fingerprint().to_owned(),
        model: c.name.clone(),
        kind: String::new(),
        layers: c.layers().len(),
        hidden: c.hidden,
        ffn: c.widest_ffn(),
        experts: c.neurons() / c.widest_ffn(),
        threshold: 0.5,
        activation_thresholds: vec![0.0; c.layers().len()],
        tables: Vec::new(),
        made: serde_json::json!({}),
        sections: Vec::new(),
    }
}

/// A fixture as it is run on the processor: what no store holds, such as a mixture of experts, in place, any other packed into `dir`.
pub fn opened(dir: &Path, name: &str, quant: Quant) -> Model {
    let source = fixture(name);
    match source.config.only_in_place() {
        Some(_) => Model::in_place(source).unwrap(),
        None => Model::open(&packed(dir, name, quant)).unwrap(),
    }
}

/// Packs a fixture into `dir`.
pub fn packed(dir: &Path, name: &str, quant: Quant) -> PathBuf {
    let store = dir.join(format!("{name}-{}.neurons", quant.name()));
    pack(&fixture(name), &store, &PackOptions { types: quant.into(), orders: None }, &|_, _| Ok(())).unwrap();
    store
}

/// Uniform in -size..size.
pub fn numbers(rng: &mut Prng, n: usize, size: f64) -> Vec<f32> {
    (0..n).map(|_| ((rng.next_f64() * 2.0 - 1.0) * size) as f32).collect()
}

/// An FFN without a model around it, its weights random.
pub struct Alone {
    pub config: Config,
    pub layer: Layer,
    _bytes: Aligned,
}

pub fn alone(kind: Ffn, activation: Activation, quant: Quant, hidden: usize, ffn: usize, rng: &mut Prng) -> Alone {
    let shape = Shape {
        hidden,
        layers: 1,
        ffn,
        heads: hidden / 32,
        kv_heads: 1,
        vocab: 259,
        context: 16,
        activation,
        active: None,
        seed: 1,
        outliers: 0,
        experts: None,
    };
    let mut config = shape.config().unwrap();
    (config.ffn_kind, config.ffn_bias) = (kind, kind == Ffn::Plain);
    let (layout, row_bytes) = (BlockLayout::new(kind, quant, hidden), quant.row_bytes(hidden));
    let mut bytes = Aligned::<f32>::default();
    bytes.resize(ffn * layout.bytes() / 4);
    for row in bytemuck::cast_slice_mut::<f32, u8>(&mut bytes).chunks_exact_mut(row_bytes) {
        rows::encode(quant, &numbers(rng, hidden, 2.0 / (hidden as f64).sqrt()), row);
    }
    // SAFETY: the bytes lie in the same struct, and an `Aligned` that nobody resizes stays where it is.
    let blocks = unsafe { NeuronBlocks::over(bytemuck::cast_slice(&bytes), layout, ffn, hidden) };
    // SAFETY: nothing is read of no rows.
    let nothing = unsafe { Matrix::over(&[], quant, 0, hidden) };
    let norm = || NormWeights { weight: vec![1.0; hidden], bias: Vec::new() };
    let layer = Layer {
        attn_norm: norm(),
        qkv: Stacked::new(vec![nothing]),
        qkv_bias: Vec::new(),
        qk_norm: None,
        o: nothing,
        o_bias: Vec::new(),
        sinks: Vec::new(),
        latent: None,
        recurrence: Recurrence::default(),
        ffn_norm: norm(),
        post_norms: None,
        output_scale: 1.0,
        per_layer: None,
        width: ffn,
        ffn: FfnWeights::Neurons(blocks),
        up_bias: if rng.below(2) == 0 { Vec::new() } else { numbers(rng, ffn, 0.3) },
        down_bias: Vec::new(),
        order: Permutation::identity(),
    };
    Alone { config, layer, _bytes: bytes }
}

/// The largest difference, by the largest number of `b`.
pub fn error(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let top = b.iter().fold(f32::MIN_POSITIVE, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0f32, |m, (a, b)| if a.is_nan() { f32::INFINITY } else { m.max((a - b).abs()) }) / top
}

/// How far each token's logits are off, by the largest number of all.
pub fn by_token(found: &[f32], expected: &[f32], vocab: usize) -> Vec<f32> {
    let top = expected.iter().fold(f32::MIN_POSITIVE, |top, v| top.max(v.abs()));
    let apart = |a: &f32, b: &f32| if a.is_nan() { f32::INFINITY } else { (a - b).abs() };
    let far = |(a, b): (&[f32], &[f32])| a.iter().zip(b).fold(0f32, |far, (a, b)| far.max(apart(a, b))) / top;
    found.chunks_exact(vocab).zip(expected.chunks_exact(vocab)).map(far).collect()
}

/// Bytes that [`on_device`] takes.
pub fn device_bytes(model: &Model, slots: &[usize]) -> u64 {
    // SAFETY: dropped here.
    let split = unsafe { on_device(model, Box::new(VirtualDevice::new(u64::MAX, RATES)), slots) };
    split.expect("there is room").device.memory().used
}

/// Positions of a timeline that [`on_device`] has room for: what the fixtures were made with.
pub const ON_DEVICE: usize = 256;

/// Lets a chunk's missing neurons be copied, `blocks` at once, and the CPU have about `cpu` of them, 0 to 1.
pub fn streaming(split: &mut Split, model: &Model, blocks: usize, cpu: f64) {
    let bytes = streaming_bytes(model, blocks);
    // The CPU has cpu / (1 - cpu) of what the link brings in the same time.
    let read_us = if cpu > 0.0 { (1.0 - cpu) / cpu } else { 1e12 };
    let costs = ChunkCosts {
        column_us: 0.0,
        read_us,
        device_us: 0.0,
        seen_us: 0.0,
        link_us: 1.0,
        copy_us: 1.5,
        cross_us: 0.0,
        sync_us: 0.0,
    };
    split.stream(model, costs, bytes).unwrap();
}

/// What [`streaming`] takes of the device's memory, where `blocks` is a multiple of 4.
pub fn streaming_bytes(model: &Model, blocks: usize) -> u64 {
    let block = model.layers.iter().map(|layer| layer.block().bytes()).max().expect("there are layers");
    (2 * blocks * block) as u64
}

/// Costs by which copying an expert for a chunk takes `link_us`, and the CPU 1 us for each token of one: with 0 all are copied, with very
/// much none.
pub fn expert_costs(link_us: f64) -> ExpertCosts {
    ExpertCosts {
        token_us: 1.0,
        read_us: 0.0,
        link_us,
        device_us: 0.0,
        device_token_us: 0.0,
        call_us: 0.0,
        start_us: 0.0,
        copy_us: 0.0,
        cross_us: 0.0,
    }
}

/// What two halves for `half` experts each, which are copied for a chunk, take of the device's memory; at most all of a layer.
pub fn streaming_experts_bytes(model: &Model, half: usize) -> u64 {
    let none = vec![0; model.config.layers().len()];
    // SAFETY: dropped here.
    let mut split = unsafe { on_device(model, Box::new(VirtualDevice::new(u64::MAX, RATES)), &none) }.unwrap();
    split.stream_experts(model, expert_costs(0.0), u64::MAX).unwrap();
    split.streamed_bytes() / model.config.clusters() as u64 * half as u64
}

/// A device's part of an engine on `model`, all slots free.
///
/// # Safety
/// It is dropped before the model's store is.
pub unsafe fn on_device(model: &Model, device: Box<dyn Device>, slots: &[usize]) -> Result<Split, OutOfMemory> {
    // SAFETY: the caller's promise.
    unsafe { on_device_by(model, device, slots, CHUNK) }
}

/// The same with chunks of up to `chunk` tokens, and room for as many positions.
///
/// # Safety
/// As [`on_device`].
pub unsafe fn on_device_by(
    model: &Model,
    device: Box<dyn Device>,
    slots: &[usize],
    chunk: usize,
) -> Result<Split, OutOfMemory> {
    // SAFETY: the caller's promise.
    unsafe { on_device_streaming(model, device, slots, (chunk, 0)) }
}

/// The same, with attention's matrices of `streamed` layers copied for every pass.
///
/// # Safety
/// As [`on_device`].
pub unsafe fn on_device_streaming(
    model: &Model,
    device: Box<dyn Device>,
    slots: &[usize],
    (chunk, streamed): (usize, usize),
) -> Result<Split, OutOfMemory> {
    // SAFETY: the caller's promise.
    unsafe { Split::new(device, slots, model, (ON_DEVICE.max(chunk), 1), (chunk, streamed), true) }
}

/// A device half of which have copies that are late, in another order and, where that `may_lose` them, lost.
pub fn often_faulty(prng: &mut Prng, budget: u64, may_lose: bool, seed: u64) -> VirtualDevice {
    let device = VirtualDevice::new(budget, RATES);
    if prng.below(2) != 0 {
        return device;
    }
    let mut share = || [0.0, 0.2, 0.9][prng.below(3) as usize];
    let (late, lost) = (share(), share() / 4.0);
    let lost = if may_lose { lost } else { 0.0 };
    device.with_faults(Faults { late, lost, reorder: prng.below(2) == 0, seed })
}

/// A machine of which nothing was measured.
pub fn assumed_machine() -> MachineProfile {
    MachineProfile {
        name: "test".into(),
        note: String::new(),
        measured_unix: None,
        measured: Vec::new(),
        assumed: Rate::ALL.to_vec(),
        dram_gb_s: 50.0,
        host_gflops: 400.0,
        device_gb_s: 500.0,
        device_gflops: 6000.0,
        link_gb_s: 20.0,
        call_us: 2.0,
        copy_us: 5.0,
        sync_us: 10.0,
        moves: Vec::new(),
        stage: None,
    }
}

/// Half of the neurons on a device, keys and values on the host.
pub fn half_of_the_neurons() -> Request {
    Request {
        vram: None,
        ram: None,
        ffn_share: Some(0.5),
        kv: KvPlace::Host,
        predictor_bytes: 0,
        computed_share: 1.0,
        sequences: 1,
        ilp_seconds: None,
        chunk: None,
        host: None,
        streamed_layers: Some(0),
        skips_host: false,
    }
}
