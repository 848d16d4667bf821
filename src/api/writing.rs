//! Answers that are no list of choices: what their writers have in common.

use super::model::ServedModel;
use super::reading::Part;
use super::stored::Keep;
use crate::generation::Done;
use serde_json::Value;
use std::sync::Arc;

/// What all objects of one answer have in common.
pub struct Response {
    /// `resp_...` or `msg_...`
    pub id: String,
    /// When the request was accepted, in seconds since 1970.
    pub created: u64,
    /// The model that answers.
    pub model: Arc<ServedModel>,
    /// What is repeated of the request, or known before the answer, by the names of fields.
    pub echo: Arc<Value>,
    /// Where it is kept when it is complete.
    pub keep: Option<Arc<Keep>>,
}

impl Response {
    /// The answer's own number, as in its id.
    pub fn number(&self) -> &str {
        self.id.rsplit(['-', '_']).next().unwrap_or_default()
    }
}

/// Writes one answer in the form of an API.
pub trait WritesParts: Send {
    /// The events before the first piece.
    fn begin(&mut self, of: &Response) -> Vec<Value>;

    /// The events of the answer's next part.
    fn part(&mut self, of: &Response, part: &Part) -> Vec<Value>;

    /// The events after the last piece.
    fn end(&mut self, of: &Response, done: &Done) -> Vec<Value>;

    /// The whole answer as one object.
    fn whole(&mut self, of: &Response, parts: &[Part], done: &Done) -> Value;

    /// An event that says nothing, for a connection that must not be silent; `None` where a comment does it.
    fn idle(&self, _of: &Response) -> Option<Value> {
        None
    }

    /// The answer to a request that asks nothing of the model.
    fn unasked(&self, _of: &Response) -> Value {
        Value::Null
    }
}

/// The arguments of a call as an object; `None` if the answer ended before they did.
pub fn object(arguments: &str) -> Option<Value> {
    serde_json::from_str(arguments).ok().filter(Value::is_object)
}
