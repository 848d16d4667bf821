//! Model directories and what may stand where a file should.

use crate::{message, safetensors::st};
use dynamicinfer::formats::{MappedFile, safetensors};
use std::path::Path;

/// A file with one f32 tensor per name.
fn shard(names: &[&str]) -> Vec<u8> {
    let entry = |(i, name): (usize, &&str)| {
        format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{},{}]}}"#, 4 * i, 4 * i + 4)
    };
    let entries: Vec<String> = names.iter().enumerate().map(entry).collect();
    st(format!("{{{}}}", entries.join(",")), 4 * names.len())
}

fn directory(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn refused_dir(case: &str, files: &[(&str, &[u8])], wants: &[&str]) {
    let dir = directory(files);
    let message = message(safetensors::open_dir(dir.path()).map(drop), case);
    let place = dir.path().to_str().unwrap();
    for want in [&[place], wants].concat() {
        assert!(message.contains(want), "{case}: no {want:?} in: {message}");
    }
}

#[test]
fn a_sharded_model_is_read_whole() {
    let index = br#"{"metadata":{"total_size":12},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors","c":"m-1.safetensors"}}"#;
    let (one, two) = (shard(&["a", "c"]), shard(&["b"]));
    let dir =
        directory(&[("model.safetensors.index.json", index), ("m-1.safetensors", &one), ("m-2.safetensors", &two)]);
    let tensors = safetensors::open_dir(dir.path()).unwrap();
    assert_eq!(tensors.files().len(), 2);
    assert_eq!(tensors.iter().count(), 3);
    assert!(tensors.get("b").unwrap().path.ends_with("m-2.safetensors"));
    assert_eq!(tensors.get("c").unwrap().data, [0x11; 4]);
    // Hugging Face's cache is a directory of links.
    let cache = tempfile::tempdir().unwrap();
    for name in ["model.safetensors.index.json", "m-1.safetensors", "m-2.safetensors"] {
        std::os::unix::fs::symlink(dir.path().join(name), cache.path().join(name)).unwrap();
    }
    assert_eq!(safetensors::open_dir(cache.path()).unwrap().iter().count(), 3);
    // Buffers that are listed and not stored, or stored and not listed, are nobody's loss.
    let index = br#"{"weight_map":{"a":"m-1.safetensors","layers.0.rotary_emb.inv_freq":"m-1.safetensors"}}"#;
    let buffers = directory(&[("model.safetensors.index.json", index), ("m-1.safetensors", &one)]);
    assert_eq!(safetensors::open_dir(buffers.path()).unwrap().iter().count(), 2);
    let single = directory(&[("model.safetensors", &one)]);
    assert_eq!(safetensors::open_dir(single.path()).unwrap().iter().count(), 2);
}

#[test]
fn bad_directories_are_refused() {
    refused_dir("empty", &[], &["has neither model.safetensors nor model.safetensors.index.json"]);
    refused_dir(
        "pickle",
        &[("pytorch_model.bin", b"x")],
        &["has only PyTorch's pytorch_model.bin", "convert it to safetensors"],
    );
    refused_dir("pickles", &[("pytorch_model-00001-of-00002.bin", b"x")], &["pytorch_model-00001-of-00002.bin"]);
    refused_dir("gguf", &[("x.gguf", b"x")], &["give x.gguf instead of the directory"]);
    refused_dir("no index", &[("model-00001-of-00002.safetensors", b"x")], &["but neither model.safetensors nor"]);
    const INDEX: &str = "model.safetensors.index.json";
    let map = |map: &str| format!("{{\"weight_map\":{map}}}").into_bytes();
    let (one, two) = (shard(&["a.bias", "b.weight"]), shard(&["b.weight", "c.weight"]));
    let two_files: [(&str, &[u8]); 2] = [("m-1", &one), ("m-2", &two)];
    let indexed = |case: &str, index: &[u8], wants: &[&str]| {
        refused_dir(case, &[&[(INDEX, index)], &two_files[..]].concat(), wants);
    };
    indexed(
        "missing shard",
        &map(r#"{"a":"m-1","z":"m-9"}"#),
        &["weight_map: names m-9, which is not in the directory: download it"],
    );
    for place in ["../m-1", "/etc/passwd", "", "..", ".hidden", "a/b", "a\\\\b", "m\\u0000"] {
        indexed(
            place,
            &map(&format!("{{\"a\":\"{place}\"}}")),
            &["index.json: a: is said to be in", "not a plain file name"],
        );
    }
    let other = br#"{"weight_map":{"a.bias":"m-1","b.weight":"m-2","c.weight":"m-2"}}"#;
    indexed("other shard", other, &["m-1: b.weight: ", "places this tensor in m-2"]);
    let absent = br#"{"weight_map":{"a.bias":"m-1","b.weight":"m-1","z.bias":"m-1"}}"#;
    indexed("not there", absent, &["index.json: z.bias: is said to be in m-1, but is not"]);
    indexed("twice", &map(r#"{"a":"m-1","a":"m-1"}"#), &["index.json: a: the tensor is there twice", "(at byte"]);
    indexed("maps twice", br#"{"weight_map":{},"weight_map":{}}"#, &["weight_map: the key is there twice"]);
    indexed("no map", b"{}", &["has no weight_map"]);
    indexed("not JSON", b"<html>", &["index.json: ", "expected value"]);
    indexed("deep", format!("{{\"metadata\":{}", "[".repeat(200_000)).as_bytes(), &["index.json: metadata: "]);
    indexed("number", &map(r#"{"a":1}"#), &["index.json: a: invalid type: integer"]);
    indexed("bad shard", &map(r#"{"a":"m-1","b":"m-1","x":"x"}"#), &["names x, which is not in the directory"]);
    let many: Vec<String> = (0..5000).map(|i| format!("\"t{i}\":\"s{i}\"")).collect();
    indexed("many shards", &map(&format!("{{{}}}", many.join(","))), &["weight_map: names 5000 files, at most 4096"]);
    let missing = safetensors::open_dir(Path::new("/no/such/directory")).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "cannot read the directory /no/such/directory: No such file or directory (os error 2)"
    );
}

#[test]
fn only_regular_files_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let refused = |path: &Path, want: &str| {
        let error = MappedFile::open(path).unwrap_err().to_string();
        assert!(error.contains(want) && error.contains(path.to_str().unwrap()), "{}: {error}", path.display());
    };
    refused(dir.path(), "it is a directory");
    // A FIFO without a writer and /dev/zero never end; opening either must not wait.
    let fifo = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    refused(&at("fifo"), "it is a pipe, device or socket");
    refused(Path::new("/dev/zero"), "it is a pipe, device or socket");
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    refused(&at("socket"), "cannot open ");
    std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
    refused(&at("dangling"), "cannot open ");
    std::os::unix::fs::symlink("loop", at("loop")).unwrap();
    refused(&at("loop"), "cannot open ");
    refused(&at("absent"), "No such file");
    std::fs::write(at("empty"), b"").unwrap();
    assert_eq!(MappedFile::open(&at("empty")).unwrap().bytes(), b"");
    // The same through a model directory.
    std::os::unix::fs::symlink("model.safetensors", at("model.safetensors")).unwrap();
    let error = safetensors::open_dir(dir.path()).unwrap_err().to_string();
    assert!(error.contains("cannot open ") && error.contains("model.safetensors"), "{error}");
    std::fs::write(at("secret"), b"x").unwrap();
    std::fs::set_permissions(at("secret"), std::os::unix::fs::PermissionsExt::from_mode(0o0)).unwrap();
    // Root may read everything, so this says something only where tests do not run as root.
    if std::fs::File::open(at("secret")).is_err() {
        refused(&at("secret"), "cannot open ");
    }
}
