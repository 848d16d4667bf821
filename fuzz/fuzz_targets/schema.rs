//! Any JSON as a schema, on the way that a request's goes: refused with 400 in a line that can be shown, or tried in a child and
//! then compiled here without harm. The child is the program, built before: `cargo build --release`.
#![no_main]

use dynamicinfer::api::forms::{AnswerForms, Form, Forms};
use dynamicinfer::api::schema::Schemas;
use dynamicinfer::child::Wanted;
use dynamicinfer::tokenizer::{Tokenizer, from_hf_dir};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use tokio::runtime::{Builder, Runtime};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Builder::new_current_thread().enable_time().build().unwrap());
static SCHEMAS: LazyLock<Arc<Schemas>> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let demo = root.join("assets/demo");
    let tokenizer = Arc::new(Tokenizer::new(from_hf_dir(&demo).unwrap(), &demo).unwrap());
    let vocab = tokenizer.vocab_len();
    Arc::new(Schemas::new(root.join("target/release/dynamicinfer"), tokenizer, vocab))
});

fuzz_target!(|bytes: &[u8]| {
    let Ok(schema) = serde_json::from_slice::<serde_json::Value>(bytes) else { return };
    for strict in [true, false] {
        let form = Form { schema: schema.clone(), strict: Some(strict), given: "", place: "/schema".into() };
        let answer = AnswerForms { forms: Forms(vec![form]), calls: 0, or_text: false, native: None, thoughts: None };
        if let Err(error) = RUNTIME.block_on(SCHEMAS.answer(answer, 0, &Wanted::always())) {
            assert_eq!(error.status, 400, "{}", error.message);
            assert!(!error.message.contains(char::is_control) && error.message.len() < 1000, "{:?}", error.message);
        }
    }
});
