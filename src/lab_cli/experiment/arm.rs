//! From an arm's settings to a row. A setting has the name of the command line's option, with `_` for `-`, and is read as that is; an
//! unknown one is refused.

use crate::cli::device_arg::{DeviceArgs, LookaheadOnArg, Switch, TensorCores};
use crate::cli::lab_arg::{LabArgs, LabOptions};
use crate::cli::model_arg::{KvArg, PrefillArg, RamPart, Terminal, parse_activation, parse_isa, ram_options};
use crate::cli::{eval, size};
use crate::engine::Engine;
use crate::error::{Error, Result, excerpt};
use crate::evaluation::bench::{BenchOptions, Watch, speed};
use crate::evaluation::evaluate::{Windows, choices, likelihood, read_questions};
use crate::lab::bound::bound;
use crate::lab::experiment::rows::Metrics;
use crate::lab::experiment::{Arm, Method, Spec, Value, arm_name};
use crate::lab::replay::{self, ReplayOptions, frequencies};
use crate::lab::simulate::case::POSITION;
use crate::lab_cli::simulate;
use crate::machine::measure::ReadBandwidth;
use crate::open::report::report;
use crate::open::{DeviceOptions, EngineOptions, ModelOptions, RamOptions, SparsityOptions, open};
use crate::placement::policy::{self, PlacementPolicy as Placement};
use crate::predictor::Kind;
use crate::scheduler::Policy;
use crate::tokenizer::{Special, Tokenizer};
use clap::ValueEnum;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// What a row measures where its experiment does not say.
pub(super) const TEXT: &str = "demo/heldout.txt";
pub(super) const TOKENS: usize = 256;
pub(super) const GENERATED: usize = 64;

/// The settings of an arm, taken one by one: those left at the end are unknown.
struct Fields(Arm);

impl Fields {
    fn value(&mut self, name: &str) -> Option<Value> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.remove(at).1)
    }

    fn read<T>(&mut self, name: &str, parse: impl Fn(&str) -> std::result::Result<T, String>) -> Result<Option<T>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let text = value.to_string();
        let refused = |why| Error::Usage(format!("an arm cannot be: {name} = {}: {why}", excerpt(&text)));
        parse(&text).map(Some).map_err(refused)
    }

    fn get<T: FromStr<Err: Display>>(&mut self, name: &str) -> Result<Option<T>> {
        self.read(name, |text| text.parse().map_err(|why: T::Err| why.to_string()))
    }

    fn one_of<T: ValueEnum>(&mut self, name: &str) -> Result<Option<T>> {
        self.read(name, |text| T::from_str(text, false))
    }

    fn flag(&mut self, name: &str) -> Result<bool> {
        Ok(self.get(name)?.unwrap_or(false))
    }

    /// # Errors
    /// [`Error::Usage`] with an unknown setting.
    fn end(self) -> Result<()> {
        match self.0.first() {
            Some((name, _)) => Err(Error::Usage(format!("an arm cannot be: there is no setting '{}'", excerpt(name)))),
            None => Ok(()),
        }
    }
}

/// What `bench`, `evaluate` and `choices` take.
struct OfEngine {
    options: EngineOptions,
    n_prompt: usize,
    n_gen: usize,
    /// Sequences decoded at once, 1 or more.
    sequences: usize,
    /// A file, or one below `assets`; `bench` draws tokens at random without one, `evaluate` takes [`TEXT`].
    text: Option<PathBuf>,
    /// Tokens of the text.
    tokens: usize,
    choices: Option<PathBuf>,
    context: usize,
    prompt: usize,
}

impl OfEngine {
    /// The engine's options, with room for as many tokens as the method has in one sequence.
    fn with_context(&self, method: Method) -> EngineOptions {
        let context = match method {
            Method::Bench => self.n_prompt.max(self.n_gen).max(1),
            _ => self.context,
        };
        EngineOptions { context: Some(context), ..self.options.clone() }
    }
}

/// What `replay` takes.
struct OfReplay {
    policy: Policy,
    ffn_share: f64,
    /// Percent of a layer's neurons that are carried while one layer is computed.
    link: f64,
    active: f64,
    lookahead: usize,
    cost: f64,
    seed: u64,
}

fn needed<T>(name: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| Error::Usage(format!("an arm cannot be: it needs {name}, under [fixed] or [axes]")))
}

