//! Any bytes as the body of a request of each kind: refused in a line that can be shown, or made into jobs that the engine may be given.
//! The model has no chat template and no end-of-text token, so nothing is rendered or compiled in a child: target `schema` does that.
#![no_main]

use dynamicinfer::api::chat::{CHAT_FIELDS, ChatRequest};
use dynamicinfer::api::completions::{COMPLETION_FIELDS, CompletionRequest};
use dynamicinfer::api::embeddings::{EMBEDDING_FIELDS, EmbeddingRequest};
use dynamicinfer::api::responses::{RESPONSES_FIELDS, ResponsesRequest};
use dynamicinfer::api::{ApiError, Asker, Generates, Prepared, ServedModel, parse};
use dynamicinfer::tokenizer::{Tokenizer, TokenizerSpec};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::{Arc, LazyLock};

const CONTEXT: usize = 64;

static MODEL: LazyLock<Arc<ServedModel>> = LazyLock::new(|| {
    // Its first byte says which kind of tokenizer it is. Another kind has splitting rules, which a sanitizer makes too slow to be taken.
    let spec: TokenizerSpec = serde_json::from_str(&include_str!("../seeds/tokenizer/stored_spm")[1..]).unwrap();
    let spec = TokenizerSpec { eos: vec![], chat_template: None, ..spec };
    let tokenizer = Tokenizer::new(spec, Path::new("fuzz")).unwrap();
    let vocab = tokenizer.vocab_len();
    Arc::new(ServedModel::new("demo".into(), Arc::new(tokenizer), vocab, CONTEXT, "00".into()))
});

/// What was accepted. A refusal is the client's fault and says so in a line: 404 for another model's name, else 400.
fn accepted<T>(read: Result<T, ApiError>) -> Option<T> {
    let error = match read {
        Ok(read) => return Some(read),
        Err(error) => error,
    };
    assert_eq!(error.status, if error.code == Some("model_not_found") { 404 } else { 400 }, "{}", error.message);
    for line in [&error.message, error.param.as_ref().unwrap_or(&error.message)] {
        assert!(!line.contains(char::is_control) && line.len() < 1000, "{line:?}");
    }
    None
}

fn check(prepared: Result<Prepared, ApiError>) {
    let Some(prepared) = accepted(prepared) else { return };
    assert!(!prepared.jobs.is_empty() && prepared.jobs.len() % prepared.per_prompt == 0);
    for job in &prepared.jobs {
        assert!(!job.prompt.is_empty() && job.max_tokens > 0 && job.prompt.len() + job.max_tokens <= CONTEXT);
        assert!(
            job.prompt.iter().chain(job.logit_bias.iter().map(|(id, _)| id)).all(|&id| (id as usize) < MODEL.vocab)
        );
        assert!(job.logit_bias.iter().all(|(_, bias)| bias.is_finite()));
        job.params.validate().unwrap();
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Some(chat) = accepted(parse::<ChatRequest>(bytes, CHAT_FIELDS)) {
        check(chat.prepare(&MODEL, &Asker::patient(1, "1".into(), 1)));
    }
    if let Some(text) = accepted(parse::<CompletionRequest>(bytes, COMPLETION_FIELDS)) {
        check(text.prepare(&MODEL, &Asker::patient(1, "1".into(), 1)));
    }
    if let Some(response) = accepted(parse::<ResponsesRequest>(bytes, RESPONSES_FIELDS)) {
        check(response.prepare(&MODEL, &Asker::patient(1, "1".into(), 1)));
    }
    if let Some(texts) = accepted(parse::<EmbeddingRequest>(bytes, EMBEDDING_FIELDS))
        && let Some(texts) = accepted(texts.prepare(&MODEL))
    {
        assert!(texts.tokens.iter().all(|text| (1..CONTEXT).contains(&text.len())));
    }
});
