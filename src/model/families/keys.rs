//! The metadata of a GGUF: typed access whose errors name the key, and the parts that several architectures have in common.

use super::json::Routing;
use super::{Activated, RELU_OR_DRELU, says_drelu, wants_drelu};
use crate::error::{Error, Result};
use crate::formats::gguf::Gguf;
use crate::model::Description;
use crate::model::config::{Activation, Ffn, NamedActivation, Norm, Positions, RopeScaling, rope_frequencies};
use crate::model::described::check_layers;
use crate::model::layer::{CommonForm, Experts};
use std::path::Path;

/// The metadata of a GGUF with all else that decides about its model.
pub struct Keys<'a> {
    /// The file's header.
    pub gguf: &'a Gguf,
    /// The file, for messages.
    pub path: &'a Path,
    /// Its `general.architecture`, which its keys begin with.
    pub arch: &'a str,
    /// Its `rope_freqs.weight`, if it has one.
    pub rope_factors: Option<Vec<f32>>,
    /// The activation that a user has named; it wins over the file's.
    pub given: Option<NamedActivation>,
}

impl Keys<'_> {
    /// The error that the architecture's key `key` is wrong.
    pub fn bad(&self, key: &str, why: impl Into<String>) -> Error {
        Error::bad(self.path, format!("{}.{key}", self.arch), why)
    }

    /// The whole number of the architecture's key `key`, if it is there.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        Ok(self.gguf.metadata.u32(&format!("{}.{key}", self.arch))?.map(|v| v as usize))
    }

    /// The whole number of the architecture's key `key`, which the file must have.
    pub fn required(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.bad(key, "missing"))
    }

    /// How many layers there are: lists of as many are made from it, so it is checked here.
    pub fn layer_count(&self) -> Result<usize> {
        let key = "block_count";
        check_layers(self.required(key)?).map_err(|why| self.bad(key, why))
    }

    /// The number of the architecture's key `key`, if it is there.
    pub fn number(&self, key: &str) -> Result<Option<f32>> {
        self.gguf.metadata.f32(&format!("{}.{key}", self.arch))
    }

    /// True or false by the architecture's key `key`, if it is there.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.gguf.metadata.bool(&format!("{}.{key}", self.arch))
    }

    /// Whether the file has a tensor of this name.
    pub fn has(&self, tensor: &str) -> bool {
        self.gguf.tensors.iter().any(|t| t.name == tensor)
    }

    /// The shape by the keys that all architectures have: sizes, heads, and which biases there are. The layers are Llama's with this
    /// norm, these positions (`None` for RoPE by the file's keys) and this activation.
    pub fn common(&self, norm: Norm, positions: Option<Positions>, activated: Activated) -> Result<Description> {
        if let Some(count) = self.experts()? {
            let why =
                format!("says that its FFNs are mixtures of {count} experts, which is not supported for {}", self.arch);
            return Err(self.bad("expert_count", why));
        }
        self.layers(norm, positions, activated, "feed_forward_length")
    }

    /// How many experts an FFN is a mixture of, if it is one.
    pub fn experts(&self) -> Result<Option<usize>> {
        Ok(self.size("expert_count")?.filter(|&count| count > 0))
    }

    /// As [`Keys::common`] with a mixture of experts in the place of each FFN, and RMS norms.
    pub fn mixture(&self, positions: Option<Positions>, activated: Activated, rule: Routing) -> Result<Description> {
        for key in ["expert_shared_count", "leading_dense_block_count", "expert_group_count"] {
            if let Some(other) = self.size(key)?.filter(|&other| other > 0) {
                return Err(self.bad(key, format!("is {other}; only mixtures without such parts are supported")));
            }
        }
        if let Some(scale) = self.number("expert_weights_scale")?.filter(|&scale| scale != 1.0 && scale != 0.0) {
            return Err(self.bad("expert_weights_scale", format!("is {scale}; only 1 is supported")));
        }
        self.routed(positions, activated, rule)
    }

    /// The same, of families that read for themselves what a mixture has beside its experts.
    pub fn routed(&self, positions: Option<Positions>, activated: Activated, rule: Routing) -> Result<Description> {
        let Routing { scoring, normalised, reads } = rule;
        let (count, used) = (self.required("expert_count")?, self.required("expert_used_count")?);
        // Mixtral's files name the size of an expert by the key of other models' FFNs.
        let expert_width = "expert_feed_forward_length";
        let width = if self.size(expert_width)?.is_some() { expert_width } else { "feed_forward_length" };
        let config = self.layers(self.rms_norm()?, positions, activated, width)?;
        let experts = Experts { used, scoring, normalised, reads, ..Experts::all(count) };
        Ok(Description { form: CommonForm { experts: Some(experts), ..config.form }, ..config })
    }

    fn layers(
        &self,
        norm: Norm,
        positions: Option<Positions>,
        activated: Activated,
        width: &str,
    ) -> Result<Description> {
        let hidden = self.required("embedding_length")?;
        let heads = self.required("attention.head_count")?;
        if heads == 0 {
            return Err(self.bad("attention.head_count", "is 0"));
        }
        // Positions that a family has made itself may rotate a part of a head.
        let head_dim = match &positions {
            Some(Positions::Rope { .. }) => self.whole_head_dim(hidden / heads)?,
            _ => self.head_dim(hidden / heads)?,
        };
        let vocab = match self.size("vocab_size")? {
            Some(size) => size,
            None => self.gguf.metadata.strings("tokenizer.ggml.tokens")?.map_or(0, |tokens| tokens.len()),
        };
        let positions = match positions {
            Some(positions) => positions,
            None => Positions::Rope { frequencies: self.frequencies(head_dim)? },
        };
        let named = self.activation(activated)?;
        let (activation, ffn_kind) = match (activated.gated, named.both || activated.both) {
            (false, _) => {
                (super::ungated(self.path, &format!("{}.hidden_act", self.arch), named, self.arch)?, Ffn::Plain)
            }
            (true, true) => (named.function, Ffn::GatedBoth),
            (true, false) => (named.function, Ffn::Gated),
        };
        let (ffn, widths) = self.widths(width)?;
        Ok(Description {
            family: self.arch.into(),
            name: self.gguf.metadata.str("general.name")?.unwrap_or_default().into(),
            hidden,
            layers: self.layer_count()?,
            heads,
            kv_heads: self.kv_heads()?.unwrap_or(heads),
            head_dim,
            ffn,
            vocab,
            context: self.size("context_length")?.unwrap_or(super::json::CONTEXT),
            window: self.size("attention.sliding_window")?.filter(|&w| w > 0),
            norm,
            activation,
            ffn_kind,
            positions,
            attention_bias: self.has("blk.0.attn_q.bias") || self.has("blk.0.attn_qkv.bias"),
            output_bias: self.has("blk.0.attn_output.bias"),
            ffn_bias: false,
            tied: !self.has("output.weight"),
            form: CommonForm { widths, ..CommonForm::default() },
            embedding_scale: 1.0,
            logit_scale: 1.0,
            logit_cap: 0.0,
        })
    }

    /// Heads of keys and values. Of a list for each layer they are the most; some families have layers with none.
    fn kv_heads(&self) -> Result<Option<usize>> {
        let key = "attention.head_count_kv";
        let Ok(Some(heads)) = self.gguf.metadata.i32s(&format!("{}.{key}", self.arch)) else { return self.size(key) };
        let most = heads.iter().copied().max().unwrap_or(0).max(0);
        // It reads the list itself.
        if self.arch == "gemma4" {
            return Ok(Some(most as usize));
        }
        let may_have_none =
            ["lfm2", "nemotron_h", "qwen35", "qwen3next"].iter().any(|arch| self.arch.starts_with(arch));
        if heads.iter().any(|&other| other != most && !(may_have_none && other == 0)) {
            return Err(self.bad(key, format!("differs from layer to layer, which is not supported for {}", self.arch)));
        }
        Ok(Some(most as usize))
    }

    /// RMS norm with the file's epsilon.
    pub fn rms_norm(&self) -> Result<Norm> {
        Ok(Norm::Rms(self.number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-5)))
    }

    /// LayerNorm with the file's epsilon.
    pub fn layer_norm(&self) -> Result<Norm> {
        Ok(Norm::Layer(self.number("attention.layer_norm_epsilon")?.unwrap_or(1e-5)))
    }

    /// Numbers of a head, where `usual` is what they are if no key says so.
    pub fn head_dim(&self, usual: usize) -> Result<usize> {
        let head_dim = self.whole_head_dim(usual)?;
        if self.size("rope.dimension_count")?.is_some_and(|d| d != head_dim) {
            let why = format!("partial rotation is not supported: it must be the head dimension {head_dim}");
            return Err(self.bad("rope.dimension_count", why));
        }
        Ok(head_dim)
    }

    /// The same of a family of which part of a head may be rotated.
    pub fn whole_head_dim(&self, usual: usize) -> Result<usize> {
        // What is kept of a position with latents, whose keys and values have sizes of their own.
        if let ("deepseek2", Some(rank)) = (self.arch, self.size("attention.kv_lora_rank")?) {
            return Ok(rank.saturating_add(self.required("rope.dimension_count")?));
        }
        let head_dim = self.size("attention.key_length")?.unwrap_or(usual);
        if self.size("attention.value_length")?.is_some_and(|v| v != head_dim) {
            return Err(self.bad("attention.value_length", "differs from the key length"));
        }
        Ok(head_dim)
    }

    /// A size that may be a list with one number for each layer: the largest, and the list, which is empty where all are the same.
    fn widths(&self, key: &str) -> Result<(usize, Vec<usize>)> {
        match self.gguf.metadata.i32s(&format!("{}.{key}", self.arch)) {
            Ok(Some(sizes)) if sizes.iter().all(|&size| size >= 0) => {
                Ok(super::common_width(sizes.iter().map(|&size| size as usize).collect()))
            }
            _ => Ok((self.required(key)?, Vec::new())),
        }
    }

    /// The base of RoPE's frequencies.
    pub fn rope_base(&self) -> Result<f64> {
        let theta = self.number("rope.freq_base")?.unwrap_or(10_000.0) as f64;
        if !(theta.is_finite() && theta > 0.0) {
            return Err(self.bad("rope.freq_base", format!("{theta} is not a positive number")));
        }
        Ok(theta)
    }

    /// The numbers of a scaling whose kind is yarn; `rounded` is what a family does with its bounds.
    pub fn yarn(&self, rounded: bool) -> Result<RopeScaling> {
        if self.rope_factors.is_some() {
            return Err(self.bad("rope.scaling.type", "yarn beside rope_freqs.weight is not supported"));
        }
        for (key, only) in [("rope.scaling.attn_factor", 1.0), ("rope.scaling.yarn_ext_factor", 1.0)] {
            if let Some(other) = self.number(key)?.filter(|&number| number != only) {
                return Err(self.bad(key, format!("is {other}; only {only} is supported")));
            }
        }
        let positive = |key: &str, number: Option<f32>| match number {
            Some(number) if number.is_finite() && number > 0.0 => Ok(f64::from(number)),
            Some(number) => Err(self.bad(key, format!("{number} is not a positive number"))),
            None => Err(self.bad(key, "missing")),
        };
        let number = |key: &str, usual: Option<f32>| positive(key, self.number(key)?.or(usual));
        let original_key = "rope.scaling.original_context_length";
        Ok(RopeScaling::Yarn {
            factor: number("rope.scaling.factor", None)?,
            fast: number("rope.scaling.yarn_beta_fast", Some(32.0))?,
            slow: number("rope.scaling.yarn_beta_slow", Some(1.0))?,
            original: positive(original_key, self.size(original_key)?.map(|positions| positions as f32))?,
            rounded,
        })
    }

    fn frequencies(&self, head_dim: usize) -> Result<Vec<f32>> {
        let theta = self.rope_base()?;
        let factor_key = "rope.scaling.factor";
        let factor = match self.number(factor_key)? {
            Some(factor) => Some(factor),
            None => self.number("rope.scale_linear")?,
        };
        if let Some(factor) = factor.filter(|f| !(f.is_finite() && *f > 0.0)) {
            return Err(self.bad(factor_key, format!("{factor} is not a positive number")));
        }
        let factors = self.rope_factors.clone();
        if let Some(factors) = factors.as_ref().filter(|f| f.len() != head_dim / 2) {
            let why = format!("{} numbers, the head dimension {head_dim} needs half as many", factors.len());
            return Err(Error::bad(self.path, "rope_freqs.weight", why));
        }
        let kind_key = "rope.scaling.type";
        let scaling = match (self.gguf.metadata.str(&format!("{}.{kind_key}", self.arch))?, factor, factors) {
            (None | Some("none"), _, Some(factors)) => RopeScaling::Factors(factors),
            (Some("linear"), Some(factor), None) | (None, Some(factor), None) => RopeScaling::Linear(factor as f64),
            (Some("linear"), None, None) => return Err(self.bad(factor_key, "missing")),
            (None | Some("none"), _, None) => RopeScaling::None,
            (Some(other), _, _) => {
                let why =
                    format!("RoPE scaling '{other}' is not supported; supported are linear and rope_freqs.weight");
                return Err(self.bad(kind_key, why));
            }
        };
        Ok(rope_frequencies(head_dim.min(1 << 12), theta, &scaling))
    }

    /// The activation. GGUF's llama architecture does not name it: readers take SiLU, as they take GELU for falcon. A ReLU model that was
    /// converted to one of these shows that only by its name or PowerInfer's magic. So a file whose name says ReLU and which names no
    /// activation is refused. So is one whose name says dReLU and which names none or relu, as dReLU's own files call their function.
    fn activation(&self, activated: Activated) -> Result<NamedActivation> {
        if let Some(activation) = self.given {
            return Ok(activation);
        }
        let (meta, relu) = (&self.gguf.metadata, NamedActivation::from(Activation::Relu));
        let key = format!("{}.hidden_act", self.arch);
        let said = match meta.str(&key)? {
            Some(name) => {
                let parameter = self.number("hidden_act_param")?;
                Some(NamedActivation::by_name(name, parameter).map_err(|why| Error::bad(self.path, &key, why))?)
            }
            None => (self.gguf.powerinfer || activated.unsaid == Activation::Relu).then_some(relu),
        };
        let name = meta.str("general.name")?.unwrap_or_default().to_lowercase();
        let file = self.path.file_name().map(|f| f.to_string_lossy().to_lowercase()).unwrap_or_default();
        if activated.unsaid != Activation::Relu
            && said.is_none_or(|said| said == relu)
            && [&name, &file].into_iter().any(|n| says_drelu(n))
        {
            return Err(wants_drelu(self.path, &key));
        }
        let says_relu = |name: &str| ["relu", "prosparse", "minicpm-s"].iter().any(|word| name.contains(word));
        match said {
            Some(said) => Ok(said),
            None if !activated.unsaid.is_sparse() && (says_relu(&name) || says_relu(&file)) => {
                let otherwise = if activated.unsaid == Activation::Silu { "SiLU" } else { "GELU" };
                let why = format!(
                    "the name says that this is a ReLU model, but a GGUF of the {} architecture does not carry its activation \
                     and would run with {otherwise}; name it: --activation relu, or fatrelu(0.01) for ProSparse 7B, or drelu; \
                     {RELU_OR_DRELU}",
                    self.arch
                );
                Err(Error::bad(self.path, key, why))
            }
            None => Ok(activated.unsaid.into()),
        }
    }
}
