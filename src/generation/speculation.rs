//! Speculation by prompt lookup: which tokens an answer may have next, by what its text holds already, and how many of them are worth a column
//! in the pass of the next token.
//!
//! A pass of few columns is bound by reading the weights, so some more cost less than passes of their own; by how much differs between
//! machines and models, and how often a guess is right between texts. So passes are timed and guesses counted. What wrong guesses have cost is
//! kept in an account that other passes fill slowly: a text that cannot be guessed is hardly slower.
//!
//! Nothing here decides which token comes: the sampler does, as without guesses, and a guess that is another is dropped.

use crate::cpu::FEW_COLUMNS;

/// Most tokens that are guessed for one pass: so few columns have the bits that they have alone, if any have.
pub const MAX_GUESSED: usize = FEW_COLUMNS - 1;

/// Tokens of a text that are searched, the last ones: a search of all of them takes microseconds.
const SEARCHED: usize = 1 << 14;

/// Tokens that are searched together for one that is there seldom.
const STRIDE: usize = 64;

/// Fewer equal tokens say little of the next.
const MIN_MATCH: usize = 2;

/// More equal tokens say no more.
const MAX_MATCH: usize = 8;

/// When tokens are guessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// Where the times of passes and the guesses so far say that it pays.
    #[default]
    Auto,
    /// Wherever the text has a guess.
    On,
    /// Never.
    Off,
}

impl Speculation {
    /// The name that the setting `serve.speculation` has.
    pub const fn name(self) -> &'static str {
        match self {
            Speculation::Auto => "auto",
            Speculation::On => "on",
            Speculation::Off => "off",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Speculation> {
        [Speculation::Auto, Speculation::On, Speculation::Off].into_iter().find(|mode| mode.name() == name)
    }
}

/// Fills `guesses` with the tokens that followed where `text` had the longest run of tokens with which it ends, `next` behind it; of equal
/// runs the last. Returns the length of the run, from 2 to 8 tokens, or 0 where there is none. A run that reaches into itself is continued:
/// after `a b a b a` come `b a b a`.
pub fn look_up(text: &[u32], next: u32, guesses: &mut [u32]) -> usize {
    let searched = &text[text.len().saturating_sub(SEARCHED)..];
    let n = searched.len();
    let run = |at: usize| {
        let before = (1..MAX_MATCH).take_while(|&back| back <= at && searched[at - back] == searched[n - back]);
        1 + before.count()
    };
    let (mut longest, mut found) = (MIN_MATCH - 1, 0);
    let mut end = n;
    for part in searched.rchunks(STRIDE) {
        end -= part.len();
        if !part.contains(&next) {
            continue;
        }
        for at in (end..end + part.len()).rev().filter(|&at| searched[at] == next) {
            let len = run(at);
            if len > longest {
                (longest, found) = (len, at + 1);
            }
        }
        if longest == MAX_MATCH {
            break;
        }
    }
    if longest < MIN_MATCH {
        return 0;
    }
    for i in 0..guesses.len() {
        guesses[i] = match (found + i).checked_sub(n) {
            None => searched[found + i],
            Some(0) => next,
            Some(behind) => guesses[behind - 1],
        };
    }
    longest
}

/// Kinds of guesses by the length of the run: 2, 3, 4 to 7, and 8 tokens.
const KINDS: usize = 4;

/// How often a guess is right before anything is known, by kind.
const PRIOR: [f64; KINDS] = [0.25, 0.35, 0.5, 0.8];

/// Weight of the next guess in how often guesses are right.
const LEARN: f64 = 1.0 / 16.0;

/// Share by which an opinion goes back to [`PRIOR`] whenever a guess is not tried: texts change.
const FORGET: f64 = 1.0 / 128.0;

/// Passes without guesses that are timed before anything is concluded: the first may read weights from disk.
const TRIALS: u64 = 3;

/// Passes after which a time that was not measured again is forgotten.
const REMEMBERED: u64 = 400;

/// Weight of a new time in a mean.
const NEW: f64 = 0.25;

/// Guesses have to promise so many times the speed: times scatter.
const MIN_GAIN: f64 = 1.03;

/// Share of the time that wrong guesses may take.
const ALLOWED: f64 = 0.01;

/// Passes without guesses whose time may be saved up for guesses, and is there at the beginning.
const CREDIT: [f64; 2] = [4.0, 1.0];

/// A pass counts for no more than so many times what it takes usually: a bad moment of the machine is not the guesses' doing.
const BAD_MOMENT: f64 = 2.0;

/// Guesses of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Guessed {
    /// Length of the run of tokens behind which they were found ([`look_up`]).
    pub run: usize,
    /// How many there are.
    pub count: usize,
}

