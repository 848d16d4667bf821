//! From `--device` and `--vram` to a second memory.

use super::companions;
use super::machine_arg;
use super::size;
use crate::device::{Rates, VirtualDevice};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::formats::placement_file::PlacementFile;
use crate::lab::place::place;
use crate::lab::plan::{Footprint, KvPlace, Request, plan};
use crate::model::KvType;
use crate::placement::policy::{self, Policy};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

#[derive(Args, Clone)]
pub struct DeviceArgs {
    /// Where neurons may lie beside main memory: cpu is nowhere else; virtual is a pretended device with a budget, for tests
    /// and experiments: its results are real, its times are not
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu)]
    device: DeviceKind,
    /// Room on the device for everything: 8GiB, 8GB, 8192MiB or bytes (`dynamicinfer plan` shows what it holds)
    #[arg(long, value_name = "SIZE", value_parser = size::parse, allow_hyphen_values = true)]
    vram: Option<u64>,
    /// Share of the neurons that may be on the device, above 0 to 1; without --vram it alone sets the budget
    #[arg(long, value_name = "SHARE", allow_negative_numbers = true)]
    ffn_share: Option<f64>,
    /// Neurons that begin on the device: static (the plan's), random, none, or a file of `plan -o`
    #[arg(long, value_name = "POLICY|FILE", default_value = "static")]
    placement: PathBuf,
    /// Of --placement random
    #[arg(long, default_value_t = 1)]
    placement_seed: u64,
    /// Machine that the virtual device pretends to be: a profile of `measure --save`, or a .toml file
    #[arg(long, value_name = "NAME")]
    machine: Option<PathBuf>,
    /// Wait for a layer's copies before it is used (DynamicInfer C.3), instead of computing on the CPU what has not landed
    #[arg(long, hide_short_help = true)]
    barrier: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Virtual,
}

/// What a device did, for reports.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceReport {
    pub device: String,
    /// hits / (hits + misses)
    pub gpu_share: f64,
    /// Active neurons times tokens computed on the device, and on the CPU.
    pub hits: u64,
    pub misses: u64,
    pub migrations: u64,
    pub budget_bytes: u64,
    pub peak_device_bytes: u64,
}

impl DeviceArgs {
    /// Gives the engine the device that was asked for. After the predictors: their bytes count.
    pub fn apply(&self, engine: &mut Engine, context: usize, kv: KvType) -> Result<()> {
        if self.device == DeviceKind::Cpu {
            if self.vram.is_some() || self.ffn_share.is_some() {
                return Err(Error::Usage("--vram and --ffn-share are about a device; add --device virtual".into()));
            }
            return Ok(());
        }
        if let Some(share) = self.ffn_share.filter(|s| !(*s > 0.0 && *s <= 1.0)) {
            return Err(Error::Usage(format!("--ffn-share {share}: take a share above 0 and at most 1")));
        }
        if self.vram.is_none() && self.ffn_share.is_none() {
            return Err(Error::Usage("--device virtual needs a budget: --vram 8GiB, or --ffn-share 0.5".into()));
        }
        let model = &engine.model;
        let (layers, ffn) = (model.config.layers, model.config.ffn);
        let counts = match companions::profile(model)? {
            Some((_, profile)) => (0..layers).map(|layer| profile.counts(layer)).collect(),
            None => vec![vec![1; ffn]; layers],
        };
        let machine = machine_arg::find(self.machine.as_deref())?;
        let request = Request {
            vram: self.vram,
            ram: None,
            ffn_share: self.ffn_share,
            kv: KvPlace::Host,
            predictor_bytes: engine.sparsity().predictor_bytes(),
            ilp_seconds: None,
        };
        let mut plan = plan(&Footprint::of_model(model, context, kv), &counts, &machine, &request)?;
        let slots: Vec<usize> = plan.layers.iter().map(|l| l.slots).collect();
        let neurons = match self.placement.to_str() {
            Some("static") => policy::neurons(Policy::Static, &counts, &slots, 0),
            Some("random") => policy::neurons(Policy::Random, &counts, &slots, self.placement_seed),
            Some("none") => vec![Vec::new(); layers],
            _ => {
                let file = PlacementFile::read(&self.placement)?;
                file.check_owner(&self.placement, &model.store().header.fingerprint, layers, ffn)?;
                let wanted: u64 = file.layers.iter().map(|l| l.slots as u64).sum();
                let needed = plan.min_bytes + wanted * plan.details.block_bytes;
                if needed > plan.budget_bytes {
                    return Err(Error::Memory(format!(
                        "{}: its {wanted} slots make {needed} bytes on the device and the budget is {}; give --vram {needed} \
                         or more, or plan again",
                        self.placement.display(),
                        plan.budget_bytes
                    )));
                }
                plan.layers.iter_mut().zip(&file.layers).for_each(|(l, placed)| l.slots = placed.slots);
                file.layers.into_iter().map(|l| l.neurons).collect()
            }
        };
        let rates = Rates {
            device_gb_s: machine.device_gb_s,
            link_gb_s: machine.link_gb_s,
            call_us: machine.call_us,
            copy_us: machine.copy_us,
            sync_us: machine.sync_us,
        };
        place(engine, Box::new(VirtualDevice::new(plan.budget_bytes, rates)), &plan, &neurons)?;
        engine.hybrid.as_mut().expect("placed").cache.barrier = self.barrier;
        Ok(())
    }
}

/// What the engine's device did so far; `None` without one.
pub fn report(engine: &Engine) -> Option<DeviceReport> {
    let hybrid = engine.hybrid.as_ref()?;
    let (counters, memory) = (hybrid.cache.counters, hybrid.cache.device.memory());
    Some(DeviceReport {
        device: hybrid.cache.device.name(),
        gpu_share: counters.hits as f64 / (counters.hits + counters.misses).max(1) as f64,
        hits: counters.hits,
        misses: counters.misses,
        migrations: counters.migrations,
        budget_bytes: memory.budget,
        peak_device_bytes: memory.peak,
    })
}
