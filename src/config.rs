//! Everything that comes from outside the command line: environment variables, the user's directories, the machine's
//! cores. Nothing else reads the environment.

use std::path::PathBuf;

/// Where packed models go: `$XDG_CACHE_HOME/dynamicinfer`, else `~/.cache/dynamicinfer`.
pub fn cache_dir() -> Option<PathBuf> {
    user_dir("XDG_CACHE_HOME", ".cache")
}

/// Where what was made for a model goes (profiles, predictors): `$XDG_DATA_HOME/dynamicinfer`, else
/// `~/.local/share/dynamicinfer`.
pub fn data_dir() -> Option<PathBuf> {
    user_dir("XDG_DATA_HOME", ".local/share")
}

/// The XDG rules: a relative path in the variable is to be ignored.
fn user_dir(variable: &str, below_home: &str) -> Option<PathBuf> {
    let absolute = |p: PathBuf| p.is_absolute().then_some(p);
    let base = std::env::var_os(variable).and_then(|v| absolute(v.into())).or_else(|| {
        std::env::var_os("HOME").and_then(|home| absolute(home.into())).map(|home| home.join(below_home))
    })?;
    Some(base.join("dynamicinfer"))
}

/// Directories that may hold `assets/`: `$DYNAMICINFER_ASSETS` itself, then the ancestors of the program (a build lies
/// in `target/` of the checkout) and of the working directory.
pub fn asset_dirs() -> Vec<PathBuf> {
    let given = std::env::var_os("DYNAMICINFER_ASSETS").map(PathBuf::from);
    let checkout = option_env!("CARGO_MANIFEST_DIR").map(|dir| PathBuf::from(dir).join("assets"));
    let near = [std::env::current_exe().ok(), std::env::current_dir().ok()];
    let ancestors =
        near.into_iter().flatten().flat_map(|path| path.ancestors().map(|dir| dir.join("assets")).collect::<Vec<_>>());
    given.into_iter().chain(ancestors).chain(checkout).filter(|dir| dir.is_dir()).collect()
}

/// Threads to compute with when nobody says: one per physical core. Hyperthreads share the units and the memory port
/// that decoding is bound by.
pub fn default_threads() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut cores = std::collections::HashSet::new();
    for cpu in 0..logical {
        let topology = format!("/sys/devices/system/cpu/cpu{cpu}/topology/");
        let read = |name: &str| std::fs::read_to_string(topology.clone() + name).ok();
        match (read("physical_package_id"), read("core_id")) {
            (Some(package), Some(core)) => cores.insert((package, core)),
            _ => return logical,
        };
    }
    cores.len().clamp(1, logical)
}

/// Which messages the program logs to stderr, in tracing's filter language: `DYNAMICINFER_LOG=debug`.
pub fn log_filter() -> Option<String> {
    std::env::var("DYNAMICINFER_LOG").ok()
}

/// A seed for a run that names none. The only unseeded randomness; it is printed, so the run can be repeated.
pub fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // std keys its hash maps with the system's randomness. 32 bits are easier to type again than 64.
    std::collections::hash_map::RandomState::new().build_hasher().finish() >> 32
}

/// Bytes of memory that can be taken without swapping, where the system says so.
pub fn available_memory() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// The instruction set that kernels are to be taken from, by its name: `DYNAMICINFER_ISA=avx2`. For tests of what other machines run.
pub fn instruction_set() -> Option<String> {
    std::env::var("DYNAMICINFER_ISA").ok().filter(|name| !name.is_empty())
}

/// The value of one of this program's own variables.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The files that settings are read from, the system's first.
pub fn config_files() -> Vec<PathBuf> {
    let user = user_dir("XDG_CONFIG_HOME", ".config").map(|dir| dir.join("config.toml"));
    [Some(PathBuf::from("/etc/dynamicinfer/config.toml")), user].into_iter().flatten().collect()
}

/// Where what must outlive a run but is no model goes (the history of `chat`): `$XDG_STATE_HOME/dynamicinfer`, else
/// `~/.local/state/dynamicinfer`.
pub fn state_dir() -> Option<PathBuf> {
    user_dir("XDG_STATE_HOME", ".local/state")
}

/// The directory for sockets of this user that the system made and clears: `$XDG_RUNTIME_DIR`.
pub fn runtime_dir() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|dir| dir.is_absolute())
}

/// What systemd told this process: where to send its state, how often the watchdog wants to hear of it (if it means this
/// process), and whether a socket was handed over as descriptor 3.
pub struct Systemd {
    pub notify: Option<std::ffi::OsString>,
    pub watchdog: Option<std::time::Duration>,
    pub socket: bool,
}

pub fn systemd() -> Systemd {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let mine = |pid: Option<u64>| pid.is_none_or(|pid| pid == u64::from(std::process::id()));
    let watchdog = number("WATCHDOG_USEC").filter(|&us| us > 0 && mine(number("WATCHDOG_PID")));
    Systemd {
        notify: std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()),
        watchdog: watchdog.map(std::time::Duration::from_micros),
        socket: number("LISTEN_FDS") == Some(1) && number("LISTEN_PID") == Some(u64::from(std::process::id())),
    }
}
