//! THE LAW of forms: made-up models whose layers differ from each other in every way that the data can say. Host, device and disk agree for every
//! residency, and a pass that is stopped leaves no trace.

mod support;

use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::disk;
use dynamicinfer::engine::{Engine, Logits};
use dynamicinfer::formats::neuron_store::{Header, Writer};
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, LayerBlocks, least_bytes};
use dynamicinfer::ids::StoreId;
use dynamicinfer::model::config::{Activation, Ffn, Norm, Positions, RopeScaling, rope_frequencies};
use dynamicinfer::model::layer::{LayerForm, LinearAttention, Norms, OwnFfn, OwnForm, StateRule};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model, ModelConfig};
use dynamicinfer::open::layer_blocks;
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::prng::Prng;
use std::path::Path;
use support::law::{all_exact, logits, slots, with_seeds};
use support::{RATES, by_token, device_bytes, numbers, on_device};

const HIDDEN: usize = 32;
const FFN: usize = 48;
const VOCAB: usize = 96;

/// One of these.
fn one<T: Copy>(prng: &mut Prng, of: &[T]) -> T {
    of[prng.below(of.len() as u64) as usize]
}

/// A model of neurons: layers with heads, sizes of heads, windows and rotations of their own, layers with a convolution or linear
/// attention, and layers without an FFN.
fn drawn_config(prng: &mut Prng) -> ModelConfig {
    let layers = 2 + prng.below(4) as usize;
    let norms = one(prng, &[Norms::Before, Norms::After, Norms::Around, Norms::Parallel, Norms::ParallelShared]);
    let (kind, activation) = one(
        prng,
        &[
            (Ffn::Gated, Activation::Relu),
            (Ffn::Gated, Activation::Silu),
            (Ffn::GatedBoth, Activation::Relu),
            (Ffn::Plain, Activation::Relu2),
        ],
    );
    let rotary = |dim: usize, theta: f64| rope_frequencies(dim, theta, &RopeScaling::None);
    let mut own: Vec<OwnForm> = Vec::new();
    for layer in 0..layers {
        let like = OwnForm { layers: vec![layer], ..OwnForm::default() };
        match prng.below(5) {
            4 => {
                let key_heads = 1 + prng.below(2) as usize;
                let value_heads = key_heads * (1 + prng.below(3) as usize);
                let rule = one(prng, &[StateRule::Delta, StateRule::Mamba2]);
                let (key_dim, head_dim) = (one(prng, &[4, 16, 32]), one(prng, &[16, 32]));
                let (taps, tiled) = (2 + prng.below(3) as usize, rule == StateRule::Delta && prng.below(2) == 0);
                let linear = LinearAttention { rule, key_heads, value_heads, key_dim, head_dim, taps, tiled };
                own.push(OwnForm { linear: Some(linear), ..like });
            }
            0 => own.push(OwnForm { convolution: Some(2 + prng.below(4) as usize), ..like }),
            1 => {
                let (kv_heads, dim) = (1 + prng.below(2) as usize, one(prng, &[4, 8, 16]));
                let heads = Some(kv_heads * (1 + prng.below(3) as usize));
                let frequencies = Some(rotary(dim, one(prng, &[1e4, 1e6])));
                own.push(OwnForm { heads, kv_heads: Some(kv_heads), head_dim: Some(dim), frequencies, ..like });
            }
            2 => own.push(OwnForm { frequencies: Some(rotary(8, 1e5)), ..like }),
            _ => {}
        }
        if prng.below(3) == 0 {
            match own.last_mut().filter(|own| own.layers == [layer]) {
                Some(own) => own.values_from_keys = own.convolution.is_none() && own.linear.is_none(),
                None => own
                    .push(OwnForm { values_from_keys: true, ..OwnForm { layers: vec![layer], ..OwnForm::default() } }),
            }
        }
    }
    // Some layers but the last have no FFN.
    for own in own.iter_mut().filter(|own| !norms.parallel() && own.layers[0] + 1 < layers) {
        own.ffn = (prng.below(4) == 0).then_some(OwnFfn::Absent);
    }
    // Some layer has attention.
    if own.iter().filter(|own| own.convolution.is_some() || own.linear.is_some()).count() == layers {
        own.pop();
    }
    // The last layer may read the keys of an earlier one.
    let attends =
        |layer: usize| own.iter().all(|own| own.layers != [layer] || own.convolution.is_none() && own.linear.is_none());
    let owner = (0..layers - 1).find(|&layer| attends(layer)).filter(|_| prng.below(2) == 0);
    if let Some(owner) = owner {
        let like = own.iter().find(|own| own.layers == [owner]).cloned().unwrap_or_default();
        own.retain(|own| own.layers != [layers - 1]);
        own.push(OwnForm { layers: vec![layers - 1], keys_of: Some(owner), ffn: None, ..like });
    }
    let qk_norm = prng.below(2) == 0;
    let flags = |prng: &mut Prng| (0..layers).map(|_| prng.below(2) == 0).collect::<Vec<_>>();
    let mut config = ModelConfig {
        family: "llama".into(),
        name: "drawn".into(),
        hidden: HIDDEN,
        layers,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        ffn: FFN,
        vocab: VOCAB,
        context: 256,
        window: one(prng, &[None, Some(3), Some(20)]),
        norm: Norm::Rms(1e-5),
        activation,
        ffn_kind: kind,
        positions: Positions::Rope { frequencies: rotary(8, 1e4) },
        attention_bias: prng.below(2) == 0,
        output_bias: prng.below(2) == 0,
        ffn_bias: kind == Ffn::Plain,
        tied: true,
        form: LayerForm {
            norms,
            gated: prng.below(3) == 0,
            qk_norm,
            unscaled: qk_norm && prng.below(2) == 0,
            value_norm: qk_norm && prng.below(2) == 0,
            output_scales: norms.after() && own.iter().all(|own| own.ffn.is_none()) && prng.below(2) == 0,
            rotated: if prng.below(2) == 0 { flags(prng) } else { Vec::new() },
            windowed: if prng.below(2) == 0 { flags(prng) } else { Vec::new() },
            own,
            ..LayerForm::default()
        },
        embedding_scale: 1.0,
        logit_scale: 1.0,
        logit_cap: one(prng, &[0.0, 5.0]),
    };
    if let Some(owner) = owner.filter(|_| !config.form.windowed.is_empty()) {
        config.form.windowed[layers - 1] = config.form.windowed[owner];
    }
    config
}

