//! The vector instructions of x86-64, one function each.

#![cfg(target_arch = "x86_64")]

pub(super) use std::arch::x86_64::*;
