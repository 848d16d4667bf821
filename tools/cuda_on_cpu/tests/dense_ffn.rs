//! The FFN of a prompt's chunk from its real source against the scalar truth.

mod support;

use dynamicinfer::cpu::reference;
use dynamicinfer::device::{Call, ColumnWeights, DenseFfn, NONE, Tiles};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::config::{Activation, Ffn};
use dynamicinfer::model::{BlockLayout, BlockPart};
use dynamicinfer::prng::Prng;
use support::{
    ACTIVATIONS, KINDS, Memory, as_codes, as_halves, assert_close, below, has_tensor_tiles, hidden_of, layout_of,
    normal, put_slots, slots_of, types,
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
    /// Experts that the neurons belong to, whose rows lie apart; 0 for no mixture.
    experts: usize,
}

/// A case's operands.
struct Operands {
    layout: BlockLayout,
    blocks: Vec<u8>,
    bucket: Vec<u32>,
    x: Vec<f32>,
    up_bias: Vec<f32>,
    before: Vec<f32>,
    /// `[experts, n]`, some of them 0.
    weights: Vec<f32>,
}

/// The sums and the counts of a device that multiplies by `tiles`; `None` where it has none of these for the case.
fn run(case: &Case, of: &Operands, tiles: Tiles) -> Option<(Vec<f32>, Vec<u32>)> {
    let &Case { kind, activation, activation_threshold, hidden, ffn, slots, n, .. } = case;
    let mut memory = Memory::default();
    let weights =
        (case.experts > 0).then(|| ColumnWeights { at: memory.put(&of.weights).into(), experts: case.experts });
    let (out, counts) = (memory.put(&of.before), memory.put(&vec![7u32; DenseFfn::parts(&of.layout, n) * ffn]));
    let call = DenseFfn {
        layout: of.layout,
        kind,
        activation,
        activation_threshold,
        hidden,
        ffn,
        slots,
        n,
        blocks: put_slots(&mut memory, &of.layout, &of.blocks, weights.is_some()),
        weights,
        bucket: memory.put(&of.bucket).into(),
        up_bias: memory.put(&of.up_bias),
        x: memory.put(&of.x).into(),
        products: memory.alloc(n * slots * 4),
        counts: counts.into(),
        out: out.into(),
    };
    let call = Call::DenseFfn(call);
    if tiles == Tiles::TensorCores && !has_tensor_tiles(&call) {
        return None;
    }
    memory.call_by(&call, tiles);
    Some((memory.get(out), memory.get(counts)))
}

fn check(seed: u64, case: &Case) {
    let &Case { types, kind, hidden, ffn, slots, n, .. } = case;
    let mut rng = Prng::new(seed);
    let layout = layout_of(types, kind, hidden);
    let (blocks, bucket) = slots_of(&mut rng, (&layout, hidden), ffn, slots, case.filled);
    let x = normal(&mut rng, n * hidden);
    let up_bias = if case.bias { normal(&mut rng, ffn) } else { Vec::new() };
    let before = normal(&mut rng, n * hidden);
    let mut weights = normal(&mut rng, case.experts * n);
    weights.iter_mut().for_each(|weight| *weight *= f32::from(u8::from(rng.next_f64() < 0.6)));
    let operands = Operands { layout, blocks, bucket, x, up_bias, before, weights };
    let lanes = run(case, &operands, Tiles::Lanes).expect("there for all");
    let coded = as_codes(&operands.x, n, layout.gate_or_up().quant);
    agree(seed, case, &operands, (&coded, 4e-6), &lanes);
    let all = |quant: Quant| layout.parts().iter().all(|part| part.quant == quant);
    let tensor = run(case, &operands, Tiles::TensorCores);
    let has = slots > 0 && [Quant::F16, Quant::Q8, Quant::Q4].into_iter().any(all);
    assert_eq!(tensor.is_some(), has, "{types:?}");
    let Some(tensor) = tensor else { return };
    if all(Quant::F16) {
        // Products are rounded to f16, too.
        agree(seed, case, &operands, (&as_halves(&operands.x, n), 4e-6 + 2f64.powi(-11)), &tensor);
    } else {
        let same = tensor.0.iter().zip(&lanes.0).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(
            same && tensor.1 == lanes.1,
            "{types:?} {kind:?} {n} columns, seed {seed}: tensor cores change the result"
        );
    }
}

