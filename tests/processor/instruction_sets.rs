//! Every instruction set answers as plain Rust does: models of every kind of rows, prompts in every form.

use crate::support::{error, opened};
#[allow(unused)]
use dynamicinfer::cpu::floats::Room;
use dynamicinfer::cpu::{Columns, Isa, Kernels, Prefill, Rows, reference};
use dynamicinfer::engine::{Engine, Session};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::model::KvType;
use dynamicinfer::prng::Prng;

/// Columns: few, a prompt's with fewer and with as many as floats are turned for, and a tile more.
const COLUMNS: [usize; 4] = [5, 33, 48, 64];
const ROWS: usize = 33;

/// Rows of one type, as bytes and as the numbers that they stand for.
struct Weights {
    quant: Quant,
    cols: usize,
    bytes: usize,
    storage: Vec<u64>,
    numbers: Vec<Vec<f32>>,
}

impl Weights {
    fn random(rng: &mut Prng, quant: Quant) -> Weights {
        let cols = 96usize.next_multiple_of(quant.unit());
        let bytes = quant.row_bytes(cols);
        let mut storage = vec![0u64; (ROWS * bytes).div_ceil(8)];
        let rows = bytemuck::cast_slice_mut::<u64, u8>(&mut storage);
        for row in rows.chunks_exact_mut(bytes).take(ROWS) {
            rows::encode(quant, &numbers(rng, cols), row);
        }
        let numbers = rows.chunks_exact(bytes).take(ROWS).map(|row| reference::numbers(quant, row, cols)).collect();
        Weights { quant, cols, bytes, storage, numbers }
    }

    fn row(&self, r: usize) -> &[u8] {
        &bytemuck::cast_slice(&self.storage)[r * self.bytes..][..self.bytes]
    }
}

fn numbers(rng: &mut Prng, count: usize) -> Vec<f32> {
    (0..count).map(|_| rng.next_f64() as f32 * 2.0 - 1.0).collect()
}

/// Inputs of seven bits are off by up to 0.8 % of their largest number, weights that are rounded to int8 by 0.4 %: beside sums of magnitudes,
/// which are half of that for each number, four times as much is far from what a product is that is wrong.
fn assert_near(found: f32, row: &[f32], column: &[f32], what: &dyn Fn() -> String) {
    let off = (f64::from(found) - reference::dot(row, column)).abs();
    let most = 0.05 * reference::dot_scale(row, column);
    assert!(off <= most, "{}: off by {off}, at most {most}", what());
}

/// Where AVX-VNNI was there without AVX-512, `form` named codes for F16 and BF16, for which the rows have to be turned, and the turning of
/// that set took f32 alone: a prompt of 48 tokens ended the program.
#[test]
fn what_form_names_every_set_multiplies() {
    let mut rng = Prng::new(3);
    for quant in Quant::all() {
        let weights = Weights::random(&mut rng, quant);
        let input = numbers(&mut rng, COLUMNS[COLUMNS.len() - 1] * weights.cols.max(ROWS - 1));
        for (kind, kernels) in Isa::ALL.into_iter().flat_map(Kernels::kinds) {
            for prefill in [Prefill::Exact, Prefill::Int8, Prefill::Int8PerTensor] {
                for (rounds_floats, seven_bits) in [(false, false), (true, true)] {
                    let mut kernels = kernels.with(prefill);
                    (kernels.rounds_floats, kernels.seven_bits) = (rounds_floats, seven_bits);
                    for n in COLUMNS {
                        let what =
                            || format!("{} {kind} {prefill:?} {n} columns, rounded: {rounds_floats}", quant.name());
                        multiplies(&kernels, &weights, &input, n, &what);
                        multiplies_across(&kernels, &weights, &input, n, &what);
                    }
                }
            }
        }
    }
}

