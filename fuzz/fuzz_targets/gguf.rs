//! Any bytes as a GGUF file: refused, or every tensor is whole, alone and decodable, and every key readable.
#![no_main]

use dynamicinfer::cpu::{Columns, Isa, Kernels, MAX_AXPY_ROWS, Rows};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::{DType, blocks, gguf};
use libfuzzer_sys::fuzz_target;
use std::collections::HashSet;
use std::path::Path;

/// Kernels read no byte behind a row: the sanitizer watches an allocation that ends with it.
fn compute(quant: Quant, data: &[u8], cols: usize) {
    let row = data[..quant.number_bytes(cols)].to_vec();
    let mut x = Columns::default();
    x.set(&vec![0.5; 2 * cols], 2, quant);
    let (mut y, mut out) = ([0.0; 2], vec![0.0; 2 * cols]);
    for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
        let rows = Rows { first: row.as_ptr(), stride: row.len(), ahead: 0 };
        // SAFETY: one row of the type, and results for two columns.
        unsafe {
            (kernels.dot(quant))(rows, 1, &x, y.as_mut_ptr(), 1);
            (kernels.axpy(quant))(&[row.as_ptr()], 0, &[0.5; 2], cols, &mut out);
            (kernels.axpy(quant))(&[row.as_ptr(); MAX_AXPY_ROWS], 0, &[0.5; MAX_AXPY_ROWS], cols, &mut out[..cols]);
        }
    }
}

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
        let finite = blocks::first_non_finite(&out).is_none();
        if let DType::Block(kind) = tensor.dtype {
            assert_eq!(kind.first_fault(data).is_none(), finite, "{}", tensor.name);
            compute(Quant::Block(kind), data, *tensor.shape.last().unwrap());
        }
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
