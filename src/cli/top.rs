use super::settings_arg::SocketArgs;
use crate::client::Client;
use crate::clock::{self, Duration, Instant};
use crate::error::{Error, Result, printable};
use crate::interrupt;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::Stylize;
use ratatui::text::Line;
use ratatui::widgets::{Block, Gauge, Paragraph, Row, Table};
use ratatui::{DefaultTerminal, Frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::collections::HashMap;
use std::io::IsTerminal;

/// Watch the daemon: speed, queue, memory, neurons by layer
///
/// q, Esc or Ctrl-C ends. Rates are of the time between two looks.
#[derive(clap::Args)]
pub struct Args {
    /// Seconds between two looks
    #[arg(short, long, default_value_t = 1.0)]
    delay: f64,
    /// Print one look as JSON and end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    socket: SocketArgs,
}

pub fn run(args: Args) -> Result<()> {
    if !(0.05..=3600.0).contains(&args.delay) {
        return Err(Error::Usage(format!("--delay {}: take 0.05 to 3600 seconds", args.delay)));
    }
    let client = args.socket.connect()?;
    if args.json {
        let look = Look::take(&client)?;
        return super::print_json(&serde_json::json!({"metrics": look.numbers, "ps": look.ps, "cache": look.cache}));
    }
    if !std::io::stdout().is_terminal() {
        return Err(Error::Usage("top draws on a terminal; take --json for a program".into()));
    }
    let mut terminal = ratatui::try_init().map_err(Error::io("draw on", "stdout".as_ref()))?;
    let result = watch(&mut terminal, &client, Duration::from_secs_f64(args.delay));
    // Where the terminal has gone there is nothing to restore.
    let _ = ratatui::try_restore();
    result
}

fn watch(terminal: &mut DefaultTerminal, client: &Client, delay: Duration) -> Result<()> {
    let broken = |e| Error::io("draw on", "stdout".as_ref())(e);
    let mut before = Look::take(client)?;
    let mut now = Look::take(client)?;
    loop {
        terminal.draw(|frame| draw(frame, &before, &now)).map_err(broken)?;
        let next = now.at + delay;
        loop {
            interrupt::check()?;
            let left = next.saturating_duration_since(clock::now());
            if goes_while_waiting(&std::io::stdout(), left.min(LOOK)) {
                return Err(Error::Failed("the terminal has gone".into()));
            }
            if left.is_zero() {
                break;
            }
            if !event::poll(Duration::ZERO).map_err(broken)? {
                continue;
            }
            match event::read().map_err(broken)? {
                Event::Key(key) if matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) => return Ok(()),
                Event::Key(key) if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) => {
                    return Ok(());
                }
                Event::Resize(..) => {
                    terminal.draw(|frame| draw(frame, &before, &now)).map_err(broken)?;
                }
                _ => {}
            }
        }
        before = std::mem::replace(&mut now, Look::take(client)?);
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

/// What the daemon says at one moment.
struct Look {
    at: Instant,
    /// Samples of /metrics by name and labels, without `dynamicinfer_`.
    numbers: HashMap<String, f64>,
    ps: Value,
    /// Null without a model.
    cache: Value,
}

impl Look {
    fn take(client: &Client) -> Result<Look> {
        let text = client.call("GET", "/metrics", None)?;
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            // What is no number cannot be drawn as a share of another.
            let value = value.parse().ok().filter(|value: &f64| value.is_finite())?;
            Some((name.strip_prefix("dynamicinfer_").unwrap_or(name).to_owned(), value))
        };
        let numbers = text.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect();
        let ps = client.get("/v1/x/ps")?;
        let cache = if ps["state"] == "ready" { client.get("/v1/x/cache")? } else { Value::Null };
        Ok(Look { at: clock::now(), numbers, ps, cache })
    }

    fn number(&self, name: &str) -> f64 {
        self.numbers.get(name).copied().unwrap_or_default()
    }
}

/// Growth per second between two looks.
fn rate(before: &Look, now: &Look, name: &str) -> f64 {
    let seconds = (now.at - before.at).as_secs_f64().max(1e-3);
    // A model that was loaded anew counts from nothing.
    (now.number(name) - before.number(name)).max(0.0) / seconds
}

/// a / b of what was added between two looks.
fn share(before: &Look, now: &Look, part: &str, all: &[&str]) -> Option<f64> {
    let added = |name: &str| now.number(name) - before.number(name);
    let whole: f64 = all.iter().map(|name| added(name)).sum();
    (whole > 0.0).then(|| added(part) / whole)
}

/// What the predictor has found of what is truly active, of all that was looked at: single tokens say little.
fn recall(now: &Look) -> Option<f64> {
    let active = now.number("audited_active_total");
    (active > 0.0).then(|| now.number("audited_found_total") / active)
}

/// How fast a path was while it was busy, beside what it can do.
fn path(before: &Look, now: &Look, path: &str) -> String {
    let added = |name: &str| {
        let name = format!("{name}{{path=\"{path}\"}}");
        now.number(&name) - before.number(&name)
    };
    let (bytes, seconds) = (added("path_bytes_total"), added("path_seconds_total"));
    let rate = if seconds > 0.0 { format!("{:.1}", bytes / seconds / 1e9) } else { "-".into() };
    match now.number(&format!("path_limit_bytes_per_second{{path=\"{path}\"}}")) {
        limit if limit > 0.0 => format!("{path} {rate} of {:.1}", limit / 1e9),
        _ => format!("{path} {rate}"),
    }
}

