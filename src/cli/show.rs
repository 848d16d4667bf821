use super::model_arg::parse_activation;
use super::progress::{Progress, Unit};
use crate::error::{Result, printable};
use crate::formats::neuron_store::{Content, NeuronStore, Section};
use crate::formats::predictor_file::{self, PredictorFile};
use crate::formats::rows::Quant;
use crate::formats::sections::{Header, SectionFile};
use crate::model::layer::FfnParts;
use crate::model::source::{Role, Source};
use crate::model::{Description, KvCache, KvType, Model, ModelConfig, NamedActivation};
use crate::open::model::find;
use crate::open::stores::{self, Stored};
use crate::open::{ModelOptions, Quiet};
use crate::pack::{Types, layout, packed_bytes};
use crate::tokenizer::{ModelSpec, TokenizerSpec};
use comfy_table::Table;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Show the parts and types of a model or a predictor file
#[derive(clap::Args)]
pub struct Args {
    /// Hugging Face directory, .gguf, .neurons file, .predictor file, or `demo`
    model: PathBuf,
    /// Machine-readable
    #[arg(long)]
    json: bool,
    /// Read the whole .neurons or .predictor file and compare its checksums
    #[arg(long)]
    verify: bool,
    /// Activation function of a model that names none: relu, drelu, silu and others, as in `pack`
    #[arg(long, value_parser = parse_activation)]
    activation: Option<NamedActivation>,
}

#[derive(Serialize)]
struct Shown {
    /// As text; bytes that are none are replaced.
    path: String,
    packed: bool,
    /// `run` memory-maps it without packing.
    in_place: bool,
    /// The packed file: what `path` is, or its copy in the cache; none if it is not packed.
    store: Option<String>,
    /// Other copies of it in the cache, as `ls` lists them.
    copies: Vec<String>,
    /// Type of attention and FFN weights, or the type `run` would pack it as.
    quant: &'static str,
    /// The types of all tensors, the one with most bytes first.
    types: Vec<TypeShown>,
    /// Bits of a number, over all tensors, scales included.
    bits_per_weight: f64,
    /// Bytes packed, or of the file that is read in place.
    bytes: u64,
    parameters: u64,
    neuron_block_bytes: u64,
    /// Share of the bytes that are neuron blocks.
    ffn_share: f64,
    /// Whether the packed file has a checksum of each block, with which reads from disk are compared.
    block_checksums: bool,
    kv_bytes_per_token: u64,
    fingerprint: String,
    tokenizer: Option<&'static str>,
    chat_template: bool,
    config: Description,
    #[serde(skip)]
    model: ModelConfig,
}

/// Parts that are named of a type where matrices have several: all that a model may have, shared experts, embedding and head included.
const PARTS: usize = 12;
/// The same where all have one, beside which norms are f32.
const PARTS_OF_ONE: usize = 4;

/// The tensors of one type.
#[derive(Clone, Debug, Serialize)]
struct TypeShown {
    /// The type's name.
    name: &'static str,
    /// What the tensors are, without the numbers of their layers.
    parts: Vec<String>,
    /// In how many layers each part has this type; 0 for parts outside layers.
    #[serde(skip)]
    in_layers: Vec<usize>,
    tensors: usize,
    bytes: u64,
    #[serde(skip)]
    numbers: u64,
}

/// Adds tensors to the list of their types.
fn add_type(types: &mut Vec<TypeShown>, quant: Quant, name: &str, bytes: u64, numbers: u64) {
    let at = types.iter().position(|known| known.name == quant.name()).unwrap_or_else(|| {
        types.push(TypeShown {
            name: quant.name(),
            parts: Vec::new(),
            in_layers: Vec::new(),
            tensors: 0,
            bytes: 0,
            numbers: 0,
        });
        types.len() - 1
    });
    let entry = &mut types[at];
    let words = name.split('.').filter(|word| !matches!(*word, "weight" | "model" | "blk" | "layer" | "layers"));
    let part = words.filter(|word| word.parse::<u32>().is_err()).collect::<Vec<_>>().join(".");
    let place = entry.parts.iter().position(|known| *known == part).unwrap_or_else(|| {
        entry.parts.push(part);
        entry.in_layers.push(0);
        entry.parts.len() - 1
    });
    entry.in_layers[place] += usize::from(name.split('.').any(|word| word.parse::<u32>().is_ok()));
    (entry.tensors, entry.bytes, entry.numbers) = (entry.tensors + 1, entry.bytes + bytes, entry.numbers + numbers);
}

