use crate::cli::eval::read_texts;
use crate::cli::model_arg::{EngineArgs, ModelArgs, check_context};
use crate::cli::output;
use crate::cli::progress::{Progress, Unit};
use crate::cli::size;
use crate::cli::sparsity_arg;
use crate::error::{Error, Result, human_bytes};
use crate::formats::sections;
use crate::formats::trace_file::{EXTENSION, Header, TraceFile};
use crate::lab::record::{Request, record};
use crate::lab::synth::experts::{ExpertTrace, MEMORY, Routing, write_experts};
use crate::lab::synth::trace::{TraceShape, write_trace};
use crate::open::model::free_bytes;
use crate::predictor::Kind;
use crate::tokenizer::{Special, Tokenizer};
use std::path::{Path, PathBuf};

/// Tokens per window at most, unless the user says otherwise.
const MAX_WINDOW: usize = 1024;

/// Record which neurons or experts are active, for `replay`
///
/// Runs MODEL densely over the texts and writes, for every token and layer, which neurons were active and how likely the predictor
/// thought each, from the layer's own residual and from --ahead layers before. Ctrl-C keeps what was recorded. With --synth there is
/// no model: a synthetic trace is made that has the statistics of the paper's models.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A Hugging Face directory, a .gguf, a packed .neurons file, or `demo`
    #[arg(required_unless_present = "synth", conflicts_with = "synth")]
    model: Option<PathBuf>,
    /// Text files; each becomes a sequence of the trace
    #[arg(long, num_args = 1.., value_name = "FILE", required_unless_present = "synth")]
    text: Vec<PathBuf>,
    /// Record the first N tokens of each text only
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// File to write
    #[arg(short, long, value_name = "FILE.trace")]
    output: PathBuf,
    /// Predictor whose probabilities are recorded: mlp, sign or exact [default: the best there is]
    #[arg(long)]
    predictor: Option<Kind>,
    /// Predictor file to take instead of the model's own
    #[arg(long, value_name = "FILE")]
    predictor_file: Option<PathBuf>,
    /// Layers that the second prediction looks ahead
    #[arg(long, default_value_t = 1)]
    ahead: usize,
    /// Also print, as JSON, which share of the active neurons is found from so many layers before
    #[arg(long, value_name = "LAYERS,...", value_delimiter = ',', conflicts_with = "synth")]
    lookaheads: Vec<usize>,
    /// Of silu and gelu models: share of the neurons that count as inactive, those of the smallest |act(gate)| [default: 0.5]
    #[arg(long, conflicts_with = "synth")]
    sparsity: Option<f32>,
    /// Tokens per window; a window knows nothing of the one before [default: the model's context, at most 1024]
    #[arg(short, long = "ctx-size")]
    context: Option<usize>,
    /// Type of the weights when the model has to be packed first
    #[arg(long)]
    quant: Option<crate::pack::Types>,
    /// Make a trace up: 12 texts of --max-tokens tokens (200), 8 layers of 2048 neurons, 10 % of them active
    #[arg(long)]
    synth: bool,
    /// Of --synth: a file of settings, as configs/traces/paper.toml, instead of --max-tokens and --ahead
    #[arg(long, value_name = "FILE.toml", requires = "synth", conflicts_with_all = ["experts", "max_tokens"])]
    recipe: Option<PathBuf>,
    /// Of --synth
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    mixture: Mixture,
    #[command(flatten)]
    engine: EngineArgs,
}

/// A made-up trace of a mixture of experts.
#[derive(clap::Args)]
struct Mixture {
    /// Of --synth: the trace is of a mixture with so many experts a layer
    #[arg(long, value_name = "N", requires_all = ["synth", "experts_used"])]
    experts: Option<usize>,
    /// How many of the experts a token uses
    #[arg(long, value_name = "N", requires = "experts")]
    experts_used: Option<usize>,
    /// Half of the uses of experts come back within so many tokens [default: as many as come by chance]
    #[arg(long, value_name = "TOKENS", requires = "experts")]
    reuse: Option<f64>,
    /// How uneven the experts are used: frequency falls with this power of the rank; 0 is flat
    #[arg(long, default_value_t = 0.8, requires = "experts")]
    skew: f64,
    /// Share of the skew that each text has for itself, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, requires = "experts")]
    topics: f64,
    /// Share of a token's experts that a router finds that looks --ahead
    #[arg(long, value_name = "SHARE", default_value_t = 0.85, requires = "experts")]
    recall: f64,
    /// Layers of the mixture
    #[arg(long, default_value_t = 16, requires = "experts")]
    layers: usize,
    /// Texts of the mixture's trace
    #[arg(long, default_value_t = 8, requires = "experts")]
    texts: usize,
    /// Bytes of an expert
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "3MiB", requires = "experts")]
    expert_bytes: u64,
}

