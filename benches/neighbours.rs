//! Every type of rows in every form on every instruction set, beside its neighbours: the other types in the same form and set. What takes more
//! than three times as long as the one in the middle is an outlier; each is named, and makes the program fail unless it is [`KNOWN`].
//!
//! Arithmetic is in numbers of weights per second, times columns, on one thread, from rows that lie in L2. What comes from memory is in bytes
//! per second, by two threads, as `doctor` measures it.
//!
//! Run: cargo bench --bench neighbours -- [instruction set]...

use dynamicinfer::clock;
use dynamicinfer::cpu::floats::Room;
use dynamicinfer::cpu::{Columns, Isa, Kernels, MAX_AXPY_ROWS, Prefill, Rows, ThreadPool};
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::machine::kernel_choice::Trial;
use dynamicinfer::prng::Prng;
use std::collections::BTreeMap;
use std::hint::black_box;

/// Numbers of a row, and rows: of f32 they fill half of an L2 of 1 MiB.
const COLS: usize = 2048;
const ROWS: usize = 64;
/// Columns of a prompt: with fewer than 48, floats have the form of a few.
const PROMPT: usize = 64;
/// So much slower than the type in the middle is an outlier.
const TIMES: f64 = 3.0;
/// Outliers whose reason is known: instruction set, type and form; an empty text is any.
const KNOWN: [([&str; 3], &str); 5] = [
    (["avx512", "f32", "prompt"], "multiplied as f32, where other types are multiplied as integers"),
    (["portable", "bf16", ""], PLAIN),
    (["portable", "q5_0", ""], PLAIN),
    (["portable", "q8_0", ""], PLAIN),
    (["portable", "q4_0", ""], PLAIN),
];
const PLAIN: &str = "plain Rust, for processors without AVX2";

/// Why this outlier is one, where that is known.
fn known(case: [&str; 3]) -> Option<&'static str> {
    let is = |given: &[&str; 3]| given.iter().zip(case).all(|(given, case)| given.is_empty() || *given == case);
    KNOWN.iter().find(|(given, _)| is(given)).map(|(_, why)| *why)
}

/// The best of so many passes counts, each of at least so many ns.
const PASSES: usize = 5;
const PASS_NS: u64 = 1_000_000;

/// The forms, in the order of the table, and the unit of what is measured.
const FORMS: [(&str, &str); 9] = [
    ("dot x1", "G numbers/s"),
    ("dot x8", "G numbers/s"),
    ("axpy x1", "G numbers/s"),
    ("axpy x8", "G numbers/s"),
    ("prompt", "G numbers/s"),
    ("prompt, exact", "G numbers/s"),
    ("prompt, across", "G numbers/s"),
    ("matrices", "GB/s"),
    ("neuron blocks", "GB/s"),
];

/// Rows of one type, with what they meet.
struct Case {
    quant: Quant,
    bytes: usize,
    storage: Vec<u64>,
    input: Vec<f32>,
    y: Vec<f32>,
}

impl Case {
    fn new(quant: Quant) -> Case {
        let mut rng = Prng::new(1);
        let mut number = || rng.next_f64() as f32 - 0.5;
        let bytes = quant.row_bytes(COLS);
        let mut storage = vec![0u64; ROWS * bytes / 8 + 8];
        for row in bytemuck::cast_slice_mut::<u64, u8>(&mut storage).chunks_exact_mut(bytes).take(ROWS) {
            let values: Vec<f32> = (0..COLS).map(|_| number()).collect();
            rows::encode(quant, &values, row);
        }
        let input = (0..PROMPT * COLS).map(|_| number()).collect();
        Case { quant, bytes, storage, input, y: vec![0.0; PROMPT * COLS] }
    }

