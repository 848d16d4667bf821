//! A model as its files describe it, and what must hold of that. Plain data: serde reads and writes it in a store's header.

use super::config::{Activation, Facts, Ffn, ModelConfig, Norm, Positions};
use super::form::{CommonForm, Experts, OwnFfn, OwnForm, RouterInput, SharedForm, check_taps, is_one, is_zero, one};
use super::layer::{Attention, Convolution, FeedForward, LayerForm, Mixer};
use serde::{Deserialize, Serialize};

/// Layers that a model may have: more than any published one.
const MAX_LAYERS: usize = 1 << 12;
/// Neurons that an FFN may have: more than any published model's.
const MAX_WIDTH: usize = 1 << 20;

/// The shape of a model as its files say it: what most layers have, and which layers differ. A store's header holds it. [`Description::resolve`]
/// makes of it what each layer is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Family by its usual name, as `model::families` has it.
    pub family: String,
    /// The model's own name, for people.
    pub name: String,
    /// Numbers of the residual per token.
    pub hidden: usize,
    /// How many layers it has.
    pub layers: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    /// Numbers of a head; even.
    pub head_dim: usize,
    /// Neurons of an FFN, or of one expert of a mixture; the most of a layer where they differ ([`CommonForm::widths`]).
    pub ffn: usize,
    /// Rows of the embedding: at least one for each token.
    pub vocab: usize,
    /// Positions the model was trained for.
    pub context: usize,
    /// Attention sees this many positions back, where the model has such a limit.
    pub window: Option<usize>,
    /// The kind of all its norms, and their epsilon.
    pub norm: Norm,
    /// The FFN's activation function.
    pub activation: Activation,
    /// Whether the FFN has a gate, and what passes through the activation.
    pub ffn_kind: Ffn,
    /// How positions are told apart.
    pub positions: Positions,
    /// Queries, keys and values have biases.
    pub attention_bias: bool,
    /// Attention's output projection has a bias.
    pub output_bias: bool,
    /// The FFN's up and down have biases.
    pub ffn_bias: bool,
    /// The head is the embedding matrix.
    pub tied: bool,
    /// How its layers differ from Llama's. It is left out of headers and fingerprints where they do not.
    #[serde(default, skip_serializing_if = "CommonForm::is_default")]
    pub form: CommonForm,
    /// A token's embedding is multiplied by this.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub embedding_scale: f32,
    /// Logits are multiplied by this.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub logit_scale: f32,
    /// Logits x become cap * tanh(x / cap); 0 where they stay as they are.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub logit_cap: f32,
}

impl Description {
    /// Checks the numbers and what must hold between them; the error is a message that names the field. The limits keep products
    /// inside 64 bits and refuse shapes that no real model has: they come from damaged files.
    pub fn check(&self) -> Result<(), String> {
        let bounds = [
            ("hidden size", self.hidden, 1 << 17),
            ("layer count", self.layers, MAX_LAYERS),
            ("FFN size", self.ffn, MAX_WIDTH),
            ("vocabulary size", self.vocab, 1 << 22),
            ("context length", self.context, 1 << 24),
        ];
        for (what, value, top) in bounds {
            if value == 0 || value > top {
                return Err(format!("{what} is {value}; it must be 1 to {top}"));
            }
        }
        check_heads(self.heads, self.kv_heads, self.head_dim)?;
        let (Norm::Rms(eps) | Norm::Layer(eps)) = self.norm;
        if !(eps > 0.0 && eps < 0.1) {
            return Err(format!("norm epsilon {eps} is not between 0 and 0.1"));
        }
        if self.window == Some(0) {
            return Err("the attention window is 0".into());
        }
        self.check_form()?;
        match &self.positions {
            Positions::Rope { frequencies } => check_frequencies(frequencies, self.head_dim),
            Positions::Learned { offset } if *offset > 1 << 12 => {
                Err(format!("{offset} positions before the first; it must be 0 to 4096"))
            }
            _ => Ok(()),
        }
    }
}

