//! What this machine can do: the rates of its memory and processor, of a card, and which kernels are fastest and agree.

pub mod kernel_check;
pub mod kernel_choice;
pub mod measure;
#[cfg(feature = "cuda")]
pub mod measure_card;
