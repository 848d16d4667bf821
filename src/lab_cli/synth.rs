use crate::cli::model_arg::parse_activation;
use crate::cli::progress::{Progress, Unit};
use crate::error::{Error, Result};
use crate::formats::gguf_writer;
use crate::formats::neuron_store;
use crate::formats::rows::Quant;
use crate::lab::synth::{
    Draft, Law, Mixture, Routing, SMALLEST_RANK, Shape, Statistics, pack_draft, write_gguf, write_predictor_of_rank,
    write_store,
};
use crate::model::{Activation, NamedActivation};
use crate::open::artifacts::Kind;
use crate::open::model::check_room;
use serde_json::json;
use std::path::{Path, PathBuf};

/// Make a model of any shape with random weights
///
/// The text it writes is noise. Its tokeniser has every byte, so any prompt works. Shape, type and seed say every number:
/// the .gguf and the .neurons file of the same ones hold the same model.
///
/// Plain random weights have half of all neurons active, each equally often. With --active the model is sparse as trained
/// ReLU models are: a few neurons are active often and most rarely (a power law), which ones changes from token to token,
/// and it can be predicted. The `mlp` predictor that fits is written beside the model as NAME.mlp.predictor, and what model
/// and predictor reach on random tokens is printed. Such a model shows what sparse execution is worth in speed; it says
/// nothing about the quality of text.
///
/// In a mixture each token has experts of its own, and all experts are as frequent as any; with --active their neurons are sparse, and `pack`
/// makes a store of which only those are read that fire. --skew and --reuse plant another routing
/// in the weights, and what was planted is printed; `record` says what the model then does on a text.
#[derive(clap::Args)]
pub struct Args {
    /// File to write; its ending chooses the form: .neurons or .gguf
    #[arg(short, long)]
    output: PathBuf,
    #[arg(long, default_value_t = 2048)]
    hidden: usize,
    #[arg(long, default_value_t = 16)]
    layers: usize,
    /// Neurons a layer, or of an expert
    #[arg(long, default_value_t = 5504)]
    ffn: usize,
    /// Makes each FFN a mixture of so many experts of --ffn neurons each, in a .gguf
    #[arg(long, value_name = "N", requires = "experts_used")]
    experts: Option<usize>,
    /// How many of the experts a token has
    #[arg(long, value_name = "N", requires = "experts")]
    experts_used: Option<usize>,
    /// Of a mixture: how uneven its experts are used, as minus the slope of log frequency over log rank
    #[arg(long, value_name = "POWER", requires = "experts")]
    skew: Option<f64>,
    /// Of a mixture: half of the uses of experts come back within so many tokens
    #[arg(long, value_name = "TOKENS", requires = "experts")]
    reuse: Option<f64>,
    #[arg(long, default_value_t = 16)]
    heads: usize,
    #[arg(long, default_value_t = 16)]
    kv_heads: usize,
    #[arg(long, default_value_t = 32000)]
    vocab: usize,
    #[arg(short, long = "ctx-size", default_value_t = 4096)]
    context: usize,
    /// Type of the weights: f32, f16, q8_0, q4_0, q4_k, q6_k and so on
    #[arg(long, default_value = "f16")]
    quant: Quant,
    /// relu, fatrelu(t), relu2, silu or gelu
    #[arg(long, default_value = "relu", value_parser = parse_function)]
    activation: Activation,
    /// Mean share of neurons that are active for a token, 0.01 to 0.5; 0.10 is usual for ReLU models. Needs relu or relu2
    #[arg(long, value_name = "SHARE")]
    active: Option<f64>,
    /// Rank of the predictor's networks, a multiple of 32: as large as a trained one's, they cost as much and predict the same [default: 32, the
    /// smallest]
    #[arg(long, value_name = "RANK", requires = "active", hide_short_help = true)]
    predictor_rank: Option<usize>,
    /// Channels that are 20 to 100 times as large as the others where matrices read them, in a model that computes the same
    #[arg(long, value_name = "N", default_value_t = 0)]
    outliers: usize,
    /// Other seeds give other numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads that run the model to calibrate its predictor [default: one per core]
    #[arg(short, long)]
    threads: Option<usize>,
    /// Replace the files if they are there
    #[arg(short, long)]
    force: bool,
    /// What was written and measured as JSON on stdout
    #[arg(long)]
    json: bool,
}

fn parse_function(text: &str) -> Result<Activation, String> {
    match parse_activation(text)? {
        NamedActivation { function, both: false } => Ok(function),
        NamedActivation { both: true, .. } => Err("no model is made with drelu; take relu".into()),
    }
}

