//! The law of the row kernels: whatever the CPU's instruction set, row type, length and number of columns, they agree
//! with the scalar truth up to rounding (grouped types: up to the rounding of their int8 inputs).

use dynamicinfer::cpu::attend::{AttendScratch, Head};
use dynamicinfer::cpu::reference;
use dynamicinfer::cpu::{Columns, Isa, Kernels, MAX_AXPY_ROWS, Rows};
use dynamicinfer::formats::rows::{self, Quant, ROW_ALIGN};
use dynamicinfer::prng::Prng;
use half::f16;
use proptest::prelude::*;

fn normal(rng: &mut Prng, n: usize) -> Vec<f32> {
    (0..n).map(|_| (0..4).map(|_| rng.next_f64() as f32 * 2.0 - 1.0).sum::<f32>()).collect()
}

/// Rows at aligned addresses, with guard bytes of 0xFF behind each: reading past a row would bring in NaN.
fn encoded_rows(rng: &mut Prng, quant: Quant, cols: usize, count: usize) -> (Vec<u64>, Vec<usize>) {
    let row_bytes = quant.row_bytes(cols);
    let stride = row_bytes + ROW_ALIGN;
    let mut storage = vec![u64::MAX; (count * stride + ROW_ALIGN) / 8];
    let base = storage.as_ptr().align_offset(ROW_ALIGN) * 8;
    let mut starts = Vec::new();
    for r in 0..count {
        let values = normal(rng, cols);
        let at = base + r * stride;
        rows::encode(quant, &values, &mut bytemuck::cast_slice_mut::<u64, u8>(&mut storage)[at..at + row_bytes]);
        starts.push(at);
    }
    (storage, starts)
}

