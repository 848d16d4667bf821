//! What the daemon logs when nobody has asked for more.

use crate::daemon::{Daemon, request};
use rustix::process::Signal;
use serde_json::json;
use std::io::{Read, Write};

/// Nothing was logged of a request unless all of the engine's doings were, too.
#[test]
fn each_request_has_one_line_with_what_it_took_and_the_daemon_its_first_and_last() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &[]);
    assert!(daemon.wait_for(" starts ").contains("dynamicinfer.sock"));
    assert!(daemon.wait_for("loaded model=\"demo\" ms=").contains("INFO"));
    daemon.wait_for("is ready");
    let mut ask = json!({"prompt": "Once upon a time", "max_tokens": 3, "ignore_eos": true});
    assert_eq!(daemon.post("/v1/completions", &ask).status, 200);
    let line = daemon.next_line().unwrap();
    for told in
        ["INFO", "POST /v1/completions 200", "id=", "model=\"demo\"", "prompt=", "cached=0", "generated=3", "ms="]
    {
        assert!(line.contains(told), "{told}: {line}");
    }
    ask["stream"] = true.into();
    assert_eq!(daemon.post("/v1/completions", &ask).status, 200);
    let line = daemon.next_line().unwrap();
    assert!(line.contains("POST /v1/completions 200") && line.contains("generated=3"), "{line}");
    // What only looks is not told, or `top` would fill the log.
    assert_eq!(daemon.get("/v1/x/ps")["state"], "ready");
    assert_eq!(daemon.post("/v1/completions", &json!({"prompt": "x", "temprature": 1})).status, 400);
    let line = daemon.next_line().unwrap();
    assert!(
        line.contains("POST /v1/completions 400") && line.contains("reason=\"unknown field 'temprature'"),
        "{line}"
    );
    assert_eq!(daemon.call("GET", "/nothing", "").status, 404);
    let line = daemon.next_line().unwrap();
    assert!(line.contains("GET /nothing 404") && line.contains("reason=\"unknown route"), "{line}");
    // A client that goes in the middle.
    ask["max_tokens"] = 100_000.into();
    let mut stream = daemon.connect();
    stream.write_all(&request("POST", "/v1/completions", &ask.to_string())).unwrap();
    stream.read_exact(&mut [0; 64]).unwrap();
    drop(stream);
    let line = daemon.next_line().unwrap();
    assert!(line.contains("POST /v1/completions 200") && line.contains("its client has gone"), "{line}");
    daemon.signal(Signal::TERM);
    // Where the answer of the client that has gone is not over yet, it says before how long it waits.
    assert!(daemon.wait_for("requests=").contains(" ends "));
    assert_eq!(daemon.wait().code(), Some(0));
}
