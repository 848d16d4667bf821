//! The page at `/ui`: who gets it, and that nothing of anybody else's gets into it. What it looks like is `tools/check_pages.py`.

use crate::daemon::{Answer, Daemon, PATIENCE, read_all};
use std::io::Write;
use std::net::TcpStream;

const DEVICE: [&str; 6] = ["--device", "virtual", "--ffn-share", "0.5", "--machine", "demo-pc"];

/// user:0123456789abcdefghij and the like, as a browser sends it.
fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = |three: &[u8]| {
        let bits = (0..3).fold(0u32, |bits, i| bits << 8 | u32::from(three.get(i).copied().unwrap_or(0)));
        let digit = |i: usize| match i <= three.len() {
            true => DIGITS[(bits >> (18 - 6 * i) & 63) as usize] as char,
            false => '=',
        };
        (0..4).map(digit).collect::<String>()
    };
    text.as_bytes().chunks(3).map(digits).collect()
}

fn ask(address: &str, line: &str, headers: &str, body: &str) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    let head =
        format!("{line} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n");
    write!(stream, "{head}{body}").unwrap();
    read_all(&mut stream)
}

#[test]
fn the_page_is_there_only_if_it_was_asked_for() {
    let off = Daemon::start(&[]);
    for path in ["/ui", "/ui/state", "/ui/script.js"] {
        assert_eq!(off.call("GET", path, "").status, 404, "{path}");
    }
    assert_eq!(off.call("PUT", "/ui/state", "{}").status, 404);
    drop(off);
    let on = Daemon::start(&["--ui"]);
    let page = on.call("GET", "/ui", "");
    assert!(page.status == 200 && page.text().contains("/ui/script.js"), "{}", page.text());
    assert!(page.headers.contains("content-type: text/html"), "{}", page.headers);
    for told in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "nosniff"] {
        assert!(page.headers.contains(told), "{told}: {}", page.headers);
    }
    for part in ["script.js", "style.css"] {
        let answer = on.call("GET", &format!("/ui/{part}"), "");
        assert!(answer.status == 200 && answer.headers.contains("default-src 'none'"), "{part}: {}", answer.headers);
    }
    for nothing in ["/ui/../etc/passwd", "/ui/nothing", "/ui/%ff"] {
        let answer = on.call("GET", nothing, "");
        assert!(answer.status == 404 && answer.headers.contains("application/json"), "{nothing}: {}", answer.headers);
    }
    let state = on.get("/ui/state");
    assert!(state["state"] == "ready" && state["may_steer"] == true && state["device"].is_null(), "{state}");
}

/// The port is open to every program of the machine and every page of its browsers.
#[test]
fn nobody_gets_in_who_may_not_open_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo", "--ui", "--listen", "127.0.0.1:0"], &[]);
    let (address, token) = daemon.port();
    daemon.until("dynamicinfer_model_loaded", 1.0);
    let basic = |password: &str| format!("Authorization: Basic {}\r\n", base64(&format!("me:{password}")));
    let right = basic(&token);
    for path in ["/ui", "/ui/state", "/ui/script.js", "/ui/style.css", "/ui/nothing"] {
        for headers in [String::new(), basic("0123456789abcdefghijklmnopqrstuv"), basic(""), basic(&token[1..])] {
            let answer = ask(&address, &format!("GET {path}"), &headers, "");
            assert_eq!(answer.status, 401, "{path}: {}", answer.text());
            assert!(answer.headers.contains("www-authenticate: basic"), "a browser asks its user: {}", answer.headers);
            assert!(!answer.text().contains("<h1"), "nothing of the page");
        }
    }
    assert_eq!(ask(&address, "GET /ui", &right, "").status, 200);
    // What a browser sends by itself opens the page alone.
    for line in ["GET /v1/models", "GET /v1/x/ps", "GET /metrics", "POST /v1/completions", "GET /uis"] {
        assert_eq!(ask(&address, line, &right, "").status, 401, "{line}");
    }
    // Another page in the same browser.
    let stranger = "Origin: http://evil.example\r\n";
    let (mark, budget) = ("x-dynamicinfer-ui: 1\r\n", r#"{"vram_budget_bytes": 1}"#);
    for (line, headers, body) in [
        ("GET /ui/state", stranger.to_owned(), ""),
        ("PUT /ui/state", format!("{stranger}{mark}"), budget),
        ("PUT /ui/state", String::new(), budget),
        ("PUT /ui/state", format!("Origin: http://{address}\r\n"), budget),
        ("OPTIONS /ui/state", format!("{stranger}Access-Control-Request-Method: PUT\r\n"), ""),
    ] {
        let answer = ask(&address, line, &format!("{right}{headers}"), body);
        assert_eq!(answer.status, 403, "{line} {headers}: {}", answer.text());
    }
    // The page itself: it may look, and the port does not steer unless the settings say so.
    let own = format!("{right}{mark}Origin: http://{address}\r\n");
    let state = ask(&address, "GET /ui/state", &own, "").json();
    assert!(state["state"] == "ready" && state["may_steer"] == false, "{state}");
    let refused = ask(&address, "PUT /ui/state", &own, budget);
    assert!(refused.status == 403 && refused.text().contains("serve.steering"), "{}", refused.text());
}

#[test]
fn the_budget_changes_from_the_page_where_the_port_may_steer() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = [&["serve", "demo", "--ui", "--listen", "127.0.0.1:0"][..], &DEVICE].concat();
    let mut daemon = Daemon::spawn(dir.path(), &arguments, &[("DYNAMICINFER_SERVE_STEERING", "all")]);
    let (address, token) = daemon.port();
    let own = format!(
        "Authorization: Basic {}\r\nx-dynamicinfer-ui: 1\r\nOrigin: http://{address}\r\n",
        base64(&format!("x:{token}"))
    );
    daemon.until("dynamicinfer_model_loaded", 1.0);
    assert_eq!(daemon.call("POST", "/v1/completions", r#"{"prompt": "Once", "max_tokens": 8}"#).status, 200);
    let state = ask(&address, "GET /ui/state", &own, "").json();
    assert!(state["may_steer"] == true && state["generated_tokens"].as_u64() > Some(0), "{state}");
    let less = state["budget_bytes"].as_u64().unwrap() - 1_000_000;
    let changed = ask(&address, "PUT /ui/state", &own, &format!("{{\"vram_budget_bytes\": {less}}}"));
    assert!(changed.status == 200 && changed.json()["vram_budget_bytes"] == less, "{}", changed.text());
    assert_eq!(daemon.get("/v1/x/budget")["vram_budget_bytes"], less);
    let small = ask(&address, "PUT /ui/state", &own, r#"{"vram_budget_bytes": 1}"#);
    assert!(small.status == 400 && small.text().contains("below"), "{}", small.text());
}

/// The page's script writes text only, so a name stays one; here that the daemon hands it over as JSON and in no page.
#[test]
fn a_hostile_name_is_no_markup() {
    let name = "<img src=x onerror=alert(1)>\"'</script>";
    let daemon = Daemon::start(&["--ui", "--name", name]);
    assert_eq!(daemon.get("/ui/state")["model"], name);
    for path in ["/ui", "/ui/script.js"] {
        assert!(!daemon.call("GET", path, "").text().contains("onerror"), "{path}");
    }
}
