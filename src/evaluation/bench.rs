//! Speed of prefill and decode, compared with what the machine's memory bandwidth allows.

use super::audit::{Audit, Shares};
use crate::cache::{CacheCounters, Tier};
use crate::clock;
use crate::cpu::ManyForm;
use crate::cpu::peak::Unit;
use crate::engine::{BatchToken, Engine, Logits, Report, Session};
use crate::error::Result;
use crate::formats::MappedFile;
use crate::interrupt;
use crate::machine::measure::{READ_BYTES, ReadBandwidth, ReadBuffer, peak_gops, read_bandwidth};
use crate::model::config::Ffn;
use crate::model::layer::FfnParts;
use crate::model::{FfnWeights, KvCache, KvType, Matrix};
use crate::predictor::Kind;
use crate::prng::Prng;
use serde::Serialize;

/// What to measure: one row for each prompt or decode length, number of sequences and depth.
pub struct BenchOptions {
    /// Prompt length, tokens; 0 measures no prefill.
    pub prompt: usize,
    /// Tokens that each sequence generates; 0 measures no decode.
    pub generate: usize,
    /// Numbers of sequences that decode together, a row for each; 1 to [`crate::cpu::MAX_COLUMNS`].
    pub sequences: Vec<usize>,
    /// Tokens that each sequence already has when the clock starts, rows for each of these numbers.
    pub depths: Vec<usize>,
    /// Timed runs of each row; one more, untimed, comes before them.
    pub repeats: usize,
    /// Type in which keys and values are stored.
    pub kv: KvType,
    /// Tokens of a text, which are read in order, from the beginning again after the last, so that each repeat goes on where the one
    /// before ended; `None` draws them at random.
    pub text: Option<Vec<u32>>,
}

/// The tokens that are run.
enum Tokens<'a> {
    Random { prng: Prng, vocab: u64 },
    Text { ids: &'a [u32], next: usize },
}

impl<'a> Tokens<'a> {
    fn new(text: Option<&'a [u32]>, vocab: usize, seed: u64) -> Tokens<'a> {
        match text {
            Some(ids) => Tokens::Text { ids, next: 0 },
            None => Tokens::Random { prng: Prng::new(seed), vocab: vocab as u64 },
        }
    }

    fn next(&mut self) -> u32 {
        match self {
            Tokens::Random { prng, vocab } => prng.below(*vocab) as u32,
            Tokens::Text { ids, next } => {
                *next += 1;
                ids[(*next - 1) % ids.len()]
            }
        }
    }

    fn take(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.next()).collect()
    }
}

/// What one row measures.
#[derive(Clone, Copy)]
struct Test {
    depth: usize,
    prompt: usize,
    generate: usize,
    sequences: usize,
}

impl Test {
    /// Tokens that are run for it: those of the context, and each repeat's with the warm-up's.
    fn tokens(&self, repeats: usize) -> u64 {
        (self.depth + (repeats + 1) * (self.prompt + self.generate * self.sequences)) as u64
    }
}

impl BenchOptions {
    /// Token positions that a sequence needs for the longest row.
    pub fn context(&self) -> usize {
        self.depths.iter().max().unwrap_or(&0) + self.prompt.max(self.generate)
    }

    fn tests(&self) -> Vec<Test> {
        let of = |&depth| {
            let prompt = (self.prompt > 0).then_some(Test { depth, prompt: self.prompt, generate: 0, sequences: 1 });
            let test = move |&sequences| Test { depth, prompt: 0, generate: self.generate, sequences };
            prompt.into_iter().chain(self.sequences.iter().filter(|_| self.generate > 0).map(test))
        };
        self.depths.iter().flat_map(of).collect()
    }
}

