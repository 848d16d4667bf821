//! Safetensors files with one thing wrong.

use crate::{allowed, measured, message};
use dynamicinfer::clock::computed;
use dynamicinfer::formats::{DType, TensorInfo, safetensors};
use std::path::Path;
use std::time::Duration;

pub fn st(header: impl AsRef<[u8]>, data: usize) -> Vec<u8> {
    let header = header.as_ref();
    let mut out = [&(header.len() as u64).to_le_bytes()[..], header].concat();
    out.resize(out.len() + data, 0x11);
    out
}

fn refused_st(case: &str, bytes: &[u8], wants: &[&str]) {
    let start = computed();
    let (parsed, peak) = measured(|| safetensors::parse(bytes, Path::new("model.safetensors")));
    let message = message(parsed, case);
    let took = computed() - start;
    assert!(took < Duration::from_secs(1), "{case}: took {took:?}");
    assert!(peak <= allowed(bytes.len()), "{case}: {peak} bytes of memory for a file of {}", bytes.len());
    for want in [&["model.safetensors: "], wants].concat() {
        assert!(message.contains(want), "{case}: no {want:?} in: {message}");
    }
}

/// One tensor `w` with this entry.
fn one(entry: &str, data: usize) -> Vec<u8> {
    st(format!("{{\"w\":{entry}}}"), data)
}

#[test]
fn good_safetensors_are_read_in_the_order_of_their_data() {
    let header = r#"{"__metadata__":{"format":"pt"},
        "b":{"dtype":"BF16","shape":[2,3],"data_offsets":[32,44]},
        "ids":{"shape":[1,2],"dtype":"I64","data_offsets":[16,32]},
        "scalar":{"dtype":"F16","shape":[],"data_offsets":[44,46]},
        "a \u00e9":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}   "#;
    let read = safetensors::parse(&st(header, 46), Path::new("m")).unwrap();
    let data = 8 + header.len() as u64;
    let info = |name: &str, dtype, shape: &[usize], offset, bytes| TensorInfo {
        name: name.into(),
        dtype,
        shape: shape.into(),
        offset: data + offset,
        bytes,
    };
    let expected = [
        info("a é", DType::F32, &[4], 0, 16),
        info("b", DType::BF16, &[2, 3], 32, 12),
        info("scalar", DType::F16, &[], 44, 2),
    ];
    assert_eq!(read, expected);
    assert_eq!(safetensors::parse(&st("{}", 0), Path::new("m")).unwrap(), []);
}

