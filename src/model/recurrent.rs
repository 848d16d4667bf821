//! What a layer that is no attention remembers of a sequence: numbers of a fixed count, which each token replaces.

use bytemuck::allocation::try_zeroed_vec;

/// States of earlier lengths that are kept, so that a text can be cut back to one of them.
pub(super) const SAVED: usize = 4;

/// Which of the states behind these lengths, ascending, is dropped: never the last. Of the others it is the one whose neighbours are nearest to
/// each other, the older of equals: from what stays, a text that is cut back anywhere reads the fewest tokens again.
pub(super) fn to_drop(lens: &[usize]) -> usize {
    let before = |at: usize| if at == 0 { 0 } else { lens[at - 1] };
    (0..lens.len().saturating_sub(1)).min_by_key(|&at| (lens[at + 1] - before(at), at)).unwrap_or(0)
}

/// A state that some tokens go on from, and the place of the state that they leave behind. The tokens write every number of it.
pub struct Turn<'a> {
    /// The state before the tokens; `None` where `to` holds it.
    pub from: Option<&'a [f32]>,
    /// The state behind the tokens.
    pub to: &'a mut [f32],
}

/// The state of one layer and sequence.
#[derive(Default)]
pub(super) struct Recurrent {
    /// The state behind the positions that are filled.
    now: Vec<f32>,
    /// The state behind the tokens that the current pass has computed. It counts once the pass is committed.
    next: Vec<f32>,
    /// Whether a pass has begun.
    begun: bool,
    /// Behind earlier lengths, in the order of [`super::KvCache`]'s list of them: the first `kept`.
    saved: [Vec<f32>; SAVED],
    kept: usize,
}

impl Recurrent {
    /// Of an empty text: `numbers` zeros. `None` if the system does not give that much address space.
    pub fn new(numbers: usize) -> Option<Recurrent> {
        let zeros = || try_zeroed_vec(numbers).ok();
        let mut state = Recurrent { now: zeros()?, next: zeros()?, ..Recurrent::default() };
        for saved in &mut state.saved {
            *saved = zeros()?;
        }
        Some(state)
    }

    /// Bytes of a state of so many numbers with all that is kept of it.
    pub const fn bytes_for(numbers: usize) -> u64 {
        ((2 + SAVED) * numbers * size_of::<f32>()) as u64
    }

    /// The state that the next tokens of a pass go on from and leave behind. The `first` ones of the pass begin with what is committed.
    pub fn next(&mut self, first: bool) -> Turn<'_> {
        let begins = first | !std::mem::replace(&mut self.begun, true);
        Turn { from: begins.then_some(&self.now[..]), to: &mut self.next }
    }

    /// The pass has ended: its state counts from now on.
    pub fn commit(&mut self) {
        if std::mem::replace(&mut self.begun, false) {
            std::mem::swap(&mut self.now, &mut self.next);
        }
    }

    /// Keeps the state, in place of number `dropped` where there are [`SAVED`] already.
    pub fn save(&mut self, dropped: Option<usize>) {
        if let Some(dropped) = dropped {
            self.saved[dropped..self.kept].rotate_left(1);
            self.kept -= 1;
        }
        self.saved[self.kept].copy_from_slice(&self.now);
        self.kept += 1;
    }

    /// Becomes the kept state of this number, and forgets later ones.
    pub fn restore(&mut self, number: usize) {
        self.now.copy_from_slice(&self.saved[number]);
        self.begun = false;
        self.kept = number + 1;
    }

    /// Forgets the text.
    pub fn clear(&mut self) {
        self.now.fill(0.0);
        self.begun = false;
        self.kept = 0;
    }

    /// Becomes another's state, or the one of this number that it keeps.
    pub fn copy_from(&mut self, other: &Recurrent, number: Option<usize>) {
        self.now.copy_from_slice(number.map_or(&other.now, |number| &other.saved[number]));
        self.begun = false;
        self.kept = 0;
    }

    /// Becomes `now`, and keeps the first `kept` states.
    pub fn go_to(&mut self, now: &[f32], kept: usize) {
        self.now.copy_from_slice(now);
        self.begun = false;
        self.kept = kept;
    }

    /// Numbers of the state.
    pub fn numbers(&self) -> usize {
        self.now.len()
    }

    /// A copy of the state of this number, or of the current one; `None` if there is no memory for it.
    pub fn copy(&self, number: Option<usize>) -> Option<Vec<f32>> {
        let from = number.map_or(&self.now, |number| &self.saved[number]);
        let mut state = Vec::new();
        state.try_reserve_exact(from.len()).ok()?;
        state.extend_from_slice(from);
        Some(state)
    }

    /// Becomes `now`; `saved`, in their order, are the states that are kept, as many as there is room for.
    pub fn set<'a>(&mut self, now: &[f32], saved: impl Iterator<Item = &'a [f32]>) {
        self.clear();
        self.now.copy_from_slice(now);
        for (to, from) in self.saved.iter_mut().zip(saved) {
            to.copy_from_slice(from);
            self.kept += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_leaves_the_smallest_gap_and_is_never_the_last() {
        assert_eq!(to_drop(&[100, 110, 115, 400, 900]), 1);
        assert_eq!(to_drop(&[10, 20, 30, 40, 50]), 0);
        assert_eq!(to_drop(&[50, 90, 100, 101, 102]), 3);
        assert_eq!(to_drop(&[7]), 0);
        for last in 5..40 {
            assert_ne!(to_drop(&[1, 2, 3, 4, last]), 4);
        }
    }
}
