//! How many of a prompt's tokens go along in a pass of answers' next tokens, so that prompts and answers both go on.
//!
//! A pass of few tokens is bound by reading the weights, so some more cost little, until arithmetic binds it; by how much differs between
//! machines, models and devices. So passes are timed, and a prompt gets as many tokens as keep a pass within a multiple of what it takes
//! with the answers alone.

use crate::cpu::MAX_COLUMNS;
use crate::engine::session::CHUNK;

/// Passes of a number of tokens that are timed before anything is concluded from them: the first may read weights from disk.
const TRIALS: u64 = 3;

/// Passes after which the time of answers alone is measured again: machines and contexts change.
const FRESH: u64 = 50;

/// Passes after which a time that was not measured again is forgotten: it may have been of a bad moment.
const REMEMBERED: u64 = 400;

/// Share of the allowed time that is planned for: what is measured scatters.
const MARGIN: f64 = 0.9;

/// How long a chunk of more than [`CHUNK`] tokens may take: commands, new clients and whoever watches over the daemon wait for it.
const CHUNK_SECONDS: f64 = 10.0;

/// Weight of a new time in a mean.
const NEW: f64 = 0.25;

/// How long passes take.
#[derive(Clone, Copy, Debug, Default)]
struct Timed {
    /// Moving mean, in seconds.
    mean: f64,
    /// The same, but down to each time that is below it: a bad moment is forgotten with the next good one.
    least: f64,
    /// How many went into it.
    count: u64,
    /// The pass that was the last of them.
    at: u64,
}

/// Learns how long passes take by their number of tokens.
#[derive(Clone, Debug)]
pub struct Pace {
    /// How many times as long a pass may take because of a prompt, 1 or more.
    slowdown: f64,
    /// By tokens.
    times: [Timed; MAX_COLUMNS + 1],
    /// Passes so far.
    passes: u64,
    /// Seconds that each token of a prompt's last whole chunk took.
    prompt_token: Option<f64>,
}

impl Pace {
    /// For passes that may take `slowdown` times as long, 1 or more, because prompts go along.
    pub fn new(slowdown: f64) -> Pace {
        Pace { slowdown, times: [Timed::default(); MAX_COLUMNS + 1], passes: 0, prompt_token: None }
    }

    /// Notes how long a prompt's chunk took.
    pub fn note_chunk(&mut self, tokens: usize, seconds: f64) {
        if tokens >= CHUNK {
            self.prompt_token = Some(seconds / tokens as f64);
        }
    }

    /// Tokens of a prompt's next chunk: [`CHUNK`], and up to `most` where they take [`CHUNK_SECONDS`] at most, for which everything else waits.
    pub fn chunk(&self, most: usize) -> usize {
        let fits = self.prompt_token.map_or(CHUNK, |token| (CHUNK_SECONDS / token) as usize / CHUNK * CHUNK);
        fits.clamp(CHUNK, most)
    }

    /// Notes that a pass of so many tokens, at most [`MAX_COLUMNS`], took so long.
    pub fn note(&mut self, tokens: usize, seconds: f64) {
        self.passes += 1;
        let passes = self.passes;
        let timed = &mut self.times[tokens];
        if passes - timed.at > REMEMBERED {
            *timed = Timed::default();
        }
        timed.count += 1;
        let weight = NEW.max(1.0 / timed.count as f64);
        timed.mean += (seconds - timed.mean) * weight;
        timed.least = seconds.min(timed.least + (seconds - timed.least) * weight);
        timed.at = passes;
    }

