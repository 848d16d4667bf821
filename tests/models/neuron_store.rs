//! The neuron store against damage: a cut, changed or half written store is refused with what to do about it, and a
//! store that is being replaced stays whole for those who read it.

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits, Session};
use dynamicinfer::error::Error;
use dynamicinfer::formats::blocks;
use dynamicinfer::formats::neuron_store::{Header, NeuronStore, parse};
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::ids::Permutation;
use dynamicinfer::model::source::{Role, Source};
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::pack::{DOWN, PackOptions, Types, pack};
use dynamicinfer::prng::Prng;
use dynamicinfer::tokenizer::Tokenizer;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_64;

fn source(name: &str) -> Source {
    Source::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name), None).unwrap()
}

fn packed(name: &str, quant: Quant, path: &Path, orders: Option<Vec<Vec<u32>>>) {
    let orders = orders.map(|orders| orders.iter().map(|order| Permutation::new(order).unwrap()).collect());
    pack(&source(name), path, &PackOptions { types: quant.into(), orders }, &|_, _| Ok(())).unwrap();
}

#[test]
fn the_parts_of_a_block_are_its_rows_one_behind_the_other() {
    let dir = tempfile::tempdir().unwrap();
    for (name, rows) in [("opt", 2), ("llama", 3)] {
        for quant in Quant::OWN {
            let path = dir.path().join("x.neurons");
            packed(name, quant, &path, None);
            let model = Model::open(&path).unwrap();
            let layer = model.layers.last().unwrap();
            let (parts, up, down) = (layer.block().parts(), layer.block().up(), layer.block().down());
            assert_eq!((parts.len(), layer.block().gate_or_up(), up), (rows, parts[0], parts[rows - 2]));
            assert_eq!((down, down.offset + down.bytes), (parts[rows - 1], layer.block().bytes()));
            assert_eq!(layer.ffn.bytes(), (model.config.widest_ffn() * layer.block().bytes()) as u64);
            for neuron in [0, 1, model.config.widest_ffn() - 1] {
                let (blocks, row_bytes) = (layer.neurons(), quant.row_bytes(model.config.hidden));
                let at = |row: usize| &blocks.all()[row * row_bytes..(row + 1) * row_bytes];
                assert_eq!(blocks.ptr(neuron), at(neuron * rows).as_ptr());
                assert_eq!(blocks.input_rows(neuron).row(rows - 2), at(neuron * rows + rows - 2).as_ptr());
                for (r, &part) in parts.iter().enumerate() {
                    let row = neuron * rows + r;
                    assert_eq!((part.quant, blocks.part(part, neuron)), (quant, at(row)), "{name} {row}");
                    assert_eq!(blocks.part_rows(part, 0).row(neuron), at(row).as_ptr());
                }
            }
        }
    }
}

/// A store of a GGUF whose tensors have types of their own: what is not down has the file's bytes, and down its numbers nearly.
#[test]
fn a_mix_keeps_its_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.neurons");
    let source = source("k256.q4_k_m.gguf");
    let types = Types::natural(&source).unwrap();
    assert_eq!(types, Types::Own { down: DOWN });
    let published: Vec<u32> = (0..source.config.widest_ffn() as u32).rev().collect();
    let orders = Some(vec![Permutation::new(&published).unwrap(); source.config.layers().len()]);
    pack(&source, &path, &PackOptions { types, orders }, &|_, _| Ok(())).unwrap();
    let (model, c) = (Model::open(&path).unwrap(), &source.config);
    let mut kinds = std::collections::BTreeSet::new();
    for (l, layer) in model.layers.iter().enumerate() {
        for (matrix, role) in layer.qkv.parts().iter().zip([Role::Q, Role::K, Role::V]).chain([(&layer.o, Role::O)]) {
            let rows = source.rows(role, l).unwrap();
            kinds.insert(matrix.quant.name());
            for row in 0..matrix.rows {
                let from = matrix.quant.number_bytes(matrix.cols);
                assert_eq!(
                    matrix.row(row)[..from],
                    rows.view.data[rows.file_row(row) * from..][..from],
                    "{role:?} {row}"
                );
            }
        }
        let (blocks, down) = (layer.neurons(), source.weight(Role::Down, l).unwrap());
        let mut whole = vec![0.0; c.hidden * c.widest_ffn()];
        blocks::dequantize(down.info.dtype, down.data, &mut whole);
        for (neuron, &in_file) in published.iter().enumerate() {
            let in_file = in_file as usize;
            for (part, role) in [(layer.block().gate_or_up(), Role::Gate), (layer.block().up(), Role::Up)] {
                let (view, bytes) = (source.weight(role, l).unwrap(), part.quant.number_bytes(c.hidden));
                assert_eq!(part.quant, Quant::of_source(view.info.dtype));
                assert_eq!(
                    blocks.part(part, neuron)[..bytes],
                    view.data[in_file * bytes..][..bytes],
                    "{role:?} {neuron}"
                );
            }
            let mut column = vec![0.0; c.hidden];
            rows::decode(DOWN, blocks.part(layer.block().down(), neuron), &mut column);
            let truth: Vec<f32> = (0..c.hidden).map(|h| whole[h * c.widest_ffn() + in_file]).collect();
            let off: f32 = column.iter().zip(&truth).map(|(a, b)| (a - b).powi(2)).sum();
            let size: f32 = truth.iter().map(|b| b.powi(2)).sum();
            assert!(off.sqrt() <= 0.05 * size.sqrt(), "down of {neuron} is off by {} of {}", off.sqrt(), size.sqrt());
        }
    }
    assert!(kinds.len() > 1, "the fixture's attention is no mix: {kinds:?}");
}

