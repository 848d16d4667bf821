//! Kernels over rows of weights: codes of inputs, matrix times columns.

mod support;

use dynamicinfer::cpu::Columns;
use dynamicinfer::cpu::reference;
use dynamicinfer::device::{Call, Linear, Then, Tiles};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::rows::{self, PACK, Quant};
use dynamicinfer::prng::Prng;
use support::{Memory, as_codes, as_halves, assert_close, below, has_tensor_tiles, normal};

/// Columns of rows in groups or blocks are whole ones; of others any number, but for bf16, which is read eight at a time.
fn cols(rng: &mut Prng, quant: Quant, most: usize) -> usize {
    let unit = if quant == Quant::Block(BlockType::BF16) { 8 } else { quant.unit() };
    unit * (1 + below(rng, most / unit))
}

/// A row's length near `about` that the type can have.
fn near(quant: Quant, about: usize) -> usize {
    about.next_multiple_of(quant.unit())
}

fn encoded(rng: &mut Prng, quant: Quant, cols: usize, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count * quant.row_bytes(cols)];
    for row in bytes.chunks_exact_mut(quant.row_bytes(cols)) {
        rows::encode(quant, &normal(rng, cols), row);
    }
    bytes
}

fn linear(seed: u64, quant: Quant, rows: usize, cols: usize, n: usize, then: Then, with_bias: bool) {
    let mut rng = Prng::new(seed);
    let weights = encoded(&mut rng, quant, cols, rows);
    let mut x = normal(&mut rng, n * cols);
    if n > 32 {
        // A prompt's columns may differ in size by more than f16 has room for.
        x.chunks_exact_mut(cols).zip(0..).for_each(|(x, b)| x.iter_mut().for_each(|v| *v *= 2f32.powi(b % 61 - 30)));
    }
    let bias = if with_bias { normal(&mut rng, rows) } else { Vec::new() };
    // Between the numbers of two columns stand those of other matrices.
    let stride = rows + 3 * (seed as usize % 2);
    let before = normal(&mut rng, (n - 1) * stride + rows);
    let run = |tiles: Tiles| -> Vec<f32> {
        let mut memory = Memory::default();
        let call = Linear {
            quant,
            rows,
            cols,
            n,
            weights: memory.put(&weights),
            bias: memory.put(&bias),
            x: memory.put(&x).into(),
            out: memory.put(&before).into(),
            stride,
            then,
        };
        memory.call_by(&Call::Linear(call), tiles);
        memory.get(call.out.buffer)
    };
    let check = |all: &[f32], x: &[f32], tiles: Tiles| {
        let got: Vec<f32> = all.chunks(stride).flat_map(|column| &column[..rows]).copied().collect();
        for (now, before) in all.chunks(stride).zip(before.chunks(stride)) {
            assert_eq!(now[rows..], before[rows..], "what stands between columns is not ours");
        }
        let (mut truth, mut scale) = (Vec::new(), Vec::new());
        for b in 0..n {
            for r in 0..rows {
                let row =
                    reference::numbers(quant, &weights[r * quant.row_bytes(cols)..][..quant.row_bytes(cols)], cols);
                let column = &x[b * cols..(b + 1) * cols];
                let bias = bias.get(r).copied().map_or(0.0, f64::from);
                let sum = reference::dot(&row, column) + bias;
                let there = f64::from(before[b * stride + r]);
                truth.push(match then {
                    Then::Store => sum,
                    Then::Relu => sum.max(0.0),
                    Then::Add => sum + there,
                });
                scale.push(reference::dot_scale(&row, column) + bias.abs() + there.abs());
            }
        }
        let what = format!("{quant:?} {rows} x {cols}, {n} columns, {then:?}, {tiles:?}, seed {seed}");
        assert_close(&what, &got, &truth, &scale, 1e-6);
    };
    // Inputs are rounded as the device rounds them, so what is left is the rounding of f32 sums.
    let lanes = run(Tiles::Lanes);
    check(&lanes, &as_codes(&x, n, quant), Tiles::Lanes);
    if n <= 32 || !matches!(quant, Quant::F16 | Quant::Q8 | Quant::Q4) {
        // The same kernels: see below.
        return;
    }
    let tensor = run(Tiles::TensorCores);
    if quant == Quant::F16 {
        check(&tensor, &as_halves(&x, n), Tiles::TensorCores);
    } else {
        let same = tensor.iter().zip(&lanes).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{quant:?} {rows} x {cols}, {n} columns: tensor cores change the result");
    }
}

