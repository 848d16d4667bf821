//! The sparse FFN from its real source against the kernel of the virtual device.

mod support;

use dynamicinfer::device::{Call, Mixture, NONE, SparseFfn};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::config::{Activation, Ffn};
use dynamicinfer::prng::Prng;
use support::{ACTIVATIONS, KINDS, Memory, below, hidden_of, layout_of, normal, put_slots, slots_of, types};

struct Case {
    types: [Quant; 3],
    kind: Ffn,
    activation: Activation,
    activation_threshold: f32,
    hidden: usize,
    ffn: usize,
    slots: usize,
    n: usize,
    /// Of slots that have a neuron, and of neurons times columns that are wanted.
    filled: f64,
    wanted: f64,
    bias: bool,
    /// Experts that the neurons belong to, whose rows lie apart; 0 for no mixture.
    experts: usize,
}

fn check(seed: u64, case: &Case) {
    let &Case { types, kind, activation, activation_threshold, hidden, ffn, slots, n, .. } = case;
    let mut rng = Prng::new(seed);
    let layout = layout_of(types, kind, hidden);
    let (blocks, bucket) = slots_of(&mut rng, (&layout, hidden), ffn, slots, case.filled);
    let mut input = normal(&mut rng, n * hidden);
    let mut some = |count: usize| -> Vec<u32> {
        let mask = |rng: &mut Prng| (0..n).fold(0, |mask, b| mask | u32::from(rng.next_f64() < case.wanted) << b);
        (0..count).map(|_| mask(&mut rng)).collect()
    };
    let mixture = (case.experts > 0).then(|| Mixture { experts: case.experts, rows: case.experts.div_ceil(2) });
    let choice = match mixture {
        None => some(ffn),
        Some(Mixture { experts, rows }) => {
            let masks = some(rows * (ffn / experts));
            // Every second one has a row, in another order than their own.
            let place = |expert: usize| if expert.is_multiple_of(2) { (rows - 1 - expert / 2) as u32 } else { NONE };
            let weights = normal(&mut rng, experts * n).into_iter().map(f32::to_bits);
            (0..experts).map(place).chain(weights).chain(masks).collect()
        }
    };
    input.extend(choice.iter().map(|&word| f32::from_bits(word)));
    let up_bias = if case.bias { normal(&mut rng, ffn) } else { Vec::new() };

    let mut memory = Memory::default();
    let call = SparseFfn {
        layout,
        kind,
        activation,
        activation_threshold,
        hidden,
        ffn,
        mixture,
        slots,
        n,
        blocks: put_slots(&mut memory, &layout, &blocks, mixture.is_some()),
        bucket: memory.put(&bucket),
        up_bias: memory.put(&up_bias),
        input: memory.put(&input),
        output: memory.alloc(SparseFfn::output_bytes(n, hidden, slots)),
    };
    memory.call(&Call::SparseFfn(call));
    let got: Vec<f32> = memory.get(call.output);

    let truth = SparseFfn { output: memory.alloc(SparseFfn::output_bytes(n, hidden, slots)), ..call };
    memory.call_on_host(&Call::SparseFfn(truth));
    let truth: Vec<f32> = memory.get(truth.output);

    let what = format!(
        "{types:?} {kind:?} {activation} hidden {hidden} ffn {ffn} slots {slots} n {n} activation_threshold {activation_threshold}, seed {seed}"
    );
    let fired = |out: &[f32]| out[n * hidden..].iter().map(|bits| bits.to_bits()).collect::<Vec<_>>();
    assert_eq!(fired(&got), fired(&truth), "active neurons: {what}");
    // A gate whose terms cancel is off by what they round and not by itself: where nothing else adds to a column, its numbers are so small.
    let all = truth[..n * hidden].iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
    let least = 1e-5 * (all / (n * hidden) as f64).sqrt();
    for b in 0..n {
        let (got, truth) = (&got[b * hidden..][..hidden], &truth[b * hidden..][..hidden]);
        let size = (truth.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / hidden as f64).sqrt();
        for (i, (got, truth)) in got.iter().zip(truth).enumerate() {
            let error = f64::from((got - truth).abs());
            // Two f32 sums of up to some hundred terms in different orders, through an activation.
            assert!(
                error <= 2e-5 * (size + f64::from(truth.abs())) + least,
                "column {b} number {i}: {got}, {truth}: {what}"
            );
        }
    }
}