/// The types of a packed model's sections.
fn types_of_store(store: &NeuronStore) -> Vec<TypeShown> {
    let mut types = Vec::new();
    for Section { name, content, .. } in &store.header.sections {
        let mut add = |part: &str, quant: Quant, rows: usize, cols: usize| {
            let bytes = (rows * quant.row_bytes(cols)) as u64;
            add_type(&mut types, quant, &format!("{name}{part}"), bytes, (rows * cols) as u64);
        };
        match *content {
            Content::Rows { quant, rows, cols } => add("", quant, rows, cols),
            Content::Neurons { gate, up, down, neurons, cols } => {
                let parts = [("-gate", gate), ("-up", Some(up)), ("-down", Some(down))];
                parts.iter().for_each(|(part, quant)| quant.iter().for_each(|&quant| add(part, quant, neurons, cols)));
            }
            Content::Clusters { gate, up, down, clusters, neurons, cols } => {
                for (part, quant, rows, cols) in
                    [("-gate", gate, neurons, cols), ("-up", up, neurons, cols), ("-down", down, cols, neurons)]
                {
                    let (rows, numbers) = (rows * clusters, (rows * clusters * cols) as u64);
                    add_type(
                        &mut types,
                        quant,
                        &format!("{name}{part}"),
                        (rows * quant.number_bytes(cols)) as u64,
                        numbers,
                    );
                }
            }
            Content::Experts { gate, up, down, experts, neurons, cols } => {
                let parts = [("-gate", gate), ("-up", Some(up)), ("-down", Some(down))];
                let each = parts.into_iter().filter_map(|(part, quant)| Some((part, quant?)));
                each.for_each(|(part, quant)| add(part, quant, experts * neurons, cols));
            }
            Content::Numbers | Content::Bytes => {}
        }
    }
    types
}

/// The types of a published model's tensors.
fn types_of_source(source: &Source) -> Vec<TypeShown> {
    let mut types = Vec::new();
    for view in source.tensors() {
        let numbers = view.info.shape.iter().product::<usize>() as u64;
        add_type(&mut types, Quant::of_source(view.info.dtype), &view.info.name, view.info.bytes, numbers);
    }
    types
}

pub fn run(args: Args) -> Result<()> {
    let path = find(&args.model)?;
    if !path.is_dir() && PredictorFile::is_one(&path) {
        return show_predictor(&args, &path);
    }
    let shown = match packed(&args, &path)? {
        Some(model) => {
            if args.verify {
                model.store().map_or(Ok(()), verify)?;
            }
            let tokenizer = model.tokenizer().ok();
            let (bytes, fingerprint) = (model.file_bytes(), model.fingerprint().to_owned());
            let store = model.path().to_owned();
            let types = model.store().map(types_of_store).unwrap_or_default();
            let block = model.layers.iter().map(|layer| layer.ffn.cluster_bytes()).max().unwrap_or(0);
            let block_checksums = model.store().is_some_and(NeuronStore::has_block_checksums);
            let both = (model.description(), model.config);
            let shown = describe(path, Some(store), (model.quant, block), types, bytes, fingerprint, tokenizer, both);
            Shown { block_checksums, ..shown }
        }
        None => {
            let source = Source::open(&path, args.activation)?;
            let options = ModelOptions { activation: args.activation, ..ModelOptions::new(&path) };
            let in_place = options.in_place()?.is_some();
            let routed = (0..source.config.layers().len()).find(|&layer| source.config.movable_of(layer) > 0);
            let (quant, block, bytes) = match source.config.is_mixture() {
                true => {
                    let layer = routed.expect("a mixture has a layer with experts");
                    let of_role = |&role| Ok(source.expert(role, layer, 0)?.data.len() as u64);
                    let roles = Role::gate_and_up(source.config.ffn_kind).iter().chain(&[Role::Down]);
                    let expert = roles.map(of_role).sum::<Result<u64>>()?;
                    let up = source.expert(Role::Up, layer, 0)?.view.info.dtype;
                    (Quant::of_source(up), expert, source.tensor_bytes())
                }
                false => {
                    let types = Types::natural(&source)?;
                    let bytes = if in_place { source.tensor_bytes() } else { packed_bytes(&source, types)? };
                    let layer = routed.expect("some layer has an FFN");
                    (types.of(&source, Role::Up, layer)?, layout(&source, types, layer)?.bytes() as u64, bytes)
                }
            };
            let (fingerprint, types) = (source.fingerprint(), types_of_source(&source));
            let both = (source.described, source.config);
            let shown = describe(path, None, (quant, block), types, bytes, fingerprint, source.tokenizer, both);
            Shown { in_place, ..shown }
        }
    };
    if args.json { super::print_json(&shown) } else { super::print(&(table(&shown) + "\n")) }
}

