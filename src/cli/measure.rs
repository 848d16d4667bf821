mod disk;

use super::machine_arg;
use crate::clock;
use crate::config::{ProcessorTime, processor_time};
use crate::cpu::{Kernels, peak};
use crate::device::MoveRate;
use crate::error::{Error, Result};
use crate::formats::machine_profile::{MachineProfile, Rate};
use crate::interrupt;
use crate::machine::measure::{
    Assumed, HostRates, READ_BYTES, ReadBuffer, Repeated, call_us, gflops, peak_gops, profile,
};
use std::path::{Path, PathBuf};

/// Measure the memory rate of this machine, and its GPU
///
/// Reads 2 GiB (or half of the free memory, if that is less) several times per thread count; the best pass counts. A usable NVIDIA GPU is
/// measured, too: its memory, products, and copies from and to pinned host memory. --save measures the processor's memory, arithmetic and
/// the cost of a call five times, and writes the medians to a machine profile, which `plan` reads; figures disturbed by other processes are
/// not saved. Without a GPU give its figures, or a small one is assumed; the profile marks assumed figures.
#[derive(clap::Args)]
pub struct Args {
    /// Thread counts to measure [default: 1 and one per core]
    #[arg(short, long, value_delimiter = ',')]
    threads: Vec<usize>,
    /// Measure the disk of this file instead; the file must be much larger than 100 MB, such as a model
    ///
    /// Random reads of several lengths and queue depths, and the time of reading a neuron in two parts.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["threads", "save"])]
    disk: Option<PathBuf>,
    /// Write a machine profile: a name, or a .toml file
    #[arg(long, value_name = "NAME")]
    save: Option<PathBuf>,
    /// Save the profile even if its figures scatter, or differ much from the saved ones
    #[arg(short, long, requires = "save")]
    force: bool,
    /// Rate at which the device reads its memory, 10^9 bytes per second
    #[arg(long, requires = "save", allow_negative_numbers = true)]
    device_gb_s: Option<f64>,
    /// Rate of the device in a prompt's products, 10^9 multiplications and additions per second, each counted
    #[arg(long, requires = "save", allow_negative_numbers = true)]
    device_gflops: Option<f64>,
    /// Rate of the link to the device, 10^9 bytes per second
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
    if let Some(file) = &args.disk {
        return disk::run(file, args.json);
    }
    let mut threads = args.threads;
    if threads.is_empty() {
        threads = vec![1, crate::config::default_threads()];
        threads.dedup();
    }
    if let Some(bad) = threads.iter().find(|&&t| t == 0 || t > 1024) {
        return Err(Error::Usage(format!("--threads {bad}: give 1 to 1024")));
    }
    let save = args.save.map(|save| Ok::<_, Error>((machine_arg::name_of(&save), machine_arg::write_path(&save)?)));
    let save = save.transpose()?;
    let assumed = Assumed {
        device_gb_s: args.device_gb_s,
        device_gflops: args.device_gflops,
        link_gb_s: args.link_gb_s,
        copy_us: args.copy_us,
        sync_us: args.sync_us,
    };
    if let Some((name, _)) = &save {
        // A figure that cannot be is refused before anything is measured.
        profile(name, 1, HostRates { dram_gb_s: 1.0, gflops: 1.0, call_us: 1.0 }, None, assumed)?;
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
    let units = units(measured.iter().map(|rate| rate.threads).max().unwrap_or(1));
    if !args.json {
        units.iter().try_for_each(|unit| super::print(&unit.line()))?;
    }
    let card = crate::open::cuda::rates();
    match &card {
        _ if args.json => {
            super::print_json(&serde_json::json!({ "read": measured, "units": units, "card": card.as_ref().ok() }))?
        }
        Ok(card) => super::print(&format!(
            "card: memory {:.1} GB/s read and written, {:.0} GFLOP/s of products in f16, link {:.2} GB/s there and {:.2} back, {:.1} us for a copy, {:.1} for a wait\n{}",
            card.device_gb_s,
            card.device_gflops,
            card.link_gb_s,
            card.back_gb_s,
            card.copy_us,
            card.sync_us,
            ways(&card.moves)
        ))?,
        Err(why) => eprintln!("no GPU was measured: {why}"),
    }
    if let Some((name, path)) = save {
        let most = measured.iter().map(|rate| rate.threads).max().unwrap_or(1);
        let fastest = measured.iter().max_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s)).expect("one at least").threads;
        let (before, start) = (processor_time(), clock::now());
        let host = rounds(&buffer, fastest, most)?;
        let others = busy_besides(before.zip(processor_time()), start.elapsed().as_secs_f64(), most);
        let median = |at: usize| host[at].1.median();
        let rates = HostRates { dram_gb_s: median(0), gflops: median(1), call_us: median(2) };
        let machine = profile(&name, fastest, rates, card.ok(), assumed)?;
        if !args.force {
            check(&host, others, &machine, &path)?;
        }
        machine.write(&path)?;
        eprintln!("{}", machine_arg::describe(&machine));
        eprintln!("written to {}", path.display());
    }
    Ok(())
}