/// One row of results. Fields that llama-bench has too bear its names, so that scripts written for it can read them.
#[derive(Clone, Debug, Serialize)]
pub struct BenchRow {
    /// Name of the row: `pp512` for prefill, `tg128` for decode, with ` x N` for N sequences and ` @ dN` for a depth of N tokens.
    pub test: String,
    /// Path of the packed model.
    pub model_filename: String,
    /// Family, size and weight type as llama-bench names them, such as `llama 7B Q4_0`.
    pub model_type: String,
    /// Bytes of the packed model's file.
    pub model_size: u64,
    /// Number of the model's parameters.
    pub model_n_params: u64,
    /// Threads that compute.
    pub n_threads: usize,
    /// Type of keys and values: `f16` or `f32`.
    pub type_k: String,
    /// Prompt tokens that are timed; 0 for decode.
    pub n_prompt: usize,
    /// Tokens that each sequence generates; 0 for prefill.
    pub n_gen: usize,
    /// Tokens that each sequence has before the clock starts.
    pub n_depth: usize,
    /// Sequences that decode together; 1 for prefill.
    pub n_sequences: usize,
    /// Mean time of a repeat, ns.
    pub avg_ns: u64,
    /// Sample standard deviation of the repeats' times, ns; 0 for a single repeat.
    pub stddev_ns: u64,
    /// Mean tokens per second of all sequences together.
    pub avg_ts: f64,
    /// Sample standard deviation of the repeats' tokens per second; 0 for a single repeat.
    pub stddev_ts: f64,
    /// Time of each repeat, ns, `[repeats]`.
    pub samples_ns: Vec<u64>,
    /// Tokens per second of each repeat, of all sequences together, `[repeats]`.
    pub samples_ts: Vec<f64>,
    /// Instruction set of the CPU kernels: `avx512`, `avx2` or `portable`.
    pub instruction_set: &'static str,
    /// How exact the products of prompts are: `exact`, `int8` or `int8-per-tensor`; prefill only.
    pub prefill: Option<&'static str>,
    /// 10^9 multiplications and additions per second in weights, each counted; prefill only.
    pub prefill_gops: Option<f64>,
    /// What the multiplying units of these threads reach with nothing to load: of f32 where most products are in f32, else of int8;
    /// prefill only.
    pub unit_gops: Option<f64>,
    /// `prefill_gops / unit_gops`; prefill only.
    pub share_of_unit: Option<f64>,
    /// Median time between two tokens of a sequence over all repeats, ms; decode only.
    pub token_ms_p50: Option<f64>,
    /// The 95th percentile of the time between tokens, ms; decode only.
    pub token_ms_p95: Option<f64>,
    /// The 99th percentile of the time between tokens, ms; decode only.
    pub token_ms_p99: Option<f64>,
    /// Weight bytes that one decode pass (a token of each sequence) reads, predictors included; decode only.
    pub bytes_per_token: Option<u64>,
    /// Name of the predictor that chose the neurons in decode (`Sparsity::name`).
    pub predictor: String,
    /// Computed / all neurons, over the timed tokens; decode only.
    pub computed_share: Option<f64>,
    /// Truly active / all neurons, on random tokens or the first of a text, run after the timing; decode only.
    pub active_share: Option<f64>,
    /// Active and computed / active neurons, on the same tokens as `active_share`; decode only.
    pub recall: Option<f64>,
    /// Active and computed / computed neurons, on the same tokens as `active_share`; decode only.
    pub precision: Option<f64>,
    /// Mean time of a decode pass by part; decode only.
    pub parts_ms: Option<PartsMs>,
    /// Mean time of a decode pass that the engine's thread spent for the scheduler, ms: showing it layers and beginning its moves. Beside the
    /// host's part of the FFN where other threads compute that meanwhile. Decode only.
    pub scheduler_ms: Option<f64>,
    /// Mean time of a decode pass for predicting and choosing neurons on the host, ms; decode only.
    pub predict_ms: Option<f64>,
    /// Mean time of a decode pass that a virtual device took for its copies and kernels, ms, which a card would have done beside the host; decode
    /// on a virtual device only.
    pub pretended_ms: Option<f64>,
    /// Mean time of a decode pass without `pretended_ms`, ms: the raw one is `avg_ns / n_gen`.
    pub net_ms: Option<f64>,
    /// Median time between two tokens without what the virtual device took in it, ms.
    pub net_ms_p50: Option<f64>,
    /// Active neurons that the device computed / all that were computed, over the timed tokens; decode with a device only.
    pub timed_gpu_share: Option<f64>,
    /// Moves that were begun, for each timed pass; decode with a device only.
    pub moves_per_pass: Option<f64>,
    /// What came from disk, where not all neurons are in memory; decode only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskRow>,
    /// Weight bytes read per second, GB/s, from the median time between tokens; decode only.
    pub read_gb_s: Option<f64>,
    /// The fastest that the same threads read memory, GB/s: the better of two measurements, before and after all rows.
    pub machine_gb_s: f64,
    /// `read_gb_s / machine_gb_s`; decode only.
    pub share_of_machine: Option<f64>,
}

