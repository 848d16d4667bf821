//! Any text as a config.json, and any bytes as the metadata of a GGUF: refused or made a shape within its limits, with at most 64 MiB of
//! memory. A layer count in a file of 1 kB once asked for a terabyte.
#![no_main]

use dynamicinfer::error::Result;
use dynamicinfer::formats::gguf;
use dynamicinfer::model::{ModelConfig, families};
use libfuzzer_sys::fuzz_target;
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which ends the run where an input takes more than [`MOST`].
struct Limited;

#[global_allocator]
static ALLOCATOR: Limited = Limited;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
const MOST: usize = 64 << 20;

// SAFETY: every call is the system allocator's own, or answers that there is no memory.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed).saturating_add(layout.size());
        if live <= LIMIT.load(Ordering::Relaxed) {
            // SAFETY: the caller's contract is passed on.
            return unsafe { System.alloc(layout) };
        }
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        std::ptr::null_mut()
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

fn read(bytes: &[u8], path: &Path) -> Option<Result<ModelConfig>> {
    if bytes.starts_with(b"GGUF") {
        let gguf = gguf::parse(bytes, path).ok()?;
        return Some(families::from_gguf(&gguf, path, None, None));
    }
    let json = serde_json::from_slice(bytes).ok()?;
    Some(families::from_config_json(&json, path, None))
}

fuzz_target!(|bytes: &[u8]| {
    LIMIT.store(LIVE.load(Ordering::Relaxed).saturating_add(MOST), Ordering::Relaxed);
    match read(bytes, Path::new("fuzz")) {
        None => {}
        Some(Ok(config)) => config.check().unwrap(),
        Some(Err(error)) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz: ") && !message.contains(char::is_control), "{message:?}");
        }
    }
    LIMIT.store(usize::MAX, Ordering::Relaxed);
});
