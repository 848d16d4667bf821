//! Everything that comes from outside the command line: environment variables, the user's directories, the machine's
//! cores. Nothing else reads the environment.

use std::path::{Path, PathBuf};

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

/// The Hugging Face hub as the environment names it, by the variables that its own tools read.
pub struct HubSettings {
    /// Where it answers (`HF_ENDPOINT`).
    pub endpoint: String,
    /// Where fetched models are kept (`HF_HUB_CACHE`, `HF_HOME`); `None` where there is no home.
    pub cache: Option<PathBuf>,
    /// The user's token (`HF_TOKEN`, else what `hf auth login` has left).
    pub token: Option<String>,
    /// Whether nothing is to be fetched (`HF_HUB_OFFLINE`).
    pub offline: bool,
}

/// Most bytes of the file with the hub's token; a token has below a hundred.
const MAX_TOKEN_BYTES: u64 = 64 << 10;

/// Reads the hub's environment variables.
pub fn hub() -> HubSettings {
    let given = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let home = given("HF_HOME").map(PathBuf::from).or_else(|| {
        let cache = given("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| given("HOME").map(|home| PathBuf::from(home).join(".cache")));
        cache.map(|cache| cache.join("huggingface"))
    });
    let left = || {
        let path = given("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| Some(home.as_ref()?.join("token")))?;
        // A pipe in place of the file would be waited for.
        let good = |meta: &std::fs::Metadata| meta.is_file() && meta.len() <= MAX_TOKEN_BYTES;
        std::fs::metadata(&path).ok().filter(good)?;
        std::fs::read_to_string(path).ok().map(|token| token.trim().to_owned())
    };
    HubSettings {
        endpoint: given("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into()),
        cache: given("HF_HUB_CACHE").map(PathBuf::from).or_else(|| Some(home.as_ref()?.join("hub"))),
        token: given("HF_TOKEN").or_else(left).filter(|token| !token.is_empty()),
        offline: given("HF_HUB_OFFLINE")
            .is_some_and(|value| ["1", "on", "yes", "true"].contains(&&*value.to_lowercase())),
    }
}

/// Directories that may be the checkout's `assets/`: `$DYNAMICINFER_ASSETS` and no other where it is set, else those beside the ancestors
/// of the program (a build lies in `target/` of the checkout) and of the working directory.
pub fn asset_dirs() -> Vec<PathBuf> {
    if let Some(given) = std::env::var_os("DYNAMICINFER_ASSETS") {
        return Some(PathBuf::from(given)).filter(|dir| dir.is_dir()).into_iter().collect();
    }
    let checkout = option_env!("CARGO_MANIFEST_DIR").map(|dir| PathBuf::from(dir).join("assets"));
    let near = [std::env::current_exe().ok(), std::env::current_dir().ok()];
    let ancestors =
        near.into_iter().flatten().flat_map(|path| path.ancestors().map(|dir| dir.join("assets")).collect::<Vec<_>>());
    ancestors.chain(checkout).filter(|dir| dir.is_dir()).collect()
}

/// Threads to compute with when no setting says: one per physical core. Hyperthreads share the units and the memory port
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

/// Threads to compute with beside a scheduler's thread: one core less, where no core has a second thread for it. A pool that has every core
/// would wait for the task whose core the scheduler takes.
pub fn threads_beside_a_scheduler() -> usize {
    let (threads, logical) = (default_threads(), std::thread::available_parallelism().map_or(1, |n| n.get()));
    if threads == logical && threads > 2 { threads - 1 } else { threads }
}

/// Threads of the pool that offline jobs and the tokenizers crate share: one per logical core, or fewer if `RAYON_NUM_THREADS` says so.
/// More would only wait for each other, and the system gives no hundred thousand.
pub fn pool_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let asked = std::env::var("RAYON_NUM_THREADS").ok().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
    asked.map_or(cores, |n: usize| n.min(cores))
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

/// Numbers that a reader of some of them cannot tell in advance: a keyed hash of 0, 1, 2, ...
pub struct Unguessable(std::hash::RandomState);

impl Unguessable {
    /// With the system's randomness as its key.
    pub fn new() -> Unguessable {
        Unguessable(std::hash::RandomState::new())
    }

    /// The number for `n`: a keyed hash of it.
    pub fn number(&self, n: u64) -> u64 {
        use std::hash::BuildHasher;
        self.0.hash_one(n)
    }
}

impl Default for Unguessable {
    fn default() -> Unguessable {
        Unguessable::new()
    }
}

/// Bytes of memory that this process can take without swapping and without being killed: the least of what the system has free, what
/// the limits of its control groups leave, and what `ulimit -v` leaves. `None` where the system tells none of these.
pub fn available_memory() -> Option<u64> {
    [available_below(Path::new("/")), address_space_left()].into_iter().flatten().min()
}

/// Bytes of memory that are free by `/proc` and `/sys` below `root`: the system's, or less where a control group of this process leaves
/// less. Pages of files count as free, as they do in the system's own figure: they can be read again.
pub fn available_below(root: &Path) -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let free = read("proc/meminfo").and_then(|info| Some(number_after(&info, "MemAvailable:")? * 1024));
    let groups = read("proc/self/cgroup").unwrap_or_default();
    // Version 2 has one hierarchy, version 1 one for memory: `N:CONTROLLERS:/PATH` a line.
    let limits = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, group) = (parts.next()?, parts.next()?);
        match controllers {
            "" => ["", "unified/"].iter().filter_map(|mount| left_in_groups(root, mount, group, &VERSION_2)).min(),
            some if some.split(',').any(|name| name == "memory") => left_in_groups(root, "memory/", group, &VERSION_1),
            _ => None,
        }
    });
    limits.chain(free).min()
}