/// Mean time of a decode pass by part, ms.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PartsMs {
    /// Attention with its matrices, and all that is none of the other parts, such as the embedding.
    pub attention: f64,
    /// Scoring and selecting neurons.
    pub predictor: f64,
    /// The FFNs of all layers.
    pub ffn: f64,
    /// The last norm and the head.
    pub head: f64,
}

/// What a decode pass took from disk, where not all neurons are in memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DiskRow {
    /// Neurons that were in memory when they were needed / neurons that were needed.
    pub hit_share: f64,
    /// Those that had been asked for before their layer's turn / neurons that were needed.
    pub early_share: f64,
    /// Bytes read from disk in a pass.
    pub bytes_per_token: u64,
    /// Of these bytes, those that were compared with their checksums, being read for the first time.
    pub verified_bytes_per_token: u64,
    /// Reads in a pass.
    pub reads_per_token: f64,
    /// Bytes read by the time of all passes, GB/s.
    pub gb_s: f64,
    /// Time that a thread waited for reads in a pass, ms.
    pub wait_ms: f64,
}

impl DiskRow {
    /// By the report of some decode passes that took `ns` together.
    fn of(report: &Report, ns: u64, threads: usize) -> Option<DiskRow> {
        let (cache, passes) = (&report.host_cache, report.passes.max(1));
        let needed = cache.hits + cache.early + cache.misses;
        (needed + cache.streamed > 0).then(|| DiskRow {
            hit_share: cache.hits as f64 / needed.max(1) as f64,
            early_share: cache.early as f64 / needed.max(1) as f64,
            bytes_per_token: cache.reads.bytes / passes,
            verified_bytes_per_token: cache.reads.verified_bytes / passes,
            reads_per_token: cache.reads.reads as f64 / passes as f64,
            gb_s: cache.reads.bytes as f64 / ns.max(1) as f64,
            wait_ms: cache.waited_ns as f64 / 1e6 / (threads as u64 * passes) as f64,
        })
    }
}

/// Looks on while rows are measured, outside the timed steps.
pub struct Watch<'a> {
    /// Gets the tokens that were run and those of all rows together, warm-ups included; an error ends the work.
    pub step: &'a dyn Fn(u64, u64) -> Result<()>,
    /// Gets each row when it is measured, without the second measurement of the machine.
    pub row: &'a dyn Fn(&BenchRow),
}

/// Measures what `options` say, and how fast the same threads read memory just before and after. The read is of 2 GiB if twice that fits
/// into the `free` bytes beside the model, else of the model's own bytes; `None` for `free` means that there is enough.
///
/// # Errors
/// [`crate::Error::Memory`] where keys and values do not fit, [`crate::Error::Interrupted`] after Ctrl-C, those of `watch`, and the device's
/// if it fails.
pub fn bench(
    engine: &mut Engine,
    options: &BenchOptions,
    free: Option<u64>,
    watch: &Watch<'_>,
) -> Result<Vec<BenchRow>> {
    let (threads, model) = (engine.threads(), engine.model.clone());
    // Of a model that is larger than memory only a part lies there.
    let cached = engine.cached.is_some();
    let largest = model.files().iter().map(MappedFile::bytes).max_by_key(|bytes| bytes.len()).unwrap_or_default();
    let file = if cached { model.head.all() } else { largest };
    let room = free.map_or(u64::MAX, |free| free.saturating_sub(model.file_bytes()) / 2);
    let buffer = (room >= READ_BYTES as u64).then(|| ReadBuffer::new(READ_BYTES, None).ok()).flatten();
    let measure = || buffer.as_ref().map_or_else(|| read_bandwidth(file, threads), |buffer| buffer.measure(threads));
    let before = measure();
    interrupt::check()?;
    let mut rows = speed(engine, options, before, watch)?;
    // The better of the two counts: the machine may have been busy during one.
    let after = measure();
    for row in &mut rows {
        row.machine_gb_s = row.machine_gb_s.max(after.gb_per_s);
        row.share_of_machine = row.read_gb_s.map(|rate| rate / row.machine_gb_s);
    }
    Ok(rows)
}

