//! Whether moving neurons pays: at every token the hits are compared with those that the static placement would have had.
//!
//! A copy reads the same host memory as the CPU's part, so while the CPU computes, a copy costs as much as computing the neuron once on the
//! CPU. Moves must therefore win more hits than they cost. Where they do not (other systems measure this above some 65 % of residency), the
//! static placement is restored, and moving is tried again after a rest, which doubles each time.

use tracing::debug;

/// Tokens over which gain and cost are summed.
const SPAN: u32 = 32;
/// Tokens of the first rest.
const FIRST_REST: u32 = 64;
/// Tokens of a rest, at most.
const MAX_REST: u32 = 1024;
/// Spans at the beginning of a try that do not count, because the cache has to fill first.
const WARM_UP: u32 = 1;

/// Compares what moving wins with what it costs.
#[derive(Clone, Debug)]
pub struct Gain {
    /// Hits minus those of the static placement, in this span.
    hits: i64,
    /// Moves in this span.
    moves: u64,
    tokens: u32,
    spans: u32,
    /// Tokens that are left of the rest; 0 while neurons move.
    rest: u32,
    /// Tokens of the next rest.
    next_rest: u32,
}

impl Default for Gain {
    fn default() -> Gain {
        Gain { hits: 0, moves: 0, tokens: 0, spans: 0, rest: 0, next_rest: FIRST_REST }
    }
}

impl Gain {
    /// Whether neurons are to move now.
    pub fn moving(&self) -> bool {
        self.rest == 0
    }

    /// Counts one layer of one token: active neurons that were resident, and those that the static placement would have had resident.
    pub fn layer(&mut self, hits: u64, of_static: u64) {
        self.hits += hits as i64 - of_static as i64;
    }

    /// Counts `n` moves.
    pub fn moved(&mut self, n: usize) {
        self.moves += n as u64;
    }

    /// Ends a token. `cost` is what one move costs in hits: the share of the time, 0 to 1, in which the CPU's part reads memory.
    pub fn token(&mut self, cost: f64) {
        if self.rest > 0 {
            self.rest -= 1;
            if self.rest == 0 {
                debug!("moving is tried again");
            }
            (self.hits, self.moves) = (0, 0);
            return;
        }
        self.tokens += 1;
        if self.tokens < SPAN {
            return;
        }
        self.tokens = 0;
        self.spans += 1;
        let (hits, moves) = (std::mem::take(&mut self.hits), std::mem::take(&mut self.moves));
        if self.spans <= WARM_UP {
            return;
        }
        if (hits as f64) < cost * moves as f64 {
            self.rest = self.next_rest;
            debug!(tokens = SPAN, hits, moves, cost = %format_args!("{cost:.2}"), rest = self.rest, "moving does not pay: the static placement returns");
            self.next_rest = (2 * self.next_rest).min(MAX_REST);
            self.spans = 0;
        } else {
            self.next_rest = FIRST_REST;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(tokens: usize, hits: u64, of_static: u64, moves: usize, cost: f64) -> usize {
        let mut gain = Gain::default();
        let mut moving = 0;
        for _ in 0..tokens {
            moving += usize::from(gain.moving());
            gain.layer(hits, of_static);
            gain.moved(if gain.moving() { moves } else { 0 });
            gain.token(cost);
        }
        moving
    }

    #[test]
    fn it_rests_longer_and_longer_where_it_loses_and_never_where_it_wins() {
        assert_eq!(run(5000, 30, 20, 5, 1.0), 5000);
        let losing = run(5000, 20, 20, 5, 1.0);
        assert!(losing < 700, "moved in {losing} of 5000 tokens");
        // The same moves cost nothing while the CPU is idle.
        assert_eq!(run(5000, 20, 20, 5, 0.0), 5000);
    }
}
