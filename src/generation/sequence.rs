//! One running answer: from logits to a token, from tokens to events.

use super::job::{Delta, Done, Event, Job, Logprob, Reason};
use super::logprobs::logprobs;
use super::metrics::Metrics;
use super::outbox::Outbox;
use crate::clock::{self, Instant};
use crate::engine::sampler::Sampler;
use crate::error::Error;
use crate::tokenizer::channels::{Channel, Markers};
use crate::tokenizer::{TextStream, Tokenizer};
use tracing::{Span, debug};

/// How far a sequence has come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    /// This many of the prompt's tokens have run.
    Prompt(usize),
    /// This token was chosen and runs next.
    Decoding(u32),
}

/// How a step ended the sequence.
pub enum Ended {
    /// The answer is complete.
    Done(Reason),
    /// The engine could not go on; the reason.
    Failed(String),
    /// The job's grammar could not be followed; the reason.
    Unsupported(String),
}

/// A job that waits for a slot.
pub struct Waiting {
    /// The job as it was handed in.
    pub job: Box<Job>,
    /// The channel to its client.
    pub out: Outbox,
    /// When it was handed in.
    pub asked_at: Instant,
    /// The request that it belongs to, for the log.
    pub span: Span,
}

/// A job that has a slot.
pub struct Sequence {
    /// The job as it was handed in.
    pub job: Job,
    /// The channel to its client.
    pub out: Outbox,
    /// Number of its slot.
    pub slot: usize,
    /// How far it has come.
    pub phase: Phase,
    /// Since when its client is behind with reading; while it is, the sequence pauses and keeps its slot.
    pub resting: Option<Instant>,
    /// Steps of other work that were done since its last token.
    pub held_up: u64,
    sampler: Sampler,
    text: TextStream,
    /// What it thinks in a channel of its own.
    thought: TextStream,
    /// Where the answer is, of a model whose answers have channels.
    channel: Channel,
    /// Tokens with log probabilities whose text has not been sent yet, with the byte of the answer at which each begins.
    pending: Vec<(usize, Logprob)>,
    /// Bytes of all generated tokens.
    bytes: usize,
    /// Bytes of text that have been sent.
    released: usize,
    /// The model's own logits, `[vocab]`, kept where log probabilities are reported.
    raw: Vec<f32>,
    cached: usize,
    generated: usize,
    asked_at: Instant,
    span: Span,
    admitted_at: Instant,
    first_at: Option<Instant>,
    last_at: Instant,
}

impl Sequence {
    /// Gives a job the slot `slot`, whose KV cache already holds the first `cached` tokens of its prompt.
    ///
    /// # Errors
    /// The job's parameters are bad; the outbox comes back, to tell the client.
    pub fn new(
        waiting: Waiting,
        (vocab, tokenizer): (usize, &Tokenizer),
        slot: usize,
        cached: usize,
    ) -> Result<Sequence, (Error, Outbox)> {
        let Waiting { job, out, asked_at, span } = waiting;
        // `job.whole` is set only where the tokenizer drops the first space of a whole text.
        let made = Sampler::new(job.params.clone(), vocab).and_then(|sampler| {
            Ok((sampler, TextStream::whole(&job.stops, job.whole)?, TextStream::continuation(&[])?))
        });
        let (mut sampler, text, thought) = match made {
            Ok(made) => made,
            Err(error) => return Err((error, out)),
        };
        // As in OpenAI's API, presence and frequency penalties count only the answer's own tokens; the older repetition penalty also looks
        // at the prompt.
        if job.params.repeat_penalty != 1.0 {
            job.prompt.iter().for_each(|&token| sampler.accept(token));
        }
        let bytes_of = |token| tokenizer.token_bytes(token).unwrap_or_default();
        let channel = tokenizer.markers().map(|markers| Channel::after(markers, &job.prompt, bytes_of));
        let now = clock::now();
        debug!(parent: &span, slot, prompt = job.prompt.len(), cached, queued = ?now - asked_at, "has a slot");
        Ok(Sequence {
            job: *job,
            out,
            slot,
            phase: Phase::Prompt(cached),
            resting: None,
            held_up: 0,
            sampler,
            text,
            thought,
            channel: channel.unwrap_or_default(),
            pending: Vec::new(),
            bytes: 0,
            released: 0,
            raw: Vec::new(),
            cached,
            generated: 0,
            asked_at,
            span,
            admitted_at: now,
            first_at: None,
            last_at: now,
        })
    }

    /// Whether it gets its next token in this turn: it is being generated, and its client reads it.
    pub fn goes_on(&self) -> bool {
        matches!(self.phase, Phase::Decoding(_)) && self.resting.is_none()
    }