/// As [`bench()`], with the memory read rate `before` that was measured already.
///
/// # Errors
/// As [`bench()`].
pub fn speed(
    engine: &mut Engine,
    options: &BenchOptions,
    before: ReadBandwidth,
    watch: &Watch<'_>,
) -> Result<Vec<BenchRow>> {
    let tests = options.tests();
    let all: u64 = tests.iter().map(|test| test.tokens(options.repeats)).sum();
    let (mut rows, mut before_this) = (Vec::new(), 0);
    for test in tests {
        let (samples, began) = run(engine, test, options, &|done| (watch.step)((before_this + done).min(all), all))?;
        before_this += test.tokens(options.repeats);
        let mut row = row(engine, test, options.kv, before, &samples);
        if test.generate > 0 {
            of_device(&mut row, engine, began, &samples);
        }
        if test.prompt > 0 {
            let (of_each, unit) = multiplied(engine, test.prompt);
            row.prefill = Some(engine.kernels.prefill.name());
            row.prefill_gops = Some(2e-9 * of_each * row.avg_ts);
            row.unit_gops = peak_gops(engine.threads(), engine.kernels.isa, unit);
            row.share_of_unit = row.prefill_gops.zip(row.unit_gops).map(|(rate, unit)| rate / unit);
        }
        if test.generate > 0 {
            let shares = audit(engine, options)?;
            row.active_share = Some(shares.active_share);
            row.recall = Some(shares.recall);
            row.precision = Some(shares.precision);
        }
        (watch.row)(&row);
        rows.push(row);
    }
    Ok(rows)
}

/// Weights that a token of a prompt of `tokens` is multiplied with, the head's but once for all, and the unit that multiplies most of them.
fn multiplied(engine: &Engine, tokens: usize) -> (f64, Unit) {
    let (model, n) = (&engine.model, tokens.min(engine.chunk()));
    let mut of_units = [0.0; Unit::ALL.len()];
    let mut add = |quant, weights: usize| {
        let unit = match engine.kernels.form(quant, n) {
            ManyForm::Rows | ManyForm::Codes => Unit::Int8,
            ManyForm::Sixteen => Unit::Int16,
            ManyForm::Floats => Unit::F32,
        };
        of_units[unit as usize] += weights as f64;
    };
    for layer in &model.layers {
        let matrix = |matrix: &Matrix| (matrix.quant, matrix.rows * matrix.cols);
        layer.mixer_matrices().map(matrix).for_each(|(quant, weights)| add(quant, weights));
        let (ffn, hidden) = (layer.width, model.config.hidden);
        match &layer.ffn {
            FfnWeights::Neurons(neurons) => {
                let (block, gated) = (&neurons.layout, model.config.ffn_kind != Ffn::Plain);
                add(block.up().quant, if gated { 2 * ffn * hidden } else { ffn * hidden });
                add(block.down().quant, ffn * hidden);
            }
            FfnWeights::Matrices(weights) => {
                weights.input.parts().iter().chain([&weights.down]).map(matrix).for_each(|(quant, n)| add(quant, n));
            }
            FfnWeights::Experts(weights) => {
                let used = model.config.most_used_experts();
                let parts = weights.experts.first().into_iter().flat_map(|expert| expert.parts()).map(matrix);
                parts.into_iter().for_each(|(quant, n)| add(quant, used * n));
                let shared = weights.shared.iter().flat_map(|shared| shared.ffn.parts()).map(matrix);
                shared.for_each(|(quant, n)| add(quant, n));
            }
        }
    }
    let head = (model.head.rows * model.head.cols) as f64 / tokens as f64;
    let most = Unit::ALL.into_iter().max_by(|a, b| of_units[*a as usize].total_cmp(&of_units[*b as usize]));
    (of_units.iter().sum::<f64>() + head, most.unwrap_or(Unit::Int8))
}

