//! Whether moving neurons pays, by time: tokens while neurons move are compared with tokens while the static placement rests.
//!
//! Hits are not time: a move that wins a hit may take more from the link, from host memory and from the engine's thread than the hit
//! gives. So windows of both kinds take turns, and each is compared with the one before it. An eighth of a window's tokens, the shortest, and an
//! eighth, the longest, are left out, and two windows differ where Yuen's statistic (Welch's of trimmed means) is above 2: by chance one in some
//! forty does. Where moving is slower, the static placement is restored, and moving is tried again after a rest that doubles with each loss.
//! Else moving goes on, and the time until the static placement is tried again doubles.

use serde::Serialize;
use tracing::debug;

/// Tokens of a window while neurons move, and of one while the static placement rests: it is short, because it loses where moving pays.
const WINDOW: [usize; 2] = [32, 16];
/// Tokens after a change that do not count: the cache has to fill; the static placement is restored, which may be over before.
const SETTLE: [u32; 2] = [32, 24];
/// Tokens until the state is left again, at first and at most: while neurons move, and while they rest.
const FIRST: [u32; 2] = [512, 64];
const MAX: [u32; 2] = [8192, 2048];
/// Share of a window's tokens that is left out at each end.
const TRIMMED: f64 = 0.125;
/// Standard errors by which two windows must differ.
const SURE: f64 = 2.0;

/// What the last two windows have shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// There was no window of each kind yet.
    #[default]
    Unknown,
    /// Tokens are faster while neurons move.
    Pays,
    /// Neither is faster for certain.
    Even,
    /// Tokens are slower while neurons move.
    Loses,
}

/// A comparison of two windows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// What it says.
    pub verdict: Verdict,
    /// Mean time of a token while neurons moved, ns, by the device's clock; 0 if it is not known.
    pub moving_ns: u64,
    /// The same while the static placement rested.
    pub resting_ns: u64,
}

/// Times of the last tokens, ns.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    ns: [f64; WINDOW[0]],
    tokens: usize,
}

/// Trimmed mean, and the square of its standard error.
#[derive(Clone, Copy, Debug)]
struct Mean {
    ns: f64,
    error: f64,
}

impl Window {
    fn push(&mut self, ns: f64) {
        self.ns[self.tokens % WINDOW[0]] = ns;
        self.tokens += 1;
    }

    /// By Yuen: the mean of what is left, and the variance of the winsorised values over the number of those that are left.
    fn mean(&self) -> Mean {
        let mut sorted = self.ns;
        let n = self.tokens.min(WINDOW[0]);
        let sorted = &mut sorted[..n];
        sorted.sort_unstable_by(f64::total_cmp);
        let cut = (TRIMMED * n as f64) as usize;
        let left = &sorted[cut..n - cut];
        let ns = left.iter().sum::<f64>() / left.len() as f64;
        let (low, high) = (left[0], left[left.len() - 1]);
        let winsorised = sorted.iter().map(|ns| ns.clamp(low, high));
        let mean = winsorised.clone().sum::<f64>() / n as f64;
        let squares: f64 = winsorised.map(|ns| (ns - mean).powi(2)).sum();
        Mean { ns, error: squares / (left.len() * (left.len() - 1)) as f64 }
    }
}

/// Compares a window of moving tokens with one of resting tokens.
fn compare(moving: &Window, resting: &Window) -> Comparison {
    let (moving, resting) = (moving.mean(), resting.mean());
    let (slower, sure) = (moving.ns - resting.ns, SURE * (moving.error + resting.error).sqrt());
    let verdict = match () {
        () if slower > sure => Verdict::Loses,
        () if -slower > sure => Verdict::Pays,
        () => Verdict::Even,
    };
    Comparison { verdict, moving_ns: moving.ns as u64, resting_ns: resting.ns as u64 }
}