    /// Chooses the next token from `logits`, `[vocab]`, and sends its text. `room`: positions that the context has left. Returns how the
    /// answer ended, or `None` if it goes on.
    pub fn step(&mut self, logits: &mut [f32], room: usize, tokenizer: &Tokenizer, metrics: &Metrics) -> Option<Ended> {
        if self.job.logprobs.is_some() {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }
        for &(token, bias) in &self.job.logit_bias {
            logits[token as usize] += bias;
        }
        if let Err(why) = self.mask(logits, tokenizer) {
            return Some(Ended::Unsupported(why));
        }
        let token = self.sampler.sample(logits);
        if self.sampler.unusable_steps() > 0 {
            return Some(Ended::Failed("no logit was a number: the model's arithmetic has failed".into()));
        }
        let ends = tokenizer.is_end(token) && !self.job.ignore_eos;
        self.note_time(metrics);
        metrics.held_up_most.raise(std::mem::take(&mut self.held_up));
        self.generated += 1;
        metrics.generated_tokens.add(1);
        let spoken = self.job.spoken.contains(&token);
        let bytes = match spoken {
            true => tokenizer.token_text(token).unwrap_or_default().as_bytes(),
            false => tokenizer.token_bytes(token).unwrap_or_default(),
        };
        let shown = tokenizer.markers().is_none_or(|markers| self.channel.shows(markers, token, bytes));
        if self.channel == Channel::Thought {
            self.think(bytes);
        }
        let mut complete = false;
        if let Some(grammar) = self.job.grammar.as_mut().filter(|_| shown) {
            match grammar.accept(token, bytes) {
                Ok(stopped) => complete = stopped,
                Err(why) => return Some(Ended::Unsupported(why)),
            }
        }
        if ends {
            // A stop string may end with the token's name.
            let delta = tokenizer.say(&mut self.text, token, false);
            self.release(delta.text, delta.stopped);
            return Some(Ended::Done(Reason::Stop));
        }
        self.sampler.accept(token);
        if let Some(top) = self.job.logprobs.filter(|_| shown) {
            self.pending.push((self.bytes, logprobs(&self.raw, token, top)));
        }
        self.bytes += if shown { bytes.len() } else { 0 };
        let delta = if spoken { self.text.push(bytes) } else { tokenizer.say(&mut self.text, token, shown) };
        self.release(delta.text, delta.stopped);
        if delta.stopped || complete {
            return Some(Ended::Done(Reason::Stop));
        }
        if self.generated >= self.job.max_tokens || room == 0 {
            return Some(Ended::Done(Reason::Length));
        }
        self.phase = Phase::Decoding(token);
        None
    }

    /// Leaves the logits of those tokens that the job's grammar allows. Of an answer in channels it is about what a reader sees: what the model
    /// thinks is free, and a marker may come before it.
    ///
    /// # Errors
    /// As [`super::Grammar::mask`].
    fn mask(&mut self, logits: &mut [f32], tokenizer: &Tokenizer) -> Result<(), String> {
        let Some(grammar) = &mut self.job.grammar else { return Ok(()) };
        let Some(Markers { start, channel, .. }) = tokenizer.markers() else { return grammar.mask(logits) };
        if !self.channel.is_read() {
            return Ok(());
        }
        let before = [start, channel].map(|token| (token as usize, logits.get(token as usize).copied()));
        grammar.mask(logits)?;
        if self.channel == Channel::None {
            let kept = before.into_iter().filter_map(|(token, logit)| Some((token, logit?)));
            kept.for_each(|(token, logit)| logits[token] = logit);
        }
        Ok(())
    }

    fn note_time(&mut self, metrics: &Metrics) {
        let now = clock::now();
        match self.first_at {
            None => {
                self.first_at = Some(now);
                metrics.time_to_first_token.observe(now - self.asked_at);
            }
            Some(_) => metrics.inter_token_latency.observe(now - self.last_at),
        }
        self.last_at = now;
    }

    /// Sends text with the log probabilities of the tokens that begin in it.
    fn release(&mut self, text: String, stopped: bool) {
        self.released += text.len();
        // Where bytes are not valid UTF-8, text and bytes have different lengths; the end of the answer settles it. A token behind a stop
        // string is not reported.
        let told = self.pending.iter().take_while(|(at, _)| *at < self.released).count();
        let logprobs: Vec<Logprob> = self.pending.drain(..told).map(|(_, logprob)| logprob).collect();
        if stopped {
            self.pending.clear();
        }
        if !text.is_empty() || !logprobs.is_empty() {
            self.out.send(Event::Delta(Delta { text, logprobs, ..Delta::default() }));
        }
    }

    /// Sends what the model thinks.
    fn think(&mut self, bytes: &[u8]) {
        let thought = self.thought.push(bytes).text;
        if !thought.is_empty() {
            self.out.send(Event::Delta(Delta { thought, ..Delta::default() }));
        }
    }

    /// Ends it without an answer, because its client has gone. Returns its slot.
    pub fn cancel(self) -> usize {
        debug!(parent: &self.span, generated = self.generated, "its client has gone");
        self.slot
    }

    /// Sends the last event. The returned outbox may still hold it, if the client reads slowly.
    pub fn end(mut self, ended: Ended, metrics: &Metrics) -> Outbox {
        match ended {
            Ended::Failed(why) => {
                debug!(parent: &self.span, generated = self.generated, "failed: {why}");
                metrics.failed.add(1);
                self.out.send(Event::Failed(why));
            }
            Ended::Unsupported(why) => {
                debug!(parent: &self.span, generated = self.generated, "cannot be followed: {why}");
                metrics.refused_schema.add(1);
                self.out.send(Event::Unsupported(why));
            }
            Ended::Done(reason) => {
                let rest = self.text.finish();
                self.released = if rest.stopped { self.released } else { usize::MAX - rest.text.len() };
                self.release(rest.text, rest.stopped);
                match reason {
                    Reason::Stop => metrics.finished_stop.add(1),
                    Reason::Length => metrics.finished_length.add(1),
                }
                metrics.request_latency.observe(self.last_at - self.asked_at);
                let first = self.first_at.unwrap_or(self.last_at);
                let done = Done {
                    reason,
                    prompt_tokens: self.job.prompt.len(),
                    cached_tokens: self.cached,
                    generated_tokens: self.generated,
                    queued: self.admitted_at - self.asked_at,
                    prompt_time: first - self.admitted_at,
                    generation_time: self.last_at - first,
                };
                debug!(parent: &self.span, ?reason, generated = done.generated_tokens, took = ?self.last_at - self.asked_at, "answered");
                self.out.send(Event::Done(done));
            }
        }
        self.out
    }
}
