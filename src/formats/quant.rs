//! Quantised blocks.