#[test]
fn bad_safetensors_headers_are_refused() {
    refused_st("empty", b"", &["header length: not a model file: it has only 0 bytes"]);
    refused_st("7 bytes", b"\x02\0\0\0\0\0\0", &["it has only 7 bytes"]);
    refused_st("N = 0", &[0; 9], &["header length: no { follows it"]);
    for n in [100_000_001, u64::MAX, 1 << 63] {
        refused_st(
            "too long",
            &[&n.to_le_bytes()[..], b"{}"].concat(),
            &[&format!("header length: is {n}, allowed are 100000000")],
        );
    }
    refused_st(
        "N > file",
        &[&3u64.to_le_bytes()[..], b"{}"].concat(),
        &["header length: is 3, but the file has only 2 more bytes"],
    );
    refused_st("web page", b"<!DOCTYPE html><html><head>", &["it is a web page"]);
    refused_st("LFS", b"version https://git-lfs.github.com/spec/v1", &["run: git lfs pull"]);
    refused_st("pickle", b"\x80\x02}q\x00(X\x05\x00\x00\x00", &["PyTorch checkpoint"]);
    refused_st("GGUF", &crate::gguf::good().bytes(), &["but a GGUF one: name it .gguf"]);
    for header in [" {}", "[]", "\"x\"", "null"] {
        refused_st(header, &st(header, 0), &["header length: no { follows it"]);
    }
    refused_st("not UTF-8", &st(b"{\"a\xff\":{}}", 0), &["invalid unicode code point", "(at byte 1"]);
    refused_st("two values", &st("{}{}", 0), &["trailing characters"]);
    refused_st("cut", &st("{\"w\":{", 0), &["w: EOF while parsing"]);
    // Deeper than any stack.
    let deep = "[".repeat(200_000);
    refused_st("deep entry", &one(&deep, 0), &["w: invalid type: sequence"]);
    refused_st("deep shape", &one(&format!("{{\"shape\":{deep}"), 0), &["w: invalid type: sequence"]);
    refused_st(
        "deep metadata",
        &st(format!("{{\"__metadata__\":{{\"a\":{deep}"), 0),
        &["__metadata__: invalid type: sequence"],
    );
    for metadata in ["1", "[]", "null", r#"{"a":1}"#, r#"{"a":null}"#] {
        refused_st(metadata, &st(format!("{{\"__metadata__\":{metadata}}}"), 0), &["__metadata__: invalid type"]);
    }
    refused_st(
        "key twice",
        &st(r#"{"__metadata__":{"a":"1","a":"1"}}"#, 0),
        &["__metadata__: the key \"a\" is there twice"],
    );
    refused_st("twice", &st(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), &["__metadata__: the key is there twice"]);
    let entry = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
    refused_st("tensor twice", &st(format!("{{\"w\":{entry},\"w\":{entry}}}"), 4), &["w: the tensor is there twice"]);
    refused_st("no name", &st(format!("{{\"\":{entry}}}"), 4), &["a name of 0 bytes"]);
    refused_st("long name", &st(format!("{{\"{}\":{entry}}}", "x".repeat(2000)), 4), &["a name of 2000 bytes"]);
}

#[test]
fn bad_safetensors_entries_are_refused() {
    let entry = |dtype: &str, shape: &str, offsets: &str, data| {
        one(&format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#), data)
    };
    for (shape, want) in [
        ("[-1]", "invalid value: integer `-1`"),
        ("[1.5]", "invalid type: floating point"),
        ("[1e0]", "invalid type: floating point"),
        ("[\"1\"]", "invalid type: string"),
        ("[18446744073709551616]", "invalid type: floating point"),
        ("1", "expected a shape"),
        ("[1,1,1,1,1,1,1,1,1]", "more than 8 dimensions"),
        ("[4294967296,4294967296]", "impossible shape [4294967296, 4294967296]"),
        ("[9223372036854775807,2]", "impossible shape"),
        ("[4611686018427387904]", "impossible shape"),
        ("[0]", "has the shape [0] with no numbers"),
        ("[2]", "has 4 bytes of data, but its shape [2] needs 8"),
    ] {
        refused_st(shape, &entry("F32", shape, "[0,4]", 4), &["w: ", want]);
    }
    for (offsets, want) in [
        ("[4,0]", "the end before the begin"),
        ("[0]", "invalid length 1"),
        ("[0,4,8]", "trailing characters"),
        ("[-4,0]", "invalid value: integer `-4`"),
        ("[4,8]", "its data begins at 4 and leaves a hole before it, expected is 0"),
        ("[18446744073709551612,18446744073709551615]", "has 3 bytes of data"),
        ("[18446744073709551611,18446744073709551615]", "leaves a hole"),
    ] {
        refused_st(offsets, &entry("F32", "[1]", offsets, 4), &["w: ", want]);
    }
    for dtype in ["F64", "F8_E4M3", "F8_E5M2", "F4"] {
        refused_st(
            dtype,
            &entry(dtype, "[1]", "[0,4]", 4),
            &[&format!("w: is stored as {dtype}, which is not supported")],
        );
    }
    for dtype in ["", "f32", "F32\\u0000", "FLOAT"] {
        refused_st(dtype, &entry(dtype, "[1]", "[0,4]", 4), &["w: has the unknown dtype"]);
    }
    refused_st("cut", &entry("F32", "[1]", "[0,4]", 3), &["w: its data ends at byte", "it is cut short"]);
    refused_st("no data", &entry("F32", "[1]", "[0,4]", 0), &["w: its data ends at byte"]);
    refused_st("more", &entry("F32", "[1]", "[0,4]", 5), &["end of file: 1 bytes follow the last tensor"]);
    refused_st("skipped, but past the end", &entry("I64", "[2]", "[0,16]", 8), &["w: its data ends at byte"]);
    refused_st(
        "skipped, but wrong",
        &entry("I64", "[2]", "[0,8]", 8),
        &["w: has 8 bytes of data, but its shape [2] needs 16"],
    );
    refused_st("missing", &one(r#"{"dtype":"F32","shape":[1]}"#, 0), &["w: has no data_offsets"]);
    refused_st("missing", &one(r#"{"shape":[1],"data_offsets":[0,4]}"#, 4), &["w: has no dtype"]);
    refused_st("missing", &one(r#"{"dtype":"F32","data_offsets":[0,4]}"#, 4), &["w: has no shape"]);
    refused_st("twice", &one(r#"{"dtype":"F32","dtype":"F32"}"#, 0), &["w: has the field \"dtype\" twice"]);
    refused_st("unknown", &one(r#"{"dtype":"F32","scale":2}"#, 0), &["w: has the unknown field \"scale\""]);
    let two = |a: &str, b: &str, data| {
        let header = format!(
            r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":{a}}},"b":{{"dtype":"F32","shape":[2],"data_offsets":{b}}}}}"#
        );
        st(header, data)
    };
    refused_st("overlap", &two("[0,8]", "[4,12]", 12), &["b: its data begins at 4 and overlaps another tensor's"]);
    refused_st("same place", &two("[0,8]", "[0,8]", 8), &["its data begins at 0 and overlaps another tensor's"]);
    refused_st(
        "hole",
        &two("[0,8]", "[12,20]", 20),
        &["b: its data begins at 12 and leaves a hole before it, expected is 8"],
    );
    let quantised = r#"{"l.qweight":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}"#;
    refused_st("GPTQ", &st(quantised, 4), &["l.qweight: is stored as I32: the model is quantised by GPTQ"]);
    assert_eq!(
        message(safetensors::parse(&two("[0,8]", "[8,16]", 12), Path::new("m.safetensors")), "cut"),
        "m.safetensors: b: its data ends at byte 132, but the file ends at 128: it is cut short, download or copy it again (at \
         byte 124)"
    );
}

#[test]
fn many_safetensors_entries_take_linear_time() {
    let entry = |i: u64| format!(r#""t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{}]}}"#, i + 1);
    let header = format!("{{{}}}", (0..300_000).map(entry).collect::<Vec<_>>().join(","));
    let bytes = st(header, 300_000);
    // Of this thread: others may have the cores.
    let start = computed();
    let (read, peak) = measured(|| safetensors::parse(&bytes, Path::new("m")).unwrap());
    let took = computed() - start;
    assert!(took < Duration::from_secs(1), "{took:?}");
    assert!(peak <= allowed(bytes.len()), "{peak} bytes of memory for a file of {}", bytes.len());
    assert!(read.is_empty());
}