/// How long a pass takes.
#[derive(Clone, Copy, Debug, Default)]
struct Timed {
    /// Moving mean, seconds.
    mean: f64,
    count: u64,
    /// The pass that was the last of them.
    at: u64,
}

/// Learns what guesses cost and how often they are right. It knows no clock: times are told.
#[derive(Clone, Debug)]
pub struct Guesser {
    mode: Speculation,
    /// By the number of guesses of a pass.
    times: [Timed; MAX_GUESSED + 1],
    passes: u64,
    /// By kind, the share of guesses that are right, of those before which all were.
    right: [f64; KINDS],
    /// What may be lost, in passes without guesses.
    account: f64,
}

fn kind(run: usize) -> usize {
    match run {
        ..3 => 0,
        3 => 1,
        4..MAX_MATCH => 2,
        _ => 3,
    }
}

impl Guesser {
    /// A guesser that knows nothing yet.
    pub fn new(mode: Speculation) -> Guesser {
        Guesser { mode, times: Default::default(), passes: 0, right: PRIOR, account: CREDIT[1] }
    }

    /// Whether guesses may be tried now, so that looking for some is worth while.
    pub fn may_guess(&self) -> bool {
        match self.mode {
            Speculation::Off => false,
            Speculation::On => true,
            Speculation::Auto => self.times[0].count >= TRIALS && self.known(0).is_some() && self.account >= 0.0,
        }
    }

    /// Seconds of a pass of so many guesses, if it was done lately.
    fn known(&self, guessed: usize) -> Option<f64> {
        let timed = self.times[guessed];
        (timed.count > 0 && self.passes - timed.at < REMEMBERED).then_some(timed.mean)
    }

    /// How many of `most` guesses to try, which were found behind a run of `run` tokens.
    pub fn plan(&mut self, run: usize, most: usize) -> usize {
        let most = most.min(MAX_GUESSED);
        match (self.mode, self.known(0)) {
            (Speculation::On, _) => most,
            (Speculation::Auto, Some(plain)) if self.may_guess() => {
                let kind = kind(run);
                let best = self.best(self.right[kind], plain, most);
                if best == 0 {
                    self.right[kind] += (PRIOR[kind] - self.right[kind]) * FORGET;
                }
                best
            }
            _ => 0,
        }
    }

    /// The number of guesses with the most tokens a second, each right with probability `right` where all before it are; a pass without any
    /// takes `plain` seconds. Of what was not measured only the next number is tried, as if one more cost nothing: times rise in steps.
    fn best(&self, right: f64, plain: f64, most: usize) -> usize {
        let (mut best, mut speed) = (0, MIN_GAIN / plain);
        let (mut tokens, mut chance) = (1.0, 1.0);
        let mut last = plain;
        for guessed in 1..=most {
            chance *= right;
            tokens += chance;
            let known = self.known(guessed);
            let seconds = known.unwrap_or(last);
            if tokens / seconds > speed {
                (best, speed) = (guessed, tokens / seconds);
            }
            if known.is_none() {
                break;
            }
            last = seconds;
        }
        best
    }

    /// Notes that a pass with these guesses took so long, and that its answer got `tokens` tokens, at least one: the first guesses were right.
    pub fn note(&mut self, guessed: Guessed, tokens: usize, seconds: f64) {
        let Guessed { run, count } = guessed;
        self.passes += 1;
        if self.known(count).is_none() {
            self.times[count] = Timed::default();
        }
        let usual = &mut self.times[count];
        let seconds = if usual.count > 0 { seconds.min(BAD_MOMENT * usual.mean) } else { seconds };
        usual.count += 1;
        usual.mean += (seconds - usual.mean) * NEW.max(1.0 / usual.count as f64);
        usual.at = self.passes;
        let gained = match self.known(0) {
            _ if count == 0 => ALLOWED,
            Some(plain) => tokens as f64 - seconds / plain,
            None => 0.0,
        };
        self.account = (self.account + gained).min(CREDIT[0]);
        let right = &mut self.right[kind(run)];
        for i in 1..=count.min(tokens) {
            *right += (f64::from(u8::from(i < tokens)) - *right) * LEARN;
        }
    }
}
