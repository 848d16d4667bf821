//! Any bytes as a safetensors file: refused, or every tensor is whole, alone and decodable.
#![no_main]

use dynamicinfer::formats::{blocks, safetensors};
use libfuzzer_sys::fuzz_target;
use std::collections::HashSet;
use std::path::Path;

fuzz_target!(|bytes: &[u8]| {
    let tensors = match safetensors::parse(bytes, Path::new("fuzz.safetensors")) {
        Ok(tensors) => tensors,
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz.safetensors: ") && !message.contains(char::is_control), "{message:?}");
            return;
        }
    };
    let mut end = 0;
    let mut names = HashSet::new();
    for tensor in &tensors {
        assert!(names.insert(&tensor.name));
        assert!(tensor.offset >= end && tensor.bytes > 0);
        end = tensor.offset + tensor.bytes;
        let mut out = vec![0.0; tensor.shape.iter().product()];
        blocks::dequantize(tensor.dtype, &bytes[tensor.offset as usize..end as usize], &mut out);
    }
});
