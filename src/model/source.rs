//! A model as it was published: a Hugging Face directory or a GGUF file, with its tensors found by role.

use super::config::{Ffn, ModelConfig, NamedActivation, Positions};
use super::described::Description;
use super::families::{self, names::DeltaRows, names::GGUF, names::Names};
use super::layer::{Attention, Latent, LinearAttention, Norms};
pub use super::role::Role;
use crate::error::{Error, Result};
use crate::formats::gguf;
use crate::formats::neuron_store::SourceFile;
use crate::formats::{DType, MappedFile, TensorView, Tensors, blocks, json, safetensors};
use crate::hub;
use crate::tokenizer::{TokenizerSpec, from_gguf, from_hf_dir, has_tokenizer};
use std::path::{Path, PathBuf};

/// A published model, opened: every tensor that packing needs is there, with its shape.
pub struct Source {
    /// The directory or GGUF file, as it was named.
    pub path: PathBuf,
    /// The model's shape, as its files and the user say it.
    pub described: Description,
    /// What each of its layers is by that.
    pub config: ModelConfig,
    /// The tokenizer that lies beside it or in it; `None` for a model that takes token ids only.
    pub tokenizer: Option<TokenizerSpec>,
    pub(super) tensors: Tensors,
    pub(super) names: Names,
    /// The numbers that the files have for a layer's mixer and for its FFN, where these are numbered apart; otherwise empty.
    numbers: Vec<[usize; 2]>,
    /// The files as they were before the first was read: if one is replaced meanwhile, the packed model must look outdated.
    files: Vec<SourceFile>,
}

/// The rows of a tensor that belong to one role: all of them, or some where several roles share the tensor.
pub struct RoleRows<'a> {
    /// The whole tensor; [`RoleRows::file_row`] says where a row stands in it.
    pub view: TensorView<'a>,
    /// How many rows the role has.
    pub rows: usize,
    order: Option<Vec<usize>>,
}

impl RoleRows<'_> {
    /// The tensor's row that is row `row` of the role.
    pub fn file_row(&self, row: usize) -> usize {
        self.order.as_ref().map_or(row, |order| order[row])
    }
}

/// One expert's matrix, of a tensor of its own or of one that all experts share.
#[derive(Clone, Copy)]
pub struct ExpertMatrix<'a> {
    /// The whole tensor.
    pub view: TensorView<'a>,
    /// The expert's bytes of it.
    pub data: &'a [u8],
    /// `[rows, cols]` of the expert's matrix.
    pub shape: [usize; 2],
}

impl Source {
    /// Opens a directory or a GGUF and checks that all tensors are there. `activation` overrides what the files say, for files that do not
    /// say it.
    ///
    /// # Errors
    /// [`Error::BadFile`] with what is missing, wrong or not supported, [`Error::Io`] if a file cannot be opened.
    pub fn open(path: &Path, activation: Option<NamedActivation>) -> Result<Source> {
        let path = &entry(path)?;
        let files = source_files(path)?;
        let mut read = if path.is_dir() { open_dir(path, activation)? } else { open_gguf(path, activation)? };
        if read.described.name.is_empty() || read.described.name.starts_with('/') {
            read.described.name = hub::file_stem(path);
        }
        read.tell_gates_apart();
        read.see_forms(path)?;
        let config = read.described.resolve().map_err(|why| Error::bad(path, "", why))?;
        let Read { described, names, tensors, tokenizer } = read;
        let numbers = numbers(&config, &names);
        let source = Source { path: path.clone(), described, config, tokenizer, tensors, names, numbers, files };
        source.check_all()?;
        Ok(source)
    }

    /// The files that it consists of, as they were when it was opened.
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Checks that the mapped files still hold what they held.
    ///
    /// # Errors
    /// [`Error::BadFile`] if one of them was changed in place since it was opened.
    pub fn check_same(&self) -> Result<()> {
        self.tensors.files().iter().try_for_each(|file| file.check_same())
    }

