//! Any text as the index of a sharded model: no file but the model's own shards is opened. Slow, about a thousand runs a
//! second, because every run writes and opens files.
#![no_main]

use dynamicinfer::formats::safetensors;
use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;

/// A model directory: shards "a" and "b" with one tensor each, a.weight and b.weight. Left behind in the temporary directory.
static DIR: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap().keep();
    for name in ["a", "b"] {
        let header = format!(r#"{{"{name}.weight":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
        std::fs::write(dir.join(name), bytes).unwrap();
    }
    dir
});

fuzz_target!(|index: &[u8]| {
    std::fs::write(DIR.join("model.safetensors.index.json"), index).unwrap();
    if let Ok(tensors) = safetensors::open_dir(&DIR) {
        assert!(tensors.files().len() <= 2);
        assert!(tensors.iter().all(|t| t.path.starts_with(&*DIR) && t.data == [0; 4]));
    }
});