/// A good store with every kind of section: neurons in another order, biases, a tokenizer.
fn good() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("good.neurons");
    let config = &source("opt").config;
    let order: Vec<u32> = (0..config.widest_ffn() as u32).rev().collect();
    packed("opt", Quant::F16, &path, Some(vec![order; config.layers().len()]));
    std::fs::read(path).unwrap()
}

fn number_at(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// Where the JSON header begins.
fn header_at(bytes: &[u8]) -> usize {
    number_at(bytes, 16)
}

/// The store with another header text, its length and checksum right.
fn with_header(bytes: &[u8], text: &[u8]) -> Vec<u8> {
    let mut out = bytes[..header_at(bytes)].to_vec();
    out.extend(text);
    let len = out.len() as u64;
    out[24..32].copy_from_slice(&(text.len() as u64).to_le_bytes());
    out[32..40].copy_from_slice(&xxh3_64(text).to_le_bytes());
    out[40..48].copy_from_slice(&len.to_le_bytes());
    out
}

fn edited(bytes: &[u8], change: impl FnOnce(&mut Json)) -> Vec<u8> {
    let mut header: Json = serde_json::from_slice(&bytes[header_at(bytes)..]).unwrap();
    change(&mut header);
    with_header(bytes, header.to_string().as_bytes())
}

fn section<'a>(header: &'a mut Json, name: &str) -> &'a mut Json {
    let sections = header["sections"].as_array_mut().unwrap();
    sections.iter_mut().find(|s| s["name"] == name).unwrap_or_else(|| panic!("the store has a section {name}"))
}

/// A refusal of the file with what to do about it.
fn refusal<T>(result: Result<T, Error>, file: &str, case: &str) -> String {
    let Err(error) = result else { panic!("{case}: was accepted") };
    assert!(matches!(error, Error::BadFile(_)), "{case}: {error:?}");
    let message = error.to_string();
    assert!(message.starts_with(file), "{case}: {message}");
    assert!(message.contains("pack the model again") || message.contains("pack the model again"), "{case}: {message}");
    assert!(!message.contains(char::is_control), "{case}: {message:?}");
    message
}

/// Opens it as a file, with its tokenizer.
fn open(dir: &Path, bytes: &[u8]) -> Result<(Model, Tokenizer), Error> {
    let path = dir.join("x.neurons");
    std::fs::write(&path, bytes).unwrap();
    let model = Model::open(&path)?;
    let tokenizer = Tokenizer::new(model.tokenizer()?, &path)?;
    Ok((model, tokenizer))
}

#[test]
fn a_store_cut_anywhere_is_refused() {
    let good = good();
    let at = header_at(&good);
    assert!(at > 40 * 4096, "enough data for cuts");
    let activation_thresholds = (0..64).chain((64..at).step_by(4096)).chain(at..good.len());
    for end in activation_thresholds {
        refusal(parse::<Header>(&good[..end], Path::new("cut")), "cut: ", &format!("cut at {end}"));
    }
    for extra in [1, 4096] {
        let long = [&good[..], &vec![0; extra]].concat();
        let says = refusal(parse::<Header>(&long, Path::new("long")), "long: ", "longer");
        assert_eq!(
            says,
            format!(
                "long: file length: says {}, the file has {}: it was cut or not finished; pack the model again (at byte 40)",
                good.len(),
                long.len()
            )
        );
    }
}