fn sequences(text: &str) -> std::result::Result<usize, String> {
    let most = crate::cpu::MAX_COLUMNS;
    text.parse().ok().filter(|n| (1..=most).contains(n)).ok_or_else(|| format!("take 1 to {most}"))
}

fn of_engine(settings: &[(String, Value)]) -> Result<OfEngine> {
    let mut f = Fields(settings.to_vec());
    let options = EngineOptions {
        threads: f.get("threads")?,
        isa: f.read("isa", parse_isa)?,
        prefill: f.one_of("prefill")?.map(PrefillArg::prefill).unwrap_or_default(),
        kv: f.one_of("kv")?.unwrap_or(KvArg::F16).kv(),
        sparsity: of_sparsity(&mut f)?,
        ram: f.read("ram", size::parse)?,
        neurons: of_ram(&mut f)?,
        device: of_device(&mut f)?,
        ..EngineOptions::new("")
    };
    let model = ModelOptions {
        quant: f.get("quant")?,
        activation: f.read("activation", parse_activation)?,
        ..ModelOptions::new(needed::<PathBuf>("model", f.get("model")?)?)
    };
    let of = OfEngine {
        options: EngineOptions { model, ..options },
        n_prompt: f.get("n_prompt")?.unwrap_or(0),
        n_gen: f.get("n_gen")?.unwrap_or(GENERATED),
        sequences: f.read("sequences", sequences)?.unwrap_or(1),
        text: f.get("text")?,
        tokens: f.get("tokens")?.unwrap_or(TOKENS),
        choices: f.get("choices")?,
        context: f.get("ctx_size")?.unwrap_or(256),
        prompt: f.get("prompt")?.unwrap_or(0),
    };
    f.end()?;
    Ok(of)
}

fn of_sparsity(f: &mut Fields) -> Result<SparsityOptions> {
    let predictor = f.get("predictor")?.unwrap_or(Kind::Dense.into());
    // One arm of several kinds may predict nothing, and what is about predictions then changes nothing.
    let predicts = predictor != Kind::Dense.into();
    let (threshold, ahead) = (f.get("threshold")?, f.get("ahead")?);
    Ok(SparsityOptions {
        predictor,
        threshold: threshold.filter(|_| predicts),
        ahead: ahead.filter(|_| predicts).unwrap_or(0),
        sparsity: f.get("sparsity")?,
        predictor_file: f.get("predictor_file")?,
        calibrate: Vec::new(),
    })
}

fn of_ram(f: &mut Fields) -> Result<RamOptions> {
    let without: Vec<RamPart> = f.one_of("ram_without")?.into_iter().collect();
    let share = f.get("ram_share")?;
    if share.is_some_and(|share: f64| !(0.0..=1.0).contains(&share)) {
        return Err(Error::Usage("an arm cannot be: ram_share is a share of the neurons, from 0 to 1".into()));
    }
    let lookahead = f.get("ram_lookahead")?;
    Ok(RamOptions { share, ..ram_options(f.get("ram_policy")?, &without, lookahead) })
}

fn of_device(f: &mut Fields) -> Result<Option<DeviceOptions>> {
    let vram_share = f.get("vram_share")?;
    let args = DeviceArgs {
        device: f.one_of("device")?,
        vram: f.read("vram", size::parse)?,
        ffn_share: f.get("ffn_share")?,
        placement: f.get("placement")?.unwrap_or_else(|| "static".into()),
        machine: f.get("machine")?,
        policy: f.get("policy")?,
        graphs: f.one_of("graphs")?.unwrap_or(Switch::Off),
        tensor_cores: f.one_of("tensor_cores")?.unwrap_or(TensorCores::Auto),
        prompt_chunk: f.get("prompt_chunk")?,
        lookahead: f.get("lookahead")?,
        lookahead_on: f.one_of("lookahead_on")?.unwrap_or(LookaheadOnArg::Scheduler),
        deterministic: f.flag("deterministic")?,
        // Rows must not learn from those before them.
        no_learn: f.get("no_history")?.unwrap_or(true),
        lab: LabOptions::of(LabArgs {
            placement_seed: f.get("placement_seed")?.unwrap_or(1),
            barrier: f.flag("barrier")?,
            prompt_parts: f.get("prompt_parts")?,
            vram_schedule: Vec::new(),
            fail_after: f.get("fail_after")?,
            wall_clock: f.flag("wall_clock")?,
            printed_loss: f.flag("printed_loss")?,
            theta_gpu: f.get("theta_gpu")?,
            theta_cpu: f.get("theta_cpu")?,
        }),
    };
    let refused = "an arm cannot be: vram_share is of a device, from 0 to 1, and takes the place of vram";
    let wrong = vram_share.is_some_and(|share: f64| !(0.0..=1.0).contains(&share) || args.vram.is_some());
    match (args.options_to_measure()?, vram_share) {
        (None, Some(_)) => Err(Error::Usage(refused.into())),
        _ if wrong => Err(Error::Usage(refused.into())),
        (options, _) => Ok(options.map(|options| DeviceOptions { vram_share, ..options })),
    }
}