/// The model as it is packed: the file itself, or its copy in the cache.
fn packed(args: &Args, path: &Path) -> Result<Option<Model>> {
    if !path.is_dir() && NeuronStore::is_one(path) {
        return Model::open(path).map(Some);
    }
    let options = ModelOptions { activation: args.activation, ..ModelOptions::new(path) };
    // Without a cache directory no copy exists; errors in the files are reported when they are opened.
    Ok(options.packed(path, &Quiet).unwrap_or(None))
}

fn verify<H: Header>(file: &SectionFile<H>) -> Result<()> {
    let total = file.file_bytes();
    let progress = Progress::new("verifying", Unit::Bytes);
    let mut done = 0;
    file.verify(|bytes| {
        done += bytes;
        // Ctrl-C ends the program at its second press here; a verification writes nothing.
        let _ = progress.step(done, total);
    })?;
    progress.finish();
    eprintln!("all checksums match");
    Ok(())
}

/// The contents of a predictor file: its model, and a row per layer and prefetch distance.
fn show_predictor(args: &Args, path: &Path) -> Result<()> {
    let file = predictor_file::open(path)?;
    if args.verify {
        verify(&file)?;
    }
    let h = &file.header;
    if args.json {
        return super::print_json(&serde_json::json!({
            "path": path.to_string_lossy(), "kind": h.kind, "model": h.model, "fingerprint": h.fingerprint,
            "bytes": file.file_bytes(), "threshold": h.threshold, "cuts": h.activation_thresholds, "tables": h.tables, "made": h.made,
        }));
    }
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_MARKDOWN);
    table.set_header(["layer", "ahead", "rank", "threshold", "recall", "precision", "computed"]);
    let percent = |share: f32| format!("{:.1} %", 100.0 * share);
    for t in &h.tables {
        let threshold = t.threshold.unwrap_or(h.threshold);
        let cells = [t.layer.to_string(), t.ahead.to_string(), t.rank.to_string(), format!("{threshold:.4}")];
        table.add_row(cells.into_iter().chain([t.recall, t.precision, t.computed_share].map(percent)));
    }
    let (model, fingerprint) = (printable(&h.model), printable(&h.fingerprint));
    let bytes = super::human_bytes(file.file_bytes());
    super::print(&format!("{} predictor of {model} ({fingerprint}), {bytes}\n{table}\n", printable(&h.kind)))
}

/// Labels of the copies that were packed from `path`, as another type or with another activation than `store`.
fn copies(path: &Path, store: Option<&Path>) -> Vec<String> {
    let Ok(real) = path.canonicalize() else { return Vec::new() };
    let other = |one: &Stored| one.source.as_ref() == Some(&real) && Some(&*one.path) != store;
    stores::all().into_iter().filter(other).map(|one| one.label).collect()
}