impl Description {
    fn check_form(&self) -> Result<(), String> {
        let scales = [
            ("embedding scale", self.embedding_scale),
            ("residual scale", self.form.residual_scale),
            ("logit scale", self.logit_scale),
        ];
        if let Some((what, scale)) = scales.into_iter().find(|(_, scale)| !(1e-3..=1e3).contains(scale)) {
            return Err(format!("{what} {scale} is not between 0.001 and 1000"));
        }
        if !(0.1..=10.0).contains(&self.form.rotary_scale) {
            return Err(format!(
                "rotated queries and keys are multiplied by {}; it must be 0.1 to 10",
                self.form.rotary_scale
            ));
        }
        let is_biased = self.form.experts.is_some_and(|experts| experts.biases);
        let is_clamped = self.ffn_kind == Ffn::GatedClamped || self.activation == Activation::ClampedSwish;
        if is_clamped && !is_biased {
            return Err("a clamped SwiGLU is supported for experts with biases only".into());
        }
        if self.form.residual_scale != 1.0 && matches!(self.positions, Positions::Learned { .. }) {
            return Err("a residual scale beside learned positions is not supported".into());
        }
        let widths = &self.form.widths;
        if !widths.is_empty() && widths.len() != self.layers {
            return Err(format!("{} FFN sizes for {} layers", widths.len(), self.layers));
        }
        if let (Some(least), Some(most), 0) = (widths.iter().min(), widths.iter().max(), self.form.per_layer) {
            return Err(format!(
                "its layers have FFNs of {least} to {most} neurons; only one size for all is supported"
            ));
        }
        for (what, list) in [("rotated", &self.form.rotated), ("windowed", &self.form.windowed)] {
            if !list.is_empty() && list.len() != self.layers {
                return Err(format!("{} numbers say which of {} layers are {what}", list.len(), self.layers));
            }
        }
        if let Some(experts @ Experts { shared, biases, reads, .. }) = self.form.experts {
            experts.check()?;
            if let Some(width) = shared.map(|shared| shared.width).filter(|width| !(1..=MAX_WIDTH).contains(width)) {
                return Err(format!("the shared expert's size is {width}; it must be 1 to {MAX_WIDTH}"));
            }
            if self.ffn_bias || biases && self.ffn_kind == Ffn::Plain {
                return Err("biases of neurons in a mixture, or of experts without gates, are not supported".into());
            }
            if self.form.norms.parallel() || self.form.residual_scale != 1.0 {
                return Err("experts beside parallel attention or with a residual scale are not supported".into());
            }
            if biases && (shared.is_some() || reads != RouterInput::FfnNorm) {
                return Err(
                    "biases of experts beside shared ones or a router that reads another input are not supported"
                        .into(),
                );
            }
        }
        if self.form.qk_norm && matches!(self.norm, Norm::Layer(_)) {
            return Err("LayerNorms of queries and keys are not supported".into());
        }
        if self.form.norms.after() && (self.form.residual_scale != 1.0 || matches!(self.norm, Norm::Layer(_))) {
            return Err("norms behind attention and FFN beside LayerNorm or a residual scale are not supported".into());
        }
        if self.form.query_scale != 1.0 && !(self.form.qk_norm && (0.01..=100.0).contains(&self.form.query_scale)) {
            return Err(format!(
                "queries are multiplied by {}; it must be 0.01 to 100, and the queries must be normed",
                self.form.query_scale
            ));
        }
        self.check_parts()?;
        let mut grouped = vec![false; self.layers];
        for &layer in self.form.own.iter().flat_map(|own| &own.layers) {
            match grouped.get_mut(layer) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(format!("layer {layer} is in two groups of layers")),
                None => return Err(format!("a group of layers names layer {layer} of {}", self.layers)),
            }
        }
        self.form.own.iter().try_for_each(|own| self.check_own(own))?;
        let mut layers = (0..self.layers).map(|layer| self.layer(layer));
        if layers.clone().all(|layer| layer.mixer.attention().is_none()) {
            return Err("no layer has attention".into());
        }
        if layers.all(|layer| layer.ffn.movable() == 0) {
            let what = if self.form.experts.is_some() { "of a mixture has experts" } else { "has an FFN" };
            return Err(format!("no layer {what}"));
        }
        Ok(())
    }

    /// Checks what a group of layers has of its own.
    fn check_own(&self, own: &OwnForm) -> Result<(), String> {
        let Some(&first) = own.layers.first() else { return Err("a group of layers has no layers".into()) };
        if !own.layers.is_sorted_by(|a, b| a < b) {
            return Err("the layers of a group are not in ascending order".into());
        }
        match own.ffn {
            Some(OwnFfn::Absent)
                if self.form.experts.is_none()
                    && (self.form.norms.parallel() || self.form.output_scales || self.form.per_layer > 0) =>
            {
                let beside = "parallel attention, scales of layers or embeddings for each layer";
                return Err(format!("layers without an FFN beside {beside} are not supported"));
            }
            Some(own) if self.form.experts.map_or(own != OwnFfn::Absent, |experts| experts.biases) => {
                let only = "which is supported in a mixture without biases only";
                return Err(format!("a group of layers has an FFN of its own, {only}"));
            }
            Some(OwnFfn::Dense(width)) if !(1..=MAX_WIDTH).contains(&width) => {
                return Err(format!("the FFN of layer {first} has {width} neurons; it must have 1 to {MAX_WIDTH}"));
            }
            _ => {}
        }
        own.convolution.map_or(Ok(()), check_taps)?;
        own.linear.map_or(Ok(()), |linear| linear.check())?;
        if let Some(latent) = own.latent {
            latent.check()?;
            if own.values_from_keys || own.keys_of.is_some() || own.convolution.is_some() || own.linear.is_some() {
                return Err(format!("layer {first} has latent attention beside keys of another kind"));
            }
        }
        if own.convolution.is_some() && own.linear.is_some() {
            return Err(format!("layer {first} has both a convolution and linear attention in the place of attention"));
        }
        let Some(a) = self.attention(first) else { return Ok(()) };
        check_heads(a.heads, a.kv_heads, a.head_dim)?;
        if let Some(latent) = a.latent {
            return match (&own.frequencies, &self.positions) {
                (Some(frequencies), _) => check_frequencies(frequencies, latent.rope),
                (None, Positions::Rope { frequencies }) if frequencies.len() >= latent.rope / 2 => Ok(()),
                _ => Err(format!("layer {first} rotates {} numbers and has no RoPE frequencies for them", latent.rope)),
            };
        }
        match &own.frequencies {
            Some(frequencies) => check_frequencies(frequencies, a.head_dim),
            None if own.head_dim.is_some_and(|dim| dim != self.head_dim) && a.rotation.is_some() => {
                Err(format!("layers with heads of {} numbers have no RoPE frequencies of their own", a.head_dim))
            }
            None => Ok(()),
        }
    }
}

