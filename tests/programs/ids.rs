//! Laws of the permutation between the order of a store and that of the published model.

use dynamicinfer::ids::{Permutation, PublishedId, StoreId};
use proptest::prelude::*;

/// The numbers 0 to n - 1 in any order.
fn table() -> impl Strategy<Value = Vec<u32>> {
    (1..200u32).prop_flat_map(|n| Just((0..n).collect::<Vec<_>>()).prop_shuffle())
}

fn published(numbers: std::ops::Range<usize>) -> Vec<PublishedId> {
    numbers.map(PublishedId::new).collect()
}

proptest! {
    #[test]
    fn values_that_go_into_the_store_and_back_are_what_they_were(table in table()) {
        let order = Permutation::new(&table).unwrap();
        let values: Vec<u64> = (0..table.len() as u64).map(|i| i * i + 7).collect();
        let stored = order.into_store(values.clone());
        prop_assert!(table.iter().zip(&stored).all(|(&n, value)| *value == values[n as usize]));
        prop_assert_eq!(order.into_published(&stored), values.clone());
        prop_assert_eq!(order.into_store(order.into_published(&values)), values);
    }

    #[test]
    fn a_neuron_is_found_where_the_store_has_its_number(table in table()) {
        let order = Permutation::new(&table).unwrap();
        let names: Vec<PublishedId> = order.in_store_order(table.len()).collect();
        prop_assert_eq!(order.table(), Some(&names[..]));
        prop_assert!(names.iter().zip(&table).all(|(name, &n)| name.0 == n));
        let rising: Vec<StoreId> = (0..table.len()).map(StoreId::new).collect();
        prop_assert_eq!(order.positions(&names), rising);
        // Some neurons only, as they come.
        let some = published(0..table.len() / 2);
        prop_assert!(some.iter().zip(order.positions(&some)).all(|(name, at)| names[at.index()] == *name));
    }

    #[test]
    fn a_table_that_names_a_neuron_twice_or_one_that_is_not_there_is_refused(
        (table, from, to) in table().prop_flat_map(|t| { let n = t.len(); (Just(t), 0..n, 0..n) })
    ) {
        let with = |number: u32| {
            let mut table = table.clone();
            table[to] = number;
            Permutation::new(&table)
        };
        prop_assert_eq!(with(table[from]).is_some(), from == to);
        prop_assert_eq!(with(table.len() as u32), None);
        prop_assert_eq!(with(u32::MAX), None);
    }

    #[test]
    fn the_identity_is_the_permutation_that_leaves_all_in_place(n in 1..200usize) {
        let numbers: Vec<u32> = (0..n as u32).collect();
        for order in [Permutation::identity(), Permutation::new(&numbers).unwrap()] {
            prop_assert_eq!(order.in_store_order(n).collect::<Vec<_>>(), published(0..n));
            prop_assert!(order.positions(&published(0..n)).iter().enumerate().all(|(i, at)| at.index() == i));
            prop_assert_eq!(order.into_store(numbers.clone()), numbers.clone());
            prop_assert_eq!(order.into_published(&numbers), numbers.clone());
        }
    }
}
