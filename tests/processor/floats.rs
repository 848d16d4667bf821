//! The law of products with many columns in f32: for every type, instruction set and shape they agree with the scalar truth as closely as
//! f32 does, by rows and across them; what is beside a number does not change its bits; and attention of many queries is that of one.

use dynamicinfer::cpu::aligned::Aligned;
use dynamicinfer::cpu::floats::Room;
use dynamicinfer::cpu::gemm::SCALED_ROWS;
use dynamicinfer::cpu::shadow::Scale;
use dynamicinfer::cpu::{Columns, FloatPanels, Isa, Kernels, ManyForm, Prefill, ThreadPool, reference};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::{self, PACK, Quant};
use dynamicinfer::prng::Prng;
use proptest::prelude::*;

/// Rows of weights of one type, 64 bytes or more apart.
struct Weights {
    quant: Quant,
    cols: usize,
    bytes: usize,
    data: Vec<u64>,
}

impl Weights {
    fn random(rng: &mut Prng, quant: Quant, cols: usize, count: usize) -> Weights {
        let bytes = quant.row_bytes(cols);
        let mut data = vec![0u64; count * bytes / 8];
        for row in data.chunks_exact_mut(bytes / 8) {
            rows::encode(quant, &numbers(rng, cols), bytemuck::cast_slice_mut(row));
        }
        Weights { quant, cols, bytes, data }
    }

    fn row(&self, r: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.data)[r * self.bytes..(r + 1) * self.bytes]
    }

    fn count(&self) -> usize {
        self.data.len() * 8 / self.bytes
    }
}

fn numbers(rng: &mut Prng, count: usize) -> Vec<f32> {
    (0..count).map(|_| rng.next_f64() as f32 * 4.0 - 2.0).collect()
}

fn supported() -> impl Iterator<Item = Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::of)
}

fn length(quant: Quant, groups: usize) -> usize {
    // Floats may have any length.
    if quant.unit() == 1 { groups * 32 + 5 } else { (groups * 32).next_multiple_of(quant.unit()) }
}

/// By rows, `[n, rows]`, with something behind each column that must stay as it is.
fn by_rows(kernels: &Kernels, weights: &Weights, pool: Option<&mut ThreadPool>, input: &[f32], n: usize) -> Vec<f32> {
    let mut x = FloatPanels::default();
    x.set(pool, &kernels.tiles, input, n);
    let (count, stride) = (weights.count(), weights.count() + 3);
    let pointers: Vec<*const u8> = (0..count).map(|r| weights.row(r).as_ptr()).collect();
    let mut y = vec![f32::NAN; n * stride];
    // SAFETY: whole rows; kernels for this machine.
    unsafe { kernels.tiles.rows(weights.quant, &pointers, &x, y.as_mut_ptr(), stride) };
    for column in y.chunks_exact(stride) {
        assert!(column[..count].iter().all(|y| !y.is_nan()) && column[count..].iter().all(|y| y.is_nan()));
    }
    y.chunks_exact(stride).flat_map(|column| column[..count].to_vec()).collect()
}

/// Across rows, added to ones, `[n, cols]`.
fn across(kernels: &Kernels, weights: &Weights, input: &[f32], n: usize, each: usize) -> Vec<f32> {
    let mut x = FloatPanels::default();
    x.set(None, &kernels.tiles, input, n);
    let (cols, mut room) = (weights.cols, Room::default());
    let mut y = vec![1.0; n * cols];
    for start in (0..cols).step_by(each) {
        let range = start..cols.min(start + each);
        // SAFETY: a range of each column; kernels for this machine.
        unsafe {
            let y = y.as_mut_ptr().add(start);
            kernels.tiles.across(weights.quant, |k| weights.row(k), cols, range, &x, &mut room, y, cols);
        }
    }
    y
}

