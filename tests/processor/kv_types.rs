//! Laws of keys and values in every type: a text goes on from a copied, cut or reused cache as it went on from its own, and fewer bits cost
//! little.

use crate::support::{RATES, error, on_device, opened};
use dynamicinfer::Error;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::{Engine, Logits};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::layer::Mixer;
use dynamicinfer::model::{KvCache, KvType, Model, ModelConfig};
use dynamicinfer::open::{EngineOptions, Quiet, open};
use dynamicinfer::prng::Prng;
use dynamicinfer::tokenizer::Special;
use std::path::Path;

const CONTEXT: usize = 256;

/// The demo model, whose heads have 64 numbers, and a text of its own kind.
fn demo() -> (Engine, Vec<u32>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let text = std::fs::read_to_string(root.join("heldout.txt")).unwrap();
    let options = EngineOptions { context: Some(CONTEXT), ..EngineOptions::new(root) };
    let opened = open(&options, &Quiet).unwrap();
    let tokens = opened.tokenizer().unwrap().encode_prompt(&text, Special::AsText).unwrap();
    (opened.engine, tokens)
}

fn cache(engine: &Engine, context: usize, kind: KvType) -> KvCache {
    KvCache::new(&engine.model.config, context, kind).unwrap()
}

/// Cuts, copies and other texts in between change no bit: what stood in a cache before is never read.
#[test]
fn a_text_goes_on_alike_from_a_copied_a_cut_and_a_reused_cache() {
    let (mut engine, text) = demo();
    let mut prng = Prng::new(7);
    for kind in KvType::ALL {
        let mut used = cache(&engine, CONTEXT, kind);
        for _ in 0..12 {
            used.rewind(prng.below(80) as usize);
            // A smaller cache, in which another text stood.
            let mut copy = cache(&engine, CONTEXT / 2, kind);
            engine.forward(&mut copy, &text[100..180], Logits::None);
            copy.copy_from(&used, used.len);
            // One by one, a few at once, and more than sparse kernels take.
            let n = [1, 5, 40][prng.below(3) as usize];
            let next = &text[prng.below(200) as usize..][..n];
            let want = engine.forward(&mut copy, next, Logits::Last).to_vec();
            assert_eq!(engine.forward(&mut used, next, Logits::Last), &want[..], "{}", kind.name());
        }
    }
}

/// A prompt in one chunk attends by tiles, token by token it attends by rows.
#[test]
fn a_prompt_reads_alike_in_every_way() {
    let (mut engine, text) = demo();
    for kind in KvType::ALL {
        let (mut whole, mut single) = (cache(&engine, CONTEXT, kind), cache(&engine, CONTEXT, kind));
        engine.forward(&mut whole, &text[..150], Logits::None);
        text[..150].iter().for_each(|&token| {
            engine.forward(&mut single, &[token], Logits::None);
        });
        let [whole, single] =
            [&mut whole, &mut single].map(|kv| engine.forward(kv, &text[150..151], Logits::Last).to_vec());
        // A key may round to a neighbouring code.
        let limit = if matches!(kind, KvType::F32) { 5e-3 } else { 6e-2 };
        assert!(error(&whole, &single) < limit, "{}: {}", kind.name(), error(&whole, &single));
    }
}

