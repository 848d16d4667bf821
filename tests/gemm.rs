//! The law of products with many columns: for every type, instruction set, length and number of columns they agree with the scalar
//! truth, exactly where int8 holds the inputs, also at the ends of what codes, inputs and scales can be; and a row's products do not
//! depend on the rows and threads beside it.

use dynamicinfer::cpu::reference;
use dynamicinfer::cpu::{Columns, Isa, Kernels, MAX_COLUMNS, ManyForm, Panels, Rows, ThreadPool};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::prng::Prng;
use half::f16;
use proptest::prelude::*;

/// Rows of weights, each with exactly the bytes that kernels may read behind it.
struct Weights {
    quant: Quant,
    cols: usize,
    rows: Vec<Vec<u8>>,
}

impl Weights {
    fn new(quant: Quant, cols: usize, count: usize, mut fill: impl FnMut(usize, &mut [u8])) -> Weights {
        let bytes = if quant.is_grouped() { quant.row_bytes(cols) } else { quant.number_bytes(cols) };
        let rows = (0..count)
            .map(|r| {
                let mut row = vec![0; bytes];
                fill(r, &mut row);
                row
            })
            .collect();
        Weights { quant, cols, rows }
    }

    fn random(rng: &mut Prng, quant: Quant, cols: usize, count: usize) -> Weights {
        Weights::new(quant, cols, count, |_, row| {
            row.fill_with(|| rng.next_u64() as u8);
            put_scales(quant, cols, row, &mut || {
                (rng.next_f64() as f32 + 0.5) * if rng.below(2) == 0 { 1.0 } else { -1.0 }
            });
        })
    }

    fn numbers(&self, r: usize) -> Vec<f32> {
        // Rows of our own types are read where they are aligned.
        let mut aligned = vec![0u64; self.rows[r].len().div_ceil(8)];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut aligned);
        bytes[..self.rows[r].len()].copy_from_slice(&self.rows[r]);
        reference::numbers(self.quant, &bytes[..self.rows[r].len()], self.cols)
    }

    fn pointers(&self) -> Vec<*const u8> {
        self.rows.iter().map(|row| row.as_ptr()).collect()
    }
}

/// Puts scales where a row has them: about as large as `next` says.
fn put_scales(quant: Quant, cols: usize, row: &mut [u8], next: &mut dyn FnMut() -> f32) {
    match quant {
        Quant::Block(kind) => {
            let form = kind.form();
            for block in row.chunks_exact_mut(form.bytes) {
                if kind == BlockType::MXFP4 {
                    block[0] = 127;
                }
                for &at in form.scales {
                    block[at..at + 2].copy_from_slice(&f16::from_f32(next()).to_le_bytes());
                }
            }
        }
        _ => {
            let at = quant.number_bytes(cols);
            for scale in row[at..at + cols / 32 * 2].chunks_exact_mut(2) {
                scale.copy_from_slice(&f16::from_f32(next()).to_le_bytes());
            }
        }
    }
}

fn supported() -> impl Iterator<Item = Kernels> {
    Isa::ALL.into_iter().filter_map(Kernels::of)
}

fn quantised() -> impl Iterator<Item = Quant> {
    Quant::all().filter(|quant| quant.unit() > 1)
}

/// What the kernels give for all rows and columns, `[n, rows]`; `None` where they have no such product.
fn products(kernels: &Kernels, weights: &Weights, input: &[f32], n: usize) -> Option<Vec<f32>> {
    let gemm = kernels.gemm(weights.quant)?;
    let mut x = Panels::default();
    x.set(None, kernels, input, n);
    let count = weights.rows.len();
    // Behind each column there is something that must stay as it is.
    let stride = count + 3;
    let mut y = vec![f32::NAN; n * stride];
    // SAFETY: whole rows, and kernels for this machine.
    unsafe { gemm(&weights.pointers(), &x, y.as_mut_ptr(), stride) };
    for column in y.chunks_exact(stride) {
        assert!(column[..count].iter().all(|y| !y.is_nan()) && column[count..].iter().all(|y| y.is_nan()));
    }
    Some(y.chunks_exact(stride).flat_map(|column| column[..count].to_vec()).collect())
}

