//! How many of a prompt's tokens go through together. A chunk reads, or has copied, nearly all of what lies elsewhere, however many tokens it
//! has, so longer chunks are faster; and they take memory for their activations from what would hold neurons or experts. So the longest is
//! taken of [`CHUNKS`] that takes little of it. This is the only place that chooses: for a device in a plan, and for host memory beside what
//! stays on disk.

use crate::engine::session::{CHUNK, CHUNKS};

/// Of the memory that neurons or experts could have, longer chunks take at most one part in so many. With an eighth, a mixture with a part on
/// disk decoded at 13 instead of 14 tokens/s, because fewer experts fit; a sixteenth was not seen.
const ROOM_SHARE: u64 = 16;
/// Of what lies elsewhere longer chunks displace at most one part in so many more: then a token of a prompt in chunks twice as long has three
/// quarters of the copies at most, and in chunks of four times as many tokens three eighths.
const ELSEWHERE_SHARE: u64 = 2;

/// Tokens of a chunk, one of [`CHUNKS`], and the bytes that it takes beyond [`CHUNK`] tokens, which `beyond` says of a number of tokens.
/// Neurons or experts could have `room` bytes, and then `elsewhere` bytes of them are read from elsewhere for each chunk; with 0 nothing is
/// gained.
pub fn longest(beyond: impl Fn(usize) -> u64, room: u64, elsewhere: u64) -> (usize, u64) {
    match elsewhere {
        0 => (CHUNK, 0),
        _ => within(beyond, (room / ROOM_SHARE).min(elsewhere / ELSEWHERE_SHARE)),
    }
}

/// The longest chunk, and its bytes beyond [`CHUNK`] tokens, that takes `most` bytes of them at most.
pub fn within(beyond: impl Fn(usize) -> u64, most: u64) -> (usize, u64) {
    let mut lengths = CHUNKS.into_iter().rev().map(|tokens| (tokens, beyond(tokens)));
    lengths.find(|&(_, bytes)| bytes <= most).unwrap_or((CHUNK, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    const MIB: u64 = 1 << 20;

    /// A tenth of a MiB for each token.
    fn beyond(tokens: usize) -> u64 {
        (tokens - CHUNK) as u64 * MIB / 10
    }

    #[test]
    fn chunks_are_longer_where_much_is_elsewhere_and_they_take_little() {
        let (half, most) = (beyond(512), beyond(1024));
        for (room, elsewhere, tokens) in [
            (100 * most, 100 * most, 1024),
            (16 * most, 2 * most, 1024),
            // A byte less of either.
            (16 * most - 1, 2 * most, 512),
            (16 * most, 2 * most - 1, 512),
            (16 * half, 2 * half, 512),
            (16 * half - 1, 100 * most, 256),
            (100 * most, 2 * half - 1, 256),
            // All of it is there, or there is no room for any of it.
            (100 * most, 0, 256),
            (0, 100 * most, 256),
        ] {
            assert_eq!(longest(beyond, room, elsewhere), (tokens, beyond(tokens)), "{room}, {elsewhere}");
        }
        // What takes nothing is longest, but where nothing is gained.
        assert_eq!((longest(|_| 0, 0, 1), longest(|_| 0, 9, 0)), ((1024, 0), (256, 0)));
    }

    #[test]
    fn of_a_prompt_less_is_copied_and_slots_keep_nearly_all_of_their_room() {
        let mut longer = [0; CHUNKS.len()];
        for seed in 0..2000 {
            let mut prng = Prng::new(seed);
            let all = 1 + prng.below(4000 * MIB);
            let room = prng.below(all + 1);
            let (tokens, bytes) = longest(beyond, room, all - room);
            let copied = |taken: u64, tokens: usize| (all - room + taken) as f64 / tokens as f64;
            let times = (tokens / CHUNK) as f64;
            let most = if times > 1.0 { (1.0 + 1.0 / ELSEWHERE_SHARE as f64) / times } else { 1.0 };
            assert!(copied(bytes, tokens) <= most * copied(0, CHUNK), "seed {seed}: {tokens}");
            assert!(bytes * ROOM_SHARE <= room);
            longer[CHUNKS.iter().position(|&length| length == tokens).unwrap()] += 1;
        }
        assert!(longer.iter().all(|&times| times > 50), "{longer:?}");
    }
}