    /// Tokens of a prompt that may go along with the next tokens of so many answers; 0 where the answers are to be timed alone or fill the
    /// pass. Otherwise at least 1, so that a prompt always comes to its end.
    pub fn along(&self, answers: usize) -> usize {
        let room = MAX_COLUMNS - answers;
        let alone = self.times[answers];
        if room == 0 || alone.count < TRIALS || self.passes - alone.at >= FRESH {
            return 0;
        }
        let allowed = MARGIN * self.slowdown * alone.least;
        let mut most = 1;
        // Of what was measured the largest that fits, because times do not always rise; of what was not, only the next.
        let mut last = [alone.least; 2];
        for extra in 1..=room {
            let timed = self.times[answers + extra];
            let known = timed.count > 0 && self.passes - timed.at < REMEMBERED;
            let seconds = if known { timed.mean } else { 2.0 * last[1] - last[0] };
            if seconds <= allowed {
                most = extra;
            }
            if !known {
                break;
            }
            last = [last[1], seconds];
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes while a prompt is there: for each the tokens along, the seconds, and those of the answers alone.
    fn run(
        pace: &mut Pace,
        passes: usize,
        answers: usize,
        time: impl Fn(usize) -> f64,
        noise: f64,
    ) -> Vec<(usize, f64, f64)> {
        let mut one = |i: usize| {
            let along = pace.along(answers);
            // Evenly scattered, in an order without a pattern.
            let scatter = 2.0 * (i as f64 * 0.618_034).fract() - 1.0;
            let took = time(answers + along) * (1.0 + noise * scatter);
            pace.note(answers + along, took);
            (along, took, time(answers))
        };
        (0..passes).map(&mut one).collect()
    }

    #[test]
    fn chunks_are_longer_where_they_do_not_take_long() {
        let mut pace = Pace::new(2.0);
        assert_eq!((pace.chunk(1024), pace.chunk(256)), (256, 256));
        // Tokens a second, and the chunk after one of 256 at that speed.
        for (speed, chunk) in [(10.0, 256), (60.0, 512), (90.0, 768), (400.0, 1024), (1e9, 1024)] {
            pace.note_chunk(256, 256.0 / speed);
            // The end of a prompt says nothing.
            pace.note_chunk(40, 1e3);
            assert_eq!((pace.chunk(1024), pace.chunk(256)), (chunk, 256), "{speed} tokens/s");
        }
    }

    /// As a Zen 4 with two threads took for Q4_K_M: the kernels for few tokens end at eight.
    fn steps(tokens: usize) -> f64 {
        match tokens {
            0..=4 => 0.016 + 0.0035 * tokens as f64,
            5..=8 => 0.018 + 0.0047 * tokens as f64,
            _ => 0.042 + 0.0034 * tokens as f64,
        }
    }

    /// As where arithmetic costs nothing.
    fn flat(_: usize) -> f64 {
        0.03
    }

    /// As where each token costs as much as the first.
    fn steep(tokens: usize) -> f64 {
        0.02 * tokens as f64
    }

    #[test]
    fn of_a_hundred_tokens_of_an_answer_at_most_one_takes_longer_than_allowed() {
        for time in [steps, flat, steep] {
            for (answers, slowdown, noise) in
                [(1, 2.0, 0.08), (1, 4.0, 0.05), (4, 2.0, 0.05), (20, 2.0, 0.05), (1, 2.0, 0.0)]
            {
                let mut pace = Pace::new(slowdown);
                let seen = run(&mut pace, 2000, answers, time, noise);
                let late = seen.iter().filter(|(_, took, alone)| took > &(slowdown * alone * (1.0 + noise))).count();
                assert!(late <= 20, "{late} of 2000 with {answers} answers, {slowdown}");
            }
        }
    }

    #[test]
    fn a_prompt_gets_what_the_allowed_time_has_room_for() {
        let mean = |seen: &[(usize, f64, f64)]| seen.iter().map(|s| s.0 as f64).sum::<f64>() / seen.len() as f64;
        let of =
            |time: fn(usize) -> f64, answers, slowdown| mean(&run(&mut Pace::new(slowdown), 1000, answers, time, 0.0));
        // 35 of 39 ms: three beside the answer. 126 of 140 ms: twenty-three. Nothing costs anything: all there is room for.
        assert!((2.7..=3.0).contains(&of(steps, 1, 2.0)), "{}", of(steps, 1, 2.0));
        assert!((21.0..=24.0).contains(&of(steps, 1, 7.2)), "{}", of(steps, 1, 7.2));
        assert!(of(flat, 1, 2.0) > 25.0 && of(flat, 30, 2.0) > 1.8);
        // However little there is, a token goes along; only now and then the answers are timed alone.
        assert!(of(steep, 1, 1.0) > 0.95 && of(steps, 1, 1.0) > 0.95);
    }

    #[test]
    fn a_bad_moment_is_forgotten() {
        let mut pace = Pace::new(2.0);
        run(&mut pace, 100, 1, steps, 0.0);
        run(&mut pace, 20, 1, |tokens| 5.0 * steps(tokens), 0.0);
        let after = run(&mut pace, 900, 1, steps, 0.0);
        let settled = after[600..].iter().filter(|s| s.0 == 3).count();
        assert!(settled > 250, "{settled} of 300");
    }

    #[test]
    fn a_full_pass_takes_nothing_along() {
        let mut pace = Pace::new(2.0);
        (0..10).for_each(|_| pace.note(MAX_COLUMNS, 0.1));
        assert_eq!(pace.along(MAX_COLUMNS), 0);
    }
}
