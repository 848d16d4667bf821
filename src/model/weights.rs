//! A model ready to run: its shape and where each matrix lies in the mapped neuron store. No weight is copied.

use super::block::{self, BlockLayout};
use super::config::{Activation, Ffn, ModelConfig, Norm};
use super::described::Description;
use super::ffn_weights::{ExpertWeights, FfnMatrices, FfnWeights, NeuronBlocks, SharedExpert};
use super::fingerprint::Fingerprint;
use super::layer::{Experts, FeedForward, LinearAttention, Mixer, Norms, RouterInput, SharedForm};
pub use super::layer_weights::Layer;
pub use super::matrix::Matrix;
pub use super::norm_weights::NormWeights;
use super::per_layer::LayerInputs;
use super::recurrence::Recurrence;
use super::source::Source;
use super::stacked::Stacked;
use crate::error::{Error, Result, excerpt};
use crate::formats::blocks::first_non_finite;
use crate::formats::neuron_store::{Content, NeuronStore};
use crate::formats::rows::{Quant, decode};
use crate::formats::{MappedFile, load};
use crate::ids::Permutation;
use crate::tokenizer::TokenizerSpec;
use std::path::{Path, PathBuf};

/// A model in a mapped store, whose matrices point into the map.
pub struct Model {
    /// The header's shape with its residual scale taken out ([`ModelConfig::in_residual_units`]), and with its logit scale moved into
    /// `out_norm`.
    pub config: ModelConfig,
    /// Type of the attention and FFN weights.
    pub quant: Quant,
    /// Embedding of the tokens, `[vocab, hidden]`.
    pub embed: Matrix,
    /// The matrix that makes logits, `[vocab, hidden]`; the embedding itself where they are tied.
    pub head: Matrix,
    /// Learned positions, `[context + offset, hidden]`; `None` where positions are rotations.
    pub positions: Option<Matrix>,
    /// What makes the layers' own numbers of a token; `None` where they have none.
    pub per_layer: Option<LayerInputs>,
    /// The norm before the head, with the logit scale in it.
    pub out_norm: NormWeights,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    pub(super) files: Files,
    /// The file or directory that it was packed from, where that is known.
    pub(super) packed_from: Option<PathBuf>,
}

/// Where a model's matrices lie.
pub(super) enum Files {
    /// In a packed store.
    Store(NeuronStore),
    /// In published files; with the hash of their content once it was asked for.
    Source(Box<Source>, Fingerprint),
}

impl Model {
    /// Opens the neuron store at `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened, [`Error::BadFile`] if it is not a store or does not hold a whole model.
    pub fn open(path: &Path) -> Result<Model> {
        Model::from_store(NeuronStore::open(path)?)
    }

    /// The model in an open store.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the section or the field of the configuration that is missing or wrong.
    pub fn from_store(store: NeuronStore) -> Result<Model> {
        let described: Description = serde_json::from_value(store.header.config.clone()).map_err(|e| {
            Error::bad(store.path(), "config", format!("not understood: {}; pack the model again", excerpt(e)))
        })?;
        let bad = |why: String| Error::bad(store.path(), "config", format!("{why}; pack the model again"));
        let mut config = described.resolve().map_err(bad)?.in_residual_units();
        let logit_scale = std::mem::replace(&mut config.logit_scale, 1.0);
        let not_held = [
            (config.mixtures().any(|experts| experts.biases), "biases of experts"),
            (
                config.mixtures().any(|e| e.scaled || e.reads == RouterInput::Own),
                "a router's norm or scales of experts",
            ),
            (config.has_normed_shared(), "norms of a shared expert"),
            (config.attentions().any(|a| a.sinks), "sinks of attention"),
            (config.per_layer > 0, "embeddings for each layer"),
            (config.attentions().any(|a| a.latent.is_some()), "latent attention"),
        ];
        if let Some((_, what)) = not_held.into_iter().find(|(has, _)| *has) {
            return Err(bad(format!("names {what}, which no store holds")));
        }
        // Of a mixture a store has the experts by neuron; without a router they are clusters.
        config.change_layers(|_, layer| {
            if let FeedForward::Experts { experts, .. } = &mut layer.ffn {
                experts.by_neuron = experts.routed();
            }
        });
        let s = Sections(&store);
        let c = &config;
        let (hidden, quant) = (c.hidden, store.header.quant);
        let embed = s.matrix("embed", c.vocab, hidden)?;
        let head = if c.tied { embed } else { s.matrix("head", c.vocab, hidden)? };
        let positions = c.learned_positions.map(|offset| s.matrix("positions", c.context + offset, hidden));
        let positions = positions.transpose()?;
        let out_norm = s.norm("out_norm", c)?.scaled(logit_scale);
        let layers = (0..c.layers().len()).map(|l| s.layer(l, c)).collect::<Result<_>>()?;
        Ok(Model {
            quant,
            embed,
            head,
            positions,
            per_layer: None,
            out_norm,
            layers,
            config,
            files: Files::Store(store),
            packed_from: None,
        })
    }