/// Checks the heads of an attention.
fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) -> Result<(), String> {
    let sizes = [("head count", heads), ("key/value head count", kv_heads), ("head dimension", head_dim)];
    if let Some((what, value)) = sizes.into_iter().find(|(_, value)| !(1..=1 << 12).contains(value)) {
        return Err(format!("{what} is {value}; it must be 1 to 4096"));
    }
    if !heads.is_multiple_of(kv_heads) {
        return Err(format!("{heads} heads cannot share {kv_heads} key/value heads"));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(format!("head dimension {head_dim} is odd"));
    }
    Ok(())
}

/// Checks the radians per position of an attention with heads of `head_dim` numbers.
fn check_frequencies(frequencies: &[f32], head_dim: usize) -> Result<(), String> {
    if frequencies.len() != head_dim / 2 {
        return Err(format!("{} RoPE frequencies for head dimension {head_dim}", frequencies.len()));
    }
    match frequencies.iter().all(|f| f.is_finite() && *f >= 0.0) {
        true => Ok(()),
        false => Err("a RoPE frequency is not a finite positive number".into()),
    }
}

/// Checks a number of layers before a list of as many is made.
///
/// # Errors
/// A message with the number that it must be.
pub fn check_layers(layers: usize) -> Result<usize, String> {
    match layers {
        1..=MAX_LAYERS => Ok(layers),
        _ => Err(format!("the layer count is {layers}; it must be 1 to {MAX_LAYERS}")),
    }
}

impl Description {
    /// The model with what each of its layers is.
    ///
    /// # Errors
    /// As [`Description::check`].
    pub fn resolve(&self) -> Result<ModelConfig, String> {
        self.check()?;
        let base = match &self.positions {
            Positions::Rope { frequencies } => frequencies.clone(),
            Positions::Learned { .. } => Vec::new(),
        };
        let own = self.form.own.iter().map(|own| own.frequencies.clone().unwrap_or_default());
        let layers: Vec<LayerForm> = (0..self.layers).map(|layer| self.layer(layer)).collect();
        Ok(ModelConfig {
            family: self.family.clone(),
            name: self.name.clone(),
            hidden: self.hidden,
            vocab: self.vocab,
            context: self.context,
            norm: self.norm,
            activation: self.activation,
            ffn_kind: self.ffn_kind,
            ffn_bias: self.ffn_bias,
            learned_positions: match self.positions {
                Positions::Learned { offset } => Some(offset),
                Positions::Rope { .. } => None,
            },
            per_layer: self.form.per_layer,
            tied: self.tied,
            embedding_scale: self.embedding_scale,
            residual_scale: self.form.residual_scale,
            logit_scale: self.logit_scale,
            logit_cap: self.logit_cap,
            rotations: [base].into_iter().chain(own).collect(),
            facts: Facts::of(&layers),
            layers,
        })
    }

