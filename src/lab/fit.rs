//! Whether a packed model's numbers fit the activation that it was packed with (docs/neuron_store.md, "The activation"). A model
//! with a wrong one answers all the same, only badly, and some files do not say theirs.
//!
//! Two witnesses. **The text**: training made the model's own activation the one under which ordinary text is likely. **The signs**:
//! in act(gate) * up the sign of a neuron's up and down row can be turned round together and nothing changes, in no step of
//! training either. So each neuron's sign is that of the random numbers it began with, a fair coin, whatever its gate does. dReLU
//! cuts up off at zero: there the sign means something, and ups lean to one side. Let d be the number of tokens in which a
//! neuron fires with a negative up, less those with a positive one: for fair coins |sum d| / sqrt(sum d^2) exceeds t with a
//! probability of at most 2 exp(-t^2 / 2) (Hoeffding).

use super::evaluate::negative_log_likelihood;
use crate::cpu::{Kernels, MAX_COLUMNS};
use crate::engine::{Engine, Logits, Observer, Seen};
use crate::error::Result;
use crate::interrupt;
use crate::model::{Activation, Ffn, KvCache, KvType, Model, ModelConfig, NamedActivation};
use crate::tokenizer::{Special, Tokenizer};
use std::path::Path;

/// Plain English with nothing to know, of a few more tokens than are taken.
const TEXT: &str = "Once upon a time there was a king who had three sons. When he was old, he called them to him and said that they \
                    should go out into the world and look for their fortune, and come home again before the winter.";
/// Nats per token by which another activation must make the text likelier. Measured differences: docs/neuron_store.md.
const MARGIN: f64 = 0.25;
/// The text says something about a model that needs at most this share of ln(vocabulary) per token: random weights need all of it.
const TRAINED: f64 = 0.75;
/// Of signs that are fair coins one model in 30 million leans so far.
const LEAN: f64 = 6.0;
/// A lean that rounding may have made is none: share of ups away from one half. Coins of a 7B model stray by 0.001.
const LEAN_SHARE: f64 = 0.005;
/// Gates above zero, of a function that needs no zeros. ProSparse has 11 %, ReluLLaMA 30 % by their papers, demo-silu 34 %.
const FEW: f64 = 0.15;

const RELU: NamedActivation = NamedActivation { function: Activation::Relu, both: false };
const DRELU: NamedActivation = NamedActivation { function: Activation::Relu, both: true };
const SILU: NamedActivation = NamedActivation { function: Activation::Silu, both: false };

/// What a few tokens showed of a model.
#[derive(Clone, Debug)]
pub struct Fit {
    pub packed_as: NamedActivation,
    pub vocab: usize,
    pub numbers: Numbers,
    /// Mean negative log-likelihood of the text, nats per token, under what it was packed with and the others; empty where there is
    /// no tokeniser.
    pub losses: Vec<(NamedActivation, f64)>,
}

/// Shares over neurons, layers and tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Numbers {
    /// Activations that are not zero.
    pub active: f64,
    /// Gates above zero.
    pub firing: f64,
    /// Of these, those whose up is negative.
    pub negative: f64,
    /// Sum of d over the root of the sum of d^2; positive where ups are mostly negative.
    pub lean: f64,
}

/// That the model looks like another activation than the one it was packed with.
#[derive(Clone, Debug)]
pub struct Doubt {
    pub rather: NamedActivation,
    pub why: String,
}

/// Runs a few tokens through the store, under its activation and under those it is easily taken for. `None` for FFNs without a gate.
pub fn measure(store: &Path, threads: usize, kernels: Kernels) -> Result<Option<Fit>> {
    let model = Model::open(store)?;
    let c = &model.config;
    if c.ffn_kind == Ffn::Plain {
        return Ok(None);
    }
    let packed_as = NamedActivation { function: c.activation, both: c.ffn_kind == Ffn::GatedBoth };
    let (text, vocab) = (text(&model)?, c.vocab);
    // Without a text, any tokens have signs.
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

/// What a model may be instead: of the three kinds of gated FFN those it is not.
fn others(packed_as: NamedActivation) -> impl Iterator<Item = NamedActivation> {
    let kind = |a: NamedActivation| (a.function.is_sparse(), a.both);
    [RELU, DRELU, SILU].into_iter().filter(move |&other| kind(other) != kind(packed_as))
}

/// The text's first tokens, if the model has a tokeniser that makes enough of it to judge by.
fn text(model: &Model) -> Result<Option<Vec<u32>>> {
    let Ok(spec) = model.tokenizer() else { return Ok(None) };
    let mut tokens = Tokenizer::new(spec, model.store().path())?.encode_prompt(TEXT, Special::AsText)?;
    tokens.truncate(MAX_COLUMNS.min(model.config.context));
    Ok((tokens.len() > MAX_COLUMNS / 2 && tokens.iter().all(|&t| (t as usize) < model.config.vocab)).then_some(tokens))
}

/// Nats per token.
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
    /// Of each neuron, tokens in which its gate is above zero and its up negative, less those in which it is positive.
    d: Vec<i64>, // [layers, ffn]
    seen: u64,
    active: u64,
    firing: u64,
    /// Of the firing, those whose up has a sign that can be seen, and is negative.
    signed: u64,
    negative: u64,
}

impl Counting {
    fn new(c: &ModelConfig) -> Counting {
        let both = c.ffn_kind == Ffn::GatedBoth;
        Counting {
            both,
            ffn: c.ffn,
            d: vec![0; c.layers * c.ffn],
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
            // In a plain product the sign is up's. In dReLU what is zero though the gate fires had an up below zero.
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

    /// Whether the text speaks for what the model was packed with against another.
    fn stands(&self, other: NamedActivation) -> bool {
        let both = self.loss(self.packed_as).zip(self.loss(other));
        both.is_some_and(|(own, other)| self.is_trained(own) && own < other)
    }

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
