//! What is asked of the engine, and what comes back.

use super::Grammar;
use crate::clock::Duration;
use crate::engine::sampler::SamplingParams;

/// One answer that somebody wants.
pub struct Job {
    /// Who asks: the queue is fair between clients.
    pub client: u64,
    /// At least one token; fewer than the context has positions.
    pub prompt: Vec<u32>,
    pub params: SamplingParams,
    /// At least 1.
    pub max_tokens: usize,
    /// The answer ends before the first of these.
    pub stops: Vec<String>,
    /// The answer is a whole text and not the continuation of one ([`crate::tokenizer::TextStream`]).
    pub whole: bool,
    /// Go on after the model's end-of-text token.
    pub ignore_eos: bool,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tell the log probability of each token, and of this many of the likeliest.
    pub logprobs: Option<usize>,
    /// What the answer must be.
    pub grammar: Option<Grammar>,
}

/// What a job's asker is told, in this order: deltas, then one of the others.
#[derive(Debug)]
pub enum Event {
    Delta(Delta),
    Done(Done),
    /// The engine could not go on; in words.
    Failed(String),
    /// The asker's own grammar could not be followed any further; in words.
    Unsupported(String),
}

/// A piece of the answer.
#[derive(Debug, Default, PartialEq)]
pub struct Delta {
    pub text: String,
    /// Of the tokens that the text is made of, if they were asked for.
    pub logprobs: Vec<Logprob>,
}

/// A token and how likely it was, natural logarithms.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprob {
    pub token: u32,
    pub logprob: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// How an answer ended and what it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    pub reason: Reason,
    pub prompt_tokens: usize,
    /// Of the prompt, what was still there from before.
    pub cached_tokens: usize,
    pub generated_tokens: usize,
    /// In the queue; from its end to the first token; from then to the last.
    pub queued: Duration,
    pub prompt_time: Duration,
    pub generation_time: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The model's end, a stop string, or the end of the grammar.
    Stop,
    /// As many tokens as were asked for, or the context is full.
    Length,
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// So many jobs wait already.
    QueueFull(usize),
    /// The worker has ended.
    Gone,
}