pub fn run(args: Args) -> Result<()> {
    let (output, quant) = (&args.output, args.quant);
    let predictor = output.with_extension(Kind::MlpPredictor.file_name());
    let (predicts, rank) = (args.active.is_some(), args.predictor_rank.unwrap_or(SMALLEST_RANK));
    for path in [Some(output), predicts.then_some(&predictor)].into_iter().flatten() {
        if path.exists() && !args.force {
            return Err(Error::Usage(format!("{} is there already; add --force to replace it", path.display())));
        }
    }
    let threads = args.threads.unwrap_or_else(crate::config::default_threads);
    if threads == 0 || threads > 1024 {
        return Err(Error::Usage(format!("--threads {threads}: take 1 to 1024")));
    }
    let gguf = match output.extension().and_then(|e| e.to_str()) {
        Some(neuron_store::EXTENSION) => false,
        Some(gguf_writer::EXTENSION) => true,
        _ => {
            let why = "the ending chooses the form: .neurons or .gguf";
            return Err(Error::Usage(format!("--output {}: {why}", output.display())));
        }
    };
    let shape = Shape {
        hidden: args.hidden,
        layers: args.layers,
        ffn: args.ffn,
        heads: args.heads,
        kv_heads: args.kv_heads,
        vocab: args.vocab,
        context: args.context,
        activation: args.activation,
        active: args.active,
        seed: args.seed,
        outliers: args.outliers,
        experts: mixture(&args),
    };
    let config = shape.config()?;
    let law = shape.law()?;
    let dir = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(".".as_ref());
    // A GGUF is packed for a while to calibrate its predictor.
    let packs = gguf && predicts && args.experts.is_none();
    let copies = if packs { 2 } else { 1 };
    check_room(dir, copies * config.parameters() * quant.row_bytes(config.hidden) as u64 / config.hidden as u64)?;
    let what = format!("writing {:.2} B random weights as {}", config.parameters() as f64 / 1e9, quant.name());
    let progress = Progress::new(what, Unit::Bytes);
    let step = |done, total| progress.step(done, total);
    if gguf {
        write_gguf(&shape, quant, output, &step)?;
    } else {
        write_store(&shape, quant, output, &step)?;
    }
    progress.finish();
    let bytes = size(output)?;
    eprintln!("{} written, {}", output.display(), crate::error::human_bytes(bytes));
    let mut report = json!({ "output": output, "bytes": bytes, "parameters": config.parameters(), "seed": args.seed });
    if let Some(law) = law {
        eprintln!("{}", planted(&law));
        report["routing"] = json!(law);
    }
    if predicts {
        let statistics = calibrate(&shape, output, packs, &predictor, (threads, rank))?;
        tell(&statistics, &predictor)?;
        report["predictor"] = json!(predictor);
        report["statistics"] = json!(statistics);
    }
    if args.json { crate::cli::print_json(&report) } else { Ok(()) }
}

fn mixture(args: &Args) -> Option<Mixture> {
    let planted = args.skew.is_some() || args.reuse.is_some();
    let routing = planted.then(|| Routing { skew: args.skew.unwrap_or(0.0), reuse: args.reuse });
    args.experts.zip(args.experts_used).map(|(count, used)| Mixture { count, used, routing })
}

/// What was planted, in words.
fn planted(law: &Law) -> String {
    format!(
        "planted: routers begin {:.2} lower for each power of e of an expert's rank and see the last tokens {:.2} times as \
         strong as a token; where no token comes again, half of the uses come back within {:.1} tokens ({:.1} without the last \
         tokens), skew {:.2}; `record` says what they do on a text",
        law.bias, law.past, law.reuse, law.reuse_by_chance, law.skew
    )
}

/// Makes the predictor of the model that was written.
fn calibrate(shape: &Shape, output: &Path, packs: bool, predictor: &Path, how: (usize, usize)) -> Result<Statistics> {
    let draft: Option<Draft> = if packs {
        let progress = Progress::new("packing it to calibrate its predictor", Unit::Bytes);
        let draft = pack_draft(output, &|done, total| progress.step(done, total))?;
        progress.finish();
        Some(draft)
    } else {
        None
    };
    let store = draft.as_ref().map_or(output, |draft| draft.path());
    let progress = Progress::new("calibrating its predictor", Unit::Tokens);
    let statistics = write_predictor_of_rank(shape, store, predictor, how, &|done, total| progress.step(done, total))?;
    progress.finish();
    Ok(statistics)
}

fn tell(s: &Statistics, predictor: &Path) -> Result<()> {
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    let least = s.active_share_by_layer.iter().copied().fold(1.0, f64::min);
    let most = s.active_share_by_layer.iter().copied().fold(0.0, f64::max);
    eprintln!(
        "active: {} of neurons (layers {} to {}); the top 40 % make {} of activations; neighbouring tokens are {:.3} apart \
         (Jaccard)",
        percent(s.active_share),
        percent(least),
        percent(most),
        percent(s.top_40_share),
        s.neighbour_jaccard
    );
    let bytes = size(predictor)?;
    let share = s.predictor_bytes_per_token as f64 / s.model_bytes_per_token as f64;
    eprintln!(
        "{} written, {}; a token reads {} of the model's bytes for it",
        predictor.display(),
        crate::error::human_bytes(bytes),
        percent(share)
    );
    for d in &s.predictor {
        let from = match d.ahead {
            0 => "from the layer's own residual".to_owned(),
            1 => "from 1 layer before".to_owned(),
            n => format!("from {n} layers before"),
        };
        eprintln!(
            "{from}: recall {} (worst layer {}), precision {}, computed {} at threshold {}",
            percent(d.recall),
            percent(d.worst_recall),
            percent(d.precision),
            percent(d.computed_share),
            s.threshold
        );
    }
    Ok(())
}

fn size(path: &Path) -> Result<u64> {
    Ok(std::fs::metadata(path).map_err(Error::io("stat", path))?.len())
}
