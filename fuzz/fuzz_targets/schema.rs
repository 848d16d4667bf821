//! Any JSON as a schema, on the way that a request's goes: refused with 400 in a line that can be shown, or tried in a child and
//! then compiled here without harm. The child is the program, built before: `cargo build --release`.
#![no_main]

use dynamicinfer::api::schema::Schemas;
use dynamicinfer::child::Wanted;
use dynamicinfer::generation::Grammars;
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::LazyLock;

static SCHEMAS: LazyLock<Schemas> =
    LazyLock::new(|| Schemas::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/release/dynamicinfer")));
static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| Grammars::small().unwrap());

fuzz_target!(|bytes: &[u8]| {
    let Ok(schema) = serde_json::from_slice(bytes) else { return };
    if let Err(error) = SCHEMAS.grammar(&GRAMMARS, &schema, &Wanted::always()) {
        assert_eq!(error.status, 400, "{}", error.message);
        assert!(!error.message.contains(char::is_control) && error.message.len() < 1000, "{:?}", error.message);
    }
});
