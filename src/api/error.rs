//! Refusals in OpenAI's form.

use crate::error::{Error, excerpt};
use crate::generation::Refused;
use serde_json::{Value, json};

/// The error code of a prompt that does not fit the context.
pub const TOO_LONG: &str = "context_length_exceeded";

/// A refusal: the body `{"error": {message, type, param, code}}` and its HTTP status.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// HTTP status, 400 or more.
    pub status: u16,
    /// What is wrong and what to do about it, for a person.
    pub message: String,
    /// Path of the request's field at fault (`messages.0.role`); `None` if no single field is.
    pub param: Option<String>,
    /// The reason as a fixed word for programs (`queue_full`), where there is one.
    pub code: Option<&'static str>,
    /// Seconds after which it is worth asking again; `None` if no time can be told.
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// A refusal without field, code or time to ask again.
    pub fn new(status: u16, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400: the value of a field of the request cannot be used.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(param.into()), ..ApiError::new(400, message) }
    }

    /// The same with a code for programs.
    pub fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// The same with the number of seconds after which to ask again.
    pub fn retry_after(self, seconds: u32) -> ApiError {
        ApiError { retry_after: Some(seconds), ..self }
    }

    /// 400: the prompt has `tokens` tokens, too many for a context of `context`. `at_least`: the number is only a lower bound, estimated
    /// from the bytes.
    pub fn too_long(param: &str, tokens: usize, at_least: bool, context: usize) -> ApiError {
        let least = if at_least { "at least " } else { "" };
        let message = format!(
            "the prompt has {least}{tokens} tokens, and the context of {context} tokens needs one for the answer; \
             shorten the prompt, or start the server with a larger --ctx-size"
        );
        ApiError::field(param, message).code(TOO_LONG)
    }

    /// OpenAI's error type for the status.
    fn kind(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            status if status >= 500 => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The JSON body of the response.
    pub fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind(), "param": self.param, "code": self.code}})
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> ApiError {
        match refused {
            Refused::QueueFull(limit) => {
                let message = format!("the queue is full: {limit} requests wait; retry later, or raise serve.queue");
                ApiError::new(429, message).code("queue_full").retry_after(1)
            }
            Refused::Gone => ApiError::new(503, "the model has stopped; load it again").code("model_stopped"),
        }
    }
}

/// Errors of the library: bad input is 400, lack of memory 503, all else 500.
impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        let (status, code) = match &error {
            Error::Usage(_) => (400, None),
            Error::BadFile(_) => (400, Some(crate::error::BAD_FILE)),
            Error::Memory(_) => (503, Some(crate::error::MEMORY)),
            _ => (500, None),
        };
        ApiError { code, ..ApiError::new(status, error.to_string()) }
    }
}

/// 400 for a request that serde could not read, with the path of the field.
pub fn malformed(error: serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let path = error.path().to_string();
    let param = (path != "." && path != "?").then(|| excerpt(path));
    ApiError { param, ..ApiError::new(400, format!("invalid request: {}", excerpt(error.into_inner().to_string()))) }
}

/// Refuses the first field that is to be refused, with the reason.
///
/// # Errors
/// 400 that names the field.
pub fn refuse<const N: usize>(refused: [(&str, bool, &str); N]) -> Result<(), ApiError> {
    refused.into_iter().find(|(_, is, _)| *is).map_or(Ok(()), |(field, _, why)| Err(ApiError::field(field, why)))
}

/// 400 for a field at this path that nothing knows; `fields` are the names that the request itself may have, for "did you mean".
pub fn unknown_field(path: &str, fields: &[&str]) -> ApiError {
    let name = path.rsplit('.').next().unwrap_or(path);
    // Within another field there are other names.
    let near = if name == path { crate::settings::nearest(name, fields.iter().copied()) } else { None };
    let hint = near.map_or(String::new(), |near| format!("; did you mean '{near}'?"));
    ApiError::field(excerpt(path), format!("unknown field '{}'{hint}", excerpt(name))).code("unknown_field")
}

/// 400 for a schema that cannot be enforced; not 5xx, so that no client repeats the request.
pub fn unsupported(why: impl std::fmt::Display) -> ApiError {
    let message = format!("this schema cannot be enforced: {why}");
    ApiError::field("response_format", message).code("unsupported_schema")
}