    /// The tensor that holds a role's weight; `layer` is ignored for roles outside the layers.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is missing or has another shape than the model's configuration needs.
    pub fn weight(&self, role: Role, layer: usize) -> Result<TensorView<'_>> {
        self.find(role, layer, "weight", &self.shape(role, layer))
    }

    /// The rows of a role's weight; those of queries and keys are given in rotate-half order.
    ///
    /// # Errors
    /// As [`Source::weight`].
    pub fn rows(&self, role: Role, layer: usize) -> Result<RoleRows<'_>> {
        let view = self.weight(role, layer)?;
        let order = self.row_order(role, layer);
        Ok(RoleRows { view, rows: order.as_ref().map_or(view.info.shape[0], Vec::len), order })
    }

    pub(super) fn row_order(&self, role: Role, layer: usize) -> Option<Vec<usize>> {
        self.names.row_order(role, self.config.mixer(layer))
    }

    /// The number that the files have for the part of a layer that a role is of.
    pub(super) fn number(&self, role: Role, layer: usize) -> usize {
        self.numbers.get(layer).map_or(layer, |numbers| numbers[usize::from(role.is_of_ffn())])
    }

    /// The norms of a layer beside those of heads.
    pub fn norms(&self, layer: usize) -> impl Iterator<Item = Role> {
        let (norms, has_ffn) = (self.config.layer(layer).norms, self.config.has_ffn(layer));
        let of = [
            (norms.before(), Role::AttnNorm),
            (norms.before() && norms != Norms::ParallelShared && has_ffn, Role::FfnNorm),
            (norms.after(), Role::AttnPostNorm),
            (norms.after() && has_ffn, Role::FfnPostNorm),
        ];
        of.into_iter().filter_map(|(there, role)| there.then_some(role))
    }

    /// The matrix of an expert's gate, up or down.
    ///
    /// # Errors
    /// [`Error::BadFile`] if the tensor is missing or has another shape than the model's configuration needs.
    pub fn expert(&self, role: Role, layer: usize, expert: usize) -> Result<ExpertMatrix<'_>> {
        let c = &self.config;
        let experts = c.experts(layer).map_or(1, |experts| experts.count);
        let shape = match role {
            Role::Down => [c.hidden, c.width(layer)],
            _ => [c.width(layer), c.hidden],
        };
        let names = self.names.of_expert(role, self.number(role, layer), expert, experts);
        let found = names.iter().find_map(|(name, matrices)| {
            // Tensors of all experts have no ending in a Hugging Face directory.
            let view = self.tensors.get(&format!("{name}.weight")).or_else(|| self.tensors.get(name))?;
            Some((view, *matrices))
        });
        let Some((view, matrices)) = found else {
            let tried: Vec<String> = names.iter().map(|(name, _)| format!("{name}.weight")).collect();
            return Err(Error::bad(&self.path, tried.join(" or "), "the tensor is missing"));
        };
        let [rows, cols] = shape;
        let (wanted, number) = match matrices {
            1 => (vec![rows, cols], 0),
            _ if matrices == experts => (vec![experts, rows, cols], expert),
            _ => (vec![experts, 2 * rows, cols], 2 * expert + usize::from(role == Role::Up)),
        };
        if view.info.shape != wanted {
            let why = format!("has shape {:?}, the model's configuration needs {wanted:?}", view.info.shape);
            return Err(Error::bad_at(view.path, &view.info.name, view.info.offset, why));
        }
        let bytes = rows * view.info.dtype.row_bytes(cols);
        Ok(ExpertMatrix { view, data: &view.data[number * bytes..(number + 1) * bytes], shape })
    }

    pub(super) fn find_expert_biases(&self, role: Role, layer: usize) -> Result<TensorView<'_>> {
        let c = &self.config;
        let rows = if role == Role::Down { c.hidden } else { c.width(layer) };
        self.find_named(&self.names.of_expert_biases(role, self.number(role, layer)), "bias", &[c.clusters(), rows])
    }

    /// Whether `down` of this layer is stored with one row per neuron (PowerInfer's `ffn_down_t`), `[ffn, hidden]`.
    pub fn down_by_neuron(&self, layer: usize) -> bool {
        self.tensors.get(&format!("blk.{layer}.ffn_down_t.weight")).is_some()
    }

    /// Rows of the table of learned positions; 0 where positions are rotations.
    fn position_rows(&self) -> usize {
        self.config.learned_positions.map_or(0, |offset| self.config.context + offset)
    }

    /// The roles of what stands between a layer's latents and its heads, if it has some: norms, then matrices. Older files have keys and values
    /// in one matrix.
    pub fn latent_roles(&self, layer: usize) -> [&'static [Role]; 2] {
        let Some(latent) = self.config.attention(layer).and_then(|attention| attention.latent) else {
            return [&[], &[]];
        };
        let apart = self.names.has(Role::KeysTurned)
            && self.tensor(&self.names.of(Role::KeysTurned, layer), "weight").is_some();
        match (latent.queries > 0, apart) {
            (true, true) => {
                [&[Role::QueryLatentNorm, Role::LatentNorm], &[Role::QueryUp, Role::KeysTurned, Role::Values]]
            }
            (true, false) => [&[Role::QueryLatentNorm, Role::LatentNorm], &[Role::QueryUp, Role::KeysAndValues]],
            (false, true) => [&[Role::LatentNorm], &[Role::KeysTurned, Role::Values]],
            (false, false) => [&[Role::LatentNorm], &[Role::KeysAndValues]],
        }
    }

    /// Neurons of what every token of a mixture's layer passes through; 0 where there is nothing.
    pub(super) fn shared_width(&self, layer: usize) -> usize {
        self.config.experts(layer).and_then(|experts| experts.shared).map_or(0, |shared| shared.width)
    }

    /// Whether a mixture's layer has no router.
    fn has_dense(&self, layer: usize) -> bool {
        self.config.experts(layer).is_some_and(|experts| experts.count == 0)
    }

    /// The roles of what every token of a mixture's layer passes through: of gate and up, or up alone, and of down.
    pub fn shared_roles(&self, layer: usize) -> (&'static [Role], Role) {
        let kind = self.config.ffn_kind;
        match (self.has_dense(layer), kind == Ffn::Plain) {
            (true, _) => (Role::gate_and_up(kind), Role::Down),
            (false, true) => (&[Role::SharedUp], Role::SharedDown),
            (false, false) => (&[Role::SharedGate, Role::SharedUp], Role::SharedDown),
        }
    }

    /// The shape of the tensor that holds a role's weight.
    pub(super) fn shape(&self, role: Role, layer: usize) -> Vec<usize> {
        let c = &self.config;
        let mixer = c.mixer(layer);
        let of = |of: fn(&Attention) -> usize| mixer.attention().map_or(0, |attention| of(&attention));
        let linear = |of: fn(&LinearAttention) -> usize| mixer.linear().map_or(0, |linear| of(&linear));
        let (heads, form) = (of(|a| a.heads), mixer.attention().and_then(|attention| attention.latent));
        let latent = |of: fn(&Latent) -> usize| form.map_or(0, |latent| of(&latent));
        let first = mixer.inputs().next().map_or(0, |(_, rows)| rows);
        match role {
            Role::Embed | Role::Head => vec![c.vocab, c.hidden],
            Role::Positions => vec![self.position_rows(), c.hidden],
            Role::OutNorm | Role::AttnNorm | Role::FfnNorm | Role::AttnPostNorm | Role::FfnPostNorm => vec![c.hidden],
            Role::RouterScale | Role::SharedNorm | Role::SharedPostNorm | Role::ExpertsPostNorm => vec![c.hidden],
            Role::Q | Role::K | Role::V if self.names.fused() => vec![mixer.rows(), c.hidden],
            Role::Q | Role::AttnGate if of(|a| a.gated.into()) > 0 => vec![2 * of(|a| a.q_dim()), c.hidden],
            Role::Q | Role::AttnGate => vec![of(|a| a.query_rows()), c.hidden],
            Role::K | Role::V => vec![of(|a| a.kv_dim()), c.hidden],
            Role::MixerIn | Role::DeltaGate | Role::DeltaAlpha if self.names.delta == DeltaRows::Whole => {
                vec![mixer.rows(), c.hidden]
            }
            Role::MixerIn | Role::DeltaGate if self.names.delta == DeltaRows::Joined => {
                vec![first + linear(|l| l.values()), c.hidden]
            }
            Role::DeltaBeta | Role::DeltaAlpha if self.names.delta != DeltaRows::Apart => {
                vec![2 * linear(|l| l.value_heads), c.hidden]
            }
            Role::MixerIn => vec![first, c.hidden],
            Role::DeltaGate => vec![linear(|l| l.values()), c.hidden],
            Role::DeltaBeta | Role::DeltaAlpha => vec![linear(|l| l.value_heads), c.hidden],
            Role::StepBias | Role::Decay | Role::Skip => vec![linear(|l| l.value_heads)],
            Role::StateNorm => vec![linear(|l| l.norm_weights())],
            Role::OutputScale => vec![1],
            Role::PerLayerGate => vec![c.per_layer, c.hidden],
            Role::PerLayerOut => vec![c.hidden, c.per_layer],
            Role::PerLayerPostNorm => vec![c.hidden],
            Role::PerLayerTable => vec![c.vocab, c.layers().len() * c.per_layer],
            Role::PerLayerProjection => vec![c.layers().len() * c.per_layer, c.hidden],
            Role::PerLayerNorm => vec![c.per_layer],
            Role::QueryLatentNorm => vec![latent(|l| l.queries)],
            Role::QueryUp => vec![heads * latent(|l| l.query()), latent(|l| l.queries)],
            Role::LatentNorm => vec![latent(|l| l.rank)],
            Role::KeysAndValues => vec![heads * latent(|l| l.plain + l.values), latent(|l| l.rank)],
            Role::KeysTurned => vec![heads, latent(|l| l.rank), latent(|l| l.plain)],
            Role::Values => vec![heads, latent(|l| l.values), latent(|l| l.rank)],
            Role::O | Role::MixerOut => vec![c.hidden, mixer.cols()],
            Role::Taps => mixer.taps().into_iter().rev().collect(),
            Role::Gate | Role::Up if self.has_dense(layer) => vec![self.shared_width(layer), c.hidden],
            Role::Down if self.has_dense(layer) => vec![c.hidden, self.shared_width(layer)],
            Role::Gate | Role::Up => vec![c.width(layer), c.hidden],
            Role::Down => vec![c.hidden, c.width(layer)],
            Role::QNorm => vec![of(|a| a.normed_dims()[0])],
            Role::KNorm => vec![of(|a| a.normed_dims()[1])],
            Role::Sinks => vec![of(|a| a.heads)],
            Role::SelectionBias | Role::ExpertScales => vec![c.clusters()],
            Role::Router => vec![c.clusters(), c.hidden],
            Role::SharedGate | Role::SharedUp => vec![self.shared_width(layer), c.hidden],
            Role::SharedDown => vec![c.hidden, self.shared_width(layer)],
            Role::SharedRouter => vec![1, c.hidden],
        }
    }

    pub(super) fn find(&self, role: Role, layer: usize, part: &str, shape: &[usize]) -> Result<TensorView<'_>> {
        let transposed = role == Role::Down && part == "weight" && self.down_by_neuron(layer);
        let stem = match transposed {
            true => format!("blk.{layer}.ffn_down_t"),
            false => self.names.of(role, self.number(role, layer)),
        };
        let wanted: Vec<usize> = if transposed { shape.iter().rev().copied().collect() } else { shape.to_vec() };
        match self.tensor(&stem, part) {
            // One row is a vector for converters.
            Some(view) if role == Role::SharedRouter && view.info.shape == wanted[1..] => Ok(view),
            // Of one group.
            Some(view) if role == Role::SelectionBias && view.info.shape == [1, wanted[0]] => Ok(view),
            // By head, or by what is normed together.
            Some(view)
                if matches!(role, Role::Decay | Role::Skip | Role::StateNorm)
                    && view.info.shape.iter().product::<usize>() == wanted[0] =>
            {
                Ok(view)
            }
            // A filter for each channel, of one channel.
            Some(view) if role == Role::Taps && view.info.shape[..] == [&wanted[..1], &[1], &wanted[1..]].concat() => {
                Ok(view)
            }
            _ => self.find_named(&stem, part, &wanted),
        }
    }

    /// A tensor by its name and part; a directory's selection bias is a name of its own, and the decays of linear attention and what skips it have no part.
    fn tensor(&self, stem: &str, part: &str) -> Option<TensorView<'_>> {
        let bare = || self.tensors.get(stem).filter(|_| part == "weight");
        let with = |between: &str| self.tensors.get(&format!("{stem}{between}{part}"));
        with(".").or_else(|| with("_")).or_else(bare)
    }

    pub(super) fn find_named(&self, stem: &str, part: &str, wanted: &[usize]) -> Result<TensorView<'_>> {
        let name = format!("{stem}.{part}");
        let view = match self.tensor(stem, part) {
            Some(view) => view,
            None => return Err(Error::bad(&self.path, name, "the tensor is missing")),
        };
        if view.info.shape != wanted {
            let why = format!("has shape {:?}, the model's configuration needs {wanted:?}", view.info.shape);
            return Err(Error::bad_at(view.path, name, view.info.offset, why));
        }
        Ok(view)
    }

    /// All tensors.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> + Send {
        self.tensors.iter()
    }

    /// The files that the tensors lie in.
    pub fn mapped(&self) -> &[MappedFile] {
        self.tensors.files()
    }

    /// Bytes of all tensors together.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.data.len() as u64).sum()
    }

    /// Hash of the model's shape and of every byte of every tensor, as 32 hex digits.
    pub fn fingerprint(&self) -> String {
        self.fingerprint_by(&|_| Ok(())).expect("it is not ended")
    }

    /// As [`Source::fingerprint`]. `step(bytes)` is called with the length of each piece that was read, from several threads.
    ///
    /// # Errors
    /// Those of `step`.
    pub fn fingerprint_by(&self, step: &(dyn Fn(u64) -> Result<()> + Sync)) -> Result<String> {
        use rayon::prelude::*;
        use xxhash_rust::xxh3::Xxh3;
        // A tenth of a second's reading from a disk.
        const PIECE: usize = 16 << 20;
        // In the order of names, so that shards may be cut anywhere.
        let mut views: Vec<_> = self.tensors.iter().collect();
        views.sort_by(|a, b| a.info.name.cmp(&b.info.name));
        let sum = |view: &TensorView<'_>| -> Result<u128> {
            let mut hash = Xxh3::new();
            for piece in view.data.chunks(PIECE) {
                hash.update(piece);
                step(piece.len() as u64)?;
            }
            Ok(hash.digest128())
        };
        let sums = views.par_iter().map(sum).collect::<Result<Vec<u128>>>()?;
        let mut hash = Xxh3::new();
        let shape = Description { name: String::new(), ..self.described.clone() };
        hash.update(&serde_json::to_vec(&shape).expect("plain data"));
        for (view, sum) in views.iter().zip(sums) {
            hash.update(view.info.name.as_bytes());
            hash.update(&sum.to_le_bytes());
        }
        Ok(format!("{:032x}", hash.digest128()))
    }
}

