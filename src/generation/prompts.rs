//! The worker's steps over prompts: which goes next, how far a pass takes it, what its end begins, and what is kept of it on disk.

use super::job::Job;
use super::prompt_files::{Done, PromptFiles, variant};
use super::prompt_policy::{is_kept, next_end};
use super::sequence::{Phase, Sequence, Waiting};
use super::turns::Work;
use super::worker::{Worker, is_prompt, leave};
use crate::clock;
use crate::cpu::MAX_COLUMNS;
use crate::engine::session::CHUNK;
use crate::engine::{BatchToken, Logits};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

impl Worker {
    /// Has the text read from disk from which a job can go on furthest, if that is further than from what is in memory. The job waits for it.
    pub(super) fn fetch(&mut self, job: &Job) -> Option<PathBuf> {
        let files = self.files.as_mut()?;
        let prompt = &job.prompt[..job.prompt.len() - 1];
        files.fetch(prompt, job.owner, self.slots.known(prompt, job.owner), self.limits.prompt_cache_bytes)
    }

    /// Notes what was read and written meanwhile, and has a text written that lost its slot, one at a time.
    pub(super) fn note_files(&mut self) {
        while let Some(done) = self.files.as_ref().and_then(PromptFiles::try_done) {
            self.note_file(done);
        }
        if let Some(files) = self.files.as_mut().filter(|files| files.is_idle())
            && let Some((owner, tokens, saved)) = self.slots.prompts.take_unwritten()
        {
            files.keep(owner, tokens, saved);
        }
    }

    /// Notes what was read or written; `None`: nothing will be any more.
    pub(super) fn note_file(&mut self, done: Option<Done>) {
        let (Some(files), Some(done)) = (&mut self.files, done) else {
            self.files = None;
            return self.queue.entries_mut().for_each(|waiting| waiting.fetching = None);
        };
        let Some((path, read)) = files.note(done) else { return };
        // What the engine computes may have changed, or another job have had the same text read.
        if let Some((of, saved)) = read.filter(|(of, _)| files.is_current(of))
            && self.slots.known(&of.tokens, of.key.owner) < of.tokens.len()
        {
            self.slots.prompts.insert_read(of.key.owner, of.tokens, saved);
        }
        let waits = |waiting: &&mut Waiting| waiting.fetching.as_ref() == Some(&path);
        self.queue.entries_mut().filter(waits).for_each(|waiting| waiting.fetching = None);
    }

    /// Has all texts written that can be gone on from, and waits for that.
    pub(super) fn keep_all(&mut self) {
        let Some(mut files) = self.files.take() else { return };
        files.wait();
        while let Some((owner, tokens, saved)) = self.slots.prompts.take_unwritten() {
            files.keep(owner, tokens, saved);
            files.wait();
        }
        // What is copied now takes the place of what was kept in memory.
        self.slots.prompts.clear();
        for (owner, tokens, cache) in self.slots.idle() {
            let states = cache.states();
            if files.wants(owner, tokens, cache.saved_bytes(states))
                && let Some(saved) = cache.save(states)
            {
                files.keep(owner, tokens, Arc::new(saved));
                files.wait();
            }
        }
    }

    /// Nothing that was computed so far is used for later prompts.
    pub(super) fn forget(&mut self) {
        self.slots.forget();
        if let Some(files) = &mut self.files {
            files.set_variant(variant(&self.engine, self.limits.kv));
        }
    }

    /// Adds tokens of a prompt to the pass, as many as its time allows. Returns the prompt's slot and how far it comes.
    pub(super) fn take_along(&mut self) -> Option<(usize, usize)> {
        let along = self.pace.along(self.columns.len());
        let at = if along > 0 { self.next_prompt()? } else { return None };
        let sequence = &self.running[at];
        let Phase::Prompt(done) = sequence.phase else { return None };
        let end = self.next_end(sequence, done, along);
        let slot = sequence.slot;
        self.columns.extend(sequence.job.prompt[done..end].iter().map(|&token| BatchToken { sequence: slot, token }));
        Some((slot, end))
    }