/// The result is the scalar truth of inputs as they are multiplied, within `bound`.
fn agree(seed: u64, case: &Case, of: &Operands, (x, bound): (&[f32], f64), (out, counts): &(Vec<f32>, Vec<u32>)) {
    let &Case { types, kind, activation, activation_threshold, hidden, ffn, slots, n, .. } = case;
    let Operands { layout, blocks, bucket, up_bias, before, .. } = of;
    let mut truth: Vec<f64> = before.iter().map(|&v| f64::from(v)).collect();
    let mut scale: Vec<f64> = truth.iter().map(|v| v.abs()).collect();
    let mut active = vec![7 * DenseFfn::parts(layout, n) as u32; ffn];
    for (block, &neuron) in blocks.chunks_exact(layout.bytes()).zip(bucket).filter(|(_, n)| **n != NONE) {
        let row = |part: BlockPart| reference::numbers(part.quant, part.of(block), hidden);
        let (first, up, down) = (row(layout.gate_or_up()), row(layout.up()), row(layout.down()));
        let bias = up_bias.get(neuron as usize).copied().map_or(0.0, f64::from);
        active[neuron as usize] = 0;
        for b in 0..n {
            let column = &x[b * hidden..(b + 1) * hidden];
            let up = (reference::dot(&up, column) + bias) as f32;
            let value = activation.apply(if kind == Ffn::Plain { up } else { reference::dot(&first, column) as f32 });
            let product = match kind {
                Ffn::Gated if value != 0.0 => value * up,
                Ffn::GatedBoth if value != 0.0 => value * activation.apply(up),
                _ => value,
            };
            let each = ffn / case.experts.max(1);
            let weight = of.weights.get(neuron as usize / each * n + b).copied().unwrap_or(1.0);
            let (product, of_expert) = (product * weight, weight);
            let is_active =
                if activation_threshold > 0.0 { value.abs() > activation_threshold } else { product != 0.0 };
            active[neuron as usize] += u32::from(is_active && weight != 0.0);
            for (i, weight) in down.iter().enumerate() {
                truth[b * hidden + i] += f64::from(product) * f64::from(*weight);
                // A product is off by what its sums are off, which are sums of numbers of about one.
                scale[b * hidden + i] +=
                    (f64::from(product).abs() + f64::from(of_expert).abs()) * f64::from(*weight).abs();
            }
        }
    }
    let what = format!(
        "{types:?} {kind:?} {activation} hidden {hidden} ffn {ffn} slots {slots} n {n} activation_threshold {activation_threshold}, seed {seed}"
    );
    assert_close(&what, out, &truth, &scale, bound);
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
                        bias,
                        experts: 0,
                    },
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
                experts: 0,
            };
            check(n as u64, &case);
        }
    }
}

#[test]
fn neurons_of_experts_count_with_their_experts_weights() {
    for (seed, types) in types().into_iter().enumerate() {
        for (kind, n) in [(Ffn::Gated, 33), (Ffn::GatedBoth, 90)] {
            let mut rng = Prng::new(8000 + (100 * seed + n) as u64);
            let (experts, each) = (1 + below(&mut rng, 7), 1 + below(&mut rng, 40));
            let hidden = hidden_of(&mut rng, types, 400);
            let (activation, slots) = (Activation::Relu, 1 + below(&mut rng, 100));
            let case = Case {
                types,
                kind,
                activation,
                activation_threshold: 0.0,
                hidden,
                ffn: experts * each,
                slots,
                n,
                filled: 0.9,
                bias: false,
                experts,
            };
            check(seed as u64, &case);
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
                experts: 0,
            };
            check(3, &case);
        }
    }
}
