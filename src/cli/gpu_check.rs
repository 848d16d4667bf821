use super::model_arg::Terminal;
use crate::cpu::MAX_COLUMNS;
use crate::device::cuda::Card;
use crate::device::{Device, Tiles};
use crate::error::{Error, Result};
use crate::machine::kernel_check::{agreements, launching, speeds};
use crate::machine::measure_card;
use crate::open::cuda::{device, error};
use serde_json::json;

/// Compare a GPU's kernels with the CPU's, and time them
///
/// Needs about 4 GiB of GPU memory. `tools/gpu_check` runs this and all other checks that need a GPU, and keeps the results.
#[derive(clap::Args)]
pub struct Args {
    /// Only compare, without timing
    #[arg(long)]
    no_speed: bool,
    #[arg(long)]
    json: bool,
}

/// More than twice this is read between two reads of the same bytes: no GPU has a larger L2 yet.
const L2_BYTES: u64 = 128 << 20;

pub fn run(args: Args) -> Result<()> {
    let card = Card::open().map_err(error)?;
    let budget = card.free / 16 * 15;
    let (name, peak) = (card.name.clone(), card.peak_tflop_s());
    let mut device = device(card, budget, (true, Some(Tiles::Lanes), false), &Terminal)?;
    let (mut rates, mut layer) = (None, None);
    if !args.no_speed {
        layer = Some(launching(&mut device)?);
        rates = Some(measure_card::card(&mut device, None)?);
    }
    let (mut rows, mut times) = (Vec::new(), Vec::new());
    for tiles in [Tiles::Lanes, Tiles::TensorCores] {
        device.use_tiles(tiles);
        rows.extend(agreements(&mut device, tiles)?);
        if !args.no_speed {
            times.extend(speeds(&mut device, tiles, L2_BYTES, 1)?);
        }
    }
    let wrong = rows.iter().filter(|row| row.off > row.most).count();
    let left = device.memory().used;
    if args.json {
        super::print_json(
            &json!({ "card": name, "f32_tflop_s": peak, "kernels": rows, "rates": rates, "launching": layer, "speeds": times }),
        )?;
    } else {
        let mut text = String::new();
        for row in &rows {
            let verdict = if row.off > row.most { "WRONG" } else { "ok" };
            text += &format!("{verdict:6} {:28} {:3} columns  off by {:.1e}\n", row.kernel, row.columns, row.off);
        }
        if let Some(layer) = &layer {
            text += &format!(
                "launching: {} small calls in {:.1} us, as graphs (--graphs on) in {:.1} us\n",
                layer.calls, layer.one_by_one_us, layer.graphs_us
            );
        }
        if let Some(rates) = &rates {
            text += &format!(
                "copies on the card {:.0} GB/s, to it {:.1}, from it {:.1}\n",
                rates.device_gb_s, rates.link_gb_s, rates.back_gb_s
            );
            text += &super::measure::ways(&rates.moves);
            for s in &times {
                // Few columns wait for memory, a prompt's for arithmetic.
                let share = match peak {
                    Some(peak) if s.columns > MAX_COLUMNS => format!("{:3.0} % of f32", 100.0 * s.tflop_s / peak),
                    _ => format!("{:3.0} % of copying", 100.0 * s.gb_s / rates.device_gb_s),
                };
                text += &format!(
                    "{:9} {:23} {:3} columns  {:9.1} us  {:6.0} GB/s  {:6.2} TFLOP/s  {share}\n",
                    s.shape, s.kernel, s.columns, s.us, s.gb_s, s.tflop_s
                );
            }
        }
        super::print(&text)?;
    }
    if left != 0 {
        return Err(Error::Failed(format!("{left} bytes of GPU memory were not freed")));
    }
    if wrong > 0 {
        return Err(Error::Failed(format!(
            "{wrong} of {} kernels give wrong results on this GPU; please report it",
            rows.len()
        )));
    }
    Ok(())
}
