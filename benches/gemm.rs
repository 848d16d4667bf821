//! Products of weights with the columns of a prompt, on one thread: billions of operations a second (a product and a sum are two) in the
//! time that the thread had a core, as a share of what a loop over registers alone reaches in the same minute, and beside the row kernels.
//! Quantised weights in int8, floats of two bytes in codes of 16 bits beside f32, f32 as it is beside the row kernels.
//!
//! Run: cargo bench --bench gemm -- [type] [avx512|avxvnni|avx2] [eight]    with `eight` inputs have eight bits everywhere

use dynamicinfer::clock;
use dynamicinfer::cpu::floats::Form;
use dynamicinfer::cpu::gemm::Gemm;
use dynamicinfer::cpu::peak::{self, Unit};
use dynamicinfer::cpu::sixteen::Sixteen;
use dynamicinfer::cpu::{Bits, Columns, FloatPanels, Isa, Kernels, ManyForm, Panels, Rows, SixteenPanels, ThreadPool};
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
        "| type | rows x numbers | columns | GOPS | of the peak | compared, GOPS | ratio | input, us (compared) |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for quant in Quant::all() {
        let wanted =
            args.iter().all(|arg| arg == quant.name() || arg == EIGHT || Isa::ALL.iter().any(|isa| isa.name() == arg));
        if wanted && kernels.form(quant, 256) != ManyForm::Rows {
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

/// The input of each way to multiply.
#[derive(Default)]
struct Inputs {
    rows: Columns,
    codes: Panels,
    sixteen: SixteenPanels,
    floats: FloatPanels,
}

/// A way to multiply.
#[derive(Clone, Copy)]
enum Way {
    Codes(Gemm, Bits),
    Sixteen(Sixteen, Form),
    Floats,
    Rows,
}

impl Way {
    /// That of a prompt, and that which it is compared with.
    fn both(kernels: &Kernels, quant: Quant, n: usize) -> [Way; 2] {
        let bits = kernels.bits(quant, n);
        let form = Form::of(quant).filter(|form| *form != Form::F32);
        match (kernels.gemm(quant, bits), kernels.sixteen.zip(form)) {
            (Some(gemm), _) => [Way::Codes(gemm, bits), Way::Rows],
            (None, Some((sixteen, form))) => [Way::Sixteen(sixteen, form), Way::Floats],
            (None, None) => [Way::Floats, Way::Rows],
        }
    }

    fn unit(self) -> Unit {
        match self {
            Way::Codes(..) => Unit::Int8,
            Way::Sixteen(..) => Unit::Int16,
            Way::Floats | Way::Rows => Unit::F32,
        }
    }

    fn set(self, kernels: &Kernels, quant: Quant, input: &[f32], n: usize, to: &mut Inputs, pool: &mut ThreadPool) {
        match self {
            Way::Codes(_, bits) => to.codes.set(Some(pool), kernels, bits, input, n),
            Way::Sixteen(sixteen, _) => to.sixteen.set(Some(pool), &kernels.tiles, &sixteen, input, n),
            Way::Floats => to.floats.set(Some(pool), &kernels.tiles, input, n),
            Way::Rows => to.rows.set(input, n, quant),
        }
    }

    fn multiply(self, kernels: &Kernels, quant: Quant, weights: Rows, rows: usize, x: &Inputs, y: &mut [f32]) {
        for first in (0..rows).step_by(TASK) {
            let count = TASK.min(rows - first);
            let pointers: Vec<_> = (first..first + count).map(|r| weights.row(r)).collect();
            let y = y[first..].as_mut_ptr();
            // SAFETY: whole rows; the kernels are supported here.
            unsafe {
                match self {
                    Way::Codes(gemm, _) => gemm(&pointers, black_box(&x.codes), y, rows),
                    Way::Sixteen(sixteen, form) => sixteen.rows(form, &pointers, black_box(&x.sixteen), y, rows),
                    Way::Floats => kernels.tiles.rows(quant, &pointers, black_box(&x.floats), y, rows),
                    Way::Rows => kernels.dot(quant)(weights.from(first), count, black_box(&x.rows), y, rows),
                }
            }
        }
    }
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
        let (mut x, ways) = (Inputs::default(), Way::both(kernels, quant, n));
        let mut times = [const { Vec::new() }; 5];
        for _ in 0..ROUNDS {
            for (i, way) in ways.into_iter().enumerate() {
                times[i].push(seconds(|| way.set(kernels, quant, &input, n, &mut x, &mut pool)));
                times[2 + i].push(seconds(|| way.multiply(kernels, quant, weights, rows, &x, &mut y)));
            }
            // As seconds for a billion operations, so that the median is found as of the others.
            times[4].push(1.0 / peak::gops(kernels.isa, ways[0].unit()).unwrap_or(f64::NAN));
        }
        let [set, set_other, many, other, peak] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        let gops = 2e-9 * (rows * cols * n) as f64;
        println!(
            "| {} | {rows} x {cols} | {n} | {:.0} | {:.0} % | {:.0} | {:.2} | {:.0} ({:.0}) |",
            quant.name(),
            gops / many,
            100.0 * gops / many * peak,
            gops / other,
            other / many,
            1e6 * set,
            1e6 * set_other
        );
    }
}
