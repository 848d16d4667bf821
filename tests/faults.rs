//! The first step that can fail fails, then the second, and so on until none is left: whatever it was, nothing ends the process,
//! what was there stays, and the next attempt succeeds. (SQLite's way of testing; docs/serve.md says what it does not reach.)

mod support;

use dynamicinfer::clock::Duration;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::{Buffer, Call, Device, Event, HostWork, Memory, OutOfMemory, Stream, Totals, VirtualDevice};
use dynamicinfer::engine::{Choice, Engine, Logits, Sparsity};
use dynamicinfer::error::Error;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::{faults, history_file};
use dynamicinfer::generation::{Event as Said, Job, Limits, Speculation, start};
use dynamicinfer::ids::PublishedId;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use dynamicinfer::open::{VramBudget, place};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::placement::memory_plan::Footprint;
use dynamicinfer::tokenizer::Tokenizer;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use support::{RATES, assumed_machine, error, half_of_the_neurons, packed};

const CONTEXT: usize = 64;

thread_local! {
    /// Large allocations of this thread until one fails; none does at 0.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// What counts as large: what keys and values of these tests have, and nothing that Rust itself asks for without asking back.
const LARGE: usize = 64 << 10;

struct Failing;

impl Failing {
    fn fails(layout: Layout) -> bool {
        layout.size() >= LARGE
            && ALLOCATIONS.try_with(|left| left.replace(left.get().saturating_sub(1)) == 1).unwrap_or(false)
    }
}

// SAFETY: the system's allocator, or none.
unsafe impl GlobalAlloc for Failing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        if Failing::fails(layout) { std::ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        if Failing::fails(layout) { std::ptr::null_mut() } else { unsafe { System.alloc_zeroed(layout) } }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Failing = Failing;

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Fails the nth step of `write`, which writes `path`, for every n: the old file stays as it was, and nothing else is left.
/// Returns how many steps there are.
fn every_step_of_writing_fails(path: &Path, write: &dyn Fn() -> Result<(), Error>) -> u64 {
    write().unwrap();
    let dir = path.parent().unwrap();
    let (old, files) = (std::fs::read(path).unwrap(), names(dir));
    for n in 1.. {
        faults::fail_write(n);
        let result = write();
        let fired = faults::left() == 0;
        faults::fail_write(0);
        if !fired {
            result.unwrap();
            return n - 1;
        }
        let message = result.expect_err("a step failed").to_string();
        assert!(message.contains("No space left") && message.contains(dir.to_str().unwrap()), "{message}");
        assert!(std::fs::read(path).unwrap() == old, "step {n}: the old file is not what it was");
        assert_eq!(names(dir), files, "step {n} leaves something");
    }
    unreachable!("no file has so many steps")
}

#[test]
fn a_full_disk_leaves_every_old_file_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let history = dir.path().join("h");
    let frequencies = vec![vec![0.25f32; 32]; 3];
    let write_history = || {
        let (layers, hidden, ffn) = (3, 32, 32);
        let (fingerprint, model) = ("00".repeat(16), "m".into());
        let header =
            history_file::Header { fingerprint, model, layers, hidden, ffn, tokens: 100, sections: Vec::new() };
        history_file::write(&history, header, &frequencies)
    };
    let steps = every_step_of_writing_fails(&history, &write_history);
    assert!(steps >= 9, "{steps} steps: not all that can fail is tried");
    history_file::open(&history).unwrap();

    let machine = dir.path().join("m.toml");
    let steps = every_step_of_writing_fails(&machine, &|| assumed_machine().write(&machine));
    assert_eq!(steps, 4);

    let store = dir.path().join("s.neurons");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/relullama");
    let source = Source::open(&source, None).unwrap();
    let options = PackOptions { types: Quant::F32.into(), orders: None };
    // One thread, so that every step is this thread's.
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().unwrap();
    let steps = alone
        .install(|| every_step_of_writing_fails(&store, &|| pack(&source, &store, &options, &|_, _| Ok(())).map(drop)));
    assert!(steps > 20, "{steps}");
    Model::open(&store).unwrap().store().unwrap().verify(|_| ()).unwrap();
}

/// A device whose nth allocation fails, whatever room there is.
struct Miser {
    inner: VirtualDevice,
    left: Arc<AtomicU64>,
}

impl Miser {
    fn refuses(&self, asked: u64) -> Result<(), OutOfMemory> {
        let left = self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        if left == Ok(1) { Err(OutOfMemory { asked, left: 0 }) } else { Ok(()) }
    }
}

impl Device for Miser {
    fn name(&self) -> String {
        self.inner.name()
    }
    fn memory(&self) -> Memory {
        self.inner.memory()
    }
    fn totals(&self) -> Totals {
        self.inner.totals()
    }
    fn take(&mut self, bytes: u64, most: u64, reserved: bool) -> Result<Buffer, OutOfMemory> {
        self.refuses(bytes)?;
        self.inner.take(bytes, most, reserved)
    }
    fn resize(&mut self, buffer: Buffer, bytes: u64) -> Result<Buffer, OutOfMemory> {
        self.refuses(bytes)?;
        self.inner.resize(buffer, bytes)
    }
    fn free(&mut self, buffer: Buffer) {
        self.inner.free(buffer);
    }
    fn set_budget(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        self.refuses(bytes)?;
        self.inner.set_budget(bytes)
    }
    fn event(&mut self) -> Event {
        self.inner.event()
    }
    unsafe fn copy_in(&mut self, stream: Stream, from: *const u8, bytes: usize, to: Buffer, at: u64) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_in(stream, from, bytes, to, at) }
    }
    unsafe fn copy_out(&mut self, stream: Stream, from: Buffer, at: u64, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.copy_out(stream, from, at, to, bytes) }
    }
    fn launch(&mut self, stream: Stream, call: &Call) {
        self.inner.launch(stream, call);
    }
    fn record(&mut self, stream: Stream, event: Event) {
        self.inner.record(stream, event);
    }
    fn wait(&mut self, stream: Stream, event: Event) {
        self.inner.wait(stream, event);
    }
    fn worked(&mut self, work: HostWork) {
        self.inner.worked(work);
    }
    fn is_done(&mut self, event: Event) -> bool {
        self.inner.is_done(event)
    }
    fn synchronize(&mut self, stream: Stream) {
        self.inner.synchronize(stream);
    }
    fn elapsed_ns(&mut self, from: Event, to: Event) -> u64 {
        self.inner.elapsed_ns(from, to)
    }
    fn synchronize_event(&mut self, event: Event) {
        self.inner.synchronize_event(event);
    }
}