/// Compares all products with the truth, within `tolerance` times the sum of the products' magnitudes.
fn check(weights: &Weights, input: &[f32], n: usize, tolerance: f64) {
    let numbers: Vec<Vec<f32>> = (0..weights.rows.len()).map(|r| weights.numbers(r)).collect();
    let truths: Vec<(f64, f64)> = input
        .chunks_exact(weights.cols)
        .flat_map(|column| numbers.iter().map(|row| (reference::dot(row, column), reference::dot_scale(row, column))))
        .collect();
    assert_eq!(truths.len(), n * numbers.len());
    let mut checked = 0;
    for kernels in supported() {
        let Some(y) = products(&kernels, weights, input, n) else { continue };
        checked += 1;
        for (i, (y, (exact, scale))) in y.iter().zip(&truths).enumerate() {
            assert!(
                (f64::from(*y) - exact).abs() <= tolerance * scale,
                "{} {} cols {} row {} column {} of {n}: {y}, truth {exact}, magnitudes {scale}",
                kernels.isa.name(),
                weights.quant.name(),
                weights.cols,
                i % numbers.len(),
                i / numbers.len()
            );
        }
    }
    let expected = supported().filter(|kernels| kernels.isa != Isa::Portable).count();
    assert_eq!(checked, expected, "{}: instruction sets", weights.quant.name());
}

fn length(quant: Quant, groups: usize) -> usize {
    (groups * 32).next_multiple_of(quant.unit())
}

