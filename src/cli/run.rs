use super::chat;
use super::device_arg::DeviceArgs;
use super::loader_arg::LoaderArgs;
use super::model_arg::{EngineArgs, ModelArgs, Terminal};
use super::progress::{Progress, Unit};
use super::sampling_arg::SamplingArgs;
use super::settings_arg::SocketArgs;
use super::sparsity_arg::SparsityArgs;
use super::trace_arg::TraceArgs;
use crate::clock;
use crate::engine::sampler::{Sampler, SamplingParams};
use crate::engine::{Engine, Report, Session};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model::Model;
use crate::open::{self, DeviceReport, DeviceSession, EngineOptions, Opened};
use crate::tokenizer::chat_template::{Message, render};
use crate::tokenizer::stream::TextStream;
use crate::tokenizer::{Special, Tokenizer};
use serde::Serialize;
use std::io::{IsTerminal, Read};

/// Longer prompts are a mistake: no model has such a context.
const MAX_PROMPT: u64 = 64 << 20;

/// Answer or continue a prompt
///
/// A model with a chat template answers PROMPT as a user's message; a model without one, and any model with --raw, continues the text. The
/// text streams to stdout; the last line on stderr reports the speed. Without PROMPT the text comes from a pipe; on a terminal a chat opens.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Text to answer or continue [default: stdin]
    prompt: Option<String>,
    /// Most tokens to generate; -1: no limit [default: 256]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true)]
    n_predict: Option<i64>,
    /// Context: tokens of prompt and answer together [default: the model's, less where memory is short or a GPU is used]
    #[arg(short, long = "ctx-size", value_name = "N")]
    context: Option<usize>,
    /// System message, for a model with a chat template
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue PROMPT without the model's chat template
    #[arg(long, alias = "no-chat")]
    raw: bool,
    /// Fail if the model has no chat template, instead of continuing the text
    #[arg(long, conflicts_with = "raw", hide_short_help = true)]
    chat: bool,
    /// Print one JSON object at the end instead of a stream
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Number of last tokens that the penalties apply to
    #[arg(long, value_name = "N", default_value_t = 64)]
    repeat_last_n: usize,
    #[command(flatten)]
    sparsity: SparsityArgs,
    /// Compare the predictor with the true activations at every Nth token, and report its recall; 0: never
    #[arg(long, value_name = "N", default_value_t = 64)]
    audit: u64,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    trace: TraceArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

#[derive(Serialize)]
struct Answer {
    text: String,
    /// length: -n reached; stop: the model's end or a stop string; context: it is full; interrupted: Ctrl-C
    finish_reason: &'static str,
    seed: u64,
    prompt_tokens: usize,
    generated_tokens: usize,
    prompt_tokens_per_s: f64,
    /// Of the tokens after the first, which belongs to the prompt's pass.
    generation_tokens_per_s: Option<f64>,
    /// Which predictor chose the neurons of each layer.
    predictor: String,
    /// Neurons computed / all while generating.
    computed_share: f64,
    /// Of a run with a device.
    /// Share of the truly active neurons that were computed, and the number of tokens checked.
    #[serde(skip_serializing_if = "Option::is_none")]
    recall: Option<f64>,
    audited_tokens: u64,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    device: Option<DeviceReport>,
}

pub fn run(args: Args) -> Result<()> {
    let params = SamplingParams { repeat_last_n: args.repeat_last_n, ..args.sampling.params()? };
    params.validate()?;
    if let Some(n) = args.n_predict.filter(|&n| n < -1) {
        return Err(Error::Usage(format!("-n {n}: give -1 or more")));
    }
    if args.wants_a_chat() {
        return chat::run(args.into_chat());
    }
    let prompt = read_prompt(args.prompt.as_deref())?;
    let options = EngineOptions {
        context: args.context,
        sparsity: args.sparsity.options(),
        audit: args.audit,
        traced: args.trace.is_on(),
        device: args.device.options()?,
        ..args.engine.options(&args.model)
    };
    let model = options.open_model(&Terminal)?;
    let tokenizer = Tokenizer::new(model.tokenizer()?, model.path())?;
    let tokens = prompt_tokens(&args, &tokenizer, &prompt)?;
    let Opened { mut engine, context, device, .. } = open::open_model(model, &options, &Terminal)?;
    check_prompt(&engine.model, tokens.len(), context)?;
    args.trace.begin(&mut engine)?;
    let mut session = Session::new(&engine, context, args.engine.kv())?;
    let answer = generate(&args, &mut engine, device.as_ref(), &mut session, &tokenizer, &tokens, params);
    let answer = match answer {
        Ok(answer) => answer,
        failed => args.trace.write_after(&mut engine, failed)?,
    };
    if let Some(device) = device {
        device.finish(&mut engine);
    }
    report(&args, &engine, &answer)?;
    args.trace.write(&mut engine)?;
    if answer.finish_reason == "interrupted" { Err(Error::Interrupted) } else { Ok(()) }
}