fn draw(frame: &mut Frame, before: &Look, now: &Look) {
    let [head, memory, layers] =
        Layout::vertical([Constraint::Length(8), Constraint::Length(3), Constraint::Min(3)]).areas(frame.area());
    frame.render_widget(summary(before, now), head);
    let (used, budget) = (now.number("vram_used_bytes"), now.number("vram_budget_bytes"));
    let title = if budget > 0.0 { "device memory" } else { "device memory: no device" };
    let label = format!("{} of {}", super::human_bytes(used as u64), super::human_bytes(budget as u64));
    let gauge = Gauge::default().block(Block::bordered().title(title)).label(label);
    frame.render_widget(gauge.ratio(if budget > 0.0 { (used / budget).clamp(0.0, 1.0) } else { 0.0 }), memory);
    frame.render_widget(layer_table(&before.cache, &now.cache), layers);
}

fn summary(before: &Look, now: &Look) -> Paragraph<'static> {
    let model = &now.ps["models"][0];
    let text = |value: &Value| printable(value.as_str().unwrap_or_default());
    let name = printable(model["name"].as_str().unwrap_or("no model"));
    let state = text(&now.ps["state"]);
    let percent = |share: Option<f64>| share.map_or("-".into(), |s| format!("{:.1} %", 100.0 * s));
    let per_second = |name: &str| rate(before, now, name);
    let columns = share(before, now, "decode_columns_total", &["decode_passes_total"]);
    let lines = vec![
        Line::from(format!(
            "{name}  {state}  up {} s  {}  {}",
            now.number("uptime_seconds") as u64,
            text(&model["predictor"]),
            if now.number("draining") > 0.0 { "ending" } else { "" }
        ))
        .bold(),
        Line::from(format!(
            "tokens/s {:.1} generated, {:.1} of prompts, {:.1} from before   {} at a time",
            per_second("generation_tokens_total"),
            per_second("prompt_tokens_total"),
            per_second("cached_tokens_total"),
            columns.map_or("-".into(), |c| format!("{c:.1}")),
        )),
        Line::from(format!(
            "requests {} of {} running, {} waiting, {:.1}/s refused, {} left by their clients",
            now.number("num_requests_running"),
            now.number("num_requests_max"),
            now.number("num_requests_waiting"),
            per_second("requests_rejected_total{reason=\"queue_full\"}"),
            now.number("client_disconnects_total"),
        )),
        Line::from(format!(
            "neurons {} computed, recall {} at {} tokens   hits {}   migrations/s {:.1}",
            percent(share(before, now, "neurons_computed_total", &["neurons_all_total"])),
            percent(recall(now)),
            now.number("audited_tokens_total"),
            percent(share(before, now, "hits_total", &["hits_total", "misses_total"])),
            per_second("block_migrations_total{direction=\"in\"}"),
        )),
        Line::from(format!(
            "GB/s {}   {}   {}",
            path(before, now, "cpu"),
            path(before, now, "device"),
            path(before, now, "link")
        )),
        Line::from(format!(
            "memory {} resident, keys and values up to {}, weights {}",
            super::human_bytes(now.number("process_resident_memory_bytes") as u64),
            super::human_bytes(model["kv_bytes"].as_u64().unwrap_or_default()),
            super::human_bytes(model["model_bytes"].as_u64().unwrap_or_default()),
        )),
    ];
    Paragraph::new(lines).block(Block::bordered().title("dynamicinfer"))
}

fn layer_table(before: &Value, now: &Value) -> Table<'static> {
    let row = |(l, layer): (usize, &Value)| {
        let number = |name: &str| layer[name].as_u64().unwrap_or_default();
        let threshold = layer["threshold"].as_f64().map_or("-".into(), |t| format!("{t:.3}"));
        // A model that was loaded anew counts from nothing.
        let added = |name: &str| number(name).saturating_sub(before["layers"][l][name].as_u64().unwrap_or_default());
        let (hits, misses) = (added("hits"), added("misses"));
        let rate = match hits.saturating_add(misses) {
            0 => "-".into(),
            all => format!("{:.1} %", 100.0 * hits as f64 / all as f64),
        };
        Row::new([
            number("layer").to_string(),
            printable(layer["predictor"].as_str().unwrap_or_default()),
            threshold,
            rate,
            format!("{} of {}", number("resident"), number("slots")),
            number("filling").to_string(),
            number("neurons").to_string(),
        ])
    };
    let rows: Vec<Row> = now["layers"].as_array().into_iter().flatten().enumerate().map(row).collect();
    let widths = [6, 10, 10, 9, 16, 8, 8].map(Constraint::Length);
    Table::new(rows, widths)
        .header(Row::new(["layer", "predictor", "threshold", "hits", "resident", "coming", "neurons"]).bold())
        .block(Block::bordered().title("layers"))
}
