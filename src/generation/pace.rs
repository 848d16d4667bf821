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

/// How long a chunk of more than [`CHUNK`] tokens may take: commands, new clients and health checks wait for it.
const CHUNK_SECONDS: f64 = 10.0;

/// Weight of a new time in a mean.
const NEW: f64 = 0.25;

/// The same where steps are passes of their own, whose mean alone is bounded.
const STEP_MARGIN: f64 = 0.9;

/// Share of the answers' undisturbed time that steps get at least, however slow the answers are: every text is finished.
const MIN_ASIDE: f64 = 0.1;

/// Weight of a longer time in [`Timed::undisturbed`] while texts wait: the clients of embeddings slow the passes down.
const NEW_IN_COMPANY: f64 = 0.001;

/// A step that reads all weights for a few tokens reads them for more at little cost: it may take this many times as long as one of a
/// single token, where even that takes longer than one pass allows.
const WHOLE_READ: f64 = 1.5;

/// Sizes of steps beside answers: 1, 2, 4 and so on to [`MAX_COLUMNS`].
const SIZES: usize = MAX_COLUMNS.ilog2() as usize + 1;

/// A step counts for no more than so many times what one of its size takes at best: a bad moment of the machine is not its doing.
const BAD_MOMENT: f64 = 2.0;

/// How long passes take.
#[derive(Clone, Copy, Debug, Default)]
struct Timed {
    /// Moving mean, in seconds.
    mean: f64,
    /// The same, but down to each time that is below it: a bad moment is forgotten with the next good one.
    least: f64,
    /// The same, but hardly up while texts wait.
    undisturbed: f64,
    /// How many went into it.
    count: u64,
    /// The pass that was the last of them.
    at: u64,
}

impl Timed {
    /// Adds a time, of the pass number `at`. `company`: it may be longer than undisturbed.
    fn note(&mut self, at: u64, seconds: f64, company: bool) {
        if at - self.at > REMEMBERED {
            *self = Timed::default();
        }
        self.count += 1;
        let weight = NEW.max(1.0 / self.count as f64);
        let rise = if company && self.count > 1 { NEW_IN_COMPANY } else { weight };
        let toward = |time: f64, weight: f64| time + (seconds - time) * weight;
        self.mean = toward(self.mean, weight);
        self.least = seconds.min(toward(self.least, weight));
        self.undisturbed = seconds.min(toward(self.undisturbed, rise));
        self.at = at;
    }
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
    /// Steps beside answers, by the logarithm of their tokens; the last are twice as long as any that is chosen here.
    steps: [Timed; SIZES + 1],
    /// Steps so far.
    stepped: u64,
    /// Seconds that steps have taken beyond what the passes since have allowed.
    debt: f64,
    /// Seconds of the steps since the answers' last tokens.
    since: f64,
}

