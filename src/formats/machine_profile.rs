//! A machine's rates, `profiles/machines/NAME.toml`: what every estimate of time is made from. `dynamicinfer measure --save`
//! writes one; those of the checkout are written by hand from vendors' specifications.

use super::MappedFile;
use super::temporary;
use crate::error::{Error, Result, excerpt};
use serde::{Deserialize, Serialize};
use std::path::Path;

const REMEDY: &str = "make it again with `dynamicinfer measure --save NAME`";
/// Most bytes of a file that is read. A profile has some ten lines, a kilobyte at most, and TOML takes up to a hundred times its length
/// in memory while it is read.
const MAX_BYTES: usize = 16 << 10;
/// GB/s and GFLOP/s that no machine reaches, and microseconds (ten seconds) that no call takes: a figure beyond them has a wrong unit.
const FASTEST_GB_S: f64 = 1e6;
const FASTEST_GFLOPS: f64 = 1e6;
const SLOWEST_US: f64 = 1e7;

/// Rates of one machine. Every figure is either measured or assumed, and the profile says which.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineProfile {
    /// The machine's name, which is also the file's without `.toml` ([`check_name`]).
    pub name: String,
    /// Where the figures come from, for people.
    pub note: String,
    /// When it was measured, in seconds since the Unix epoch; `None` where nothing was measured.
    pub measured_unix: Option<u64>,
    /// Figures that were measured on the machine itself.
    pub measured: Vec<Rate>,
    /// Figures that were not measured but taken from a specification, or guessed.
    pub assumed: Vec<Rate>,
    /// 10^9 bytes per second that all cores together read from host memory.
    pub dram_gb_s: f64,
    /// 10^9 multiplications and additions per second, each counted, that all cores together do in a prompt's matrix products. Older
    /// profiles do not have it; [`assumed_gflops`] then stands for it.
    #[serde(default = "assumed_gflops")]
    pub host_gflops: f64,
    /// 10^9 bytes per second that the device reads from its own memory.
    pub device_gb_s: f64,
    /// 10^9 multiplications and additions per second, each counted, that the device does in a prompt's matrix products. Older profiles do not
    /// have it: then arithmetic is taken to be faster than all else that the device does.
    #[serde(default = "fastest_gflops")]
    pub device_gflops: f64,
    /// 10^9 bytes per second from host to device memory.
    pub link_gb_s: f64,
    /// Microseconds to set all threads to work and join them again, without any work.
    pub call_us: f64,
    /// Microseconds to start one copy over the link, whatever its size.
    pub copy_us: f64,
    /// Microseconds to wait once for a device that has nothing left to do.
    pub sync_us: f64,
    /// How fast neuron blocks are brought to the device by each method that it has; empty where that was not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<MoveRate>,
    /// What a layer's FFN takes beside its neurons; `None` where that was not seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage: Option<StageRates>,
}

/// Fixed times of a layer's FFN, as decoding rows of the machine have shown them: more than the sum of its calls, copies and waits by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageRates {
    /// Microseconds that it takes where every neuron is on the device.
    pub always_us: f64,
    /// Microseconds that it takes more where the CPU has a part, beside the time of its neurons.
    pub split_us: f64,
}

/// How neuron blocks come to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveMethod {
    /// One copy for each block.
    Single,
    /// One copy for each run of neighbouring blocks, all of them in one call where the driver can take many.
    Batched,
    /// A kernel reads them where they lie in host memory.
    Gather,
}

impl MoveMethod {
    /// All methods, in the order of their discriminants.
    pub const ALL: [MoveMethod; 3] = [MoveMethod::Single, MoveMethod::Batched, MoveMethod::Gather];

    /// The method's name in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            MoveMethod::Single => "single",
            MoveMethod::Batched => "batched",
            MoveMethod::Gather => "gather",
        }
    }
}

