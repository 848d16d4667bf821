//! The tokens of texts, by the tokenizer of a model directory or of a GGUF's metadata alone.
//!
//! ```sh
//! echo '"Once upon a time"' | cargo run --example tokenize -- MODEL
//! ```
//!
//! Reads a JSON string a line, and prints for each a line of JSON: the ids with control tokens recognised, the ids of the same as plain text,
//! and the text of the first ones.

use dynamicinfer::formats::{MappedFile, gguf};
use dynamicinfer::tokenizer::{Special, Tokenizer, from_gguf, from_hf_dir};
use std::io::BufRead;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = PathBuf::from(std::env::args_os().nth(1).ok_or("name a model directory or a GGUF file")?);
    let spec = if path.is_dir() {
        from_hf_dir(&path)?
    } else {
        from_gguf(&gguf::parse(MappedFile::open(&path)?.bytes(), &path)?.metadata, &path)?
    };
    let tokenizer = Tokenizer::new(spec, &path)?;
    for line in std::io::stdin().lock().lines() {
        let text: String = serde_json::from_str(&line?)?;
        let parsed = tokenizer.encode(&text, Special::Parse)?;
        let plain = tokenizer.encode(&text, Special::AsText)?;
        println!("{}", serde_json::json!([parsed, plain, tokenizer.decode(&parsed)]));
    }
    Ok(())
}