/// Names of a control group's files: limit, usage, and the pages of files in `memory.stat`.
struct GroupFiles([&'static str; 4]);

const VERSION_1: GroupFiles =
    GroupFiles(["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"]);
const VERSION_2: GroupFiles = GroupFiles(["memory.max", "memory.current", "inactive_file", "active_file"]);

/// The fewest bytes that `group` or one of the groups around it leaves. In a container the path may name groups that only the host
/// sees; the container's own group is then the root of the mount.
fn left_in_groups(root: &Path, mount: &str, group: &str, files: &GroupFiles) -> Option<u64> {
    let mount = root.join("sys/fs/cgroup").join(mount);
    let GroupFiles([limit, usage, inactive, active]) = files;
    let left = |group: &Path| {
        let dir = mount.join(group.strip_prefix("/").unwrap_or(group));
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
        // No limit is `max` in version 2 and a number beyond any machine in version 1.
        let limit: u64 = read(limit)?.trim().parse().ok()?;
        let used: u64 = read(usage)?.trim().parse().ok()?;
        let stat = read("memory.stat").unwrap_or_default();
        let pages: u64 = [inactive, active].iter().filter_map(|name| number_after(&stat, &format!("{name} "))).sum();
        Some(limit.saturating_sub(used.saturating_sub(pages)))
    };
    Path::new(group).ancestors().filter_map(left).min()
}

/// Bytes of address space that `ulimit -v` leaves.
fn address_space_left() -> Option<u64> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::As).current?;
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").ok()?.split(' ').next()?.parse().ok()?;
    Some(limit.saturating_sub(pages * rustix::param::page_size() as u64))
}

/// The number behind `name` at the beginning of a line.
fn number_after(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// Processor time since the system began, seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProcessorTime {
    /// Of everything that ran, other virtual machines in our place included.
    pub all: f64,
    /// Of this process.
    pub own: f64,
    /// Number of processors.
    pub processors: usize,
}

/// How much the processors have worked; `None` where the system does not say.
pub fn processor_time() -> Option<ProcessorTime> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    processor_time_in(&read("/proc/stat")?, &read("/proc/self/stat")?, rustix::param::clock_ticks_per_second())
}

/// `stat` and `own` are `/proc/stat` and `/proc/self/stat`, in ticks of which a second has `ticks`.
fn processor_time_in(stat: &str, own: &str, ticks: u64) -> Option<ProcessorTime> {
    let seconds = |sum: u64| sum as f64 / ticks as f64;
    let line: Vec<u64> = stat.strip_prefix("cpu ")?.lines().next()?.split_whitespace().flat_map(str::parse).collect();
    // user nice system idle iowait irq softirq steal; what guests took is in user.
    let busy = line.get(..8)?.iter().sum::<u64>() - line[3] - line[4];
    // The second field is the program's name in brackets, and may hold anything.
    let fields: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
    let mine = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    let is_one = |line: &&str| line.starts_with("cpu") && !line.starts_with("cpu ");
    Some(ProcessorTime { all: seconds(busy), own: seconds(mine), processors: stat.lines().filter(is_one).count() })
}

/// The name of the instruction set whose kernels are to be used, for tests of what other machines run: `DYNAMICINFER_ISA=avx2`.
pub fn instruction_set() -> Option<String> {
    std::env::var("DYNAMICINFER_ISA").ok().filter(|name| !name.is_empty())
}

