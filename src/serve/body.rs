//! An answer as server-sent events or lines, written as fast as the client reads it.

use super::log::Noted;
use crate::api::error::unsupported;
use crate::api::stream::{ChoiceStream, Usage, cut_short, failed};
use crate::api::{Answer, ApiError};
use crate::clock::{self, Duration};
use crate::generation::{Event, Events};
use hyper::body::{Body, Bytes, Frame};
use serde_json::Value;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::time::Sleep;

/// Time from an error event to the end of its connection: when a body fails, hyper drops what it has not written yet.
const LINGER: Duration = Duration::from_millis(50);

/// One choice of the answer.
struct Choice {
    events: Events,
    stream: ChoiceStream,
    ended: bool,
}

/// Writes the events of all choices. Dropping it cancels their jobs. An error is sent as an event, and then the connection is aborted: a
/// stream that ended in order without a finish_reason would look like a whole answer.
pub struct EventStream {
    answer: Answer,
    choices: Vec<Choice>,
    per_prompt: usize,
    usage: Usage,
    begun: bool,
    state: State,
    ping: Pin<Box<Sleep>>,
    ping_every: Duration,
    /// What the log is to know of it.
    noted: Noted,
    /// Gives an error the names that fields have in the request.
    renamed: fn(ApiError) -> ApiError,
}

#[derive(PartialEq)]
enum State {
    Running,
    /// The last event has been written.
    Complete,
    Aborting,
}

impl EventStream {
    /// Streams the events of all choices, `per_prompt` of them for each prompt.
    pub fn new(
        answer: Answer,
        events: Vec<Events>,
        per_prompt: usize,
        ping_every: Duration,
        noted: Noted,
        renamed: fn(ApiError) -> ApiError,
    ) -> EventStream {
        let choice = |(i, events)| Choice { events, stream: ChoiceStream::new(&answer, i), ended: false };
        EventStream {
            choices: events.into_iter().enumerate().map(choice).collect(),
            answer,
            per_prompt,
            usage: Usage::default(),
            begun: false,
            state: State::Running,
            ping: Box::pin(tokio::time::sleep(ping_every)),
            ping_every,
            noted,
            renamed,
        }
    }

    /// Writes what there is of all choices.
    fn collect(&mut self, context: &mut Context<'_>, out: &mut String) -> Result<(), ApiError> {
        let lines = self.answer.wire.is_lines();
        for index in 0..self.choices.len() {
            let choice = &mut self.choices[index];
            while !choice.ended {
                match choice.events.poll_recv(context) {
                    Poll::Pending => break,
                    Poll::Ready(None) => return Err(cut_short()),
                    Poll::Ready(Some(Event::Failed(why))) => return Err(failed(why)),
                    Poll::Ready(Some(Event::Unsupported(why))) => return Err(unsupported(why)),
                    Poll::Ready(Some(Event::Delta(delta))) => write(out, choice.stream.delta(&delta), lines),
                    Poll::Ready(Some(Event::Done(done))) => {
                        choice.ended = true;
                        self.usage.add(&done, index, self.per_prompt);
                        self.noted.answer(&done, index, self.per_prompt);
                        write(out, choice.stream.end(&done), lines);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Writes each as a line, or as an event; one that has a type has it as its event's name, too.
fn write(out: &mut String, events: Vec<Value>, lines: bool) {
    for event in events {
        if lines {
            out.push_str(&format!("{event}\n"));
            continue;
        }
        if let Some(name) = event["type"].as_str() {
            out.push_str(&format!("event: {name}\n"));
        }
        out.push_str(&format!("data: {event}\n\n"));
    }
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let this = self.get_mut();
        match this.state {
            State::Running => {}
            State::Complete => return Poll::Ready(None),
            State::Aborting => {
                let cut = |()| Some(Err(std::io::Error::other("the answer was cut short")));
                return this.ping.as_mut().poll(context).map(cut);
            }
        }
        let (mut out, lines) = (String::new(), this.answer.wire.is_lines());
        if !std::mem::replace(&mut this.begun, true) {
            this.choices.iter_mut().for_each(|choice| write(&mut out, choice.stream.begin(), lines));
        }
        if let Err(error) = this.collect(context, &mut out).map_err(this.renamed) {
            this.noted.reason(&error.message);
            write(&mut out, vec![error.written(this.answer.wire.error_form()).1], lines);
            this.state = State::Aborting;
        } else if this.choices.iter().all(|choice| choice.ended) {
            if this.answer.usage {
                write(&mut out, vec![this.answer.usage_chunk(&this.usage)], lines);
            }
            if this.answer.wire.has_end_mark() {
                out.push_str("data: [DONE]\n\n");
            }
            this.state = State::Complete;
        }
        if out.is_empty() {
            if this.ping.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            match this.choices.first().and_then(|choice| choice.stream.idle()) {
                Some(event) => write(&mut out, vec![event], lines),
                None => out.push_str(": ping\n\n"),
            }
        }
        let wait = if this.state == State::Aborting { LINGER } else { this.ping_every };
        this.ping.as_mut().reset((clock::now() + wait).into());
        if this.state == State::Running {
            // Registers with the timer that was just set.
            let _ = this.ping.as_mut().poll(context);
        }
        Poll::Ready(Some(Ok(Frame::data(out.into()))))
    }
}