#[allow(clippy::too_many_arguments)]
fn describe(
    path: PathBuf,
    store: Option<PathBuf>,
    (quant, block): (Quant, u64),
    mut types: Vec<TypeShown>,
    bytes: u64,
    fingerprint: String,
    tokenizer: Option<TokenizerSpec>,
    (described, config): (Description, ModelConfig),
) -> Shown {
    let copies = copies(&path, store.as_deref());
    types.sort_by_key(|entry| std::cmp::Reverse(entry.bytes));
    let (all, numbers) = types.iter().fold((0, 0), |(all, numbers), t| (all + t.bytes, numbers + t.numbers));
    Shown {
        path: path.to_string_lossy().into_owned(),
        packed: store.is_some(),
        in_place: false,
        types,
        bits_per_weight: 8.0 * all as f64 / numbers.max(1) as f64,
        store: store.map(|store| store.to_string_lossy().into_owned()),
        copies,
        quant: quant.name(),
        bytes,
        parameters: config.parameters(),
        neuron_block_bytes: block,
        ffn_share: block as f64 * (config.clusters() * config.movable_layers()) as f64 / bytes as f64,
        block_checksums: false,
        // What a context of one more token takes; states take the same for any.
        kv_bytes_per_token: KvCache::bytes_for(&config, 2, KvType::F16) - KvCache::bytes_for(&config, 1, KvType::F16),
        fingerprint,
        tokenizer: tokenizer.as_ref().map(|t| match t.model {
            ModelSpec::HfJson { .. } => "tokenizer.json",
            ModelSpec::Spm(_) => "SentencePiece BPE",
            ModelSpec::Bpe(_) => "byte-level BPE",
        }),
        chat_template: tokenizer.is_some_and(|t| t.chat_template.is_some()),
        config: described,
        model: config,
    }
}

/// What a packed file's checksums are of.
fn checksums(shown: &Shown) -> Option<&'static str> {
    shown.store.as_ref()?;
    Some(match shown.block_checksums {
        true => "of each FFN block, verified at its first read from disk (--ram)",
        false => "of whole sections only; pack it again to verify reads from disk",
    })
}

/// What a layer's FFN is.
fn ffn_text(shown: &Shown) -> String {
    let c = &shown.model;
    let sparse = if c.activation.is_sparse() { "sparse" } else { "dense" };
    let dense = match c.layers().len() - c.movable_layers() {
        0 => String::new(),
        some => format!("; {some} layers have none"),
    };
    match (c.parts(), shown.in_place) {
        (FfnParts::Clusters, _) => format!(
            "{} clusters of {} neurons a layer, {}; {} a cluster, {:.0} % of the file",
            c.clusters(),
            c.widest_ffn(),
            c.activation,
            super::human_bytes(shown.neuron_block_bytes),
            100.0 * shown.ffn_share
        ),
        (FfnParts::Experts, _) => format!(
            "{} experts of {} neurons a layer, {} for a token{}, {}; {} an expert, {:.0} % of the file{dense}",
            c.clusters(),
            c.widest_ffn(),
            c.most_used_experts(),
            match c.most_of_experts(|experts| experts.shared.map_or(0, |shared| shared.width)) {
                0 => String::new(),
                width => format!(" and one of {width} for all"),
            },
            c.activation,
            super::human_bytes(shown.neuron_block_bytes),
            100.0 * shown.ffn_share
        ),
        (FfnParts::Neurons, true) => {
            let widths = (0..c.layers().len()).map(|layer| c.width(layer)).filter(|&width| width > 0);
            let least = widths.min().filter(|&least| least < c.widest_ffn());
            let least = least.map_or(String::new(), |least| format!("{least} to "));
            format!("{least}{} neurons a layer, {} ({sparse})", c.widest_ffn(), c.activation)
        }
        (FfnParts::Neurons, false) => format!(
            "{} neurons a layer, {} ({sparse}), {} a neuron block, {:.0} % of the file",
            c.widest_ffn(),
            c.activation,
            super::human_bytes(shown.neuron_block_bytes),
            100.0 * shown.ffn_share
        ),
    }
}