/// Decides whether neurons move.
#[derive(Clone, Debug)]
pub struct Gain {
    resting: bool,
    /// Tokens of this state that do not count yet.
    settle: u32,
    /// Tokens of this state that counted.
    tokens: u32,
    /// Tokens after which this state is left.
    until: u32,
    /// Tokens of the next stay in each state.
    next: [u32; 2],
    window: Window,
    /// The last window of the other state; `None` if nothing can be compared with it.
    other: Option<Window>,
    /// Sequences of the pass: those of another number are not compared.
    sequences: usize,
    /// Moves in this token.
    moves: usize,
    last: Comparison,
}

impl Default for Gain {
    fn default() -> Gain {
        Gain {
            resting: false,
            settle: SETTLE[0],
            tokens: 0,
            until: WINDOW[0] as u32,
            next: FIRST,
            window: Window::default(),
            other: None,
            sequences: 0,
            moves: 0,
            last: Comparison::default(),
        }
    }
}

impl Gain {
    /// Whether neurons are to move now; else the static placement is restored and kept.
    pub fn moving(&self) -> bool {
        !self.resting
    }

    /// The last comparison.
    pub fn last(&self) -> Comparison {
        self.last
    }

    /// The device has another number of slots: tokens before are not compared with those behind.
    pub fn begin_anew(&mut self) {
        (self.window, self.other, self.tokens) = (Window::default(), None, 0);
    }

    /// Counts `n` moves of this token, those that restore the static placement among them.
    pub fn moved(&mut self, n: usize) {
        self.moves += n;
    }

    /// Ends a token of so many sequences. `ns` is the time since the token before it ended; `None` if other work came between.
    pub fn token(&mut self, ns: Option<f64>, sequences: usize) {
        let moves = std::mem::take(&mut self.moves);
        if self.sequences != sequences {
            self.sequences = sequences;
            self.begin_anew();
        }
        let Some(ns) = ns else { return };
        if self.settle > 0 {
            // What restores the static placement may be done before.
            self.settle = if self.resting && moves == 0 { 0 } else { self.settle - 1 };
            return;
        }
        self.window.push(ns);
        self.tokens += 1;
        let state = usize::from(self.resting);
        let full = self.tokens as usize >= WINDOW[state];
        if full && let Some(other) = self.other.take() {
            self.judge(&other);
        } else if full && self.tokens >= self.until {
            self.turn();
        }
    }

    /// Compares the first window of this state with the last one of the other.
    fn judge(&mut self, other: &Window) {
        let (moving, resting) = if self.resting { (other, &self.window) } else { (&self.window, other) };
        self.last = compare(moving, resting);
        let Comparison { verdict, moving_ns, resting_ns } = self.last;
        // Each state is left for what is certain: a try after a rest has to show that moves pay, a look at the static placement that they lose.
        let rests = match verdict {
            Verdict::Loses => true,
            Verdict::Pays => false,
            Verdict::Even | Verdict::Unknown => !self.resting,
        };
        // The stay that was found right lasts, and the next one longer; the other begins anew.
        let right = usize::from(rests);
        let stay = self.next[right];
        self.next = FIRST;
        self.next[right] = (2 * stay).min(MAX[right]);
        let (moving_ms, resting_ms) = (moving_ns as f64 / 1e6, resting_ns as f64 / 1e6);
        debug!(?verdict, moving_ms, resting_ms, tokens = stay, "moving was compared with the static placement");
        if rests != self.resting {
            self.turn();
            // Compared already.
            self.other = None;
        }
        self.until = stay;
    }

