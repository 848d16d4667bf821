//! The page at `/`: who gets it, and that nothing of anybody else's gets into it. What it looks like is `tools/check_pages.py`.

use crate::daemon::{Answer, Daemon, PATIENCE, read_all};
use std::io::Write;
use std::net::TcpStream;

const DEVICE: [&str; 6] = ["--device", "virtual", "--ffn-share", "0.5", "--machine", "demo-pc"];

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
fn the_page_is_there_unless_it_was_turned_off() {
    let off = Daemon::start(&["--no-ui"]);
    for path in ["/", "/ui", "/ui/state", "/ui/chat.js"] {
        assert_eq!(off.call("GET", path, "").status, 404, "{path}");
    }
    drop(off);
    let on = Daemon::start(&[]);
    let page = on.call("GET", "/", "");
    assert!(page.status == 200 && page.text().contains("/ui/chat.js"), "{}", page.text());
    assert!(page.headers.contains("content-type: text/html"), "{}", page.headers);
    for told in ["default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "trusted-types 'none'", "nosniff"]
    {
        assert!(page.headers.contains(told), "{told}: {}", page.headers);
    }
    let moved = on.call("GET", "/ui", "");
    assert!(moved.status == 308 && moved.headers.contains("location: /"), "{}", moved.headers);
    for part in ["chat.js", "daemon.js", "markdown.js", "memory.js", "style.css", "icon.svg"] {
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
fn nobody_gets_more_than_the_page_itself_who_has_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo", "--listen", "127.0.0.1:0"], &[]);
    let (address, token) = daemon.port();
    let said = daemon.wait_for("chat in a browser");
    assert!(said.contains(&format!("http://{address}/")) && !said.contains(&token), "a pipe gets no token: {said}");
    daemon.until("dynamicinfer_model_loaded", 1.0);
    let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let right = bearer(&token);
    for path in ["/", "/ui/chat.js", "/ui/style.css"] {
        let page = ask(&address, &format!("GET {path}"), "", "");
        assert!(page.status == 200 && !page.text().contains(&token), "{path}");
        assert_eq!(ask(&address, &format!("POST {path}"), "", "").status, 401, "{path}");
    }
    for headers in [
        String::new(),
        bearer("0123456789abcdefghijklmnopqrstuv"),
        bearer(&token[1..]),
        "Authorization: Basic bTp4\r\n".into(),
    ] {
        for path in ["/ui/state", "/ui/nothing", "/v1/models", "/v1/x/cache"] {
            let answer = ask(&address, &format!("GET {path}"), &headers, "");
            assert!(
                answer.status == 401 && answer.headers.contains("www-authenticate: bearer"),
                "{path}: {}",
                answer.text()
            );
        }
    }
    // Another page in the same browser, with the token.
    let (stranger, budget) = ("Origin: http://evil.example\r\n", r#"{"vram_budget_bytes": 1}"#);
    for (line, body) in [
        ("GET /ui/state", ""),
        ("POST /v1/completions", r#"{"prompt": "x", "max_tokens": 1}"#),
        ("PUT /v1/x/budget", budget),
    ] {
        let answer = ask(&address, line, &format!("{right}{stranger}"), body);
        assert_eq!(answer.status, 403, "{line}: {}", answer.text());
    }
    // The page itself: it may ask, and the port does not steer unless the settings say so.
    let own = format!("{right}Origin: http://{address}\r\n");
    let state = ask(&address, "GET /ui/state", &own, "").json();
    assert!(state["state"] == "ready" && state["may_steer"] == false, "{state}");
    assert_eq!(ask(&address, "POST /v1/completions", &own, r#"{"prompt": "x", "max_tokens": 1}"#).status, 200);
    let refused = ask(&address, "PUT /v1/x/budget", &own, budget);
    assert!(refused.status == 403 && refused.text().contains("serve.steering"), "{}", refused.text());
}

#[test]
fn the_budget_changes_from_the_page_where_the_port_may_steer() {
    let dir = tempfile::tempdir().unwrap();
    let arguments = [&["serve", "demo", "--listen", "127.0.0.1:0"][..], &DEVICE].concat();
    let mut daemon = Daemon::spawn(dir.path(), &arguments, &[("DYNAMICINFER_SERVE_STEERING", "all")]);
    let (address, token) = daemon.port();
    let own = format!("Authorization: Bearer {token}\r\nOrigin: http://{address}\r\n");
    daemon.until("dynamicinfer_model_loaded", 1.0);
    assert_eq!(daemon.call("POST", "/v1/completions", r#"{"prompt": "Once", "max_tokens": 8}"#).status, 200);
    let state = ask(&address, "GET /ui/state", &own, "").json();
    assert!(state["may_steer"] == true && state["generated_tokens"].as_u64() > Some(0), "{state}");
    let less = state["budget_bytes"].as_u64().unwrap() - 1_000_000;
    let changed = ask(&address, "PUT /v1/x/budget", &own, &format!("{{\"vram_budget_bytes\": {less}}}"));
    assert!(changed.status == 200 && changed.json()["vram_budget_bytes"] == less, "{}", changed.text());
    assert_eq!(ask(&address, "GET /ui/state", &own, "").json()["budget_bytes"], less);
}

/// The page's scripts write text only, so a name stays one; here that the daemon hands it over as JSON and in no page.
#[test]
fn a_hostile_name_is_no_markup() {
    let name = "<img src=x onerror=alert(1)>\"'</script>";
    let daemon = Daemon::start(&["--name", name]);
    assert_eq!(daemon.get("/ui/state")["model"], name);
    for path in ["/", "/ui/chat.js"] {
        assert!(!daemon.call("GET", path, "").text().contains("onerror"), "{path}");
    }
}

/// Names of the network and its addresses are this machine only where the settings let others in, and those are told that nothing is encrypted.
#[test]
fn other_machines_reach_the_port_after_an_explicit_setting_alone() {
    let dir = tempfile::tempdir().unwrap();
    let lan = [("DYNAMICINFER_SERVE_LAN", "true")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo", "--listen", "0.0.0.0:0"], &lan);
    let (at, token) = daemon.port();
    assert!(daemon.wait_for("warning").contains("TLS"));
    let port = at.rsplit_once(':').unwrap().1;
    let status = |host: &str, headers: &str| {
        let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        write!(stream, "GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n").unwrap();
        read_all(&mut stream).status
    };
    let right = format!("Authorization: Bearer {token}\r\n");
    for host in [at.as_str(), "192.0.2.7:8093", "[2001:db8::1]:8093", "localhost"] {
        assert_eq!((status(host, &right), status(host, "")), (200, 401), "{host}");
    }
    assert_eq!(status("evil.example", &right), 403);
    drop(daemon);
    let refused = crate::daemon::command(dir.path(), &["serve", "--listen", "0.0.0.0:0"]).output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && said.contains("serve.lan = true"), "{said}");
}