/// Its store, with random weights.
fn store(config: &ModelConfig, prng: &mut Prng, path: &Path) -> Model {
    config.check().unwrap();
    let mut writer = Writer::create(path).unwrap();
    let mut add = |name: &str, count: usize, cols: usize, size: f64| {
        let section = writer.add_rows(name, Quant::F32, count, cols);
        let mut row = vec![0; Quant::F32.row_bytes(cols)];
        for r in 0..count {
            let mut numbers = numbers(prng, cols, size);
            // States decay.
            numbers.iter_mut().filter(|_| name.ends_with("decay")).for_each(|x| *x = -x.abs());
            numbers.iter_mut().filter(|_| name.ends_with("output_scale")).for_each(|x| *x = x.abs() + 0.5);
            rows::encode(Quant::F32, &numbers, &mut row);
            writer.write(section, (r * row.len()) as u64, &row).unwrap();
        }
    };
    let unit = 1.7 / (HIDDEN as f64).sqrt();
    add("embed", VOCAB, HIDDEN, 1.0);
    add("out_norm", 1, HIDDEN, 1.5);
    for layer in 0..config.layers {
        let name = |part: &str| format!("layer.{layer}.{part}");
        let (mixer, norms, has_ffn) = (config.mixer(layer), config.form.norms, config.has_ffn(layer));
        for (there, part) in [
            (norms.before(), "attn_norm"),
            (norms.before() && norms != Norms::ParallelShared && has_ffn, "ffn_norm"),
            (norms.after(), "attn_post_norm"),
            (norms.after() && has_ffn, "ffn_post_norm"),
        ] {
            if there {
                add(&name(part), 1, HIDDEN, 1.5);
            }
        }
        add(&name("qkv"), mixer.rows(), HIDDEN, unit);
        add(&name("o"), HIDDEN, mixer.cols(), unit);
        if mixer.kept() > 0 {
            add(&name("taps"), 1, mixer.taps().iter().product(), 1.0);
        }
        if let Some(linear) = mixer.linear() {
            let (heads, of_mamba) = (linear.value_heads, usize::from(linear.is_mamba()));
            let of = [
                ("conv_bias", of_mamba * linear.channels(), 0.3),
                ("step_bias", heads, 1.0),
                ("decay", heads, 0.4),
                ("state_norm", linear.norm_weights(), 1.5),
                ("skip", of_mamba * heads, 1.0),
            ];
            let of = of.into_iter().filter(|(_, cols, _)| *cols > 0);
            of.for_each(|(part, cols, size)| add(&name(part), 1, cols, size));
        }
        if let Some(attention) = mixer.attention() {
            let of = [
                (attention.bias, "qkv_bias", mixer.rows()),
                (attention.output_bias, "o_bias", HIDDEN),
                (attention.qk_norm, "q_norm", attention.head_dim),
                (attention.qk_norm && attention.keys_of.is_none(), "k_norm", attention.head_dim),
            ];
            of.into_iter().filter(|(there, ..)| *there).for_each(|(_, part, cols)| add(&name(part), 1, cols, 1.0));
        }
        if config.form.output_scales {
            add(&name("output_scale"), 1, 1, 1.0);
        }
        if !has_ffn {
            continue;
        }
        add(&name("ffn"), FFN * config.ffn_kind.rows(), HIDDEN, unit);
        if config.ffn_bias {
            add(&name("up_bias"), 1, FFN, 0.3);
            add(&name("down_bias"), 1, HIDDEN, 0.3);
        }
    }
    let json = serde_json::to_value(config).unwrap();
    let quant = Quant::F32;
    let header = Header { fingerprint: "0".repeat(32), sources: Vec::new(), quant, config: json, sections: Vec::new() };
    writer.finish(header).unwrap();
    // The map outlives the name.
    Model::open(path).unwrap()
}