    /// The store that the matrices lie in; `None` for a model that is read in place.
    pub fn store(&self) -> Option<&NeuronStore> {
        match &self.files {
            Files::Store(store) => Some(store),
            Files::Source(..) => None,
        }
    }

    /// The model as its files describe it. A store's is read anew from its header, which is in memory.
    ///
    /// # Panics
    /// Never: the header was read when the model was opened.
    pub fn description(&self) -> Description {
        match &self.files {
            Files::Store(store) => serde_json::from_value(store.header.config.clone()).expect("it was read before"),
            Files::Source(source, _) => source.described.clone(),
        }
    }

    /// Whether it has neuron blocks: neurons can be left out and moved one by one.
    pub fn has_neurons(&self) -> bool {
        matches!(self.files, Files::Store(_)) && !self.config.is_mixture()
    }

    /// The same, packed from what lies at `path`.
    pub fn from_source(self, path: &Path) -> Model {
        Model { packed_from: Some(path.to_owned()), ..self }
    }

    /// What it was packed from, where that is known.
    pub fn packed_from(&self) -> Option<&Path> {
        self.packed_from.as_deref()
    }

    /// The file that it was opened by.
    pub fn path(&self) -> &Path {
        match &self.files {
            Files::Store(store) => store.path(),
            Files::Source(source, _) => &source.path,
        }
    }

    /// The files that the matrices lie in.
    pub fn files(&self) -> &[MappedFile] {
        match &self.files {
            Files::Store(store) => std::slice::from_ref(store.file()),
            Files::Source(source, _) => source.mapped(),
        }
    }

    /// Bytes of these files.
    pub fn file_bytes(&self) -> u64 {
        self.files().iter().map(|file| file.bytes().len() as u64).sum()
    }

    /// Bytes of them of which a pass reads only a row for each token: the table of embeddings for each layer, which may stay on disk.
    pub fn table_bytes(&self) -> u64 {
        self.per_layer.as_ref().map_or(0, |of| of.table.bytes())
    }

    /// Bytes of its files that have to be in memory.
    pub fn memory_bytes(&self) -> u64 {
        self.file_bytes() - self.table_bytes()
    }

    /// Reads these into memory now. Advice only: a refusal costs speed, nothing else.
    pub fn load(&self) {
        match (&self.files, &self.per_layer) {
            (Files::Source(source, _), Some(of)) => {
                let others = source.tensors().filter(|view| view.data.as_ptr() != of.table.row_ptr(0));
                others.for_each(|view| load(view.data));
            }
            _ => self.files().iter().for_each(MappedFile::load),
        }
    }

    /// Hash of the published model's content, 32 hex digits, by which profiles, predictors and placements name their model. Of a model
    /// that is read in place it is computed when it is first asked for, which reads the whole file; of a large one it is remembered.
    pub fn fingerprint(&self) -> &str {
        match &self.files {
            Files::Store(store) => &store.header.fingerprint,
            Files::Source(source, fingerprint) => fingerprint.of(source),
        }
    }

    /// From now on the fingerprints of large models that are read in place are kept in files of `dir`.
    pub fn keep_fingerprint(&mut self, dir: PathBuf) {
        if let Files::Source(_, fingerprint) = &mut self.files {
            fingerprint.kept_in = Some(dir);
        }
    }

