//! Kernels over vectors: norms, signs, selection, sums, copies.

mod support;

use dynamicinfer::cpu::Isa;
use dynamicinfer::cpu::sign::{self, BitLine};
use dynamicinfer::device::{Add, Call, NONE, Norm, Select, SignScores, View, kernel};
use dynamicinfer::model::config::Norm as NormKind;
use dynamicinfer::prng::Prng;
use support::{Memory, assert_close, below, normal};

#[test]
fn norms_agree_with_f64() {
    for seed in 0..60 {
        let mut rng = Prng::new(seed);
        let (hidden, n) = (1 + below(&mut rng, 1500), 1 + below(&mut rng, 32));
        let (layer, epsilon) = (seed % 2 == 0, 1e-5f32);
        let mut memory = Memory::default();
        let weight = if seed % 5 == 0 { Vec::new() } else { normal(&mut rng, hidden) };
        let bias = if layer && seed % 4 == 0 { normal(&mut rng, hidden) } else { Vec::new() };
        // A mean far from zero is what a one-pass variance would lose.
        let shift = if layer { 10.0 } else { 0.0 };
        let x: Vec<f32> = normal(&mut rng, n * hidden).iter().map(|v| v + shift).collect();
        let (weight_at, bias_at, x_at) = (memory.put(&weight), memory.put(&bias), memory.put(&x));
        // In place, or beside something else in a buffer.
        let out =
            if seed % 3 == 0 { View::from(x_at) } else { View { buffer: memory.alloc(n * hidden * 4 + 64), at: 64 } };
        let kind = if layer { NormKind::Layer(epsilon) } else { NormKind::Rms(epsilon) };
        memory.call(&Call::Norm(Norm { kind, hidden, n, weight: weight_at, bias: bias_at, x: x_at.into(), out }));
        let got: Vec<f32> = memory.get(out.buffer);
        let (mut truth, mut scale) = (Vec::new(), Vec::new());
        for x in x.chunks_exact(hidden) {
            let mean = if layer { x.iter().map(|&v| f64::from(v)).sum::<f64>() / hidden as f64 } else { 0.0 };
            let squares = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / hidden as f64;
            let by = 1.0 / (squares + f64::from(epsilon)).sqrt();
            for (i, &v) in x.iter().enumerate() {
                let weight = weight.get(i).map_or(1.0, |&w| f64::from(w));
                let bias = bias.get(i).map_or(0.0, |&b| f64::from(b));
                truth.push((f64::from(v) - mean) * by * weight + bias);
                // The mean itself is rounded.
                scale.push((f64::from(v).abs() + mean.abs()) * by * weight.abs() + bias.abs());
            }
        }
        assert_close(
            &format!("{kind:?} {hidden} n {n} seed {seed}"),
            &got[out.at as usize / 4..],
            &truth,
            &scale,
            1e-6,
        );
    }
}

#[test]
fn sums_are_those_of_f32() {
    for count in [1, 2, 3, 4, 5, 255, 256, 1023, 5120, 13_825] {
        let mut rng = Prng::new(count as u64);
        let (from, to) = (normal(&mut rng, count), normal(&mut rng, count));
        let mut memory = Memory::default();
        let (from_at, to_at) = (memory.put(&from), memory.put(&to));
        let scale = [1.0, 0.3][count % 2];
        memory.call(&Call::Add(Add { count, from: from_at.into(), to: to_at.into(), scale }));
        let truth: Vec<f32> = from.iter().zip(&to).map(|(a, b)| (a + b) * scale).collect();
        assert_eq!(memory.get::<f32>(to_at), truth);
        assert_eq!(memory.get::<f32>(from_at), from);
    }
}