    /// Whether passes over prompts end where states are kept: a model without states can go on from everywhere, and without reuse nothing does.
    fn cuts(&self) -> bool {
        self.engine.model.config.recurs() && !self.limits.deterministic
    }

    /// Where a pass of at most `most` tokens over a prompt ends that begins at `done`.
    fn next_end(&self, sequence: &Sequence, done: usize, most: usize) -> usize {
        let len = sequence.job.prompt.len();
        match self.cuts() {
            true => next_end(done, most, len, sequence.marks, self.limits.prompt_cache_every),
            false => len.min(done + most),
        }
    }

    /// The prompt whose turn it is, by index into `running`.
    fn next_prompt(&mut self) -> Option<usize> {
        let n = self.running.len();
        let at = (0..n).map(|i| (self.next_prompt + i) % n).find(|&at| is_prompt(&self.running[at]))?;
        self.next_prompt = at + 1;
        Some(at)
    }

    /// Runs one chunk of one prompt; prompts take turns. Where answers fill their passes it is a short one.
    pub(super) fn prefill(&mut self) {
        let Some(at) = self.next_prompt() else { return };
        self.held_up_by(Work::Prompt);
        let company = self.decoding() > 0 && !self.limits.deterministic;
        let sequence = &self.running[at];
        let Phase::Prompt(done) = sequence.phase else { return };
        let prompt = &sequence.job.prompt;
        let chunk = if self.limits.deterministic { CHUNK } else { self.pace.chunk(self.engine.chunk()) };
        let end = self.next_end(sequence, done, if company { MAX_COLUMNS } else { chunk });
        let want = if end == prompt.len() { Logits::Last } else { Logits::None };
        let (cache, out, began) = (&mut self.slots.caches[sequence.slot], &sequence.out, clock::now());
        if end - done <= MAX_COLUMNS {
            self.engine.forward(cache, &prompt[done..end], want);
        } else if !self.engine.forward_while(cache, &prompt[done..end], want, &mut || !out.is_closed()) {
            // Its client has gone.
            return;
        }
        if let Some(why) = self.engine.failure() {
            let slot = self.running[at].slot;
            return self.give_up(why, |lost| lost == slot);
        }
        self.pace.note_chunk(end - done, began.elapsed().as_secs_f64());
        let sequence = &self.running[at];
        self.slots.ran(sequence.slot, &sequence.job.prompt[done..end]);
        self.metrics.prompt_passes.add(1);
        self.prompt_ran(at, end, 0..self.engine.model.config.vocab);
    }

    /// Notes that the prompt of a sequence has run up to `end`; with its last token, whose logits stand at `logits`, its answer begins.
    pub(super) fn prompt_ran(&mut self, at: usize, end: usize, logits: Range<usize>) {
        let sequence = &mut self.running[at];
        let Phase::Prompt(done) = sequence.phase else { return };
        let prompt = &sequence.job.prompt;
        self.metrics.prompt_tokens.add((end - done) as u64);
        sequence.phase = Phase::Prompt(end);
        let (slot, len, marks) = (sequence.slot, prompt.len(), sequence.marks);
        if self.cuts() && is_kept(end, len, marks, self.limits.prompt_cache_every) {
            self.slots.checkpoint(slot);
        }
        if end < len {
            return;
        }
        let sequence = &mut self.running[at];
        let room = self.limits.context - self.slots.caches[sequence.slot].len;
        let logits = &mut self.engine.logits()[logits];
        if let Some(ended) = sequence.step(logits, room, &self.tokenizer, &self.metrics) {
            let sequence = self.running.swap_remove(at);
            self.slots.give_back(sequence.slot);
            leave(sequence, ended, &mut self.leaving, &self.metrics);
        }
        // The next token will keep every core busy: the thread that sends this one on should run first.
        std::thread::yield_now();
    }
}
