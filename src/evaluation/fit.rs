//! Whether a packed model's weights fit the activation that it was packed with (docs/neuron_store.md, "The activation"). A model
//! with a wrong activation still runs and only answers badly, and some files do not name theirs.
//!
//! There are two tests. **The text**: under the activation that the model was trained with, ordinary text is likely. **The signs**:
//! in act(gate) * up, negating a neuron's up and down rows together changes nothing, at any step of training. So each neuron's
//! sign is that of its random initial weights, a fair coin, whatever its gate does. dReLU sets negative ups to zero: there the sign
//! matters, and most ups have the same one. Let d be the number of tokens in which a neuron fires with a negative up, less those
//! with a positive one: for fair coins |sum d| / sqrt(sum d^2) exceeds t with a probability of at most 2 exp(-t^2 / 2) (Hoeffding).

use super::evaluate::negative_log_likelihood;
use crate::cpu::{Kernels, MAX_COLUMNS};
use crate::engine::{Engine, Logits, Observer, Seen};
use crate::error::Result;
use crate::interrupt;
use crate::model::{Activation, Ffn, KvCache, KvType, Model, ModelConfig, NamedActivation};
use crate::tokenizer::{Special, Tokenizer};
use std::path::Path;

/// Plain English that needs no special knowledge, a few tokens longer than what is used of it.
const TEXT: &str = "Once upon a time there was a king who had three sons. When he was old, he called them to him and said that they \
                    should go out into the world and look for their fortune, and come home again before the winter.";
/// Another activation is suspected if it makes the text likelier by more than this, nats per token. Measured differences are in
/// docs/neuron_store.md.
const MARGIN: f64 = 0.25;
/// The text test counts only if the loss is below this share of ln(vocabulary): a model of random weights needs all of it.
const TRAINED: f64 = 0.75;
/// Standard deviations by which ups must lean to one sign; fair coins do so in one of 30 million models.
const LEAN: f64 = 6.0;
/// Least distance of the share of negative ups from one half: less may come from rounding. Fair coins of a 7B model deviate by 0.001.
const LEAN_SHARE: f64 = 0.005;
/// A model without ReLU is suspected if a smaller share of its gates is above zero. ProSparse has 11 %, ReluLLaMA 30 % by their papers,
/// demo-silu 34 %.
const FEW: f64 = 0.15;

const RELU: NamedActivation = NamedActivation { function: Activation::Relu, both: false };
const DRELU: NamedActivation = NamedActivation { function: Activation::Relu, both: true };
const SILU: NamedActivation = NamedActivation { function: Activation::Silu, both: false };

/// What running a few tokens showed about a model.
#[derive(Clone, Debug)]
pub struct Fit {
    /// The activation that the model was packed with.
    pub packed_as: NamedActivation,
    /// Size of the vocabulary; a model that knows nothing has a loss of ln(`vocab`) nats per token.
    pub vocab: usize,
    /// Activity and signs of its neurons.
    pub numbers: Numbers,
    /// Mean negative log-likelihood of the text, nats per token, under the activation it was packed with (first) and under the others;
    /// empty without a tokenizer.
    pub losses: Vec<(NamedActivation, f64)>,
}

/// Shares over all neurons, layers and tokens, 0 to 1, and the lean of the signs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Numbers {
    /// Activations that are not zero / all.
    pub active: f64,
    /// Gates above zero / all.
    pub firing: f64,
    /// Negative ups / ups whose sign can be seen, where the gate is above zero.
    pub negative: f64,
    /// Sum of d / square root of the sum of d^2 (see the module); positive where most ups are negative.
    pub lean: f64,
}

/// A finding that the model looks like one with another activation than it was packed with.
#[derive(Clone, Debug)]
pub struct Doubt {
    /// The activation that it looks like.
    pub rather: NamedActivation,
    /// The evidence, in words for a message.
    pub why: String,
}