/// What a device has counted.
fn counted(engine: &Engine) -> Option<CacheCounters> {
    Some(engine.split.as_ref()?.cache.counters)
}

/// Times of a step, ns.
#[derive(Clone, Copy)]
struct StepNs {
    all: u64,
    /// What of it a virtual device took for its copies and kernels.
    pretended: u64,
}

impl StepNs {
    /// Times `work`.
    fn of(engine: &mut Engine, work: impl FnOnce(&mut Engine) -> Result<()>) -> Result<StepNs> {
        let pretended = |engine: &Engine| engine.split.as_ref().map_or(0, |split| split.device.totals().pretended_ns);
        let (before, start) = (pretended(engine), clock::now());
        work(engine)?;
        let all = start.elapsed().as_nanos() as u64;
        Ok(StepNs { all, pretended: pretended(engine) - before })
    }
}

/// Times of each step in each repeat, `[repeats][steps]`: a prefill is one step, a decode one per token (of each sequence). `step(done)`
/// gets the tokens that were run.
fn run(
    engine: &mut Engine,
    test: Test,
    options: &BenchOptions,
    step: &dyn Fn(u64) -> Result<()>,
) -> Result<(Vec<Vec<StepNs>>, Option<CacheCounters>)> {
    let mut tokens = Tokens::new(options.text.as_deref(), engine.model.config.vocab, 1);
    let context = test.depth + test.prompt + test.generate;
    let mut session = Session::new(engine, context, options.kv)?;
    let begin = tokens.take(test.depth);
    session.go_to(engine, &begin, |done| step(done as u64))?;
    // All sequences begin with the same tokens; each has its own copy of their keys and values.
    let cache = |_| {
        let mut kv = KvCache::new(&engine.model.config, context, options.kv)?;
        kv.copy_from(&session.kv, test.depth);
        Ok(kv)
    };
    let mut caches = (0..test.sequences).map(cache).collect::<Result<Vec<_>>>()?;
    // One more repeat than asked for: the first one is thrown away, it maps pages and fills buffers.
    let mut repeats = Vec::new();
    let mut before = None;
    for repeat in 0..=options.repeats {
        let mut steps = Vec::new();
        let done = test.tokens(repeat) - test.tokens(0) + test.depth as u64;
        if test.prompt > 0 {
            // A layer with a window may have given up what the next token sees.
            session.go_to(engine, &begin, |_| interrupt::check())?;
            let prompt = tokens.take(test.prompt);
            steps.push(StepNs::of(engine, |engine| {
                session.append(engine, &prompt, |_| interrupt::check()).map(|_| ())
            })?);
            step(done)?;
        }
        for cache in &mut caches {
            if cache.rewind(test.depth) < test.depth {
                session.go_to(engine, &begin, |_| interrupt::check())?;
                cache.copy_from(&session.kv, test.depth);
            }
        }
        for _ in 0..if repeat == 0 { test.generate.min(4) } else { test.generate } {
            let column = |(sequence, token)| BatchToken { sequence, token };
            let columns: Vec<BatchToken> = tokens.take(test.sequences).into_iter().enumerate().map(column).collect();
            steps.push(StepNs::of(engine, |engine| {
                engine.forward_batch(&mut caches, &columns, Logits::All);
                engine.check()
            })?);
            step(done + (steps.len() * test.sequences) as u64)?;
        }
        if repeat > 0 {
            repeats.push(steps);
        } else {
            engine.report = Report::default();
            before = counted(engine);
        }
    }
    Ok((repeats, before))
}

