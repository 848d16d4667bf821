//! Any bytes as a neuron store, as they are and with the preamble put right (a fuzzer cannot guess a checksum): refused,
//! or every section is in the file, before the header, apart from the others, and of the length its content says.
#![no_main]

mod support;

use dynamicinfer::formats::neuron_store::{Content, Header, MAGIC, parse};
use dynamicinfer::model::Description;
use dynamicinfer::model::block::BlockLayout;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

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
    let mut ranges: Vec<_> = header.sections.iter().map(|s| (s.offset, s.offset + s.bytes)).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "sections share bytes");
    for section in &header.sections {
        let data = &bytes[section.offset as usize..][..section.bytes as usize];
        match section.content {
            Content::Rows { quant, rows, cols } => assert_eq!(data.len(), rows * quant.row_bytes(cols)),
            Content::Neurons { gate, up, down, neurons, cols } => {
                let quants: Vec<_> = gate.into_iter().chain([up, down]).collect();
                let layout = BlockLayout::mixed(&quants, cols);
                assert_eq!(data.len(), neurons * layout.bytes());
                if let Some(block) = data.get(..layout.bytes()) {
                    assert_eq!(layout.parts().iter().map(|part| part.of(block).len()).sum::<usize>(), block.len());
                }
            }
            content @ (Content::Clusters { clusters: count, .. } | Content::Experts { experts: count, .. }) => {
                assert_eq!(Some(data.len() as u64), content.cluster_bytes().map(|each| each * count as u64));
            }
            Content::Numbers => assert_eq!((data.len() % 4, section.offset % 4096), (0, 0)),
            Content::Bytes => {}
        }
    }
    if let Ok(described) = serde_json::from_value::<Description>(header.config)
        && let Ok(config) = described.resolve()
    {
        // Nothing of it may wrap.
        let _ =
            (config.parameters(), config.mixer(0).rows(), config.widest_ffn() * config.ffn_kind.rows() * config.hidden);
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    if let Some(right) = support::put_right(bytes, &MAGIC, |_| ()) {
        check(&right);
    }
});