/// This program's own variables that are no settings; those are `DYNAMICINFER_SECTION_NAME`.
pub const VARIABLES: [&str; 4] = ["DYNAMICINFER_ASSETS", "DYNAMICINFER_ISA", "DYNAMICINFER_LOG", "DYNAMICINFER_NVRTC"];

/// Names of all variables that begin as this program's own.
pub fn own_variables() -> Vec<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names.filter(|name| name.starts_with("DYNAMICINFER_")).collect()
}

/// The folder that `$DYNAMICINFER_ASSETS` names, if there is none of that name.
pub fn missing_assets() -> Option<PathBuf> {
    std::env::var_os("DYNAMICINFER_ASSETS").map(PathBuf::from).filter(|dir| !dir.is_dir())
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

/// Where state goes that outlives a run and belongs to no model (the history of `chat`): `$XDG_STATE_HOME/dynamicinfer`, else
/// `~/.local/state/dynamicinfer`.
pub fn state_dir() -> Option<PathBuf> {
    user_dir("XDG_STATE_HOME", ".local/state")
}

/// The user's directory for sockets, which the system makes at login and clears: `$XDG_RUNTIME_DIR`.
///
/// # Errors
/// Why it cannot be used: it is not set, no absolute path, or not there, as after `su`.
pub fn runtime_dir() -> Result<PathBuf, &'static str> {
    let dir = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).ok_or("XDG_RUNTIME_DIR is not set")?;
    match dir {
        dir if !dir.is_absolute() => Err("XDG_RUNTIME_DIR is no absolute path"),
        dir if !dir.is_dir() => Err("the directory of XDG_RUNTIME_DIR is not there"),
        dir => Ok(dir),
    }
}

/// What systemd tells this process through the environment.
pub struct Systemd {
    /// Address of the socket that takes messages about this service's state (`NOTIFY_SOCKET`); `None` where there is none.
    pub notify: Option<std::ffi::OsString>,
    /// Time without a sign of life after which systemd takes this process for hung (`WATCHDOG_USEC`); `None` where it does not watch it.
    pub watchdog: Option<std::time::Duration>,
    /// Whether systemd has handed over a listening socket, which is descriptor 3 (`LISTEN_FDS`, `LISTEN_PID`).
    pub socket: bool,
}

/// Reads systemd's environment variables; all of it is absent where systemd did not start this process.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn processor_time_is_what_everybody_has_worked_and_what_this_process_has() {
        let stat = "cpu  100 20 30 4000 500 6 7 8 9 10\ncpu0 1 2\ncpu1 1 2\nintr 5\n";
        let own = "42 (a) b (c)) R 1 2 3 4 5 6 7 8 9 10 70 30 0 0 20 0 1\n";
        let time = processor_time_in(stat, own, 100).unwrap();
        assert_eq!(time, ProcessorTime { all: 1.71, own: 1.0, processors: 2 });
        assert_eq!(processor_time_in("cpu  1 2 3\n", own, 100), None);
        let now = processor_time().expect("Linux says it");
        assert!(now.processors > 0 && now.all > 0.0);
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:       24000000 kB\nMemFree:  1 kB\nMemAvailable:   20000000 kB\n");

    /// A container with 1 GiB on a machine with 24 was told that 20 are free, and `bench` was killed there.
    #[test]
    fn the_limit_of_a_control_group_is_the_memory_that_is_free() {
        let free = |files: &[(&str, &str)]| available_below(root(files).path());
        assert_eq!(free(&[]), None);
        assert_eq!(free(&[MEMINFO]), Some(20_000_000 << 10));
        let v2 = ("proc/self/cgroup", "0::/user.slice/a\n");
        let limited = [
            MEMINFO,
            v2,
            ("sys/fs/cgroup/user.slice/a/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/a/memory.current", "600\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "1000\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "700\n"),
            ("sys/fs/cgroup/user.slice/memory.stat", "anon 500\nfile 200\ninactive_file 150\nactive_file 50\n"),
        ];
        // The pages of files, 200 of the 700, can be read again.
        assert_eq!(free(&limited), Some(500), "a group around this one has the limit");
        let v1 = [
            MEMINFO,
            ("proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/1234\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1500\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 9\ntotal_inactive_file 100\ntotal_active_file 0\n"),
        ];
        assert_eq!(free(&v1), Some(600), "the container's group is the root of what it sees");
        let mut none = v1;
        none[2].1 = "9223372036854771712\n";
        assert_eq!(free(&none), Some(20_000_000 << 10), "no limit is a number, too");
        let mut over = v1;
        over[3].1 = "2500\n";
        assert_eq!(free(&over), Some(0));
    }
}
