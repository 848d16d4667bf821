//! The FFN of a prompt's chunk from its real source against the scalar truth.

mod support;

use dynamicinfer::cpu::reference;
use dynamicinfer::device::{Call, DenseFfn, NONE};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::BlockPart;
use dynamicinfer::model::config::{Activation, Ffn};
use dynamicinfer::prng::Prng;
use support::{
    ACTIVATIONS, KINDS, Memory, as_codes, assert_close, below, hidden_of, layout_of, normal, slots_of, types,
};

struct Case {
    types: [Quant; 3],
    kind: Ffn,
    activation: Activation,
    activation_threshold: f32,
    hidden: usize,
    ffn: usize,
    slots: usize,
    n: usize,
    /// Share of slots that hold a neuron.
    filled: f64,
    bias: bool,
}

fn check(seed: u64, case: &Case) {
    let &Case { types, kind, activation, activation_threshold, hidden, ffn, slots, n, .. } = case;
    let mut rng = Prng::new(seed);
    let layout = layout_of(types, kind, hidden);
    let (blocks, bucket) = slots_of(&mut rng, (&layout, hidden), ffn, slots, case.filled);
    let x = normal(&mut rng, n * hidden);
    let up_bias = if case.bias { normal(&mut rng, ffn) } else { Vec::new() };
    let before = normal(&mut rng, n * hidden);
    let parts = DenseFfn::parts(&layout, n);

    let mut memory = Memory::default();
    let call = DenseFfn {
        layout,
        kind,
        activation,
        activation_threshold,
        hidden,
        ffn,
        slots,
        n,
        blocks: memory.put(&blocks).into(),
        bucket: memory.put(&bucket).into(),
        up_bias: memory.put(&up_bias),
        x: memory.put(&x).into(),
        products: memory.alloc(n * slots * 4),
        counts: memory.put(&vec![7u32; parts * ffn]),
        out: memory.put(&before).into(),
    };
    memory.call(&Call::DenseFfn(call));
    let (out, counts): (Vec<f32>, Vec<u32>) = (memory.get(call.out.buffer), memory.get(call.counts));

    let coded = as_codes(&x, n, layout.gate_or_up().quant);
    let mut truth: Vec<f64> = before.iter().map(|&v| f64::from(v)).collect();
    let mut scale: Vec<f64> = truth.iter().map(|v| v.abs()).collect();
    let mut active = vec![7 * parts as u32; ffn];
    for (block, &neuron) in blocks.chunks_exact(layout.bytes()).zip(&bucket).filter(|(_, n)| **n != NONE) {
        let row = |part: BlockPart| reference::numbers(part.quant, part.of(block), hidden);
        let (first, up, down) = (row(layout.gate_or_up()), row(layout.up()), row(layout.down()));
        let bias = up_bias.get(neuron as usize).copied().map_or(0.0, f64::from);
        active[neuron as usize] = 0;
        for b in 0..n {
            let column = &coded[b * hidden..(b + 1) * hidden];
            let up = (reference::dot(&up, column) + bias) as f32;
            let value = activation.apply(if kind == Ffn::Plain { up } else { reference::dot(&first, column) as f32 });
            let product = match kind {
                Ffn::Gated if value != 0.0 => value * up,
                Ffn::GatedBoth if value != 0.0 => value * activation.apply(up),
                _ => value,
            };
            active[neuron as usize] +=
                u32::from(if activation_threshold > 0.0 { value.abs() > activation_threshold } else { product != 0.0 });
            for (i, weight) in down.iter().enumerate() {
                truth[b * hidden + i] += f64::from(product) * f64::from(*weight);
                // A product is off by what its sums are off, which are sums of numbers of about one.
                scale[b * hidden + i] += (f64::from(product).abs() + 1.0) * f64::from(*weight).abs();
            }
        }
    }
    let what = format!(
        "{types:?} {kind:?} {activation} hidden {hidden} ffn {ffn} slots {slots} n {n} activation_threshold {activation_threshold}, seed {seed}"
    );
    assert_close(&what, &out, &truth, &scale, 4e-6);
    let sums: Vec<u32> = (0..ffn).map(|i| counts.iter().skip(i).step_by(ffn).sum()).collect();
    assert_eq!(sums, active, "columns in which neurons are active: {what}");
}

#[test]
fn it_is_the_scalar_truth_for_all_types_and_kinds() {
    let mut seed = 0;
    for types in types() {
        for kind in KINDS {
            for activation in ACTIVATIONS {
                seed += 1;
                let mut rng = Prng::new(7000 + seed);
                let hidden = hidden_of(&mut rng, types, 500);
                let (ffn, slots) = (1 + below(&mut rng, 150), 1 + below(&mut rng, 100));
                let n = 33 + below(&mut rng, 60);
                let activation_threshold = [0.0, 0.25][below(&mut rng, 2)];
                let filled = [0.6, 1.0][below(&mut rng, 2)];
                let bias = below(&mut rng, 2) == 1;
                check(
                    seed,
                    &Case { types, kind, activation, activation_threshold, hidden, ffn, slots, n, filled, bias },
                );
            }
        }
    }
}

#[test]
fn whole_tiles_and_their_edges_are_right() {
    for types in types() {
        for (kind, hidden, slots, n) in [
            (Ffn::Gated, 512, 64, 64),
            (Ffn::Gated, 1280, 65, 65),
            (Ffn::Plain, 768, 129, 33),
            (Ffn::Gated, 256, 300, 256),
            (Ffn::Plain, 256, 31, 1),
        ] {
            let (activation, ffn) = (Activation::Silu, slots + 3);
            let case = Case {
                types,
                kind,
                activation,
                activation_threshold: 0.0,
                hidden,
                ffn,
                slots,
                n,
                filled: 0.9,
                bias: true,
            };
            check(n as u64, &case);
        }
    }
}

#[test]
fn nothing_resident_adds_nothing() {
    for types in types() {
        for slots in [0, 40] {
            let (kind, activation) = (Ffn::Gated, Activation::Relu);
            let case = Case {
                types,
                kind,
                activation,
                activation_threshold: 0.0,
                hidden: 256,
                ffn: 64,
                slots,
                n: 40,
                filled: 0.0,
                bias: false,
            };
            check(3, &case);
        }
    }
}