/// What stands for the model that `path` names: of a GGUF in parts the first, also where another one is named; of a directory that holds one
/// GGUF and no config.json, whole or in parts, that; else the path itself.
///
/// # Errors
/// [`Error::Io`] if there is nothing at the path, [`Error::BadFile`] for a directory with GGUFs of several models and no config.json.
pub fn entry(path: &Path) -> Result<PathBuf> {
    let meta = std::fs::metadata(path).map_err(Error::io("open", path))?;
    if !meta.is_dir() {
        return Ok(gguf::first_part(path));
    }
    if path.join("config.json").exists() {
        return Ok(path.to_owned());
    }
    let entries = std::fs::read_dir(path).map_err(Error::io("list", path))?.flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let is_model = |name: &String| name.ends_with(".gguf") && !hub::is_beside(name);
    let of_first = |name: &String| gguf::PartName::parse(name).map_or(name.clone(), |part| part.of(1));
    let mut files: Vec<String> = names.filter(is_model).collect();
    files.sort();
    // One file of each model: the first part, where that is there.
    files.dedup_by_key(|name| of_first(name));
    match &files[..] {
        [] => Ok(path.to_owned()),
        [one] => Ok(path.join(one)),
        several => {
            let (count, names) = (several.len(), several.join(", "));
            let why = format!("holds {count} models and no config.json; name one of them: {names}");
            Err(Error::bad(path, "", why))
        }
    }
}

