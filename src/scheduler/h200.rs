//! Times that were measured on an H200 beside 16 threads of a Xeon: fitted on the decoding rows of the model of eight layers in
//! `runs/2026-11-26-h200/raw.csv`, for replays of such a machine. A running engine measures its own.

use super::costs::{Lane, StageCosts};
use crate::cache::{PerTier, Tier};

/// [`StageCosts::always_ns`]: the stage where every neuron is on the card.
pub const ALWAYS_NS: f64 = 31_200.0;
/// The host's [`Lane::fixed_ns`].
pub const HOST_FIXED_NS: f64 = 94_800.0;
/// Time in which one thread computes a neuron of [`NEURON_BYTES`], ns. Threads share it where the neurons of a token fit the processor's last
/// cache; else host memory's rate is the limit.
pub const THREAD_NEURON_NS: f64 = 1_510.0;
/// Threads of these rows.
pub const THREADS: f64 = 16.0;
/// Attention of a layer, which runs on the card, ns.
pub const ATTENTION_NS: f64 = 110_500.0;
/// Bytes of a neuron of hidden size 4096 in f16.
pub const NEURON_BYTES: f64 = 3.0 * 2.0 * 4096.0;
/// The card's memory's rate, GB/s.
const CARD_GB_S: f64 = 3667.6;
/// Neurons that a layer of these rows computes in the mean.
const COMPUTED: f64 = 1060.0;

/// The stage of a layer whose neurons the last cache holds. The device's share takes no time beside the host's, and moves take none that the rows show.
pub fn stage() -> StageCosts {
    let host = Lane { fixed_ns: HOST_FIXED_NS, neuron_ns: THREAD_NEURON_NS / THREADS };
    let lanes = PerTier::all(Lane::default()).with(Tier::Host, host);
    StageCosts { always_ns: ALWAYS_NS, lanes, move_ns: 0.0 }
}

/// [`stage`] with a lane of the device's own, for what computes many more neurons there: a neuron takes what its bytes take at the card's rate. The
/// time of those that the rows' layers compute leaves what every stage takes.
pub fn with_device() -> StageCosts {
    let StageCosts { always_ns, lanes, move_ns } = stage();
    let device = Lane::reading(0.0, NEURON_BYTES, CARD_GB_S);
    let of_rows = COMPUTED * device.neuron_ns;
    let host = Lane { fixed_ns: lanes[Tier::Host].fixed_ns + of_rows, ..lanes[Tier::Host] };
    StageCosts { always_ns: always_ns - of_rows, lanes: PerTier::all(host).with(Tier::Device, device), move_ns }
}