#[test]
fn matrices_agree_with_the_scalar_truth() {
    let types: Vec<Quant> = Quant::all().collect();
    for seed in 0..240 {
        let mut rng = Prng::new(1000 + seed);
        let quant = types[seed as usize % types.len()];
        let cols = cols(&mut rng, quant, 1400);
        let then = [Then::Store, Then::Relu, Then::Add][below(&mut rng, 3)];
        let (rows, n) = (1 + below(&mut rng, 40), 1 + below(&mut rng, 32));
        linear(seed, quant, rows, cols, n, then, seed % 3 == 0);
    }
}

#[test]
fn every_number_of_columns_is_right() {
    for quant in Quant::all() {
        for n in 1..=32 {
            linear(n as u64, quant, 9, near(quant, 1120), n, Then::Store, false);
        }
    }
}

/// A prompt's: whole tiles, parts of tiles, and the columns at which another kernel takes over.
#[test]
fn as_many_columns_as_a_chunk_has_are_right() {
    for quant in Quant::all() {
        for (n, rows) in [(33, 130), (64, 128), (65, 40), (200, 9), (256, 33)] {
            linear(n as u64, quant, rows, near(quant, 608), n, [Then::Store, Then::Add][n % 2], n % 3 == 0);
        }
    }
}

#[test]
fn tensor_cores_multiply_prompts_of_f16_q8_0_and_q4_0_alone() {
    let none = Memory::default().alloc(0);
    let (rows, cols, stride, then) = (64, 512, 64, Then::Store);
    for quant in Quant::all() {
        for n in [1, 8, 9, 32, 33, 256] {
            let (x, out) = (none.into(), none.into());
            let call = Linear { quant, rows, cols, n, weights: none, bias: none, x, out, stride, then };
            let has = n > 32 && matches!(quant, Quant::F16 | Quant::Q8 | Quant::Q4);
            assert_eq!(has_tensor_tiles(&Call::Linear(call)), has, "{quant:?}, {n} columns");
        }
    }
}

#[test]
fn a_matrix_of_a_real_shape_is_right() {
    for quant in Quant::all() {
        linear(7, quant, 64, 5120, 1, Then::Store, true);
        linear(8, quant, 33, 13824, 3, Then::Add, false);
    }
}

/// Rows of any type are multiplied with what the codes stand for.
#[test]
fn rounded_inputs_are_codes_times_steps() {
    use dynamicinfer::device::kernel::round_inputs;
    let mut rng = Prng::new(5);
    let (cols, n) = (416, 3);
    let mut x = normal(&mut rng, n * cols);
    x[..32].fill(0.0);
    x[n * cols - 32..].iter_mut().for_each(|v| *v *= 1e-40);
    let mut memory = Memory::default();
    let (from, to) = (memory.put(&x), memory.alloc(n * cols * 4));
    memory.run(&[round_inputs(memory.address(from), memory.address(to), n, cols)]);
    let (found, truth) = (memory.get::<f32>(to), as_codes(&x, n, Quant::Q8));
    assert_eq!(found.len(), truth.len());
    for (i, (found, truth)) in found.iter().zip(&truth).enumerate() {
        assert_eq!(found, truth, "number {i} of {} for {}", n * cols, x[i]);
    }
}

