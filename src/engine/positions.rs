//! Where the tokens of a pass stand in their sequences.

use std::ops::Range;

/// A token's sequence, and its position there.
#[derive(Clone, Copy)]
pub(super) struct TokenPosition {
    /// Index of its sequence's KV cache.
    pub sequence: usize,
    /// Tokens before it in the sequence.
    pub position: usize,
}

/// The tokens that follow each other in one sequence, run after run.
pub(super) fn runs(positions: &[TokenPosition]) -> impl Iterator<Item = Range<usize>> {
    let follows = |two: &[TokenPosition]| two[0].sequence == two[1].sequence && two[0].position + 1 == two[1].position;
    let mut end = 0;
    std::iter::from_fn(move || {
        let start = end;
        let rest = positions.get(start..).filter(|rest| !rest.is_empty())?;
        end = start + 1 + rest.windows(2).take_while(|two| follows(two)).count();
        Some(start..end)
    })
}