fn supported() -> Vec<Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::of).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn dots_agree_with_the_scalar_truth(seed in any::<u64>(), groups in 1usize..40, odd in 0usize..32, n in 1usize..=32,
                                        count in 1usize..=7) {
        let mut rng = Prng::new(seed);
        for quant in Quant::OWN {
            let cols = groups * 32 + if quant.is_grouped() { 0 } else { odd };
            let (storage, starts) = encoded_rows(&mut rng, quant, cols, count);
            let bytes: &[u8] = bytemuck::cast_slice(&storage);
            let rows: Vec<&[u8]> = starts.iter().map(|&s| &bytes[s..s + quant.row_bytes(cols)]).collect();
            let input = normal(&mut rng, n * cols);
            let mut x = Columns::default();
            x.set(&input, n, quant);
            for kernels in supported() {
                let mut y = vec![f32::NAN; n * count];
                let stride = quant.row_bytes(cols) + ROW_ALIGN;
                // What is asked for ahead changes nothing.
                let at = Rows { first: rows[0].as_ptr(), stride, ahead: if seed % 2 == 0 { 0 } else { stride } };
                // SAFETY: the rows are whole, the kernels are supported here.
                unsafe { kernels.dot(quant)(at, count, &x, y.as_mut_ptr(), count) };
                for (i, y) in y.iter().enumerate() {
                    let (b, r) = (i / count, i % count);
                    let numbers = reference::numbers(quant, rows[r], cols);
                    let column = &input[b * cols..(b + 1) * cols];
                    let exact = reference::dot(&numbers, column);
                    // int8 inputs are off by half a step of max/127 each, with random signs.
                    let tolerance = if quant.is_grouped() { 0.02 } else { 1e-6 };
                    let scale = reference::dot_scale(&numbers, column);
                    prop_assert!(
                        (*y as f64 - exact).abs() <= tolerance * scale,
                        "{} {} cols {cols} row {r} column {b} of {n}: {y}, truth {exact}", kernels.isa.name(), quant.name()
                    );
                }
            }
        }
    }

    #[test]
    fn grouped_dots_are_exact_for_inputs_that_int8_holds(seed in any::<u64>(), groups in 1usize..40, n in 1usize..=9) {
        let mut rng = Prng::new(seed);
        for quant in [Quant::Q8, Quant::Q4] {
            let cols = groups * 32;
            let (storage, starts) = encoded_rows(&mut rng, quant, cols, 1);
            let bytes: &[u8] = bytemuck::cast_slice(&storage);
            let row = &bytes[starts[0]..starts[0] + quant.row_bytes(cols)];
            let numbers = reference::numbers(quant, row, cols);
            // Whole numbers with 127 in each group: the step is one.
            let input: Vec<f32> =
                (0..n * cols).map(|i| if i % 32 == 5 { 127.0 } else { (rng.below(255) as f32) - 127.0 }).collect();
            let mut x = Columns::default();
            x.set(&input, n, quant);
            for kernels in supported() {
                let mut y = vec![f32::NAN; n];
                // SAFETY: as above.
                unsafe { kernels.dot(quant)(Rows { first: row.as_ptr(), stride: 0, ahead: 0 }, 1, &x, y.as_mut_ptr(), 1) };
                for (b, y) in y.iter().enumerate() {
                    let column = &input[b * cols..(b + 1) * cols];
                    let exact = reference::dot(&numbers, column);
                    let scale = reference::dot_scale(&numbers, column);
                    prop_assert!(
                        (*y as f64 - exact).abs() <= 2e-6 * scale,
                        "{} {} cols {cols} column {b}: {y}, truth {exact}", kernels.isa.name(), quant.name()
                    );
                }
            }
        }
    }

    #[test]
    fn axpys_agree_with_the_scalar_truth(seed in any::<u64>(), groups in 1usize..20, odd in 0usize..32,
                                        n in 1usize..=5, count in 1usize..=MAX_AXPY_ROWS) {
        let mut rng = Prng::new(seed);
        for quant in Quant::OWN {
            let cols = groups * 32 + if quant.is_grouped() { 0 } else { odd };
            let (storage, starts) = encoded_rows(&mut rng, quant, cols, count);
            let bytes: &[u8] = bytemuck::cast_slice(&storage);
            let rows: Vec<&[u8]> = starts.iter().map(|&s| &bytes[s..s + quant.row_bytes(cols)]).collect();
            let a = normal(&mut rng, count * n);
            let before = normal(&mut rng, n * cols);
            let mut exact: Vec<f64> = before.iter().map(|&v| v as f64).collect();
            for (r, row) in rows.iter().enumerate() {
                let numbers = reference::numbers(quant, row, cols);
                for b in 0..n {
                    reference::axpy(a[r * n + b], &numbers, &mut exact[b * cols..(b + 1) * cols]);
                }
            }
            // Each kernel starts from zero: its output order is its own until `add_axpy` puts it right.
            let pointers: Vec<*const u8> = rows.iter().map(|r| r.as_ptr()).collect();
            for kernels in supported() {
                let mut sums = vec![0.0; n * cols];
                // SAFETY: as above.
                unsafe { kernels.axpy(quant)(&pointers, (seed % 2 * 64) as usize, &a, cols, &mut sums) };
                let mut out = before.clone();
                for (sums, out) in sums.chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
                    rows::add_axpy(quant, sums, out);
                }
                for (i, (o, e)) in out.iter().zip(&exact).enumerate() {
                    prop_assert!(
                        (*o as f64 - e).abs() <= 2e-5 * (1.0 + e.abs()),
                        "{} {} cols {cols} number {i}: {o}, truth {e}", kernels.isa.name(), quant.name()
                    );
                }
            }
        }
    }

    /// Each query mixes the values that it sees and no other, behind which stands NaN.
    #[test]
    fn attention_is_that_of_f64(seed in any::<u64>(), dim in 1usize..140, positions in 1usize..90, n in 1usize..=12) {
        let mut rng = Prng::new(seed);
        for quant in [Quant::F32, Quant::F16] {
            let numbers = |values: &[f32]| -> Vec<u8> {
                match quant {
                    Quant::F32 => bytemuck::cast_slice(values).to_vec(),
                    _ => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
                }
            };
            let of = |bytes: &[u8]| reference::numbers(quant, bytes, bytes.len() / quant.number_bytes(1));
            let (mut keys, mut values) = (numbers(&normal(&mut rng, positions * dim)), numbers(&normal(&mut rng, positions * dim)));
            let whole = keys.len();
            keys.extend([0xff; 64]);
            values.extend([0xff; 64]);
            let head = Head { quant, keys: &keys[..whole], values: &values[..whole] };
            let queries: Vec<f32> = normal(&mut rng, n * dim).iter().map(|q| 4.0 * q).collect();
            let sees: Vec<_> = (0..n).map(|_| {
                let end = 1 + rng.below(positions as u64) as usize;
                rng.below(end as u64) as usize..end
            }).collect();
            for kernels in supported() {
                let mut room = AttendScratch::default();
                room.queries(n * dim).copy_from_slice(&queries);
                let mixed = room.attend(&kernels, head, dim, |b| sees[b].clone()).to_vec();
                for (b, seen) in sees.iter().enumerate() {
                    let query = &queries[b * dim..(b + 1) * dim];
                    let row = |of_what: &[u8], p: usize| {
                        let each = quant.number_bytes(dim);
                        of(&of_what[p * each..(p + 1) * each])
                    };
                    let scores: Vec<f64> = seen.clone().map(|p| reference::dot(&row(&keys, p), query) / (dim as f64).sqrt()).collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for i in 0..dim {
                        let truth: f64 = seen.clone().zip(&weights).map(|(p, w)| w / sum * f64::from(row(&values, p)[i])).sum();
                        let found = f64::from(mixed[b * dim + i]);
                        prop_assert!((found - truth).abs() < 2e-5, "{quant:?} {:?} query {b}, number {i}: {found} and not {truth}", kernels.isa);
                    }
                }
            }
        }
    }
}