#[test]
fn a_flipped_bit_of_preamble_or_header_is_found() {
    let good = good();
    let same = serde_json::to_string(&parse::<Header>(&good, Path::new("x")).unwrap()).unwrap();
    let at = header_at(&good);
    let flip = |bit: usize| {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        parse::<Header>(&bytes, Path::new("flipped"))
    };
    for bit in 0..64 * 8 {
        match flip(bit) {
            // Bytes that mean nothing yet.
            Ok(header) => {
                assert!((12..16).contains(&(bit / 8)) || (48..64).contains(&(bit / 8)), "bit {bit}");
                assert_eq!(serde_json::to_string(&header).unwrap(), same);
            }
            Err(_) => drop(refusal(flip(bit), "flipped: ", &format!("bit {bit}"))),
        }
    }
    let mut random = Prng::new(1);
    for _ in 0..1000 {
        let bit = 8 * at + random.below(8 * (good.len() - at) as u64) as usize;
        let says = refusal(flip(bit), "flipped: ", &format!("bit {bit}"));
        assert!(says.contains("header: checksum differs: the file is damaged"), "{says}");
    }
}

/// Damage that the checksum agrees with: what a faulty or hostile program would write.
#[test]
fn a_header_with_any_bit_changed_never_leads_outside_the_file() {
    let good = good();
    let at = header_at(&good);
    let text = &good[at..];
    let inside = |header: &Header| header.sections.iter().all(|s| s.offset >= 64 && s.offset + s.bytes <= at as u64);
    let mut accepted = Vec::new();
    for bit in 0..8 * text.len() {
        let mut text = text.to_vec();
        text[bit / 8] ^= 1 << (bit % 8);
        let bytes = with_header(&good, &text);
        match parse::<Header>(&bytes, Path::new("flipped")) {
            Ok(header) => {
                assert!(inside(&header), "bit {bit}");
                accepted.push(bytes);
            }
            refused => drop(refusal(refused, "flipped: ", &format!("bit {bit}"))),
        }
    }
    assert!(accepted.len() > 1000, "{}", accepted.len());
    // A sample of those goes through the model, and those that it accepts through the engine.
    let dir = tempfile::tempdir().unwrap();
    let mut random = Prng::new(2);
    let mut ran = 0;
    for _ in 0..300 {
        let bytes = &accepted[random.below(accepted.len() as u64) as usize];
        match open(dir.path(), bytes) {
            Ok((model, _)) => {
                let mut engine = Engine::new(model, 1, Kernels::best());
                let mut session = Session::new(&engine, 8, KvType::F16).unwrap();
                assert_eq!(engine.forward(&mut session.kv, &[1, 2, 3], Logits::Last).len(), 320);
                ran += 1;
            }
            Err(error) => assert!(matches!(error, Error::BadFile(_)), "{error:?}"),
        }
    }
    assert!((30..300).contains(&ran), "{ran}");
}

