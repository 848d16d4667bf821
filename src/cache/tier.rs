//! The memories that a neuron can lie in, as data: thresholds and locations go by it. Another one (a disk) begins with a line in
//! [`Tier::ALL`] and a variant of [`Location`].

use crate::ids::SlotId;
use std::ops::{Index, IndexMut};

/// A memory, and the processor that computes the neurons in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// Host memory: the CPU.
    Host,
    /// A slot in the memory of a device: the device.
    Device,
}

impl Tier {
    /// Every tier, in the order in which they are counted.
    pub const ALL: [Tier; 2] = [Tier::Host, Tier::Device];
}

/// Where one neuron is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// On the host: in no slot, or in one that is still being filled.
    Host,
    /// In this slot of its layer on the device.
    Device(SlotId),
}

impl Location {
    /// The memory that it is in.
    pub fn tier(self) -> Tier {
        match self {
            Location::Host => Tier::Host,
            Location::Device(_) => Tier::Device,
        }
    }

    /// Whether the neuron can be read on the device.
    pub fn is_device(self) -> bool {
        self.tier() == Tier::Device
    }
}

/// A value for each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerTier<T>([T; Tier::ALL.len()]);

impl<T> PerTier<T> {
    /// What `of` says of each tier.
    pub fn from_fn(of: impl FnMut(Tier) -> T) -> PerTier<T> {
        PerTier(Tier::ALL.map(of))
    }

    /// What `of` makes of each value.
    pub fn map<U>(self, of: impl FnMut(T) -> U) -> PerTier<U> {
        PerTier(self.0.map(of))
    }

    /// The same with another value for one tier.
    pub fn with(mut self, tier: Tier, value: T) -> PerTier<T> {
        self[tier] = value;
        self
    }

    /// The sum over all tiers.
    pub fn total(self) -> T
    where
        T: std::iter::Sum,
    {
        self.0.into_iter().sum()
    }

    /// The values in the order of [`Tier::ALL`].
    pub fn into_array(self) -> [T; Tier::ALL.len()] {
        self.0
    }
}

impl<T: Copy + PartialEq> PerTier<T> {
    /// The same value for every tier.
    pub fn all(value: T) -> PerTier<T> {
        PerTier::from_fn(|_| value)
    }

    /// The value, if all tiers have the same.
    pub fn shared(&self) -> Option<T> {
        self.0.iter().all(|value| *value == self.0[0]).then_some(self.0[0])
    }
}

impl<T> Index<Tier> for PerTier<T> {
    type Output = T;

    #[inline]
    fn index(&self, tier: Tier) -> &T {
        &self.0[tier as usize]
    }
}

impl<T> IndexMut<Tier> for PerTier<T> {
    #[inline]
    fn index_mut(&mut self, tier: Tier) -> &mut T {
        &mut self.0[tier as usize]
    }
}