/// An engine whose results do not depend on what lies where.
fn engine(store: &Path) -> Engine {
    let model = Model::open(store).unwrap();
    let layers = model.config.layers().len();
    let mut engine = Engine::new(model, 1, Kernels::best());
    engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
    engine
}

fn logits(engine: &mut Engine, token: u32) -> Vec<f32> {
    let mut kv = KvCache::new(&engine.model.config, CONTEXT, KvType::F32).unwrap();
    for i in 0..3 {
        engine.forward(&mut kv, &[token + i], Logits::Last);
    }
    engine.forward(&mut kv, &[token + 7], Logits::Last).to_vec()
}

/// Load, compute, shrink, grow, with a device that refuses its nth allocation. OPT has a bias of up, which lies there, too.
#[test]
fn a_device_that_refuses_anything_leaves_an_engine_that_is_right_and_can_go_on() {
    let dir = tempfile::tempdir().unwrap();
    for family in ["relullama", "opt"] {
        let store = packed(dir.path(), family, Quant::F32);
        let expected = logits(&mut engine(&store), 5);
        let (mut tried, mut refusals) = (0, [0; 3]);
        for n in 1.. {
            let mut engine = engine(&store);
            let (layers, ffn) = (engine.model.config.layers().len(), engine.model.config.widest_ffn());
            let request = half_of_the_neurons();
            let footprint = Footprint::of_model(&engine.model, CONTEXT, KvType::F32);
            let counts = vec![(1..=ffn as u64).collect(); layers];
            let budgeter = VramBudget { footprint, counts, machine: assumed_machine(), request };
            let whole = dynamicinfer::placement::memory_plan::plan(
                &budgeter.footprint,
                &budgeter.counts,
                &budgeter.machine,
                &request,
            )
            .unwrap();
            let (least, most) = (whole.without_neurons_bytes, whole.budget_bytes);
            let plan = budgeter.plan(most).unwrap();
            let slots: Vec<usize> = plan.layers.iter().map(|l| l.slots).collect();
            let neurons = budgeter.placed(&slots);
            let left = Arc::new(AtomicU64::new(n));
            let device = || Box::new(Miser { inner: VirtualDevice::new(most, RATES), left: left.clone() });
            if place(&mut engine, device(), &plan, &budgeter.machine, &neurons, true).is_err() {
                refusals[0] += 1;
                assert!(engine.split.is_none());
                place(&mut engine, device(), &plan, &budgeter.machine, &neurons, true).unwrap();
            }
            let right = |engine: &mut Engine, when: &str| {
                let off = error(&logits(engine, 5), &expected);
                assert!(off < 1e-5, "{family}, allocation {n} refused, {when}: off by {off}");
                let memory = engine.split.as_ref().unwrap().device.memory();
                assert!(memory.used <= memory.budget, "{memory:?}");
            };
            right(&mut engine, "placed");
            for (step, vram) in [least, most, (least + most) / 2, most].into_iter().enumerate() {
                if budgeter.set(&mut engine, vram).is_err() {
                    refusals[1 + step % 2] += 1;
                    right(&mut engine, "refused");
                    // What was refused once is granted the next time.
                    budgeter.set(&mut engine, vram).unwrap();
                }
                right(&mut engine, "set");
            }
            let used = engine.split.as_ref().unwrap().device.memory().used;
            tried = n;
            if left.load(Ordering::SeqCst) > 0 {
                assert_eq!(n, tried);
                break;
            }
            // As much as without any refusal: nothing is lost on the way.
            assert_eq!(
                used,
                used_without_refusal(&store, &budgeter, &plan, &neurons, most, [least, most, (least + most) / 2, most])
            );
        }
        assert!(tried > 20 && refusals.iter().all(|&n| n > 2), "{family}: {tried} tried, {refusals:?} refused");
    }
}