#[test]
fn stores_that_contradict_themselves_are_refused() {
    let good = good();
    let dir = tempfile::tempdir().unwrap();
    open(dir.path(), &good).unwrap();
    type Change = fn(&mut Json);
    let cases: &[(&str, Change, &str)] = &[
        (
            "fingerprint missing",
            |h| drop(h.as_object_mut().unwrap().remove("fingerprint")),
            "header: not understood: missing field `fingerprint`",
        ),
        ("unknown key", |h| h["next"] = json!(1), "header: not understood: unknown field `next`"),
        (
            "unknown key without end",
            |h| h["\u{1b}".repeat(9000)] = json!(1),
            r"header: not understood: unknown field `\u{1b}\u{1b}",
        ),
        ("unknown type", |h| h["quant"] = json!("q9_z"), "header: not understood: 'q9_z' is no type of weights"),
        ("offset past the end", |h| section(h, "embed")["offset"] = json!(1u64 << 40), "embed: "),
        ("offset wraps", |h| section(h, "embed")["offset"] = json!(u64::MAX - 4095), "embed: "),
        ("offset in the preamble", |h| section(h, "embed")["offset"] = json!(0), "embed: "),
        ("offset not aligned", |h| section(h, "embed")["offset"] = json!(4096 + 64), "embed: "),
        ("offset negative", |h| section(h, "embed")["offset"] = json!(-4096), "header: not understood: "),
        ("a byte more", |h| section(h, "embed")["bytes"] = json!(320 * 64 * 2 + 1), "embed: 40961 bytes at "),
        ("a row more", |h| section(h, "embed")["content"]["rows"]["rows"] = json!(321), "embed: 40960 bytes at "),
        ("rows wrap", |h| section(h, "embed")["content"]["rows"]["rows"] = json!(1u64 << 63), "embed: "),
        ("columns wrap", |h| section(h, "embed")["content"]["rows"]["cols"] = json!(u64::MAX), "embed: "),
        ("half a number", |h| section(h, "layer.0.order")["bytes"] = json!(383), "layer.0.order: 383 bytes at "),
        (
            "a section twice",
            |h| section(h, "layer.1.o")["name"] = json!("layer.0.o"),
            "layer.0.o: the section is there twice",
        ),
        (
            "a section missing",
            |h| section(h, "layer.1.o")["name"] = json!("layer.1.x"),
            "layer.1.o: the section is missing",
        ),
        ("no embedding", |h| section(h, "embed")["name"] = json!("\u{1b}[2J"), "embed: the section is missing"),
        (
            "vocabulary disagrees",
            |h| h["config"]["vocab"] = json!(321),
            "embed: is Rows { quant: F16, rows: 320, cols: 64 }, not 321 rows of 64 numbers; pack the model again",
        ),
        ("hidden size disagrees", |h| h["config"]["hidden"] = json!(128), "embed: is Rows"),
        ("FFN size disagrees", |h| h["config"]["ffn"] = json!(95), "layer.0.ffn: is Rows"),
        (
            "layers 0",
            |h| h["config"]["layers"] = json!(0),
            "config: layer count is 0; it must be 1 to 4096; pack the model again",
        ),
        ("layers 4e9", |h| h["config"]["layers"] = json!(4_000_000_000u64), "config: layer count is 4000000000"),
        ("a layer too many", |h| h["config"]["layers"] = json!(3), "layer.2."),
        (
            "heads do not divide",
            |h| h["config"]["kv_heads"] = json!(3),
            "config: 4 heads cannot share 3 key/value heads",
        ),
        ("context disagrees", |h| h["config"]["context"] = json!(257), "positions: is Rows"),
        ("offset wraps the positions", |h| h["config"]["positions"]["learned"]["offset"] = json!(u64::MAX), "config: "),
        (
            "unknown activation",
            |h| h["config"]["activation"] = json!("tanh"),
            "config: not understood: unknown variant `tanh`",
        ),
        ("config empty", |h| h["config"] = json!({}), "config: not understood: missing field"),
        (
            "another family's positions",
            |h| h["config"]["positions"] = json!({"rope": {"frequencies": [1.0]}}),
            "config: 1 RoPE frequencies for head dimension 16",
        ),
        (
            "a norm of another type",
            |h| section(h, "out_norm")["content"]["rows"] = json!({"quant": "f16", "rows": 2, "cols": 64}),
            "out_norm: is Rows",
        ),
        (
            "order too short",
            |h| section(h, "layer.1.order")["bytes"] = json!(380),
            "layer.1.order: does not hold one number per neuron",
        ),
        (
            "two sections on the same bytes",
            |h| {
                let at = section(h, "embed")["offset"].clone();
                section(h, "layer.1.order")["offset"] = at
            },
            "embed: begins before layer.1.order ends: sections may not share bytes; pack the model again (at byte ",
        ),
        ("tokenizer cut", |h| section(h, "tokenizer")["bytes"] = json!(100), "tokenizer: checksum "),
    ];
    for (case, change, want) in cases {
        let opened = open(dir.path(), &edited(&good, change));
        let says = refusal(opened, dir.path().to_str().unwrap(), case);
        assert!(says.contains(&format!("x.neurons: {want}")), "{case}: no {want:?} in: {says}");
    }
    let mut twice = good.clone();
    let header = parse::<Header>(&good, Path::new("x")).unwrap();
    let there = header.sections.iter().find(|s| s.name == "layer.1.order").unwrap();
    let order = there.offset as usize;
    twice.copy_within(order..order + 4, order + 4);
    // With the checksum of what is there now: a store that was made so.
    let sum = xxhash_rust::xxh3::xxh3_64(&twice[order..order + there.bytes as usize]);
    let twice = edited(&twice, |h| section(h, "layer.1.order")["checksum"] = json!(format!("{sum:016x}")));
    let says = refusal(open(dir.path(), &twice), dir.path().to_str().unwrap(), "order");
    assert!(says.contains("x.neurons: layer.1.order: does not name each neuron once"), "{says}");
    let mut other_version = good.clone();
    other_version[8] = 2;
    let says = refusal(parse::<Header>(&other_version, Path::new("new")), "new: ", "version");
    assert_eq!(says, "new: version: is 2, this program reads 1; pack the model again (at byte 8)");
    let mut big_endian = good.clone();
    big_endian[8..12].copy_from_slice(&1u32.to_be_bytes());
    refusal(parse::<Header>(&big_endian, Path::new("big")), "big: ", "big endian");
    refusal(parse::<Header>(b"GGUF\x03\0\0\0", Path::new("gguf")), "gguf: not a neuron store", "gguf");
}

