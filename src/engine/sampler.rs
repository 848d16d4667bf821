//! From the logits of one position to the next token.
//!
//! The order of llama.cpp's default chain: penalties, top-k, top-p, min-p, temperature, draw. A temperature of 0 or
//! less means greedy: the largest logit after the penalties, the lowest id among equals.
//!
//! A NaN logit is never chosen: it counts as minus infinity, as masked tokens do. Plus infinity counts as the largest
//! finite number. With no usable logit at all the answer is token 0, and [`Sampler::unusable_steps`] says that it
//! happened: an engine that sees it grow has a fault in its arithmetic and must stop.
//!
//! After the first token nothing is allocated. With top-k on, a token costs one pass over the logits that keeps the
//! best k; only those are sorted.

use crate::error::{Error, Result};
use crate::prng::Prng;
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::collections::VecDeque;

/// How to choose a token. The defaults are llama.cpp's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingParams {
    /// Divides the logits; 0 or less is greedy.
    pub temperature: f32,
    /// Tokens kept, the most likely ones; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most likely tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides the positive logits and multiplies the negative ones of recent tokens; 1 is off.
    pub repeat_penalty: f32,
    /// Tokens that count as recent; 0 turns the three penalties off.
    pub repeat_last_n: usize,
    /// Taken from the logit of every recent token.
    pub presence_penalty: f32,
    /// Taken from the logit of a recent token once per occurrence.
    pub frequency_penalty: f32,
    /// The same seed, parameters and logits give the same tokens.
    pub seed: u64,
}

impl Default for SamplingParams {
    fn default() -> SamplingParams {
        SamplingParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

/// The window is kept token by token: 1 Mi tokens are more than any context and cost 4 MiB.
const MAX_WINDOW: usize = 1 << 20;
/// OpenAI's range is -2..=2; a penalty beyond 100 only ever means a typing error.
const MAX_PENALTY: f32 = 100.0;

impl SamplingParams {
    /// Always the most likely token.
    pub fn greedy() -> SamplingParams {
        SamplingParams { temperature: 0.0, ..SamplingParams::default() }
    }

    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// [`Error::Usage`] that names the flag, its value and the range.
    pub fn validate(&self) -> Result<()> {
        let in_range = |flag: &str, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::Usage(format!("{flag} is {value}; it must be a number from {low} to {high}")))
        };
        in_range("--temperature", self.temperature, -1.0, 100.0)?;
        in_range("--top-p", self.top_p, 0.0, 1.0)?;
        in_range("--min-p", self.min_p, 0.0, 1.0)?;
        in_range("--repeat-penalty", self.repeat_penalty, 0.01, MAX_PENALTY)?;
        in_range("--presence-penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        in_range("--frequency-penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        if self.repeat_last_n > MAX_WINDOW {
            let n = self.repeat_last_n;
            return Err(Error::Usage(format!("--repeat-last-n is {n}; it must be a number from 0 to {MAX_WINDOW}")));
        }
        Ok(())
    }
}

/// A token that may still be chosen.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    logit: f32,
    id: u32,
}

/// One sequence's sampling: its random numbers and its recent tokens.
#[derive(Debug)]
pub struct Sampler {
    params: SamplingParams,
    prng: Prng,
    recent: VecDeque<u32>,
    /// Per token: how often it is in `recent`. [vocab], or empty with the penalties off
    counts: Vec<u32>,
    candidates: Vec<Candidate>,
    /// Per candidate, in its order. Not normalised.
    weights: Vec<f32>,
    unusable_steps: u64,
}

impl Sampler {
    /// For logits of `vocab` tokens.
    ///
    /// # Errors
    /// Those of [`SamplingParams::validate`].
    pub fn new(params: SamplingParams, vocab: usize) -> Result<Sampler> {
        params.validate()?;
        let penalised = params.repeat_last_n > 0
            && (params.repeat_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0);
        Ok(Sampler {
            prng: Prng::new(params.seed),
            recent: VecDeque::with_capacity(if penalised { params.repeat_last_n } else { 0 }),
            counts: if penalised { vec![0; vocab] } else { Vec::new() },
            candidates: Vec::new(),
            weights: Vec::new(),
            unusable_steps: 0,
            params,
        })
    }

    /// The parameters that it was made with.
    pub fn params(&self) -> &SamplingParams {
        &self.params
    }

    /// Calls of [`Sampler::sample`] in which no logit was a usable number.
    pub fn unusable_steps(&self) -> u64 {
        self.unusable_steps
    }

    /// The next token. The penalties are applied to `logits` in place. Does not [`Sampler::accept`] it.
    pub fn sample(&mut self, logits: &mut [f32]) -> u32 {
        self.penalise(logits);
        if self.params.temperature <= 0.0 {
            let best = argmax(logits);
            self.unusable_steps += u64::from(best.is_none());
            return best.unwrap_or(0);
        }
        self.keep_top_k(logits);
        if self.candidates.is_empty() {
            self.unusable_steps += 1;
            return 0;
        }
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
    }

    /// Counts a token as generated (or as part of the prompt) for the penalties.
    pub fn accept(&mut self, token: u32) {
        if self.counts.is_empty() || token as usize >= self.counts.len() {
            return;
        }
        if self.recent.len() == self.params.repeat_last_n
            && let Some(old) = self.recent.pop_front()
        {
            self.counts[old as usize] -= 1;
        }
        self.recent.push_back(token);
        self.counts[token as usize] += 1;
    }