    /// What layer number `layer` is.
    fn layer(&self, layer: usize) -> LayerForm {
        let form = &self.form;
        LayerForm {
            norms: form.norms,
            output_scale: form.output_scales,
            mixer: self.mixer(layer),
            ffn: self.ffn_of(layer),
        }
    }

    /// What it reads other positions with.
    fn mixer(&self, layer: usize) -> Mixer {
        let own = self.own(layer);
        match own.map(|own| (own.convolution, own.linear)) {
            Some((Some(taps), _)) => Mixer::Convolution(Convolution { hidden: self.hidden, taps }),
            Some((None, Some(linear))) => Mixer::Linear(linear),
            _ => Mixer::Attention(self.attention_of(layer, own)),
        }
    }

    fn attention_of(&self, layer: usize, own: Option<&OwnForm>) -> Attention {
        let (form, of) = (&self.form, |layers: &[bool]| layers.get(layer).copied().unwrap_or(true));
        let is_rotated = matches!(self.positions, Positions::Rope { .. }) && of(&form.rotated);
        let group = form.own.iter().position(|own| own.has(layer) && own.frequencies.is_some());
        let head_dim = own.and_then(|own| own.head_dim).unwrap_or(self.head_dim);
        let undivided = if form.unscaled { (head_dim as f32).sqrt() } else { 1.0 };
        let of_heads = Attention {
            heads: own.and_then(|own| own.heads).unwrap_or(self.heads),
            kv_heads: own.and_then(|own| own.kv_heads).unwrap_or(self.kv_heads),
            head_dim,
            latent: None,
            window: self.window.filter(|_| of(&form.windowed)),
            // The model's own stands before those of groups.
            rotation: is_rotated.then(|| group.map_or(0, |group| 1 + group)),
            rotary_scale: form.rotary_scale,
            qk_norm: form.qk_norm,
            qk_norm_joined: form.qk_norm && form.qk_norm_joined,
            query_scale: form.query_scale * undivided,
            value_norm: form.value_norm,
            values_from_keys: own.is_some_and(|own| own.values_from_keys && own.keys_of.is_none()),
            keys_of: own.and_then(|own| own.keys_of),
            lends: form.own.iter().any(|own| own.keys_of == Some(layer)),
            sinks: form.sinks,
            gated: form.gated,
            bias: self.attention_bias,
            output_bias: self.output_bias,
        };
        match own.and_then(|own| own.latent) {
            Some(latent) => of_heads.with_latent(latent),
            None => of_heads,
        }
    }

    /// What treats each of its positions by itself. A layer without a router has no experts to choose from, and its one FFN is a shared expert
    /// of weight 1.
    fn ffn_of(&self, layer: usize) -> FeedForward {
        let own = self.own(layer).and_then(|own| own.ffn);
        let width = self.form.widths.get(layer).copied().unwrap_or(self.ffn);
        let Some(experts) = self.form.experts else {
            return if own == Some(OwnFfn::Absent) { FeedForward::Absent } else { FeedForward::Neurons { width } };
        };
        let shared = match own {
            None => return FeedForward::Experts { experts, width },
            Some(OwnFfn::Dense(width)) => Some(SharedForm { width, weighted: false, normed: false }),
            Some(OwnFfn::Absent) => None,
        };
        FeedForward::Experts { experts: Experts { count: 0, shared, ..experts }, width }
    }

    /// The group that a layer is of, if it differs from the model's others.
    fn own(&self, layer: usize) -> Option<&OwnForm> {
        self.form.own.iter().find(|own| own.has(layer))
    }

    /// The attention of layer number `layer`, if it has any.
    pub(super) fn attention(&self, layer: usize) -> Option<Attention> {
        self.mixer(layer).attention()
    }
}
