//! Numbers that name things, each with a type of its own, and the only way from one order of a layer's neurons to the other.
//!
//! A model as it was published numbers a layer's neurons by the rows of its gate (or up) matrix. `pack` may put them into the store in
//! another order, hot ones first, and everything that computes or moves neurons counts in the store's order. Files that outlive a
//! store (profiles, predictors, histories, traces) count as the published model does.

use bytemuck::{Pod, TransparentWrapper, Zeroable};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd, Pod, TransparentWrapper, Zeroable)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The id of the thing at this index.
            ///
            /// # Panics
            /// If the index is 2^32 or more, which no file's header allows.
            #[inline]
            pub fn new(index: usize) -> $name {
                $name(u32::try_from(index).expect("an index below 2^32"))
            }

            /// The id as an index.
            #[inline]
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}

id!(
    /// A layer of the model, from 0.
    LayerId
);
id!(
    /// A neuron of a layer, by its position in the store: its block is the so manieth of the layer.
    StoreId
);
id!(
    /// A neuron of a layer, by its row in the matrices of the published model.
    PublishedId
);
id!(
    /// A slot of a layer in the memory of a device.
    SlotId
);

/// In which order a store has a layer's neurons.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Permutation(Option<Box<[PublishedId]>>);

impl Permutation {
    /// The order of the published model.
    pub fn identity() -> Permutation {
        Permutation(None)
    }

    /// The order in which position i of the store holds neuron `published[i]`; `None` if a neuron is missing or named twice.
    pub fn new(published: &[u32]) -> Option<Permutation> {
        let mut seen = vec![false; published.len()];
        let fresh = |&n: &u32| seen.get_mut(n as usize).is_some_and(|seen| !std::mem::replace(seen, true));
        published.iter().all(fresh).then(|| Permutation(Some(published.iter().map(|&n| PublishedId(n)).collect())))
    }

    /// The published number of each position of the store, `[neurons]`; `None` if the orders are the same.
    pub fn table(&self) -> Option<&[PublishedId]> {
        self.0.as_deref()
    }

    /// The published numbers of a layer of so many neurons, in the store's order.
    ///
    /// # Panics
    /// If the table is of fewer.
    #[inline]
    pub fn in_store_order(&self, neurons: usize) -> impl Iterator<Item = PublishedId> {
        let table = self.table();
        (0..neurons).map(move |at| table.map_or_else(|| PublishedId::new(at), |table| table[at]))
    }

    /// Where the store has each of these neurons.
    ///
    /// # Panics
    /// If the layer has no such neuron.
    pub fn positions(&self, neurons: &[PublishedId]) -> Vec<StoreId> {
        let Some(table) = self.table() else { return neurons.iter().map(|n| StoreId(n.0)).collect() };
        let mut position = vec![StoreId(0); table.len()];
        table.iter().enumerate().for_each(|(at, n)| position[n.index()] = StoreId::new(at));
        neurons.iter().map(|n| position[n.index()]).collect()
    }

    /// Values in the published order, `[neurons]`, in the store's.
    pub fn into_store<T: Copy>(&self, mut by_published: Vec<T>) -> Vec<T> {
        if let Some(table) = self.table() {
            by_published = table.iter().map(|n| by_published[n.index()]).collect();
        }
        by_published
    }

    /// Values in the store's order, `[neurons]`, in the published one.
    pub fn into_published<T: Copy>(&self, by_store: &[T]) -> Vec<T> {
        let mut by_published = by_store.to_vec();
        if let Some(table) = self.table() {
            table.iter().zip(by_store).for_each(|(n, &value)| by_published[n.index()] = value);
        }
        by_published
    }
}