/// Whole numbers with 127 in each group of 32: their step is one, and int8 holds them.
fn whole_numbers(rng: &mut Prng, numbers: usize) -> Vec<f32> {
    (0..numbers).map(|i| if i % 32 == 5 { 127.0 } else { rng.below(255) as f32 - 127.0 }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn products_are_exact_for_inputs_that_int8_holds(seed in any::<u64>(), groups in 1usize..40, n in 33usize..=70, count in 1usize..=70) {
        let mut rng = Prng::new(seed);
        for quant in quantised() {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            let input = whole_numbers(&mut rng, n * weights.cols);
            check(&weights, &input, n, 2e-6);
        }
    }

    #[test]
    fn products_agree_with_the_scalar_truth(seed in any::<u64>(), groups in 1usize..40, n in 1usize..=70, count in 1usize..=40) {
        let mut rng = Prng::new(seed);
        for quant in quantised() {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            let input: Vec<f32> = (0..n * weights.cols).map(|_| rng.next_f64() as f32 * 8.0 - 4.0).collect();
            check(&weights, &input, n, 0.02);
        }
    }

    /// Bits, not about: the rest of the engine promises the same answer for any number of threads.
    #[test]
    fn a_row_gives_the_same_whatever_is_beside_it(seed in any::<u64>(), groups in 1usize..40, count in 2usize..=70) {
        let mut rng = Prng::new(seed);
        for quant in quantised() {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            let input: Vec<f32> = (0..40 * weights.cols).map(|_| rng.next_f64() as f32 - 0.5).collect();
            for kernels in supported() {
                let Some(all) = products(&kernels, &weights, &input, 40) else { continue };
                let r = rng.below(count as u64) as usize;
                let alone = Weights { quant, cols: weights.cols, rows: vec![weights.rows[r].clone()] };
                let alone = products(&kernels, &alone, &input, 40).unwrap();
                for (b, one) in alone.iter().enumerate() {
                    prop_assert_eq!(all[b * count + r].to_bits(), one.to_bits());
                }
                // Nor do the columns depend on each other.
                let last = products(&kernels, &weights, &input[39 * weights.cols..], 1).unwrap();
                prop_assert!(last.iter().zip(&all[39 * count..]).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
        }
    }
}

#[test]
fn up_to_256_columns_and_rows_of_many_pieces() {
    let mut rng = Prng::new(3);
    for quant in quantised() {
        let weights = Weights::random(&mut rng, quant, 1536 + 256, 33);
        for n in [33, 255, 256] {
            let input = whole_numbers(&mut rng, n * weights.cols);
            check(&weights, &input, n, 2e-6);
        }
    }
}

/// Every byte of a row the same, which is every code at an end of its range, against inputs at an end of theirs: where 16 bits do not hold
/// a sum it comes out wrong here.
#[test]
fn codes_and_inputs_at_the_ends_of_their_ranges() {
    for quant in quantised() {
        let bytes = [0x00, 0x7f, 0x80, 0x81, 0xff, 0x0f, 0xf0, 0x88, 0x77];
        let cols = 1024 + length(quant, 1);
        let weights = Weights::new(quant, cols, bytes.len(), |r, row| {
            row.fill(bytes[r]);
            put_scales(quant, cols, row, &mut || 1.0);
        });
        let signs: [fn(usize) -> f32; 4] = [|_| 1.0, |_| -1.0, |i| [1.0, -1.0][i % 2], |i| [1.0, -1.0][i / 16 % 2]];
        let input: Vec<f32> = signs.iter().flat_map(|sign| (0..cols).map(move |i| 127.0 * sign(i))).collect();
        check(&weights, &input, signs.len(), 2e-6);
    }
}

/// Scales from the least to the greatest of their form, where products with large numbers could be beyond f32 or lose their last bits.
#[test]
fn scales_at_the_ends_of_their_ranges() {
    let mut rng = Prng::new(5);
    for quant in quantised() {
        let cols = length(quant, 9);
        let ends = [f16::MAX, f16::MIN, f16::MIN_POSITIVE, f16::from_bits(1), f16::ZERO].map(f16::to_f32);
        let mut weights = Weights::new(quant, cols, ends.len(), |r, row| {
            row.fill_with(|| rng.next_u64() as u8);
            put_scales(quant, cols, row, &mut || ends[r]);
        });
        if quant == Quant::Block(BlockType::MXFP4) {
            // Of an exponent of 0 the kernels make 0.
            for (row, exponent) in weights.rows.iter_mut().zip([1, 2, 200, 236, 240]) {
                row.chunks_exact_mut(17).for_each(|block| block[0] = exponent);
            }
        }
        let input = whole_numbers(&mut rng, 40 * cols);
        check(&weights, &input, 40, 2e-6);
    }
}

/// Inputs have the same codes, steps and sums for every instruction set, which only lays them out for as many columns as its tiles have.
#[test]
fn inputs_are_rounded_alike() {
    let (mut rng, mut pool) = (Prng::new(11), ThreadPool::new(2));
    let (n, cols) = (35, 96);
    let mut input: Vec<f32> =
        (0..n * cols).map(|_| (rng.next_f64() as f32 - 0.5) * 2f32.powi(rng.below(40) as i32 - 20)).collect();
    // A group of zeros, and numbers that lie between two codes.
    input[cols..cols + 32].fill(0.0);
    (0..32).for_each(|i| input[2 * cols + i] = if i == 0 { 127.0 } else { i as f32 - 15.5 });
    let plain = Kernels::of(Isa::Portable).unwrap();
    let mut truth = Panels::default();
    truth.set(Some(&mut pool), &plain, &input, n);
    for kernels in supported() {
        let mut x = Panels::default();
        x.set(Some(&mut pool), &kernels, &input, n);
        for b in 0..n.next_multiple_of(x.width) {
            for group in 0..cols / 32 {
                let (words, place) = (x.panel(b / x.width, group), b % x.width);
                for word in 0..12 {
                    let expected = match (b < n, word) {
                        (true, _) => truth.panel(b, group)[word].to_bits(),
                        (false, ..8) => 0x8080_8080,
                        (false, _) => 0,
                    };
                    let found = words[word * x.width + place].to_bits();
                    assert_eq!(found, expected, "{} column {b} group {group} word {word}", kernels.isa.name());
                }
            }
        }
    }
}

/// Whole matrices of few columns take the form that is faster there, and lists of neurons the row kernels: it must be the same product.
#[test]
fn few_columns_give_the_same_product_in_either_form() {
    let (mut rng, mut pool, cols, count) = (Prng::new(13), ThreadPool::new(2), 1024, 70);
    for kernels in supported() {
        let mut forms = Vec::new();
        for quant in Quant::all().filter(|quant| kernels.gemm(*quant).is_some()) {
            let bytes = quant.row_bytes(cols);
            let mut data = vec![0u64; (count * bytes).div_ceil(8)];
            for row in bytemuck::cast_slice_mut(&mut data)[..count * bytes].chunks_exact_mut(bytes) {
                let numbers: Vec<f32> = (0..cols).map(|_| rng.next_f64() as f32 - 0.5).collect();
                rows::encode(quant, &numbers, row);
            }
            let rows = Rows { first: data.as_ptr().cast(), stride: bytes, ahead: 0 };
            for n in [1, 5, 8, 9, 12, 17, MAX_COLUMNS] {
                let input: Vec<f32> = (0..n * cols).map(|_| rng.next_f64() as f32 - 0.5).collect();
                let [mut matrices, mut lists] = [Columns::default(), Columns::default()];
                matrices.set_many(&mut pool, &kernels, &input, n, [quant]);
                lists.set_for(&input, n, [quant]);
                assert_eq!(lists.form(&kernels, quant), ManyForm::Rows);
                forms.push(matrices.form(&kernels, quant));
                let [one, other] = [matrices, lists].map(|x| {
                    let mut y = vec![f32::NAN; n * count];
                    // SAFETY: whole rows, and kernels for this machine.
                    unsafe { kernels.products(quant, rows, count, &x, y.as_mut_ptr(), count) };
                    y
                });
                for (i, (one, other)) in one.iter().zip(&other).enumerate() {
                    let row = &bytemuck::cast_slice(&data)[i % count * bytes..][..bytes];
                    let column = &input[i / count * cols..][..cols];
                    let scale = reference::dot_scale(&reference::numbers(quant, row, cols), column) as f32;
                    let what = format!("{} {} n {n}", kernels.isa.name(), quant.name());
                    assert!((one - other).abs() <= 1e-5 * scale, "{what}: {one} {other}");
                }
            }
        }
        if kernels.isa == Isa::Avx512 {
            assert!(forms.contains(&ManyForm::Codes) && forms.contains(&ManyForm::Rows));
        }
    }
}

#[test]
fn columns_take_the_form_that_their_weights_have() {
    let (mut rng, mut pool) = (Prng::new(7), ThreadPool::new(2));
    let (n, count) = (40, 50);
    for kernels in supported() {
        for quants in [[Quant::F16, Quant::Q8], [Quant::Q4, Quant::Q4], [Quant::F32, Quant::F16]] {
            let cols = 544;
            let input = whole_numbers(&mut rng, n * cols);
            let mut x = Columns::default();
            x.set_many(&mut pool, &kernels, &input, n, quants);
            assert_eq!(x.panels().n > 0, quants.iter().any(|&quant| kernels.gemm(quant).is_some()));
            for quant in quants {
                let bytes = quant.row_bytes(cols);
                let mut data = vec![0u64; count * bytes / 8];
                for row in data.chunks_exact_mut(bytes / 8) {
                    let numbers: Vec<f32> = (0..cols).map(|_| rng.next_f64() as f32 - 0.5).collect();
                    rows::encode(quant, &numbers, bytemuck::cast_slice_mut(row));
                }
                let rows = Rows { first: data.as_ptr().cast(), stride: bytes, ahead: 0 };
                let mut y = vec![f32::NAN; n * count];
                // SAFETY: whole rows, and kernels for this machine.
                unsafe { kernels.products(quant, rows, count, &x, y.as_mut_ptr(), count) };
                for (i, y) in y.iter().enumerate() {
                    let row = &bytemuck::cast_slice(&data)[i % count * bytes..][..bytes];
                    let numbers = reference::numbers(quant, row, cols);
                    let column = &input[i / count * cols..][..cols];
                    let (exact, scale) = (reference::dot(&numbers, column), reference::dot_scale(&numbers, column));
                    assert!((f64::from(*y) - exact).abs() <= 2e-6 * scale, "{} {}", kernels.isa.name(), quant.name());
                }
            }
            // For few columns there is nothing but the old form.
            x.set_many(&mut pool, &kernels, &input[..cols], 1, quants);
            assert_eq!((x.panels().n, x.floats().n), (0, 0));
        }
    }
}
