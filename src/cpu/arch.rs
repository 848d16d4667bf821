//! The vector instructions of x86-64, one function each: the processor's own, or with `cfg(emulated)` those of [`super::emulated`].

#![cfg(target_arch = "x86_64")]

#[cfg(emulated)]
pub(super) use super::emulated::*;
#[cfg(not(emulated))]
pub(super) use std::arch::x86_64::*;