/// The files that make up the model at `path`, sorted by name; a packed copy is checked against them.
///
/// # Errors
/// [`Error::Io`] if the system refuses.
pub fn source_files(path: &Path) -> Result<Vec<SourceFile>> {
    if !path.is_dir() {
        return gguf::files_of(path).iter().map(|path| SourceFile::of(path)).collect();
    }
    const BESIDE: [&str; 10] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ];
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(Error::io("list", path))? {
        let entry = entry.map_err(Error::io("list", path))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if BESIDE.contains(&name.as_str())
            || name.ends_with(".safetensors")
            || name.ends_with(".safetensors.index.json")
        {
            files.push(SourceFile::of(&entry.path())?);
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Why the model at `path` is read in place and never packed, as far as its files can be read ([`ModelConfig::only_in_place`]).
pub fn only_in_place(path: &Path, activation: Option<NamedActivation>) -> Option<&'static str> {
    let described = || {
        if path.is_dir() {
            let config = path.join("config.json");
            return families::from_config_json(&read_json(&config, MAX_CONFIG)?, &config, activation);
        }
        families::from_gguf(&gguf::open(path)?.0, path, None, activation)
    };
    described().ok()?.resolve().ok()?.only_in_place()
}

/// Bytes of the largest config.json.
const MAX_CONFIG: u64 = 16 << 20;

/// Reads a JSON file beside a model.
///
/// # Errors
/// [`Error::BadFile`] if it is longer than `limit` bytes or not JSON, [`Error::Io`] if it cannot be opened.
pub fn read_json(path: &Path, limit: u64) -> Result<serde_json::Value> {
    let file = MappedFile::open(path)?;
    if file.bytes().len() as u64 > limit {
        return Err(Error::bad(path, "", format!("is larger than {limit} bytes")));
    }
    json::parse(file.bytes()).map_err(|e| Error::bad(path, "", format!("not understood: {e}")))
}

/// What a published model's files say.
pub(super) struct Read {
    pub(super) described: Description,
    pub(super) names: Names,
    pub(super) tensors: Tensors,
    tokenizer: Option<TokenizerSpec>,
}

/// The numbers of each layer's parts, where a file numbers them apart: one after the other.
fn numbers(config: &ModelConfig, names: &Names) -> Vec<[usize; 2]> {
    let mut next = 0;
    let mut of_layer = |layer| {
        let numbers = [next, next + 1];
        next += 1 + usize::from(config.has_ffn(layer));
        numbers
    };
    if names.apart { (0..config.layers().len()).map(&mut of_layer).collect() } else { Vec::new() }
}

fn open_dir(path: &Path, activation: Option<NamedActivation>) -> Result<Read> {
    let config_path = path.join("config.json");
    if !config_path.exists() {
        let why =
            "not a model directory: there is no config.json; give a Hugging Face directory, a .gguf or a .neurons file";
        return Err(Error::bad(path, "", why));
    }
    let described = families::from_config_json(&read_json(&config_path, MAX_CONFIG)?, &config_path, activation)?;
    let tensors = safetensors::open_dir(path)?;
    let names = families::tensors(&described, &tensors);
    let known: [&[&str]; 3] = [&["tokenizer.json"], &["tokenizer.model"], &["vocab.json", "merges.txt"]];
    let tokenizer = match known.iter().any(|files| files.iter().all(|f| path.join(f).exists())) {
        true => Some(from_hf_dir(path)?),
        false => None,
    };
    Ok(Read { described, names, tensors, tokenizer })
}

fn open_gguf(path: &Path, activation: Option<NamedActivation>) -> Result<Read> {
    let (gguf, tensors) = gguf::open(path)?;
    // Files of Phi-3 have two lists, of which the other is for longer texts.
    let name = match gguf.metadata.str("general.architecture")? {
        Some("phi3") => "rope_factors_short.weight",
        _ => "rope_freqs.weight",
    };
    let factors = match tensors.get(name) {
        Some(view) if view.info.dtype == DType::F32 => {
            let mut factors = vec![0.0; view.info.shape.iter().product()];
            blocks::dequantize(DType::F32, view.data, &mut factors);
            Some(factors)
        }
        Some(view) => return Err(Error::bad(path, &view.info.name, "must be F32")),
        None => None,
    };
    let mut described = families::from_gguf(&gguf, path, factors, activation)?;
    // Converters write the length of OPT's whole table as its context; two of its rows stand before position 0.
    if let (Positions::Learned { offset }, Some(table)) = (&described.positions, tensors.get("position_embd.weight")) {
        described.context = table.info.shape[0].saturating_sub(*offset).max(1);
    }
    let mut names = families::gguf_tensors(&described);
    // Files of LFM2 have its last norm by one of two names.
    if tensors.get(&format!("{}.weight", names.outside[3])).is_none() {
        names.outside[3] = GGUF.outside[3];
    }
    let tokenizer = match has_tokenizer(&gguf.metadata) {
        true => Some(from_gguf(&gguf.metadata, path)?),
        false => None,
    };
    Ok(Read { described, names, tensors, tokenizer })
}