const EXAMPLES: &str = "\
Examples:
  dynamicinfer-lab record demo --text a.txt b.txt -o demo.trace
  dynamicinfer-lab record M --text chat.txt --ahead 2 --max-tokens 2000 -o m.trace
  dynamicinfer-lab record --synth -o paper.trace
  dynamicinfer-lab record --synth --experts 128 --experts-used 8 --layers 48 --reuse 2 --skew 0.5 -o moe.trace
  dynamicinfer-lab replay demo.trace --ffn-share 0.3 0.5 --link 2 5       which neurons would have been on a GPU";

pub fn run(args: Args) -> Result<()> {
    if args.output.extension().is_none_or(|e| e != EXTENSION) {
        return Err(Error::Usage(format!("-o {}: take a name that ends in .{EXTENSION}", args.output.display())));
    }
    output::check("-o", &args.output, |head| head.starts_with(&<Header as sections::Header>::MAGIC))?;
    if let (Some(experts), Some(used)) = (args.mixture.experts, args.mixture.experts_used) {
        return mixture(&args, experts, used);
    }
    let progress = Progress::new("recording", Unit::Tokens);
    if args.synth {
        let shape = made_up(&args)?;
        announce(&args.output, shape.bytes())?;
        write_trace(&shape, &args.output, |done, all| progress.step(done, all))?;
        progress.finish();
        eprintln!("{} written", args.output.display());
        return Ok(());
    }
    read_texts(&args.text)?;
    let model = args.model.clone().expect("clap asks for it");
    let model = ModelArgs { model, quant: args.quant, activation: None }.open(&|_| Ok(()))?;
    let window = args.context.unwrap_or(model.config.context.min(MAX_WINDOW));
    if window == 0 || args.max_tokens == Some(0) {
        return Err(Error::Usage("-c and --max-tokens: take at least one token".into()));
    }
    for (name, ahead) in
        std::iter::once(("--ahead", args.ahead)).chain(args.lookaheads.iter().map(|&a| ("--lookaheads", a)))
    {
        if ahead >= model.config.layers().len() || (ahead == 0 && name == "--ahead") {
            let why = format!("{name} {ahead}: the model has {} layers; take 1 or more", model.config.layers().len());
            return Err(Error::Usage(why));
        }
    }
    check_context(&model, window, args.engine.kv())?;
    let tokenizer = Tokenizer::new(model.tokenizer()?, model.path())?;
    let texts = read(&args, &tokenizer)?;
    let mut engine = args.engine.engine(model)?;
    let (predictor, activation_thresholds) = if engine.model.has_neurons() {
        let (one, thresholds) = sparsity_arg::one(&engine, args.predictor, args.predictor_file.clone(), args.sparsity)?;
        (Some(one), thresholds)
    } else if args.predictor.is_some() || args.predictor_file.is_some() || args.sparsity.is_some() {
        return Err(Error::Usage(
            "--predictor, --sparsity: of a mixture's experts or of clusters a trace holds which are used, and routers predict that; leave it out"
                .into(),
        ));
    } else {
        (None, vec![0.0; engine.model.config.layers().len()])
    };
    let made = serde_json::json!({
        "program": concat!("dynamicinfer ", env!("CARGO_PKG_VERSION")),
        "weights": engine.model.quant.name(),
        "window": window,
        "sparsity": args.sparsity,
    });
    let request = Request {
        texts,
        window,
        kv: args.engine.kv(),
        predictor,
        activation_thresholds,
        ahead: args.ahead,
        lookaheads: args.lookaheads.clone(),
        made,
    };
    let header = request.header(&engine);
    announce(&args.output, header.token_bytes() * header.tokens() as u64)?;
    let result = record(&mut engine, &request, &args.output, |done, all| progress.step(done, all));
    progress.finish();
    if let Err(Error::Interrupted) = result {
        eprintln!("{} holds what was recorded so far", args.output.display());
    }
    let recalls = result?;
    eprintln!("{} written", args.output.display());
    if !args.lookaheads.is_empty() {
        crate::cli::print_json(&serde_json::json!({ "recall": recalls[1..] }))?;
    }
    if let Some(share) = recalls[0].share().filter(|_| !engine.model.has_neurons()) {
        let layers = if args.ahead == 1 { "1 layer".to_owned() } else { format!("{} layers", args.ahead) };
        eprintln!(
            "a layer's router, asked {layers} before, chose {:.1} % of the experts that were then used",
            100.0 * share
        );
        eprintln!("{}", in_words(&Routing::of(&TraceFile::open(&args.output)?)));
    }
    Ok(())
}

