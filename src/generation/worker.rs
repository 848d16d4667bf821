//! The thread that owns the engine.
//!
//! Each turn of its loop: receive jobs and commands, drop jobs whose client has gone, give free slots to waiting jobs, run one token of
//! every answer (one pass for up to 32 of them), and do one step of what else is asked for (`turns`): some tokens of one prompt go along in
//! the pass, as many as the time of passes allows, or a question is answered, or some tokens of a text run whose embedding is wanted. So a
//! client that goes away is noticed within a turn, and however many ask for however much, between two tokens of an answer there is one such
//! step at most. Where nothing can go on it waits for whatever comes first; nothing is looked at in intervals.

use super::embedding::{Embedding, Text};
use super::handle::{Command, Handle, Limits, Question};
use super::job::Event;
use super::metrics::Metrics;
use super::outbox::Outbox;
use super::pace::Pace;
use super::prompt_files::{PromptDir, PromptFiles, variant};
use super::queue::Queue;
use super::sequence::{Ended, Phase, Sequence, Waiting};
use super::slots::Slots;
use super::speculation::{Guessed, Guesser, Speculation};
use super::turns::{Turns, Work};
use crate::clock::{self, Instant};
use crate::cpu::MAX_COLUMNS;
use crate::engine::{BatchToken, Engine, Failure, Logits, Session};
use crate::error::{Error, Result};
use crate::model::KvCache;
use crate::tokenizer::Tokenizer;
use crossbeam_channel::{Receiver, TryRecvError, at, bounded, never, select, unbounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;

/// Tokens of a step of an embedding where no answer waits for its end, or where answers must not depend on how long steps take.
const EMBEDDED: usize = 64;

/// Starts the worker's thread.
///
/// # Errors
/// [`Error::Usage`] for limits that are too small or a context beyond the model's; [`Error::Memory`] if there is not enough memory for the
/// KV caches.
pub fn start(engine: Engine, tokenizer: Arc<Tokenizer>, limits: Limits) -> Result<Handle> {
    start_with(engine, tokenizer, limits, None)
}

/// The same with a directory in which texts are kept from one start to the next, where they may be kept at all.
///
/// # Errors
/// Those of [`start`] and [`PromptFiles::open`].
pub fn start_with(
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    limits: Limits,
    prompts: Option<PromptDir>,
) -> Result<Handle> {
    if limits.slots == 0 || limits.queue == 0 || limits.prompt_cache_every == 0 {
        let why = "a worker needs a slot and a place in its queue, and keeps states after 1 token or more";
        return Err(Error::Usage(why.into()));
    }
    if limits.context < 2 {
        let why = "it holds a prompt and its answer, so it takes 2 tokens or more";
        return Err(Error::Usage(format!("a context of {}: {why}", limits.context)));
    }
    let cache = |_| Session::new(&engine, limits.context, limits.kv).map(|session| session.kv);
    let caches = (0..limits.slots).map(cache).collect::<Result<Vec<KvCache>>>()?;
    let prompts = prompts.filter(|_| !limits.deterministic && limits.prompt_cache_bytes > 0);
    let open = |dir| PromptFiles::open(dir, engine.model.fingerprint().to_owned(), variant(&engine, limits.kv));
    let files = prompts.map(open).transpose()?;
    let metrics = Arc::new(Metrics::default());
    metrics.slots.set(limits.slots as u64);
    let waiting = Arc::new(AtomicUsize::new(0));
    let (send, commands) = unbounded();
    let (submitted, jobs_in) = unbounded();
    // One signal says that a client has read; a second would say the same.
    let (read_send, read) = bounded(1);
    let (alive_send, alive) = watch::channel(());
    let failure = Arc::new(OnceLock::new());
    let failed = failure.clone();
    let handle = Handle {
        commands: send,
        submitted,
        read: read_send,
        waiting: waiting.clone(),
        jobs: Arc::new(watch::channel(0).0),
        alive,
        failure: failure.clone(),
        metrics: metrics.clone(),
        limits,
        dimensions: engine.model.config.hidden,
    };
    let mut worker = Worker {
        slots: Slots::new(caches, !limits.deterministic, limits.prompt_cache_bytes),
        files,
        columns: Vec::with_capacity(MAX_COLUMNS),
        pace: Pace::new(limits.slowdown),
        guesser: Guesser::new(speculation(&engine, limits)),
        decoded: clock::now(),
        queue: Queue::default(),
        questions: Queue::default(),
        texts: Queue::default(),
        embedding: None,
        turns: Turns::default(),
        running: Vec::new(),
        leaving: Vec::new(),
        next_prompt: 0,
        commands,
        submitted: jobs_in,
        read,
        ending: false,
        alive: alive_send,
        engine,
        tokenizer,
        limits,
        waiting,
        failure,
        metrics,
    };
    // What there is can be seen before the first job.
    worker.publish();
    let run = move || {
        // Held until the failure is noted, so that what sees the worker end can read why.
        let _alive = worker.alive.clone();
        // Clients see their channel close without a last event, and report that.
        if catch_unwind(AssertUnwindSafe(|| worker.run())).is_err() {
            let _ = failed.set(Failure::Panic);
            tracing::error!("the engine's thread has failed; what it was doing is lost");
        }
    };
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(run)
        .map_err(|e| Error::Failed(format!("cannot start the engine's thread: {e}")))?;
    Ok(handle)
}

/// Not where passes of several tokens may round in another order, where a text cannot be cut back to any token, nor with a device or a part on
/// disk, whose caches would learn from tokens that are no part of the text.
fn speculation(engine: &Engine, limits: Limits) -> Speculation {
    let never =
        limits.deterministic || engine.model.config.recurs() || engine.split.is_some() || engine.cached.is_some();
    if never { Speculation::Off } else { limits.speculation }
}

/// The thread's state.
pub(super) struct Worker {
    pub(super) engine: Engine,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) slots: Slots,
    /// Texts on disk.
    pub(super) files: Option<PromptFiles>,
    pub(super) queue: Queue<Waiting>,
    questions: Queue<Question>,
    /// Texts that wait for their embedding.
    texts: Queue<Text>,
    /// The text that runs.
    embedding: Option<Embedding>,
    turns: Turns,
    pub(super) running: Vec<Sequence>,
    /// Ended answers whose last events their clients have not taken yet.
    pub(super) leaving: Vec<Outbox>,
    pub(super) columns: Vec<BatchToken>,
    pub(super) pace: Pace,
    pub(super) guesser: Guesser,
    /// When the answers under way have got their last tokens.
    decoded: Instant,
    /// Index into `running` from which the next prompt to run is searched, so that prompts take turns.
    pub(super) next_prompt: usize,
    commands: Receiver<Command>,
    /// Jobs that are not in the queue yet. It has no limit: [`Handle::submit`] refuses what is too many.
    submitted: Receiver<Waiting>,
    /// A client has read an event or has gone.
    read: Receiver<()>,
    /// The loop is to end.
    ending: bool,
    /// Held for as long as the thread runs.
    alive: watch::Sender<()>,
    pub(super) limits: Limits,
    waiting: Arc<AtomicUsize>,
    failure: Arc<OnceLock<Failure>>,
    pub(super) metrics: Arc<Metrics>,
}

