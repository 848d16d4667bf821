//! Any text as a config.json, and any bytes as the metadata of a GGUF: refused or made a shape within its limits, with at most 64 MiB of
//! memory. A layer count in a file of 1 kB once asked for a terabyte.
#![no_main]

#[path = "../../tests/support/limited.rs"]
mod limited;

use dynamicinfer::error::Result;
use dynamicinfer::formats::gguf;
use dynamicinfer::model::{Description, families};
use libfuzzer_sys::fuzz_target;
use limited::Limited;
use std::path::Path;

/// Bytes that an input may take.
const MAX_BYTES: usize = 64 << 20;

fn read(bytes: &[u8], path: &Path) -> Option<Result<Description>> {
    if bytes.starts_with(b"GGUF") {
        let gguf = gguf::parse(bytes, path).ok()?;
        return Some(families::from_gguf(&gguf, path, None, None));
    }
    let json = serde_json::from_slice(bytes).ok()?;
    Some(families::from_config_json(&json, path, None))
}

fuzz_target!(|bytes: &[u8]| {
    Limited::from_here(MAX_BYTES);
    match read(bytes, Path::new("fuzz")) {
        None => {}
        Some(Ok(described)) => drop(described.resolve().unwrap()),
        Some(Err(error)) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz: ") && !message.contains(char::is_control), "{message:?}");
        }
    }
    Limited::from_here(usize::MAX);
});
