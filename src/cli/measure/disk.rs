//! `measure --disk`.

use crate::disk::{DiskRate, OpenedDisk, TwoParts, curve, open, two_parts};
use crate::error::{Error, Result, printable};
use comfy_table::{CellAlignment, Table};
use serde_json::json;
use std::path::Path;

/// The shapes of neurons that are read in two parts: bytes of gate, and of up and down. Hidden 4096 in four bits, in two reads of a page each,
/// as in the paper; and hidden 8192.
const NEURONS: [(usize, usize); 2] = [(4 << 10, 4 << 10), (8 << 10, 8 << 10)];
/// Shares of gates that fire.
const FIRES: [f64; 4] = [0.9, 0.5, 0.2, 0.1];
/// Neurons that are read.
const COUNT: usize = 2048;

pub fn run(path: &Path, json: bool) -> Result<()> {
    let (file, meta) = crate::formats::open_regular(path)?;
    let bytes = meta.len();
    let OpenedDisk { mut disk, notice } = open(&[&file]).map_err(Error::io("open", path))?;
    if let Some(notice) = &notice {
        eprintln!("{notice}");
    }
    let too_short = || {
        let path = printable(&path.to_string_lossy());
        Error::Usage(format!("--disk {path}: reads failed, or the file is too short; give the file of a model"))
    };
    let rates = curve(&mut *disk, 0, bytes).ok_or_else(too_short)?;
    let all = NEURONS.iter().flat_map(|&neuron| FIRES.map(|fires| (neuron, fires)));
    let parts: Option<Vec<((usize, usize), TwoParts)>> =
        all.map(|(neuron, fires)| Some((neuron, two_parts(&mut *disk, (0, bytes), neuron, fires, COUNT)?))).collect();
    let parts = parts.ok_or_else(too_short)?;
    if json {
        let row = |((gate, rest), parts): &((usize, usize), TwoParts)| json!({ "first_bytes": gate, "second_bytes": rest, "times": parts });
        let parts: Vec<_> = parts.iter().map(row).collect();
        return crate::cli::print_json(&json!({ "disk": disk.name(), "rates": rates, "two_parts": parts }));
    }
    crate::cli::print(&format!("{}\n{}\n\n{}\n", disk.name(), of_rates(&rates), of_parts(&parts)))
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header);
    table
}

fn right(mut table: Table) -> Table {
    table.column_iter_mut().for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

fn of_rates(rates: &[DiskRate]) -> Table {
    let mut at_once: Vec<usize> = rates.iter().map(|rate| rate.at_once).collect();
    at_once.sort_unstable();
    at_once.dedup();
    let head: Vec<String> = at_once.iter().map(|n| format!("{n} at once")).collect();
    let mut table = table(&["GB/s of reads of"].into_iter().chain(head.iter().map(String::as_str)).collect::<Vec<_>>());
    for same in rates.chunk_by(|a, b| a.bytes == b.bytes) {
        let of = |n: &usize| {
            same.iter().find(|rate| rate.at_once == *n).map_or(String::new(), |rate| format!("{:.2}", rate.gb_s))
        };
        let name = format!("{} KiB", same[0].bytes >> 10);
        table.add_row(std::iter::once(name).chain(at_once.iter().map(of)));
    }
    right(table)
}

fn of_parts(parts: &[((usize, usize), TwoParts)]) -> Table {
    let mut table = table(&["a neuron of", "gates that fire", "whole, us", "in two parts, us", "parts / whole"]);
    for ((gate, rest), TwoParts { fires, whole_us, parts_us }) in parts {
        table.add_row([
            format!("{} + {} KiB", gate >> 10, rest >> 10),
            format!("{:.0} %", 100.0 * fires),
            format!("{whole_us:.1}"),
            format!("{parts_us:.1}"),
            format!("{:.2}", parts_us / whole_us),
        ]);
    }
    right(table)
}