fn of_replay(settings: &[(String, Value)]) -> Result<OfReplay> {
    let mut f = Fields(settings.to_vec());
    let of = OfReplay {
        policy: needed("policy", f.get("policy")?)?,
        ffn_share: needed("ffn_share", f.get("ffn_share")?)?,
        link: needed("link", f.get("link")?)?,
        active: f.get("active")?.unwrap_or(0.10),
        lookahead: f.get("lookahead")?.unwrap_or(1),
        cost: f.get("cost")?.unwrap_or(0.0),
        seed: f.get("seed")?.unwrap_or(1),
    };
    f.end()?;
    Ok(of)
}

fn of_simulate(settings: &[(String, Value)]) -> Result<simulate::Args> {
    let mut f = Fields(settings.to_vec());
    let args = simulate::Args {
        model: f.get("model")?,
        shape: f.get("shape")?,
        papers: false,
        chunks: false,
        quant: f.get("quant")?,
        machine: f.get("machine")?,
        vram: f.read("vram", size::parse)?.into_iter().collect(),
        policy: f.get("policy")?.into_iter().collect(),
        trace: f.get("trace")?,
        active: f.get("active")?.unwrap_or(0.10),
        lookahead: f.get("lookahead")?.unwrap_or(2),
        seed: f.get("seed")?.unwrap_or(1),
        threshold: f.get("threshold")?,
        predictor_share: f.get("predictor_share")?,
        placement: f.read("placement", simulate::parse_placement)?,
        by_impact: false,
        no_contention: f.flag("no_contention")?,
        copy_each: f.flag("copy_each")?,
        position: f.get("position")?.unwrap_or(POSITION),
        gap_ns: f.get("gap_ns")?.unwrap_or(0.0),
        prefill: 0,
        prompt_chunk: None,
        plot: None,
        json: false,
    };
    f.end()?;
    if args.model.is_some() == args.shape.is_some() {
        return Err(Error::Usage("an arm cannot be: it needs a model or a shape, and not both".into()));
    }
    Ok(args)
}

/// Puts figures into a row.
fn put(metrics: &mut Metrics, name: &str, value: impl Into<Option<f64>>) {
    metrics.insert(name.to_owned(), value.into().filter(|v| v.is_finite()));
}

/// All settings of an arm; of what is synthetic each repeat is another one.
fn settings(spec: &Spec, arm: &Arm, method: Method, repeat: usize) -> Arm {
    let settings = [&spec.fixed()[..], arm].concat();
    match method {
        Method::Bench | Method::Evaluate | Method::Choices => settings,
        Method::Replay | Method::Simulate => seeded(settings, spec.seed + repeat as u64),
    }
}

/// That every arm can be read, before the first row is made.
///
/// # Errors
/// [`Error::Usage`] with the arm and what it cannot be.
pub fn check(spec: &Spec) -> Result<()> {
    for arm in spec.arms() {
        for &method in &spec.methods {
            let settings = settings(spec, &arm, method, 0);
            let read = match method {
                Method::Bench | Method::Evaluate | Method::Choices => of_engine(&settings).map(drop),
                Method::Replay => of_replay(&settings).map(drop),
                Method::Simulate => of_simulate(&settings).map(drop),
            };
            read.map_err(|e| Error::Usage(format!("{}: {e}", arm_name(&arm))))?;
        }
    }
    Ok(())
}

