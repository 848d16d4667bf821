//! The machine that a plan is for: a saved profile, or this machine, measured now.

use super::listener::Listener;
use super::{cuda, embedded};
use crate::error::{Error, Result, printable};
use crate::formats::machine_profile::{MachineProfile, Rate, check_name};
use crate::machine::measure::{self, Assumed};
use std::path::{Path, PathBuf};

/// Name of the profile that is used when none is named.
const DEFAULT: &str = "default";

/// Name of the machine that [`fixed`] takes: the smallest card of those that the program is made for.
const FIXED: &str = "rtx-3060-12gb";

/// The profile that `--machine` means: a .toml file, or a name among the user's profiles, then among the checkout's and the program's. `None` takes the
/// profile `default`; if there is none that can be used, this machine is measured now, and `told` is told.
///
/// # Errors
/// [`Error::Usage`] for a name without a profile, [`Error::BadFile`] for a file that is not one.
pub fn find(machine: Option<&Path>, told: &dyn Listener) -> Result<MachineProfile> {
    let Some(machine) = machine else {
        return saved(told).map_or_else(|| measure_now(told), Ok);
    };
    let name = machine.to_string_lossy();
    if is_path(&name) {
        return MachineProfile::read(machine);
    }
    check_name(&name).map_err(|why| Error::Usage(format!("--machine: {why}")))?;
    if let Some(path) = places(&name).iter().find(|p| p.is_file()) {
        return MachineProfile::read(path);
    }
    embedded::machine(&name).ok_or_else(|| {
        let known: Vec<&str> = embedded::machines().collect();
        Error::Usage(format!(
            "--machine {0}: there is no such profile; make one with `dynamicinfer measure --save {0}`, name a .toml file, or take one \
             that comes with the program: {1}",
            printable(&name),
            known.join(", ")
        ))
    })
}

/// As [`find`] without a name, but nothing is measured: two measurements differ, and with them the division between host and device. Where
/// there is no profile `default`, the rates are those of a machine that comes with the program.
pub fn fixed(told: &dyn Listener) -> MachineProfile {
    saved(told).unwrap_or_else(|| {
        told.note(&format!(
            "--deterministic without a machine profile: the model is divided by the rates of {FIXED}, not by this machine's; `dynamicinfer \
             measure --save {DEFAULT}` keeps this machine's"
        ));
        embedded::machine(FIXED).expect("it comes with the program")
    })
}

/// The profile `default`, if there is one. It only says how fast this machine is, so one that cannot be read is passed over with a warning.
pub fn saved(told: &dyn Listener) -> Option<MachineProfile> {
    let path = places(DEFAULT).into_iter().find(|p| p.is_file())?;
    let read = MachineProfile::read(&path);
    read.inspect_err(|error| told.note(&format!("warning: {error}; going on without it"))).ok()
}

/// Path at which `measure --save` writes a profile, for a name or a .toml file; the directory for names is created.
///
/// # Errors
/// [`Error::Usage`] for a name that cannot be or without a data directory, [`Error::Io`] where it cannot be created.
pub fn write_path(save: &Path) -> Result<PathBuf> {
    let name = save.to_string_lossy();
    if is_path(&name) {
        return Ok(save.to_owned());
    }
    check_name(&name).map_err(|why| Error::Usage(format!("--save: {why}")))?;
    let dir = users().ok_or_else(|| {
        Error::Usage(
            "there is no data directory to write to: set HOME or XDG_DATA_HOME, or save to a .toml file".into(),
        )
    })?;
    std::fs::create_dir_all(&dir).map_err(Error::io("create", &dir))?;
    Ok(dir.join(format!("{name}.toml")))
}

/// Name of the profile that `measure --save` writes for a name or a .toml file.
pub fn name_of(save: &Path) -> String {
    let name = save.to_string_lossy();
    if is_path(&name) { save.file_stem().unwrap_or_default().to_string_lossy().into_owned() } else { name.into_owned() }
}

/// One line of text: which rates were measured and which assumed.
pub fn describe(machine: &MachineProfile) -> String {
    let list = |rates: &[Rate]| {
        let shown: Vec<_> = rates.iter().map(|&r| format!("{} {:.4}", r.name(), machine.rate(r))).collect();
        shown.join(", ")
    };
    let measured = if machine.measured.is_empty() { "nothing".into() } else { list(&machine.measured) };
    let assumed = if machine.assumed.is_empty() { "nothing".into() } else { list(&machine.assumed) };
    format!("{}: measured {measured}; assumed {assumed}", printable(&machine.name))
}

fn measure_now(told: &dyn Listener) -> Result<MachineProfile> {
    told.note(&format!(
        "there is no machine profile; measuring this one for two seconds (`dynamicinfer measure --save {DEFAULT}` keeps it)"
    ));
    let (threads, free) = (crate::config::default_threads(), crate::config::available_memory());
    let machine = measure::machine("this", threads, free, cuda::rates().ok(), Assumed::default())?;
    told.note(&describe(&machine));
    Ok(machine)
}

fn is_path(name: &str) -> bool {
    name.contains('/') || name.ends_with(".toml")
}

fn users() -> Option<PathBuf> {
    Some(crate::config::data_dir()?.join("machines"))
}

fn places(name: &str) -> Vec<PathBuf> {
    let checkouts =
        crate::config::asset_dirs().into_iter().map(|assets| assets.with_file_name("profiles").join("machines"));
    users().into_iter().chain(checkouts).map(|dir| dir.join(format!("{name}.toml"))).collect()
}