fn multiplies(kernels: &Kernels, weights: &Weights, input: &[f32], n: usize, what: &dyn Fn() -> String) {
    let mut x = Columns::default();
    x.set_here(kernels, &input[..n * weights.cols], n, [weights.quant]);
    let mut y = vec![f32::NAN; n * ROWS];
    let rows = Rows { first: weights.row(0).as_ptr(), stride: weights.bytes, ahead: 0 };
    // SAFETY: whole rows, room for all products, kernels for this machine.
    unsafe { kernels.products(weights.quant, rows, ROWS, &x, y.as_mut_ptr(), ROWS) };
    for (i, found) in y.into_iter().enumerate() {
        let column = &input[i / ROWS * weights.cols..][..weights.cols];
        assert_near(found, &weights.numbers[i % ROWS], column, &|| {
            format!("{} by {:?}", what(), x.form(kernels, weights.quant))
        });
    }
}

/// Sums over all rows but one, whose number is a multiple of 32.
fn multiplies_across(kernels: &Kernels, weights: &Weights, input: &[f32], n: usize, what: &dyn Fn() -> String) {
    let (count, cols) = (ROWS - 1, weights.cols);
    let (mut x, mut room, mut y) = (Columns::default(), Room::default(), vec![0.0; n * cols]);
    x.set_across(None, kernels, &input[..n * count], n, weights.quant);
    // SAFETY: as above.
    unsafe {
        kernels.across(weights.quant, |k| weights.row(k), cols, 0..cols, &x, &mut room, y.as_mut_ptr(), cols);
    }
    for (i, found) in y.into_iter().enumerate() {
        let column = &input[i / cols * count..][..count];
        let numbers: Vec<f32> = weights.numbers[..count].iter().map(|row| row[i % cols]).collect();
        assert_near(found, &numbers, column, &|| {
            format!("{} across, by {:?}", what(), kernels.form_across(weights.quant, count))
        });
    }
}

/// A few tokens, which the row kernels take; as many as have a form of their own with floats; a tile of columns more; more than a panel holds.
const PROMPTS: [usize; 4] = [5, 48, 64, 300];

/// Logits after a prompt, and after a token behind it, which meets the row kernels.
fn logits(engine: &mut Engine, n: usize) -> Vec<f32> {
    let tokens: Vec<u32> = (0..n as u32).map(|i| 5 + (i * 37 + i / 90 * 11) % 90).collect();
    let mut session = Session::new(engine, n + 1, KvType::F32).unwrap();
    let mut logits = session.append(engine, &tokens, |_| Ok(())).unwrap().to_vec();
    logits.extend_from_slice(session.append(engine, &[7], |_| Ok(())).unwrap());
    logits
}

/// The rows of these types are multiplied as they are, unless floats are to be rounded; inputs of all others are rounded to int8, which moves
/// logits of models as small as these by some percent.
#[test]
fn logits_are_those_of_plain_rust_with_every_instruction_set() {
    let (float, int8) = (1e-3, 0.1);
    for (quant, tolerance) in [
        (Quant::F32, float),
        (Quant::F16, float),
        (Quant::Block(BlockType::BF16), float),
        (Quant::Q8, int8),
        (Quant::Q4, int8),
        (Quant::Block(BlockType::Q8_0), int8),
        (Quant::Block(BlockType::Q4_0), int8),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let engine = |kernels| Engine::new(opened(dir.path(), "llama", quant), 2, kernels);
        let mut plain = engine(Kernels::of(Isa::Portable).unwrap().with(Prefill::Exact));
        let truth = PROMPTS.map(|n| logits(&mut plain, n));
        for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
            for prefill in [Prefill::Exact, Prefill::Int8, Prefill::Int8PerTensor] {
                for rounds_floats in [false, true] {
                    let rounded = rounds_floats && prefill == Prefill::Int8;
                    let mut kernels = kernels.with(prefill);
                    kernels.rounds_floats = rounds_floats;
                    let mut engine = engine(kernels);
                    for (n, truth) in PROMPTS.into_iter().zip(&truth) {
                        let off = error(&logits(&mut engine, n), truth);
                        let what = format!("{} {} {prefill:?} {n} tokens", quant.name(), kernels.isa.name());
                        println!("{what}, floats rounded: {rounds_floats}: {off:.1e}");
                        let most = if rounded { int8 } else { tolerance };
                        assert!(off <= most, "{what}, floats rounded: {rounds_floats}: {off}");
                    }
                }
            }
        }
    }
}
