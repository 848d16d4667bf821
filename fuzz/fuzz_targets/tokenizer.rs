//! Any bytes as a tokenizer: a `tokenizer.json` (first byte `j`), a GGUF's metadata (`g`), or as a packed model stores it
//! (`s`). Refused, or a text becomes tokens of the vocabulary, whatever it holds, and tokens become text.
#![no_main]

use dynamicinfer::error::Error;
use dynamicinfer::formats::gguf;
use dynamicinfer::tokenizer::{ModelSpec, Special, Tokenizer, TokenizerSpec, from_gguf};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

const TEXT: &str = "Once upon a time,  there\twas 1234 <s><|im_end|> it's naïve \u{65e5}\u{672c} \u{1f469}\u{200d}\u{1f467}\r\n\0</s>t3";

fn read(bytes: &[u8], path: &Path) -> Option<Result<TokenizerSpec, Error>> {
    let (kind, bytes) = bytes.split_first()?;
    match kind {
        b'j' => {
            let json = std::str::from_utf8(bytes).ok()?.to_owned();
            Some(Ok(ModelSpec::HfJson { json }.into()))
        }
        b'g' => Some(gguf::parse(bytes, path).and_then(|read| from_gguf(&read.metadata, path))),
        b's' => serde_json::from_slice(bytes).ok().map(Ok),
        _ => None,
    }
}

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("fuzz");
    let Some(read) = read(bytes, path) else { return };
    let tokenizer = match read.and_then(|spec| Tokenizer::new(spec, path)) {
        Ok(tokenizer) => tokenizer,
        Err(error) => {
            let message = error.to_string();
            assert!(message.starts_with("fuzz: ") && !message.contains(char::is_control), "{message:?}");
            return;
        }
    };
    for special in [Special::AsText, Special::Parse] {
        if let Ok(ids) = tokenizer.encode_prompt(TEXT, special) {
            for &id in &ids {
                assert!((id as usize) < tokenizer.vocab_len());
                assert!(tokenizer.token_bytes(id).is_some() && tokenizer.token_kind(id).is_some());
            }
            tokenizer.decode(&ids);
        }
    }
    tokenizer.defuse(TEXT);
});
