//! One running answer: from logits to a token, from tokens to events.

use super::grammar::Grammar;
use super::job::{Counted, Delta, Done, Event, Job, Logprob, Reason};
use super::lines::Lines;
use super::logprobs::logprobs;
use super::metrics::Metrics;
use super::outbox::Outbox;
use super::prompt_policy::marks;
use super::thoughts::ThoughtBudget;
use crate::clock::{self, Instant};
use crate::engine::sampler::Sampler;
use crate::error::Error;
use crate::tokenizer::channels::{ARGUMENTS, CALL, Channel, Markers, Seen};
use crate::tokenizer::{Special, TextStream, Tokenizer};
use std::path::PathBuf;
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
    /// The file of a saved text from which its prompt will go on: it waits for that to be read.
    pub fetching: Option<PathBuf>,
    /// Counts it among the worker's jobs.
    pub counted: Counted,
}

/// A job that has a slot.
pub struct Sequence {
    /// The job as it was handed in.
    pub job: Job,
    /// Counts it among the worker's jobs.
    _counted: Counted,
    /// The channel to its client.
    pub out: Outbox,
    /// Number of its slot.
    pub slot: usize,
    /// How far it has come.
    pub phase: Phase,
    /// Where its prompt ends messages ([`marks`]).
    pub marks: [Option<usize>; 2],
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
    lines: Lines,
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
        let Waiting { job, out, asked_at, span, counted, .. } = waiting;
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
            marks: marks(&job.prompt, |token| tokenizer.is_end(token)),
            job: *job,
            _counted: counted,
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
            lines: Lines::default(),
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

    /// Tokens that it may still get.
    pub fn left(&self) -> usize {
        self.job.max_tokens - self.generated
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
        if let Some(token) = self.job.thoughts.as_ref().and_then(ThoughtBudget::forced) {
            logits.fill(f32::NEG_INFINITY);
            logits[token as usize] = 0.0;
        }
        let token = self.sampler.sample(logits);
        if self.sampler.unusable_steps() > 0 {
            return Some(Ended::Failed("no logit was a number: the model's arithmetic has failed".into()));
        }
        let ends = (tokenizer.is_end(token) || self.job.ends.contains(&token)) && !self.job.ignore_eos;
        self.note_time(metrics);
        metrics.held_up_most.raise(std::mem::take(&mut self.held_up));
        self.generated += 1;
        metrics.generated_tokens.add(1);
        let spoken = self.job.spoken.contains(&token);
        let bytes = match spoken {
            true => tokenizer.token_text(token).unwrap_or_default().as_bytes(),
            false => tokenizer.token_bytes(token).unwrap_or_default(),
        };
        let seen = tokenizer.markers().map_or(Seen::Bytes, |markers| self.in_channel(markers, token, bytes));
        let shown = seen == Seen::Bytes;
        if let Seen::Call(name) = seen {
            self.begin_call(&name, tokenizer);
        }
        if self.channel == Channel::Thought && !spoken {
            self.think(bytes);
        }
        if let Some(thoughts) = self.job.thoughts.as_mut().filter(|_| shown) {
            thoughts.accept(bytes);
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
            let mut delta = tokenizer.say(&mut self.text, token, false);
            self.end_line(&mut delta.text);
            self.release(delta.text, delta.stopped);
            return Some(Ended::Done(Reason::Stop));
        }
        self.sampler.accept(token);
        if let Some(top) = self.job.logprobs.filter(|_| shown) {
            self.pending.push((self.bytes, logprobs(&self.raw, token, top)));
        }
        self.bytes += if shown { bytes.len() } else { 0 };
        let mut delta =
            if spoken && shown { self.text.push(bytes) } else { tokenizer.say(&mut self.text, token, shown) };
        let is_over = self.end_line(&mut delta.text);
        self.release(delta.text, delta.stopped);
        if delta.stopped || complete {
            return Some(Ended::Done(Reason::Stop));
        }
        if self.generated >= self.job.max_tokens || room == 0 || is_over {
            return Some(Ended::Done(Reason::Length));
        }
        self.phase = Phase::Decoding(token);
        None
    }