/// A mixture whose layers have experts, one FFN or none, and attention or another mixer; those of neurons that can be off also packed by neuron.
fn mixture(prng: &mut Prng, store: &Path) -> Model {
    let name = one(
        prng,
        &[
            "lfm2-moe.gguf",
            "lfm2-moe",
            "glm4-moe.gguf",
            "qwen35-moe.gguf",
            "qwen3-next",
            "gemma4-moe.gguf",
            "gemma4-moe",
            "nemotron-h-moe.gguf",
        ],
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
    let mut source = Source::open(&path, None).unwrap();
    let config = &mut source.config;
    let layers = config.layers;
    config.window = one(prng, &[None, Some(4)]);
    config.form.rotated = (0..layers).map(|_| prng.below(3) > 0).collect();
    if let Some(experts) = &mut config.form.experts {
        experts.used = 1 + prng.below(4) as usize;
        experts.normalised = prng.below(2) == 0;
    }
    // Layers without an FFN, but for the last, which has experts.
    let absent: Vec<usize> = (0..layers - 1).filter(|_| prng.below(3) == 0).collect();
    let was = std::mem::take(&mut config.form.own);
    for layer in 0..layers {
        let of = |was: &OwnForm| OwnForm { layers: vec![layer], ..was.clone() };
        let mut own = was.iter().find(|own| own.has(layer)).map_or_else(OwnForm::default, of);
        own.layers = vec![layer];
        if absent.contains(&layer) {
            own.ffn = Some(OwnFfn::Absent);
        }
        config.form.own.push(own);
    }
    if source.config.activation.is_sparse() && prng.below(2) == 0 {
        let options = PackOptions { types: Types::One(Quant::F32), orders: None };
        pack(&source, store, &options, &|_, _| Ok(())).unwrap();
        return Model::open(store).unwrap();
    }
    Model::in_place(source).unwrap()
}

fn drawn(seed: u64, dir: &Path) -> (Prng, Model) {
    let mut prng = Prng::new(seed);
    let model = match prng.below(3) {
        0 => mixture(&mut prng, &dir.join("drawn.neurons")),
        _ => {
            let config = drawn_config(&mut prng);
            store(&config, &mut prng, &dir.join("drawn.neurons"))
        }
    };
    (prng, model)
}

fn cache(model: &Model, share: f64, seed: u64) -> HostCache {
    let files: Vec<_> = model.files().iter().map(|file| file.file()).collect();
    let disk = disk::open(&files).unwrap().disk;
    let (blocks, clusters) = (layer_blocks(model).unwrap(), model.config.clusters());
    let frame = |b: &LayerBlocks| b.block_bytes() + 2 * disk.align() * b.runs().len();
    let all: usize = blocks.iter().map(|b| frame(b) * clusters + 8192).sum();
    let bytes = (least_bytes(&blocks, clusters, disk.align()) as f64 * 1.3 + share * all as f64) as u64;
    HostCache::new(disk, &blocks, clusters, HostCacheOptions { bytes, seed, ..HostCacheOptions::new(0) }).unwrap()
}

#[test]
fn host_device_and_disk_agree_on_every_form() {
    with_seeds("host_device_and_disk_agree_on_every_form", 300, |seed| {
        let dir = tempfile::tempdir().unwrap();
        let (mut prng, model) = drawn(seed, dir.path());
        let config = model.config.clone();
        let layers = config.layers;
        let sizes: &[usize] = one(&mut prng, &[&[40, 1, 1, 3, 1], &[1, 1, 1, 1, 1, 1], &[7, 1, 32, 1, 2]]);
        let kind = one(&mut prng, &[KvType::F32, KvType::F16]);
        let slots: Vec<usize> = (0..layers).map(|l| slots(&mut prng, config.movable_of(l))).collect();
        let exact = model.has_neurons() && config.activation.is_sparse() && prng.below(2) == 0;
        let on_disk = (config.form.experts.is_some() || prng.below(2) == 0).then(|| cache(&model, 0.4, seed));
        // A model of neurons some of whose layers have none is computed by the host.
        let divides = config.form.experts.is_some() || config.movable_layers() == layers;
        let split = divides.then(|| {
            let device = Box::new(VirtualDevice::new(device_bytes(&model, &slots), RATES));
            // SAFETY: the engine drops its device's part before its model: it has both.
            let mut split = unsafe { on_device(&model, device, &slots) }.expect("the budget is what it takes");
            for (l, &slots) in slots.iter().enumerate().filter(|_| prng.below(3) > 0) {
                let first: Vec<StoreId> = (0..slots).map(|i| StoreId::new((i + l) % config.movable())).collect();
                split.cache.load(&mut *split.device, l, &first).unwrap();
            }
            split.cache.settle(&mut *split.device);
            split
        });
        assert_eq!(divides, model.not_on_device().is_none(), "{:?}", model.not_on_device());
        let mut engine = Engine::new(model, 1 + prng.below(2) as usize, Kernels::best());
        if exact {
            engine.set_sparsity(all_exact(layers));
        }
        let expected = logits(&mut engine, kind, sizes, None);
        assert!(expected.iter().all(|x| x.is_finite()), "{config:?}");
        let agrees = |found: &[f32], where_: &str| {
            let off = by_token(found, &expected, VOCAB.max(config.vocab));
            assert!(
                off.iter().all(|off| *off < 2e-3),
                "{where_}, slots {slots:?}, passes {sizes:?}: {off:?}\n{config:?}"
            );
        };
        if split.is_some() {
            engine.split = split;
            agrees(&logits(&mut engine, kind, sizes, None), "on a device");
            engine.check().unwrap();
            engine.split = None;
        }
        if let Some(cache) = on_disk {
            engine.set_host_cache(cache, None);
            agrees(&logits(&mut engine, kind, sizes, None), "from disk");
            engine.check().unwrap();
        }
    });
}

#[test]
fn a_pass_that_is_stopped_before_any_layer_leaves_no_trace() {
    with_seeds("a_pass_that_is_stopped_before_any_layer_leaves_no_trace", 50, |seed| {
        let dir = tempfile::tempdir().unwrap();
        let (_, model) = drawn(seed, dir.path());
        let mut engine = Engine::new(model, 2, Kernels::best());
        let config = engine.model.config.clone();
        let tokens = |n: u32| (0..n).map(|i| 5 + i * 37 % 90).collect::<Vec<u32>>();
        let new = || KvCache::new(&config, 128, KvType::F32).unwrap();
        let (mut kv, mut clean) = (new(), new());
        engine.forward(&mut kv, &tokens(20), Logits::None);
        engine.forward(&mut clean, &tokens(20), Logits::None);
        let want = engine.forward(&mut clean, &tokens(3), Logits::Last).to_vec();
        for stop in 0..config.layers {
            let mut left = stop;
            let whole = engine.forward_while(&mut kv, &tokens(40), Logits::Last, &mut || {
                left = left.wrapping_sub(1);
                left != usize::MAX
            });
            assert!(!whole && kv.len == 20, "before layer {stop}");
        }
        assert_eq!(engine.forward(&mut kv, &tokens(3), Logits::Last), &want[..], "{config:?}");
    });
}

/// Texts grow, are cut back as far as they can be, copied and given up, and their caches used for others. Each goes on as if it had been read anew.
#[test]
fn texts_that_are_cut_and_copied_go_on_as_if_read_anew() {
    let (mut kept, mut lost) = (0, 0);
    for name in ["lfm2", "lfm2-moe.gguf", "gemma3", "qwen35", "nemotron-h", "gemma4-e2b"] {
        let dir = tempfile::tempdir().unwrap();
        let model = match name.ends_with(".gguf") {
            true => {
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
                Model::in_place(Source::open(&path, None).unwrap()).unwrap()
            }
            false => support::opened(dir.path(), name, Quant::F32),
        };
        let mut engine = Engine::new(model, 2, Kernels::best());
        let config = engine.model.config.clone();
        let mut prng = Prng::new(7);
        let mut texts: Vec<(KvCache, Vec<u32>)> =
            (0..3).map(|_| (KvCache::new(&config, 200, KvType::F32).unwrap(), Vec::new())).collect();
        for step in 0..250 {
            let which = prng.below(3) as usize;
            match prng.below(8) {
                0 | 1 => {
                    let (kv, text) = &mut texts[which];
                    let to = prng.below(text.len() as u64 + 1) as usize;
                    let left = kv.rewind(to);
                    assert!(left <= to && kv.reach(left) == left);
                    text.truncate(left);
                    *(if left == to { &mut kept } else { &mut lost }) += 1;
                }
                2 => {
                    let from = (which + 1) % 3;
                    let [(to, copy), (other, text)] = texts.get_disjoint_mut([which, from]).unwrap();
                    let len = other.reach(prng.below(text.len() as u64 + 1) as usize);
                    to.copy_from(other, len);
                    *copy = text[..len].to_vec();
                }
                3 => {
                    let (kv, text) = &mut texts[which];
                    kv.rewind(0);
                    kv.renew();
                    text.clear();
                }
                _ => {
                    let (kv, text) = &mut texts[which];
                    let count = one(&mut prng, &[1, 1, 2, 9, 40]);
                    if text.len() + count + 1 > 200 {
                        continue;
                    }
                    let more: Vec<u32> = (0..count).map(|_| 5 + prng.below(80) as u32).collect();
                    engine.forward(kv, &more, Logits::None);
                    text.extend(&more);
                }
            }
            let (kv, text) = &mut texts[which];
            if text.len() + 1 > 200 {
                continue;
            }
            let next = 5 + prng.below(80) as u32;
            let found = engine.forward(kv, &[next], Logits::Last).to_vec();
            text.push(next);
            let mut anew = KvCache::new(&config, 200, KvType::F32).unwrap();
            let wanted = engine.forward(&mut anew, text, Logits::Last).to_vec();
            let off = by_token(&found, &wanted, config.vocab);
            assert!(off[0] < 1e-3, "{name}, step {step}, {} tokens: {off:?}", text.len());
        }
    }
    assert!(kept > 50 && lost > 50, "{kept} and {lost}");
}
