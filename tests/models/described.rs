//! What a header describes and what each layer is by it.

use dynamicinfer::model::layer::{FeedForward, FfnParts, Norms};
use dynamicinfer::model::{Description, ModelConfig};
use serde_json::{Value, json};

/// A header as stores had it before layers were data of their own: one size of everything, lists, and groups of layers that differ.
fn header() -> Value {
    json!({
        "family": "llama", "name": "m", "hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "vocab": 64,
        "context": 256, "window": 20, "norm": { "rms": 1e-5f32 }, "activation": "relu2", "ffn_kind": "plain",
        "positions": { "rope": { "frequencies": [1.0, 0.5, 0.25, 0.125] } },
        "attention_bias": false, "output_bias": true, "ffn_bias": false, "tied": true,
        "form": {
            "norms": "before", "residual_scale": 1.0, "qk_norm": true, "sinks": false, "widths": [],
            "experts": { "count": 8, "used": 2, "scoring": "sigmoid", "normalised": true, "reads": "ffn_norm" },
            "rotated": [true, true, false, true], "windowed": [false, true, true, true],
            "own": [
                { "layers": [0], "ffn": { "dense": 80 } },
                { "layers": [2], "convolution": 3, "ffn": "absent" },
                { "layers": [3], "heads": 2, "kv_heads": 1, "frequencies": [0.1f32, 0.2f32, 0.3f32, 0.4f32] },
            ],
        },
    })
}

fn described(header: &Value) -> Description {
    serde_json::from_value(header.clone()).unwrap()
}

#[test]
fn a_header_is_written_as_it_was_read() {
    assert_eq!(serde_json::to_value(described(&header())).unwrap(), header());
}

#[test]
fn each_layer_is_what_the_header_says_of_it() {
    let c = described(&header()).resolve().unwrap();
    let of = |layer: usize| c.layer(layer);
    assert!(c.layers().iter().all(|layer| layer.norms == Norms::Before && !layer.output_scale));
    // The first has one FFN, which every token passes through, and sees all positions.
    assert_eq!((of(0).ffn.clusters(), of(0).ffn.experts().unwrap().shared.unwrap().width), (0, 80));
    let attention = |layer| c.attention(layer).unwrap();
    assert_eq!([0, 1, 3].map(|layer| attention(layer).window), [None, Some(20), Some(20)]);
    assert_eq!([0, 1, 3].map(|layer| (attention(layer).heads, attention(layer).kv_heads)), [(4, 2), (4, 2), (2, 1)]);
    assert_eq!(c.rotary(&attention(1)), [1.0, 0.5, 0.25, 0.125]);
    assert_eq!(c.rotary(&attention(3)), [0.1, 0.2, 0.3, 0.4]);
    // The third has a convolution and no FFN.
    assert!(c.attention(2).is_none() && c.mixer(2).convolution().unwrap().taps == 3 && !c.has_ffn(2));
    assert_eq!([1, 3].map(|layer| of(layer).ffn.clusters()), [8, 8]);
    assert_eq!([1, 3].map(|layer| of(layer).ffn.width()), [48, 48]);
}

/// What holds of all layers, as the layers are now.
fn facts(c: &ModelConfig) -> (FfnParts, [usize; 5], bool) {
    let numbers = [c.widest_ffn(), c.clusters(), c.movable(), c.movable_layers(), c.most_used_experts()];
    (c.parts(), numbers, c.neurons_inside())
}

#[test]
fn what_holds_of_all_layers_follows_them() {
    let mut c = described(&header()).resolve().unwrap();
    assert_eq!(facts(&c), (FfnParts::Experts, [48, 8, 8, 2, 2], false));
    c.change_layers(|_, layer| {
        if let FeedForward::Experts { experts, .. } = &mut layer.ffn {
            experts.by_neuron = true;
        }
    });
    assert_eq!(facts(&c), (FfnParts::Experts, [48, 8, 8 * 48, 2, 2], true));
    c.change_layers(|number, layer| layer.ffn = FeedForward::Neurons { width: 10 + number });
    assert_eq!(facts(&c), (FfnParts::Neurons, [13, 13, 13, 4, 0], false));
}

/// A later program's header must not be read as less than it says.
#[test]
fn what_a_header_says_and_this_program_does_not_know_is_refused_by_name() {
    for (at, unknown) in [("/form", "mixers"), ("/form/own/1", "moving_average"), ("", "thoughts")] {
        let mut header = header();
        header.pointer_mut(at).unwrap()[unknown] = json!(1);
        let why = serde_json::from_value::<Description>(header).unwrap_err().to_string();
        assert!(why.contains(unknown), "{why}");
    }
}