#[test]
fn it_is_that_of_the_virtual_device_for_all_types_and_kinds() {
    let mut seed = 0;
    for types in types() {
        for kind in KINDS {
            for activation in ACTIVATIONS {
                seed += 1;
                let mut rng = Prng::new(9000 + seed);
                let hidden = hidden_of(&mut rng, types, 1000);
                let (ffn, slots) = (1 + below(&mut rng, 200), 1 + below(&mut rng, 150));
                let n = if seed % 3 == 0 { 1 } else { 1 + below(&mut rng, 32) };
                let activation_threshold = [0.0, 0.25][below(&mut rng, 2)];
                let (filled, wanted) = ([0.7, 1.0][below(&mut rng, 2)], [0.1, 0.5, 1.0][below(&mut rng, 3)]);
                let bias = below(&mut rng, 2) == 1;
                check(
                    seed,
                    &Case {
                        types,
                        kind,
                        activation,
                        activation_threshold,
                        hidden,
                        ffn,
                        slots,
                        n,
                        filled,
                        wanted,
                        bias,
                        experts: 0,
                    },
                );
            }
        }
    }
}

#[test]
fn neurons_of_experts_count_with_their_experts_weights() {
    for (seed, types) in types().into_iter().enumerate() {
        for n in [1, 3, 8, 32] {
            let kind = [Ffn::Gated, Ffn::GatedBoth][(seed + n) % 2];
            let mut rng = Prng::new(7000 + (32 * seed + n) as u64);
            let (experts, each) = (1 + below(&mut rng, 9), 1 + below(&mut rng, 30));
            let hidden = hidden_of(&mut rng, types, 700);
            let case = Case {
                types,
                kind,
                activation: Activation::Relu,
                activation_threshold: 0.0,
                hidden,
                ffn: experts * each,
                slots: 1 + below(&mut rng, 150),
                n,
                filled: 0.9,
                wanted: 0.4,
                bias: false,
                experts,
            };
            check((seed * 100 + n) as u64, &case);
        }
    }
}

#[test]
fn every_number_of_columns_is_right() {
    for types in types() {
        for n in [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 25, 31, 32] {
            let case = Case {
                types,
                kind: Ffn::Gated,
                activation: Activation::Relu,
                activation_threshold: 0.0,
                hidden: 768,
                ffn: 90,
                slots: 70,
                n,
                filled: 0.9,
                wanted: 0.3,
                bias: false,
                experts: 0,
            };
            check(n as u64, &case);
        }
    }
}

#[test]
fn nothing_resident_or_nothing_wanted_is_zero() {
    for (slots, filled, wanted) in [(0, 0.0, 1.0), (40, 0.0, 1.0), (40, 1.0, 0.0)] {
        for types in types() {
            let (kind, activation) = (Ffn::Gated, Activation::Silu);
            let case = Case {
                types,
                kind,
                activation,
                activation_threshold: 0.0,
                hidden: 256,
                ffn: 64,
                slots,
                n: 5,
                filled,
                wanted,
                bias: false,
                experts: 0,
            };
            check(3, &case);
        }
    }
}

/// More slots than one chunk for each thread of a block: the splits grow in number.
#[test]
fn many_slots_and_a_real_width_are_right() {
    for types in types() {
        let (kind, activation, filled, wanted) = (Ffn::Gated, Activation::Relu, 1.0, 0.05);
        let case = Case {
            types,
            kind,
            activation,
            activation_threshold: 0.0,
            hidden: 5120,
            ffn: 700,
            slots: 600,
            n: 1,
            filled,
            wanted,
            bias: false,
            experts: 0,
        };
        check(11, &case);
    }
    let (kind, activation, types) = (Ffn::Plain, Activation::Relu, [Quant::Q8; 3]);
    let case = Case {
        types,
        kind,
        activation,
        activation_threshold: 0.0,
        hidden: 32,
        ffn: 20_000,
        slots: 17_000,
        n: 1,
        filled: 0.95,
        wanted: 0.3,
        bias: true,
        experts: 0,
    };
    check(12, &case);
}