    /// Why a device cannot compute with it; `None` if it can.
    pub fn not_on_device(&self) -> Option<&'static str> {
        if self.per_layer.is_some() {
            return Some("it has embeddings for each layer");
        }
        if self.config.is_mixture() {
            if self.config.ffn_kind == Ffn::Plain && self.config.activation != Activation::Relu2 {
                return Some("its experts have no gates, and another activation than ReLU squared");
            }
            let experts = self.layers.iter().filter_map(|layer| layer.ffn.experts());
            return experts.into_iter().find_map(|experts| experts.not_on_device(self.config.hidden));
        }
        if self.config.movable_layers() < self.config.layers().len() {
            return Some("some of its layers have no FFN");
        }
        if !self.has_neurons() {
            return Some("it is read in place, and a device needs neurons by themselves");
        }
        block::not_on_device(self.layers.iter().map(|layer| *layer.block()), self.config.hidden)
    }

    /// The types of the layers' weights with their bytes, the one with most bytes first.
    pub fn bytes_by_type(&self) -> Vec<(Quant, u64)> {
        let mut bytes: Vec<(Quant, u64)> = Vec::new();
        let mut add = |quant: Quant, more: u64| match bytes.iter_mut().find(|(known, _)| *known == quant) {
            Some((_, bytes)) => *bytes += more,
            None => bytes.push((quant, more)),
        };
        for layer in &self.layers {
            layer.mixer_matrices().for_each(|part| add(part.quant, part.bytes()));
            layer.ffn.bytes_by_type().into_iter().for_each(|(quant, bytes)| add(quant, bytes));
        }
        bytes.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        bytes
    }

    /// The types of the layers' weights, the one with most bytes first, as text: `q4_k, q6_k`.
    pub fn types(&self) -> String {
        self.bytes_by_type().iter().map(|(quant, _)| quant.name()).collect::<Vec<_>>().join(", ")
    }

    /// The tokeniser that was packed with the model.
    ///
    /// # Errors
    /// [`Error::BadFile`] if there is none, or it cannot be read.
    pub fn tokenizer(&self) -> Result<TokenizerSpec> {
        let path = self.path();
        let missing = || {
            Error::bad(path, "tokenizer", "the model came without one, so it takes token ids only (eval --token-ids)")
        };
        let store = match &self.files {
            Files::Store(store) => store,
            Files::Source(source, _) => return source.tokenizer.clone().ok_or_else(missing),
        };
        let section = store.section("tokenizer").ok_or_else(missing)?;
        store.compare(section)?;
        serde_json::from_slice(store.bytes(section))
            .map_err(|e| Error::bad(path, "tokenizer", format!("not understood: {}; pack the model again", excerpt(e))))
    }

    /// Bytes of weights outside the FFNs that decoding one token reads: attention's matrices, the head, and one row of the embedding.
    pub fn bytes_outside_ffn(&self) -> u64 {
        let attention: u64 = self.layers.iter().map(|l| l.qkv.bytes() + l.o.bytes()).sum();
        attention + self.head.bytes() + self.embed.row_bytes as u64
    }
}

struct Sections<'a>(&'a NeuronStore);

