//! Which kind of an instruction set's kernels reads a type's rows fastest here, by a short measurement: the kinds differ in how they ask
//! the memory for rows and in nothing else, and the maker of the processor decides where they are close. `open` takes what it says, and
//! `doctor` shows it.

use super::measure::huge_pages;
use crate::clock;
use crate::cpu::aligned::{Aligned, LINE};
use crate::cpu::thread_pool::Parts;
use crate::cpu::{Columns, Kernels, MAX_AXPY_ROWS, Rows, ThreadPool, flush};
use crate::error::Result;
use crate::formats::rows::Quant;
use memmap2::MmapMut;
use std::ops::Range;

/// Bytes that a pass of a kernel reads: at least, for each thread, and at most. It then takes a good part of a millisecond, beside which
/// waking threads does not count.
const PASS_BYTES: [usize; 3] = [8 << 20, 1 << 20, 64 << 20];
/// Timed passes of each pair, in turns.
const TURNS: usize = 7;
/// A pair that is faster by no more than this share is as good: passes differ by as much.
const CLOSE: f64 = 0.15;
/// What the memory is full of: of every type these bytes are rows of plain numbers.
const FILLING: u8 = 0x3c;
/// What down rows are multiplied by: not the products of gate and up, which may be tiny. Scales of MXFP4 are 2^-68 in such memory, products of
/// its rows 10^-18; a scale times that is below the smallest normal number, for which an Intel core takes a hundred cycles and more.
const SHARE: f32 = 1.0;
/// Bytes that a thread takes at a time, as in `ops::linear`.
const TASK_BYTES: usize = 256 << 10;

/// How fast the kinds of kernels read rows of one type, and which are taken.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The type.
    pub quant: Quant,
    /// What was measured; first the kind for the maker of the processor, alone.
    pub pairs: Vec<Pair>,
    /// Place of the pair that is taken: the first, unless another is faster by more than passes differ.
    pub taken: usize,
}

/// A kind for dots and a kind for down rows, by their places in the list of kinds.
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// Number of the kernel set that computes dots.
    pub dots: usize,
    /// Number of the kernel set that adds down rows.
    pub axpys: usize,
    /// Bytes of the type by the time they take, GB/s: the median of some passes.
    pub gb_s: f64,
}

impl Choice {
    /// Takes what was chosen, of `kinds`.
    pub fn apply(&self, kernels: &mut Kernels, kinds: &[(&str, Kernels)]) {
        let Pair { dots, axpys, .. } = self.pairs[self.taken];
        kernels.take_dots(self.quant, &kinds[dots].1);
        kernels.take_axpys(self.quant, &kinds[axpys].1);
    }