    fn row(&self, r: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.storage)[r * self.bytes..][..self.bytes]
    }

    fn rows(&self) -> Rows {
        Rows { first: self.storage.as_ptr().cast(), stride: self.bytes, ahead: 0 }
    }

    /// Numbers of all rows, times columns, per ns.
    fn rate(columns: usize, mut work: impl FnMut()) -> f64 {
        work();
        let best = (0..PASSES).map(|_| {
            let (mut mark, mut ns, mut times) = (clock::now(), 0, 0);
            while ns < PASS_NS {
                work();
                (ns, times) = (ns + clock::lap(&mut mark), times + 1);
            }
            f64::from(times) * (ROWS * COLS * columns) as f64 / ns as f64
        });
        best.fold(0.0, f64::max)
    }

    fn dot(&mut self, kernels: &Kernels, n: usize) -> f64 {
        let mut x = Columns::default();
        x.set(&self.input[..n * COLS], n, self.quant);
        let (rows, y, dot) = (self.rows(), self.y.as_mut_ptr(), kernels.dot(self.quant));
        // SAFETY: whole rows, room for all products, kernels of this machine.
        Case::rate(n, || unsafe { dot(rows, ROWS, black_box(&x), y, ROWS) })
    }

    fn axpy(&mut self, kernels: &Kernels, n: usize) -> f64 {
        let (a, rows, axpy) = ([0.001; MAX_AXPY_ROWS * 8], self.rows(), kernels.axpy(self.quant));
        let (out, together) = (&mut self.y[..n * COLS], kernels.rows_together(self.quant));
        Case::rate(n, || {
            for r in (0..ROWS).step_by(together) {
                let few: [_; MAX_AXPY_ROWS] = std::array::from_fn(|k| rows.row((r + k).min(ROWS - 1)));
                // SAFETY: as above.
                unsafe { axpy(&few[..together], 0, black_box(&a[..together * n]), COLS, out) };
            }
        })
    }

    fn prompt(&mut self, kernels: &Kernels) -> f64 {
        let mut x = Columns::default();
        x.set_here(kernels, &self.input, PROMPT, [self.quant]);
        let (quant, rows, y) = (self.quant, self.rows(), self.y.as_mut_ptr());
        // SAFETY: as above.
        Case::rate(PROMPT, || unsafe { kernels.products(quant, rows, ROWS, black_box(&x), y, ROWS) })
    }

    fn across(&mut self, kernels: &Kernels) -> f64 {
        let (mut x, mut room) = (Columns::default(), Room::default());
        x.set_across(None, kernels, &self.input[..PROMPT * ROWS], PROMPT, self.quant);
        let y = self.y.as_mut_ptr();
        // SAFETY: as above.
        Case::rate(PROMPT, || unsafe {
            kernels.across(self.quant, |k| self.row(k), COLS, 0..COLS, black_box(&x), &mut room, y, COLS);
        })
    }
}

/// What all forms of a type reach with these kernels.
fn measure(kernels: &(&'static str, Kernels), quant: Quant, trial: &mut Trial<'_>) -> [f64; FORMS.len()] {
    let mut case = Case::new(quant);
    let mut from_memory = |bytes| trial.choose(std::slice::from_ref(kernels), quant, bytes).pairs[0].gb_s;
    let from_memory = [from_memory([1, 0]), from_memory([0, 1])];
    let kernels = &kernels.1;
    [
        case.dot(kernels, 1),
        case.dot(kernels, 8),
        case.axpy(kernels, 1),
        case.axpy(kernels, 8),
        case.prompt(kernels),
        case.prompt(&kernels.with(Prefill::Exact)),
        case.across(kernels),
        from_memory[0],
        from_memory[1],
    ]
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let mut pool = ThreadPool::new(2);
    let mut trial = Trial::new(&mut pool, 4096).expect("64 MiB");
    let (mut outliers, mut unknown) = (Vec::new(), 0);
    for isa in Isa::ALL.into_iter().filter(|isa| wanted.is_empty() || wanted.iter().any(|arg| arg == isa.name())) {
        for kind in Kernels::kinds(isa) {
            let name = if kind.0 == isa.name() { isa.name().to_owned() } else { format!("{}, {}", isa.name(), kind.0) };
            println!("\n## {name}\n");
            println!("| type |{}", FORMS.map(|(form, unit)| format!(" {form}, {unit} |")).concat());
            println!("|---|{}", "---|".repeat(FORMS.len()));
            let mut table = BTreeMap::new();
            for quant in Quant::all() {
                let rates = measure(&kind, quant, &mut trial);
                table.insert(quant.name(), rates);
                println!("| {} |{}", quant.name(), rates.map(|rate| format!(" {rate:.2} |")).concat());
            }
            for (i, (form, unit)) in FORMS.into_iter().enumerate() {
                let mut all: Vec<f64> = table.values().map(|rates| rates[i]).collect();
                all.sort_by(f64::total_cmp);
                let middle = all[all.len() / 2];
                let slow = table.iter().filter(|(_, rates)| TIMES * rates[i] < middle);
                outliers.extend(slow.map(|(quant, rates)| {
                    let why = known([isa.name(), quant, form]);
                    unknown += usize::from(why.is_none());
                    format!(
                        "{quant}, {form}, {name}: {:.2} {unit}, where the type in the middle has {middle:.2}; {}",
                        rates[i],
                        why.unwrap_or("UNKNOWN")
                    )
                }));
            }
        }
    }
    println!("\n{} outliers, {unknown} unknown", outliers.len());
    outliers.iter().for_each(|outlier| println!("- {outlier}"));
    std::process::exit(i32::from(unknown > 0));
}
