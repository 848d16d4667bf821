//! config.json: typed access whose errors name the key, and the parts that several families have in common.

use super::{Activated, says_drelu, wants_drelu};
use crate::error::{Error, Result};
use crate::model::Description;
use crate::model::config::{Activation, Ffn, NamedActivation, Norm, Positions, RopeScaling, rope_frequencies};
use crate::model::described::check_layers;
use crate::model::layer::{CommonForm, Experts, RouterInput, Scoring};
use serde_json::Value;
use std::path::Path;

/// The context of a config.json that does not name one.
pub const CONTEXT: usize = 2048;

/// A config.json with all else that decides about its model.
pub struct Fields<'a> {
    /// The file's content.
    pub json: &'a Value,
    /// The file, for messages.
    pub path: &'a Path,
    /// The activation that a user has named; it wins over the file's.
    pub given: Option<NamedActivation>,
}

/// What a size is, for messages.
const A_SIZE: &str = "a whole number from 0 to 4294967295";

fn size_of(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|size| u32::try_from(size).ok()).map(|size| size as usize)
}

/// How a family's router makes weights of its products.
pub struct Routing {
    /// What makes a weight of a product.
    pub scoring: Scoring,
    /// Weights are divided by their sum.
    pub normalised: bool,
    /// What the router reads.
    pub reads: RouterInput,
}

impl Routing {
    /// A softmax over the products of the experts that were chosen, which read what the router reads.
    pub const SOFTMAX: Routing = Routing { scoring: Scoring::Softmax, normalised: true, reads: RouterInput::FfnNorm };
}

/// A window and the layers that have it, as [`Description`] has them: a list only where layers differ.
pub fn in_layers(window: Option<usize>, windowed: Vec<bool>) -> (Option<usize>, Vec<bool>) {
    match (windowed.iter().all(|&has| has), windowed.contains(&true)) {
        (true, _) => (window, Vec::new()),
        (_, false) => (None, Vec::new()),
        _ => (window, windowed),
    }
}

impl<'a> Fields<'a> {
    /// The error that the field `key` is wrong.
    pub fn bad(&self, key: &str, why: impl Into<String>) -> Error {
        Error::bad(self.path, key, why)
    }

