//! The form of a log line: time, level, spans, module, text. A module of this program has its short name: `serve` for
//! `dynamicinfer::serve::log`.

use std::fmt;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

/// Writes events as the standard format does, with short names of modules.
pub struct LogLine;

/// The first module below the crate; other crates keep their full name.
fn short(target: &str) -> &str {
    let own = target.strip_prefix("dynamicinfer::").map(|path| path.split("::").next().unwrap_or(path));
    own.unwrap_or(target)
}

impl<S, N> FormatEvent<S, N> for LogLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut to: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let (dim, plain) = if to.has_ansi_escapes() { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
        write!(to, "{dim}")?;
        SystemTime.format_time(&mut to)?;
        let level = event.metadata().level();
        match *level {
            _ if plain.is_empty() => write!(to, " {level:>5} ")?,
            Level::ERROR => write!(to, "{plain} \x1b[31m{level:>5}{plain} ")?,
            Level::WARN => write!(to, "{plain} \x1b[33m{level:>5}{plain} ")?,
            _ => write!(to, "{plain} \x1b[32m{level:>5}{plain} ")?,
        }
        let mut spans = false;
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            write!(to, "{}", span.name())?;
            if let Some(fields) = span.extensions().get::<FormattedFields<N>>().filter(|fields| !fields.is_empty()) {
                write!(to, "{{{fields}}}")?;
            }
            write!(to, ":")?;
            spans = true;
        }
        write!(to, "{}{dim}{}:{plain} ", if spans { " " } else { "" }, short(event.metadata().target()))?;
        context.format_fields(to.by_ref(), event)?;
        writeln!(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_of_this_program_has_its_short_name() {
        assert_eq!(short("dynamicinfer::serve::log"), "serve");
        assert_eq!(short("dynamicinfer::engine"), "engine");
        assert_eq!(short("dynamicinfer"), "dynamicinfer");
        assert_eq!(short("hyper::proto::h1"), "hyper::proto::h1");
    }
}