    /// What a reader sees of the next token of an answer in channels.
    fn in_channel(&mut self, markers: Markers, token: u32, bytes: &[u8]) -> Seen {
        if self.reads_calls(markers) && self.job.grammar.as_ref().is_some_and(Grammar::begun) {
            // Markers that the grammar asks for belong to the call.
            self.channel = Channel::Call;
        }
        self.channel.take(markers, token, bytes)
    }

    /// Whether the answer is read for calls that stand in channels.
    fn reads_calls(&self, markers: Markers) -> bool {
        self.job.spoken.contains(&markers.message)
    }

    /// Arguments for the function `name` follow. A reader gets the head of their message as templates render it, whatever the model wrote;
    /// for a function that the grammar does not know the message is as any other.
    fn begin_call(&mut self, name: &str, tokenizer: &Tokenizer) {
        if !tokenizer.markers().is_some_and(|markers| self.reads_calls(markers)) {
            return;
        }
        let head = format!("{CALL}{name}{ARGUMENTS}");
        let Ok(tokens) = tokenizer.encode(&head, Special::Parse) else { return };
        let said = |id: u32| {
            let control = self.job.spoken.contains(&id).then(|| tokenizer.token_text(id)).flatten();
            (id, control.map_or_else(|| tokenizer.token_bytes(id).unwrap_or_default(), str::as_bytes))
        };
        let tokens: Vec<(u32, &[u8])> = tokens.into_iter().map(said).collect();
        if let Some(grammar) = self.job.grammar.as_mut()
            && !grammar.accept_all(&tokens)
        {
            self.channel = Channel::Text { shown: grammar.holds() };
            return;
        }
        self.channel = Channel::Call;
        self.bytes += head.len();
        let delta = self.text.push(head.as_bytes());
        self.release(delta.text, false);
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
        if self.channel == Channel::None && !grammar.begun() {
            let kept = before.into_iter().filter_map(|(token, logit)| Some((token, logit?)));
            kept.for_each(|(token, logit)| logits[token] = logit);
        }
        Ok(())
    }