/// The mean difference of a token's logits from those with keys and values in f32, in standard deviations of the logits, is as small as the
/// bits say.
#[test]
fn fewer_bits_cost_little() {
    let (mut engine, text) = demo();
    let vocab = engine.model.config.vocab;
    let mut logits = |kind: KvType| {
        let mut kv = cache(&engine, CONTEXT, kind);
        engine.forward(&mut kv, &text[..200], Logits::All).to_vec()
    };
    let exact = logits(KvType::F32);
    let mut off = |kind: KvType| {
        let found = logits(kind);
        let each = found.chunks_exact(vocab).zip(exact.chunks_exact(vocab)).map(|(a, b)| {
            let mean = b.iter().sum::<f32>() / vocab as f32;
            let size = b.iter().map(|x| (x - mean).powi(2)).sum::<f32>();
            (a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / size).sqrt()
        });
        each.sum::<f32>() / 200.0
    };
    let [f16, q8, q4] = [KvType::F16, KvType::Q8_0, KvType::Q4_0].map(&mut off);
    eprintln!("off by {f16} in f16, {q8} in q8_0, {q4} in q4_0");
    assert!(f16 < q8 && q8 < q4, "{f16} {q8} {q4}");
    assert!(q8 < 0.01 && q4 < 0.15, "{q8} {q4}");
    let bytes = |kind| KvCache::bytes_for(&engine.model.config, 1000, kind) as f64;
    assert!(bytes(KvType::Q8_0) / bytes(KvType::F16) < 0.54 && bytes(KvType::Q4_0) / bytes(KvType::F16) < 0.29);
}

#[test]
fn heads_that_are_no_whole_blocks_are_refused_with_what_can_be_taken() {
    let dir = tempfile::tempdir().unwrap();
    let engine = Engine::new(opened(dir.path(), "llama", Quant::F32), 1, Kernels::best());
    for kind in KvType::ALL {
        match (kind, KvCache::new(&engine.model.config, 8, kind)) {
            (KvType::F16 | KvType::F32, made) => assert!(made.is_ok()),
            (_, Err(Error::Usage(why))) => {
                assert!(why.contains("this model's have 16") && why.contains("f16 or f32"), "{why}")
            }
            _ => panic!("{} was taken", kind.name()),
        }
    }
}

/// A number that no other position of any text has, as f16 and f32 hold it.
fn mark(text: u32, position: usize, layer: usize, part: usize) -> f32 {
    let whole = (text as usize * 7919 + position * 31 + layer * 3 + part) % 65_521;
    (whole as f32 - 32_760.0) / 512.0
}

/// A cache beside what it must hold: the text that each position is of.
struct Naive {
    cache: KvCache,
    texts: Vec<u32>,
}

impl Naive {
    /// A pass over `n` tokens of `text`.
    fn append(&mut self, config: &ModelConfig, text: u32, n: usize) {
        self.begin(config, text, n, config.layers().len());
        self.texts.extend(vec![text; n]);
        self.cache.len += n;
    }

    /// The same, stopped behind so many layers.
    fn begin(&mut self, config: &ModelConfig, text: u32, n: usize, layers: usize) {
        let first = self.cache.len;
        for (layer, position) in (0..layers).flat_map(|layer| (first..first + n).map(move |position| (layer, position)))
        {
            for part in [0, 1] {
                let numbers = vec![mark(text, position, layer, part); config.attention(layer).unwrap().kv_dim()];
                self.cache.put(layer, part, position, &numbers);
            }
        }
    }

    /// What the next token sees is this text's and none other's: at both ends and at some places between.
    fn check(&self, config: &ModelConfig, prng: &mut Prng) {
        assert_eq!(self.cache.len, self.texts.len());
        for layer in 0..config.layers().len() {
            let attention = config.attention(layer).unwrap();
            let first = attention.window.map_or(0, |window| (self.cache.len + 1).saturating_sub(window));
            let between = |seen: usize| first + prng.below(seen as u64) as usize;
            let places: Vec<usize> = match self.cache.len - first {
                0 => Vec::new(),
                seen => [first, self.cache.len - 1].into_iter().chain([seen; 8].map(between)).collect(),
            };
            for (position, head) in
                places.into_iter().flat_map(|place| (0..attention.kv_heads).map(move |h| (place, h)))
            {
                let found = self.cache.head(layer, head, position..position + 1);
                for (part, bytes) in found.into_iter().enumerate() {
                    let expected = mark(self.texts[position], position, layer, part).to_le_bytes();
                    assert_eq!(bytes.len(), attention.head_dim * 4);
                    assert!(bytes.chunks_exact(4).all(|n| n == expected), "layer {layer}, position {position}");
                }
            }
        }
    }
}

