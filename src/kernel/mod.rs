//! Contracts of the kernels.
pub mod reference;