impl Sections<'_> {
    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let section = self.0.section(name).ok_or_else(|| self.bad(name, "the section is missing".into()))?;
        match section.content {
            Content::Rows { quant, rows: r, cols: c } if (r, c) == (rows, cols) => {
                // SAFETY: the bytes are the map's, which the model keeps open; sections are checked to be as long as they say.
                Ok(unsafe { Matrix::over(self.0.bytes(section), quant, rows, cols) })
            }
            other => Err(self.bad(name, format!("is {other:?}, not {rows} rows of {cols} numbers"))),
        }
    }

    /// A matrix of a small section, which is compared with its checksum, and whose numbers are finite: what is wrong in a norm, a bias or a
    /// router is wrong in every answer.
    fn checked_matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Matrix> {
        let matrix = self.matrix(name, rows, cols)?;
        if !cols.is_multiple_of(matrix.quant.unit()) {
            return Err(
                self.bad(name, format!("has rows of {cols} numbers, which {} cannot hold", matrix.quant.name()))
            );
        }
        self.0.section(name).map_or(Ok(()), |section| self.0.compare(section))?;
        let mut numbers = vec![0.0; cols];
        for row in 0..rows {
            decode(matrix.quant, matrix.row(row), &mut numbers);
            if let Some(at) = first_non_finite(&numbers) {
                return Err(self.bad(name, format!("holds {} at row {row}, number {at}", numbers[at])));
            }
        }
        Ok(matrix)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let row = self.checked_matrix(name, 1, len)?;
        if row.quant != Quant::F32 {
            return Err(self.bad(name, "is not f32".into()));
        }
        Ok(bytemuck::cast_slice(&row.row(0)[..len * 4]).to_vec())
    }

    fn vector_if(&self, there: bool, name: &str, len: usize) -> Result<Vec<f32>> {
        if there { self.vector(name, len) } else { Ok(Vec::new()) }
    }

    fn norm(&self, name: &str, c: &ModelConfig) -> Result<NormWeights> {
        let weight = self.vector(name, c.hidden)?;
        let bias = self.vector_if(matches!(c.norm, Norm::Layer(_)), &format!("{name}_bias"), c.hidden)?;
        Ok(NormWeights { weight, bias })
    }

    /// The norm of each head's queries or keys.
    fn head_norm(&self, name: &str, head_dim: usize) -> Result<NormWeights> {
        Ok(NormWeights { weight: self.vector(name, head_dim)?, bias: Vec::new() })
    }

    /// One section, or one for each matrix where their types differ.
    fn qkv(&self, layer: usize, c: &ModelConfig) -> Result<Stacked> {
        let name = |part: &str| format!("layer.{layer}.{part}");
        let mixer = c.mixer(layer);
        if self.0.section(&name("q")).is_none() {
            return Ok(Stacked::new(vec![self.matrix(&name("qkv"), mixer.rows(), c.hidden)?]));
        }
        let parts = mixer.inputs().map(|(part, rows)| self.matrix(&name(part), rows, c.hidden));
        Ok(Stacked::new(parts.collect::<Result<_>>()?))
    }

    fn recurrence(&self, layer: usize, mixer: Mixer) -> Result<Recurrence> {
        let vector = |part: &str, len: usize| self.vector_if(len > 0, &format!("layer.{layer}.{part}"), len);
        let of = |of: fn(&LinearAttention) -> usize| mixer.linear().map_or(0, |linear| of(&linear));
        let of_mamba =
            |of: fn(&LinearAttention) -> usize| mixer.linear().filter(|l| l.is_mamba()).map_or(0, |l| of(&l));
        Ok(Recurrence {
            taps: vector("taps", mixer.taps().iter().product())?,
            conv_bias: vector("conv_bias", of_mamba(|linear| linear.channels()))?,
            step_bias: vector("step_bias", of(|linear| linear.value_heads))?,
            decay: vector("decay", of(|linear| linear.value_heads))?,
            norm: vector("state_norm", of(|linear| linear.norm_weights()))?,
            skip: vector("skip", of_mamba(|linear| linear.value_heads))?,
        })
    }

    fn neurons(&self, layer: usize, c: &ModelConfig) -> Result<NeuronBlocks> {
        let name = &format!("layer.{layer}.ffn");
        let section = self.0.section(name).ok_or_else(|| self.bad(name, "the section is missing".into()))?;
        let rows = c.ffn_kind.rows();
        let layout = match section.content {
            Content::Rows { quant, rows: r, cols } if (r, cols) == (c.width(layer) * rows, c.hidden) => {
                BlockLayout::new(c.ffn_kind, quant, cols)
            }
            Content::Neurons { gate, up, down, neurons, cols }
                if (neurons, cols, 2 + usize::from(gate.is_some())) == (c.width(layer), c.hidden, rows) =>
            {
                let quants: Vec<Quant> = gate.into_iter().chain([up, down]).collect();
                BlockLayout::mixed(&quants, cols)
            }
            other => {
                let (ffn, hidden) = (c.width(layer), c.hidden);
                return Err(
                    self.bad(name, format!("is {other:?}, not {ffn} neurons of {rows} rows of {hidden} numbers"))
                );
            }
        };
        // SAFETY: the bytes are the map's, which the model keeps open; sections are checked to be as long as they say.
        Ok(unsafe { NeuronBlocks::over(self.0.bytes(section), layout, c.width(layer), c.hidden) })
    }

    /// The clusters that a layer's FFN was cut into.
    fn clusters(&self, layer: usize, c: &ModelConfig, form: Experts) -> Result<ExpertWeights> {
        let name = &format!("layer.{layer}.ffn");
        let section = self.0.section(name).ok_or_else(|| self.bad(name, "the section is missing".into()))?;
        let content = section.content;
        let Content::Clusters { gate, up, down, clusters, neurons, cols } = content else {
            return Err(self.bad(name, format!("is {content:?}, not clusters of neurons")));
        };
        if (clusters, neurons, cols, form.routed()) != (form.count, c.width(layer), c.hidden, false) {
            let (count, ffn, hidden) = (form.count, c.width(layer), c.hidden);
            let why = format!("is {content:?}, not {count} clusters of {ffn} neurons with rows of {hidden} numbers");
            return Err(self.bad(name, why));
        }
        let each = content.cluster_bytes().expect("the section's length was checked by it") as usize;
        let cluster = |bytes: &[u8]| {
            let mut at = 0;
            let mut matrix = |quant: Quant, rows: usize, cols: usize| {
                // SAFETY: the bytes are the map's, which the model keeps open; they are as many as the three matrices take.
                let matrix = unsafe { Matrix::unpadded(&bytes[at..], quant, rows, cols) };
                at += matrix.bytes() as usize;
                matrix
            };
            let input = vec![matrix(gate, neurons, cols), matrix(up, neurons, cols)];
            FfnMatrices { input: Stacked::new(input), down: matrix(down, cols, neurons), down_by_neuron: false }
        };
        let experts = self.0.bytes(section).chunks_exact(each).map(cluster).collect();
        Ok(ExpertWeights { experts, ..ExpertWeights::default() })
    }

    /// The experts of a layer, packed by neuron, and their router; and the expert that every token has.
    fn experts(&self, layer: usize, c: &ModelConfig, form: Experts) -> Result<ExpertWeights> {
        let name = |part: &str| format!("layer.{layer}.{part}");
        let shared = form.shared.map(|shared| self.shared(layer, c, shared)).transpose()?;
        let none = ExpertWeights { shared, ..ExpertWeights::default() };
        if form.count == 0 {
            return Ok(none);
        }
        let section =
            self.0.section(&name("ffn")).ok_or_else(|| self.bad(&name("ffn"), "the section is missing".into()))?;
        let content = section.content;
        let Content::Experts { gate, up, down, experts, neurons, cols } = content else {
            return Err(self.bad(&name("ffn"), format!("is {content:?}, not experts")));
        };
        let gated = c.ffn_kind != Ffn::Plain;
        if (experts, neurons, cols, gate.is_some(), c.activation.is_sparse())
            != (form.count, c.width(layer), c.hidden, gated, true)
        {
            let (count, ffn, hidden) = (form.count, c.width(layer), c.hidden);
            let why = format!(
                "is {content:?}, not {count} experts of {ffn} neurons that can be off, with rows of {hidden} numbers"
            );
            return Err(self.bad(&name("ffn"), why));
        }
        let each = content.cluster_bytes().expect("the section's length was checked by it") as usize;
        let expert = |bytes: &[u8]| {
            let mut at = 0;
            let mut matrix = |quant: Quant| {
                // SAFETY: the bytes are the map's, which the model keeps open; they are as many as the matrices take, and each begins at a
                // multiple of a row's alignment.
                let matrix = unsafe { Matrix::over(&bytes[at..], quant, neurons, cols) };
                at += matrix.bytes() as usize;
                matrix
            };
            let input = gate.into_iter().chain([up]).map(&mut matrix).collect();
            FfnMatrices { input: Stacked::new(input), down: matrix(down), down_by_neuron: true }
        };
        let experts = self.0.bytes(section).chunks_exact(each).map(expert).collect();
        let router = self.checked_matrix(&name("router"), form.count, c.hidden)?;
        let selection_bias = self.vector_if(form.selection_bias, &name("selection_bias"), form.count)?;
        Ok(ExpertWeights { router: Some(router), selection_bias, experts, ..none })
    }

    /// The expert that every token of a layer has.
    fn shared(&self, layer: usize, c: &ModelConfig, form: SharedForm) -> Result<SharedExpert> {
        let name = |part: &str| format!("layer.{layer}.shared_{part}");
        let inputs: &[&str] = if c.ffn_kind == Ffn::Plain { &["up"] } else { &["gate", "up"] };
        let input = inputs.iter().map(|part| self.matrix(&name(part), form.width, c.hidden)).collect::<Result<_>>()?;
        let down = self.matrix(&name("down"), c.hidden, form.width)?;
        let ffn = FfnMatrices { input: Stacked::new(input), down, down_by_neuron: false };
        Ok(SharedExpert { ffn, norms: None, router: self.vector_if(form.weighted, &name("router"), c.hidden)? })
    }

    fn layer(&self, layer: usize, c: &ModelConfig) -> Result<Layer> {
        let name = |part: &str| format!("layer.{layer}.{part}");
        let ffn = match c.experts(layer) {
            Some(form) if form.routed() => FfnWeights::Experts(self.experts(layer, c, form)?),
            Some(clusters) => FfnWeights::Experts(self.clusters(layer, c, clusters)?),
            None if c.has_ffn(layer) => FfnWeights::Neurons(self.neurons(layer, c)?),
            None => FfnWeights::Neurons(self.neurons(c.ffn_like(layer), c)?.without_any()),
        };
        let order = match self.0.section(&name("order")) {
            Some(section) if section.content == Content::Numbers && section.bytes == c.width(layer) as u64 * 4 => {
                self.0.compare(section)?;
                Permutation::new(bytemuck::cast_slice(self.0.bytes(section)))
                    .ok_or_else(|| self.bad(&name("order"), "does not name each neuron once".into()))?
            }
            Some(_) => return Err(self.bad(&name("order"), "does not hold one number per neuron".into())),
            None => Permutation::identity(),
        };
        let (mixer, norms) = (c.mixer(layer), c.layer(layer).norms);
        let a = mixer.attention();
        let norm_if = |there: bool, part: &str| match there {
            true => self.norm(&name(part), c),
            false => Ok(NormWeights::NONE),
        };
        let attn_norm = norm_if(norms.before(), "attn_norm")?;
        let ffn_norm = match norms {
            Norms::ParallelShared => attn_norm.clone(),
            _ if !c.has_ffn(layer) => NormWeights::zeros(c),
            _ => norm_if(norms.before(), "ffn_norm")?,
        };
        let post_norms = match norms.after() {
            true if !c.has_ffn(layer) => Some([self.norm(&name("attn_post_norm"), c)?, NormWeights::zeros(c)]),
            true => Some([self.norm(&name("attn_post_norm"), c)?, self.norm(&name("ffn_post_norm"), c)?]),
            false => None,
        };
        Ok(Layer {
            attn_norm,
            qkv: self.qkv(layer, c)?,
            qkv_bias: self.vector_if(a.is_some_and(|a| a.bias), &name("qkv_bias"), mixer.rows())?,
            qk_norm: match a.filter(|a| a.qk_norm) {
                Some(a) => {
                    let [queries, keys] = a.normed_dims();
                    let q = self.head_norm(&name("q_norm"), queries)?.scaled(a.query_scale);
                    let k = match a.keys_of {
                        None => self.head_norm(&name("k_norm"), keys)?,
                        Some(_) => NormWeights::NONE,
                    };
                    Some([q, k])
                }
                None => None,
            },
            o: self.matrix(&name("o"), c.hidden, mixer.cols())?,
            o_bias: self.vector_if(a.is_some_and(|a| a.output_bias), &name("o_bias"), c.hidden)?,
            recurrence: self.recurrence(layer, mixer)?,
            latent: None,
            sinks: Vec::new(),
            ffn_norm,
            post_norms,
            output_scale: match c.layer(layer).output_scale {
                true => self.vector(&name("output_scale"), 1)?[0],
                false => 1.0,
            },
            ffn,
            per_layer: None,
            width: c.width(layer),
            up_bias: self.vector_if(c.ffn_bias && c.has_ffn(layer), &name("up_bias"), c.width(layer))?,
            down_bias: self.vector_if(c.ffn_bias && c.has_ffn(layer), &name("down_bias"), c.hidden)?,
            order,
        })
    }

    fn bad(&self, field: &str, why: String) -> Error {
        Error::bad(self.0.path(), field, format!("{why}; pack the model again"))
    }
}