impl Args {
    /// Whether to open a chat: on a terminal, without a prompt, and without options for a single answer.
    fn wants_a_chat(&self) -> bool {
        let single = self.raw || self.json || self.trace.is_on() || !self.device.lab.vram_schedule.is_empty();
        let terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
        self.prompt.is_none() && !single && terminal
    }

    /// A chat with the same model and options: in this process, because `run` never uses the daemon.
    fn into_chat(self) -> chat::Args {
        chat::Args {
            model: Some(self.model.model.to_string_lossy().into_owned()),
            system: self.system,
            n_predict: self.n_predict.and_then(|n| u64::try_from(n).ok()),
            here: true,
            sampling: self.sampling,
            engine: LoaderArgs {
                context: self.context.map(|n| n as u64),
                quant: self.model.quant,
                activation: self.model.activation,
                threads: self.engine.threads.map(|n| n as u64),
                kv: self.engine.kv,
                prefill: self.engine.prefill,
                ram: self.engine.ram,
                sparsity: self.sparsity,
                device: self.device,
            },
            socket: SocketArgs::default(),
        }
    }

    /// Tokens to generate, at most; `None` until the model ends or the context is full.
    fn limit(&self) -> Option<usize> {
        usize::try_from(self.n_predict.unwrap_or(256)).ok()
    }
}

fn read_prompt(given: Option<&str>) -> Result<String> {
    if let Some(prompt) = given {
        return Ok(prompt.to_owned());
    }
    let mut stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Err(Error::Usage(
            "the prompt is missing: dynamicinfer run MODEL \"Once upon a time\", or pipe one in".into(),
        ));
    }
    let mut bytes = Vec::new();
    let read =
        stdin.by_ref().take(MAX_PROMPT + 1).read_to_end(&mut bytes).map_err(Error::io("read", "stdin".as_ref()))?;
    if read as u64 > MAX_PROMPT {
        return Err(Error::Usage(format!("the prompt is larger than {} MiB; shorten it", MAX_PROMPT >> 20)));
    }
    let mut text = String::from_utf8(bytes).map_err(|e| Error::Usage(format!("the prompt is not UTF-8 text: {e}")))?;
    // `echo` adds a newline.
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