fn table(shown: &Shown) -> String {
    let (c, described) = (&shown.model, &shown.config);
    let size = super::human_bytes(shown.bytes);
    let state = match &shown.store {
        Some(store) if *store == shown.path => format!("packed as {}, {size}", shown.quant),
        Some(store) => format!("packed as {}, {size}, at {}", shown.quant, printable(store)),
        None if shown.in_place => format!("memory-mapped without packing, {size}"),
        None => format!("not packed; run packs it as {}, {size}", shown.quant),
    };
    let state = match &shown.copies[..] {
        [] => state,
        copies => format!("{state}; other packed copies: {}", printable(&copies.join(", "))),
    };
    let window = described.window.map_or(String::new(), |w| format!(", attention window {w}"));
    let named = if shown.types.len() > 2 { PARTS } else { PARTS_OF_ONE };
    let of_type = |t: &TypeShown| {
        let part = |(part, &n): (&String, &usize)| match n {
            1 if c.layers().len() > 1 => format!("{part} of 1 layer"),
            _ if (1..c.layers().len()).contains(&n) => format!("{part} of {n} layers"),
            _ => part.clone(),
        };
        let parts = t.parts.iter().zip(&t.in_layers).take(named).map(part).collect::<Vec<_>>().join(", ");
        let more = if t.parts.len() > named { " and more" } else { "" };
        let parts = format!("{parts}{more}");
        format!("{} {} in {} tensors ({})", t.name, super::human_bytes(t.bytes), t.tensors, printable(&parts))
    };
    let types = shown.types.iter().map(of_type).collect::<Vec<_>>().join("\n");
    let other = c.mixers().find(|mixer| mixer.attention().is_none());
    let (gated, others) =
        (if described.form.gated { ", gated" } else { "" }, c.layers().len() - c.attentions().count());
    let others = other.map_or(String::new(), |other| format!("; {others} layers have {} instead", other.noun()));
    let latent = c.attentions().find_map(|attention| attention.latent);
    let sized = c.attentions().filter(|a| a.head_dim != described.head_dim).map(|a| a.head_dim).collect::<Vec<_>>();
    let sized = sized.first().map_or(String::new(), |dim| format!("; {} layers have heads of {dim}", sized.len()));
    let rows: [(&str, String); 13] = [
        ("model", printable(&c.name)),
        ("path", printable(&shown.path)),
        ("family", printable(&c.family)),
        ("state", state),
        ("types", format!("{:.2} bits a weight\n{types}", shown.bits_per_weight)),
        ("parameters", format!("{:.3} B", shown.parameters as f64 / 1e9)),
        ("layers", format!("{} of hidden size {}", c.layers().len(), c.hidden)),
        (
            "attention",
            format!(
                "{} heads of {}, {}{gated}{window}{sized}{others}",
                described.heads,
                latent.map_or(described.head_dim, |latent| latent.query()),
                latent.map_or(format!("{} key/value heads", described.kv_heads), |latent| format!(
                    "one latent of {}",
                    latent.rank
                )),
            ),
        ),
        ("FFN", ffn_text(shown)),
        ("vocabulary", format!("{}{}", c.vocab, if c.tied { ", head tied to the embedding" } else { "" })),
        ("context", format!("{}, {} of KV a token", c.context, super::human_bytes(shown.kv_bytes_per_token))),
        (
            "tokeniser",
            format!(
                "{}{}",
                shown.tokenizer.unwrap_or("none"),
                if shown.chat_template { ", with a chat template" } else { "" }
            ),
        ),
        ("fingerprint", printable(&shown.fingerprint)),
    ];
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    for (name, value) in rows {
        table.add_row([name, &value]);
        if let ("FFN", Some(checksums)) = (name, checksums(shown)) {
            table.add_row(["checksums", checksums]);
        }
    }
    table.to_string()
}