/// Those of some arms whose budget has no room for what they want, and why.
///
/// # Errors
/// What else stands in the way of opening an arm's model.
pub fn without_room(spec: &Spec, arms: &[&Arm]) -> Result<Vec<(Arm, String)>> {
    let mut found = Vec::new();
    for &arm in arms {
        for &method in spec.methods.iter().filter(|m| !matches!(m, Method::Replay | Method::Simulate)) {
            let of = of_engine(&settings(spec, arm, method, 0))?;
            match crate::open::check(&of.with_context(method), &Terminal) {
                Err(Error::Memory(why)) => {
                    found.push((arm.clone(), why));
                    break;
                }
                other => other?,
            }
        }
    }
    Ok(found)
}

/// One row of an arm.
pub fn row(spec: &Spec, arm: &Arm, repeat: usize) -> Result<Metrics> {
    let mut metrics = Metrics::new();
    for &method in &spec.methods {
        let settings = settings(spec, arm, method, repeat);
        match method {
            Method::Bench => bench(&settings, &mut metrics)?,
            Method::Evaluate => evaluate(&settings, &mut metrics)?,
            Method::Choices => answer(&settings, &mut metrics)?,
            Method::Replay => replayed(&settings, &mut metrics)?,
            Method::Simulate => simulated(&settings, &mut metrics)?,
        }
    }
    Ok(metrics)
}

fn seeded(mut settings: Arm, seed: u64) -> Arm {
    if !settings.iter().any(|(name, _)| name == "seed" || name == "trace") {
        settings.push(("seed".into(), Value::Whole(seed as i64)));
    }
    settings
}

/// An engine as the arm wants it.
fn engine(of: &OfEngine, method: Method) -> Result<Engine> {
    Ok(open(&of.with_context(method), &Terminal)?.engine)
}

/// What a device did since the engine was made, for so many tokens.
fn device(engine: &Engine, metrics: &mut Metrics) {
    let Some(report) = report(engine) else { return };
    let tokens = engine.split.as_ref().map_or(1, |h| h.cache.counters.tokens.max(1)) as f64;
    put(metrics, "gpu_share", report.gpu_share);
    put(metrics, "gpu_neurons_per_token", report.hits as f64 / tokens);
    put(metrics, "cpu_neurons_per_token", report.misses as f64 / tokens);
    put(metrics, "moves_per_token", report.migrations as f64 / tokens);
    put(metrics, if report.measured { "device_ffn_ms" } else { "virtual_ffn_ms" }, report.device_clock_ffn_ms);
    put(metrics, "peak_device_bytes", report.peak_device_bytes as f64);
    put(metrics, "budget_bytes", report.budget_bytes as f64);
}

/// What the cache in host memory has room for.
fn held(engine: &Engine, metrics: &mut Metrics) {
    if let Some(cached) = &engine.cached {
        let (frames, all) = cached.cache.frames();
        put(metrics, "held_share", frames as f64 / all as f64);
    }
}

/// What the cache in host memory did since the engine was made.
fn memory(engine: &mut Engine, metrics: &mut Metrics) {
    held(engine, metrics);
    let tokens = engine.report.tokens.max(1) as f64;
    let Some(cached) = &mut engine.cached else { return };
    let counts = cached.cache.counts();
    let needed = (counts.hits + counts.misses + counts.early).max(1) as f64;
    put(metrics, "memory_share", counts.hits as f64 / needed);
    put(metrics, "early_share", counts.early as f64 / needed);
    // What is compared with the dense model, or has a prompt, reads all neurons besides.
    if counts.streamed > 0 {
        return;
    }
    put(metrics, "disk_reads_per_token", counts.reads.reads as f64 / tokens);
    put(metrics, "disk_bytes_per_token", counts.reads.bytes as f64 / tokens);
}

