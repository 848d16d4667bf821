//! Row kernels over weights that lie in L2, so that arithmetic and not memory is measured: bytes of weights per second
//! for each type and instruction set, with 1 and 8 columns. Compare with the machine's read bandwidth per thread
//! (`dynamicinfer measure`): a kernel must be well above it.
//!
//! Run: cargo bench --bench kernels

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use dynamicinfer::cpu::recurrence::{Gates, LANES, Tokens};
use dynamicinfer::cpu::{Columns, Isa, Kernels, MAX_AXPY_ROWS, Rows};
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::prng::Prng;
use std::hint::black_box;

const COLS: usize = 2048;
const ROWS: usize = 64;

fn weights(rng: &mut Prng, quant: Quant) -> Vec<u64> {
    let row_bytes = quant.row_bytes(COLS);
    let mut storage = vec![0u64; ROWS * row_bytes / 8 + 8];
    for r in 0..ROWS {
        let values: Vec<f32> = (0..COLS).map(|_| rng.next_f64() as f32 - 0.5).collect();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut storage);
        rows::encode(quant, &values, &mut bytes[r * row_bytes..(r + 1) * row_bytes]);
    }
    storage
}

fn kernels(criterion: &mut Criterion) {
    let mut rng = Prng::new(1);
    for quant in Quant::OWN {
        let storage = weights(&mut rng, quant);
        let row_bytes = quant.row_bytes(COLS);
        let base: *const u8 = storage.as_ptr().cast();
        for n in [1, 8] {
            let input: Vec<f32> = (0..n * COLS).map(|_| rng.next_f64() as f32 - 0.5).collect();
            let mut x = Columns::default();
            x.set(&input, n, quant);
            let mut y = vec![0.0; n * ROWS];
            let mut out = vec![0.0; n * COLS];
            let a = vec![0.001; MAX_AXPY_ROWS * n];
            for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
                let id = |op: &str| BenchmarkId::new(format!("{op} {} x{n}", quant.name()), kernels.isa.name());
                let mut group = criterion.benchmark_group("kernels");
                group.throughput(Throughput::Bytes((ROWS * row_bytes) as u64)).sample_size(20);
                group.measurement_time(std::time::Duration::from_millis(400));
                group.warm_up_time(std::time::Duration::from_millis(100));
                group.bench_function(id("dot"), |b| {
                    b.iter(|| {
                        // SAFETY: the rows are whole; the kernels are supported here.
                        unsafe {
                            kernels.dot(quant)(
                                Rows { first: base, stride: row_bytes, ahead: 0 },
                                ROWS,
                                black_box(&x),
                                y.as_mut_ptr(),
                                ROWS,
                            )
                        };
                    })
                });
                group.bench_function(id("axpy"), |b| {
                    b.iter(|| {
                        for r in (0..ROWS).step_by(MAX_AXPY_ROWS) {
                            let rows: [_; MAX_AXPY_ROWS] =
                                std::array::from_fn(|k| base.wrapping_add((r + k) * row_bytes));
                            // SAFETY: as above.
                            unsafe { kernels.axpy(quant)(&rows, 0, black_box(&a), COLS, &mut out) };
                        }
                    })
                });
                group.finish();
            }
        }
    }
}

/// The state of sixteen numbers of a head's values, through one token and through many.
fn recurrences(criterion: &mut Criterion) {
    const KEYS: usize = 128;
    let mut rng = Prng::new(1);
    for n in [1, 64] {
        let numbers: Vec<f32> = (0..n * KEYS).map(|_| (rng.next_f64() as f32 - 0.5) * 0.1).collect();
        let gates = vec![Gates { decay: 0.9, beta: 0.5, key_query: 0.1 }; n];
        let (mut state, mut out) = ([[0.0; LANES]; KEYS], vec![0.0; n * LANES]);
        for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
            let mut group = criterion.benchmark_group("recurrences");
            group.throughput(Throughput::Elements(n as u64)).sample_size(20);
            let all = kernels.recurrences;
            for (name, rule) in [("delta rule", all.delta_rule), ("additive rule", all.additive_rule)] {
                group.bench_function(BenchmarkId::new(format!("{name} x{n}"), kernels.isa.name()), |b| {
                    b.iter(|| {
                        let [queries, keys, values] = [&numbers[..]; 3];
                        let (stride, value_stride) = (KEYS, KEYS);
                        let tokens = Tokens { queries, keys, values, stride, value_stride, gates: &gates };
                        // SAFETY: each token has a place for its outputs; the kernels are supported here.
                        unsafe { rule(black_box(&mut state), tokens, n, out.as_mut_ptr(), LANES) };
                    })
                });
            }
            group.finish();
        }
    }
}

criterion_group!(benches, kernels, recurrences);
criterion_main!(benches);
