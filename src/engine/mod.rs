//! Running a model: the way of one token is [`decode`], everything else serves it.

pub mod attention;
pub mod decode;
pub mod ffn;
pub mod sampler;
pub mod session;

pub use decode::{Engine, Logits};
pub use ffn::{Counts, Selection, Work};
pub use session::Session;