#[test]
fn sign_scores_are_those_of_the_cpu_bit_for_bit() {
    for seed in 0..50 {
        let mut rng = Prng::new(seed);
        let (hidden, ffn, n) = (1 + below(&mut rng, 1600), 1 + below(&mut rng, 300), 1 + below(&mut rng, 32));
        let lines = sign::lines(hidden);
        let mut bits = vec![BitLine::default(); ffn * lines];
        for row in bits.chunks_exact_mut(lines) {
            sign::pack(&normal(&mut rng, hidden), row);
        }
        let mut x = normal(&mut rng, n * hidden);
        x.iter_mut().step_by(5).for_each(|v| *v = -0.0);
        let mut memory = Memory::default();
        let call = SignScores {
            hidden,
            ffn,
            n,
            bits: memory.put(&bits),
            x: memory.put(&x).into(),
            scores: memory.alloc(n * ffn * 4).into(),
        };
        memory.call(&Call::SignScores(call));
        let mut columns = vec![BitLine::default(); n * lines];
        for (x, bits) in x.chunks_exact(hidden).zip(columns.chunks_exact_mut(lines)) {
            sign::pack(x, bits);
        }
        let mut truth = vec![0f32; n * ffn];
        sign::scores(Isa::Portable, &bits, &columns, hidden, &mut truth, ffn);
        assert_eq!(memory.get::<f32>(call.scores.buffer), truth, "hidden {hidden} ffn {ffn} n {n} seed {seed}");
    }
}

#[test]
fn selection_asks_less_of_what_is_resident() {
    for seed in 0..50 {
        let mut rng = Prng::new(seed);
        let (ffn, n) = (1 + below(&mut rng, 900), 1 + below(&mut rng, 32));
        let slots = below(&mut rng, ffn + 1);
        let mut neurons: Vec<u32> = (0..ffn as u32).collect();
        let bucket: Vec<u32> = (0..slots)
            .map(|_| if below(&mut rng, 4) == 0 { NONE } else { neurons.swap_remove(below(&mut rng, neurons.len())) })
            .collect();
        // Scores on a grid, so that some are the threshold itself.
        let mut scores: Vec<f32> = (0..n * ffn).map(|_| below(&mut rng, 17) as f32 / 8.0 - 1.0).collect();
        scores[0] = f32::NAN;
        let least = [0.25, [-0.5, f32::INFINITY, f32::NEG_INFINITY][seed as usize % 3]];
        let mut memory = Memory::default();
        let call = Select {
            ffn,
            n,
            slots,
            min_scores: least,
            bucket: memory.put(&bucket),
            scores: memory.put(&scores).into(),
            masks: memory.alloc(ffn * 4).into(),
        };
        memory.call(&Call::Select(call));
        let truth: Vec<u32> = (0..ffn)
            .map(|i| {
                let least = least[usize::from(bucket.contains(&(i as u32)))];
                (0..n).fold(0, |mask, b| mask | u32::from(scores[b * ffn + i] >= least) << b)
            })
            .collect();
        assert_eq!(memory.get::<u32>(call.masks.buffer), truth, "ffn {ffn} slots {slots} n {n} seed {seed}");
    }
}

#[test]
fn copies_and_gathers_move_every_byte() {
    for (seed, bytes) in [16, 48, 4096, 30_720, 262_160].into_iter().enumerate() {
        let mut rng = Prng::new(seed as u64);
        let random = |rng: &mut Prng, bytes: usize| -> Vec<u8> { (0..bytes).map(|_| rng.next_u64() as u8).collect() };
        let from = random(&mut rng, bytes);
        let mut memory = Memory::default();
        let (from_at, to_at) = (memory.put(&from), memory.alloc(bytes));
        memory.run(&[kernel::copy(memory.address(from_at), memory.address(to_at), bytes as u64)]);
        assert_eq!(memory.get::<u8>(to_at), from);

        let slots = 9;
        let before = random(&mut rng, slots * bytes);
        let slots_at = memory.put(&before);
        let blocks = [random(&mut rng, bytes), random(&mut rng, bytes), random(&mut rng, bytes)];
        let to = [7usize, 0, 3];
        let moves: Vec<u64> = blocks
            .iter()
            .zip(to)
            .flat_map(|(block, slot)| {
                let block = memory.put(block);
                [memory.address(block), slot as u64]
            })
            .collect();
        let moves = memory.put(&moves);
        memory.run(&[kernel::gather(memory.address(moves), to.len(), memory.address(slots_at), bytes as u64)]);
        let mut truth = before;
        blocks.iter().zip(to).for_each(|(block, slot)| truth[slot * bytes..][..bytes].copy_from_slice(block));
        assert_eq!(memory.get::<u8>(slots_at), truth);
    }
}
