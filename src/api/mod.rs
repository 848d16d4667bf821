//! OpenAI's wire format: requests into jobs, events into answers. No HTTP here: the daemon and a `chat` without one use the
//! same.

pub mod chat;
pub mod completions;
pub mod error;
pub mod fields;
pub mod model;
pub mod request;
pub mod schema;
pub mod schema_bounds;
pub mod stream;

pub use error::{ApiError, TOO_LONG};
pub use model::ServedModel;
pub use request::{Asker, parse};
pub use stream::{Answer, Collector, Prepared, Wire};
