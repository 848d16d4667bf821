//! The papers' set-ups and the results that they published for them, to be printed beside the simulated ones. Every figure stands in the
//! paper's text; those that can only be read from a plot are left out.

use crate::formats::rows::Quant;

/// A model on a machine, as a paper measured it.
#[derive(Clone, Copy, Debug)]
pub struct SetUp {
    /// Name for reports, such as `PC-Low 7B f16`.
    pub name: &'static str,
    /// Name of a profile in `profiles/machines`.
    pub machine: &'static str,
    /// Name of the model's shape ([`crate::placement::shapes::shape`]).
    pub shape: &'static str,
    /// Type of the weights.
    pub quant: Quant,
    /// Device memory for everything, GiB.
    pub vram_gib: f64,
    /// Share of the neurons that are active for a token: 1 - the sparsity of powerinfer, table 3.
    pub active: f64,
    /// What DynamicInfer published for this set-up.
    pub published: Published,
}

/// Published speed-ups, percent faster, (from, to); `None` where the text has no figure.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Published {
    /// DynamicInfer over PowerInfer (5.2), which `static` stands for.
    pub full_over_static: Option<(f64, f64)>,
    /// DynamicInfer over llama.cpp (5.2).
    pub full_over_llama_cpp: Option<(f64, f64)>,
    /// Percent faster than PowerInfer, for ReluLLaMA (5.5, figure 10): with micro, with micro and macro, with everything.
    pub ablation: Option<[f64; 3]>,
    /// Tokens per second of llama.cpp with Llama-2 of that size (table 4).
    pub llama_cpp: Option<f64>,
    /// Share of the active neurons that the device computes, percent: PowerInfer's and DynamicInfer's (5.3, the mean over PC-High's
    /// models).
    pub gpu_share: Option<(f64, f64)>,
}

const fn set_up(
    name: &'static str,
    machine: &'static str,
    shape: &'static str,
    (quant, vram_gib, active): (Quant, f64, f64),
    published: Published,
) -> SetUp {
    SetUp { name, machine, shape, quant, vram_gib, active, published }
}

const HIGH: &str = "dynamicinfer-pc-high";
const LOW: &str = "dynamicinfer-pc-low";

/// The set-ups of DynamicInfer 5: 70B in int4, the others in f16. Half a GiB of each card is left to the driver, so that the peaks of table
/// 3 (23.7 and 11.6 GB) are not exceeded by much.
pub const SET_UPS: [SetUp; 4] = [
    set_up(
        "PC-Low 7B f16",
        LOW,
        "llama-7b",
        (Quant::F16, 10.5, 0.30),
        Published {
            full_over_static: Some((20.0, 35.0)),
            full_over_llama_cpp: Some((176.0, 202.0)),
            ablation: None,
            llama_cpp: Some(7.9),
            gpu_share: None,
        },
    ),
    set_up(
        "PC-Low 13B f16",
        LOW,
        "llama-13b",
        (Quant::F16, 10.5, 0.22),
        Published {
            full_over_static: Some((11.0, 13.0)),
            full_over_llama_cpp: Some((156.0, 191.0)),
            ablation: None,
            llama_cpp: Some(2.5),
            gpu_share: None,
        },
    ),
    set_up(
        "PC-High 13B f16",
        HIGH,
        "llama-13b",
        (Quant::F16, 23.0, 0.22),
        Published {
            full_over_static: Some((18.0, 26.0)),
            full_over_llama_cpp: Some((60.0, 97.0)),
            ablation: Some([11.3, 13.6, 23.1]),
            llama_cpp: Some(9.8),
            gpu_share: Some((51.0, 68.0)),
        },
    ),
    set_up(
        "PC-High 70B q4_0",
        HIGH,
        "llama-70b",
        (Quant::Q4, 23.0, 0.18),
        Published {
            full_over_static: Some((53.0, 59.0)),
            full_over_llama_cpp: Some((148.0, 253.0)),
            ablation: Some([27.6, 34.0, 57.1]),
            llama_cpp: None,
            gpu_share: Some((51.0, 68.0)),
        },
    ),
];