    /// Goes over to the other state.
    fn turn(&mut self) {
        self.other = Some(std::mem::take(&mut self.window));
        self.resting = !self.resting;
        let state = usize::from(self.resting);
        (self.settle, self.tokens, self.until) = (SETTLE[state], 0, WINDOW[state] as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    /// A device on which a token takes `resting` ns with the static placement and `moving` ns with moves, once `filled` tokens have gone by with
    /// them; times are noisy by a tenth, and one in twenty takes three times as long.
    struct Model {
        moving: f64,
        resting: f64,
        filled: f64,
    }

    /// Mean time of the last half of `tokens` tokens over that of the static placement, and the share of these tokens in which neurons moved.
    fn run(model: &Model, tokens: usize, seed: u64) -> (f64, f64) {
        let (mut gain, mut prng) = (Gain::default(), Prng::new(seed));
        let (mut full, mut ns, mut moved) = (0f64, 0.0, 0);
        for token in 0..tokens {
            // What has been brought goes as fast as it came.
            full = (full + if gain.moving() { 1.0 } else { -1.0 } / model.filled).clamp(0.0, 1.0);
            let pays = model.moving - model.resting;
            // Before the cache is full a move costs what it costs and brings nothing.
            let mean = match gain.moving() {
                true => model.resting + pays.max(0.0) + pays.min(0.0) * full,
                false => model.resting + pays.min(0.0) * full,
            };
            gain.moved(usize::from(gain.moving() || full > 0.0));
            if token >= tokens / 2 {
                (ns, moved) = (ns + mean, moved + usize::from(gain.moving()));
            }
            let slow = if prng.below(20) == 0 { 3.0 } else { 1.0 };
            gain.token(Some(mean * (0.95 + 0.1 * prng.next_f64()) * slow), 1);
        }
        let half = (tokens - tokens / 2) as f64;
        (ns / half / model.resting, moved as f64 / half)
    }

    #[test]
    fn where_moves_cost_more_than_they_bring_it_ends_within_2_percent_of_the_static_placement() {
        for seed in 0..10 {
            for slower in [1.05, 1.12, 1.22] {
                let (over, moved) = run(&Model { moving: slower * 1e7, resting: 1e7, filled: 16.0 }, 8000, seed);
                // Twentieths are not always found at once among times that are noisy by a tenth.
                let most = if slower > 1.1 { 0.15 } else { 0.4 };
                assert!(over < 1.02 && moved < most, "moves cost {slower}: {over:.4}, moving in {moved:.3}");
            }
        }
    }

    #[test]
    fn where_moves_pay_it_keeps_moving() {
        for seed in 0..10 {
            for faster in [0.95, 0.8] {
                let (over, moved) = run(&Model { moving: faster * 1e7, resting: 1e7, filled: 16.0 }, 8000, seed);
                // What looking at the static placement costs is a fiftieth of what is won.
                assert!(moved > 0.97 && over < faster + 0.03 * (1.0 - faster), "{faster}: {over:.4}, {moved:.3}");
            }
        }
    }

    /// Chance alone does not stop it often: of equal windows one in some twenty differs, on either side.
    #[test]
    fn windows_of_the_same_times_are_even() {
        let mut prng = Prng::new(1);
        let mut window = |tokens: usize| {
            let mut window = Window::default();
            (0..tokens).for_each(|_| window.push(1e7 * (1.0 + 0.2 * prng.next_f64())));
            window
        };
        let verdicts: Vec<Verdict> = (0..1000).map(|_| compare(&window(32), &window(16)).verdict).collect();
        let of = |verdict| verdicts.iter().filter(|v| **v == verdict).count();
        assert!(of(Verdict::Loses) < 45 && of(Verdict::Pays) < 45, "{} and {}", of(Verdict::Loses), of(Verdict::Pays));
        // Times without any noise, as of a replay, are no reason to stop.
        let mut same = Window::default();
        (0..16).for_each(|_| same.push(5.0));
        assert_eq!(compare(&same, &same), Comparison { verdict: Verdict::Even, moving_ns: 5, resting_ns: 5 });
    }

    #[test]
    fn tokens_that_cannot_be_compared_change_nothing() {
        let mut gain = Gain::default();
        for token in 0..1000 {
            // A prompt before each, or another number of sequences each time.
            gain.token((token % 2 == 0).then_some(1.0), 1 + token / 2 % 2);
            assert!(gain.moving());
        }
        // Nor do those of another number of slots.
        for token in 0..1000 {
            gain.token(Some(1.0), 1);
            if token % 30 == 0 {
                gain.begin_anew();
            }
        }
        assert_eq!(gain.last().verdict, Verdict::Unknown);
    }
}
