//! Files of this program's own as a faulty or hostile program would write them: every checksum agrees, and what they say does
//! not. A header of some hundred bytes a section could make the readers copy one region thousands of times.

use super::{allowed, measured, message};
use dynamicinfer::error::Error;
use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::formats::placement_file::PlacementFile;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::trace_file::TraceFile;
use dynamicinfer::formats::{history_file, predictor_file, profile_file};
use dynamicinfer::lab::replay::frequencies;
use dynamicinfer::lab::synth::Shape;
use dynamicinfer::model::Model;
use dynamicinfer::model::config::{Activation, Positions};
use dynamicinfer::model::layer::{CommonForm, Experts, Scoring, SharedForm};
use dynamicinfer::profile::Profile;
use serde_json::{Value as Json, json};
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

type Opened = Result<(), Error>;
type Open = fn(&Path) -> Opened;

/// A file in the form of `formats::sections`. Its data are zeros, which every format takes for numbers.
#[derive(Clone)]
struct Ours {
    magic: &'static [u8; 8],
    /// Opens the file and reads what the program would.
    open: Open,
    header: Json,
    /// Name, content and bytes.
    sections: Vec<(String, Json, usize)>,
}

/// Where each section lies.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Apart,
    /// All begin at the same byte.
    Shared,
    /// The second begins where the first ends, less this.
    Into(usize),
}

impl Ours {
    fn with(&self, field: &str, value: Json) -> Ours {
        let mut other = self.clone();
        other.header[field] = value;
        other
    }

    fn bytes(&self, layout: Layout) -> Vec<u8> {
        let (mut header, mut data) = (self.header.clone(), vec![0; 4096]);
        let mut sections = Vec::new();
        for (i, (name, content, bytes)) in self.sections.iter().enumerate() {
            let at = match layout {
                Layout::Shared => 4096,
                Layout::Into(less) if i == 1 => data.len().next_multiple_of(4096) - less,
                _ => data.len().next_multiple_of(4096),
            };
            data.resize(data.len().max(at + bytes), 0);
            let checksum = format!("{:016x}", xxh3_64(&data[at..at + bytes]));
            let section =
                json!({ "name": name, "content": content, "offset": at, "bytes": bytes, "checksum": checksum });
            sections.push(section);
        }
        header["sections"] = Json::Array(sections);
        finished(self.magic, data, header.to_string().as_bytes())
    }
}

/// `data` with a header behind it and the preamble that belongs to both.
fn finished(magic: &[u8; 8], data: Vec<u8>, header: &[u8]) -> Vec<u8> {
    let (at, mut file) = (data.len() as u64, data);
    file.extend(header);
    let len = file.len() as u64;
    file[..8].copy_from_slice(magic);
    file[8..12].copy_from_slice(&1u32.to_le_bytes());
    for (place, number) in [(16, at), (24, header.len() as u64), (32, xxh3_64(header)), (40, len)] {
        file[place..place + 8].copy_from_slice(&number.to_le_bytes());
    }
    file
}

fn store(layers: usize, hidden: usize, ffn: usize) -> Ours {
    let shape = Shape {
        hidden: 64,
        layers,
        ffn,
        heads: 1,
        kv_heads: 1,
        vocab: 259,
        context: 16,
        activation: Activation::Relu,
        active: None,
        seed: 1,
        outliers: 0,
        experts: None,
    };
    let mut config = shape.described().unwrap();
    (config.hidden, config.head_dim, config.vocab, config.tied) = (hidden, 2, 1, true);
    config.positions = Positions::Rope { frequencies: vec![1.0] };
    let rows = |name: String, quant: Quant, rows: usize, cols: usize| {
        let content = json!({ "rows": { "quant": quant, "rows": rows, "cols": cols } });
        (name, content, rows * quant.row_bytes(cols))
    };
    let mut sections =
        vec![rows("embed".into(), Quant::F16, 1, hidden), rows("out_norm".into(), Quant::F32, 1, hidden)];
    for layer in 0..layers {
        let name = |part| format!("layer.{layer}.{part}");
        sections.extend([
            rows(name("attn_norm"), Quant::F32, 1, hidden),
            rows(name("qkv"), Quant::F16, 6, hidden),
            rows(name("o"), Quant::F16, hidden, 2),
            rows(name("ffn_norm"), Quant::F32, 1, hidden),
            rows(name("ffn"), Quant::F16, 3 * ffn, hidden),
        ]);
    }
    Ours {
        magic: b"NEURONS\0",
        open: |path| Model::open(path).map(drop),
        header: json!({ "fingerprint": "", "sources": [], "quant": "f16", "config": config }),
        sections,
    }
}

