use crate::error::{Error, Result};
use crate::interrupt;
use crate::lab::measure::ReadBuffer;

/// Measure how fast this machine reads memory: the limit of every decoding speed
///
/// Reads 2 GiB several times per thread count; the best pass counts.
#[derive(clap::Args)]
pub struct Args {
    /// Thread counts to measure [default: 1 and one per core]
    #[arg(short, long, value_delimiter = ',')]
    threads: Vec<usize>,
    /// Machine-readable
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<()> {
    let mut threads = args.threads;
    if threads.is_empty() {
        threads = vec![1, crate::config::default_threads()];
        threads.dedup();
    }
    if let Some(bad) = threads.iter().find(|&&t| t == 0 || t > 1024) {
        return Err(Error::Usage(format!("--threads {bad}: take 1 to 1024")));
    }
    let buffer = ReadBuffer::new()?;
    let mut measured = Vec::new();
    for threads in threads {
        interrupt::check()?;
        let rate = buffer.measure(threads);
        if !args.json {
            super::print(&format!(
                "read, {threads} thread{}: {:.1} GB/s (worst pass {:.1})\n",
                if threads == 1 { "" } else { "s" },
                rate.gb_per_s,
                rate.worst_gb_per_s
            ))?;
        }
        measured.push(rate);
    }
    if args.json { super::print_json(&serde_json::json!({ "read": measured })) } else { Ok(()) }
}
