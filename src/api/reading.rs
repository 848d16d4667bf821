//! What an answer consists of, and how its pieces are told apart.

use super::call_format::CallFormat;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Thoughts that go on.
    Thought(String),
    /// Text that goes on.
    Text(String),
    /// A call of this function begins.
    Call(String),
    /// Arguments of the last call that go on, as JSON.
    Arguments(String),
}

/// The texts around a model's thoughts.
#[derive(Clone, Debug, PartialEq)]
pub struct Thoughts {
    /// Before them, without white space.
    pub open: String,
    /// Behind them, without white space.
    pub close: String,
}

/// A function that an answer may call.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Callable {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub arguments: Value,
}

/// How the answers to a request are read.
#[derive(Clone, Debug, Default)]
pub struct Reading {
    /// How calls are written, and what can be called; `None`: nothing.
    pub calls: Option<(CallFormat, Vec<Callable>)>,
    /// How thoughts are written; `None`: there are none.
    pub thoughts: Option<Thoughts>,
    /// Whether the prompt ends within thoughts.
    pub thinking: bool,
}

impl Reading {
    /// Whether an answer may be anything but text.
    pub fn is_plain(&self) -> bool {
        self.calls.is_none() && self.thoughts.is_none()
    }

    /// The texts that mark calls and thoughts.
    pub fn marks(&self) -> impl Iterator<Item = &str> {
        let calls = self.calls.iter().flat_map(|(format, _)| format.marks());
        calls.chain(self.thoughts.iter().flat_map(|marks| [marks.open.as_str(), marks.close.as_str()]))
    }

    /// Whether a function's name begins so.
    pub(super) fn may_call(&self, begin: &str) -> bool {
        self.calls.iter().flat_map(|(_, functions)| functions).any(|function| function.name.starts_with(begin))
    }

    pub(super) fn callable(&self, name: &str) -> Option<&Callable> {
        self.calls.as_ref()?.1.iter().find(|function| function.name == name)
    }
}
