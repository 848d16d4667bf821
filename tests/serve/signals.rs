//! Signals that nobody sends on purpose.

use crate::daemon::{Daemon, read_answer, request};
use rustix::process::Signal;
use serde_json::json;
use std::io::Write;

/// They ended the process where it stood, and its socket stayed behind.
#[test]
fn signals_that_mean_nothing_here_end_nothing() {
    let mut daemon = Daemon::start(&[]);
    for signal in [Signal::USR1, Signal::USR2, Signal::ALARM, Signal::VTALARM, Signal::PROF, Signal::IO, Signal::XFSZ] {
        daemon.signal(signal);
        assert_eq!(daemon.get("/health")["status"], "ok", "after {signal:?}");
    }
    daemon.signal(Signal::TERM);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(!daemon.socket.exists());
}

#[test]
fn sigquit_ends_at_once_and_takes_the_socket_away() {
    let mut daemon = Daemon::start(&["--parallel", "1"]);
    let endless = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "stream": true, "n": 8});
    let mut busy = daemon.connect();
    busy.write_all(&request("POST", "/v1/completions", &endless.to_string())).unwrap();
    daemon.until("dynamicinfer_num_requests_running", 1.0);
    daemon.signal(Signal::QUIT);
    assert_eq!(daemon.wait().code(), Some(0));
    assert!(!read_answer(&mut busy).whole, "it waited for answers");
    assert!(!daemon.socket.exists());
}
