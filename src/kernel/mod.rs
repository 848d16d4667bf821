//! What each kernel computes: the scalar truth that every fast version is compared with.

pub mod reference;
