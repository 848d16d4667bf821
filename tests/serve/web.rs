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

/// Headers that openai-node sends from a browser, beside two that any client may have of its own.
const OPENAI_NODE: [&str; 13] = [
    "authorization",
    "content-type",
    "openai-organization",
    "openai-project",
    "x-stainless-arch",
    "x-stainless-helper-method",
    "x-stainless-lang",
    "x-stainless-os",
    "x-stainless-package-version",
    "x-stainless-retry-count",
    "x-stainless-runtime",
    "x-stainless-timeout",
    "x-of-its-own",
];

/// The openai package in a page of the allowed origin got nothing but a failed preflight: its headers were not among the three allowed.
#[test]
fn a_page_may_send_every_header_that_its_client_has() {
    let dir = tempfile::tempdir().unwrap();
    let environment = [("DYNAMICINFER_SERVE_ALLOW_ORIGIN", "http://localhost:3000")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "--listen", "127.0.0.1:0"], &environment);
    let (address, _) = daemon.port();
    let ask = |lines: &str| -> Answer {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
        write!(stream, "{head}Origin: http://localhost:3000\r\nAccess-Control-Request-Method: POST\r\n{lines}\r\n")
            .unwrap();
        read_all(&mut stream)
    };
    // What a browser compares: all that the request has against what the answer allows.
    let allowed = |answer: &Answer| -> Vec<String> {
        assert_eq!(answer.status, 204, "{}", answer.text());
        let line = answer.headers.lines().find_map(|line| line.strip_prefix("access-control-allow-headers: ")).unwrap();
        line.split(',').map(|name| name.trim().to_owned()).collect()
    };
    let (first, second) = OPENAI_NODE.split_at(6);
    let lines = format!(
        "Access-Control-Request-Headers: {}\r\nAccess-Control-Request-Headers: {}\r\n",
        first.join(","),
        second.join(" , ").to_uppercase()
    );
    let answer = ask(&lines);
    let names = allowed(&answer);
    assert!(OPENAI_NODE.iter().all(|name| names.contains(&(*name).to_owned())), "{names:?}");
    assert!(answer.headers.contains("vary: access-control-request-headers"), "{}", answer.headers);
    // What is no header's name is left out, and so is a second mention.
    let names = allowed(&ask("Access-Control-Request-Headers: content-type,,a b,x-a,X-A,\"\r\n"));
    assert_eq!(names, ["authorization", "content-type", "x-request-id", "x-a"]);
}

/// Of two Host headers the first was looked at, and a proxy may look at the last; an address with a host in it was taken whatever the host.
#[test]
fn a_request_that_names_two_hosts_or_origins_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "--listen", "127.0.0.1:0"], &[]);
    let (address, token) = daemon.port();
    daemon.wait_for("listening at");
    let bearer = format!("Authorization: Bearer {token}\r\n");
    let own = format!("Host: {address}\r\n");
    let at_port = |target: &str, lines: &str| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\nConnection: close\r\n{bearer}{lines}\r\n").unwrap();
        read_all(&mut stream)
    };
    let at_socket = |target: &str, lines: &str| {
        daemon.raw(format!("GET {target} HTTP/1.1\r\nConnection: close\r\n{lines}\r\n").as_bytes())
    };
    for (target, lines, wanted) in [
        ("/v1/models".to_owned(), own.clone(), 200),
        ("/v1/models".into(), format!("{own}Host: evil.example\r\n"), 400),
        ("/v1/models".into(), format!("Host: evil.example\r\n{own}"), 400),
        ("/v1/models".into(), format!("{own}{own}"), 400),
        ("/v1/models".into(), format!("{own}Origin: http://a\r\nOrigin: http://a\r\n"), 400),
        ("/v1/models".into(), format!("{own}Authorization: Bearer x\r\nAuthorization: Bearer y\r\n"), 400),
        (format!("http://{address}/v1/models"), own.clone(), 200),
        ("http://evil.example/v1/models".into(), own.clone(), 400),
        (format!("http://evil.example@{address}/v1/models"), own.clone(), 400),
        (format!("http://{address}/v1/models"), "Host: evil.example\r\n".into(), 400),
    ] {
        for answer in [at_port(&target, &lines), at_socket(&target, &lines)] {
            assert_eq!(answer.status, wanted, "{target} {lines}: {}", answer.text());
            assert!(wanted == 200 || answer.json()["error"]["message"].is_string());
        }
    }
}

/// A compressed body was read as JSON, and refused as if its text were wrong.
#[test]
fn an_encoded_body_is_refused_for_that() {
    let daemon = Daemon::start(&[]);
    let ask = |path: &str, lines: &str| {
        let body = r#"{"content": "x"}"#;
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        daemon.raw(format!("{head}{lines}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes())
    };
    for plain in ["", "Content-Encoding: identity\r\n", "Content-Encoding: Identity ,\r\n", "Content-Encoding:\r\n"] {
        let answer = ask("/tokenize", plain);
        assert_eq!(answer.status, 200, "{plain}: {}", answer.text());
    }
    for (encoded, named) in [
        ("Content-Encoding: gzip\r\n", "'gzip'"),
        ("content-encoding: identity, BR\r\n", "'BR'"),
        ("Content-Encoding: identity\r\nContent-Encoding: zstd\r\n", "'zstd'"),
    ] {
        for path in [
            "/tokenize",
            "/detokenize",
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/embeddings",
            "/v1/x/models/load",
        ] {
            let answer = ask(path, encoded);
            assert_eq!(answer.status, 415, "{path} {encoded}: {}", answer.text());
            assert!(
                answer.text().contains(named) && answer.headers.contains("accept-encoding: identity"),
                "{}",
                answer.text()
            );
        }
    }
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
