//! Made-up models whose layers differ from each other in every way that the data can say.

use crate::support::numbers;
use dynamicinfer::formats::neuron_store::{Header, Writer};
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::model::config::{Activation, Ffn, Norm, Positions, RopeScaling, rope_frequencies};
use dynamicinfer::model::layer::{CommonForm, LinearAttention, Norms, OwnFfn, OwnForm, StateRule};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{Description, Model};
use dynamicinfer::pack::{PackOptions, Types, pack};
use dynamicinfer::prng::Prng;
use std::path::Path;

const HIDDEN: usize = 32;
const FFN: usize = 48;
pub const VOCAB: usize = 96;

/// One of these.
pub fn one<T: Copy>(prng: &mut Prng, of: &[T]) -> T {
    of[prng.below(of.len() as u64) as usize]
}

/// A model of neurons: layers with heads, sizes of heads, windows and rotations of their own, layers with a convolution or linear
/// attention, and layers without an FFN.
fn described(prng: &mut Prng) -> Description {
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
    let mut config = Description {
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
        form: CommonForm {
            norms,
            gated: prng.below(3) == 0,
            qk_norm,
            unscaled: qk_norm && prng.below(2) == 0,
            value_norm: qk_norm && prng.below(2) == 0,
            output_scales: norms.after() && own.iter().all(|own| own.ffn.is_none()) && prng.below(2) == 0,
            rotated: if prng.below(2) == 0 { flags(prng) } else { Vec::new() },
            windowed: if prng.below(2) == 0 { flags(prng) } else { Vec::new() },
            own,
            ..CommonForm::default()
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
fn store(described: &Description, prng: &mut Prng, path: &Path) -> Model {
    let config = described.resolve().unwrap();
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
    for layer in 0..config.layers().len() {
        let name = |part: &str| format!("layer.{layer}.{part}");
        let (mixer, norms, has_ffn) = (config.mixer(layer), config.layer(layer).norms, config.has_ffn(layer));
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
        if config.layer(layer).output_scale {
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
    let json = serde_json::to_value(described).unwrap();
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
            "deepseek-v2.gguf",
            "deepseek-v3",
            "deepseek-v3.gguf",
            "glm4-moe-lite.gguf",
        ],
    );
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
    let mut source = Source::open(&path, None).unwrap();
    let config = &mut source.described;
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
    source.config = source.described.resolve().unwrap();
    if source.config.activation.is_sparse() && prng.below(2) == 0 {
        let options = PackOptions { types: Types::One(Quant::F32), orders: None };
        pack(&source, store, &options, &|_, _| Ok(())).unwrap();
        return Model::open(store).unwrap();
    }
    with_latents(Model::in_place(source).unwrap(), prng)
}

/// The model with attention over latents, another model's, in the place of some layers' own mixers.
fn with_latents(mut model: Model, prng: &mut Prng) -> Model {
    let name = one(prng, &["deepseek-v2", "deepseek-v3.gguf"]);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name);
    let mut other = Model::in_place(Source::open(&path, None).unwrap()).unwrap();
    let chosen: Vec<usize> = (0..model.config.layers().len()).filter(|_| prng.below(4) == 0).collect();
    let mut described = model.description();
    for (layer, from) in chosen.into_iter().zip(std::mem::take(&mut other.layers)) {
        let latent = other.config.attention(0).unwrap().latent.unwrap();
        let own = described.form.own.iter_mut().find(|own| own.layers == [layer]).expect("a group for each layer");
        let frequencies = Some(rope_frequencies(latent.rope, 1e4, &RopeScaling::None));
        let heads = other.config.attention(0).map(|attention| attention.heads);
        let latent = Some(latent);
        let layers = vec![layer];
        *own = OwnForm { layers, heads, frequencies, latent, ffn: own.ffn, ..OwnForm::default() };
        let to = &mut model.layers[layer];
        (to.qkv, to.o, to.latent) = (from.qkv, from.o, from.latent);
        (to.qkv_bias, to.o_bias, to.qk_norm) = (Vec::new(), Vec::new(), None);
    }
    // Its matrices are used from here on.
    Box::leak(Box::new(other));
    model.config = described.resolve().unwrap();
    model
}

/// A drawn model, and the numbers that were not used for it.
pub fn drawn(seed: u64, dir: &Path) -> (Prng, Model) {
    let mut prng = Prng::new(seed);
    let model = match prng.below(3) {
        0 => mixture(&mut prng, &dir.join("drawn.neurons")),
        _ => {
            let described = described(&mut prng);
            store(&described, &mut prng, &dir.join("drawn.neurons"))
        }
    };
    (prng, model)
}
