//! Models that are read in place: a GGUF's matrices where they lie, nothing packed. They answer as the reference does, with the kernels of
//! every instruction set; what neurons are needed for packs them.

use dynamicinfer::cpu::{Isa, Kernels};
use dynamicinfer::engine::{Engine, Logits, Observer, Seen, Session};
use dynamicinfer::formats::{MappedFile, blocks, safetensors};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::open::{EngineOptions, Quiet};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

fn in_place(file: &str) -> Model {
    Model::in_place(Source::open(&fixtures().join(file), None).unwrap()).unwrap()
}

/// The prompt's ids and the logits of all its tokens, as the reference has them.
fn expected(stem: &str) -> (Vec<u32>, Vec<f32>) {
    let find = |ending: &str| {
        let names = [format!("{stem}/expected.{ending}"), format!("{stem}.expected.{ending}")];
        names.iter().map(|name| fixtures().join(name)).find(|path| path.exists()).unwrap()
    };
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(find("json")).unwrap()).unwrap();
    let tensors = find("safetensors");
    let file = MappedFile::open(&tensors).unwrap();
    let infos = safetensors::parse(file.bytes(), &tensors).unwrap();
    let info = infos.iter().find(|info| info.name == "prompt_logits").unwrap();
    let mut logits = vec![0.0; info.shape.iter().product()];
    let at = info.offset as usize;
    blocks::dequantize(info.dtype, &file.bytes()[at..at + info.bytes as usize], &mut logits);
    (json["prompt"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect(), logits)
}

fn error(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let top = b.iter().fold(0f32, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0f32, |m, (a, b)| if a.is_nan() { f32::INFINITY } else { m.max((a - b).abs()) }) / top
}

/// GGUF, the reference's name, and whether its weights are quantised.
const MODELS: [(&str, &str, bool); 35] = [
    ("llama.gguf", "llama", false),
    ("llama-tied.gguf", "llama-tied", false),
    ("mistral.gguf", "mistral", false),
    ("qwen2.gguf", "qwen2", false),
    ("relullama.gguf", "relullama", false),
    ("bamboo.gguf", "bamboo", false),
    ("opt.gguf", "opt", false),
    ("falcon.gguf", "falcon", false),
    ("falcon-40b.gguf", "falcon-40b", false),
    ("minicpm.gguf", "minicpm", false),
    ("llama.q4_0.gguf", "llama.q4_0", true),
    ("llama-linear-rope.q8_0.gguf", "llama-linear-rope.q8_0", true),
    ("qwen3.gguf", "qwen3", false),
    ("qwen3-moe.gguf", "qwen3-moe", false),
    ("mixtral.split.gguf", "mixtral", false),
    ("smallthinker.gguf", "smallthinker", false),
    ("gemma3.gguf", "gemma3", false),
    ("gemma4.gguf", "gemma4", false),
    ("gemma4-moe.gguf", "gemma4-moe", false),
    ("gemma4-e2b.gguf", "gemma4-e2b", false),
    ("deepseek-v2.gguf", "deepseek-v2", false),
    ("deepseek-v3.gguf", "deepseek-v3", false),
    ("glm4-moe-lite.gguf", "glm4-moe-lite", false),
    ("glm4-moe.gguf", "glm4-moe", false),
    ("qwen35.gguf", "qwen35", false),
    ("qwen35-moe.gguf", "qwen35-moe", false),
    ("qwen3-next.gguf", "qwen3-next", false),
    ("nemotron-h.gguf", "nemotron-h", false),
    ("nemotron-h-moe.gguf", "nemotron-h-moe", false),
    ("lfm2.gguf", "lfm2", false),
    ("lfm2-moe.gguf", "lfm2-moe", false),
    ("qwen2-moe.gguf", "qwen2-moe", false),
    ("k256.q4_k_m.gguf", "k256.q4_k_m", true),
    ("k256.q6_k.gguf", "k256.q6_k", true),
    ("k256-moe.q4_k_m.gguf", "k256-moe.q4_k_m", true),
];

/// The error of each token by itself, without the largest where one token may have got another expert: of the quantised mixture's first
/// token two experts are nearly as good, and inputs rounded to int8 decide otherwise than numbers do.
fn error_by_token(a: &[f32], b: &[f32], tokens: usize, may_differ: bool) -> f32 {
    let each = a.len() / tokens;
    let mut errors: Vec<f32> = a.chunks(each).zip(b.chunks(each)).map(|(a, b)| error(a, b)).collect();
    errors.sort_by(f32::total_cmp);
    errors[tokens - 1 - usize::from(may_differ)]
}