/// The time that moving a group of blocks takes by one method: a part for the group, a part for each piece, and a part for the bytes. A
/// piece is a block; for [`MoveMethod::Batched`] it is a run of neighbouring blocks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveRate {
    /// The method that these times belong to.
    pub method: MoveMethod,
    /// Microseconds that any group takes, however many blocks it has.
    pub group_us: f64,
    /// Microseconds that each piece takes beside the time of its bytes.
    pub piece_us: f64,
    /// 10^9 bytes per second, without the times above.
    pub gb_s: f64,
}

impl MoveRate {
    /// Microseconds for a group of `pieces` pieces with `bytes` bytes together.
    pub fn us(&self, pieces: usize, bytes: u64) -> f64 {
        self.group_us + self.piece_us * pieces as f64 + bytes as f64 / self.gb_s / 1e3
    }
}

/// GFLOP/s of a profile that does not say: about what a consumer processor of eight cores does. Vendors do not specify it.
pub const fn assumed_gflops() -> f64 {
    400.0
}

/// What stands for a device's arithmetic in profiles that do not say.
const fn fastest_gflops() -> f64 {
    FASTEST_GFLOPS
}

/// GFLOP/s of a device that is assumed without a card: about half of what NVIDIA specifies of an RTX 3060 in f32, of which this program's kernels reach somewhat less than
/// half without tensor cores (on an H200 29 of 67 TFLOP/s).
pub const fn assumed_device_gflops() -> f64 {
    6000.0
}

/// A figure that every profile has; the profile lists each either as measured or as assumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rate {
    /// [`MachineProfile::dram_gb_s`].
    DramGbS,
    /// [`MachineProfile::host_gflops`].
    HostGflops,
    /// [`MachineProfile::device_gb_s`].
    DeviceGbS,
    /// [`MachineProfile::device_gflops`].
    DeviceGflops,
    /// [`MachineProfile::link_gb_s`].
    LinkGbS,
    /// [`MachineProfile::call_us`].
    CallUs,
    /// [`MachineProfile::copy_us`].
    CopyUs,
    /// [`MachineProfile::sync_us`].
    SyncUs,
}

impl Rate {
    /// All figures, in the order in which the file has them.
    pub const ALL: [Rate; 8] = [
        Rate::DramGbS,
        Rate::HostGflops,
        Rate::DeviceGbS,
        Rate::DeviceGflops,
        Rate::LinkGbS,
        Rate::CallUs,
        Rate::CopyUs,
        Rate::SyncUs,
    ];

    /// The figure's name in the file.
    pub const fn name(self) -> &'static str {
        match self {
            Rate::DramGbS => "dram_gb_s",
            Rate::HostGflops => "host_gflops",
            Rate::DeviceGbS => "device_gb_s",
            Rate::DeviceGflops => "device_gflops",
            Rate::LinkGbS => "link_gb_s",
            Rate::CallUs => "call_us",
            Rate::CopyUs => "copy_us",
            Rate::SyncUs => "sync_us",
        }
    }

    /// Whether the figure can have this value; the error says what it must be.
    pub fn check(self, value: f64) -> Result<(), String> {
        let (top, unit) = match self {
            Rate::DramGbS | Rate::DeviceGbS | Rate::LinkGbS => (FASTEST_GB_S, "GB/s"),
            Rate::HostGflops | Rate::DeviceGflops => (FASTEST_GFLOPS, "GFLOP/s"),
            Rate::CallUs | Rate::CopyUs | Rate::SyncUs => (SLOWEST_US, "microseconds"),
        };
        if value.is_finite() && value > 0.0 && value <= top {
            return Ok(());
        }
        Err(format!("is {value}; it must be above 0 and at most {top} {unit}"))
    }
}