#[test]
fn damaged_weights_are_found_by_verify_in_the_section_they_are_in() {
    let good = good();
    let dir = tempfile::tempdir().unwrap();
    let (model, _) = open(dir.path(), &good).unwrap();
    model.store().unwrap().verify(|_| ()).unwrap();
    let sections = model.store().unwrap().header.sections.clone();
    drop(model);
    let mut random = Prng::new(3);
    for section in sections {
        let mut bytes = good.clone();
        let at = section.offset + random.below(section.bytes);
        bytes[at as usize] ^= 1 << random.below(8);
        let path = dir.path().join("damaged.neurons");
        std::fs::write(&path, &bytes).unwrap();
        let says = refusal(NeuronStore::open(&path).unwrap().verify(|_| ()), path.to_str().unwrap(), &section.name);
        let want = format!(": {}: checksum ", section.name);
        assert!(
            says.contains(&want)
                && says.ends_with(&format!("the file is damaged; pack the model again (at byte {})", section.offset)),
            "{says}"
        );
    }
}

#[test]
fn a_damaged_tokenizer_is_refused_and_never_panics() {
    let good = good();
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = {
        let (model, _) = open(dir.path(), &good).unwrap();
        model.store().unwrap().section("tokenizer").unwrap().clone()
    };
    let mut random = Prng::new(4);
    let mut refused = 0;
    for _ in 0..200 {
        let mut bytes = good.clone();
        let at = tokenizer.offset + random.below(tokenizer.bytes);
        bytes[at as usize] = b"\0\"{}9,\xff\\"[random.below(8) as usize];
        if let Err(error) = open(dir.path(), &bytes) {
            assert!(matches!(error, Error::BadFile(_)), "{error:?}");
            refused += 1;
        }
    }
    assert!(refused > 100, "{refused}");
}

fn files_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn packing_that_is_interrupted_at_any_step_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.neurons");
    let source = source("llama");
    let mut interruptions = 0;
    loop {
        let calls = AtomicU64::new(0);
        let stop = |_, _| match calls.fetch_add(1, Ordering::Relaxed) {
            n if n == interruptions => Err(Error::Interrupted),
            _ => Ok(()),
        };
        match pack(&source, &path, &PackOptions { types: Quant::Q8.into(), orders: None }, &stop) {
            Err(Error::Interrupted) => assert_eq!(files_in(dir.path()), [""; 0], "after {interruptions} steps"),
            Err(other) => panic!("{other:?}"),
            Ok(_) => break,
        }
        interruptions += 1;
    }
    assert!(interruptions > 10, "{interruptions}");
    Model::open(&path).unwrap().store().unwrap().verify(|_| ()).unwrap();
}

#[test]
fn what_a_killed_packing_left_is_removed_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let mut gone = std::process::Command::new("true").spawn().unwrap();
    gone.wait().unwrap();
    let gone = gone.id();
    let alive = std::os::unix::process::parent_id();
    let kept = [
        format!("x.neurons.{alive}.tmp"),
        "x.neurons.tmp".into(),
        "x.neurons.12a.tmp".into(),
        format!("y.neurons.{gone}.tmp"),
    ];
    for name in kept.iter().cloned().chain([format!("x.neurons.{gone}.tmp")]) {
        std::fs::write(dir.path().join(name), "half a store").unwrap();
    }
    packed("llama", Quant::F16, &dir.path().join("x.neurons"), None);
    let mut want = kept.to_vec();
    want.push("x.neurons".into());
    want.sort();
    assert_eq!(files_in(dir.path()), want);
}

#[test]
fn a_store_that_is_replaced_stays_whole_for_its_readers() {
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("x.neurons");
    packed("llama", Quant::F32, &path, None);
    let old = Model::open(&path).unwrap();
    let row = old.embed.row(7).to_vec();
    packed("llama", Quant::Q4, &path, None);
    assert_eq!(old.embed.row(7), row);
    old.store().unwrap().verify(|_| ()).unwrap();
    let new = Model::open(&path).unwrap();
    assert_eq!((old.quant, new.quant), (Quant::F32, Quant::Q4));
    new.store().unwrap().verify(|_| ()).unwrap();
    assert_eq!(files_in(dir.path()), ["x.neurons"]);
}