/// Runs a few tokens through the store under its own activation and under those it is easily confused with. `None` for FFNs without a gate.
///
/// # Errors
/// [`crate::Error::BadFile`] for a store that cannot be read, [`crate::Error::Memory`] where keys and values do not fit,
/// [`crate::Error::Interrupted`] after Ctrl-C.
pub fn measure(store: &Path, threads: usize, kernels: Kernels) -> Result<Option<Fit>> {
    let model = Model::open(store)?;
    let c = &model.config;
    if c.ffn_kind == Ffn::Plain {
        return Ok(None);
    }
    let packed_as = NamedActivation { function: c.activation, both: c.ffn_kind == Ffn::GatedBoth };
    let (text, vocab) = (text(&model)?, c.vocab);
    // Without a text any tokens will do for the signs.
    let tokens = text.clone().unwrap_or_else(|| (0..MAX_COLUMNS).map(|i| (i * 7919 % vocab) as u32).collect());
    let mut counting = Counting::new(c);
    let mut losses = vec![(packed_as, loss(model, &tokens, threads, kernels, Some(&mut counting))?)];
    for other in others(packed_as).filter(|_| text.is_some()) {
        let mut model = Model::open(store)?;
        model.config.activation = other.function;
        model.config.ffn_kind = if other.both { Ffn::GatedBoth } else { Ffn::Gated };
        losses.push((other, loss(model, &tokens, threads, kernels, None)?));
    }
    if text.is_none() {
        losses.clear();
    }
    Ok(Some(Fit { packed_as, vocab, numbers: counting.numbers(), losses }))
}

/// The other activations it may have: of the three kinds of gated FFN those it was not packed as.
fn others(packed_as: NamedActivation) -> impl Iterator<Item = NamedActivation> {
    let kind = |a: NamedActivation| (a.function.is_sparse(), a.both);
    [RELU, DRELU, SILU].into_iter().filter(move |&other| kind(other) != kind(packed_as))
}

/// The first tokens of the text; `None` if the model has no tokenizer or it makes too few tokens of the text.
fn text(model: &Model) -> Result<Option<Vec<u32>>> {
    let Ok(spec) = model.tokenizer() else { return Ok(None) };
    let mut tokens = Tokenizer::new(spec, model.path())?.encode_prompt(TEXT, Special::AsText)?;
    tokens.truncate(MAX_COLUMNS.min(model.config.context));
    Ok((tokens.len() > MAX_COLUMNS / 2 && tokens.iter().all(|&t| (t as usize) < model.config.vocab)).then_some(tokens))
}

/// Mean negative log-likelihood of the tokens, nats per token.
fn loss(
    model: Model,
    tokens: &[u32],
    threads: usize,
    kernels: Kernels,
    counting: Option<&mut Counting>,
) -> Result<f64> {
    interrupt::check()?;
    let mut kv = KvCache::new(&model.config, tokens.len(), KvType::F32)?;
    let vocab = model.config.vocab;
    let mut engine = Engine::new(model, threads, kernels);
    let logits = match counting {
        Some(counting) => engine.forward_observed(&mut kv, tokens, Logits::All, counting),
        None => engine.forward(&mut kv, tokens, Logits::All),
    };
    let scored = logits.chunks_exact(vocab).zip(&tokens[1..]);
    Ok(scored.map(|(logits, &next)| negative_log_likelihood(logits, next)).sum::<f64>() / (tokens.len() - 1) as f64)
}

struct Counting {
    both: bool,
    ffn: usize,
    /// Of each neuron, the number of tokens in which its gate is above zero and its up negative, less those in which up is positive.
    d: Vec<i64>, // [layers, ffn]
    seen: u64,
    active: u64,
    firing: u64,
    /// Of the firing ones, those whose up has a visible sign; `negative` of them have a negative one.
    signed: u64,
    negative: u64,
}

impl Counting {
    fn new(c: &ModelConfig) -> Counting {
        let both = c.ffn_kind == Ffn::GatedBoth;
        Counting {
            both,
            ffn: c.widest_ffn(),
            d: vec![0; c.layers().len() * c.widest_ffn()],
            seen: 0,
            active: 0,
            firing: 0,
            signed: 0,
            negative: 0,
        }
    }