impl Worker {
    fn run(mut self) {
        loop {
            self.wait();
            // Jobs first: every command that was sent before a job is then carried out before the job begins.
            self.take_jobs();
            if !self.obey() {
                break;
            }
            self.note_files();
            self.let_go();
            self.make_room();
            self.admit();
            let served = self.decode();
            if !self.obey() {
                break;
            }
            self.step(served);
            self.publish();
        }
        self.take_jobs();
        let why = self.failure.get().map_or_else(|| "the server is stopping".into(), Failure::to_string);
        let stopping = || Event::Failed(why.clone());
        for sequence in &mut self.running {
            sequence.out.send(stopping());
        }
        self.queue.drain().for_each(|mut waiting| waiting.out.send(stopping()));
        // A model that has failed may have computed anything.
        if self.failure.get().is_none() {
            self.keep_all();
        }
    }

    /// If no answer can go on, waits until one may: for a command, a job, a client that reads or goes away, or the end of the time for
    /// which an answer that is not read may keep its slot.
    fn wait(&mut self) {
        let goes_on = self.running.iter().any(|s| s.resting.is_none());
        let may_begin = self.queue.has_oldest(|waiting| waiting.fetching.is_none());
        let begins = may_begin && self.slots.busy() < self.limits.slots;
        let asked = !self.questions.is_empty() || !self.texts.is_empty() || self.embedding.is_some();
        if goes_on || begins || asked || self.ending {
            return;
        }
        let late = self.end_of_rest().map_or_else(never, at);
        let done = self.files.as_ref().map_or_else(never, |files| files.done.clone());
        let (command, waiting) = select! {
            recv(self.commands) -> command => (Some(command), None),
            recv(self.submitted) -> waiting => (None, waiting.ok()),
            recv(self.read) -> _ => (None, None),
            recv(late) -> _ => (None, None),
            recv(done) -> done => {
                self.note_file(done.ok());
                (None, None)
            }
        };
        if let Some(waiting) = waiting {
            self.enqueue(waiting);
        }
        if let Some(command) = command {
            // Without a handle nothing can be asked for any more.
            self.receive(command.unwrap_or(Command::Stop));
        }
    }

