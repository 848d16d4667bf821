mod draw;
mod look;

use super::settings_arg::SocketArgs;
use crate::client::Client;
use crate::clock::{self, Duration, Instant};
use crate::error::{Error, Result};
use crate::interrupt;
use draw::{History, draw};
use look::{Interval, Look};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyModifiers};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::IsTerminal;
use std::ops::RangeInclusive;

/// Seconds between two snapshots.
const DELAYS: RangeInclusive<f64> = 0.05..=3600.0;

/// Watch the daemon: speed, queue, memory, neurons by layer
///
/// q, Esc or Ctrl-C ends; + and - refresh more or less often. Rates refer to the time between two snapshots. If the daemon ends, top waits
/// for the next one. Hits: active neurons that the device computed. Late: observations that reached the scheduler too late to move neurons
/// for them. Stale: moves that were decided too late to begin.
#[derive(clap::Args)]
pub struct Args {
    /// Seconds between two snapshots
    #[arg(short, long, default_value_t = 1.0)]
    delay: f64,
    /// Print one snapshot as JSON and end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

pub fn run(args: Args) -> Result<()> {
    if !DELAYS.contains(&args.delay) {
        return Err(Error::Usage(format!("--delay {}: give 0.05 to 3600 seconds", args.delay)));
    }
    let client = args.socket.connect()?;
    if args.json {
        let look = Look::take(&client)?;
        let Look { numbers, ps, cache, policy, .. } = look;
        return super::print_json(&serde_json::json!({"metrics": numbers, "ps": ps, "cache": cache, "policy": policy}));
    }
    if !std::io::stdout().is_terminal() {
        return Err(Error::Usage("top needs a terminal; use --json for programs".into()));
    }
    let mut terminal = ratatui::try_init().map_err(Error::io("draw on", "stdout".as_ref()))?;
    let result = watch(&mut terminal, &client, Duration::from_secs_f64(args.delay));
    // A terminal that is closed needs no restoring.
    let _ = ratatui::try_restore();
    result
}

/// The action of a key.
enum Wish {
    End,
    Delay(f64),
    Redraw,
}

fn meaning(event: &Event) -> Option<Wish> {
    match event {
        Event::Resize(..) => Some(Wish::Redraw),
        Event::Key(KeyEvent { code: KeyCode::Char('c'), modifiers, .. })
            if modifiers.contains(KeyModifiers::CONTROL) =>
        {
            Some(Wish::End)
        }
        Event::Key(KeyEvent { code: KeyCode::Char('q') | KeyCode::Esc, .. }) => Some(Wish::End),
        Event::Key(KeyEvent { code: KeyCode::Char('+' | '='), .. }) => Some(Wish::Delay(0.5)),
        Event::Key(KeyEvent { code: KeyCode::Char('-'), .. }) => Some(Wish::Delay(2.0)),
        _ => None,
    }
}

fn watch(terminal: &mut DefaultTerminal, client: &Client, mut delay: Duration) -> Result<()> {
    let broken = |e| Error::io("draw on", "stdout".as_ref())(e);
    let (mut before, mut now) = (Look::take(client)?, Look::take(client)?);
    let (mut history, mut away) = (History::default(), None::<String>);
    loop {
        let span = Interval { before: &before, now: &now };
        terminal.draw(|frame| draw(frame, &span, &history, away.as_deref())).map_err(broken)?;
        let looked = clock::now();
        while let Some(key) = next_key(looked, delay)? {
            match key {
                Wish::End => return Ok(()),
                Wish::Delay(times) => {
                    delay =
                        Duration::from_secs_f64((delay.as_secs_f64() * times).clamp(*DELAYS.start(), *DELAYS.end()));
                }
                Wish::Redraw => {
                    terminal.draw(|frame| draw(frame, &span, &history, away.as_deref())).map_err(broken)?;
                }
            }
        }
        match Look::take(client) {
            Ok(look) => {
                away = None;
                before = std::mem::replace(&mut now, look);
                history.add(&Interval { before: &before, now: &now });
            }
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(error) => away = Some(error.to_string()),
        }
    }
}

/// The next key with an action, until `delay` after `from`; `None` after that time.
fn next_key(from: Instant, delay: Duration) -> Result<Option<Wish>> {
    let broken = |e| Error::io("read keys of", "stdin".as_ref())(e);
    loop {
        interrupt::check()?;
        let left = (from + delay).saturating_duration_since(clock::now());
        if goes_while_waiting(&std::io::stdout(), left.min(LOOK)) {
            return Err(Error::Failed("the terminal has gone".into()));
        }
        if left.is_zero() {
            return Ok(None);
        }
        if event::poll(Duration::ZERO).map_err(broken)?
            && let Some(key) = meaning(&event::read().map_err(broken)?)
        {
            return Ok(Some(key));
        }
    }
}

/// How often a wait for keys looks for what is no key: a change of the terminal's size, and Ctrl-C.
const LOOK: Duration = Duration::from_millis(100);

/// Waits for a key, and tells whether the terminal's other end was closed meanwhile or before: its window, or the connection that it
/// came over. crossterm does not wait: where the terminal goes while it does, it reads nothing again and again and never comes back.
fn goes_while_waiting(terminal: &impl std::os::fd::AsFd, most: Duration) -> bool {
    let mut watched = [PollFd::new(terminal, PollFlags::IN)];
    let most = Timespec { tv_sec: most.as_secs() as i64, tv_nsec: most.subsec_nanos().into() };
    poll(&mut watched, Some(&most)).is_ok() && watched[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}