/// Of columns of any size: with an infinity, of zeros, subnormal, too large for f16.
#[test]
fn halves_are_inputs_rounded_to_f16() {
    use dynamicinfer::device::kernel::{halved_bytes, halves};
    let mut rng = Prng::new(6);
    let (cols, n) = (301, 5);
    let mut x = normal(&mut rng, n * cols);
    let sizes = [1.0, 0.0, 1e-40, 1e37, 1.0];
    x.chunks_exact_mut(cols).zip(sizes).for_each(|(x, size)| x.iter_mut().for_each(|v| *v *= size));
    x[4 * cols + 7] = f32::INFINITY;
    let mut memory = Memory::default();
    let (from, to) = (memory.put(&x), memory.alloc(n * halved_bytes(cols)));
    memory.run(&[halves(memory.address(from), memory.address(to), n, cols)]);
    let found = memory.get::<u8>(to);
    let truth = as_halves(&x[..4 * cols], 4);
    for (b, column) in found.chunks_exact(halved_bytes(cols)).enumerate() {
        let (numbers, scale) = column.split_at(cols.next_multiple_of(32) * 2);
        let numbers: Vec<half::f16> = bytemuck::pod_collect_to_vec(numbers);
        let scale: f32 = bytemuck::pod_read_unaligned(&scale[..4]);
        assert!(numbers[cols..].iter().all(|v| v.to_bits() == 0), "behind column {b}");
        let finite = numbers.iter().all(|v| v.is_finite());
        assert_eq!(finite, b < 4, "column {b}");
        if finite {
            let found: Vec<f32> = numbers[..cols].iter().map(|v| v.to_f32() * scale).collect();
            assert_eq!(found, truth[b * cols..][..cols], "column {b}");
        }
    }
}

/// The device's codes are the CPU's, bit for bit, so both halves of a model see the same inputs.
#[test]
fn codes_are_those_of_the_cpu() {
    use dynamicinfer::device::kernel::{coded_bytes, quantize};
    for seed in 0..40 {
        let mut rng = Prng::new(seed);
        let (cols, n) = (32 * (1 + below(&mut rng, 60)), 1 + below(&mut rng, 32));
        let mut x = normal(&mut rng, n * cols);
        // Ties, zeros, a group of zeros, and one of numbers whose step is denormal.
        x.iter_mut().step_by(7).for_each(|v| *v = (*v * 8.0).round() / 8.0);
        x[..32].fill(0.0);
        x[n * cols - 32..].iter_mut().for_each(|v| *v *= 1e-40);
        let mut memory = Memory::default();
        let from = memory.put(&x);
        let to = memory.alloc(n * coded_bytes(cols));
        memory.run(&[quantize(memory.address(from), memory.address(to), n, cols)]);
        let got: Vec<u8> = memory.get(to);
        let mut truth = Columns::default();
        truth.set(&x, n, Quant::Q8);
        for (b, coded) in got.chunks_exact(coded_bytes(cols)).enumerate() {
            for (p, pack) in coded.chunks_exact(PACK + PACK / 8).enumerate() {
                let (codes, steps) = pack.split_at(PACK);
                let (numbers, groups) = ((cols - p * PACK).min(PACK), (cols - p * PACK).min(PACK) / 32);
                let codes: &[i8] = bytemuck::cast_slice(&codes[..numbers]);
                assert_eq!(
                    codes,
                    &truth.codes(b)[p * PACK..][..numbers],
                    "column {b} of {n}, {cols} numbers, seed {seed}"
                );
                let steps: Vec<f32> = bytemuck::pod_collect_to_vec(&steps[..groups * 4]);
                let of_cpu = &truth.steps(b)[p * PACK / 32..][..groups];
                assert!(steps.iter().zip(of_cpu).all(|(a, b)| a.to_bits() == b.to_bits()), "steps, seed {seed}");
            }
        }
    }
}