/// 10,000 steps over caches of several sizes, layers with and without a window: passes, passes that are stopped, cuts, copies, other texts. A
/// cut that a layer cannot follow leaves nothing; one by less than 2000 tokens always can.
#[test]
fn caches_hold_what_a_list_of_texts_holds() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = opened(dir.path(), "mistral", Quant::F32).config.clone();
    see_back(&mut config, Some(40));
    let sizes = [9000, 6000, 4500, 300];
    let whole = |context| (config.layers().len() * 2 * config.attention(0).unwrap().kv_dim() * 4 * context) as u64;
    assert!(KvCache::bytes_for(&config, 9000, KvType::F32) < whole(9000) * 3 / 4);
    assert_eq!(KvCache::bytes_for(&config, 300, KvType::F32), whole(300));
    let cache = |context| KvCache::new(&config, context, KvType::F32).unwrap();
    let mut all: Vec<Naive> = sizes.iter().map(|&context| Naive { cache: cache(context), texts: Vec::new() }).collect();
    let mut prng = Prng::new(11);
    let (mut cut, mut lost, mut moved) = (0, 0, 0);
    for step in 0..10_000u32 {
        let i = prng.below(all.len() as u64) as usize;
        let room = sizes[i] - all[i].cache.len;
        match prng.below(10) {
            0..=5 if room > 0 => {
                let n = 1 + prng.below(room.min(if step % 4 == 0 { 1024 } else { 20 }) as u64) as usize;
                all[i].append(&config, step, n);
            }
            6 => {
                // Rarely far, often a little.
                let back = prng.below(if step % 11 == 0 { 9000 } else { 60 }) as usize;
                let to = all[i].cache.len.saturating_sub(back);
                let left = all[i].cache.rewind(to);
                assert!(left == to || left == 0 && back > 2000, "{left} of {to}, {back} back");
                (cut, lost) = (cut + u32::from(left > 0), lost + u32::from(left < to));
                all[i].texts.truncate(left);
            }
            7 => {
                let from = prng.below(all.len() as u64) as usize;
                if from != i {
                    let asked = prng.below(all[from].cache.len as u64 + 1) as usize;
                    let len = all[from].cache.reach(asked.min(sizes[i]));
                    let texts = all[from].texts[..len].to_vec();
                    let [to, from] = all.get_disjoint_mut([i, from]).unwrap();
                    to.cache.copy_from(&from.cache, len);
                    to.texts = texts;
                    moved += u32::from(len > 0);
                }
            }
            // A pass that is stopped.
            9 if room > 0 => {
                let (n, layers) =
                    (1 + prng.below(room.min(1024) as u64) as usize, prng.below(config.layers().len() as u64 + 1));
                all[i].begin(&config, step, n, layers as usize);
            }
            8 if step % 200 == 0 => {
                all[i].cache.renew();
                assert_eq!(all[i].cache.rewind(0), 0);
                all[i].texts.clear();
            }
            _ => {}
        }
        all[i].check(&config, &mut prng);
    }
    assert!(cut > 100 && lost > 0 && moved > 100, "{cut} cut, {lost} lost, {moved} copied");
}

/// A chunk that is stopped before any of its layers leaves a text as it was: it goes on with the same bits.
#[test]
fn a_stopped_chunk_leaves_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "llama",
        "opt",
        "mistral",
        "qwen2",
        "falcon",
        "minicpm",
        "qwen3",
        "qwen3-moe",
        "qwen2-moe",
        "gemma3",
        "gemma4-moe",
        "gemma4-e2b",
        "glm4-moe",
        "qwen35",
        "qwen35-moe",
        "nemotron-h",
        "nemotron-h-moe",
        "lfm2",
        "lfm2-moe",
        "deepseek-v2",
        "deepseek-v3",
    ] {
        let mut engine = Engine::new(opened(dir.path(), name, Quant::F16), 2, Kernels::best());
        let tokens = |n: u32| (0..n).map(|i| 5 + i * 37 % 90).collect::<Vec<u32>>();
        let mut kv = cache(&engine, 96, KvType::F16);
        engine.forward(&mut kv, &tokens(20), Logits::None);
        let mut clean = cache(&engine, 96, KvType::F16);
        clean.copy_from(&kv, 20);
        let want = engine.forward(&mut clean, &tokens(3), Logits::Last).to_vec();
        for stop in 0..engine.model.config.layers().len() {
            let mut layers = 0;
            let ended = engine.forward_while(&mut kv, &tokens(40), Logits::Last, &mut || {
                layers += 1;
                layers <= stop
            });
            assert!(!ended && kv.len == 20, "{name}, before layer {stop}");
            let mut again = cache(&engine, 96, KvType::F16);
            again.copy_from(&kv, 20);
            assert_eq!(engine.forward(&mut again, &tokens(3), Logits::Last), &want[..], "{name}, before layer {stop}");
        }
        assert_eq!(engine.forward(&mut kv, &tokens(3), Logits::Last), &want[..], "{name}");
    }
}