    /// What was chosen and why, as text.
    pub fn describe(&self, kinds: &[(&str, Kernels)]) -> String {
        let of = |&Pair { dots, axpys, gb_s }: &Pair| match (kinds[dots].0, kinds[axpys].0) {
            (dots, axpys) if dots == axpys => format!("{dots} {gb_s:.1} GB/s"),
            (dots, axpys) => format!("dots {dots}, down rows {axpys} {gb_s:.1} GB/s"),
        };
        let (taken, first) = (of(&self.pairs[self.taken]), of(&self.pairs[0]));
        let others: Vec<String> = self.pairs.iter().skip(1).map(of).collect();
        match self.taken {
            0 => format!("{taken}, for this processor's maker; not clearly faster: {}", others.join("; ")),
            _ => format!("{taken}, clearly faster here than {first}, for this processor's maker"),
        }
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Which of some rates is taken, by `[rates][turns]`, of which those of a turn stand at the same place.
fn taken(rates: &[Vec<f64>]) -> usize {
    let clearly = |&other: &usize| {
        let gains: Vec<f64> = rates[other].iter().zip(&rates[0]).map(|(rate, first)| rate / first).collect();
        // Faster in the median, and slower in no turn but one, in which another process may have had the processor.
        median(&gains) > 1.0 + CLOSE && gains.iter().filter(|&&gain| gain <= 1.0).count() <= 1
    };
    let faster = (1..rates.len()).filter(clearly);
    faster.max_by(|&a, &b| median(&rates[a]).total_cmp(&median(&rates[b]))).unwrap_or(0)
}

/// Memory to measure in, with threads to read it.
pub struct Trial<'a> {
    pool: &'a mut ThreadPool,
    memory: MmapMut,
    /// Numbers of a row: of the model's, and of those of the type that is measured, which may have to be longer.
    hidden: usize,
    cols: usize,
    x: Columns,
    /// What the kernels write: of dots a number for each row, of axpys an output for each thread.
    out: Aligned,
}

impl<'a> Trial<'a> {
    /// For rows of `hidden` numbers or a few more, as types need it.
    ///
    /// # Errors
    /// [`crate::Error::Memory`] where there is no room.
    pub fn new(pool: &'a mut ThreadPool, hidden: usize) -> Result<Trial<'a>> {
        let [least, each, most] = PASS_BYTES;
        let bytes = (pool.threads() * each).clamp(least, most);
        Trial::over(pool, hidden, bytes)
    }

    fn over(pool: &'a mut ThreadPool, hidden: usize, bytes: usize) -> Result<Trial<'a>> {
        let mut memory = huge_pages(bytes)?;
        memory.fill(FILLING);
        Ok(Trial { pool, memory, hidden, cols: hidden, x: Columns::default(), out: Aligned::default() })
    }

    /// Measures kinds of kernels on rows of one type. `bytes` says how much of it a token reads in matrices, of which rows are dotted one
    /// after the other, and in neuron blocks, in which a row is added after one or two that are dotted: what suits the one may not suit
    /// the other. Without blocks the first kind adds down rows.
    pub fn choose(&mut self, kinds: &[(&str, Kernels)], quant: Quant, bytes: [u64; 2]) -> Choice {
        self.cols = self.hidden.next_multiple_of(quant.unit());
        let input: Vec<f32> = (0..self.cols).map(|i| (i * i % 97) as f32 / 48.0 - 1.0).collect();
        self.x.set(&input, 1, quant);
        let adders = if bytes[1] == 0 { 1 } else { kinds.len() };
        let places: Vec<[usize; 2]> = (0..kinds.len() * adders).map(|pair| [pair / adders, pair % adders]).collect();
        let mut rates = vec![Vec::new(); places.len()];
        // The first turn brings code and pages, and does not count.
        for turn in 0..=TURNS {
            let (mut of_dots, mut of_pairs) = (vec![0.0; kinds.len()], vec![0.0; places.len()]);
            // Each turn begins with another one, so that none always runs behind the same.
            for i in 0..places.len() {
                let pair = (i + turn) % places.len();
                let [dots, axpys] = places[pair];
                if axpys == 0 && bytes[0] > 0 {
                    of_dots[dots] = self.time(&kinds[dots].1, quant, Trial::dots);
                }
                if bytes[1] > 0 {
                    let mut kernels = kinds[axpys].1;
                    kernels.take_dots(quant, &kinds[dots].1);
                    of_pairs[pair] = self.time(&kernels, quant, Trial::blocks);
                }
            }
            for ((rates, &[dots, _]), of_pair) in rates.iter_mut().zip(&places).zip(of_pairs).filter(|_| turn > 0) {
                let ns = bytes[0] as f64 * of_dots[dots] + bytes[1] as f64 * of_pair;
                rates.push((bytes[0] + bytes[1]) as f64 / ns);
            }
        }
        let pair =
            |([dots, axpys], rates): (&[usize; 2], &Vec<f64>)| Pair { dots: *dots, axpys: *axpys, gb_s: median(rates) };
        Choice { quant, pairs: places.iter().zip(&rates).map(pair).collect(), taken: taken(&rates) }
    }

    /// Time of a byte in a pass over memory that no cache holds, ns.
    fn time(&mut self, kernels: &Kernels, quant: Quant, pass: fn(&mut Trial<'a>, &Kernels, Quant) -> usize) -> f64 {
        // By all threads: a thread flushes a line in a tenth of a microsecond, and reads it in a thousandth.
        let memory = &self.memory[..];
        self.pool.run(memory.len().div_ceil(TASK_BYTES), |_, task| {
            flush(&memory[of_task(task, TASK_BYTES, memory.len())]);
        });
        let mut lap = clock::now();
        let bytes = pass(self, kernels, quant);
        clock::lap(&mut lap).max(1) as f64 / bytes as f64
    }

    /// Products of one column with all rows that the memory holds; returns the bytes that were read.
    fn dots(&mut self, kernels: &Kernels, quant: Quant) -> usize {
        let stride = quant.row_bytes(self.cols);
        let Trial { pool, memory, x, out, .. } = self;
        let (rows, per_task) = (memory.len() / stride, (TASK_BYTES / stride).max(1));
        out.resize(rows);
        let (memory, out, x) = (&memory[..], Parts::new(out), &*x);
        pool.run(rows.div_ceil(per_task), |_, task| {
            let range = of_task(task, per_task, rows);
            let at = Rows { first: memory[range.start * stride..].as_ptr(), stride, ahead: quant.ahead(stride) };
            // SAFETY: the memory holds the rows, and each task writes its own numbers; the kernels are for this machine.
            unsafe { kernels.dot(quant)(at, range.len(), x, out.start().add(range.start), rows) };
        });
        rows * stride
    }

    /// Neuron blocks in the order in which `engine::ffn` reads them: gate and up dotted, down added.
    fn blocks(&mut self, kernels: &Kernels, quant: Quant) -> usize {
        let (stride, cols) = (quant.row_bytes(self.cols), self.cols);
        let Trial { pool, memory, x, out, .. } = self;
        let (blocks, per_task) = (memory.len() / (3 * stride), (TASK_BYTES / (3 * stride)).max(1));
        let (together, as_read) = (kernels.rows_together(quant), kernels.adds_as_read(quant));
        let ahead = if quant == Quant::Q4 || as_read { quant.ahead(stride) } else { 0 };
        // Two threads write no line that both have.
        let each = cols.next_multiple_of(LINE);
        out.resize(pool.threads() * each);
        let (memory, out, x) = (&memory[..], Parts::new(out), &*x);
        pool.run(blocks.div_ceil(per_task), |thread, task| {
            // SAFETY: each thread has an output of its own.
            let out = unsafe { out.part(thread * each..thread * each + cols) };
            let (mut products, mut downs) = ([0f32; 2], Vec::with_capacity(together));
            for block in of_task(task, per_task, blocks) {
                let first = memory[3 * block * stride..].as_ptr();
                let down = first.wrapping_add(2 * stride);
                // SAFETY: the memory holds the block; the kernels are for this machine.
                unsafe {
                    kernels.dot(quant)(
                        Rows { first, stride, ahead: quant.ahead(stride) },
                        2,
                        x,
                        products.as_mut_ptr(),
                        2,
                    );
                    if !as_read {
                        (kernels.touch)(down, stride, ahead);
                    }
                    downs.push(down);
                    if downs.len() == together {
                        kernels.axpy(quant)(&downs, ahead, &[SHARE; MAX_AXPY_ROWS][..together], cols, out);
                        downs.clear();
                    }
                }
            }
        });
        blocks * 3 * stride
    }
}

fn of_task(task: usize, per_task: usize, all: usize) -> Range<usize> {
    task * per_task..all.min((task + 1) * per_task)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[test]
    fn the_first_stays_unless_another_is_clearly_faster() {
        let of_two = |first: [f64; 7], other: [f64; 7]| taken(&[first.to_vec(), other.to_vec()]);
        let steady = [10.0; 7];
        assert_eq!(of_two(steady, [11.4; 7]), 0, "as close as passes are");
        assert_eq!(of_two(steady, [12.0; 7]), 1);
        assert_eq!(of_two(steady, [8.0; 7]), 0);
        // One disturbed turn changes nothing, either way; two are no proof.
        assert_eq!(of_two(steady, [12.0, 12.0, 12.0, 2.0, 12.0, 12.0, 12.0]), 1);
        assert_eq!(of_two(steady, [12.0, 2.0, 12.0, 2.0, 12.0, 12.0, 12.0]), 0);
        assert_eq!(of_two([10.0, 5.0, 10.0, 10.0, 10.0, 10.0, 10.0], steady), 0);
        assert_eq!(taken(&[steady.to_vec(), vec![12.0; 7], vec![13.0; 7]]), 2, "the fastest of those that are faster");
    }

    /// A processor may take a hundred times as long for a number below the smallest normal one, 10^-38: what is measured must not come near it,
    /// as kernels multiply by powers of two on the way, down to 2^-24.
    #[test]
    fn what_is_measured_computes_no_tiny_numbers_for_any_type() {
        let mut pool = ThreadPool::new(2);
        let mut trial = Trial::over(&mut pool, 96, 64 << 10).unwrap();
        for kinds in Isa::ALL.map(Kernels::kinds).into_iter().filter(|kinds| !kinds.is_empty()) {
            for quant in Quant::all() {
                for bytes in [[1, 0], [0, 1]] {
                    trial.out.fill(0.0);
                    trial.choose(&kinds, quant, bytes);
                    let sizes = trial.out.iter().map(|number| number.abs()).filter(|size| *size > 0.0);
                    let least = sizes.reduce(f32::min).expect("something is computed");
                    assert!(least > 1e-28, "{} on {}, of {bytes:?}: {least}", quant.name(), kinds[0].0);
                }
            }
        }
    }

    /// Speeds are the machine's own; that each is one is all that can be asked.
    #[test]
    fn every_type_can_be_measured_on_every_instruction_set() {
        let mut pool = ThreadPool::new(2);
        let mut trial = Trial::over(&mut pool, 96, 64 << 10).unwrap();
        for kinds in Isa::ALL.map(Kernels::kinds).into_iter().filter(|kinds| !kinds.is_empty()) {
            for bytes in [[1, 2], [1, 0], [0, 1]] {
                let choice = trial.choose(&kinds, Quant::Q4, bytes);
                assert_eq!(choice.pairs.len(), if bytes[1] == 0 { kinds.len() } else { kinds.len().pow(2) });
                assert!(choice.pairs.iter().all(|pair| pair.gb_s > 0.0 && pair.gb_s.is_finite()));
                let mut kernels = kinds[0].1;
                choice.apply(&mut kernels, &kinds);
                assert!(choice.describe(&kinds).contains("GB/s"));
            }
        }
    }
}