fn predictor(layers: usize, hidden: usize, ffn: usize) -> Ours {
    let mut sections = Vec::new();
    let mut tables = Vec::new();
    for layer in 0..layers {
        let content = json!({ "rows": { "quant": "f32", "rows": 1, "cols": ffn } });
        sections.push((format!("layer.{layer}.ahead.0.outer_bias"), content, Quant::F32.row_bytes(ffn)));
        tables.push(json!({ "layer": layer, "ahead": 0, "rank": 0, "scores": [0.0], "probabilities": [0.5],
            "recall": 1.0, "precision": 1.0, "computed_share": 1.0 }));
    }
    let activation_thresholds = vec![0.0; layers];
    Ours {
        magic: b"PREDICT\0",
        open: |path| predictor_file::open(path).map(drop),
        header: json!({ "fingerprint": "", "model": "m", "kind": "mlp", "layers": layers, "hidden": hidden, "ffn": ffn,
            "threshold": 0.5, "cuts": activation_thresholds, "tables": tables, "made": null }),
        sections,
    }
}

fn profile(texts: usize, layers: usize, ffn: usize) -> Ours {
    let mut sections = Vec::new();
    let mut infos = Vec::new();
    for text in 0..texts {
        sections.push((format!("text.{text}.counts"), json!("numbers"), 4 * layers * ffn));
        sections.push((format!("text.{text}.sums"), json!("bytes"), 40 * layers));
        infos.push(json!({ "name": "", "checksum": text.to_string(), "tokens": 1, "wanted": 1, "window": 1 }));
    }
    let activation_thresholds = vec![0.0; layers];
    Ours {
        magic: b"PROFILE\0",
        open: |path| profile_file::open(path).and_then(|file| Profile::read(&file)).map(drop),
        header: json!({ "fingerprint": "", "model": "m", "layers": layers, "hidden": 64, "ffn": ffn, "sparsity": null,
            "cuts": activation_thresholds, "texts": infos, "request": null, "made": null }),
        sections,
    }
}

fn trace(layers: usize, ffn: usize) -> Ours {
    let mut sections = Vec::new();
    for layer in 0..layers {
        sections.push((format!("active.{layer}"), json!("numbers"), 2 * 4 * ffn.div_ceil(32)));
        sections.push((format!("own.{layer}"), json!("bytes"), 2 * ffn));
        if layer > 0 {
            sections.push((format!("ahead.{layer}"), json!("bytes"), 2 * ffn));
        }
    }
    let texts = json!([{ "name": "a", "tokens": 1 }, { "name": "b", "tokens": 1 }]);
    Ours {
        magic: b"TRACE\0\0\0",
        open: |path| TraceFile::open(path).map(|trace| drop(frequencies(&trace, |_| true))),
        header: json!({ "fingerprint": "", "model": "m", "layers": layers, "ffn": ffn, "block_bytes": 384, "ahead": 1,
            "predictor": "p", "texts": texts, "made": null }),
        sections,
    }
}

fn history(layers: usize, ffn: usize) -> Ours {
    Ours {
        magic: b"HISTORY\0",
        open: |path| {
            let file = history_file::open(path)?;
            let layers = 0..file.header.layers;
            layers.map(|layer| history_file::read(&file, layer)).collect::<Result<Vec<_>, _>>().map(drop)
        },
        header: json!({ "fingerprint": "", "model": "m", "layers": layers, "hidden": 64, "ffn": ffn }),
        sections: (0..layers).map(|layer| (format!("frequency.{layer}"), json!("numbers"), 4 * ffn)).collect(),
    }
}

/// What a reader says of a file, and the memory that it took.
fn opened(bytes: &[u8], open: Open) -> (Opened, usize) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ours");
    std::fs::write(&path, bytes).unwrap();
    measured(|| open(&path))
}

/// Seeds that the readers refuse would leave the fuzzers to guess what a file is.
#[test]
fn the_fuzzers_start_from_good_files_of_ours() {
    let readers: [(&str, Open); 6] = [
        ("trace", |path| TraceFile::open(path).map(drop)),
        ("history", |path| history_file::open(path).map(drop)),
        ("predictor", |path| predictor_file::open(path).map(drop)),
        ("profile", |path| profile_file::open_unfinished(path).map(drop)),
        ("placement", |path| PlacementFile::read(path).map(drop)),
        ("machine", |path| MachineProfile::read(path).map(drop)),
    ];
    for (target, open) in readers {
        let seeds: Vec<_> =
            std::fs::read_dir(format!("fuzz/seeds/{target}")).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(seeds.len() >= 2, "{target}");
        seeds.iter().for_each(|seed| open(seed).unwrap_or_else(|error| panic!("{error}")));
    }
}

