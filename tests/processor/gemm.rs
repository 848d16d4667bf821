//! The law of products with many columns: for every type, instruction set, length and number of columns they agree with the scalar
//! truth, exactly where int8 (or seven bits, for types that have such a product) holds the inputs, else within half a step of each number,
//! also at the ends of what codes, inputs and scales can be; and a row's products do not depend on the rows and threads beside it.

use dynamicinfer::cpu::reference;
use dynamicinfer::cpu::{Bits, Columns, Isa, Kernels, MAX_COLUMNS, ManyForm, Panels, Prefill, Rows, ThreadPool};
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

/// Types with codes of eight bits, whose products with AVX2 alone take inputs of seven.
const WIDE: [Quant; 4] =
    [Quant::Q8, Quant::Block(BlockType::Q8_0), Quant::Block(BlockType::IQ4_NL), Quant::Block(BlockType::IQ4_XS)];

/// What the kernels give for all rows and columns, `[n, rows]`, of inputs with so many bits; `None` where they have no such product.
fn products(kernels: &Kernels, weights: &Weights, bits: Bits, input: &[f32], n: usize) -> Option<Vec<f32>> {
    let gemm = kernels.gemm(weights.quant, bits)?;
    let mut x = Panels::default();
    x.set(None, kernels, bits, input, n);
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

/// How far rounding an input to so many bits may take a product: half a step of each number, and a little for steps that are rounded.
fn rounding(row: &[f32], column: &[f32], bits: Bits) -> f64 {
    let groups = row.chunks(32).zip(column.chunks(32));
    let steps = groups.map(|(row, column)| {
        let top = column.iter().fold(0f32, |top, number| top.max(number.abs()));
        let sizes: f64 = row.iter().map(|weight| f64::from(weight.abs())).sum();
        f64::from(top / bits.most()) * sizes
    });
    0.50001 * steps.sum::<f64>()
}

/// Compares all products with the truth: those of inputs that codes hold within 2e-6 times the sum of the products' magnitudes, others within
/// what rounding costs besides.
fn check(weights: &Weights, bits: Bits, input: &[f32], n: usize, held: bool) {
    let numbers: Vec<Vec<f32>> = (0..weights.rows.len()).map(|r| weights.numbers(r)).collect();
    let truth = |row: &Vec<f32>, column: &[f32]| {
        let rounding = if held { 0.0 } else { rounding(row, column, bits) };
        (reference::dot(row, column), 2e-6 * reference::dot_scale(row, column) + rounding)
    };
    let columns = input.chunks_exact(weights.cols);
    let truths: Vec<(f64, f64)> =
        columns.flat_map(|column| numbers.iter().map(move |row| truth(row, column))).collect();
    assert_eq!(truths.len(), n * numbers.len());
    let mut checked = 0;
    for kernels in supported() {
        let Some(y) = products(&kernels, weights, bits, input, n) else { continue };
        checked += 1;
        for (i, (y, (exact, most))) in y.iter().zip(&truths).enumerate() {
            assert!(
                (f64::from(*y) - exact).abs() <= *most,
                "{} {} {bits:?} cols {} row {} column {} of {n}: {y}, truth {exact}, at most {most} off",
                kernels.isa.name(),
                weights.quant.name(),
                weights.cols,
                i % numbers.len(),
                i / numbers.len()
            );
        }
    }
    let has = |isa| match bits {
        Bits::Eight => isa != Isa::Portable,
        Bits::Seven => isa == Isa::Avx2 && WIDE.contains(&weights.quant),
    };
    let expected = supported().filter(|kernels| has(kernels.isa)).count();
    assert_eq!(checked, expected, "{}: instruction sets", weights.quant.name());
}

fn length(quant: Quant, groups: usize) -> usize {
    (groups * 32).next_multiple_of(quant.unit())
}

/// Whole numbers with the largest code in each group of 32: their step is one, and codes hold them.
fn whole_numbers(rng: &mut Prng, bits: Bits, numbers: usize) -> Vec<f32> {
    let most = bits.most();
    (0..numbers).map(|i| if i % 32 == 5 { most } else { rng.below(2 * most as u64 + 1) as f32 - most }).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn products_are_exact_for_inputs_that_int8_holds(seed in any::<u64>(), groups in 1usize..40, n in 33usize..=70, count in 1usize..=70) {
        let mut rng = Prng::new(seed);
        for quant in quantised() {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            for bits in Bits::ALL {
                let input = whole_numbers(&mut rng, bits, n * weights.cols);
                check(&weights, bits, &input, n, true);
            }
        }
    }

    #[test]
    fn products_agree_with_the_scalar_truth(seed in any::<u64>(), groups in 1usize..40, n in 1usize..=70, count in 1usize..=40) {
        let mut rng = Prng::new(seed);
        for quant in quantised() {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            let input: Vec<f32> = (0..n * weights.cols).map(|_| rng.next_f64() as f32 * 8.0 - 4.0).collect();
            Bits::ALL.into_iter().for_each(|bits| check(&weights, bits, &input, n, false));
        }
    }

    /// Bits, not about: the rest of the engine promises the same answer for any number of threads.
    #[test]
    fn a_row_gives_the_same_whatever_is_beside_it(seed in any::<u64>(), groups in 1usize..40, count in 2usize..=70) {
        let mut rng = Prng::new(seed);
        for quant in quantised() {
            let weights = Weights::random(&mut rng, quant, length(quant, groups), count);
            let input: Vec<f32> = (0..40 * weights.cols).map(|_| rng.next_f64() as f32 - 0.5).collect();
            for (kernels, bits) in supported().flat_map(|kernels| Bits::ALL.map(|bits| (kernels, bits))) {
                let Some(all) = products(&kernels, &weights, bits, &input, 40) else { continue };
                let r = rng.below(count as u64) as usize;
                let alone = Weights { quant, cols: weights.cols, rows: vec![weights.rows[r].clone()] };
                let alone = products(&kernels, &alone, bits, &input, 40).unwrap();
                for (b, one) in alone.iter().enumerate() {
                    prop_assert_eq!(all[b * count + r].to_bits(), one.to_bits());
                }
                // Nor do the columns depend on each other.
                let last = products(&kernels, &weights, bits, &input[39 * weights.cols..], 1).unwrap();
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
        for (n, bits) in [33, 255, 256].into_iter().flat_map(|n| Bits::ALL.map(|bits| (n, bits))) {
            let input = whole_numbers(&mut rng, bits, n * weights.cols);
            check(&weights, bits, &input, n, true);
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
        for bits in Bits::ALL {
            let input: Vec<f32> = signs.iter().flat_map(|sign| (0..cols).map(move |i| bits.most() * sign(i))).collect();
            check(&weights, bits, &input, signs.len(), true);
        }
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
        for bits in Bits::ALL {
            let input = whole_numbers(&mut rng, bits, 40 * cols);
            check(&weights, bits, &input, 40, true);
        }
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
    for bits in Bits::ALL {
        let plain = Kernels::of(Isa::Portable).unwrap();
        let mut truth = Panels::default();
        truth.set(Some(&mut pool), &plain, bits, &input, n);
        for kernels in supported() {
            let mut x = Panels::default();
            x.set(Some(&mut pool), &kernels, bits, &input, n);
            let filled_up = u32::from_ne_bytes([bits.raised(); 4]);
            for (b, group) in (0..n.next_multiple_of(x.width)).flat_map(|b| (0..cols / 32).map(move |group| (b, group)))
            {
                let (words, place) = (x.panel(b / x.width, group), b % x.width);
                for word in 0..12 {
                    let expected = match (b < n, word) {
                        (true, _) => truth.panel(b, group)[word].to_bits(),
                        (false, ..8) => filled_up,
                        (false, _) => 0,
                    };
                    let found = words[word * x.width + place].to_bits();
                    assert_eq!(found, expected, "{} {bits:?} column {b} group {group} word {word}", kernels.isa.name());
                }
            }
        }
    }
}

/// Whole matrices of few columns take the form that is faster there, and lists of neurons the row kernels: it must be the same product.
#[test]
fn few_columns_give_the_same_product_in_either_form() {
    let (mut rng, mut pool, cols, count) = (Prng::new(13), ThreadPool::new(2), 1024, 70);
    for mut kernels in supported() {
        // Seven bits are for prompts alone.
        kernels.seven_bits = true;
        let mut forms = Vec::new();
        for quant in Quant::all().filter(|quant| kernels.gemm(*quant, Bits::Eight).is_some()) {
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
            let input = whole_numbers(&mut rng, Bits::Eight, n * cols);
            let mut x = Columns::default();
            x.set_many(&mut pool, &kernels, &input, n, quants);
            let has = quants.iter().any(|&quant| kernels.gemm(quant, Bits::Eight).is_some());
            assert_eq!(x.panels(Bits::Eight).n > 0, has);
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
            assert_eq!((x.panels(Bits::Eight).n, x.floats().n), (0, 0));
        }
    }
}

/// Of types that are multiplied together those with few bits keep inputs of eight, bit for bit; and nothing but a prompt gets seven.
#[test]
fn seven_bits_are_for_prompts_and_types_of_eight_bits_alone() {
    let (mut rng, mut pool, cols, count) = (Prng::new(17), ThreadPool::new(2), 1024, 40);
    for (eight, wide) in supported().flat_map(|kernels| WIDE.map(|quant| (kernels, quant))) {
        let mut seven = eight;
        seven.seven_bits = true;
        let n = MAX_COLUMNS + 1;
        let expected = if eight.isa == Isa::Avx2 { Bits::Seven } else { Bits::Eight };
        assert_eq!(seven.bits(wide, n), expected);
        let others = [seven.with(Prefill::Exact), seven.with(Prefill::Int8PerTensor), eight].map(|k| k.bits(wide, n));
        assert_eq!((others, seven.bits(wide, MAX_COLUMNS)), ([Bits::Eight; 3], Bits::Eight));
        let narrow = Quant::Block(BlockType::Q6_K);
        let input: Vec<f32> = (0..n * cols).map(|_| rng.next_f64() as f32 - 0.5).collect();
        let [mut x, mut before] = [Columns::default(), Columns::default()];
        x.set_many(&mut pool, &seven, &input, n, [narrow, wide]);
        before.set_many(&mut pool, &eight, &input, n, [narrow, wide]);
        assert_eq!((x.panels(Bits::Seven).n > 0, before.panels(Bits::Seven).n), (expected == Bits::Seven, 0));
        for quant in [narrow, wide] {
            let weights = Weights::random(&mut rng, quant, cols, count);
            let [now, then] = [(seven, &x), (eight, &before)].map(|(kernels, x)| {
                let mut y = vec![f32::NAN; n * count];
                // Without such a product rows want to lie in a matrix.
                if kernels.gemm(quant, Bits::Eight).is_some() {
                    // SAFETY: whole rows, and kernels for this machine.
                    unsafe { kernels.many(quant, &weights.pointers(), x, y.as_mut_ptr(), count) };
                }
                y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            assert_eq!(now == then, seven.bits(quant, n) == Bits::Eight, "{} {}", eight.isa.name(), quant.name());
        }
    }
}