    /// Forgets the tokens and starts the random numbers again.
    pub fn reset(&mut self) {
        for token in self.recent.drain(..) {
            self.counts[token as usize] = 0;
        }
        self.prng = Prng::new(self.params.seed);
    }

    fn penalise(&mut self, logits: &mut [f32]) {
        for i in 0..self.recent.len() {
            let token = self.recent[i] as usize;
            let count = std::mem::take(&mut self.counts[token]);
            // Taken to 0 so that a token which is in the window twice is penalised once; put back below.
            if count == 0 {
                continue;
            }
            if let Some(logit) = logits.get_mut(token) {
                if *logit <= 0.0 {
                    *logit *= self.params.repeat_penalty;
                } else {
                    *logit /= self.params.repeat_penalty;
                }
                *logit -= count as f32 * self.params.frequency_penalty + self.params.presence_penalty;
            }
        }
        for &token in &self.recent {
            self.counts[token as usize] += 1;
        }
    }

    /// Fills `candidates` with the best k, best first; with all of them, unsorted, when k is off.
    fn keep_top_k(&mut self, logits: &[f32]) {
        let k = match self.params.top_k {
            0 => logits.len(),
            k => k.min(logits.len()),
        };
        let usable = logits.iter().zip(0u32..).filter_map(|(&logit, id)| {
            let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) };
            (logit > f32::NEG_INFINITY).then_some(Candidate { logit, id })
        });
        self.candidates.clear();
        if k == logits.len() {
            self.candidates.reserve(k);
            self.candidates.extend(usable);
            return;
        }
        // When the buffer is full, what cannot be among the best k any more goes; its worst is then the bar to pass.
        let room = (4 * k).max(256);
        self.candidates.reserve(room);
        let mut bar = f32::NEG_INFINITY;
        for candidate in usable {
            if candidate.logit <= bar {
                continue;
            }
            self.candidates.push(candidate);
            if self.candidates.len() == room {
                self.candidates.select_nth_unstable_by(k - 1, best_first);
                self.candidates.truncate(k);
                bar = self.candidates[k - 1].logit;
            }
        }
        if self.candidates.len() > k {
            self.candidates.select_nth_unstable_by(k - 1, best_first);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(best_first);
    }

    /// Cuts `candidates` to the smallest most likely set that holds `top_p`, and sorts it.
    fn keep_top_p(&mut self) {
        let top_p = f64::from(self.params.top_p);
        if top_p >= 1.0 {
            return;
        }
        let best = self.candidates.iter().fold(f32::NEG_INFINITY, |m, c| m.max(c.logit));
        let weight = |c: &Candidate| f64::from((c.logit - best).exp());
        let total: f64 = self.candidates.iter().map(weight).sum();
        let mut held = 0.0;
        let mut done = 0;
        // A piece at a time: with top-k off, sorting 150,000 tokens to keep 50 would cost more than the model's head.
        let mut piece = 1024;
        while done < self.candidates.len() {
            let rest = &mut self.candidates[done..];
            let sorted = piece.min(rest.len());
            if sorted < rest.len() {
                rest.select_nth_unstable_by(sorted - 1, best_first);
            }
            rest[..sorted].sort_unstable_by(best_first);
            for (i, candidate) in rest[..sorted].iter().enumerate() {
                held += weight(candidate);
                if held >= top_p * total {
                    self.candidates.truncate(done + i + 1);
                    return;
                }
            }
            done += sorted;
            piece *= 4;
        }
    }

    fn keep_min_p(&mut self) {
        if self.params.min_p <= 0.0 {
            return;
        }
        let best = self.candidates.iter().fold(f32::NEG_INFINITY, |m, c| m.max(c.logit));
        let bar = best + self.params.min_p.ln();
        self.candidates.retain(|c| c.logit >= bar || c.logit == best);
    }

    fn draw(&mut self) -> u32 {
        let best = self.candidates.iter().fold(f32::NEG_INFINITY, |m, c| m.max(c.logit));
        let temperature = self.params.temperature;
        self.weights.clear();
        // Room for all that there can be: a later token may have more candidates than the first.
        self.weights.reserve(self.candidates.capacity());
        self.weights.extend(self.candidates.iter().map(|c| ((c.logit - best) / temperature).exp()));
        let total: f64 = self.weights.iter().map(|&w| f64::from(w)).sum();
        let mut left = self.prng.next_f64() * total;
        let mut last = self.candidates[0].id;
        for (candidate, &weight) in self.candidates.iter().zip(&self.weights) {
            if weight == 0.0 {
                continue;
            }
            last = candidate.id;
            left -= f64::from(weight);
            if left < 0.0 {
                break;
            }
        }
        // Rounding may leave a crumb after the last one: then the last one that has any weight is it.
        last
    }
}

/// The largest logit's token, the first among equals; none if every one is NaN or minus infinity.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = None;
    let mut bar = f32::NEG_INFINITY;
    for (&logit, id) in logits.iter().zip(0u32..) {
        // False for NaN.
        if logit > bar {
            bar = logit;
            best = Some(id);
        }
    }
    best
}

/// A total order, so that neither ties nor the partial selection can make two runs differ.
fn best_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}