/// The tokens of each text, with its name.
fn read(args: &Args, tokenizer: &Tokenizer) -> Result<Vec<(String, Vec<u32>)>> {
    let mut texts = Vec::new();
    for path in &args.text {
        let mut tokens = tokenizer.encode_prompt(&crate::cli::eval::read_text(path)?, Special::AsText)?;
        tokens.truncate(args.max_tokens.unwrap_or(usize::MAX));
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if tokens.is_empty() {
            return Err(Error::Usage(format!("{} holds no tokens", path.display())));
        }
        texts.push((name, tokens));
    }
    Ok(texts)
}

/// The shape of a made-up trace.
fn made_up(args: &Args) -> Result<TraceShape> {
    let shape = match &args.recipe {
        None => TraceShape {
            tokens_per_text: args.max_tokens.unwrap_or(200),
            ahead: args.ahead,
            seed: args.seed,
            ..TraceShape::paper()
        },
        Some(path) => {
            let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
            let shape: TraceShape = toml::from_str(&text).map_err(|why| Error::bad(path, "recipe", why.to_string()))?;
            TraceShape { seed: args.seed, ..shape }
        }
    };
    shape.check()?;
    Ok(shape)
}

/// How a mixture's experts were used.
fn in_words(r: &Routing) -> String {
    format!(
        "half of the uses come back within {:.2} tokens, skew {:.2}, in a text {:.2}",
        r.reuse, r.skew, r.skew_in_text
    )
}

/// Makes a trace of a mixture up, and says how its experts are used.
fn mixture(args: &Args, experts: usize, used: usize) -> Result<()> {
    let m = &args.mixture;
    let shape = ExpertTrace {
        layers: m.layers,
        experts,
        used,
        texts: m.texts,
        tokens_per_text: args.max_tokens.unwrap_or(200),
        reuse: m.reuse,
        skew: m.skew,
        topics: m.topics,
        memory: MEMORY,
        recall: m.recall,
        ahead: args.ahead,
        block_bytes: m.expert_bytes as usize,
        seed: args.seed,
    };
    shape.check()?;
    announce(&args.output, shape.bytes())?;
    let progress = Progress::new("making a trace up", Unit::Tokens);
    write_experts(&shape, &args.output, |done, all| progress.step(done, all))?;
    progress.finish();
    let r = Routing::of(&TraceFile::open(&args.output)?);
    eprintln!("{} written: {}, {:.1} % foreseen", args.output.display(), in_words(&r), 100.0 * r.recall);
    Ok(())
}

/// Says how large the trace becomes, which is some thousand times its text, and refuses where there is no room for it.
fn announce(path: &Path, bytes: u64) -> Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(".".as_ref());
    eprintln!("{} becomes {}", path.display(), human_bytes(bytes));
    match free_bytes(dir).filter(|&free| free < bytes) {
        None => Ok(()),
        Some(free) => Err(Error::Failed(format!(
            "{} has {} free; take fewer --max-tokens, or another -o",
            dir.display(),
            human_bytes(free)
        ))),
    }
}
