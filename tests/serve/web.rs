//! Web pages, odd addresses and lines that are no text.

use crate::daemon::{Answer, Daemon, PATIENCE, command, read_all, request};
use std::io::Write;
use std::net::TcpStream;
use std::process::Stdio;

/// `allow_origin` let a page's requests in and told no browser so: before a request with a token it asks whether it may, without one,
/// and got 401; and no answer could be read.
#[test]
fn a_page_of_the_allowed_origin_may_ask_with_its_token_and_read_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let environment = [("DYNAMICINFER_SERVE_ALLOW_ORIGIN", "http://localhost:3000")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "--listen", "127.0.0.1:0"], &environment);
    let (address, token) = daemon.port();
    let ask = |method: &str, headers: &str| -> Answer {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!("{method} /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        write!(stream, "{head}{headers}\r\n").unwrap();
        read_all(&mut stream)
    };
    const MAY: &str = "access-control-allow-origin: http://localhost:3000";
    let page = "Origin: http://localhost:3000\r\n";
    let about = "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n";
    let preflight = ask("OPTIONS", &format!("{page}{about}"));
    assert_eq!(preflight.status, 204, "{}", preflight.text());
    for told in [MAY, "access-control-allow-methods: get, post, put", "authorization, content-type", "vary: origin"] {
        assert!(preflight.headers.contains(told), "{told}: {}", preflight.headers);
    }
    let answer = ask("GET", &format!("{page}Authorization: Bearer {token}\r\n"));
    assert!(answer.status == 200 && answer.headers.contains(MAY), "{}", answer.headers);
    // The page may read why it is refused, and is refused.
    let without = ask("GET", page);
    assert!(without.status == 401 && without.headers.contains(MAY), "{}", without.headers);
    assert_eq!(ask("OPTIONS", page).status, 401, "what is no preflight needs the token");
    let stranger = ask("OPTIONS", &format!("Origin: http://evil.example\r\n{about}"));
    assert!(stranger.status == 403 && !stranger.headers.contains("access-control"), "{}", stranger.headers);
}

/// It was answered in plain text.
#[test]
fn a_models_name_that_is_no_text_is_refused_as_all_else_is() {
    let daemon = Daemon::start(&[]);
    for (path, status) in [("/v1/models/%ff", 400), ("/v1/models/a%2f%00", 404), ("/v1/models/%", 404)] {
        let answer = daemon.raw(&request("GET", path, ""));
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
        assert!(answer.headers.contains("content-type: application/json"), "{path}: {}", answer.headers);
        assert!(answer.json()["error"]["message"].is_string(), "{path}");
    }
}

/// One byte that is no UTF-8 ended a talk whose lines come from a program.
#[test]
fn a_line_that_is_no_text_does_not_end_a_talk() {
    let dir = tempfile::tempdir().unwrap();
    let _daemon = Daemon::start_in(dir.path(), &[]);
    let mut command = command(dir.path(), &["chat"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = b"/set max_tokens 3\n\xff\xfe broken\n/show\n\"\"\"one\ntw\xc3\no\nthree\"\"\"\n/show\n";
    child.stdin.take().unwrap().write_all(lines).unwrap();
    let done = child.wait_with_output().unwrap();
    let (out, err) = (String::from_utf8(done.stdout).unwrap(), String::from_utf8(done.stderr).unwrap());
    assert_eq!(done.status.code(), Some(0), "{err}");
    assert!(out.contains("turns    0") && out.contains("turns    1"), "{out}");
    assert_eq!(err.matches("is not UTF-8 text").count(), 2, "{err}");
}