/// Every second layer sees so many positions back.
fn see_back(config: &mut ModelConfig, positions: Option<usize>) {
    config.change_layers(|number, layer| {
        if let Mixer::Attention(attention) = &mut layer.mixer {
            attention.window = positions.filter(|_| number % 2 == 1);
        }
    });
}

/// A model whose every second layer sees 40 positions back.
fn windowed(dir: &Path) -> Model {
    let mut model = opened(dir, "mistral", Quant::F32);
    see_back(&mut model.config, Some(40));
    model
}

/// More tokens than a layer with a window keeps, in chunks.
fn read(engine: &mut Engine, kv: &mut KvCache) {
    let tokens: Vec<u32> = (0..4400).map(|i| 5 + i * 37 % 90).collect();
    tokens.chunks(256).for_each(|chunk| {
        engine.forward(kv, chunk, Logits::None);
    });
}

/// What a layer with a window has given up changes no bit.
#[test]
fn a_long_text_goes_on_as_if_nothing_had_been_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::new(windowed(dir.path()), 2, Kernels::best());
    let mut all = engine.model.config.clone();
    see_back(&mut all, None);
    let mut some = cache(&engine, 5000, KvType::F32);
    let mut all = KvCache::new(&all, 5000, KvType::F32).unwrap();
    read(&mut engine, &mut some);
    read(&mut engine, &mut all);
    assert_eq!((some.reach(100), all.reach(100)), (0, 100));
    for token in 5..13 {
        let want = engine.forward(&mut all, &[token], Logits::Last).to_vec();
        assert_eq!(engine.forward(&mut some, &[token], Logits::Last), &want[..]);
    }
}

/// A device with room for one text gets a long one anew at each turn, of which the host has given up a part.
#[test]
fn two_long_texts_take_turns_on_a_device_with_room_for_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = Engine::new(windowed(dir.path()), 2, Kernels::best());
    let mut both = Engine::new(windowed(dir.path()), 2, Kernels::best());
    let slots = vec![both.model.config.widest_ffn() / 3; both.model.config.layers().len()];
    let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
    // SAFETY: the engine has both.
    let mut split = unsafe { on_device(&both.model, device, &slots) }.unwrap();
    let model = both.model.clone();
    split.set_sequences(&model, 5000, 0).unwrap();
    split.set_sequences(&model, 5000, 1).unwrap();
    both.split = Some(split);
    let texts = |engine: &mut Engine| {
        let mut texts = [cache(engine, 5000, KvType::F16), cache(engine, 5000, KvType::F16)];
        read(engine, &mut texts[0]);
        engine.forward(&mut texts[1], &[5; 30], Logits::None);
        assert_eq!(texts[0].reach(100), 0);
        let step = |i: usize| engine.forward(&mut texts[i % 2], &[7 + i as u32], Logits::Last).to_vec();
        (0..8).map(step).collect::<Vec<_>>()
    };
    for (step, (on_device, on_host)) in texts(&mut both).iter().zip(texts(&mut host)).enumerate() {
        assert!(error(on_device, &on_host) < 5e-3, "step {step}: {}", error(on_device, &on_host));
    }
}
