//! The thread that owns the engine, as its clients meet it: when commands are carried out, and what wakes it.

use crate::support::{RATES, on_device, packed};
use dynamicinfer::background::{Background, BackgroundOptions, Latency};
use dynamicinfer::clock::{self, Duration};
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::disk::{Faults, VirtualDisk};
use dynamicinfer::engine::{Choice, Engine, Sparsity};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::generation::outbox::EVENTS;
use dynamicinfer::generation::{Event, Events, Handle, Job, Limits, Speculation, start};
use dynamicinfer::host_cache::{HostCache, HostCacheOptions, least_bytes};
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::open::layer_blocks;
use dynamicinfer::predictor::{Calibration, Kind, Predictor, Tools};
use dynamicinfer::scheduler::Policy;
use dynamicinfer::scheduler::thresholds::LossWeight;
use dynamicinfer::tokenizer::Tokenizer;
use std::future::Future;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Waker};

/// Longer than any step of a test on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// A worker on a tiny model; `of` changes the engine before.
fn worker(dir: &Path, slots: usize, context: usize, deterministic: bool, of: impl FnOnce(&mut Engine)) -> Handle {
    let store = packed(dir, "relullama", Quant::F32);
    let model = Model::open(&store).unwrap();
    let tokenizer = Arc::new(Tokenizer::new(model.tokenizer().unwrap(), &store).unwrap());
    let mut engine = Engine::new(model, 1, Kernels::best());
    of(&mut engine);
    let limits = Limits {
        queue: 64,
        slots,
        context,
        kv: KvType::F16,
        deterministic,
        rest: Duration::MAX,
        slowdown: 2.0,
        prompt_cache_bytes: 1 << 20,
        prompt_cache_every: 8192,
        speculation: Speculation::Off,
    };
    start(engine, tokenizer, limits).unwrap()
}

/// An answer of so many tokens, each with an event of its own.
fn job(client: u64, max_tokens: usize) -> Job {
    Job { client, ignore_eos: true, logprobs: Some(0), ..Job::plain(vec![1, 2, 3], max_tokens) }
}

/// Sends a client's command, and does not wait for its answer.
fn send(handle: &Handle, client: u64, command: impl FnOnce(&mut Engine) + Send + 'static) {
    let handle = handle.clone();
    let mut asked = Box::pin(async move { handle.ask(client, command).await });
    assert!(asked.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    // Its asker never goes.
    std::mem::forget(asked);
}

/// The result of a future that another thread completes.
fn within_patience<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await }).expect("it comes in time")
}

fn ask<T: Send + 'static>(handle: &Handle, question: impl FnOnce(&mut Engine) -> T + Send + 'static) -> T {
    within_patience(handle.ask(1, question)).unwrap()
}

/// The tokens of a whole answer.
fn read(events: &mut Events) -> usize {
    within_patience(async {
        loop {
            match events.recv().await {
                Some(Event::Delta(_)) => {}
                Some(Event::Done(done)) => return done.generated_tokens,
                other => panic!("{other:?}"),
            }
        }
    })
}

fn passes(handle: &Handle) -> u64 {
    handle.metrics.prompt_passes.get() + handle.metrics.decode_passes.get()
}

/// How often this thread of the process has gone to sleep by itself.
fn sleeps(thread: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}

/// Waits until the worker, on this thread, has made `tokens` tokens and does not wake any more, not even to look whether it should.
fn until_it_stands_still(handle: &Handle, thread: i32, tokens: u64) {
    let lock = parking_lot::Mutex::new(());
    let began = clock::now();
    while began.elapsed() < PATIENCE {
        let seen = || (handle.metrics.generated_tokens.get(), sleeps(thread));
        let before = seen();
        parking_lot::Condvar::new().wait_for(&mut lock.lock(), Duration::from_millis(50));
        if before.0 >= tokens && before == seen() {
            return;
        }
    }
    panic!("the worker wakes although nothing has come");
}

fn thread_of(handle: &Handle) -> i32 {
    ask(handle, |_| rustix::thread::gettid().as_raw_nonzero().get())
}

/// It used to look every 2 ms whether the client had read on.
#[test]
fn a_worker_whose_client_does_not_read_stands_still_and_goes_on_when_it_does() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(dir.path(), 1, 4096, false, |_| {});
    let thread = thread_of(&handle);
    until_it_stands_still(&handle, thread, 0);
    let tokens = 2 * EVENTS;
    let mut events = handle.submit(job(1, tokens)).unwrap();
    until_it_stands_still(&handle, thread, EVENTS as u64);
    assert!(handle.metrics.generated_tokens.get() < tokens as u64, "it ran ahead of its client");
    // A command is answered all the same.
    ask(&handle, |_| ());
    until_it_stands_still(&handle, thread, EVENTS as u64);
    assert_eq!(read(&mut events), tokens);
    within_patience(handle.idle());
}