/// What a kind of multiplying unit reaches with nothing to load.
#[derive(serde::Serialize)]
struct UnitPeak {
    threads: usize,
    instruction_set: &'static str,
    /// `int8` or `f32`.
    numbers: &'static str,
    /// 10^9 multiplications and additions per second.
    gops: f64,
    /// Products of one instruction.
    width: usize,
    /// Clock rate of a computing core, measured next to it.
    clock_ghz: Option<f64>,
}

impl UnitPeak {
    fn line(&self) -> String {
        let UnitPeak { threads, instruction_set, numbers, gops, width, clock_ghz } = self;
        // A product and a sum are two.
        let cycles = |ghz: &f64| {
            let instructions = gops / 2.0 / (*width * *threads) as f64 / ghz;
            format!(": {instructions:.2} instructions of {width} products a cycle at {ghz:.2} GHz")
        };
        format!(
            "products of {numbers}, {threads} thread{}: {gops:.0} GOPS at most, by {instruction_set} in registers{}\n",
            if *threads == 1 { "" } else { "s" },
            clock_ghz.as_ref().map_or(String::new(), cycles)
        )
    }
}

/// Of this processor's best instruction set, of codes of either size and of floats.
fn units(threads: usize) -> Vec<UnitPeak> {
    let isa = Kernels::best().isa;
    let of = |unit: peak::Unit| {
        let gops = peak_gops(threads, isa, unit)?;
        // The fastest of a few, as of the products.
        let clocks = (0..4).filter_map(|_| peak::clock_ghz());
        Some(UnitPeak {
            threads,
            instruction_set: isa.name(),
            numbers: unit.name(),
            gops,
            width: peak::width(isa, unit),
            clock_ghz: clocks.max_by(f64::total_cmp),
        })
    };
    peak::Unit::ALL.into_iter().filter_map(of).collect()
}

/// Measures the processor's rates for a profile, each in several rounds, and reports their spread.
fn rounds(buffer: &ReadBuffer, fastest: usize, most: usize) -> Result<[(Rate, Repeated); 3]> {
    let measured = |rate: Rate, measure: &dyn Fn() -> f64| {
        let rounds = Repeated::of(|| interrupt::check().map(|()| measure()))?;
        let [from, to] = rounds.range();
        eprintln!("{:12} {:.2}, from {from:.2} to {to:.2} in {} rounds", rate.name(), rounds.median(), rounds.0.len());
        Ok::<_, Error>((rate, rounds))
    };
    Ok([
        measured(Rate::DramGbS, &|| buffer.measure(fastest).gb_per_s)?,
        measured(Rate::HostGflops, &|| gflops(most))?,
        measured(Rate::CallUs, &|| call_us(fastest))?,
    ])
}

/// What other processes took of the processors that were measured, in words; `None` if they left them alone.
fn busy_besides(times: Option<(ProcessorTime, ProcessorTime)>, seconds: f64, threads: usize) -> Option<String> {
    let (before, after) = times?;
    let others = ((after.all - before.all) - (after.own - before.own)) / seconds;
    let processors = after.processors as f64;
    // A quarter of one is what an idle desktop takes.
    let disturbed = others > (processors - threads as f64).max(0.0) + 0.25;
    disturbed.then(|| format!("other processes took {others:.1} of {processors} processors meanwhile"))
}

/// Refuses figures that other work has disturbed: what it took of the processors says so, or they are far apart, or half of what the profile
/// has.
fn check(host: &[(Rate, Repeated)], others: Option<String>, machine: &MachineProfile, path: &Path) -> Result<()> {
    let of_rounds = host.iter().filter_map(|(rate, rounds)| rounds.check(*rate).err());
    let mut odd: Vec<String> = others.into_iter().chain(of_rounds).collect();
    if let Some(before) = MachineProfile::read(path).ok().filter(|before| before.measured.contains(&Rate::DramGbS)) {
        for rate in [Rate::DramGbS, Rate::HostGflops] {
            let (now, then) = (machine.rate(rate), before.rate(rate));
            if now < then / 2.0 {
                odd.push(format!("{} {now:.2}, and the profile has {then:.2}", rate.name()));
            }
        }
    }
    if odd.is_empty() {
        return Ok(());
    }
    Err(Error::Failed(format!(
        "not saved, because other processes use this machine: {}; measure again when it is idle, or add --force",
        odd.join("; ")
    )))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_beside_a_measurement_is_told_where_it_takes_its_processors() {
        let time = |all, own| ProcessorTime { all, own, processors: 4 };
        let besides = |all: f64, threads| busy_besides(Some((time(10.0, 1.0), time(10.0 + all, 5.0))), 2.0, threads);
        assert_eq!(besides(4.2, 4), None, "four seconds of ours, and 0.1 of another's each second");
        assert_eq!(besides(8.0, 4).unwrap(), "other processes took 2.0 of 4 processors meanwhile");
        assert_eq!(besides(8.0, 2), None, "two were left");
        assert_eq!(busy_besides(None, 2.0, 4), None);
    }
}