/// Recall and precision of the predictors on tokens like those that were timed.
fn audit(engine: &mut Engine, options: &BenchOptions) -> Result<Shares> {
    const TOKENS: usize = 64;
    // Each of them reads the whole model, from disk if it is there.
    let tokens = if engine.cached.is_some() { TOKENS / 16 } else { TOKENS };
    let mut drawn = Tokens::new(options.text.as_deref(), engine.model.config.vocab, 2);
    let mut session = Session::new(engine, tokens, options.kv)?;
    let mut audit = Audit::of(engine);
    for _ in 0..tokens {
        interrupt::check()?;
        engine.forward_observed(&mut session.kv, &[drawn.next()], Logits::None, &mut audit);
        engine.check()?;
    }
    Ok(audit.shares().0)
}

/// Writes down what the device did in the timed passes, which began at `began`.
fn of_device(row: &mut BenchRow, engine: &Engine, began: Option<CacheCounters>, repeats: &[Vec<StepNs>]) {
    let Some((began, now)) = began.zip(counted(engine)) else { return };
    let [device, host] = [Tier::Device, Tier::Host].map(|tier| now.computed[tier] - began.computed[tier]);
    row.timed_gpu_share = Some(device as f64 / (device + host).max(1) as f64);
    let moves = now.migrations - began.migrations;
    row.moves_per_pass = Some(moves as f64 / engine.report.passes.max(1) as f64);
    if engine.split.as_ref().is_none_or(|split| split.device.is_real()) {
        return;
    }
    let mean_ms = |ns: Vec<u64>| ns.iter().sum::<u64>() as f64 / 1e6 / ns.len() as f64;
    let net = sorted(repeats, |step| step.all - step.pretended);
    row.net_ms_p50 = Some(percentile(&net, 0.5) as f64 / 1e6);
    row.net_ms = Some(mean_ms(net));
    row.pretended_ms = Some(mean_ms(sorted(repeats, |step| step.pretended)));
}

/// A time of every step, ascending.
fn sorted(repeats: &[Vec<StepNs>], of: fn(&StepNs) -> u64) -> Vec<u64> {
    let mut steps: Vec<u64> = repeats.iter().flatten().map(of).collect();
    steps.sort_unstable();
    steps
}

