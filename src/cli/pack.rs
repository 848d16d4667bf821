use super::model_arg::{Terminal, parse_activation};
use super::progress::{Progress, Unit};
use crate::error::{Error, Result, printable};
use crate::formats::blocks::BlockType;
use crate::formats::neuron_store::{EXTENSION, NeuronStore};
use crate::formats::profile_file;
use crate::formats::rows::Quant;
use crate::ids::Permutation;
use crate::model::NamedActivation;
use crate::model::source::{Source, read_json};
use crate::open::model::{check_activation, check_room, find};
use crate::pack::{PackOptions, Types, pack_weighted, packed_bytes};
use crate::profile::{Importance, Profile};
use std::path::{Path, PathBuf};

/// Pack a model into a neuron store
///
/// The store holds gate, up and down of each neuron side by side, so that a neuron is one contiguous block. `run` and
/// `bench` do this by themselves, once, into the cache directory; pack it yourself to choose the type or the place.
///
/// A mixture of experts is memory-mapped without packing. If its activation has zeros (ReLU, dReLU), packing makes decoding faster: only the
/// active neurons of the chosen experts are read, and a device holds single neurons of all experts instead of whole experts.
#[derive(clap::Args)]
pub struct Args {
    /// Hugging Face directory, .gguf, or `demo`
    model: PathBuf,
    /// Type of attention and FFN weights, a mix, or `clusters` [default: each tensor's own; floats as f16]
    ///
    /// Types: f32, f16, q8_0, q4_0, or one of GGUF's: q4_k, q5_k, q6_k, iq4_xs, mxfp4 and others; embeddings and head get at least q6_k. Mixes
    /// set the type of every tensor: q3_k_s, q3_k_m, q3_k_l, q4_k_s, q4_k_m, q5_k_s, q5_k_m. `clusters` keeps every byte and cuts FFNs into
    /// runs of 256 neurons, for a dense model larger than memory.
    #[arg(long, value_name = "QUANT")]
    quant: Option<Types>,
    /// Weight quantisation errors by the size of the inputs in this profile
    ///
    /// The profile must be this model's: dynamicinfer profile MODEL --text FILE -o PROFILE
    #[arg(long, value_name = "PROFILE", requires = "quant")]
    importance: Option<PathBuf>,
    /// Keep every tensor's type except for down, which gets this one: a store has down by neuron, so it must be re-encoded [default: q5_k]
    #[arg(long, value_name = "QUANT", conflicts_with = "quant")]
    down: Option<Quant>,
    /// File to write [default: NAME.TYPE.neurons in the current directory]
    #[arg(short, long)]
    output: Option<PathBuf>,
    /// Activation function of a model that names none or a wrong one: relu, fatrelu(0.01), relu2, drelu (TurboSparse, Bamboo: relu of gate
    /// and up), silu, gelu
    #[arg(long, value_name = "NAME", value_parser = parse_activation)]
    activation: Option<NamedActivation>,
    /// JSON file with the order of each layer's neurons, [[3, 0, ...], ...], such as hot neurons first
    #[arg(long)]
    order: Option<PathBuf>,
    /// Replace an existing file
    #[arg(short, long)]
    force: bool,
}

/// A file name for what the model calls itself: `org/model` is `model`, and no name leads out of the directory.
fn file_name(name: &str) -> String {
    let last = name.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let safe: String = last.trim_start_matches('.').chars().map(|c| if c.is_control() { '_' } else { c }).collect();
    if safe.is_empty() { "model".into() } else { safe }
}

/// The orders in a JSON file, `[layers]`.
fn read_orders(path: &Path) -> Result<Vec<Permutation>> {
    let bad = |why: String| Error::Usage(format!("{}: {why}", path.display()));
    let layers: Vec<Vec<u32>> = serde_json::from_value(read_json(path, 1 << 30)?)
        .map_err(|e| bad(format!("it is not a list of neuron numbers per layer: {e}")))?;
    let order = |(layer, numbers): (usize, &Vec<u32>)| {
        Permutation::new(numbers).ok_or_else(|| bad(format!("layer {layer} does not name each of its neurons once")))
    };
    layers.iter().enumerate().map(order).collect()
}

/// The importance of columns in a profile.
fn read_importance(path: &Path, types: Types) -> Result<Importance> {
    if let Some(quant @ (Quant::F32 | Quant::F16 | Quant::Block(BlockType::BF16))) = types.one() {
        let name = quant.name();
        let why = format!("--importance: {name} stores every number by itself and has nothing to weigh; leave it out");
        return Err(Error::Usage(why));
    }
    let profile = Profile::read(&profile_file::open(path)?)?;
    let importance = Importance::of(&profile).ok_or_else(|| {
        let path = printable(&path.to_string_lossy());
        let how = "make it with `dynamicinfer profile MODEL --text FILE -o PROFILE`; profiles of mixtures have none";
        Error::Usage(format!("{path}: the profile has no statistics of the matrices' inputs; {how}"))
    })?;
    eprintln!("importance from {} tokens of {}", importance.tokens, printable(&importance.model));
    Ok(importance)
}

pub fn run(args: Args) -> Result<()> {
    let path = find(&args.model)?;
    if !path.is_dir() && NeuronStore::is_one(&path) {
        return Err(Error::Usage(format!("{} is already packed; pack the model it was made from", path.display())));
    }
    let source = Source::open(&path, args.activation)?;
    let types = match (args.quant, args.down) {
        (Some(types), _) => types,
        (None, Some(down)) => Types::Own { down },
        (None, None) => Types::natural(&source)?,
    };
    let name = types.name(&source)?;
    let output = args
        .output
        .unwrap_or_else(|| PathBuf::from(format!("{}.{}.{EXTENSION}", file_name(&source.config.name), name)));
    if output.exists() && !args.force {
        return Err(Error::Usage(format!("{} already exists; add --force to replace it", output.display())));
    }
    let orders = args.order.as_deref().map(read_orders).transpose()?;
    let importance = args.importance.as_deref().map(|file| read_importance(file, types)).transpose()?;
    let dir = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(".".as_ref());
    check_room(dir, packed_bytes(&source, types)?)?;
    let progress = Progress::new(format!("packing {} as {name}", printable(&source.config.name)), Unit::Bytes);
    let weights = args.importance.as_deref().zip(importance.as_ref());
    let step = |done, total| progress.step(done, total);
    let packed = pack_weighted(&source, &output, &PackOptions { types, orders }, weights, &step)?;
    progress.finish();
    let bytes = std::fs::metadata(&output).map_err(Error::io("stat", &output))?.len();
    eprintln!("{} written, {}", output.display(), super::human_bytes(bytes));
    if let Some(loss) = packed.text(types) {
        eprintln!("{loss}");
    }
    check_activation(&output, &Terminal)
}
