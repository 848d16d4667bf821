use super::machine_arg;
use crate::device::MoveRate;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::lab::measure::{Assumed, READ_BYTES, ReadBuffer, gflops, profile};
use std::path::PathBuf;

/// Measure how fast this machine reads memory: the limit of every decoding speed
///
/// Reads 2 GiB (half of what is free, where that is less) several times per thread count; the best pass counts. An NVIDIA card, if there is
/// one that can be used, is measured, too: its memory, and copies from and to pinned host memory. --save measures the processor's
/// arithmetic and the cost of a call, too, and writes it all down as a machine profile, which `plan` reads. Without a card give its
/// figures, or a small one is assumed; the profile says which figures are assumed.
#[derive(clap::Args)]
pub struct Args {
    /// Thread counts to measure [default: 1 and one per core]
    #[arg(short, long, value_delimiter = ',')]
    threads: Vec<usize>,
    /// Write a machine profile: a name, or a .toml file
    #[arg(long, value_name = "NAME")]
    save: Option<PathBuf>,
    /// 10^9 bytes per second that the device reads from its memory
    #[arg(long, requires = "save", allow_negative_numbers = true)]
    device_gb_s: Option<f64>,
    /// 10^9 bytes per second over the link to the device
    #[arg(long, requires = "save", allow_negative_numbers = true)]
    link_gb_s: Option<f64>,
    /// Microseconds to start a copy over the link
    #[arg(long, requires = "save", allow_negative_numbers = true)]
    copy_us: Option<f64>,
    /// Microseconds to wait for the device once
    #[arg(long, requires = "save", allow_negative_numbers = true)]
    sync_us: Option<f64>,
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
    let save = args.save.map(|save| Ok::<_, Error>((machine_arg::name_of(&save), machine_arg::write_path(&save)?)));
    let save = save.transpose()?;
    let assumed = Assumed {
        device_gb_s: args.device_gb_s,
        link_gb_s: args.link_gb_s,
        copy_us: args.copy_us,
        sync_us: args.sync_us,
    };
    if let Some((name, _)) = &save {
        // A figure that cannot be is refused before anything is measured.
        profile(name, 1, 1.0, 1.0, None, assumed)?;
    }
    let buffer = ReadBuffer::new(READ_BYTES, crate::config::available_memory())?;
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
    let card = crate::open::cuda::rates();
    match &card {
        _ if args.json => super::print_json(&serde_json::json!({ "read": measured, "card": card.as_ref().ok() }))?,
        Ok(card) => super::print(&format!(
            "card: memory {:.1} GB/s read and written, link {:.2} GB/s there and {:.2} back, {:.1} us for a copy, {:.1} for a wait\n{}",
            card.device_gb_s,
            card.link_gb_s,
            card.back_gb_s,
            card.copy_us,
            card.sync_us,
            ways(&card.moves)
        ))?,
        Err(why) => eprintln!("no card was measured: {why}"),
    }
    if let Some((name, path)) = save {
        let most = measured.iter().map(|rate| rate.threads).max().unwrap_or(1);
        let fastest = measured.iter().max_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s)).expect("one at least");
        let machine = profile(&name, fastest.threads, fastest.gb_per_s, gflops(most), card.ok(), assumed)?;
        machine.write(&path)?;
        eprintln!("{}", machine_arg::describe(&machine));
        eprintln!("written to {}", path.display());
    }
    Ok(())
}

/// The ways that neuron blocks can take, a line each, with what a few and many blocks take.
pub fn ways(rates: &[MoveRate]) -> String {
    const BLOCK: u64 = 24 << 10;
    let line = |rate: &MoveRate| {
        let us = |blocks: u64| rate.us(blocks as usize, blocks * BLOCK);
        format!(
            "moves, {:7}: {:.1} us a group, {:.2} a block, {:.2} GB/s; 1, 16, 256 blocks of 24 KiB in {:.0}, {:.0}, {:.0} us\n",
            rate.method.name(),
            rate.group_us,
            rate.piece_us,
            rate.gb_s,
            us(1),
            us(16),
            us(256)
        )
    };
    rates.iter().map(line).collect()
}