    fn numbers(&self) -> Numbers {
        let share = |n: u64, of: u64| n as f64 / of.max(1) as f64;
        let (sum, squares) = self.d.iter().fold((0, 0), |(sum, squares), d| (sum + d, squares + d * d));
        Numbers {
            active: share(self.active, self.seen),
            firing: share(self.firing, self.seen),
            negative: share(self.negative, self.signed),
            lean: sum as f64 / (squares.max(1) as f64).sqrt(),
        }
    }
}

impl Observer for Counting {
    fn layer(&mut self, seen: &Seen<'_>) {
        let d = &mut self.d[seen.layer * self.ffn..][..self.ffn];
        self.seen += seen.gates.len() as u64;
        for (i, (&gate, &activation)) in seen.gates.iter().zip(seen.activations).enumerate() {
            self.active += u64::from(activation != 0.0);
            if gate <= 0.0 {
                continue;
            }
            self.firing += 1;
            // With an active gate the product act(gate) * up has the sign of up. In dReLU a zero product means a negative up.
            let negative = if self.both { activation == 0.0 } else { activation < 0.0 };
            if self.both || activation != 0.0 {
                self.signed += 1;
                self.negative += u64::from(negative);
                d[i % self.ffn] += if negative { 1 } else { -1 };
            }
        }
    }
}

impl Fit {
    fn loss(&self, activation: NamedActivation) -> Option<f64> {
        self.losses.iter().find(|(a, loss)| *a == activation && loss.is_finite()).map(|&(_, loss)| loss)
    }

    fn is_trained(&self, loss: f64) -> bool {
        loss < TRAINED * (self.vocab as f64).ln()
    }

    /// Whether the text is likelier under the activation that the model was packed with than under `other`.
    fn stands(&self, other: NamedActivation) -> bool {
        let both = self.loss(self.packed_as).zip(self.loss(other));
        both.is_some_and(|(own, other)| self.is_trained(own) && own < other)
    }

    /// Why the activation looks wrong, by the first test that says so: the text, the signs, the share of zeros. `None` if none does.
    pub fn doubt(&self) -> Option<Doubt> {
        self.text_doubts().or_else(|| self.signs_doubt()).or_else(|| self.zeros_doubt())
    }

    fn text_doubts(&self) -> Option<Doubt> {
        let own = self.loss(self.packed_as)?;
        let others = self.losses[1..].iter().filter(|(_, loss)| self.is_trained(*loss));
        let &(rather, loss) = others.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, loss)| own - loss > MARGIN)?;
        let why = format!("a plain text costs {own:.2} nats a token with it and {loss:.2} with {rather}");
        Some(Doubt { rather, why })
    }

    fn signs_doubt(&self) -> Option<Doubt> {
        let Numbers { firing, negative, lean, .. } = self.numbers;
        let leans = lean.abs() > LEAN && (negative - 0.5).abs() > LEAN_SHARE;
        (leans && !self.packed_as.both && !self.stands(DRELU)).then(|| Doubt {
            rather: DRELU,
            why: format!(
                "where its gates are above zero ({:.0} % of them), {:.1} % of its ups are negative: {:.0} standard deviations from the \
                 half that they are where their sign has no meaning. As drelu {:.0} % of the neurons would be active",
                100.0 * firing,
                100.0 * negative,
                lean.abs(),
                100.0 * firing * (1.0 - negative)
            ),
        })
    }

    fn zeros_doubt(&self) -> Option<Doubt> {
        let few = self.numbers.firing < FEW && !self.packed_as.function.is_sparse() && !self.stands(RELU);
        few.then(|| Doubt {
            rather: RELU,
            why: format!(
                "only {:.0} % of its gates are above zero, as in models with ReLU",
                100.0 * self.numbers.firing
            ),
        })
    }
}