/// Thousands of layers or texts may lie on one region: every reader found each section inside the file, and copied the region as
/// often as it was named.
#[test]
fn sections_that_share_bytes_are_refused_and_paid_for_by_nobody() {
    for (what, small, large) in [
        ("store", store(2, 64, 64), store(256, 1 << 13, 1)),
        ("predictor", predictor(2, 64, 64), predictor(512, 64, 1 << 12)),
        ("profile", profile(2, 2, 64), profile(512, 1, 1 << 12)),
        ("trace", trace(2, 64), trace(512, 1 << 12)),
        ("history", history(2, 64), history(512, 1 << 12)),
    ] {
        let good = small.bytes(Layout::Apart);
        let (answer, peak) = opened(&good, small.open);
        answer.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(peak <= allowed(good.len()), "{what}: {peak} bytes for a good file of {}", good.len());
        let bad = large.bytes(Layout::Shared);
        let (answer, peak) = opened(&bad, large.open);
        let accepted = if answer.is_ok() { "accepted" } else { "refused" };
        assert!(peak <= allowed(bad.len()), "{what}: {peak} bytes for a file of {}, {accepted}", bad.len());
        let said = message(answer, what);
        assert!(said.contains("begins before") && said.contains("at byte 4096"), "{what}: {said}");
    }
}

#[test]
fn sections_may_touch_and_may_not_share_a_byte() {
    // The second section of these is of bytes, which may begin anywhere.
    for (what, ours) in [("profile", profile(1, 1, 1024)), ("trace", trace(1, 64 << 10))] {
        opened(&ours.bytes(Layout::Into(0)), ours.open).0.unwrap_or_else(|error| panic!("{what}: {error}"));
        let said = message(opened(&ours.bytes(Layout::Into(1)), ours.open).0, what);
        let (second, first) = (&ours.sections[1].0, &ours.sections[0].0);
        assert!(said.contains(&format!("{second}: begins before {first} ends")), "{what}: {said}");
    }
}

/// JSON values that nobody reads ("made", the shape of a model) take up to 50 times the memory of their text: `{"":0},` is seven
/// bytes in the file and a map in memory.
#[test]
fn what_a_header_says_for_people_takes_no_more_memory_than_it_has_bytes() {
    for (what, ours, field) in [
        ("store", store(1, 64, 64), "config"),
        ("predictor", predictor(1, 64, 64), "made"),
        ("profile", profile(1, 1, 64), "made"),
        ("trace", trace(1, 64), "made"),
    ] {
        for value in [json!({ "": 0 }), json!([]), json!([0]), json!({ "a": { "b": [] } })] {
            let bytes = ours.with(field, Json::Array(vec![value.clone(); 100_000])).bytes(Layout::Apart);
            let (answer, peak) = opened(&bytes, ours.open);
            assert!(peak <= allowed(bytes.len()), "{what}: {peak} bytes for a file of {} with {value}", bytes.len());
            let said = message(answer, what);
            assert!(said.contains("not understood: more than"), "{what}: {said}");
        }
    }
}

/// Lists that a header may hold any number of, as short as they can be written.
#[test]
fn long_lists_in_a_header_take_no_more_memory_than_they_have_bytes() {
    let section = json!({ "name": "", "content": "bytes", "offset": 64, "bytes": 0, "checksum": "" });
    let table = json!({ "layer": 0, "ahead": 0, "rank": 0, "scores": [], "probabilities": [], "recall": 0, "precision": 0,
        "computed_share": 0 });
    let info = json!({ "name": "", "checksum": "", "tokens": 0, "wanted": 0, "window": 0 });
    for (what, ours, field, value) in [
        ("history", history(1, 64), "sections", section),
        ("store", store(1, 64, 64), "sources", json!({ "name": "", "bytes": 0, "modified": [0, 0] })),
        ("predictor", predictor(1, 64, 64), "tables", table),
        ("predictor", predictor(1, 64, 64), "cuts", json!(0)),
        ("profile", profile(1, 1, 64), "texts", info),
        ("trace", trace(1, 64), "texts", json!({ "name": "", "tokens": 0 })),
    ] {
        let header = ours.with("sections", json!([])).with(field, Json::Array(vec![value; 50_000])).header;
        let bytes = finished(ours.magic, vec![0; 4096], header.to_string().as_bytes());
        let (answer, peak) = opened(&bytes, ours.open);
        assert!(peak <= allowed(bytes.len()), "{what}, {field}: {peak} bytes for a file of {}", bytes.len());
        message(answer, what);
    }
}

