//! What an engine's device did, for the commands to print.

use crate::cache::Tier;
use crate::engine::{ChunkCounts, Engine, MigratorCounts};
use serde::Serialize;

/// What a device did so far.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    /// Name of the device.
    pub device: String,
    /// `hits / (hits + misses)`: share of the computed neurons that the device computed.
    pub gpu_share: f64,
    /// Active (neuron, token) pairs computed on the device.
    pub hits: u64,
    /// Active (neuron, token) pairs computed on the CPU.
    pub misses: u64,
    /// Moves of neurons to the device that were begun.
    pub migrations: u64,
    /// Moves that were asked for and put off, because the engine would have had to wait for older copies.
    pub put_off: u64,
    /// (Neuron, token) pairs of prompts' chunks of more than 32 tokens, by where they were computed; not counted above.
    pub prompts: ChunkCounts,
    /// What the scheduler did; `None` without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<MigratorCounts>,
    /// Share of the engine thread's time that exchanging with the scheduler took, 0 to 1.
    pub scheduling_share: f64,
    /// Mean time of a token's FFNs by the device's clock, ms; of the virtual device an estimate from the machine profile, not a
    /// measurement.
    pub device_clock_ffn_ms: f64,
    /// Mean time of a token by the device's clock, ms. On the virtual device the host's work other than its part of the FFNs takes no time.
    pub device_clock_ms: f64,
    /// Whether the device's clock is real.
    pub measured: bool,
    /// Device memory that may be used, bytes.
    pub budget_bytes: u64,
    /// Most device memory in use since the budget was set, bytes.
    pub peak_device_bytes: u64,
}

/// What the engine's device did so far; `None` without one.
pub fn report(engine: &Engine) -> Option<DeviceReport> {
    let split = engine.split.as_ref()?;
    let (counters, memory) = (split.cache.counters, split.device.memory());
    Some(DeviceReport {
        device: split.device.name(),
        gpu_share: counters.computed[Tier::Device] as f64 / counters.computed.total().max(1) as f64,
        hits: counters.computed[Tier::Device],
        misses: counters.computed[Tier::Host],
        migrations: counters.migrations,
        put_off: counters.put_off,
        prompts: split.chunks,
        scheduler: split.migrator.as_ref().map(|m| m.counts()),
        scheduling_share: engine.report.scheduler_ns as f64 / engine.report.total_ns().max(1) as f64,
        device_clock_ffn_ms: counters.ffn_ns as f64 / 1e6 / counters.tokens.max(1) as f64,
        device_clock_ms: counters.pass_ns as f64 / 1e6 / counters.tokens.max(1) as f64,
        measured: split.device.is_real(),
        budget_bytes: memory.budget,
        peak_device_bytes: memory.peak,
    })
}