impl Pace {
    /// For passes that may take `slowdown` times as long, 1 or more, because prompts go along.
    pub fn new(slowdown: f64) -> Pace {
        Pace {
            slowdown,
            times: [Timed::default(); MAX_COLUMNS + 1],
            passes: 0,
            prompt_token: None,
            steps: [Timed::default(); SIZES + 1],
            stepped: 0,
            debt: 0.0,
            since: 0.0,
        }
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

    /// Notes that a pass of so many tokens, at most [`MAX_COLUMNS`], took so long. `company`: texts wait to be embedded.
    pub fn note(&mut self, tokens: usize, seconds: f64, company: bool) {
        self.passes += 1;
        self.times[tokens].note(self.passes, seconds, company);
    }

    /// Seconds that the next tokens of so many answers take by themselves, `at_once` of them in a pass; `None` until that is known.
    pub fn alone(&self, answers: usize, at_once: usize) -> Option<f64> {
        let of = |answers: usize| {
            let timed = self.times[answers];
            (answers == 0 || timed.count >= TRIALS).then_some(timed.undisturbed)
        };
        let (full, rest) = (answers / at_once, answers % at_once);
        let full = if full > 0 { full as f64 * of(at_once)? } else { 0.0 };
        Some(full + of(rest)?)
    }

    /// Seconds that steps may take for each time that the answers' next tokens take, which is `alone` without company.
    fn allowed(&self, alone: f64) -> f64 {
        (STEP_MARGIN * self.slowdown - 1.0).max(MIN_ASIDE) * alone
    }

    /// Notes that the answers have got their next tokens, `cycle` seconds after their last ones. Steps may take what is left of the slowed-down
    /// time: passes that the clients of embeddings slow down leave less.
    pub fn allow(&mut self, alone: f64, cycle: f64) {
        let passes = cycle - std::mem::take(&mut self.since);
        let left = STEP_MARGIN * self.slowdown * alone - passes;
        self.debt = (self.debt - left.clamp(MIN_ASIDE * alone, self.allowed(alone))).max(0.0);
    }

    /// Nothing is owed to answers any more: there are none.
    pub fn forgive(&mut self) {
        self.debt = 0.0;
    }

    /// Whether a step beside answers may be done now: earlier ones took no more than the passes since have allowed.
    pub fn may_step(&self) -> bool {
        self.debt <= 0.0
    }

    /// Tokens of a step, a pass of its own, beside answers whose next tokens take `alone` seconds: as many as one such time allows, or if
    /// not even one token fits, as many as cost little more than one.
    pub fn step(&self, alone: f64) -> usize {
        let Some(one) = self.known(0) else { return 1 };
        let allowed = self.allowed(alone).max(WHOLE_READ * one);
        let mut size = 0;
        while size + 1 < SIZES {
            let last = self.known(size).unwrap_or(f64::INFINITY);
            // What was not measured is as if each token added took what each of the last ones did; two tokens are worth a try.
            let before = size.checked_sub(1).and_then(|before| self.known(before)).unwrap_or(0.8 * last);
            let next = self.known(size + 1);
            if next.unwrap_or(last + 2.0 * (last - before)) > allowed {
                break;
            }
            size += 1;
            if next.is_none() {
                break;
            }
        }
        1 << size
    }

    /// What a step of a size takes, if it was done lately.
    fn known(&self, size: usize) -> Option<f64> {
        let timed = self.steps[size];
        (timed.count > 0 && self.stepped - timed.at < REMEMBERED).then_some(timed.mean)
    }

    /// Notes how long a step of so many tokens took beside answers.
    pub fn note_step(&mut self, tokens: usize, seconds: f64) {
        self.stepped += 1;
        self.since += seconds;
        let size = (tokens.next_power_of_two().ilog2() as usize).min(SIZES);
        let before = self.steps[size];
        self.debt += if before.count > 0 { seconds.min(BAD_MOMENT * before.least) } else { seconds };
        // The end of a text says nothing of longer steps.
        if tokens == 1 << size {
            self.steps[size].note(self.stepped, seconds, false);
        }
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
            pace.note(answers + along, took, false);
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

    /// Passes of one answer beside steps, each of which takes `load` times as long as undisturbed: how many times as long all took, tokens
    /// of steps for each pass, and the longest step.
    fn beside(pace: &mut Pace, passes: usize, time: impl Fn(usize) -> f64, load: f64) -> (f64, f64, f64) {
        let (mut all, mut tokens, mut longest, mut step_took) = (0.0, 0, 0.0f64, 0.0);
        (0..TRIALS).for_each(|_| pace.note(1, time(1), false));
        for _ in 0..passes {
            all += load * time(1);
            pace.note(1, load * time(1), true);
            let alone = pace.alone(1, MAX_COLUMNS).unwrap();
            pace.allow(alone, load * time(1) + std::mem::take(&mut step_took));
            if pace.may_step() {
                let step = pace.step(alone);
                step_took = load * time(step);
                pace.note_step(step, step_took);
                (all, tokens, longest) = (all + step_took, tokens + step, longest.max(step_took));
            }
        }
        (all / (passes as f64 * time(1)), tokens as f64 / passes as f64, longest / time(1))
    }

    #[test]
    fn steps_take_what_is_allowed_on_the_average_and_more_than_a_token_where_that_costs_little() {
        for slowdown in [1.0, 2.0, 4.0] {
            let allowed = 1.0 + (STEP_MARGIN * slowdown - 1.0).max(MIN_ASIDE);
            // Where the tokens of a step cost nothing, where each costs as much as the first, and where the first costs little.
            let quick = |tokens: usize| 0.001 + 0.0001 * tokens as f64;
            let times: [(&dyn Fn(usize) -> f64, f64); 4] =
                [(&steps, 0.15), (&flat, 2.0), (&steep, 0.05), (&quick, 0.2)];
            for (time, least) in times {
                let (took, tokens, longest) = beside(&mut Pace::new(slowdown), 4000, time, 1.0);
                assert!(took < allowed + 0.02, "{took} times as long with a slowdown of {slowdown}");
                assert!(tokens > least, "{tokens} tokens a pass with a slowdown of {slowdown}");
                let most = (STEP_MARGIN * slowdown - 1.0).max(2.0 * WHOLE_READ);
                assert!(longest <= most, "a step took {longest} times as long as a pass with a slowdown of {slowdown}");
            }
        }
    }

    #[test]
    fn steps_take_only_what_slowed_down_passes_leave() {
        // The clients' own work makes every pass and step half as long again: 0.3 of the allowed 1.8 times are left.
        let (took, tokens, _) = beside(&mut Pace::new(2.0), 300, steps, 1.5);
        assert!((1.6..2.0).contains(&took) && tokens > 0.0, "{took} times as long, {tokens} tokens a pass");
        // The passes alone take longer than that: texts still go on.
        let (took, tokens, _) = beside(&mut Pace::new(2.0), 300, steps, 2.5);
        assert!(took < 2.7 && tokens > 0.02, "{took} times as long, {tokens} tokens a pass");
    }

    #[test]
    fn after_a_step_that_took_long_answers_go_on_alone_until_that_is_made_up_for() {
        let mut pace = Pace::new(2.0);
        assert_eq!(pace.alone(1, MAX_COLUMNS), None, "nothing was timed");
        (0..3).for_each(|_| pace.note(1, 0.01, false));
        (0..3).for_each(|_| pace.note(MAX_COLUMNS, 0.1, false));
        assert!((pace.alone(2 * MAX_COLUMNS + 1, MAX_COLUMNS).unwrap() - 0.21).abs() < 1e-9);
        assert!((pace.alone(5, 1).unwrap() - 0.05).abs() < 1e-9);
        assert!(pace.may_step());
        let mut waits_after = |seconds| {
            pace.note_step(64, seconds);
            let mut step = seconds;
            (1..).find(|_| {
                pace.allow(0.01, 0.01 + std::mem::take(&mut step));
                pace.may_step()
            })
        };
        // Of 0.4 s each pass allows 8 ms.
        assert!((50..=51).contains(&waits_after(0.4).unwrap()));
        // A moment in which the machine did something else counts for twice what such a step takes at best.
        assert!((100..=101).contains(&waits_after(30.0).unwrap()));
        pace.note_step(64, 0.4);
        assert!(!pace.may_step());
        pace.forgive();
        assert!(pace.may_step());
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
        (0..10).for_each(|_| pace.note(MAX_COLUMNS, 0.1, false));
        assert_eq!(pace.along(MAX_COLUMNS), 0);
    }
}
