//! Values of an experiment's settings.

use serde::{Deserialize, Serialize};

/// Value of a setting, as it is written on the command line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// A switch: true or false.
    Flag(bool),
    /// A whole number.
    Whole(i64),
    /// A number with a fraction.
    Number(f64),
    /// A name, a path or another text.
    Text(String),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Flag(v) => write!(f, "{v}"),
            Value::Whole(v) => write!(f, "{v}"),
            Value::Number(v) => write!(f, "{v}"),
            Value::Text(v) => write!(f, "{v}"),
        }
    }
}
