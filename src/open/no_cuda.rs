//! Stands in for `open::cuda` in a build without the feature `cuda`: there is never a card.

use super::listener::Listener;
use crate::device::{Tiles, VirtualDevice};
use crate::error::{Error, Result};
use crate::machine::measure::CardRates;

/// A card; no value of this type exists.
pub enum Card {}

/// Why there is no card: the program was built without CUDA.
pub struct Unusable;

impl std::fmt::Display for Unusable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("this program was built without CUDA; build it with --features cuda")
    }
}

impl Card {
    /// Finds no card.
    ///
    /// # Errors
    /// Always [`Unusable`].
    pub fn open() -> Result<Card, Unusable> {
        Err(Unusable)
    }
}

/// The error for a card that cannot be used.
pub fn error(why: Unusable) -> Error {
    Error::Usage(why.to_string())
}

/// Never called: there is no card.
pub fn most(card: &Card, _layers: usize) -> u64 {
    match *card {}
}

/// Whether there is a card: never, and never an error.
pub fn is_there() -> Result<bool> {
    Ok(false)
}

/// Finds no card.
///
/// # Errors
/// Always [`Unusable`].
pub fn look() -> Result<(), Unusable> {
    Err(Unusable)
}

/// Measures no card.
///
/// # Errors
/// Always: the program was built without CUDA.
pub fn rates() -> Result<CardRates, String> {
    Err(Unusable.to_string())
}

/// Never called: there is no card. Any type of device will do as the result.
pub fn device(
    card: Card,
    _budget: u64,
    _how: (bool, Option<Tiles>, bool),
    _told: &dyn Listener,
) -> Result<VirtualDevice> {
    match card {}
}