fn row(
    engine: &Engine,
    Test { depth, prompt, generate, sequences }: Test,
    kv: KvType,
    machine: ReadBandwidth,
    repeats: &[Vec<StepNs>],
) -> BenchRow {
    let model = &engine.model;
    let samples_ns: Vec<u64> = repeats.iter().map(|steps| steps.iter().map(|step| step.all).sum()).collect();
    let samples_ns_sum = samples_ns.iter().sum();
    let samples_ts: Vec<f64> =
        samples_ns.iter().map(|&ns| (prompt + generate * sequences) as f64 * 1e9 / ns as f64).collect();
    let (avg_ns, stddev_ns) = mean_and_deviation(&samples_ns.iter().map(|&n| n as f64).collect::<Vec<_>>());
    let (avg_ts, stddev_ts) = mean_and_deviation(&samples_ts);
    let steps = sorted(repeats, |step| step.all);
    let decode = generate > 0;
    let at = |share: f64| decode.then(|| percentile(&steps, share) as f64 / 1e6);
    let report = &engine.report;
    let passes = report.passes.max(1);
    let bytes = model.bytes_outside_ffn() + engine.sparsity().predictor_bytes() + report.ffn_bytes / passes;
    let part = |ns: u64| ns as f64 / 1e6 / passes as f64;
    let parts_ms = PartsMs {
        attention: part(report.attention_ns),
        predictor: part(report.predictor_ns),
        ffn: part(report.ffn_ns),
        head: part(report.head_ns),
    };
    let at_depth = if depth > 0 { format!(" @ d{depth}") } else { String::new() };
    let read_gb_s = decode.then(|| bytes as f64 / percentile(&steps, 0.5) as f64);
    BenchRow {
        test: match (decode, sequences) {
            (false, _) => format!("pp{prompt}{at_depth}"),
            (true, 1) => format!("tg{generate}{at_depth}"),
            (true, n) => format!("tg{generate} x {n}{at_depth}"),
        },
        model_filename: model.path().display().to_string(),
        model_type: type_name(&model.config.family, model.config.parameters(), model.quant.ggml_name()),
        model_size: model.file_bytes(),
        model_n_params: model.config.parameters(),
        n_threads: engine.threads(),
        type_k: kv.name().into(),
        n_prompt: prompt,
        n_gen: generate,
        n_depth: depth,
        n_sequences: sequences,
        avg_ns: avg_ns as u64,
        stddev_ns: stddev_ns as u64,
        avg_ts,
        stddev_ts,
        samples_ns,
        samples_ts,
        instruction_set: engine.kernels.isa.name(),
        prefill: None,
        prefill_gops: None,
        unit_gops: None,
        share_of_unit: None,
        token_ms_p50: at(0.5),
        token_ms_p95: at(0.95),
        token_ms_p99: at(0.99),
        bytes_per_token: decode.then_some(bytes),
        predictor: match model.config.parts() {
            // Of experts that are packed by neuron the gates choose where no network does.
            FfnParts::Experts if decode && model.config.neurons_inside() => match engine.sparsity().is_dense() {
                true => Kind::Exact.name().into(),
                false => engine.sparsity().name(),
            },
            FfnParts::Experts => Kind::Router.name().into(),
            FfnParts::Neurons if decode => engine.sparsity().name(),
            _ => Kind::Dense.name().into(),
        },
        computed_share: decode.then(|| report.computed_share(&model.config)),
        active_share: None,
        recall: None,
        precision: None,
        parts_ms: decode.then_some(parts_ms),
        scheduler_ms: decode.then_some(part(report.scheduler_ns)),
        predict_ms: decode.then_some(part(report.predictor_ns)),
        pretended_ms: None,
        net_ms: None,
        net_ms_p50: None,
        timed_gpu_share: None,
        moves_per_pass: None,
        disk: if decode { DiskRow::of(report, samples_ns_sum, engine.threads()) } else { None },
        read_gb_s,
        machine_gb_s: machine.gb_per_s,
        share_of_machine: read_gb_s.map(|rate| rate / machine.gb_per_s),
    }
}

/// A model's type as llama-bench names it: family, parameters in round numbers, type of the weights.
fn type_name(family: &str, parameters: u64, quant: &str) -> String {
    let n = parameters as f64;
    let size = match n {
        _ if n >= 1.95e9 => format!("{:.0}B", n / 1e9),
        _ if n >= 0.95e9 => format!("{:.1}B", n / 1e9),
        _ if n >= 0.95e6 => format!("{:.0}M", n / 1e6),
        _ => format!("{:.0}K", n / 1e3),
    };
    format!("{family} {size} {quant}")
}

/// Mean and sample standard deviation (0 for a single sample).
fn mean_and_deviation(samples: &[f64]) -> (f64, f64) {
    let n = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / n;
    let squares: f64 = samples.iter().map(|s| (s - mean).powi(2)).sum();
    (mean, if samples.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 })
}

/// The smallest value that at least `share` of the sorted values do not exceed.
fn percentile(sorted: &[u64], share: f64) -> u64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_named_as_llama_bench_names_them() {
        assert_eq!(type_name("llama", 6_738_415_616, "Q4_0"), "llama 7B Q4_0");
        assert_eq!(type_name("opt", 13_015_864_320, "F16"), "opt 13B F16");
        assert_eq!(type_name("llama", 1_100_048_384, "Q8_0"), "llama 1.1B Q8_0");
        assert_eq!(type_name("llama", 940_214_272, "F16"), "llama 940M F16");
        assert_eq!(type_name("llama", 320_000, "F32"), "llama 320K F32");
    }
}