fn used_without_refusal(
    store: &Path,
    budgeter: &VramBudget,
    plan: &dynamicinfer::placement::memory_plan::Plan,
    neurons: &[Vec<PublishedId>],
    most: u64,
    budgets: [u64; 4],
) -> u64 {
    let mut engine = engine(store);
    place(&mut engine, Box::new(VirtualDevice::new(most, RATES)), plan, &budgeter.machine, neurons, true).unwrap();
    budgets.into_iter().for_each(|vram| drop(budgeter.set(&mut engine, vram).unwrap()));
    engine.split.as_ref().unwrap().device.memory().used
}

/// Keys and values are the large allocations of a load: each in turn is refused, and the load says so.
#[test]
fn a_load_without_memory_for_its_keys_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let demo = dir.path().join("demo.neurons");
    let source = Source::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo"), None).unwrap();
    pack(&source, &demo, &PackOptions { types: Quant::F16.into(), orders: None }, &|_, _| Ok(())).unwrap();
    let mut refused = 0;
    for n in 1.. {
        let model = Model::open(&demo).unwrap();
        let tokenizer = Arc::new(Tokenizer::new(model.tokenizer().unwrap(), &demo).unwrap());
        let engine = Engine::new(model, 1, Kernels::best());
        let limits = Limits {
            queue: 4,
            slots: 4,
            context: 512,
            kv: KvType::F32,
            deterministic: false,
            rest: Duration::MAX,
            slowdown: 2.0,
            prompt_cache_bytes: 1 << 28,
            prompt_cache_every: 8192,
            speculation: Speculation::Auto,
        };
        ALLOCATIONS.set(n);
        let started = start(engine, tokenizer.clone(), limits);
        let fired = ALLOCATIONS.replace(0) == 0;
        match started {
            Err(error) => {
                assert!(matches!(error, Error::Memory(_)) && error.to_string().contains("512 positions"), "{error}");
                refused += 1;
            }
            Ok(handle) => {
                assert!(!fired, "allocation {n} failed and nobody noticed");
                assert_eq!(refused, n - 1);
                // And now it works.
                let prompt = tokenizer.encode("Once", dynamicinfer::tokenizer::Special::AsText).unwrap();
                let job = Job { ignore_eos: true, ..Job::plain(prompt, 3) };
                let mut events = handle.submit(job).unwrap();
                let last = std::iter::from_fn(|| events.blocking_recv()).last();
                assert!(matches!(last, Some(Said::Done(_))), "{last:?}");
                break;
            }
        }
    }
    // Four slots, each with keys and values of five layers.
    assert_eq!(refused, 4 * 5);
}
