//! Refusals, in the form of the API that was asked.

use crate::error::{Error, excerpt};
use crate::generation::Refused;
use serde_json::{Value, json};

/// The error code of a prompt that does not fit the context.
pub const TOO_LONG: &str = "context_length_exceeded";

/// The error code of a name that means no model.
pub const NOT_FOUND: &str = "model_not_found";

/// The API in whose form a refusal is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorForm {
    /// `{"error": {message, type, param, code}}`
    OpenAi,
    /// `{"type": "error", "error": {type, message}}`
    Anthropic,
    /// `{"error": message}`
    Ollama,
}

/// A refusal: in OpenAI's form the body `{"error": {message, type, param, code}}` and its HTTP status.
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

    /// The HTTP status and the JSON body in the form of an API.
    pub fn written(&self, form: ErrorForm) -> (u16, Value) {
        match form {
            ErrorForm::OpenAi => (self.status, self.body()),
            ErrorForm::Anthropic => {
                let (status, kind) = self.anthropic();
                (status, json!({"type": "error", "error": {"type": kind, "message": self.named()}}))
            }
            ErrorForm::Ollama => (self.status, json!({"error": self.named()})),
        }
    }

    /// The message with the field at fault before it, for forms that have no other place for it.
    fn named(&self) -> String {
        match self.param.as_ref().filter(|param| !self.message.starts_with(param.as_str())) {
            None => self.message.clone(),
            Some(param) => format!("{param}: {}", self.message),
        }
    }

    /// Anthropic's status and error type. What waiting helps is overload, for which there is a status of its own.
    fn anthropic(&self) -> (u16, &'static str) {
        match self.status {
            401 => (401, "authentication_error"),
            403 => (403, "permission_error"),
            404 => (404, "not_found_error"),
            413 => (413, "request_too_large"),
            429 => (429, "rate_limit_error"),
            503 if self.retry_after.is_some() => (529, "overloaded_error"),
            status if status >= 500 => (status, "api_error"),
            status => (status, "invalid_request_error"),
        }
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

/// Errors of the library: bad input is 400, lack of memory 503, all else 500. Files are named without their folders.
impl From<Error> for ApiError {
    fn from(error: Error) -> ApiError {
        let (status, code) = match &error {
            Error::Usage(_) => (400, None),
            Error::BadFile(_) => (400, Some(crate::error::BAD_FILE)),
            Error::Memory(_) => (503, Some(crate::error::MEMORY)),
            _ => (500, None),
        };
        ApiError { code, ..ApiError::new(status, error.without_folder()) }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_names_the_field_and_anthropics_has_its_own_statuses() {
        let bad = ApiError::field("a.b", "it is missing");
        let anthropic =
            json!({"type": "error", "error": {"type": "invalid_request_error", "message": "a.b: it is missing"}});
        assert_eq!(bad.written(ErrorForm::Anthropic), (400, anthropic));
        assert_eq!(bad.written(ErrorForm::Ollama), (400, json!({"error": "a.b: it is missing"})));
        assert_eq!(ApiError::field("n", "n is 0").written(ErrorForm::Ollama).1["error"], "n is 0");
        let full: ApiError = Refused::QueueFull(3).into();
        let loading = ApiError::new(503, "x").retry_after(1);
        for (error, status, kind) in [
            (ApiError::new(401, "x"), 401, "authentication_error"),
            (ApiError::new(404, "x"), 404, "not_found_error"),
            (ApiError::new(408, "x"), 408, "invalid_request_error"),
            (ApiError::new(413, "x"), 413, "request_too_large"),
            (full, 429, "rate_limit_error"),
            (ApiError::new(500, "x"), 500, "api_error"),
            (Refused::Gone.into(), 503, "api_error"),
            (loading, 529, "overloaded_error"),
        ] {
            let (written, body) = error.written(ErrorForm::Anthropic);
            assert_eq!((written, body["error"]["type"].as_str()), (status, Some(kind)), "{error:?}");
            assert_eq!(error.written(ErrorForm::Ollama).0, error.status);
        }
    }
}