#[test]
fn a_job_that_is_cancelled_ends_though_nothing_else_happens() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(dir.path(), 1, 4096, false, |_| {});
    let thread = thread_of(&handle);
    let unread = handle.submit(job(1, 3 * EVENTS)).unwrap();
    until_it_stands_still(&handle, thread, EVENTS as u64);
    let waits = handle.submit(job(2, 5)).unwrap();
    let mut next = handle.submit(job(3, 5)).unwrap();
    until_it_stands_still(&handle, thread, 0);
    assert_eq!((handle.jobs(), handle.metrics.waiting.get()), (3, 2));
    drop(waits);
    until_it_stands_still(&handle, thread, 0);
    assert_eq!((handle.jobs(), handle.metrics.disconnects.get()), (2, 1));
    drop(unread);
    assert_eq!(read(&mut next), 5);
    within_patience(handle.idle());
    assert_eq!(handle.metrics.disconnects.get(), 2);
}

/// Nobody waits for the rest of a prompt whose client has gone: the chunk at hand is its last.
#[test]
fn a_client_that_leaves_in_the_middle_of_its_prompt_ends_it_there() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(dir.path(), 1, 8192, false, |_| {});
    let tokens = 8000;
    let long = Job { prompt: (0..tokens as u32).map(|i| 3 + i * 7 % 50).collect(), ..job(1, 5) };
    let mut client = Some(handle.submit(long).unwrap());
    while let Some(events) = client.take() {
        // A command runs between two chunks, on the engine's thread.
        let metrics = handle.clone();
        client = ask(&handle, move |_| (metrics.metrics.prompt_tokens.get() == 0).then_some(events));
    }
    assert_eq!(read(&mut handle.submit(job(2, 5)).unwrap()), 5);
    within_patience(handle.idle());
    let ran = handle.metrics.prompt_tokens.get();
    assert!((256..tokens).contains(&ran), "{ran} tokens of a prompt");
    assert_eq!(handle.metrics.disconnects.get(), 1);
}

/// Calls something on the engine's thread in the middle of every pass.
struct Amid(Calibration, Box<dyn Fn() + Send + Sync>);

impl Predictor for Amid {
    fn kind(&self) -> Kind {
        Kind::Mlp
    }

    fn threshold(&self, _: usize, _: usize) -> f32 {
        0.5
    }

    fn calibration(&self, _: usize, ahead: usize) -> Option<&Calibration> {
        (ahead == 0).then_some(&self.0)
    }

    fn score(&self, _: &mut Tools<'_>, layer: usize, _: usize, _: &[f32], _: usize, scores: &mut [f32]) {
        scores.fill(1.0);
        if layer == 0 {
            self.1();
        }
    }

    fn weight_bytes(&self, _: usize, _: usize) -> u64 {
        0
    }
}

/// Between two tokens of an answer ran those of all others, each a pass of its own where answers must not depend on each other.
#[test]
fn a_question_is_answered_after_the_current_pass() {
    let dir = tempfile::tempdir().unwrap();
    let (known, done) = (Arc::new(OnceLock::<Handle>::new()), Arc::new(Mutex::new(Vec::new())));
    let (handle, seen) = (known.clone(), done.clone());
    let now_and_then = |pass: u64| pass > 10 && pass % 7 == 1;
    let questions = move || {
        let Some(handle) = handle.get() else { return };
        let (sent, then, seen) = (passes(handle), handle.clone(), seen.clone());
        if now_and_then(sent) {
            send(handle, 1, move |_| seen.lock().unwrap().push((sent, passes(&then))));
        }
    };
    let handle = worker(dir.path(), 3, 64, true, |engine| {
        let amid: Arc<dyn Predictor> =
            Arc::new(Amid(Calibration::new(vec![-1.0, 1.0], vec![0.1, 0.9]), Box::new(questions)));
        let predicted = Choice::Predicted { predictor: amid, threshold: 0.5, activation_threshold: 0.0 };
        engine.set_sparsity(Sparsity::new(vec![predicted; engine.model.config.layers().len()], 0).unwrap());
    });
    assert!(known.set(handle.clone()).is_ok());
    let mut answers: Vec<Events> = (0..3).map(|client| handle.submit(job(client, 20)).unwrap()).collect();
    for events in &mut answers {
        assert_eq!(read(events), 20);
    }
    within_patience(handle.idle());
    // The last pass's question may still wait: it comes before this one.
    ask(&handle, |_| ());
    // Each of the three prompts is a pass, and each token but its first.
    let expected: Vec<(u64, u64)> = (0..3 * 20).filter(|&n| now_and_then(n)).map(|n| (n, n + 1)).collect();
    assert_eq!(*done.lock().unwrap(), expected);
    handle.stop();
}

