//! Time of a training step of a predictor network, at the shapes of the demo and of a 7B model: what the estimates of
//! docs/predictors.md are made from.

use criterion::{Criterion, criterion_group, criterion_main};
use dynamicinfer::prng::Prng;
use dynamicinfer::training::network::{BATCH, Training, log_odds};
use dynamicinfer::training::samples::Pairs;
use half::f16;
use std::hint::black_box;

fn steps(c: &mut Criterion) {
    for (hidden, rank, ffn) in [(256, 96, 1024), (4096, 512, 11008)] {
        let mut rng = Prng::new(1);
        let tokens = 2 * BATCH;
        let residuals: Vec<f16> =
            (0..tokens * hidden).map(|_| f16::from_f32(rng.next_f64() as f32 * 2.0 - 1.0)).collect();
        // One neuron in sixteen is active.
        let labels: Vec<u64> =
            (0..tokens * ffn / 64).map(|_| rng.next_u64() & rng.next_u64() & rng.next_u64() & rng.next_u64()).collect();
        let experts = vec![0; tokens];
        let pairs = Pairs { residuals: &residuals, labels: &labels, experts: &experts, used: 1, hidden, ffn };
        let mut training = Training::new(hidden, rank, &log_odds(&vec![tokens as u64 / 16; ffn], tokens), 1, 1);
        let mut group = c.benchmark_group("training");
        group.sample_size(10);
        group.bench_function(format!("step of {BATCH} tokens, {hidden} -> {rank} -> {ffn}"), |b| {
            b.iter(|| black_box(training.run(&pairs, 0..tokens, 1, 1, || Ok(()))))
        });
    }
}

criterion_group!(benches, steps);
criterion_main!(benches);