fn bench(settings: &[(String, Value)], metrics: &mut Metrics) -> Result<()> {
    let args = of_engine(settings)?;
    let mut engine = engine(&args, Method::Bench)?;
    let (prompt, generate) = (args.n_prompt, args.n_gen);
    let options = BenchOptions {
        prompt,
        generate,
        repeats: 1,
        sequences: vec![args.sequences],
        depths: vec![0],
        kv: args.options.kv,
        text: args.text.as_deref().map(|text| eval::tokens_of(&engine.model, &asset(text))).transpose()?,
    };
    // Shares of the machine's rate are not asked for; it is in run.json.
    let unknown = ReadBandwidth { threads: engine.threads(), gb_per_s: f64::NAN, worst_gb_per_s: f64::NAN };
    let rows = speed(&mut engine, &options, unknown, &Watch { step: &|_, _| crate::interrupt::check(), row: &|_| () })?;
    // The time of a virtual device's own work is no speed of anything.
    let real = engine.split.as_ref().is_none_or(|h| h.device.is_real());
    for row in rows {
        let decode = row.n_gen > 0;
        if real {
            put(metrics, if decode { "tokens_per_s" } else { "prompt_tokens_per_s" }, row.avg_ts);
            put(metrics, if decode { "generate_ms" } else { "prompt_ms" }, row.avg_ns as f64 / 1e6);
        }
        if !decode {
            continue;
        }
        put(metrics, "computed_share", row.computed_share);
        put(metrics, "recall", row.recall);
        if let Some(parts) = row.parts_ms.filter(|_| real) {
            put(metrics, "attention_ms", parts.attention);
            put(metrics, "predictor_ms", parts.predictor);
            put(metrics, "ffn_ms", parts.ffn);
            put(metrics, "head_ms", parts.head);
        }
        for (name, ms) in [("ms_p50", row.token_ms_p50), ("ms_p95", row.token_ms_p95), ("ms_p99", row.token_ms_p99)] {
            if real {
                put(metrics, &format!("token_{name}"), ms);
            }
        }
        put(metrics, "read_bytes_per_token", row.bytes_per_token.map(|n| n as f64));
        // Of the timed tokens alone: what is compared with the dense model behind them reads all neurons.
        if let Some(disk) = row.disk {
            put(metrics, "memory_share", disk.hit_share);
            put(metrics, "early_share", disk.early_share);
            put(metrics, "disk_reads_per_token", disk.reads_per_token);
            put(metrics, "disk_bytes_per_token", disk.bytes_per_token as f64);
            put(metrics, "disk_wait_ms", real.then_some(disk.wait_ms));
        }
    }
    device(&engine, metrics);
    held(&engine, metrics);
    Ok(())
}

/// The file itself, or the one of that name below `assets`.
fn asset(path: &Path) -> PathBuf {
    let below = crate::config::asset_dirs().into_iter().map(|dir| dir.join(path));
    std::iter::once(path.to_owned()).chain(below).find(|p| p.is_file()).unwrap_or_else(|| path.to_owned())
}

fn evaluate(settings: &[(String, Value)], metrics: &mut Metrics) -> Result<()> {
    let args = of_engine(settings)?;
    let mut engine = engine(&args, Method::Evaluate)?;
    let tokenizer = Tokenizer::new(engine.model.tokenizer()?, engine.model.path())?;
    let text = args.text.as_deref().unwrap_or(Path::new(TEXT));
    let mut tokens = tokenizer.encode_prompt(&eval::read_text(&asset(text))?, Special::AsText)?;
    tokens.truncate(args.tokens);
    let windows = Windows { context: args.context, prompt: args.prompt, kv: args.options.kv };
    let result = likelihood(&mut engine, &tokens, Some(&tokenizer), windows, None, |_, _| ())?;
    put(metrics, "nll", result.nll);
    put(metrics, "perplexity", result.perplexity);
    put(metrics, "bits_per_byte", result.bits_per_byte);
    if let Some(sparse) = &result.sparse {
        put(metrics, "dense_perplexity", sparse.dense_perplexity);
        put(metrics, "perplexity_percent", 100.0 * (result.perplexity / sparse.dense_perplexity - 1.0));
        put(metrics, "top1_agreement", sparse.top1_agreement);
        put(metrics, "kl", sparse.kl);
        put(metrics, "computed_share", sparse.shares.computed_share);
        put(metrics, "recall", sparse.shares.recall);
        put(metrics, "precision", sparse.shares.precision);
    }
    device(&engine, metrics);
    memory(&mut engine, metrics);
    Ok(())
}

fn answer(settings: &[(String, Value)], metrics: &mut Metrics) -> Result<()> {
    let args = of_engine(settings)?;
    let file = args
        .choices
        .as_ref()
        .ok_or_else(|| Error::Usage("the method choices needs questions: choices = \"FILE\" under [fixed]".into()))?;
    let file = asset(file);
    let questions = read_questions(&eval::read_text(&file)?, &file)?;
    let mut engine = engine(&args, Method::Choices)?;
    let tokenizer = Tokenizer::new(engine.model.tokenizer()?, engine.model.path())?;
    let result = choices(&mut engine, &tokenizer, &questions, args.context, args.options.kv, |_, _| ())?;
    put(metrics, "accuracy", result.accuracy);
    put(metrics, "accuracy_per_byte", result.accuracy_per_byte);
    put(metrics, "chance", result.chance);
    put(metrics, "questions", result.questions as f64);
    device(&engine, metrics);
    Ok(())
}

