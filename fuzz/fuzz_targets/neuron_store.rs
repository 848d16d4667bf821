//! Any bytes as a neuron store, as they are and with the preamble put right (a fuzzer cannot guess a checksum): refused,
//! or every section is in the file, before the header, and of the length its content says.
#![no_main]

use dynamicinfer::formats::neuron_store::{Content, Header, MAGIC, VERSION, parse};
use dynamicinfer::model::ModelConfig;
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

fn check(bytes: &[u8]) {
    let header = match parse::<Header>(bytes, Path::new("fuzz.neurons")) {
        Ok(header) => header,
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz.neurons: ") && !message.contains(char::is_control), "{message:?}");
            assert!(message.contains("pack it again") || message.contains("pack the model again"), "{message}");
            return;
        }
    };
    for section in &header.sections {
        let data = &bytes[section.offset as usize..][..section.bytes as usize];
        match section.content {
            Content::Rows { quant, rows, cols } => assert_eq!(data.len(), rows * quant.row_bytes(cols)),
            Content::Numbers => assert_eq!((data.len() % 4, section.offset % 4096), (0, 0)),
            Content::Bytes => {}
        }
    }
    if let Ok(config) = serde_json::from_value::<ModelConfig>(header.config)
        && config.check().is_ok()
    {
        // Nothing of it may wrap.
        let _ = (config.parameters(), config.qkv_dim(), config.ffn * config.ffn_kind.rows() * config.hidden);
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if bytes.len() < 64 {
        return;
    }
    let mut right = bytes.to_vec();
    let len = bytes.len() as u64;
    let stated = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
    let header_at = stated.clamp(64, len);
    right[..8].copy_from_slice(&MAGIC);
    right[8..12].copy_from_slice(&VERSION.to_le_bytes());
    right[16..24].copy_from_slice(&header_at.to_le_bytes());
    right[24..32].copy_from_slice(&(len - header_at).to_le_bytes());
    right[40..48].copy_from_slice(&len.to_le_bytes());
    let sum = xxh3_64(&right[header_at as usize..]);
    right[32..40].copy_from_slice(&sum.to_le_bytes());
    check(&right);
});