fn assert_close(found: f32, truth: f64, magnitudes: f64, what: &str) {
    assert!((f64::from(found) - truth).abs() <= 2e-6 * magnitudes + 1e-6, "{what}: {found}, truth {truth}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn products_by_rows_are_those_of_f32(seed in any::<u64>(), groups in 1usize..40, n in 1usize..=50, count in 1usize..=70) {
        let mut rng = Prng::new(seed);
        for quant in Quant::all() {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            let input = numbers(&mut rng, n * weights.cols);
            let rows: Vec<Vec<f32>> = (0..count).map(|r| reference::numbers(quant, weights.row(r), weights.cols)).collect();
            for kernels in supported() {
                let y = by_rows(&kernels, &weights, None, &input, n);
                for (i, &y) in y.iter().enumerate() {
                    let (row, column) = (&rows[i % count], &input[i / count * weights.cols..][..weights.cols]);
                    let what = format!("{} {} {} of {n} columns", kernels.isa.name(), quant.name(), i / count);
                    assert_close(y, reference::dot(row, column), reference::dot_scale(row, column), &what);
                }
            }
        }
    }

    #[test]
    fn products_across_rows_are_those_of_f32(seed in any::<u64>(), groups in 1usize..40, n in 1usize..=30, count in 1usize..=300) {
        let mut rng = Prng::new(seed);
        for quant in Quant::all() {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            let input = numbers(&mut rng, n * count);
            let rows: Vec<Vec<f32>> = (0..count).map(|r| reference::numbers(quant, weights.row(r), weights.cols)).collect();
            for kernels in supported() {
                let y = across(&kernels, &weights, &input, n, 512);
                for (b, y) in y.chunks_exact(weights.cols).enumerate() {
                    let column = &input[b * count..][..count];
                    for (j, &y) in y.iter().enumerate() {
                        let terms = || column.iter().zip(&rows).map(|(x, row)| f64::from(*x) * f64::from(row[j]));
                        let what = format!("{} {} column {b} number {j}", kernels.isa.name(), quant.name());
                        assert_close(y, 1.0 + terms().sum::<f64>(), 1.0 + terms().map(f64::abs).sum::<f64>(), &what);
                    }
                }
            }
        }
    }

    /// Bits, not about: the rest of the engine promises the same answer for any number of threads.
    #[test]
    fn what_is_beside_a_number_does_not_change_it(seed in any::<u64>(), groups in 1usize..40, count in 2usize..=70) {
        let (mut rng, mut pool) = (Prng::new(seed), ThreadPool::new(2));
        for quant in [Quant::F16, Quant::F32, Quant::Q4] {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            let cols = weights.cols;
            let input = numbers(&mut rng, 40 * cols);
            for kernels in supported() {
                let all = by_rows(&kernels, &weights, Some(&mut pool), &input, 40);
                let r = rng.below(count as u64) as usize;
                let words = weights.bytes / 8;
                let data = weights.data[r * words..(r + 1) * words].to_vec();
                let alone = Weights { quant, cols, bytes: weights.bytes, data };
                let alone = by_rows(&kernels, &alone, None, &input[39 * cols..], 1);
                prop_assert_eq!(all[39 * count + r].to_bits(), alone[0].to_bits());
                let input = &input[..(40 * cols / count * count).min(7 * count)];
                let whole = across(&kernels, &weights, input, input.len() / count, cols.next_multiple_of(512));
                let parts = across(&kernels, &weights, input, input.len() / count, 512);
                prop_assert!(whole.iter().zip(&parts).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }
}

/// Weights that get other scales are off by as much as eight bits are, and what eight bits hold stays exact.
#[test]
fn sums_over_rows_in_int8_are_near_those_of_f32() {
    let mut rng = Prng::new(9);
    let mut tried = 0;
    for quant in Quant::all().filter(|quant| quant.unit() > 1) {
        for (count, n) in [(320, 33), (32, 5), (288, 70)] {
            let weights = Weights::random(&mut rng, quant, length(quant, 19), count);
            let cols = weights.cols;
            let input = numbers(&mut rng, n * count);
            for kernels in supported().filter(|kernels| kernels.form_across(quant, count) == ManyForm::Codes) {
                tried += 1;
                let exact = across(&kernels, &weights, &input, n, 512);
                let mut x = Columns::default();
                x.set_across(None, &kernels, &input, n, quant);
                let (mut room, mut y) = (Room::default(), vec![1.0; n * cols]);
                let row = |k: usize| weights.row(k);
                // SAFETY: all of each column; kernels for this machine.
                unsafe { kernels.across(quant, row, cols, 0..cols, &x, &mut room, y.as_mut_ptr(), cols) };
                let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
                let off = square(&mut y.iter().zip(&exact).map(|(a, b)| a - b));
                let share = (off / square(&mut exact.iter().map(|v| v - 1.0))).sqrt();
                assert!(share < 0.012, "{} {}: {share}", kernels.isa.name(), quant.name());
            }
        }
    }
    let expected = supported().filter(|kernels| matches!(kernels.isa, Isa::Avx512 | Isa::AvxVnni)).count();
    assert_eq!(tried, 3 * 15 * expected);
}

/// What kernels for few columns make of sums over rows, which they add to ones, `[n, cols]`; `None` where there is none.
fn scaled(kernels: &Kernels, weights: &Weights, input: &[f32], n: usize) -> Option<Vec<f32>> {
    let (cols, count) = (weights.cols, weights.count());
    let kernel = kernels.scaled_across(weights.quant, cols)?;
    let lanes = n.next_multiple_of(16);
    let mut x = Aligned::<f32>::default();
    x.resize(count.next_multiple_of(SCALED_ROWS) * lanes);
    (0..n * count).for_each(|i| x[i % count * lanes + i / count] = input[i]);
    let pointers: Vec<*const u8> = (0..count).map(|r| weights.row(r).as_ptr()).collect();
    let stride = cols + 3;
    let mut y = vec![1.0; n * stride];
    for pack in 0..cols / PACK {
        // SAFETY: whole rows and packs; kernels for this machine.
        unsafe { kernel(&pointers, cols, pack, x.as_ptr(), n, y.as_mut_ptr().add(pack * PACK), stride) };
    }
    assert!(y.chunks_exact(stride).all(|column| column[cols..] == [1.0; 3]), "written behind a column");
    Some(y.chunks_exact(stride).flat_map(|column| column[..cols].to_vec()).collect())
}

/// Columns that get the scales of rows are off by as much as eight bits are, and what eight bits hold stays exact.
#[test]
fn sums_over_rows_whose_scales_go_to_the_columns_are_near_those_of_f32() {
    let mut rng = Prng::new(12);
    let mut tried = 0;
    for quant in [Quant::Q8, Quant::Q4, Quant::Block(BlockType::Q5_K)] {
        for (count, n, cols) in [(320, 12, 1024), (32, 1, 512), (77, 32, 1536), (1, 17, 512), (300, 6, 512)] {
            let weights = Weights::random(&mut rng, quant, cols, count);
            // As activations are: most are zero.
            let some = |x: f32| if x < 0.6 { 0.0 } else { x };
            let input: Vec<f32> = numbers(&mut rng, n * count).into_iter().map(some).collect();
            for kernels in supported() {
                let Some(y) = scaled(&kernels, &weights, &input, n) else { continue };
                tried += 1;
                let exact = across(&kernels, &weights, &input, n, 512);
                let square = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
                let off = square(&mut y.iter().zip(&exact).map(|(a, b)| a - b));
                let share = (off / square(&mut exact.iter().map(|v| v - 1.0))).sqrt();
                assert!(share < 0.012, "{} {} {count} {n}: {share}", kernels.isa.name(), quant.name());
            }
        }
    }
    // With AVX2 alone not of eight bits.
    let expected = supported().map(|kernels| match kernels.isa {
        Isa::Avx512 => 15,
        Isa::AvxVnni | Isa::Avx2 => 10,
        Isa::Portable => 0,
    });
    assert_eq!(tried, expected.sum::<usize>());
    let (count, cols, n) = (96, 1024, 13);
    let bytes = Quant::Q8.row_bytes(cols);
    let mut data = vec![0u64; count * bytes / 8];
    for row in data.chunks_exact_mut(bytes / 8) {
        let values: Vec<f32> =
            (0..cols).map(|j| if j % 32 == 5 { 127.0 } else { rng.below(255) as f32 - 127.0 }).collect();
        rows::encode(Quant::Q8, &values, bytemuck::cast_slice_mut(row));
    }
    let weights = Weights { quant: Quant::Q8, cols, bytes, data };
    let input: Vec<f32> =
        (0..n * count).map(|i| if i % 32 == 3 { 127.0 } else { rng.below(255) as f32 - 127.0 }).collect();
    for kernels in supported() {
        let Some(y) = scaled(&kernels, &weights, &input, n) else { continue };
        for (y, exact) in y.iter().zip(across(&kernels, &weights, &input, n, 512)) {
            assert!((y - exact).abs() <= 1e-5 * exact.abs().max(1e4), "{}: {y}, {exact}", kernels.isa.name());
        }
    }
}

/// Whole numbers up to 127, with 127 in each group of either: no rounding is left.
#[test]
fn sums_over_rows_in_int8_are_exact_for_what_int8_holds() {
    let (mut rng, quant) = (Prng::new(10), Quant::Q8);
    let (count, cols, n) = (96, 608, 40);
    let whole = |rng: &mut Prng, i: usize| if i.is_multiple_of(32) { 127.0 } else { rng.below(255) as f32 - 127.0 };
    let bytes = quant.row_bytes(cols);
    let mut data = vec![0u64; count * bytes / 8];
    for (k, row) in data.chunks_exact_mut(bytes / 8).enumerate() {
        // A 127 in each group along the row, which keeps its scale at 1, and in all of every 32nd row.
        let values: Vec<f32> =
            (0..cols).map(|j| if k % 32 == 0 || j % 32 == 0 { 127.0 } else { whole(&mut rng, 1) }).collect();
        rows::encode(quant, &values, bytemuck::cast_slice_mut(row));
    }
    let weights = Weights { quant, cols, bytes, data };
    let input: Vec<f32> = (0..n * count).map(|i| whole(&mut rng, i)).collect();
    for kernels in supported().filter(|kernels| kernels.form_across(quant, count) == ManyForm::Codes) {
        let mut x = Columns::default();
        x.set_across(None, &kernels, &input, n, quant);
        let (mut room, mut y) = (Room::default(), vec![0.0; n * cols]);
        // SAFETY: all of each column; kernels for this machine.
        unsafe { kernels.across(quant, |k| weights.row(k), cols, 0..cols, &x, &mut room, y.as_mut_ptr(), cols) };
        let rows: Vec<Vec<f32>> = (0..count).map(|k| reference::numbers(quant, weights.row(k), cols)).collect();
        for (i, y) in y.iter().enumerate() {
            let terms =
                input[i / cols * count..][..count].iter().zip(&rows).map(|(x, row)| f64::from(x * row[i % cols]));
            let (truth, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            assert!((f64::from(*y) - truth).abs() <= 2e-6 * size, "{} {i}: {y}, truth {truth}", kernels.isa.name());
        }
    }
}

/// Inputs with a fixed step that a few channels go far beyond: what the step holds in codes plus the rest in f32 is the product; without the
/// rest it is not.
#[test]
fn what_lies_beyond_a_fixed_step_is_added_to_the_codes() {
    let mut rng = Prng::new(12);
    for quant in [Quant::Q8, Quant::Q4, Quant::Block(BlockType::Q4_K)] {
        let (cols, count, n) = (length(quant, 24), 40, 36);
        let weights = Weights::random(&mut rng, quant, cols, count);
        let mut input = numbers(&mut rng, n * cols);
        input.chunks_exact_mut(cols).for_each(|column| [3, 200, 701].into_iter().for_each(|c| column[c] *= 60.0));
        let rows: Vec<Vec<f32>> = (0..count).map(|r| reference::numbers(quant, weights.row(r), cols)).collect();
        for kernels in supported().map(|kernels| kernels.with(Prefill::Int8PerTensor)) {
            if kernels.form(quant, n) != ManyForm::Codes {
                continue;
            }
            let off = |scale: Option<Scale>| {
                let mut x = Columns::default();
                x.scale = scale;
                x.set_here(&kernels, &input, n, [quant]);
                let pointers: Vec<*const u8> = (0..count).map(|r| weights.row(r).as_ptr()).collect();
                let mut y = vec![0.0; n * count];
                // SAFETY: whole rows; kernels for this machine.
                unsafe { kernels.many(quant, &pointers, &x, y.as_mut_ptr(), count) };
                let (mut off, mut size) = (0.0, 0.0);
                for (i, y) in y.iter().enumerate() {
                    let truth = reference::dot(&rows[i % count], &input[i / count * cols..][..cols]);
                    off += (f64::from(*y) - truth).powi(2);
                    size += truth.powi(2);
                }
                (off / size).sqrt()
            };
            let step = 2.0 / 127.0;
            let beside = off(Some(Scale { step, extracts: true }));
            let lost = off(Some(Scale { step, extracts: false }));
            let largest = off(None);
            assert!(beside < 0.01 && lost > 0.5 && largest > 5.0 * beside, "{beside} {lost} {largest}");
        }
    }
}

/// More columns, rows and numbers than are multiplied at a time.
#[test]
fn products_by_rows_of_more_than_256_columns_are_those_of_f32() {
    let mut rng = Prng::new(9);
    for quant in [Quant::F32, Quant::F16, Quant::Block(BlockType::BF16), Quant::Q4] {
        let weights = Weights::random(&mut rng, quant, 544, 53);
        for n in [256, 257, 300] {
            let input = numbers(&mut rng, n * weights.cols);
            for kernels in supported() {
                for (i, &y) in by_rows(&kernels, &weights, None, &input, n).iter().enumerate() {
                    let row = reference::numbers(quant, weights.row(i % 53), weights.cols);
                    let column = &input[i / 53 * weights.cols..][..weights.cols];
                    let what = format!("{} {} {} of {n} columns", kernels.isa.name(), quant.name(), i / 53);
                    assert_close(y, reference::dot(&row, column), reference::dot_scale(&row, column), &what);
                }
            }
        }
    }
}

const TWO_BYTES: [Quant; 2] = [Quant::F16, Quant::Block(BlockType::BF16)];

/// Kernels as the program has them without a device.
fn rounding() -> impl Iterator<Item = Kernels> {
    supported().map(|mut kernels| {
        kernels.rounds_floats = true;
        kernels
    })
}

fn normal(rng: &mut Prng, count: usize) -> Vec<f32> {
    (0..count).map(|_| (0..12).map(|_| rng.next_f64() as f32).sum::<f32>() - 6.0).collect()
}

/// Numbers as models have them, and as they could be: the name, what is made of rows of normal ones, and of columns.
type Spread = (&'static str, fn(usize, f32) -> f32, fn(usize, f32) -> f32);
const SPREADS: [Spread; 6] = [
    ("even", |_, w| 0.02 * w, |_, x| x),
    (
        "a channel of inputs a thousand times as large",
        |_, w| 0.02 * w,
        |i, x| {
            if i % 211 == 7 { 1000.0 * x } else { x }
        },
    ),
    (
        "one a hundred times as large, whose weights make up for it",
        |i, w| if i % 211 == 7 { 2e-4 * w } else { 0.02 * w },
        |i, x| {
            if i % 211 == 7 { 100.0 * x } else { x }
        },
    ),
    ("a channel of weights a hundred times as large", |i, w| if i % 173 == 3 { 2.0 * w } else { 0.02 * w }, |_, x| x),
    ("most inputs zero", |_, w| 0.02 * w, |_, x| x.max(0.0) * x.max(0.0)),
    ("tiny beside huge", |i, w| w * 0.5f32.powi((i % 12) as i32), |_, x| 1e-20 * x),
];

/// All products with such columns, `[n, rows]`, whichever form they take.
fn many(kernels: &Kernels, weights: &Weights, rows: std::ops::Range<usize>, x: &Columns) -> Vec<f32> {
    let pointers: Vec<*const u8> = rows.map(|r| weights.row(r).as_ptr()).collect();
    let mut y = vec![f32::NAN; x.n * pointers.len()];
    // SAFETY: whole rows; kernels for this machine.
    unsafe { kernels.many(weights.quant, &pointers, x, y.as_mut_ptr(), pointers.len()) };
    y
}

/// Weights whose numbers `make` makes of those of a row.
fn made(rng: &mut Prng, quant: Quant, cols: usize, count: usize, make: impl Fn(usize, f32) -> f32) -> Weights {
    let mut weights = Weights::random(rng, quant, cols, count);
    for row in weights.data.chunks_exact_mut(weights.bytes / 8) {
        let numbers: Vec<f32> = normal(rng, cols).into_iter().enumerate().map(|(i, w)| make(i, w)).collect();
        rows::encode(quant, &numbers, bytemuck::cast_slice_mut(row));
    }
    weights
}

/// By how much codes of 16 bits may miss the product of a row and a column: half a step of each number. A weight's step is at most 2^-14 of the
/// largest of its 64 or 1 / 23170 of the root of their squares' sum, an input's 1 / 32767 or 1 / 46300.
fn most_off(row: &[f32], column: &[f32]) -> f64 {
    let sum = |values: &[f32]| values.iter().map(|v| f64::from(v.abs())).sum::<f64>();
    let norm = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let top = |values: &[f32]| values.iter().fold(0.0, |top: f64, v| top.max(f64::from(v.abs())));
    let groups = row.chunks(64).zip(column.chunks(64)).map(|(row, column)| {
        let weight = 0.5 * (top(row) / 16384.0).max(norm(row) / 23170.0);
        let input = 0.5 * (top(column) / 32767.0).max(norm(column) / 46300.0);
        weight * sum(column) + input * sum(row) + 64.0 * weight * input
    });
    groups.sum()
}

/// With every instruction set a prompt's products with floats of two bytes are those of f32 to 2 thousandths of their root mean square, and no
/// product misses by more than its numbers' steps; what a row gives does not depend on the rows beside it.
#[test]
fn a_prompts_floats_of_two_bytes_keep_their_precision() {
    let mut rng = Prng::new(21);
    for (cols, n) in [(1056, 49), (512, 130), (32, 64), (1057, 67), (5, 48), (1600, 300)] {
        for quant in TWO_BYTES {
            for (name, of_row, of_column) in SPREADS {
                let weights = made(&mut rng, quant, cols, 75, of_row);
                let rows: Vec<Vec<f32>> = (0..75).map(|r| reference::numbers(quant, weights.row(r), cols)).collect();
                let input: Vec<f32> =
                    normal(&mut rng, n * cols).into_iter().enumerate().map(|(i, x)| of_column(i % cols, x)).collect();
                for kernels in rounding() {
                    let what = format!("{} {} {cols} {n} {name}", kernels.isa.name(), quant.name());
                    let mut x = Columns::default();
                    x.set_here(&kernels, &input, n, [quant]);
                    let is_portable = kernels.isa == Isa::Portable;
                    assert_eq!(x.form(&kernels, quant) == ManyForm::Sixteen, !is_portable, "{what}");
                    let all = many(&kernels, &weights, 0..75, &x);
                    let (mut off, mut size) = (0.0, 0.0);
                    for (i, y) in all.iter().enumerate() {
                        let (row, column) = (&rows[i % 75], &input[i / 75 * cols..][..cols]);
                        let (truth, scale) = (reference::dot(row, column), reference::dot_scale(row, column));
                        let missed = (f64::from(*y) - truth).abs();
                        assert!(missed <= most_off(row, column) + 2e-6 * scale, "{what}: {y}, truth {truth}");
                        off += missed.powi(2);
                        size += truth.powi(2);
                    }
                    let off = (off / size).sqrt();
                    assert!(off < 2e-3, "{what}: {off}");
                    for first in [0, 5, 33, 70] {
                        let some = many(&kernels, &weights, first..(first + 20).min(75), &x);
                        for (i, y) in some.iter().enumerate() {
                            let rows = some.len() / n;
                            assert_eq!(y.to_bits(), all[i / rows * 75 + first + i % rows].to_bits(), "{what}");
                        }
                    }
                }
            }
        }
    }
}

/// `--prefill exact` and f32 weights are multiplied in f32, and few columns row by row.
#[test]
fn codes_of_16_bits_are_for_prompts_and_floats_of_two_bytes_alone() {
    for kernels in rounding() {
        let exact = kernels.with(Prefill::Exact);
        for quant in Quant::all() {
            let sixteen = TWO_BYTES.contains(&quant) && kernels.isa != Isa::Portable;
            assert_eq!(kernels.form(quant, 48) == ManyForm::Sixteen, sixteen, "{}", quant.name());
            assert_eq!(kernels.form_across(quant, 77) == ManyForm::Sixteen, sixteen, "{}", quant.name());
            assert_ne!(kernels.form(quant, 47), ManyForm::Sixteen);
            assert_eq!((exact.form(quant, 48), exact.form_across(quant, 77)), (ManyForm::Floats, ManyForm::Floats));
        }
    }
}

/// The largest codes of weights and of inputs, of one sign, of any one input: sums of a group are at their most.
#[test]
fn sums_of_codes_of_16_bits_never_wrap_around() {
    let (cols, n) = (192, 48);
    let largest = |quant| if quant == Quant::F16 { 65504.0f32 } else { f32::from_bits(0x7f7f_0000) * 1e-30 };
    for quant in TWO_BYTES {
        let bytes = quant.row_bytes(cols);
        for sign in [1.0, -1.0] {
            let numbers = vec![sign * largest(quant); cols];
            let mut data = vec![0u64; 40 * bytes / 8];
            data.chunks_exact_mut(bytes / 8)
                .for_each(|row| rows::encode(quant, &numbers, bytemuck::cast_slice_mut(row)));
            let weights = Weights { quant, cols, bytes, data };
            let row = reference::numbers(quant, weights.row(0), cols);
            // Column b: all alike, or but for number b small, or zero.
            let input: Vec<f32> = (0..n * cols)
                .map(|i| match (i / cols % 3, i % cols == i / cols) {
                    (0, _) | (_, true) => 3.0,
                    (1, _) => 0.01,
                    _ => 0.0,
                })
                .collect();
            for kernels in rounding() {
                let mut x = Columns::default();
                x.set_here(&kernels, &input, n, [quant]);
                for (i, y) in many(&kernels, &weights, 0..40, &x).iter().enumerate() {
                    let truth = reference::dot(&row, &input[i / 40 * cols..][..cols]);
                    let off = (f64::from(*y) / truth - 1.0).abs();
                    assert!(
                        off < 1e-3,
                        "{} {} column {}: {y}, truth {truth}",
                        kernels.isa.name(),
                        quant.name(),
                        i / 40
                    );
                }
            }
        }
    }
}

/// A damaged weight or input must be seen in the product.
#[test]
fn what_is_not_finite_stays_so_in_codes_of_16_bits() {
    let mut rng = Prng::new(5);
    let (cols, n) = (192, 48);
    for quant in TWO_BYTES {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let finite = made(&mut rng, quant, cols, 40, |_, w| w);
            let bits = match quant {
                Quant::F16 => half::f16::from_f32(bad).to_bits(),
                _ => half::bf16::from_f32(bad).to_bits(),
            };
            let mut weights = made(&mut rng, quant, cols, 40, |_, w| w);
            for row in weights.data.chunks_exact_mut(weights.bytes / 8) {
                bytemuck::cast_slice_mut::<_, u16>(row)[100] = bits;
            }
            let input = normal(&mut rng, n * cols);
            let mut damaged = input.clone();
            damaged.iter_mut().skip(100).step_by(cols).for_each(|x| *x = bad);
            for kernels in rounding() {
                for (weights, input) in [(&weights, &input), (&finite, &damaged)] {
                    let mut x = Columns::default();
                    x.set_here(&kernels, input, n, [quant]);
                    let y = many(&kernels, weights, 0..40, &x);
                    assert!(y.iter().all(|y| !y.is_finite()), "{} {}", kernels.isa.name(), quant.name());
                }
            }
        }
    }
}

/// Sums over rows of floats of two bytes, which run across neurons, any number of them.
#[test]
fn sums_over_rows_of_two_bytes_keep_their_precision() {
    let mut rng = Prng::new(9);
    for quant in TWO_BYTES {
        for (count, n) in [(320, 33), (7, 5), (289, 70), (64, 1)] {
            for (name, of_row, of_column) in SPREADS {
                let (cols, each) = (600, 512);
                // What lies along the sum is of different rows here.
                let mut weights = Weights::random(&mut rng, quant, cols, count);
                for (k, row) in weights.data.chunks_exact_mut(weights.bytes / 8).enumerate() {
                    let numbers: Vec<f32> = normal(&mut rng, cols).into_iter().map(|w| of_row(k, w)).collect();
                    rows::encode(quant, &numbers, bytemuck::cast_slice_mut(row));
                }
                let input: Vec<f32> =
                    normal(&mut rng, n * count).into_iter().enumerate().map(|(i, x)| of_column(i % count, x)).collect();
                let rows: Vec<Vec<f32>> = (0..count).map(|k| reference::numbers(quant, weights.row(k), cols)).collect();
                for kernels in rounding() {
                    let mut x = Columns::default();
                    x.set_across(None, &kernels, &input, n, quant);
                    let (mut room, mut y) = (Room::default(), vec![0.0; n * cols]);
                    for start in (0..cols).step_by(each) {
                        let range = start..cols.min(start + each);
                        // SAFETY: a range of each column; kernels for this machine.
                        unsafe {
                            let y = y.as_mut_ptr().add(start);
                            kernels.across(quant, |k| weights.row(k), cols, range, &x, &mut room, y, cols);
                        }
                    }
                    let (mut off, mut size) = (0.0, 0.0);
                    for (i, y) in y.iter().enumerate() {
                        let column = &input[i / cols * count..][..count];
                        let weights: Vec<f32> = rows.iter().map(|row| row[i % cols]).collect();
                        let (truth, scale) = (reference::dot(&weights, column), reference::dot_scale(&weights, column));
                        let missed = (f64::from(*y) - truth).abs();
                        let what = format!("{} {} {count} {n} {name}", kernels.isa.name(), quant.name());
                        assert!(missed <= most_off(&weights, column) + 2e-6 * scale, "{what}: {y}, truth {truth}");
                        off += missed.powi(2);
                        size += truth.powi(2);
                    }
                    assert!((off / size).sqrt() < 2e-3, "{} {}: {name}", kernels.isa.name(), quant.name());
                }
            }
        }
    }
}