    /// A text; `None` if the field is missing or null, and an error if it holds anything else. The getters below do the same.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match &self.json[key] {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text)),
            other => Err(self.bad(key, format!("is {other}, not text"))),
        }
    }

    /// A finite number, if the field is there.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match &self.json[key] {
            Value::Null => Ok(None),
            value => match value.as_f64().filter(|v| v.is_finite()) {
                Some(number) => Ok(Some(number)),
                None => Err(self.bad(key, format!("is {value}, not a number"))),
            },
        }
    }

    /// A number that the family needs.
    pub fn required_number(&self, key: &str) -> Result<f64> {
        self.number(key)?.ok_or_else(|| self.bad(key, "missing"))
    }

    /// True or false, if the field is there.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match &self.json[key] {
            Value::Null => Ok(None),
            Value::Bool(flag) => Ok(Some(*flag)),
            other => Err(self.bad(key, format!("is {other}, not true or false"))),
        }
    }

    /// A whole number of 32 bits, if the field is there: no size of a model is longer, and sums and products of such numbers do not wrap.
    pub fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        match &self.json[key] {
            Value::Null => Ok(None),
            value => size_of(value).map(Some).ok_or_else(|| self.bad(key, format!("is {value}, not {A_SIZE}"))),
        }
    }

    /// Such a number that the family needs.
    pub fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.bad(key, "missing"))
    }

    /// How many layers there are: lists of as many are made from it, so it is checked here.
    pub fn layer_count(&self) -> Result<usize> {
        let key = "num_hidden_layers";
        check_layers(self.size(key)?).map_err(|why| self.bad(key, why))
    }

    /// A size that may be a list with one number for each layer: the largest, and the list, which is empty where all are the same.
    pub fn widths(&self, key: &str) -> Result<(usize, Vec<usize>)> {
        let Value::Array(list) = &self.json[key] else { return Ok((self.size(key)?, Vec::new())) };
        let sizes: Option<Vec<usize>> = list.iter().map(size_of).collect();
        let sizes = sizes.ok_or_else(|| self.bad(key, format!("is a list of something that is not {A_SIZE}")))?;
        Ok(super::common_width(sizes))
    }

    /// Refuses a field whose value is not `default`, the only one that is supported; a missing field counts as the default.
    pub fn refuse_unless_default(&self, key: &str, default: &Value) -> Result<()> {
        let value = &self.json[key];
        let same = value.is_null() || value == default || (value.is_number() && value.as_f64() == default.as_f64());
        if same {
            return Ok(());
        }
        Err(self.bad(key, format!("is {value}; only {default} is supported")))
    }

    /// The model's own name, for people.
    pub fn model_name(&self) -> Result<String> {
        Ok(self.text("_name_or_path")?.unwrap_or_default().into())
    }

    /// The model's name in the file and the name of its directory.
    pub fn names(&self) -> Result<[String; 2]> {
        let directory = self.path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        Ok([self.model_name()?, directory.into_owned()])
    }

    /// The activation that the field `key` names, if it is there.
    pub fn named_activation(&self, key: &str) -> Result<Option<NamedActivation>> {
        let Some(name) = self.text(key)? else { return Ok(None) };
        let parameter = self.number("hidden_act_param")?.map(|t| t as f32);
        NamedActivation::by_name(name, parameter).map(Some).map_err(|why| self.bad(key, why))
    }

    /// Llama's layers, of `family`: RMS norms, rotation of all of a head, a gate, one FFN.
    pub fn llama(&self, family: &str, activated: Activated) -> Result<Description> {
        for key in ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_primary_experts"] {
            if let Some(count) = self.optional_size(key)?.filter(|&count| count > 0) {
                let why =
                    format!("says that its FFNs are mixtures of {count} experts, which is not supported for {family}");
                return Err(self.bad(key, why));
            }
        }
        self.layers(family, activated, "intermediate_size")
    }

    /// The same with a mixture of `count` experts in the place of each FFN: `count` and `used` are the keys of how many there are and how
    /// many a token has, `width` that of their neurons.
    pub fn mixture(&self, family: &str, activated: Activated, keys: [&str; 3], rule: Routing) -> Result<Description> {
        let [count, used, width] = keys;
        let Routing { scoring, normalised, reads } = rule;
        let (count, used) = (self.size(count)?, self.size(used)?);
        let experts = Experts { used, scoring, normalised, reads, ..Experts::all(count) };
        let config = self.layers(family, activated, width)?;
        Ok(Description { form: CommonForm { experts: Some(experts), ..config.form }, ..config })
    }

    /// Llama's layers with FFNs of as many neurons as `width` says.
    fn layers(&self, family: &str, activated: Activated, width: &str) -> Result<Description> {
        let hidden = self.size("hidden_size")?;
        let heads = self.size("num_attention_heads")?;
        let head_dim = match self.optional_size("head_dim")? {
            Some(size) => size,
            None => hidden.checked_div(heads).unwrap_or(0),
        };
        let activation = match self.given {
            Some(given) => given,
            None => self.said_activation(activated)?,
        };
        self.refuse_unless_default("mlp_bias", &Value::Bool(false))?;
        self.refuse_unless_default("partial_rotary_factor", &Value::from(1.0))?;
        let bias = self.flag("attention_bias")?.unwrap_or(false);
        let (ffn, widths) = self.widths(width)?;
        let (window, windowed) = self.window()?;
        Ok(Description {
            family: family.into(),
            name: self.model_name()?,
            hidden,
            layers: self.layer_count()?,
            heads,
            kv_heads: self.optional_size("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            ffn,
            vocab: self.size("vocab_size")?,
            context: self.optional_size("max_position_embeddings")?.unwrap_or(CONTEXT),
            window,
            norm: Norm::Rms(self.number("rms_norm_eps")?.unwrap_or(1e-6) as f32),
            activation: activation.function,
            // A dReLU family stays dReLU even where a user names its function as its file does, relu.
            ffn_kind: if activation.both || activated.both { Ffn::GatedBoth } else { Ffn::Gated },
            positions: self.rotary(head_dim)?,
            attention_bias: bias,
            output_bias: bias,
            ffn_bias: false,
            tied: self.flag("tie_word_embeddings")?.unwrap_or(false),
            form: CommonForm { widths, windowed, ..CommonForm::default() },
            embedding_scale: 1.0,
            logit_scale: 1.0,
            logit_cap: 0.0,
        })
    }

    /// The positions that attention sees back, and the layers where it sees no more, if not all do.
    fn window(&self) -> Result<(Option<usize>, Vec<bool>)> {
        let (key, window) = ("layer_types", self.optional_size("sliding_window")?);
        let Value::Array(kinds) = &self.json[key] else { return Ok((window, Vec::new())) };
        let layers = self.layer_count()?;
        if kinds.len() != layers {
            return Err(self.bad(key, format!("names {} layers of {layers}", kinds.len())));
        }
        let slides = |kind: &Value| match kind.as_str() {
            Some("full_attention") => Some(false),
            Some("sliding_attention") if window.is_some() => Some(true),
            _ => None,
        };
        let windowed: Option<Vec<bool>> = kinds.iter().map(slides).collect();
        let windowed = windowed.ok_or_else(|| {
            self.bad(
                key,
                "names layers of other kinds than full_attention and sliding_attention, or a window is missing",
            )
        })?;
        Ok(in_layers(window, windowed))
    }

    /// The activation by the file. The files of Bamboo and TurboSparse call their function relu; that it is dReLU is known by the model
    /// class that they name, which is still there where `model_type` was changed.
    fn said_activation(&self, activated: Activated) -> Result<NamedActivation> {
        let key = "hidden_act";
        let mut said = self
            .named_activation(key)?
            .ok_or_else(|| self.bad(key, "missing; name it on the command line: --activation relu, say, or drelu"))?;
        let classes = self.json["architectures"].as_array().into_iter().flatten();
        let classes = classes.chain(self.json["auto_map"].as_object().into_iter().flat_map(|map| map.values()));
        said.both |= activated.both || classes.filter_map(Value::as_str).any(|class| class.contains("Bamboo"));
        if said == Activation::Relu.into() && self.names()?.iter().any(|name| says_drelu(name)) {
            return Err(wants_drelu(self.path, key));
        }
        Ok(said)
    }

    /// The activation of a family without a gate, whose ReLU models may not name theirs in the file. If the file names none it is
    /// `otherwise`, unless the model's name says ReLU: then it is refused.
    pub fn ungated_activation(&self, family: &str, key: &str, otherwise: Activation) -> Result<Activation> {
        let named = match self.given {
            Some(given) => Some(given),
            None => self.named_activation(key)?,
        };
        match named {
            Some(named) => super::ungated(self.path, key, named, family),
            None if self.names()?.iter().any(|name| name.to_lowercase().contains("relu")) => {
                let why = "missing, and the name says that this is a ReLU model; name it: --activation relu";
                Err(self.bad(key, why))
            }
            None => Ok(otherwise),
        }
    }

    /// RoPE over whole heads, by the file's theta and scaling.
    pub fn rotary(&self, head_dim: usize) -> Result<Positions> {
        let (theta, scaling) = (self.rope_theta()?, self.rope_scaling()?);
        Ok(Positions::Rope { frequencies: rope_frequencies(head_dim.min(1 << 12), theta, &scaling) })
    }

    /// `rope_theta` is a field of the file or, since transformers 5, of `rope_parameters`.
    pub fn rope_theta(&self) -> Result<f64> {
        let theta = match &self.json["rope_parameters"]["rope_theta"] {
            Value::Null => self.number("rope_theta")?.unwrap_or(10_000.0),
            value => value.as_f64().unwrap_or(f64::NAN),
        };
        if theta.is_finite() && theta > 0.0 {
            Ok(theta)
        } else {
            Err(self.bad("rope_theta", format!("{theta} is not a positive number")))
        }
    }

    fn rope_scaling(&self) -> Result<RopeScaling> {
        let (key, scaling) = match &self.json["rope_scaling"] {
            Value::Null => ("rope_parameters", &self.json["rope_parameters"]),
            scaling => ("rope_scaling", scaling),
        };
        if scaling.is_null() {
            return Ok(RopeScaling::None);
        }
        let kind = match (&scaling["rope_type"], &scaling["type"]) {
            (Value::String(kind), _) | (Value::Null, Value::String(kind)) => kind,
            // Without a factor there is no scaling: the object is there for rope_theta.
            (Value::Null, Value::Null) if scaling.is_object() && scaling["factor"].is_null() => "default",
            _ => return Err(self.bad(key, format!("is {scaling}, which does not name its rope_type"))),
        };
        let number = |part: &str| {
            let value = scaling[part].as_f64().filter(|v| v.is_finite() && *v > 0.0);
            value.ok_or_else(|| self.bad(&format!("{key}.{part}"), "missing or not a positive number"))
        };
        match kind {
            "default" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear(number("factor")?)),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: number("factor")?,
                low: number("low_freq_factor")?,
                high: number("high_freq_factor")?,
                original: number("original_max_position_embeddings")?,
            }),
            other => {
                let why = format!("RoPE scaling '{other}' is not supported; supported are linear and llama3");
                Err(self.bad(key, why))
            }
        }
    }
}