impl MachineProfile {
    /// The value of this figure: GB/s, GFLOP/s or microseconds, as its name says.
    pub fn rate(&self, rate: Rate) -> f64 {
        match rate {
            Rate::DramGbS => self.dram_gb_s,
            Rate::HostGflops => self.host_gflops,
            Rate::DeviceGbS => self.device_gb_s,
            Rate::DeviceGflops => self.device_gflops,
            Rate::LinkGbS => self.link_gb_s,
            Rate::CallUs => self.call_us,
            Rate::CopyUs => self.copy_us,
            Rate::SyncUs => self.sync_us,
        }
    }

    /// Checks every field. The error is the first field that is wrong, and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        check_name(&self.name).map_err(|why| ("name", why))?;
        for rate in Rate::ALL {
            rate.check(self.rate(rate)).map_err(|why| (rate.name(), why))?;
            let times = [&self.measured, &self.assumed].into_iter().flatten().filter(|r| **r == rate).count();
            // What older profiles do not name is assumed.
            let is_new = matches!(rate, Rate::HostGflops | Rate::DeviceGflops);
            if times != 1 && !(is_new && times == 0) {
                return Err(("assumed", format!("{} must stand once, in `measured` or in `assumed`", rate.name())));
            }
        }
        for (i, rate) in self.moves.iter().enumerate() {
            let us = |us: f64| us.is_finite() && (0.0..=SLOWEST_US).contains(&us);
            let fits = us(rate.group_us) && us(rate.piece_us) && Rate::LinkGbS.check(rate.gb_s).is_ok();
            if !fits || self.moves[..i].iter().any(|other| other.method == rate.method) {
                let name = rate.method.name();
                return Err(("moves", format!("{name} must stand once, with times from 0 and a rate above it")));
            }
        }
        if self
            .stage
            .is_some_and(|stage| ![stage.always_us, stage.split_us].iter().all(|us| (0.0..=SLOWEST_US).contains(us)))
        {
            return Err(("stage", "its times are microseconds from 0".into()));
        }
        if self.measured.is_empty() == self.measured_unix.is_some() {
            return Err(("measured_unix", "must be there if, and only if, something was measured".into()));
        }
        Ok(())
    }

    /// Reads the profile at `path` and checks it.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the field that is wrong, [`Error::Io`] if it cannot be opened.
    pub fn read(path: &Path) -> Result<MachineProfile> {
        let file = MappedFile::open(path)?;
        let bad = |field: &str, why: String| bad(path, field, why);
        if file.bytes().len() > MAX_BYTES {
            return Err(bad("", "too long for a machine profile".into()));
        }
        let text = std::str::from_utf8(file.bytes()).map_err(|_| bad("", "is not text".into()))?;
        MachineProfile::parse(text, path)
    }

    /// Reads the profile in `text`, which came from `path`, and checks it.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the field that is wrong.
    pub fn parse(text: &str, path: &Path) -> Result<MachineProfile> {
        let profile: MachineProfile = toml::from_str(text)
            .map_err(|e| bad(path, "", format!("not a machine profile: {}", excerpt(e.message()))))?;
        profile.check().map_err(|(field, why)| bad(path, field, why))?;
        Ok(profile)
    }

    /// Writes it to a temporary file, which then takes the place of what is at `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses; what was at `path` is then still there.
    pub fn write(&self, path: &Path) -> Result<()> {
        debug_assert_eq!(self.check(), Ok(()));
        let text = toml::to_string(self).expect("a machine profile is plain data");
        temporary::write_whole(path, text.as_bytes())
    }
}

fn bad(path: &Path, field: &str, why: String) -> Error {
    Error::bad(path, field, format!("{why}; {REMEDY}"))
}

/// Checks that `name` can be a machine's name, which becomes a file name; the error says what a name consists of.
pub fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if name.is_empty() || name.len() > 64 || name.starts_with('.') || !name.chars().all(plain) {
        return Err(format!("'{}' is no name: take 1 to 64 letters, digits, dots, _ or -", excerpt(name)));
    }
    Ok(())
}