/// A history's header was believed: neurons beyond 2^62 wrapped the length that its sections were compared with.
#[test]
fn a_history_of_impossible_size_is_refused_by_the_field() {
    for (field, value) in [("layers", 0), ("layers", 1 << 40), ("hidden", 0), ("ffn", 0), ("ffn", 1usize << 62)] {
        let ours = history(1, 64).with(field, json!(value));
        let said = message(opened(&ours.bytes(Layout::Apart), ours.open).0, field);
        assert!(said.contains(&format!("{field}: is {value}; it must be 1 to ")), "{said}");
    }
}

/// What a store lacks or none holds is missed, since a layer without it would give other answers.
#[test]
fn a_store_that_names_what_it_does_not_hold_is_refused() {
    let (ours, shared) = (store(1, 64, 32), SharedForm { width: 32, weighted: true, normed: false });
    let experts = Experts { scoring: Scoring::Softmax, ..Experts::all(4) };
    let of = |experts: Experts| CommonForm { experts: Some(experts), ..CommonForm::default() };
    for (form, part) in [
        (of(experts), "layer.0.ffn: "),
        (of(Experts { shared: Some(shared), ..experts }), "layer.0.shared_gate: the section is missing"),
        (of(Experts { biases: true, ..experts }), "config: names biases of experts, which no store holds"),
        (CommonForm { sinks: true, ..CommonForm::default() }, "config: names sinks of attention, which no store holds"),
        (
            of(Experts { scaled: true, ..experts }),
            "config: names a router's norm or scales of experts, which no store holds",
        ),
        (
            CommonForm { per_layer: 8, ..CommonForm::default() },
            "config: names embeddings for each layer, which no store",
        ),
    ] {
        let mut config = ours.header["config"].clone();
        config["form"] = json!(form);
        let ours = ours.with("config", config);
        let said = message(opened(&ours.bytes(Layout::Apart), ours.open).0, part);
        assert!(said.contains(part), "{said}");
    }
    for (field, clamped) in [("ffn_kind", "gated_clamped"), ("activation", "clamped_swish")] {
        let mut config = store(1, 64, 32).header["config"].clone();
        assert!(config[field].is_string(), "{config}");
        config[field] = json!(clamped);
        let ours = store(1, 64, 32).with("config", config);
        let said = message(opened(&ours.bytes(Layout::Apart), ours.open).0, field);
        assert!(said.contains("a clamped SwiGLU is supported for experts with biases only"), "{said}");
    }
}

/// A placement of 121 bytes took 8 MiB, to look for neurons that are there twice.
#[test]
fn placements_and_machine_profiles_take_memory_for_what_they_hold() {
    let placement: Open = |path| PlacementFile::read(path).map(drop);
    let machine: Open = |path| MachineProfile::read(path).map(drop);
    let file = |layers: Json| {
        json!({ "version": 1, "fingerprint": "", "model": "", "ffn": 1 << 20, "policy": "static", "seed": null,
            "layers": layers })
    };
    let numbers: Vec<u32> = (0..100_000).collect();
    let empty = json!({ "slots": 0, "neurons": [] });
    for (what, text, good) in [
        ("one layer", file(json!([empty])).to_string(), true),
        ("all neurons", file(json!([{ "slots": 100_000, "neurons": numbers }])).to_string(), true),
        ("one neuron", file(json!([{ "slots": 100_000, "neurons": vec![0; 100_000] }])).to_string(), false),
        ("many layers", file(json!(vec![empty; 50_000])).to_string(), false),
        ("unknown key", file(json!([])).to_string().replace("seed", &"s".repeat(100_000)), false),
    ] {
        let (answer, peak) = opened(text.as_bytes(), placement);
        assert!(peak <= allowed(text.len()), "{what}: {peak} bytes for a placement of {}", text.len());
        assert_eq!(answer.is_ok(), good, "{what}: {answer:?}");
    }
    // TOML takes a multiple of its length, so the length is bounded, and with it the memory.
    let keys: String = (0..2000).map(|i| format!("k{i}={{}}\n")).collect();
    let lines = ["a=0\n", "[[a]]\n", "a.b=0\n", "\"\"={}\n", "measured=[]\n", "assumed=[[],[]]\n", "#\n", &keys];
    for line in lines {
        for length in [1000_usize, 15 << 10, 17 << 10, 1 << 20] {
            let text = line.repeat(length.div_ceil(line.len()));
            let (answer, peak) = opened(text.as_bytes(), machine);
            assert!(peak <= 2 << 20, "{line:?}: {peak} bytes for a machine profile of {}", text.len());
            let said = message(answer, line);
            assert_eq!(said.contains("too long for a machine profile"), text.len() > 16 << 10, "{said}");
        }
    }
}
