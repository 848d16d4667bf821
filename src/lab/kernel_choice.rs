//! Whether the CPU kernels that are chosen are the fastest of this machine, by a short measurement: `doctor` says so.

use crate::clock;
use crate::cpu::aligned::Aligned;
use crate::cpu::{Columns, Kernels, Rows};
use crate::formats::rows::{self, Quant};

/// Numbers of a row: about those of a 7B model, and whole blocks of every type.
const COLS: usize = 4096;
/// Bytes that one pass of a kernel reads, and its passes: each reads bytes of its own, and together they are more than most caches hold.
const PASS_BYTES: usize = 8 << 20;
const PASSES: usize = 4;
/// Kernels that are slower than others by less than this share are as good: passes differ by as much.
const CLOSE: f64 = 0.15;

/// How fast kernels read rows of one type, one thread and one column.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// The type.
    pub quant: Quant,
    /// GB/s of the kernel that is chosen, the median of some passes.
    pub gb_s: f64,
    /// The fastest other one, and its GB/s, if the chosen one is slower by more than passes differ.
    pub faster: Option<(&'static str, f64)>,
}

/// Measures all types with `chosen`, one of `candidates`, and with the others.
pub fn measure(chosen: usize, candidates: &[(&'static str, Kernels)]) -> Vec<Choice> {
    let (mut memory, mut x) = (Aligned::default(), Columns::default());
    memory.resize(candidates.len() * PASSES * PASS_BYTES / 4);
    let values: Vec<f32> = (0..COLS).map(|i| (i * i % 97) as f32 / 48.0 - 1.0).collect();
    let mut of = |quant: Quant| {
        let bytes = quant.row_bytes(COLS);
        let mut row = vec![0; bytes];
        rows::encode(quant, &values, &mut row);
        let memory: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        memory.chunks_exact_mut(bytes).for_each(|to| to.copy_from_slice(&row));
        x.set(&values, 1, quant);
        let count = PASS_BYTES / bytes;
        let mut sums = vec![0.0; count];
        let mut times = vec![Vec::new(); candidates.len()];
        for pass in 0..PASSES {
            for (i, (times, (_, kernels))) in times.iter_mut().zip(candidates).enumerate() {
                // In turns: what was written last may lie in a cache.
                let place = pass * candidates.len() + (i + pass) % candidates.len();
                let first = memory[place * count * bytes..].as_ptr();
                let mut lap = clock::now();
                let rows = Rows { first, stride: bytes, ahead: quant.ahead(bytes) };
                // SAFETY: the memory holds the rows, `sums` a number for each; the kernels are for this machine.
                unsafe { kernels.dot(quant)(rows, count, &x, sums.as_mut_ptr(), count) };
                times.push((count * bytes) as f64 / clock::lap(&mut lap) as f64);
            }
        }
        let rates = times.into_iter().map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[PASSES / 2]
        });
        let rates: Vec<f64> = rates.collect();
        let faster = candidates.iter().zip(&rates).map(|((name, _), &rate)| (*name, rate));
        let faster = faster.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|best| best.1 * (1.0 - CLOSE) > rates[chosen]);
        Choice { quant, gb_s: rates[chosen], faster }
    };
    Quant::all().map(&mut of).collect()
}
