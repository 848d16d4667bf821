//! Products of weights with the columns of a prompt, on one thread: billions of operations a second (a product and a sum are two) in the
//! time that the thread had a core, as a share of what a loop over registers alone reaches in the same minute, and beside the row kernels.
//! Quantised weights in int8, floats in f32.
//!
//! Run: cargo bench --bench gemm -- [type] [avx512|avxvnni|avx2] [eight]    with `eight` inputs have eight bits everywhere

use dynamicinfer::clock;
use dynamicinfer::cpu::{Columns, FloatPanels, Isa, Kernels, ManyForm, Panels, Rows, ThreadPool, peak};
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::prng::Prng;
use std::hint::black_box;

/// The word for inputs of eight bits where seven would be faster.
const EIGHT: &str = "eight";

/// Rows and numbers of a row.
const SHAPES: [(usize, usize); 3] = [(5632, 2048), (2048, 5632), (2048, 2048)];
const COLUMNS: [usize; 7] = [8, 12, 16, 24, 33, 128, 256];
/// Medians of so many rounds, in which all that is compared takes turns.
const ROUNDS: usize = 7;
/// Rows that a task takes, about.
const TASK: usize = 128;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let isa = Isa::ALL.into_iter().find(|isa| args.iter().any(|arg| arg == isa.name()));
    let mut kernels = isa.map_or_else(Kernels::best, |isa| Kernels::of(isa).expect("this machine does not have it"));
    kernels.seven_bits = !std::env::args().any(|arg| arg == EIGHT);
    println!(
        "| type | rows x numbers | columns | GOPS | of the peak | row kernels, GOPS | ratio | input, us (before) |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for quant in Quant::all() {
        let wanted =
            args.iter().all(|arg| arg == quant.name() || arg == EIGHT || Isa::ALL.iter().any(|isa| isa.name() == arg));
        if wanted && kernels.form(quant, 2048, 256) != ManyForm::Rows {
            SHAPES.into_iter().for_each(|(rows, cols)| measure(&kernels, quant, rows, cols));
        }
    }
}

/// Seconds that this thread computes in `work`.
fn seconds(work: impl FnOnce()) -> f64 {
    let start = clock::computed();
    work();
    (clock::computed() - start).as_secs_f64()
}

fn measure(kernels: &Kernels, quant: Quant, rows: usize, cols: usize) {
    let mut rng = Prng::new(1);
    let mut numbers = |count: usize| -> Vec<f32> { (0..count).map(|_| rng.next_f64() as f32 - 0.5).collect() };
    let (bytes, one) = (quant.row_bytes(cols), numbers(cols));
    let mut row = vec![0u64; bytes / 8];
    rows::encode(quant, &one, bytemuck::cast_slice_mut(&mut row));
    let weights = row.repeat(rows);
    let weights = Rows { first: weights.as_ptr().cast(), stride: bytes, ahead: 0 };
    let mut pool = ThreadPool::new(1);
    for n in COLUMNS {
        let (input, mut y) = (numbers(n * cols), vec![0.0; n * rows]);
        let (mut x, mut panels, mut floats) = (Columns::default(), Panels::default(), FloatPanels::default());
        let mut times = [const { Vec::new() }; 5];
        for _ in 0..ROUNDS {
            times[0].push(seconds(|| match kernels.gemm(quant, kernels.bits(quant, n)) {
                Some(_) => panels.set(Some(&mut pool), kernels, kernels.bits(quant, n), &input, n),
                None => floats.set(Some(&mut pool), &kernels.tiles, &input, n),
            }));
            times[1].push(seconds(|| x.set(&input, n, quant)));
            times[2].push(seconds(|| {
                for first in (0..rows).step_by(TASK) {
                    let pointers: Vec<_> = (first..rows.min(first + TASK)).map(|r| weights.row(r)).collect();
                    // SAFETY: whole rows; the kernels are supported here.
                    unsafe {
                        let y = y.as_mut_ptr().add(first);
                        match kernels.gemm(quant, kernels.bits(quant, n)) {
                            Some(gemm) => gemm(&pointers, black_box(&panels), y, rows),
                            None => kernels.tiles.rows(quant, &pointers, black_box(&floats), y, rows),
                        }
                    }
                }
            }));
            times[3].push(seconds(|| {
                for first in (0..rows).step_by(TASK) {
                    let count = TASK.min(rows - first);
                    // SAFETY: as above.
                    unsafe {
                        kernels.dot(quant)(weights.from(first), count, black_box(&x), y.as_mut_ptr().add(first), rows)
                    };
                }
            }));
            // As seconds for a billion operations, so that the median is found as of the others.
            times[4].push(
                1.0 / peak::gops(kernels.isa, kernels.gemm(quant, kernels.bits(quant, n)).is_none())
                    .unwrap_or(f64::NAN),
            );
        }
        let [set, set_before, gemm, dots, peak] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        let gops = 2e-9 * (rows * cols * n) as f64;
        println!(
            "| {} | {rows} x {cols} | {n} | {:.0} | {:.0} % | {:.0} | {:.2} | {:.0} ({:.0}) |",
            quant.name(),
            gops / gemm,
            100.0 * gops / gemm * peak,
            gops / dots,
            dots / gemm,
            1e6 * set,
            1e6 * set_before
        );
    }
}