    /// Leaves what a reader gets of the next text; whether one of its lines ends the answer.
    fn end_line(&mut self, text: &mut String) -> bool {
        let took = self.last_at - self.first_at.unwrap_or(self.last_at);
        self.job.lines.is_some_and(|limits| self.lines.take(text, &limits, took))
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
                let mut rest = self.text.finish();
                self.end_line(&mut rest.text);
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
                    stopped_by: self.text.stopped_by(),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::Grammars;
    use crate::generation::outbox::without_worker;
    use crate::model::source::Source;
    use std::path::Path;
    use std::sync::Arc;

    const PROMPT: &str = "<|start|>user<|message|>Rain?<|end|><|start|>assistant";

    fn harmony() -> Tokenizer {
        let path = Path::new("tests/fixtures/models/gpt-oss.mxfp4.gguf");
        Tokenizer::new(Source::open(path, None).unwrap().tokenizer.unwrap(), path).unwrap()
    }

    /// Calls of `weather` with a number of days.
    fn calls(tokenizer: &Tokenizer, required: bool) -> Grammar {
        calls_of(tokenizer, "weather", required)
    }

    fn calls_of(tokenizer: &Tokenizer, name: &str, required: bool) -> Grammar {
        let id = |text: &str| tokenizer.encode(text, Special::Parse).unwrap()[0];
        let days = r#"{"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"], "additionalProperties": false,
            "x-guidance": {"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}}"#;
        let (channel, message) = (id("<|channel|>"), id("<|message|>"));
        // What begins a call is there before the grammar of one that may come.
        let open = if required { CALL } else { "" };
        let lark = format!("start: {open:?} {name:?} <[{channel}]> \"commentary json\" <[{message}]> %json {days}");
        let grammar = Grammars::new(tokenizer, tokenizer.vocab_len()).unwrap().lark(lark).unwrap();
        if required { grammar } else { grammar.after(CALL) }
    }

    /// What a reader gets of an answer by a model that wants to say `script`: text, thoughts, and whether the answer ended.
    fn said(script: &str, grammar: Option<Grammar>) -> (String, String, bool) {
        let tokenizer = harmony();
        let vocab = tokenizer.vocab_len();
        let id = |text: &str| tokenizer.encode(text, Special::Parse).unwrap();
        let spoken = if grammar.is_some() { [id("<|channel|>"), id("<|message|>")].concat() } else { Vec::new() };
        let job = Job { spoken, grammar, ..Job::plain(id(PROMPT), 200) };
        let (out, mut told) = without_worker();
        let counted = Counted::one_more(&Arc::default());
        let waiting =
            Waiting { job: Box::new(job), out, asked_at: clock::now(), span: Span::none(), fetching: None, counted };
        let Ok(mut sequence) = Sequence::new(waiting, (vocab, &tokenizer), 0, 0) else { panic!("a good job") };
        let mut ended = false;
        let metrics = Metrics::default();
        for token in id(script) {
            let mut logits = vec![0.0; vocab];
            logits[token as usize] = 10.0;
            if let Some(end) = sequence.step(&mut logits, 1000, &tokenizer, &metrics) {
                assert!(matches!(end, Ended::Done(Reason::Stop)));
                ended = true;
                break;
            }
        }
        let (mut text, mut thought) = (String::new(), String::new());
        drop(sequence);
        while let Some(event) = told.blocking_recv() {
            let Event::Delta(delta) = event else { panic!("{event:?}") };
            text.push_str(&delta.text);
            thought.push_str(&delta.thought);
        }
        (text, thought, ended)
    }

    /// A call was lost: nothing of a message to a function was shown.
    #[test]
    fn a_call_in_channels_comes_with_the_head_that_templates_render_however_the_model_writes_it() {
        let tokenizer = harmony();
        let thinks = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
        let wanted = |thought: &str| (format!("{CALL}weather{ARGUMENTS}{{\"days\": 3}}"), thought.to_owned(), true);
        for required in [false, true] {
            let calls = || Some(calls(&tokenizer, required));
            for head in [
                "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
                "<|channel|>commentary to=functions.weather<|message|>",
                " to=functions.weather<|channel|>commentary json<|message|>",
            ] {
                assert_eq!(said(&format!("{head}{{\"days\": 3}}<|call|>"), calls()), wanted(""), "{head} {required}");
                let behind = said(&format!("{thinks}{head}{{\"days\": 3}}<|call|>"), calls());
                assert_eq!(behind, wanted("Hm."), "{head} {required}");
            }
        }
        // Without functions, and for an unknown one, the message is hidden.
        let head = "<|channel|>commentary to=functions.weather<|message|>";
        assert_eq!(said(&format!("{head}{{}}<|call|>"), None), (String::new(), String::new(), true));
        let other = format!("{}{{}}<|call|>", head.replace("weather", "clock"));
        assert_eq!(said(&other, Some(calls(&tokenizer, false))), (String::new(), String::new(), true));
        // Of a name that is not whole the rest is forced, whatever comes then.
        let whole = |required| Some(calls_of(&tokenizer, "weather_now", required));
        for required in [false, true] {
            let text = said(
                " to=functions.weather<|channel|>commentary json<|message|>{\"days\": 3}<|call|>",
                whole(required),
            )
            .0;
            assert!(text.starts_with(" to=functions.weather_") && !text.contains("weather<"), "{text:?}");
        }
        // An answer that calls nothing is as ever.
        let text = format!("{thinks}<|channel|>final<|message|>Yes.<|return|>");
        assert_eq!(said(&text, Some(calls(&tokenizer, false))), ("Yes.".to_owned(), "Hm.".to_owned(), true));
    }
}