/// What the worker had done when a question was answered.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Tokens of answers but their first.
    tokens: u64,
    /// Parts of prompts and of texts to embed.
    steps: u64,
    embedded: u64,
    prompted: u64,
}

fn seen(handle: &Handle) -> Seen {
    let m = &handle.metrics;
    let prompted = m.prompts_along.get() + m.prompt_passes.get();
    let embedded = m.embedding_passes.get();
    Seen { tokens: m.decode_columns.get(), steps: prompted + embedded, embedded, prompted }
}

/// One client that asked for embeddings made answers 35 times as slow: two steps of 64 tokens ran between two tokens, and of questions as many as
/// had come.
#[test]
fn whatever_is_asked_an_answer_waits_for_one_step_of_it_between_two_tokens() {
    // More than the turns until the last answer has begun, by which the first is ahead.
    const AHEAD: usize = 300;
    const TOKENS: usize = 3 * AHEAD;
    for (answers, deterministic) in [(1, false), (3, false), (40, false), (1, true), (3, true)] {
        let dir = tempfile::tempdir().unwrap();
        let handle = worker(dir.path(), answers + 2, 1024, deterministic, |_| {});
        let (release, held) = channel::<()>();
        send(&handle, 1, move |_| held.recv_timeout(PATIENCE).unwrap());
        let mut all: Vec<Events> = (0..answers).map(|i| handle.submit(job(i as u64, TOKENS)).unwrap()).collect();
        // Two clients' prompts, eight clients' texts and eight clients' questions, more of each than an answer has tokens for.
        let long =
            |client| Job { prompt: (0..1000).map(|i| 3 + (i * 7 + client as u32) % 50).collect(), ..job(client, 1) };
        let prompts: Vec<Events> = (100..102).map(|client| handle.submit(long(client)).unwrap()).collect();
        let mut texts: Vec<_> = (0..24).map(|i| Box::pin(handle.embed(200 + i % 8, vec![5; 1000]))).collect();
        for text in &mut texts {
            assert!(text.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        let log = Arc::new(Mutex::new(Vec::new()));
        for i in 0..2000 {
            let (then, log) = (handle.clone(), log.clone());
            let note = move |_: &mut Engine| log.lock().unwrap().push(seen(&then));
            send(&handle, 300 + i % 8, note);
        }
        release.send(()).unwrap();
        for events in &mut all {
            assert_eq!(read(events), TOKENS);
        }
        let log = log.lock().unwrap().clone();
        // From when all answers are under way until the first may end.
        let n = answers as u64;
        let all_go_on = |seen: &&Seen| (AHEAD as u64 * n..(TOKENS - AHEAD) as u64 * n).contains(&seen.tokens);
        let log: Vec<Seen> = log.iter().filter(all_go_on).copied().collect();
        for pair in log.windows(2) {
            let (tokens, steps) = (pair[1].tokens - pair[0].tokens, pair[1].steps - pair[0].steps + 1);
            assert!(n * steps <= tokens, "{answers} answers got {tokens} tokens beside {steps} steps: {pair:?}");
        }
        // Nothing that was asked stands still.
        let last = log[log.len() - 1];
        assert!(log.len() > 20 && last.embedded > 0 && last.prompted > 0, "{} questions, {last:?}", log.len());
        assert_eq!(handle.metrics.held_up_most.get(), 1);
        drop((prompts, texts));
        handle.stop();
    }
}

/// Questions of clients that come and go at once would fill the memory, and keep those clients' answers from beginning.
#[test]
fn a_question_goes_with_its_asker() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(dir.path(), 1, 64, false, |_| {});
    let (release, held) = channel::<()>();
    send(&handle, 1, move |_| held.recv_timeout(PATIENCE).unwrap());
    let run = Arc::new(Mutex::new(Vec::new()));
    for client in [2, 0] {
        let run = run.clone();
        let mut gone = Box::pin(handle.ask(client, move |_| run.lock().unwrap().push(client)));
        assert!(gone.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    release.send(()).unwrap();
    ask(&handle, |_| ());
    within_patience(handle.ask(0, |_| ())).unwrap();
    assert_eq!(*run.lock().unwrap(), [0], "this program's own question runs all the same");
    handle.stop();
}

#[test]
fn an_embedding_is_the_same_beside_answers_as_alone_and_ends_with_its_client() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(dir.path(), 2, 1024, false, |_| {});
    let text: Vec<u32> = (0..100).map(|i| 3 + i * 7 % 50).collect();
    let alone = within_patience(handle.embed(1, text.clone())).unwrap().unwrap();
    assert_eq!(alone.len(), handle.dimensions);
    assert!((alone.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5);
    let before = handle.metrics.embedding_tokens.get();
    let (release, held) = channel::<()>();
    send(&handle, 1, move |_| held.recv_timeout(PATIENCE).unwrap());
    let mut events = handle.submit(job(1, 1000)).unwrap();
    // Its client goes before it begins.
    let mut gone = Box::pin(handle.embed(2, vec![5; 1000]));
    assert!(gone.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(gone);
    release.send(()).unwrap();
    let beside = within_patience(handle.embed(3, text.clone())).unwrap().unwrap();
    assert!(alone.iter().zip(&beside).all(|(a, b)| (a - b).abs() < 1e-5), "{alone:?} {beside:?}");
    assert_eq!(handle.metrics.embedding_tokens.get() - before, text.len() as u64);
    assert_eq!(read(&mut events), 1000);
    handle.stop();
    within_patience(handle.ended());
    assert!(within_patience(handle.embed(1, text)).is_err(), "the worker has ended");
}

/// The tokens of a whole answer, with their log probabilities.
fn told(events: &mut Events) -> Vec<(u32, f32)> {
    let mut all = Vec::new();
    within_patience(async {
        loop {
            match events.recv().await {
                Some(Event::Delta(delta)) => all.extend(delta.logprobs.iter().map(|l| (l.token, l.logprob))),
                Some(Event::Done(_)) => return all,
                other => panic!("{other:?}"),
            }
        }
    })
}

/// A prompt used to run in chunks between an answer's tokens, each as long as ten of them.
#[test]
fn a_prompt_goes_along_with_answers_that_are_being_made_and_gets_the_same_answer_as_alone() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(dir.path(), 3, 1024, false, |_| {});
    let long = || Job { prompt: (0..900).map(|i| 3 + i * 7 % 50).collect(), ..job(2, 6) };
    let alone = told(&mut handle.submit(long()).unwrap());
    assert_eq!(alone.len(), 6);
    // One answer ends before the prompt does, which goes along with at most 31 tokens a pass; the other goes on.
    for (tokens, of_its_own) in [([20, 900], 0), ([20, 20], 4)] {
        within_patience(handle.idle());
        handle.forget();
        let counts = || (handle.metrics.prompt_passes.get(), handle.metrics.prompt_tokens.get());
        let before = counts();
        let (release, held) = channel::<()>();
        send(&handle, 1, move |_| held.recv_timeout(PATIENCE).unwrap());
        let mut answers: Vec<Events> = tokens.iter().map(|&n| handle.submit(job(1, n)).unwrap()).collect();
        let mut company = handle.submit(long()).unwrap();
        release.send(()).unwrap();
        let company = told(&mut company);
        let (passes, ran) = counts();
        // The first prompts' own, until an answer is being made; later only where nobody's answer is made any more.
        assert!((1..=2 + of_its_own).contains(&(passes - before.0)), "{passes} after {before:?}");
        assert_eq!(ran - before.1, 900 + 2 * 3);
        for ((token, logprob), (same, near)) in alone.iter().zip(&company) {
            assert!(token == same && (logprob - near).abs() < 1e-4, "{alone:?} and {company:?}");
        }
        for (events, tokens) in answers.iter_mut().zip(tokens) {
            assert_eq!(read(events), tokens);
        }
    }
}

/// Jobs have a channel of their own, and yet a changed threshold holds for every job that is handed in after the change.
#[test]
fn what_was_asked_before_a_job_is_carried_out_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(dir.path(), 1, 64, false, |_| {});
    let (release, held) = channel::<()>();
    send(&handle, 1, move |_| held.recv_timeout(PATIENCE).unwrap());
    let seen = Arc::new(Mutex::new(Vec::new()));
    for number in 0..5 {
        let (then, seen) = (handle.clone(), seen.clone());
        send(&handle, 1, move |_| seen.lock().unwrap().push((number, passes(&then))));
    }
    let mut events = handle.submit(job(1, 4)).unwrap();
    release.send(()).unwrap();
    assert_eq!(read(&mut events), 4);
    assert_eq!(*seen.lock().unwrap(), [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]);
}

/// Gives the engine a device and a scheduler that takes no time on the device's clock.
fn with_scheduler(engine: &mut Engine) {
    let (layers, ffn) = (engine.model.config.layers().len(), engine.model.config.widest_ffn());
    let device = Box::new(VirtualDevice::new(u64::MAX, RATES));
    // SAFETY: the engine drops its device's part before its model: it has both.
    let mut split = unsafe { on_device(&engine.model, device, &vec![ffn / 2; layers]) }.unwrap();
    let options = BackgroundOptions {
        policy: Policy::Full,
        tune: Arc::new(|rules| rules),
        weight: LossWeight::Probability,
        ahead: 1,
        sequences: 2,
        predictor: None,
        thresholds: vec![None; layers],
        history: vec![vec![0.1; ffn]; layers],
        placed: vec![Vec::new(); layers],
        kernels: engine.kernels,
        threads: 1,
        link_gb_s: RATES.link_gb_s,
        latency: Some(Latency { observation_ns: 0.0, gb_s: 1e6 }),
    };
    let block_bytes = engine.model.layers[0].block().bytes();
    split.migrator = Some(Box::new(Background::start(engine.model.clone(), block_bytes, options).unwrap()));
    engine.split = Some(split);
    engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
}

/// Frequencies used to belong to the slot: whatever text came into it next went on with those of the text before, because both begin with
/// the same token and so no text but the first began at position 0.
#[test]
fn a_new_text_has_frequencies_of_its_own_and_one_that_is_resumed_finds_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let handle = worker(dir.path(), 2, 64, false, with_scheduler);
    let text = |from: u32, tokens: u32| -> Vec<u32> { [1].into_iter().chain(from..from + tokens).collect() };
    // In two slots: two texts, the first one again, and a third in place of the second.
    for (prompt, expected) in [(text(5, 20), 1), (text(40, 20), 2), (text(5, 24), 2), (text(60, 20), 3)] {
        let mut events = handle.submit(Job { prompt, ..job(1, 4) }).unwrap();
        assert_eq!(read(&mut events), 4);
        let sequences =
            ask(&handle, |engine| engine.split.as_ref().unwrap().migrator.as_ref().unwrap().counts().sequences);
        assert_eq!(sequences, expected);
    }
    assert!(handle.metrics.cached_tokens.get() >= 21, "the first text was resumed");
}

/// A disk from which some reads fail for good: the answers that needed them end with the reason, the others are those of a whole disk, and
/// the worker goes on.
#[test]
fn what_cannot_be_read_ends_its_answer_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let from_disk = |fail: f64| {
        worker(dir.path(), 2, 64, false, |engine| {
            let model = &engine.model;
            let blocks = layer_blocks(model).unwrap();
            let file = model.store().unwrap().file().file().try_clone().unwrap();
            let disk = VirtualDisk::new(file, 64, 5, Faults { fail, ..Faults::default() });
            let options = HostCacheOptions::new(0);
            let bytes = least_bytes(&blocks, model.config.widest_ffn(), 64);
            let cache = HostCache::new(
                Box::new(disk),
                &blocks,
                model.config.widest_ffn(),
                HostCacheOptions { bytes, ..options },
            );
            engine.set_host_cache(cache.unwrap(), None);
        })
    };
    let answer = |handle: &Handle| {
        let mut events = handle.submit(job(1, 6)).unwrap();
        within_patience(async {
            let mut text = String::new();
            loop {
                match events.recv().await {
                    Some(Event::Delta(delta)) => text += &delta.text,
                    Some(Event::Done(_)) => return Ok(text),
                    Some(Event::Failed(why)) => return Err(why),
                    other => panic!("{other:?}"),
                }
            }
        })
    };
    let expected = answer(&from_disk(0.0)).unwrap();
    let handle = from_disk(0.3);
    let answers: Vec<Result<String, String>> = (0..40).map(|_| answer(&handle)).collect();
    assert!(handle.failure().is_none(), "the worker goes on");
    let failed: Vec<&String> = answers.iter().filter_map(|a| a.as_ref().err()).collect();
    assert!((1..40).contains(&failed.len()), "{} of 40 failed", failed.len());
    assert!(failed.iter().all(|why| why.contains("neurons cannot be read")), "{failed:?}");
    assert!(answers.iter().flatten().all(|text| *text == expected));
}
