//! The shape of a synthetic model.

use super::routing::{Law, Routing};
use super::sparse::Sparse;
use crate::error::{Error, Result};
use crate::model::Description;
use crate::model::config::{Activation, ModelConfig};
use crate::placement::shapes::{Sizes, mixtral};

/// Version of the generator, part of a store's fingerprint; raised when the same shape and seed give other weights.
pub(super) const RECIPE: u32 = 2;

/// Shape of a synthetic model.
pub struct Shape {
    /// Hidden size, a multiple of `heads`.
    pub hidden: usize,
    /// Number of layers.
    pub layers: usize,
    /// Neurons per layer, or per expert.
    pub ffn: usize,
    /// Query heads per layer.
    pub heads: usize,
    /// Key and value heads per layer.
    pub kv_heads: usize,
    /// Size of the vocabulary, at least 259: three control tokens and 256 bytes.
    pub vocab: usize,
    /// Token positions that the model has.
    pub context: usize,
    /// Activation function of the gated FFN.
    pub activation: Activation,
    /// Mean share of neurons that are active for a token, 0.01 to 0.5, ReLU only; `None` makes plain random weights, with which about half
    /// of a ReLU model's neurons are.
    pub active: Option<f64>,
    /// Seed of all weights.
    pub seed: u64,
    /// Channels whose numbers are 20 to 100 times as large as the others where a layer's matrices read them, most in the first and last
    /// layers; the matrices' columns are as much smaller, so that the model computes the same.
    pub outliers: usize,
    /// Makes each FFN a mixture. Only in a GGUF.
    pub experts: Option<Mixture>,
}

/// The experts of a synthetic mixture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Experts of [`Shape::ffn`] neurons in a layer.
    pub count: usize,
    /// How many of them a token has.
    pub used: usize,
    /// Which ones, where routing is planted; else each token has its own, and all are as frequent as any.
    pub routing: Option<Routing>,
}

impl Mixture {
    /// A mixture whose routing is flat.
    pub const fn flat(count: usize, used: usize) -> Mixture {
        Mixture { count, used, routing: None }
    }
}

impl Shape {
    /// What a model of this shape is.
    ///
    /// # Errors
    /// [`Error::Usage`] naming the option that cannot be.
    pub fn config(&self) -> Result<ModelConfig> {
        self.described()?.resolve().map_err(Error::Usage)
    }

    /// What its files say of it.
    ///
    /// # Errors
    /// As [`Shape::config`].
    pub fn described(&self) -> Result<Description> {
        let usage = |why: String| Error::Usage(why);
        if self.heads == 0 || !self.hidden.is_multiple_of(self.heads) {
            return Err(usage(format!("--hidden {} is not a multiple of --heads {}", self.hidden, self.heads)));
        }
        if self.vocab < BYTE_TOKENS_END {
            return Err(usage(format!(
                "--vocab {} is below {BYTE_TOKENS_END}: three control tokens and 256 bytes",
                self.vocab
            )));
        }
        let &Shape { hidden, layers, ffn, heads, kv_heads, vocab, context, .. } = self;
        let name = match self.experts {
            Some(Mixture { count, used, .. }) => format!("synth-{hidden}x{layers}x{ffn}-{used}of{count}"),
            None => format!("synth-{hidden}x{layers}x{ffn}"),
        };
        let sizes = Sizes { hidden, layers, ffn, heads, kv_heads, vocab, context };
        let experts = self.experts.map(|of| mixtral(of.count, of.used));
        let config = sizes.described(name, self.activation, experts);
        config.check().map_err(usage)?;
        if self.experts.is_some_and(|experts| experts.count < 2) {
            return Err(usage("--experts 1: a mixture has two experts or more; leave it out for a dense model".into()));
        }
        if self.active.is_some() && self.experts.is_some_and(|experts| experts.routing.is_some()) {
            return Err(usage(
                "--active: neurons and routing are not planted together; leave it out, or --skew and --reuse".into(),
            ));
        }
        if let Some(active) = self.active {
            Sparse::check(&config.resolve().map_err(usage)?, active)?;
        }
        Ok(config)
    }
}

impl Shape {
    /// What has to be planted for the routing that is asked for; `None` where none is.
    ///
    /// # Errors
    /// Those of [`Shape::config`] and [`Law::find`].
    pub fn law(&self) -> Result<Option<Law>> {
        let Some(Mixture { count, used, routing: Some(asked) }) = self.experts else { return Ok(None) };
        Law::find(&self.config()?, (count, used), asked, self.seed).map(Some)
    }
}

pub(super) const BYTE_TOKENS_END: usize = 3 + 256;
