//! Any bytes as a GGUF file: refused, or every tensor is whole, alone and decodable, and every key readable.
#![no_main]

use dynamicinfer::formats::{blocks, gguf};
use libfuzzer_sys::fuzz_target;
use std::collections::HashSet;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let read = match gguf::parse(bytes, Path::new("fuzz.gguf")) {
        Ok(read) => read,
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz.gguf: ") && !message.contains(char::is_control), "{message:?}");
            return;
        }
    };
    let mut end = 0;
    let mut names = HashSet::new();
    for tensor in &read.tensors {
        assert!(names.insert(&tensor.name));
        assert!(tensor.offset >= end && tensor.bytes > 0);
        end = tensor.offset + tensor.bytes;
        let data = &bytes[tensor.offset as usize..end as usize];
        let numbers: usize = tensor.shape.iter().product();
        let mut out = vec![0.0; numbers];
        blocks::dequantize(tensor.dtype, data, &mut out);
        blocks::first_non_finite(&out);
    }
    let m = &read.metadata;
    let mut keys = HashSet::new();
    for (key, value) in m.iter() {
        assert!(keys.insert(key));
        // By the value itself and not by equality: NaN is not itself.
        assert!(m.get(key).is_some_and(|found| std::ptr::eq(found, value)));
        let at = m.offset(key).unwrap() as usize;
        assert_eq!(&bytes[at + 8..at + 8 + key.len()], key.as_bytes());
        let readable = [
            m.str(key).is_ok(),
            m.u32(key).is_ok(),
            m.f32(key).is_ok(),
            m.bool(key).is_ok(),
            m.strings(key).is_ok(),
            m.f32s(key).is_ok(),
            m.i32s(key).is_ok(),
        ];
        assert!(readable.iter().filter(|&&ok| ok).count() <= 1, "{key} is of two types");
    }
});