fn replayed(settings: &[(String, Value)], metrics: &mut Metrics) -> Result<()> {
    let args = of_replay(settings)?;
    if !(args.ffn_share > 0.0 && args.ffn_share <= 1.0 && args.link > 0.0 && args.link <= 100.0) {
        return Err(Error::Usage(
            "an arm cannot be: take an ffn_share of 0 to 1, and a link of 0 to 100 percent".into(),
        ));
    }
    let trace = simulate::synthetic_trace(args.active, args.lookahead, args.seed)?;
    let h = trace.header();
    let skip = h.texts.len() / 2;
    let history = frequencies(&trace, |text| text < skip);
    let counts: Vec<Vec<u64>> =
        history.iter().map(|f| f.iter().map(|&f| (f64::from(f) * 1e9) as u64).collect()).collect();
    let slots = replay::slots(&counts, args.ffn_share);
    let placed = policy::neurons(Placement::Static, &counts, &slots, 0);
    let link = args.link / 100.0 * h.ffn as f64;
    let most = bound(&trace, skip, &slots, &placed, link);
    let setting = |policy: Policy| ReplayOptions {
        policy,
        rules: policy.rules(),
        thresholds: h.thresholds(None),
        slots: slots.clone(),
        link,
        placed: placed.clone(),
        history: history.clone(),
        cost: args.cost,
        foreseen: false,
        stage: None,
        seed: args.seed,
        skip,
    };
    let fixed = replay::replay(&trace, &setting(Policy::Static));
    let outcome = replay::replay(&trace, &setting(args.policy));
    let tokens: usize = h.texts[skip..].iter().map(|t| t.tokens).sum();
    let bound_share = most as f64 / outcome.active.max(1) as f64;
    put(metrics, "gpu_share", outcome.gpu_share());
    put(metrics, "bound_share", bound_share);
    let gap = bound_share - fixed.gpu_share();
    put(metrics, "gap_closed", (gap > 0.0).then(|| (outcome.gpu_share() - fixed.gpu_share()) / gap));
    put(metrics, "moves_per_token", outcome.moves as f64 / tokens.max(1) as f64);
    put(metrics, "moving", outcome.moving);
    Ok(())
}

fn simulated(settings: &[(String, Value)], metrics: &mut Metrics) -> Result<()> {
    let args = of_simulate(settings)?;
    let reports = simulate::reports(&args)?;
    let rows = || reports.iter().flat_map(|r| &r.rows);
    let outcomes: Vec<_> = rows().filter_map(|row| Some((row, row.outcome.as_ref()?))).collect();
    let [(row, o)] = outcomes[..] else {
        return Err(Error::Usage(
            "an arm of simulate is one policy with one vram: put both under [axes] or [fixed]".into(),
        ));
    };
    put(metrics, "simulated_tokens_per_s", row.tokens_per_s);
    put(metrics, "simulated_token_ms_p50", o.token_ms_p50);
    put(metrics, "simulated_token_ms_p99", o.token_ms_p99);
    put(metrics, "simulated_attention_ms", o.parts_ms.attention);
    put(metrics, "simulated_predictor_ms", o.parts_ms.predictor);
    put(metrics, "simulated_ffn_ms", o.parts_ms.ffn);
    put(metrics, "simulated_ffn_device_ms", o.parts_ms.ffn_device);
    put(metrics, "simulated_ffn_cpu_ms", o.parts_ms.ffn_cpu);
    put(metrics, "gpu_share", o.gpu_share);
    put(metrics, "computed_share", o.computed_share);
    put(metrics, "recall", o.recall);
    put(metrics, "moved_bytes_per_token", o.moved_bytes_per_token);
    put(metrics, "link_busy", o.link_busy);
    let dense = rows().find(|row| row.outcome.is_none()).map(|row| row.tokens_per_s);
    put(metrics, "simulated_layer_offload_tokens_per_s", dense);
    Ok(())
}
