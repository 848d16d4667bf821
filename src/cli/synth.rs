use super::model_arg::{check_room, parse_activation};
use super::progress::{Progress, Unit};
use crate::error::{Error, Result};
use crate::formats::rows::Quant;
use crate::lab::synth::{Shape, write_gguf, write_store};
use crate::model::Activation;
use std::path::PathBuf;

/// Make a model of any shape with random weights, to measure speed without a download
///
/// The text it writes is noise. Its tokeniser has every byte, so any prompt works.
#[derive(clap::Args)]
pub struct Args {
    /// File to write; its ending chooses the form: .neurons or .gguf
    #[arg(short, long)]
    output: PathBuf,
    #[arg(long, default_value_t = 2048)]
    hidden: usize,
    #[arg(long, default_value_t = 16)]
    layers: usize,
    /// Neurons a layer
    #[arg(long, default_value_t = 5504)]
    ffn: usize,
    #[arg(long, default_value_t = 16)]
    heads: usize,
    #[arg(long, default_value_t = 16)]
    kv_heads: usize,
    #[arg(long, default_value_t = 32000)]
    vocab: usize,
    #[arg(short, long = "ctx-size", default_value_t = 4096)]
    context: usize,
    /// Type of the weights: f32, f16, q8_0 or q4_0
    #[arg(long, default_value = "f16")]
    quant: Quant,
    /// relu, fatrelu(t), relu2, silu or gelu
    #[arg(long, default_value = "relu", value_parser = parse_activation)]
    activation: Activation,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Replace the file if it is there
    #[arg(short, long)]
    force: bool,
}

pub fn run(args: Args) -> Result<()> {
    let (output, quant) = (&args.output, args.quant);
    if output.exists() && !args.force {
        return Err(Error::Usage(format!("{} is there already; add --force to replace it", output.display())));
    }
    let shape = Shape {
        hidden: args.hidden,
        layers: args.layers,
        ffn: args.ffn,
        heads: args.heads,
        kv_heads: args.kv_heads,
        vocab: args.vocab,
        context: args.context,
        activation: args.activation,
        seed: args.seed,
    };
    let config = shape.config()?;
    let dir = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(".".as_ref());
    check_room(dir, config.parameters() * quant.row_bytes(config.hidden) as u64 / config.hidden as u64)?;
    let what = format!("writing {:.2} B random weights as {}", config.parameters() as f64 / 1e9, quant.name());
    let progress = Progress::new(what, Unit::Bytes);
    let step = |done, total| progress.step(done, total);
    match output.extension().and_then(|e| e.to_str()) {
        Some("neurons") => write_store(&shape, quant, output, &step)?,
        Some("gguf") => write_gguf(&shape, quant, output, &step)?,
        _ => {
            let why = "the ending chooses the form: .neurons or .gguf";
            return Err(Error::Usage(format!("--output {}: {why}", output.display())));
        }
    }
    progress.finish();
    let bytes = std::fs::metadata(output).map_err(Error::io("stat", output))?.len();
    eprintln!("{} written, {}", output.display(), super::human_bytes(bytes));
    Ok(())
}
