//! Kept answers of `/v1/responses`: shown and forgotten.

use super::common::{Shared, answer};
use super::owner::keeper;
use crate::api::ApiError;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// A kept answer of /v1/responses.
pub async fn stored(State(daemon): Shared, id: Result<Path<String>, PathRejection>, request: Request) -> Response {
    let found = id.ok().and_then(|Path(id)| daemon.stored.object(&id, keeper(&daemon, &request), crate::clock::now()));
    match found {
        Some(text) => ([(header::CONTENT_TYPE, "application/json")], text.to_string()).into_response(),
        None => answer(Err(not_kept())),
    }
}

/// Forgets a kept answer of /v1/responses.
pub async fn forget(State(daemon): Shared, id: Result<Path<String>, PathRejection>, request: Request) -> Response {
    let forgotten = id.ok().map(|Path(id)| id).filter(|id| daemon.stored.forget(id, keeper(&daemon, &request)));
    answer(forgotten.map(|id| json!({"id": id, "object": "response", "deleted": true})).ok_or_else(not_kept))
}

fn not_kept() -> ApiError {
    ApiError::new(404, "the answer is not kept, or not any more, or by another daemon or for another token (serve.responses_bytes, serve.responses_seconds)")
        .code("response_not_found")
}