    /// When the first answer that is not read has to give way to a job that waits; `None` if none has to.
    fn end_of_rest(&self) -> Option<Instant> {
        let rests = self.running.iter().filter_map(|s| s.resting?.checked_add(self.limits.rest));
        rests.min().filter(|_| !self.queue.is_empty())
    }

    /// Receives the commands that have come, in their order: questions and texts wait for their turn, the others are carried out. False: the
    /// worker is to end.
    fn obey(&mut self) -> bool {
        while !self.ending {
            match self.commands.try_recv() {
                Ok(command) => self.receive(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => self.ending = true,
            }
        }
        false
    }

    fn receive(&mut self, command: Command) {
        match command {
            Command::Ask(question) => self.questions.push(question.client, question),
            Command::Embed(text) => self.texts.push(text.client, text),
            // The asker may have gone.
            Command::Beat(answer) => drop(answer.send(())),
            Command::Forget => self.forget(),
            Command::Stop => self.ending = true,
            Command::Fail(why) => self.fail(why),
        }
    }

    fn fail(&mut self, why: Failure) {
        let _ = self.failure.set(why);
        self.ending = true;
    }

    fn take_jobs(&mut self) {
        while let Ok(waiting) = self.submitted.try_recv() {
            self.enqueue(waiting);
        }
    }

    fn enqueue(&mut self, mut waiting: Waiting) {
        waiting.fetching = self.fetch(&waiting.job);
        self.queue.push(waiting.job.client, waiting);
    }

    /// Drops what clients that have gone wanted, and notes whose clients read slowly.
    fn let_go(&mut self) {
        let purged = self.queue.purge(|waiting| waiting.out.is_closed());
        self.waiting.fetch_sub(purged, Ordering::SeqCst);
        self.metrics.disconnects.add(purged as u64);
        self.questions.purge(Question::is_gone);
        self.texts.purge(|text| text.out.is_closed());
        self.embedding.take_if(|embedding| embedding.text.out.is_closed());
        self.leaving.retain_mut(|out| !out.flush());
        let mut at = 0;
        while at < self.running.len() {
            if self.running[at].out.is_closed() {
                let sequence = self.running.swap_remove(at);
                self.slots.give_back(sequence.cancel());
                self.metrics.disconnects.add(1);
                continue;
            }
            let sequence = &mut self.running[at];
            sequence.resting =
                if sequence.out.flush() { None } else { sequence.resting.or_else(|| Some(clock::now())) };
            at += 1;
        }
    }

    /// If more jobs wait than slots are free, ends answers whose clients have not read for too long, longest first. Such an answer is not
    /// continued later: its keys would be gone, or computed again in another way, and its text would then depend on other clients.
    fn make_room(&mut self) {
        let free = self.limits.slots - self.slots.busy();
        for _ in free..self.queue.len() {
            let rests = self.running.iter().enumerate().filter_map(|(at, s)| Some((s.resting?, at)));
            let Some((_, at)) = rests.min().filter(|(since, _)| since.elapsed() >= self.limits.rest) else { return };
            let sequence = self.running.swap_remove(at);
            self.slots.give_back(sequence.slot);
            let why = format!(
                "this answer was not read for {:?} while others waited for its place; ask again, and read faster \
                 (serve.rest_seconds)",
                self.limits.rest
            );
            leave(sequence, Ended::Failed(why), &mut self.leaving, &self.metrics);
        }
    }

    /// Gives free slots to waiting jobs; one to one job where answers are being made, because keys and values may be copied for it. A job
    /// waits for what its own client has asked before it, and for nothing that came later: a client that never stops asking would keep its own
    /// answers from beginning.
    fn admit(&mut self) {
        let mut most = if self.decoding() > 0 { 1 } else { usize::MAX };
        while most > 0
            && self.slots.busy() < self.limits.slots
            && let Some(waiting) = self.queue.pop_of(|client, waiting| {
                let after = |question: &Question| question.asked_at > waiting.asked_at;
                waiting.fetching.is_none() && self.questions.oldest(client).is_none_or(after)
            })
        {
            most -= 1;
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            let Some((slot, reused)) = self.slots.take(&waiting.job.prompt, waiting.job.owner) else {
                unreachable!("a slot is free")
            };
            self.metrics.queue_time.observe(waiting.asked_at.elapsed());
            self.metrics.cached_tokens.add(reused as u64);
            let vocab = self.engine.model.config.vocab;
            match Sequence::new(waiting, (vocab, &self.tokenizer), slot, reused) {
                Ok(sequence) => self.running.push(sequence),
                Err((error, mut out)) => {
                    self.slots.give_back(slot);
                    self.metrics.failed.add(1);
                    out.send(Event::Failed(error.to_string()));
                }
            }
        }
    }

    /// Answers that get their next tokens in this turn.
    pub(super) fn decoding(&self) -> usize {
        self.running.iter().filter(|s| s.goes_on()).count()
    }

    /// Answers that a pass takes.
    fn at_once(&self) -> usize {
        if self.limits.deterministic { 1 } else { MAX_COLUMNS }
    }

    /// Runs one token of every answer that is being generated, and with the last of them some of a prompt if it is a prompt's turn. Whether
    /// prompts are served with that: they go along, or the answers are to be timed alone.
    fn decode(&mut self) -> bool {
        let at_once = self.at_once();
        let all = self.decoding();
        // Sequences that end are removed from `running`; each is looked at once.
        let mut todo = self.running.len();
        let mut served = false;
        while todo > 0 {
            self.columns.clear();
            let first = todo;
            while todo > 0 && self.columns.len() < at_once {
                todo -= 1;
                let sequence = &self.running[todo];
                if let (Phase::Decoding(token), true) = (sequence.phase, sequence.goes_on()) {
                    self.columns.push(BatchToken { sequence: sequence.slot, token });
                }
            }
            if self.columns.is_empty() {
                break;
            }
            let answers = self.columns.len();
            let is_last = !self.running[..todo].iter().any(Sequence::goes_on);
            let may = is_last && !self.limits.deterministic && self.turn() == Some(Work::Prompt);
            let along = may.then(|| self.take_along()).flatten();
            let guessed = if all == 1 && answers == 1 { self.add_guesses() } else { Guessed::default() };
            served = is_last && !self.limits.deterministic && answers < MAX_COLUMNS;
            let vocab = self.engine.model.config.vocab;
            let want = if guessed.count > 0 { Logits::All } else { Logits::Last };
            let began = clock::now();
            self.engine.forward_batch(&mut self.slots.caches, &self.columns, want);
            let seconds = began.elapsed().as_secs_f64();
            if guessed.count == 0 {
                self.pace.note(self.columns.len(), seconds, self.has_texts());
            }
            if let Some(why) = self.engine.failure() {
                let columns = std::mem::take(&mut self.columns);
                self.give_up(why, |slot| columns.iter().any(|column| column.sequence == slot));
                return served;
            }
            self.metrics.decode_passes.add(1);
            if along.is_some() {
                self.metrics.prompts_along.add(1);
                // Those whose tokens came in an earlier pass have waited for it; the others get theirs now.
                self.held_up_by(Work::Prompt);
            }
            for column in &self.columns {
                self.slots.ran(column.sequence, &[column.token]);
            }
            // From the back, as above, so that removing a sequence moves only ones that were looked at.
            let tokens = self.deal((todo..first).rev(), guessed.count);
            if guessed.count > 0 || self.columns.len() == 1 {
                self.guesser.note(guessed, tokens, seconds);
            }
            if let Some((slot, end)) = along {
                let at = self.running.iter().position(|s| s.slot == slot).expect("a prompt does not end by itself");
                self.prompt_ran(at, end, answers * vocab..(answers + 1) * vocab);
            }
            if is_last {
                let cycle = std::mem::replace(&mut self.decoded, clock::now()).elapsed().as_secs_f64();
                if let Some(alone) = self.pace.alone(all, at_once) {
                    self.pace.allow(alone, cycle);
                }
            }
            if is_last || !self.obey() {
                break;
            }
            // A question need not wait for the passes of all answers.
            if self.turn() == Some(Work::Question) {
                self.answer_question();
            }
        }
        served
    }

    /// The kind of work whose turn it is, if there is any and every answer has had a token since the last step of such work.
    fn turn(&self) -> Option<Work> {
        if self.running.iter().any(|s| s.goes_on() && s.held_up > 0) {
            return None;
        }
        self.turns.next(|work| match work {
            Work::Question => !self.questions.is_empty(),
            Work::Text => self.has_texts() && self.text_step().is_some(),
            Work::Prompt => self.running.iter().any(is_prompt),
        })
    }

    /// Notes a step of work for which all answers under way have waited.
    pub(super) fn held_up_by(&mut self, work: Work) {
        self.turns.done(work);
        self.running.iter_mut().filter(|s| s.goes_on()).for_each(|s| s.held_up += 1);
    }

    /// Does a step of what else is asked for; `served`: prompts go along with answers.
    fn step(&mut self, served: bool) {
        match self.turn() {
            None => {}
            // While no answer waits, every client's next question is answered: a prompt's chunk may take long.
            Some(Work::Question) if self.decoding() == 0 => {
                (0..self.questions.clients()).for_each(|_| self.answer_question());
            }
            Some(Work::Question) => self.answer_question(),
            Some(Work::Text) => self.embed(),
            Some(Work::Prompt) if served => {}
            Some(Work::Prompt) => self.prefill(),
        }
    }

    fn answer_question(&mut self) {
        let Some(question) = self.questions.pop().filter(|question| !question.is_gone()) else { return };
        self.held_up_by(Work::Question);
        let answer = (question.run)(&mut self.engine);
        self.metrics.questions.add(1);
        // Once the answer is there, what it did is in the metrics.
        self.publish();
        answer();
    }

    /// Whether texts are or wait to be embedded.
    pub(super) fn has_texts(&self) -> bool {
        self.embedding.is_some() || !self.texts.is_empty()
    }

    /// Tokens that the next step of an embedding takes, and the seconds that the next tokens of the answers under way take without it;
    /// `None` while earlier steps have taken too much of their time, or that time is not known.
    fn text_step(&self) -> Option<(usize, f64)> {
        let answers = self.decoding();
        if answers == 0 {
            return Some((EMBEDDED, 0.0));
        }
        let alone = self.pace.alone(answers, self.at_once()).filter(|_| self.pace.may_step())?;
        let tokens = if self.limits.deterministic { EMBEDDED } else { self.pace.step(alone) };
        Some((tokens, alone))
    }

    /// Runs the next step of a text whose embedding is wanted, one text to its end after another.
    fn embed(&mut self) {
        let Some((most, alone)) = self.text_step() else { return };
        self.held_up_by(Work::Text);
        let began = clock::now();
        if self.embedding.is_none() {
            self.embedding = self.texts.pop().and_then(|text| Embedding::begin(&self.engine, text, self.limits.kv));
        }
        let Some(mut embedding) = self.embedding.take() else { return };
        let (tokens, vector) = embedding.step(&mut self.engine, most);
        self.metrics.embedding_passes.add(1);
        self.metrics.embedding_tokens.add(tokens as u64);
        if alone > 0.0 {
            self.pace.note_step(tokens, began.elapsed().as_secs_f64());
        } else {
            self.pace.forgive();
        }
        match (self.engine.failure(), vector) {
            (Some(why), _) => {
                // Its client may have gone, here and below.
                let _ = embedding.text.out.send(Err(Error::Failed(why.to_string())));
                if !matches!(why, Failure::Pass(_)) {
                    self.fail(why);
                }
            }
            (None, Some(vector)) => drop(embedding.text.out.send(Ok(vector))),
            (None, None) => self.embedding = Some(embedding),
        }
    }

    /// The last pass cannot be used: nothing of it is sent. What it has lost, by slot, ends and its clients are told why; where no other pass
    /// can be better, the loop ends with all.
    pub(super) fn give_up(&mut self, why: Failure, lost: impl Fn(usize) -> bool) {
        let Failure::Pass(why) = why else { return self.fail(why) };
        tracing::error!("{why}");
        for at in (0..self.running.len()).rev().filter(|&at| lost(self.running[at].slot)).collect::<Vec<_>>() {
            let sequence = self.running.swap_remove(at);
            self.slots.lose(sequence.slot);
            leave(sequence, Ended::Failed(why.clone()), &mut self.leaving, &self.metrics);
        }
    }

    /// Updates the metrics.
    fn publish(&mut self) {
        self.metrics.running.set(self.running.len() as u64);
        self.metrics.waiting.set(self.queue.len() as u64);
        self.metrics.take(&mut self.engine);
        self.metrics.prompts.take(self.slots.prompts.counts());
        self.metrics.prompts.take_files(self.files.as_ref());
    }
}

pub(super) fn is_prompt(sequence: &Sequence) -> bool {
    matches!(sequence.phase, Phase::Prompt(_))
}

/// Sends the last event of a sequence, or keeps it until its client has caught up.
pub(super) fn leave(sequence: Sequence, ended: Ended, leaving: &mut Vec<Outbox>, metrics: &Metrics) {
    let mut out = sequence.end(ended, metrics);
    if !out.flush() {
        leaving.push(out);
    }
}
