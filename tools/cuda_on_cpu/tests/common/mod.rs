//! A machine whose driver is the stand-in: a folder with its libraries, and tests that run in a process of their own with it.
#![allow(dead_code)]

use dynamicinfer::device::cuda::{Card, CudaDevice, Delivery, Options};
use dynamicinfer::device::{Device, PinnedBuffer, Tiles};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A folder of libraries for LD_LIBRARY_PATH.
pub struct Machine {
    pub dir: tempfile::TempDir,
}

impl Machine {
    /// With the stand-in as its driver.
    pub fn new() -> Machine {
        let machine = Machine { dir: tempfile::tempdir().unwrap() };
        ["libcuda.so", "libcuda.so.1"].iter().for_each(|name| machine.library(name));
        // What is no library keeps the loader from looking further: a test does not find what the machine really has.
        ["libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.13"].iter().for_each(|name| machine.empty(name));
        machine
    }

    pub fn without_driver() -> Machine {
        let machine = Machine { dir: tempfile::tempdir().unwrap() };
        let names = ["libcuda.so", "libcuda.so.1", "libnvrtc.so", "libnvrtc.so.12", "libnvrtc.so.13"];
        names.iter().for_each(|name| machine.empty(name));
        machine
    }

    pub fn with_nvrtc(self) -> Machine {
        std::fs::remove_file(self.dir.path().join("libnvrtc.so.12")).unwrap();
        self.library("libnvrtc.so.12");
        self
    }

    fn empty(&self, name: &str) {
        std::fs::write(self.dir.path().join(name), "").unwrap();
    }

    fn library(&self, name: &str) {
        let here = std::env::current_exe().unwrap();
        let built = here.parent().unwrap().join("libcuda_on_cpu.so");
        assert!(built.is_file(), "{} is not there; cargo test -p cuda-on-cpu builds it", built.display());
        std::os::unix::fs::symlink(built, self.dir.path().join(name)).unwrap();
    }

    /// The program with these arguments, on this machine. Its folders are the machine's.
    pub fn program(&self, args: &[&str], environment: &[(&str, &str)]) -> Done {
        let of_lab = args.iter().any(|arg| matches!(*arg, "experiment" | "logits-hash" | "--vram-schedule"));
        let program = if of_lab { env!("CARGO_BIN_EXE_program-lab") } else { env!("CARGO_BIN_EXE_program") };
        let mut command = Command::new(program);
        command.args(args).env("HOME", self.dir.path()).env("XDG_CACHE_HOME", cache());
        done(command.env("LD_LIBRARY_PATH", self.dir.path()).envs(environment.iter().copied()))
    }
}

/// Where packed models are kept between tests, as the tests of the program do.
pub fn cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache")
}

pub struct Done {
    pub code: Option<i32>,
    pub out: String,
    pub said: String,
}

fn done(command: &mut Command) -> Done {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Done { code: output.status.code(), out: text(output.stdout), said: text(output.stderr) }
}

/// Runs the body of the test of this name in a process whose driver is the stand-in, described by the environment.
pub fn on(machine: &Machine, test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    const NAME: &str = "CUDA_ON_CPU_TEST";
    if std::env::var(NAME).as_deref() == Ok(test) {
        return body();
    }
    if std::env::var(NAME).is_ok() {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(NAME, test);
    command.env("RUST_BACKTRACE", "0").env("LD_LIBRARY_PATH", machine.dir.path()).envs(environment.iter().copied());
    let done = done(&mut command);
    assert!(
        done.code == Some(0) && done.out.contains("1 passed"),
        "{test} with {environment:?}: {:?}\n{}\n{}",
        done.code,
        done.out,
        done.said
    );
}

pub fn options(budget: u64) -> Options {
    let patience = Duration::from_secs(60);
    Options { budget, delivery: Delivery::default(), pinnable: u64::MAX, patience, graphs: false, tiles: Tiles::Lanes }
}

pub fn device(budget: u64) -> CudaDevice {
    CudaDevice::new(Card::open().unwrap(), &options(budget)).unwrap()
}

/// One that keeps sequences as graphs.
pub fn with_graphs(budget: u64) -> CudaDevice {
    CudaDevice::new(Card::open().unwrap(), &Options { graphs: true, ..options(budget) }).unwrap()
}

/// Pinned words.
pub fn room(device: &mut CudaDevice, words: usize) -> PinnedBuffer {
    let room = PinnedBuffer::new(words);
    // SAFETY: the tests drop the device first.
    unsafe { device.pin(room.as_ptr().cast(), words * 4, true) };
    assert_eq!(device.pinned().refused, 0);
    room
}

/// The stand-in's own functions, of the library that this process has loaded as its driver.
pub struct StandIn(libloading::Library);

impl StandIn {
    pub fn new() -> StandIn {
        // SAFETY: the stand-in sets up nothing when it is loaded.
        StandIn(unsafe { libloading::Library::new("libcuda.so") }.expect("the stand-in"))
    }

    /// From now on these calls fail: `cuMemAlloc_v2:3=2`.
    pub fn fail(&self, text: &str) {
        let text = CString::new(text).unwrap();
        // SAFETY: the stand-in's function has this type, and gets a string.
        unsafe { (*self.0.get::<unsafe extern "C" fn(*const c_char)>(b"cuda_on_cpu_fail").unwrap())(text.as_ptr()) }
    }

    /// Calls of a function since then.
    pub fn calls(&self, function: &str) -> u64 {
        let function = CString::new(function).unwrap();
        type Calls = unsafe extern "C" fn(*const c_char) -> u64;
        // SAFETY: as above.
        unsafe { (*self.0.get::<Calls>(b"cuda_on_cpu_calls").unwrap())(function.as_ptr()) }
    }

    /// Whether copies of neurons stay on their way, once they have begun.
    pub fn hold(&self, on: bool) {
        // SAFETY: the stand-in's function has this type.
        unsafe { (*self.0.get::<unsafe extern "C" fn(c_int)>(b"cuda_on_cpu_hold").unwrap())(c_int::from(on)) }
    }

    /// What was not given back.
    pub fn left(&self) -> String {
        let mut room = [0 as c_char; 512];
        type Left = unsafe extern "C" fn(*mut c_char, usize);
        // SAFETY: as above; it writes a string into the room.
        unsafe {
            (*self.0.get::<Left>(b"cuda_on_cpu_left").unwrap())(room.as_mut_ptr(), room.len());
            CStr::from_ptr(room.as_ptr()).to_str().unwrap().to_owned()
        }
    }
}
