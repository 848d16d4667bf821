//! Any bytes as the body of a request: read, or refused with 400 in a line that can be shown.
#![no_main]

use dynamicinfer::api::chat::{CHAT_FIELDS, ChatRequest};
use dynamicinfer::api::completions::{COMPLETION_FIELDS, CompletionRequest};
use dynamicinfer::api::parse;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let chat = parse::<ChatRequest>(bytes, CHAT_FIELDS).err();
    let text = parse::<CompletionRequest>(bytes, COMPLETION_FIELDS).err();
    for error in chat.into_iter().chain(text) {
        assert_eq!(error.status, 400);
        assert!(!error.message.contains(char::is_control) && error.message.len() < 1000, "{:?}", error.message);
    }
});
