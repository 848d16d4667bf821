//! What the prompt cache decides: where a prompt is cut, and what is evicted.

/// Positions behind the last two tokens of a prompt that end a message, the earlier one first: where the next turn of a talk, or another
/// answer to the same question, may part from it. The prompt's own end is none.
pub fn marks(prompt: &[u32], is_end: impl Fn(u32) -> bool) -> [Option<usize>; 2] {
    let ends = prompt.iter().enumerate().rev().filter(|&(at, &token)| at + 1 < prompt.len() && is_end(token));
    let mut ends = ends.map(|(at, _)| at + 1);
    let last = ends.next();
    [ends.next(), last]
}

/// Where a pass over a prompt of `len` tokens ends that begins at `done` and takes at most `most` tokens: at a mark or a multiple of `every`,
/// if one comes before.
pub fn next_end(done: usize, most: usize, len: usize, marks: [Option<usize>; 2], every: usize) -> usize {
    let cuts = marks.into_iter().flatten().chain([(done / every + 1) * every]);
    cuts.filter(|&cut| cut > done).fold(len.min(done + most), usize::min)
}

/// Whether a state is kept where a pass ends: a mark, a multiple of `every` or the prompt's end.
pub fn is_kept(end: usize, len: usize, marks: [Option<usize>; 2], every: usize) -> bool {
    end == len || end.is_multiple_of(every) || marks.contains(&Some(end))
}

/// An entry as the eviction sees it.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// Bytes that it takes.
    pub bytes: u64,
    /// Uses of the cache since it was used last.
    pub age: u64,
}

/// Which entry is evicted: the one of the largest age times bytes, of equals the older one, and the first of those.
pub fn victim(held: &[Held]) -> Option<usize> {
    let weight = |held: &Held| (u128::from(held.bytes) * u128::from(held.age), held.age);
    (0..held.len()).rev().max_by_key(|&at| weight(&held[at]))
}

/// Tokens with which both texts begin.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 9 ends a message.
    fn marks_of(prompt: &[u32]) -> [Option<usize>; 2] {
        marks(prompt, |token| token == 9)
    }

    #[test]
    fn marks_stand_behind_the_last_two_ends_within_a_prompt() {
        assert_eq!(marks_of(&[1, 9, 2, 9, 3, 9, 4]), [Some(4), Some(6)]);
        assert_eq!(marks_of(&[1, 9, 2]), [None, Some(2)]);
        assert_eq!(marks_of(&[1, 2, 9]), [None, None]);
        assert_eq!(marks_of(&[]), [None, None]);
    }

    #[test]
    fn a_prompt_ends_its_passes_at_every_mark_and_multiple() {
        for (len, most, every) in [(100, 32, 25), (100, 7, 1000), (64, 64, 64), (1, 8, 4)] {
            let marks = [Some(13), Some(60)].map(|mark| mark.filter(|&mark| mark < len));
            let (mut done, mut ends) = (0, Vec::new());
            while done < len {
                let end = next_end(done, most, len, marks, every);
                assert!(end > done && end <= len && end - done <= most);
                ends.push(end);
                done = end;
            }
            let mut kept = (1..=len).filter(|&end| is_kept(end, len, marks, every));
            assert!(kept.all(|end| ends.contains(&end)), "{ends:?}");
        }
    }

    #[test]
    fn the_old_and_the_large_are_evicted_first() {
        let held = |of: &[(u64, u64)]| of.iter().map(|&(bytes, age)| Held { bytes, age }).collect::<Vec<_>>();
        assert_eq!(victim(&held(&[(10, 1), (10, 2), (10, 1)])), Some(1));
        assert_eq!(victim(&held(&[(10, 2), (30, 1)])), Some(1));
        // Of equals the older one, and of those as old the first.
        assert_eq!(victim(&held(&[(20, 1), (10, 2)])), Some(1));
        assert_eq!(victim(&held(&[(5, 3), (5, 3)])), Some(0));
        assert_eq!(victim(&held(&[(u64::MAX, 0), (1, 1)])), Some(1));
        assert_eq!(victim(&[]), None);
    }
}