fn prompt_tokens(args: &Args, tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>> {
    let template = tokenizer.chat_template().filter(|_| !args.raw);
    let tokens = match template {
        Some(template) => {
            let system = args.system.iter().map(|system| Message::new("system", &tokenizer.defuse(system)));
            let user = Message::new("user", &tokenizer.defuse(prompt));
            let messages: Vec<Message> = system.chain([user]).collect();
            tokenizer.encode_chat(&render(template, &messages, tokenizer)?)?
        }
        None if args.chat || args.system.is_some() => {
            let flag = if args.chat { "--chat" } else { "--system" };
            let why = format!("this model has no chat template; leave out {flag} and write the prompt it expects");
            return Err(Error::Usage(why));
        }
        None => tokenizer.encode_prompt(prompt, Special::AsText)?,
    };
    if tokens.is_empty() {
        return Err(Error::Usage(
            "the prompt is empty, and this model has no token that begins a text; write a prompt".into(),
        ));
    }
    Ok(tokens)
}

/// Checks that the context has room for an answer after the prompt.
fn check_prompt(model: &Model, prompt: usize, context: usize) -> Result<()> {
    if prompt < context {
        return Ok(());
    }
    let trained = model.config.context;
    Err(Error::Usage(format!(
        "the prompt has {prompt} tokens and the context {context}: shorten it, or raise -c (this model was trained for {trained})"
    )))
}

fn generate(
    args: &Args,
    engine: &mut Engine,
    device: Option<&DeviceSession>,
    session: &mut Session,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    params: SamplingParams,
) -> Result<Answer> {
    let seed = params.seed;
    let _request = tracing::debug_span!("request", id = 1, client = 0, model = engine.model.config.name).entered();
    let mut sampler = Sampler::new(params, engine.model.config.vocab)?;
    let mut text = TextStream::continuation(&args.sampling.stop)?;
    prompt.iter().for_each(|&token| sampler.accept(token));

    let start = clock::now();
    let progress = Progress::new("reading the prompt", Unit::Tokens);
    let mut logits = session.append(engine, prompt, |done| progress.step(done as u64, prompt.len() as u64))?;
    progress.finish();
    let prompt_seconds = start.elapsed().as_secs_f64();

    let print = if std::io::stdout().is_terminal() { super::print } else { super::print_as_it_is };
    let emit = |piece: &str| if args.json || piece.is_empty() { Ok(()) } else { print(piece) };
    let mut all = String::new();
    let mut generated = 0usize;
    let start = clock::now();
    let mut seconds = 0.0;
    let finish_reason = loop {
        if args.limit() == Some(generated) {
            break "length";
        }
        let token = sampler.sample(logits);
        let ends = tokenizer.is_end(token) && !args.sampling.ignore_eos;
        // A stop string may end with the name of the token that ends the text.
        let delta = tokenizer.say(&mut text, token, !ends);
        emit(&delta.text)?;
        all.push_str(&delta.text);
        if ends {
            break "stop";
        }
        generated += 1;
        sampler.accept(token);
        if delta.stopped {
            break "stop";
        }
        if interrupt::check().is_err() {
            break "interrupted";
        }
        if session.kv.len == session.kv.context {
            break "context";
        }
        if args.limit() == Some(generated) {
            break "length";
        }
        if generated == 1 {
            engine.report = Report::default();
        }
        if let Some(device) = device {
            change_budget(args, device, engine, generated);
        }
        logits = session.append(engine, &[token], |_| Ok(()))?;
        seconds = start.elapsed().as_secs_f64();
    };
    let rest = text.finish();
    emit(&rest.text)?;
    all.push_str(&rest.text);
    let passes = generated.saturating_sub(1);
    let audit = engine.audit.as_ref().map(|audit| audit.counts).unwrap_or_default();
    Ok(Answer {
        text: all,
        finish_reason,
        seed,
        prompt_tokens: prompt.len(),
        generated_tokens: generated,
        prompt_tokens_per_s: prompt.len() as f64 / prompt_seconds,
        predictor: engine.sparsity().name(),
        computed_share: engine.report.computed_share(&engine.model.config),
        recall: audit.recall(),
        audited_tokens: audit.tokens,
        device: open::report::report(engine),
        generation_tokens_per_s: (passes > 0 && seconds > 0.0).then(|| passes as f64 / seconds),
    })
}

/// Before generated token number `token`. An impossible budget is refused; the old one stays, and generation continues.
fn change_budget(args: &Args, device: &DeviceSession, engine: &mut Engine, token: usize) {
    for vram in args.device.budgets_at(token) {
        if let Err(error) = device.budget.set(engine, vram) {
            eprintln!("\nthe budget stays as it is: {error}");
        }
    }
}

fn report(args: &Args, engine: &Engine, answer: &Answer) -> Result<()> {
    if args.json {
        return super::print_json(answer);
    }
    super::print("\n")?;
    let speed = answer.generation_tokens_per_s.map_or("-".into(), |s| format!("{s:.1}"));
    let sparse = match engine.sparsity().is_dense() {
        true => String::new(),
        false => format!(
            " | {}: {:.0} % of the neurons{}",
            answer.predictor,
            100.0 * answer.computed_share,
            answer.recall.map_or(String::new(), |recall| format!(", {:.1} % of the active", 100.0 * recall))
        ),
    };
    let virtual_time = answer.device.as_ref().is_some_and(|d| !d.measured);
    let unit = if virtual_time { "t/s (virtual)" } else { "t/s" };
    let device = answer.device.as_ref().map_or(String::new(), |d| {
        format!(
            " | {}: {:.0} % of the active neurons, peak {} of {}",
            d.device,
            100.0 * d.gpu_share,
            super::human_bytes(d.peak_device_bytes),
            super::human_bytes(d.budget_bytes)
        )
    });
    eprintln!(
        "[ prompt: {} tokens, {:.1} {unit} | generation: {} tokens, {speed} {unit}{sparse}{device} | {} threads, {} | ended by {} | seed {} ]",
        answer.prompt_tokens,
        answer.prompt_tokens_per_s,
        answer.generated_tokens,
        engine.threads(),
        engine.model.types(),
        answer.finish_reason,
        answer.seed
    );
    Ok(())
}