/// Portable kernels take f32 inputs, so that quantised weights are as exact as their numbers; the others round the inputs to int8.
#[test]
fn every_gguf_answers_in_place_as_the_reference_does() {
    for isa in Isa::ALL {
        let Some(kernels) = Kernels::of(isa) else { continue };
        for (file, stem, quantised) in MODELS {
            let (prompt, logits) = expected(stem);
            let mut engine = Engine::new(in_place(file), 2, kernels);
            let mut session = Session::new(&engine, 256, KvType::F32).unwrap();
            let may_differ = stem == "k256-moe.q4_k_m" && isa != Isa::Portable;
            let far = |ours: &[f32]| error_by_token(ours, &logits, prompt.len(), may_differ);
            let all = far(engine.forward(&mut session.kv, &prompt, Logits::All));
            let limit = match quantised {
                false => 1e-4,
                true if isa == Isa::Portable => 1e-3,
                true => 0.1,
            };
            assert!(all <= limit, "{file} on {}: off by {all}", isa.name());
            // Token by token, each by the kernels for one column.
            let mut session = Session::new(&engine, 256, KvType::F32).unwrap();
            let one_by_one: Vec<f32> =
                prompt.iter().flat_map(|&id| engine.forward(&mut session.kv, &[id], Logits::Last).to_vec()).collect();
            let all = far(&one_by_one);
            assert!(all <= limit, "{file} on {}, token by token: off by {all}", isa.name());
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for (file, stem, _) in MODELS {
        let (prompt, _) = expected(stem);
        let logits = [1, 3].map(|threads| {
            let mut engine = Engine::new(in_place(file), threads, Kernels::best());
            let mut session = Session::new(&engine, 256, KvType::F16).unwrap();
            engine.forward(&mut session.kv, &prompt, Logits::All).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        assert!(logits[0] == logits[1], "{file}");
    }
}

/// Gates and activations of each layer as an observer sees them.
struct Sees(Vec<(Vec<f32>, Vec<f32>)>);

impl Observer for Sees {
    fn layer(&mut self, seen: &Seen<'_>) {
        self.0.push((seen.gates.to_vec(), seen.activations.to_vec()));
    }
}

#[test]
fn an_observer_sees_what_it_sees_of_the_packed_model() {
    for (file, stem) in [("llama.gguf", "llama"), ("opt.gguf", "opt")] {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("model.neurons");
        let options =
            dynamicinfer::pack::PackOptions { types: dynamicinfer::formats::rows::Quant::F32.into(), orders: None };
        let source = Source::open(&fixtures().join(file), None).unwrap();
        dynamicinfer::pack::pack(&source, &store, &options, &|_, _| Ok(())).unwrap();
        let [ours, theirs] = [in_place(file), Model::open(&store).unwrap()].map(|model| {
            let mut engine = Engine::new(model, 1, Kernels::best());
            let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
            let mut sees = Sees(Vec::new());
            engine.forward_observed(&mut session.kv, &expected(stem).0, Logits::Last, &mut sees);
            sees.0
        });
        assert_eq!((ours.len(), ours.is_empty()), (theirs.len(), false));
        for (l, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let far = error(&ours.0, &theirs.0).max(error(&ours.1, &theirs.1));
            assert!(far <= 1e-4, "{file}, layer {l}: off by {far}");
        }
    }
}

/// A dense model that nothing else is asked of leaves nothing in the cache; a predictor that is there needs neurons, and a ReLU model has them.
#[test]
fn what_needs_no_neurons_packs_nothing() {
    let needs = |file: &str, change: &dyn Fn(&mut EngineOptions)| {
        let mut options = EngineOptions::new(fixtures().join(file));
        change(&mut options);
        options.open_model(&Quiet).unwrap().has_neurons()
    };
    let cache = tempfile::tempdir().unwrap();
    // SAFETY: the only test of this binary that packs into the cache, before any thread of its own reads the environment.
    unsafe { std::env::set_var("XDG_CACHE_HOME", cache.path()) };
    assert!(!needs("llama.gguf", &|_| ()));
    assert!(!needs("k256.q4_k_m.gguf", &|options| options.sparsity.predictor = "dense".parse().unwrap()));
    // What a profile is needed for is not packed for before there is one.
    let mut exact = EngineOptions::new(fixtures().join("llama.gguf"));
    exact.sparsity.predictor = "exact".parse().unwrap();
    assert!(exact.open_model(&Quiet).is_err());
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0, "something was written");
    assert!(needs("relullama.gguf", &|_| ()));
    assert!(needs("llama.gguf", &|options| options.model.quant = Some(dynamicinfer::formats::rows::Quant::F16.into())));
}

/// A scale that is no number would turn every answer into noise: file, tensor and place are named, and nothing runs.
#[test]
fn a_damaged_scale_is_named_with_its_tensor_and_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.gguf");
    let mut bytes = std::fs::read(fixtures().join("k256.q6_k.gguf")).unwrap();
    let source = Source::open(&fixtures().join("k256.q6_k.gguf"), None).unwrap();
    let view = source.weight(dynamicinfer::model::source::Role::Up, 0).unwrap();
    let block = view.info.dtype.block_bytes();
    let (name, at) = (view.info.name.clone(), view.info.offset as usize + 3 * block);
    // The last two bytes of a Q6_K block are its scale; 0x7E00 is a NaN.
    bytes[at + block - 2..at + block].copy_from_slice(&[0x00, 0x7E]);
    std::fs::write(&path, bytes).unwrap();
    let model = Model::in_place(Source::open(&path, None).unwrap()).unwrap();
    let why = model.check_numbers(false).unwrap_err().to_string();
    for part in ["damaged.gguf", &name, &format!("byte {at}"), "NaN"] {
        assert!(why.contains(part), "{part} is not in: {why}");
    }
}
