//! What is asked of the engine, and what comes back.

use super::thoughts::ThoughtBudget;
use super::{Grammar, LineLimits};
use crate::clock::Duration;
use crate::engine::sampler::SamplingParams;
use std::sync::Arc;
use tokio::sync::watch;

/// One answer to generate.
pub struct Job {
    /// The client that asked; the queue is fair between clients.
    pub client: u64,
    /// Whose keys and values it may be answered from: those of jobs with the same number.
    pub owner: u64,
    /// The prompt's tokens: at least one, and fewer than the context has positions.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub params: SamplingParams,
    /// Tokens of the answer at most, 1 or more.
    pub max_tokens: usize,
    /// Where it ends with a line; `None`: lines do not matter.
    pub lines: Option<LineLimits>,
    /// Tokens that end the answer as the model's end-of-text token does.
    pub ends: Vec<u32>,
    /// The answer ends before the first of these texts.
    pub stops: Vec<String>,
    /// The answer is a text of its own and not the continuation of one ([`crate::tokenizer::TextStream`]).
    pub whole: bool,
    /// Generation goes on after the model's end-of-text token.
    pub ignore_eos: bool,
    /// Token and the number added to its logit.
    pub logit_bias: Vec<(u32, f32)>,
    /// Reports the log probability of each token, and of this many of the likeliest. `None`: reports none.
    pub logprobs: Option<usize>,
    /// Control tokens that are a part of the text.
    pub spoken: Vec<u32>,
    /// How long the answer may think; `None`: as long as it likes.
    pub thoughts: Option<ThoughtBudget>,
    /// The form that the answer must have; `None` for plain text.
    pub grammar: Option<Grammar>,
}

impl Job {
    /// At most `max_tokens` tokens that go on from a prompt, and nothing else.
    pub fn plain(prompt: Vec<u32>, max_tokens: usize) -> Job {
        Job {
            client: 0,
            owner: 0,
            prompt,
            params: SamplingParams::default(),
            max_tokens,
            lines: None,
            ends: Vec::new(),
            stops: Vec::new(),
            whole: false,
            ignore_eos: false,
            logit_bias: Vec::new(),
            logprobs: None,
            spoken: Vec::new(),
            thoughts: None,
            grammar: None,
        }
    }
}

/// What the client of a job receives: any number of deltas, then one of the others, which is the last.
#[derive(Debug)]
pub enum Event {
    /// The next piece of the answer.
    Delta(Delta),
    /// The answer is complete.
    Done(Done),
    /// The engine could not go on; the reason, for a person.
    Failed(String),
    /// The job's own grammar could not be followed any further; the reason, for a person.
    Unsupported(String),
}

/// A piece of the answer.
#[derive(Debug, Default, PartialEq)]
pub struct Delta {
    /// What the model thinks in a channel of its own, behind the pieces before; whole characters.
    pub thought: String,
    /// Text that follows the pieces before; whole characters.
    pub text: String,
    /// The tokens whose text begins in this piece, if log probabilities were asked for.
    pub logprobs: Vec<Logprob>,
}

/// A token and the logarithm of its probability; natural logarithms.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprob {
    /// The chosen token.
    pub token: u32,
    /// Its log probability in the model's own distribution, 0 or less.
    pub logprob: f32,
    /// The likeliest tokens and their log probabilities, best first.
    pub top: Vec<(u32, f32)>,
}

/// How an answer ended and what it took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Done {
    /// Why it ended.
    pub reason: Reason,
    /// The stop string that ended it, by its number in [`Job::stops`]; `None` if none did.
    pub stopped_by: Option<usize>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, the first ones whose keys and values were still there and that did not run again.
    pub cached_tokens: usize,
    /// Tokens that were generated, an end-of-text token included.
    pub generated_tokens: usize,
    /// Time in the queue, until the job got a slot.
    pub queued: Duration,
    /// Time from the slot to the first token.
    pub prompt_time: Duration,
    /// Time from the first token to the last.
    pub generation_time: Duration,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The model ended it, a stop string came, or the grammar was complete.
    Stop,
    /// It has as many tokens as were asked for, a line ends it, or the context is full.
    Length,
}

/// Why a job was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// This many jobs wait already, as many as may.
    QueueFull(usize),
    /// The worker has ended.
    Gone,
}

/// One of the jobs that wait or run, from when it is handed in until it has ended.
pub struct Counted(Arc<watch::Sender<usize>>);

impl Counted {
    /// One job more.
    pub fn one_more(jobs: &Arc<watch::Sender<usize>>) -> Counted {
        jobs.send_modify(|jobs| *jobs += 1);
        Counted(jobs.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|jobs| *jobs -= 1);
    }
}
