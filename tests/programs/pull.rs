//! `pull` against a local server that speaks the hub's protocol: what is fetched, checked, refused and gone on with.

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What a server does with the bytes of large files.
#[derive(Clone, Default)]
struct Manner {
    /// Connections that break after so many bytes of a file, before one that does not.
    breaks: usize,
    after: usize,
    /// The last of these stays open instead of breaking.
    hangs: bool,
    /// Another byte stands in the middle of each file.
    lies: bool,
    /// The same of small files.
    lies_of_small: bool,
    /// More bytes come than the listing says.
    longer: bool,
    /// Every answer is the whole file, whatever part of it was asked for.
    whole: bool,
    /// Every request for a part of a file is answered 416.
    no_parts: bool,
    /// Status of every answer, instead of the right one.
    status: u16,
    /// Headers of every answer with a file, and the address that large files come from; instead of the right ones.
    headers: &'static str,
    sent_to: Option<&'static str>,
}

/// The hub with one model, `owner/model`. Files of 64 KiB and more are large: they have a SHA-256 and come from another address.
struct Hub {
    endpoint: String,
    /// The address and the first byte of each request for bytes of a large file.
    asked: Arc<Mutex<Vec<(String, usize)>>>,
    /// The address of each request, and whether it carries the user's token.
    tokens: Arc<Mutex<Vec<(String, bool)>>>,
    /// Tells that a connection hangs now.
    hanging: Receiver<()>,
}

struct Server {
    address: String,
    files: Vec<(String, Vec<u8>)>,
    manner: Manner,
    asked: Arc<Mutex<Vec<(String, usize)>>>,
    tokens: Arc<Mutex<Vec<(String, bool)>>>,
    hanging: Sender<()>,
    /// Connections that stay open until the test ends.
    held: Vec<TcpStream>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn is_large(bytes: &[u8]) -> bool {
    bytes.len() >= 64 << 10
}

/// What git calls a file.
fn git(bytes: &[u8]) -> String {
    hex(&Sha1::new().chain_update(format!("blob {}\0", bytes.len())).chain_update(bytes).finalize())
}

/// What a file is called in `blobs/`.
fn blob(bytes: &[u8]) -> String {
    if is_large(bytes) { sha256(bytes) } else { git(bytes) }
}

impl Hub {
    fn with(files: &[(&str, Vec<u8>)], manner: Manner) -> Hub {
        // On every local address: another of them is another machine to the program.
        let listener = TcpListener::bind("0.0.0.0:0").unwrap();
        let address = format!("127.0.0.1:{}", listener.local_addr().unwrap().port());
        let (asked, tokens) = (Arc::default(), Arc::default());
        let (hanging, hangs) = channel();
        let mut server = Server {
            address: address.clone(),
            files: files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone())).collect(),
            manner,
            asked: Arc::clone(&asked),
            tokens: Arc::clone(&tokens),
            hanging,
            held: Vec::new(),
        };
        // Ends with the test program: it waits for who may still come.
        std::thread::spawn(move || listener.incoming().map_while(Result::ok).for_each(|stream| server.answer(stream)));
        Hub { endpoint: format!("http://{address}"), asked, tokens, hanging: hangs }
    }

    /// First bytes of the requests for large files so far.
    fn starts(&self) -> Vec<usize> {
        self.asked.lock().unwrap().iter().map(|(_, start)| *start).collect()
    }
}

impl Server {
    /// One request of a connection, which then ends.
    fn answer(&mut self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(first) = lines.next() else { return };
        let head: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
        let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
        let range = head.iter().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("range")
                .then(|| value.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok())?
        });
        let token = head.iter().any(|line| line.eq_ignore_ascii_case("authorization: bearer secret"));
        self.tokens.lock().unwrap().push((path.clone(), token));
        if self.manner.status != 0 {
            return reply(&mut stream, &format!("{} No", self.manner.status), "", b"");
        }
        if path.starts_with("/api/models/owner/model/revision/main") {
            let page = self.listing().to_string();
            return reply(&mut stream, "200 OK", "Content-Type: application/json\r\n", page.as_bytes());
        }
        let found = self.files.iter().find(|(name, bytes)| {
            path == format!("/owner/model/resolve/{COMMIT}/{name}") || path == format!("/cdn/{}", blob(bytes))
        });
        let Some((_, bytes)) = found.cloned() else { return reply(&mut stream, "404 Not Found", "", b"") };
        let said = match self.manner.headers {
            "" => format!("ETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\n", blob(&bytes)),
            other => other.to_owned(),
        };
        if is_large(&bytes) && !path.starts_with("/cdn/") {
            let port = self.address.rsplit(':').next().unwrap();
            let to = match self.manner.sent_to.unwrap_or("127.0.0.1") {
                "nowhere" => String::new(),
                host if host.contains(':') => format!("Location: http://{host}/cdn/{}\r\n", blob(&bytes)),
                host => format!("Location: http://{host}:{port}/cdn/{}\r\n", blob(&bytes)),
            };
            return reply(&mut stream, "302 Found", &(said + &to), b"");
        }
        self.send(stream, &path, bytes, range.filter(|_| !self.manner.whole), &said);
    }

    fn send(&mut self, mut stream: TcpStream, path: &str, mut bytes: Vec<u8>, range: Option<usize>, said: &str) {
        let (all, start, large) = (bytes.len(), range.unwrap_or(0), is_large(&bytes));
        if start > 0 && (start >= all || self.manner.no_parts) {
            return reply(&mut stream, "416 Range Not Satisfiable", &format!("Content-Range: bytes */{all}\r\n"), b"");
        }
        let (status, said) = match range {
            Some(_) => ("206 Partial Content", format!("{said}Content-Range: bytes {start}-{}/{all}\r\n", all - 1)),
            None => ("200 OK", said.to_owned()),
        };
        if large {
            self.asked.lock().unwrap().push((path.to_owned(), start));
        }
        if self.manner.lies && large || self.manner.lies_of_small && !large {
            bytes[all / 2] ^= 1;
        }
        if self.manner.longer && large {
            bytes.resize(all + (4 << 20), 7);
        }
        if self.manner.breaks == 0 || !large {
            return reply(&mut stream, status, &said, &bytes[start..]);
        }
        self.manner.breaks -= 1;
        let length = bytes.len() - start;
        let head = format!("HTTP/1.1 {status}\r\n{said}Content-Length: {length}\r\nConnection: close\r\n\r\n");
        let part = &bytes[start..start + self.manner.after.min(length - 1)];
        // Who has gone does not read it.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(part));
        if self.manner.hangs && self.manner.breaks == 0 {
            self.held.push(stream);
            let _ = self.hanging.send(());
        }
    }

    /// What the hub says of the model's files.
    fn listing(&self) -> serde_json::Value {
        let sibling = |(name, bytes): &(String, Vec<u8>)| {
            match is_large(bytes) {
                // Git has a pointer in place of a large file.
                true => json!({
                    "rfilename": name, "size": bytes.len(), "blobId": git(b"a pointer"),
                    "lfs": { "sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 131 },
                }),
                false => json!({ "rfilename": name, "size": bytes.len(), "blobId": git(bytes) }),
            }
        };
        json!({ "id": "owner/model", "sha": COMMIT, "siblings": self.files.iter().map(sibling).collect::<Vec<_>>() })
    }
}

fn reply(stream: &mut TcpStream, status: &str, head: &str, body: &[u8]) {
    let head = format!("HTTP/1.1 {status}\r\n{head}Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
}

/// The program in a home of its own.
fn command(home: &Path, endpoint: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
    command.args(args).current_dir(home).env_clear().env("PATH", "/usr/bin:/bin").env("HOME", home);
    command.env("HF_ENDPOINT", endpoint).stdin(Stdio::null());
    command
}

fn run(home: &Path, endpoint: &str, args: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command(home, endpoint, args).output().unwrap();
    let (out, err) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    (status.code().unwrap(), out, err)
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/tests/fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// A model as a directory, with files that are none of it.
fn relullama() -> Vec<(&'static str, Vec<u8>)> {
    let names = ["config.json", "model.safetensors", "tokenizer.json"];
    let files = names.map(|name| (name, fixture(&format!("relullama/{name}"))));
    let others = [("README.md", b"# Model".to_vec()), ("pytorch_model.bin", vec![7; 100_000])];
    files.into_iter().chain(others).collect()
}

fn folder(home: &Path) -> PathBuf {
    home.join(".cache/huggingface/hub/models--owner--model")
}

const NOBODY: &str = "http://127.0.0.1:1";

#[test]
fn a_model_is_fetched_once_and_then_runs_by_its_name_without_a_network() {
    let home = tempfile::tempdir().unwrap();
    let (home, files) = (home.path(), relullama());
    let hub = Hub::with(&files, Manner::default());
    let (code, out, err) = run(home, &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 0, "{err}");
    // What comes is announced before it comes, and its place is the answer.
    assert!(err.lines().next().unwrap().starts_with("owner/model: 3 files, 441."), "{err}");
    let snapshot = folder(home).join("snapshots").join(COMMIT);
    assert_eq!(out.trim(), snapshot.to_str().unwrap());
    // As huggingface_hub keeps it: other tools find it, too.
    assert_eq!(std::fs::read_to_string(folder(home).join("refs/main")).unwrap(), COMMIT);
    for (name, bytes) in &files[..3] {
        assert_eq!(std::fs::read(snapshot.join(name)).unwrap(), *bytes, "{name}");
        let link = std::fs::read_link(snapshot.join(name)).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(blob(bytes)), "{name}");
    }
    assert!(!snapshot.join("pytorch_model.bin").exists(), "a file that no verb reads");
    // Nothing but the files: neither locks nor beginnings.
    let mut blobs: Vec<String> = files[..3].iter().map(|(_, bytes)| blob(bytes)).collect();
    blobs.sort();
    assert_eq!(all_below(&folder(home).join("blobs")), blobs.iter().map(PathBuf::from).collect::<Vec<_>>());
    assert_eq!(hub.starts(), [0]);
    // Again: nothing is fetched.
    assert_eq!(run(home, &hub.endpoint, &["pull", "owner/model"]).0, 0);
    assert_eq!(hub.starts(), [0]);
    let fixture = format!("{}/tests/fixtures/models/relullama", env!("CARGO_MANIFEST_DIR"));
    let text = |model: &str| run(home, NOBODY, &["run", model, "Once", "-n", "8", "--temp", "0"]);
    let (code, said, err) = text("owner/model");
    assert_eq!(code, 0, "{err}");
    assert_eq!(said, text(&fixture).1);
    // Its packed copy is called after it, not after a checksum.
    let stores: Vec<_> = std::fs::read_dir(home.join(".cache/dynamicinfer/models")).unwrap().flatten().collect();
    assert!(stores.iter().any(|store| store.file_name().to_string_lossy().starts_with("model-")), "{stores:?}");
}

#[test]
fn a_connection_that_breaks_is_gone_on_with_where_it_broke() {
    let home = tempfile::tempdir().unwrap();
    let files = relullama();
    let hub = Hub::with(&files, Manner { breaks: 3, after: 100_000, ..Manner::default() });
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(hub.starts(), [0, 100_000, 200_000, 300_000]);
    let blob = folder(home.path()).join("blobs").join(blob(&files[1].1));
    assert!(std::fs::read(blob).unwrap() == files[1].1, "no byte came twice");
}

/// A connection that brings nothing more is not tried for ever; the next command goes on.
#[test]
fn a_pull_that_is_given_up_goes_on_the_next_time() {
    let home = tempfile::tempdir().unwrap();
    let files = relullama();
    let hub = Hub::with(&files, Manner { breaks: 2, after: 0, ..Manner::default() });
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!((code, hub.starts()), (1, vec![0]), "{err}");
    let broken = Hub::with(&files, Manner { breaks: 1, after: 70_000, hangs: true, ..Manner::default() });
    let mut pull = command(home.path(), &broken.endpoint, &["pull", "owner/model"]);
    let pull = pull.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    broken.hanging.recv().unwrap();
    kill_process(Pid::from_child(&pull), Signal::INT).unwrap();
    let done = pull.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(130), "{said}");
    assert!(said.contains("the fetched part is kept"), "{said}");
    // How much of what was sent had come is left to chance; what came counts.
    let whole = folder(home.path()).join("blobs").join(blob(&files[1].1));
    let part = whole.with_extension("part");
    let named = ["snapshots/".to_owned() + COMMIT + "/model.safetensors", "refs/main".into()];
    assert!(!whole.exists() && named.iter().all(|name| folder(home.path()).join(name).symlink_metadata().is_err()));
    let came = std::fs::metadata(part).map_or(0, |meta| meta.len() as usize);
    let whole = Hub::with(&files, Manner::default());
    let (code, _, err) = run(home.path(), &whole.endpoint, &["pull", "owner/model"]);
    assert_eq!((code, whole.starts()), (0, vec![came]), "{err}");
}

/// All bytes were there under the name of an unfinished file: there are none behind them to ask for.
#[test]
fn a_file_that_came_whole_and_did_not_get_its_name_gets_it() {
    let home = tempfile::tempdir().unwrap();
    let files = relullama();
    let blobs = folder(home.path()).join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    for more in [&b""[..], b"more than the hub has"] {
        let part = blobs.join(blob(&files[1].1)).with_extension("part");
        std::fs::write(&part, [&files[1].1, more].concat()).unwrap();
        let hub = Hub::with(&files, Manner::default());
        let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
        assert_eq!(code, 0, "{err}");
        assert!(!part.exists());
        std::fs::remove_file(blobs.join(blob(&files[1].1))).unwrap();
    }
}

#[test]
fn a_file_with_another_checksum_is_refused_and_not_kept() {
    let home = tempfile::tempdir().unwrap();
    let files = relullama();
    let hub = Hub::with(&files, Manner { lies: true, ..Manner::default() });
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 5, "{err}");
    let sum = sha256(&files[1].1);
    assert!(
        err.contains("model.safetensors: has the SHA-256 ") && err.contains(&sum) && err.contains("was removed"),
        "{err}"
    );
    let left = |name: &str| folder(home.path()).join(name).exists();
    assert!(!left(&format!("blobs/{sum}")) && !left(&format!("snapshots/{COMMIT}/model.safetensors")));
    assert_ne!(run(home.path(), NOBODY, &["run", "owner/model", "x"]).0, 0);
    // The right bytes then come whole.
    let hub = Hub::with(&files, Manner::default());
    assert_eq!(run(home.path(), &hub.endpoint, &["pull", "owner/model"]).0, 0);
    assert_eq!(hub.starts(), [0]);
    // And what is damaged on the disk is found by the next pull.
    let blob = folder(home.path()).join("blobs").join(&sum);
    let mut bytes = files[1].1.clone();
    bytes[1000] ^= 1;
    std::fs::write(&blob, bytes).unwrap();
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 5, "{err}");
    assert!(!blob.exists());
}

/// Of small files only the length was checked.
#[test]
fn a_small_file_that_is_not_gits_is_refused_and_not_kept() {
    let home = tempfile::tempdir().unwrap();
    let files = relullama();
    let hub = Hub::with(&files, Manner { lies_of_small: true, ..Manner::default() });
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 5, "{err}");
    let wanted = git(&files[0].1);
    assert!(err.contains("config.json: has git's hash ") && err.contains(&wanted), "{err}");
    let blobs = folder(home.path()).join("blobs");
    assert_eq!(all_below(&blobs), Vec::<PathBuf>::new(), "nothing of it is kept, nor a lock");
    let hub = Hub::with(&files, Manner::default());
    assert_eq!(run(home.path(), &hub.endpoint, &["pull", "owner/model"]).0, 0);
    // And what is damaged on the disk is found by the next pull.
    let mut bytes = files[0].1.clone();
    bytes[10] ^= 1;
    std::fs::write(blobs.join(&wanted), bytes).unwrap();
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert!(code == 5 && !blobs.join(&wanted).exists(), "{err}");
}

/// Who has a lock's name from before it was removed must not hold another lock than who comes later.
#[test]
fn a_file_that_another_program_fetches_is_left_to_it() {
    use rustix::fs::{FlockOperation, flock};
    let home = tempfile::tempdir().unwrap();
    let files = relullama();
    let hub = Hub::with(&files, Manner::default());
    let lock = folder(home.path()).join("blobs").join(blob(&files[1].1)).with_extension("lock");
    std::fs::create_dir_all(lock.parent().unwrap()).unwrap();
    let held = std::fs::File::create(&lock).unwrap();
    flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("model.safetensors is being fetched by another program"), "{err}");
    assert!(lock.exists(), "another's lock stays");
    drop(held);
    // One that a killed program has left is nobody's.
    assert_eq!(run(home.path(), &hub.endpoint, &["pull", "owner/model"]).0, 0);
    assert!(!lock.exists());
}

/// The length of what was too long counted as what had come, so a first connection that broke was the last.
#[test]
fn what_is_longer_than_the_file_is_no_beginning_of_it() {
    let home = tempfile::tempdir().unwrap();
    let files = relullama();
    let part = folder(home.path()).join("blobs").join(blob(&files[1].1)).with_extension("part");
    std::fs::create_dir_all(part.parent().unwrap()).unwrap();
    std::fs::write(&part, [&files[1].1, &b"more than the hub has"[..]].concat()).unwrap();
    let hub = Hub::with(&files, Manner { breaks: 1, after: 100_000, ..Manner::default() });
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!((code, hub.starts()), (0, vec![0, 100_000]), "{err}");
    let all = files[..3].iter().map(|(_, bytes)| bytes.len()).sum::<usize>() as f64 / 1024.0;
    assert!(err.contains(&format!("{all:.2} KiB to fetch into")), "all of it is announced: {err}");
}

#[test]
fn a_mirror_that_goes_on_behind_a_files_end_fills_no_disk() {
    let home = tempfile::tempdir().unwrap();
    let files = relullama();
    let hub = Hub::with(&files, Manner { longer: true, ..Manner::default() });
    let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!((code, hub.starts()), (5, vec![0]), "{err}");
    assert!(err.contains("model.safetensors: goes on behind the length that the hub's list gives"), "{err}");
    let blob = folder(home.path()).join("blobs").join(blob(&files[1].1));
    assert!(!blob.exists() && !blob.with_extension("part").exists());
    assert!(!folder(home.path()).join("refs/main").exists(), "the model is not here");
}

#[test]
fn a_mirror_that_cannot_go_on_sends_the_file_anew() {
    let files = relullama();
    // One sends the whole, whatever it was asked for; another refuses, and so did every later fetch.
    for manner in [Manner { whole: true, ..Manner::default() }, Manner { no_parts: true, ..Manner::default() }] {
        let home = tempfile::tempdir().unwrap();
        let blob = folder(home.path()).join("blobs").join(blob(&files[1].1));
        std::fs::create_dir_all(blob.parent().unwrap()).unwrap();
        std::fs::write(blob.with_extension("part"), &files[1].1[..1000]).unwrap();
        let hub = Hub::with(&files, manner);
        let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
        assert_eq!((code, hub.starts()), (0, vec![0]), "{err}");
        assert!(std::fs::read(blob).unwrap() == files[1].1);
    }
}

/// Every file and link below a folder, with the folder's name taken off.
fn all_below(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<PathBuf> = entries
        .flat_map(|path| match path.symlink_metadata().unwrap().is_dir() {
            true => {
                all_below(&path).into_iter().map(|below| Path::new(path.file_name().unwrap()).join(below)).collect()
            }
            false => vec![path.file_name().unwrap().into()],
        })
        .collect();
    found.sort();
    found
}

/// The names that a hub's headers give were once paths in the cache: with these a mirror could write where it liked.
#[test]
fn no_file_is_written_where_a_mirrors_headers_say() {
    let files = relullama();
    let written = |headers: &'static str| {
        let outer = tempfile::tempdir().unwrap();
        let home = outer.path().join("home");
        std::fs::create_dir(&home).unwrap();
        let hub = Hub::with(&files, Manner { headers, ..Manner::default() });
        let (code, _, err) = run(&home, &hub.endpoint, &["pull", "owner/model"]);
        assert_eq!(code, 0, "{err}");
        all_below(outer.path())
    };
    let right = written("");
    assert!(right.iter().any(|path| path.ends_with(format!("{COMMIT}/model.safetensors"))), "{right:?}");
    let absolute = std::env::temp_dir().join(format!("dynamicinfer-escaped-{}", std::process::id()));
    let at = absolute.display();
    let hostile: [String; 2] = [
        "ETag: \"../../../escaped\"\r\nX-Repo-Commit: ../../../escaped\r\n".into(),
        format!("ETag: \"{at}\"\r\nX-Linked-Etag: \"{at}\"\r\nX-Repo-Commit: {at}\r\n"),
    ];
    for headers in hostile {
        assert_eq!(written(headers.leak()), right);
    }
    for extension in ["", "part", "lock"] {
        assert!(!absolute.with_extension(extension).exists());
    }
}

#[test]
fn the_users_token_goes_to_no_other_machine() {
    let files = relullama();
    let pulled = |sent_to| {
        let home = tempfile::tempdir().unwrap();
        let hub = Hub::with(&files, Manner { sent_to: Some(sent_to), ..Manner::default() });
        let done = command(home.path(), &hub.endpoint, &["pull", "owner/model"]).env("HF_TOKEN", "secret").output();
        let done = done.unwrap();
        let tokens = hub.tokens.lock().unwrap().clone();
        (done.status.code().unwrap(), String::from_utf8(done.stderr).unwrap(), tokens)
    };
    let (code, err, tokens) = pulled("127.0.0.2");
    assert_eq!(code, 0, "{err}");
    assert!(tokens.iter().any(|(path, _)| path.starts_with("/cdn/")));
    for (path, token) in tokens {
        assert_eq!(token, !path.starts_with("/cdn/"), "{path}");
    }
    // Another port of the same machine is another program, which may be anybody's.
    let other = Hub::with(&files, Manner::default());
    let (code, err, tokens) = pulled(other.endpoint.strip_prefix("http://").unwrap().to_owned().leak());
    assert_eq!(code, 0, "{err}");
    assert!(tokens.iter().all(|(_, token)| *token), "{tokens:?}");
    let elsewhere = other.tokens.lock().unwrap().clone();
    assert!(!elsewhere.is_empty() && elsewhere.iter().all(|(_, token)| !*token), "{elsewhere:?}");
    let (code, err, _) = pulled("nowhere");
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("an answer that leads elsewhere is no address"), "{err}");
}

#[test]
fn a_password_in_the_hubs_address_is_never_shown() {
    let home = tempfile::tempdir().unwrap();
    for endpoint in
        ["http://user:hunter2@127.0.0.1:1", "http://user:hunter2@127.0.0.1:1/base/", "http://user:hunter 2@127.0.0.1:1"]
    {
        let (code, out, err) = run(home.path(), endpoint, &["pull", "owner/model"]);
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
        assert!(err.contains("http://127.0.0.1:1") && !err.contains("hunter"), "{err}");
    }
    // Of a hub that answers, and has no such model.
    let hub = Hub::with(&relullama(), Manner::default());
    let endpoint = hub.endpoint.replace("http://", "http://user:hunter2@");
    let (code, out, err) = run(home.path(), &endpoint, &["pull", "owner/none"]);
    assert!(code != 0 && !err.is_empty() && !out.contains("hunter") && !err.contains("hunter"), "{code} {out} {err}");
    let (code, out, err) = run(home.path(), &endpoint, &["pull", "owner/model"]);
    assert!(code == 0 && !out.contains("hunter") && !err.contains("hunter"), "{code} {out} {err}");
}

/// The cache is a folder that other programs write to, too. A link there led a fetch to another file of the user's, which was appended to or
/// overwritten; a pipe was waited for without end, and a device read without end.
#[test]
fn what_is_no_file_in_the_cache_is_neither_followed_nor_waited_for() {
    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    use std::os::unix::fs::symlink;
    let files = relullama();
    let weights = blob(&files[1].1);
    let foreign = ["link", "pipe", "socket", "device"];
    let places = ["part", "lock", "main"].into_iter().flat_map(|place| foreign.map(|kind| (place, kind)));
    // A commit's name of a gibibyte is not read whole either.
    for (place, kind) in places.chain([("main", "huge")]) {
        let home = tempfile::tempdir().unwrap();
        let victim = home.path().join("victim");
        std::fs::write(&victim, "dear").unwrap();
        let path = match place {
            "main" => folder(home.path()).join("refs/main"),
            extension => folder(home.path()).join("blobs").join(&weights).with_extension(extension),
        };
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let node = |of, device| mknodat(CWD, &path, of, Mode::RUSR | Mode::WUSR, device);
        match kind {
            "link" => symlink(&victim, &path).unwrap(),
            "pipe" => node(FileType::Fifo, 0).unwrap(),
            // What is read from it never ends. Only root may make one.
            "device" if node(FileType::CharacterDevice, makedev(1, 5)).is_ok() => {}
            "huge" => std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap(),
            _ => node(FileType::Socket, 0).unwrap(),
        }
        let hub = Hub::with(&files, Manner::default());
        // Without a network a model that is not whole is none; nothing hangs.
        assert_eq!(run(home.path(), NOBODY, &["show", "owner/model"]).0, 2);
        let (code, _, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "dear", "{place}");
        if place == "main" {
            assert_eq!(code, 0, "{err}");
            assert!(path.symlink_metadata().unwrap().is_file());
            continue;
        }
        assert_eq!(code, 5, "{err}");
        assert!(err.contains("not a regular file but a link, pipe or device: remove it, and pull again"), "{err}");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(run(home.path(), &hub.endpoint, &["pull", "owner/model"]).0, 0);
    }
}

#[test]
fn names_that_a_terminal_does_not_show_as_they_are_are_refused() {
    for name in ["m\u{202e}fugg.Q4_0.gguf", "m\u{1b}[2J.gguf", "model-\u{200b}1.safetensors"] {
        let home = tempfile::tempdir().unwrap();
        let hub = Hub::with(&[("config.json", b"{}".to_vec()), (name, vec![1])], Manner::default());
        let (code, out, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
        assert!(err.contains("has characters that a terminal does not show"), "{err}");
        assert!(!err.contains(['\u{202e}', '\u{1b}', '\u{200b}']), "{err}");
        assert!(!folder(home.path()).exists());
    }
}

#[test]
fn a_model_in_parts_is_fetched_whole_with_its_folder() {
    let part = |n: usize| (format!("Q4_0/m-Q4_0-0000{n}-of-00003.gguf"), vec![n as u8; 70_000 * n]);
    let parts: Vec<(String, Vec<u8>)> = (1..=3).map(part).collect();
    let mut files: Vec<(&str, Vec<u8>)> = parts.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    let others =
        [("F16/m-F16.gguf", vec![9; 500]), ("mmproj-m-F16.gguf", vec![8; 500]), ("imatrix.gguf", vec![7; 500])];
    files.extend(others.iter().map(|(name, bytes)| (*name, bytes.clone())));
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let snapshot = folder(home).join("snapshots").join(COMMIT);
    let hub = Hub::with(&files, Manner::default());
    for name in [
        "owner/model:Q4_0",
        "hf.co/owner/model:q4_0",
        "https://huggingface.co/owner/model/blob/main/Q4_0/m-Q4_0-00002-of-00003.gguf",
    ] {
        let (code, out, err) = run(home, &hub.endpoint, &["pull", name]);
        assert_eq!(code, 0, "{err}");
        assert_eq!(Path::new(out.trim()), snapshot.join(&parts[0].0));
        for (name, bytes) in &parts {
            assert_eq!(std::fs::read(snapshot.join(name)).unwrap(), *bytes, "{name}");
        }
        assert_eq!(hub.starts().len(), 3, "each part is fetched once");
    }
    // The type that was asked for, and not what lies beside a model.
    let (code, out, err) = run(home, &hub.endpoint, &["pull", "owner/model:F16"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(Path::new(out.trim()), snapshot.join("F16/m-F16.gguf"));
    assert!(!snapshot.join("mmproj-m-F16.gguf").exists() && !snapshot.join("imatrix.gguf").exists());
    // A repository that lacks a part says which.
    let hub = Hub::with(&[files[0].clone(), files[2].clone()], Manner::default());
    let (code, _, err) = run(home, &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains("has 2 of the 3 parts of 'Q4_0/m-Q4_0.gguf'; missing are Q4_0/m-Q4_0-00002-of-00003.gguf"),
        "{err}"
    );
}

#[test]
fn a_part_with_another_checksum_is_refused_by_name_and_not_kept() {
    for wrong in 0..3 {
        // Of a large file the server sends another byte.
        let size = |n: usize| if n == wrong { 70_000 } else { 7000 };
        let part = |n: usize| (format!("m-Q4_0-0000{}-of-00003.gguf", n + 1), vec![n as u8; size(n)]);
        let parts: [(String, Vec<u8>); 3] = std::array::from_fn(part);
        let files: Vec<(&str, Vec<u8>)> = parts.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
        let home = tempfile::tempdir().unwrap();
        let home = home.path();
        let hub = Hub::with(&files, Manner { lies: true, ..Manner::default() });
        let (code, out, err) = run(home, &hub.endpoint, &["pull", "owner/model"]);
        assert_eq!((code, out.as_str()), (5, ""), "{err}");
        let (name, bytes) = &parts[wrong];
        assert!(err.contains(&format!("{name}: has the SHA-256 ")) && err.contains(&sha256(bytes)), "{err}");
        // What came right before it is kept, and nothing is a model yet.
        let mut kept: Vec<PathBuf> = parts[..wrong].iter().map(|(_, bytes)| blob(bytes).into()).collect();
        kept.sort();
        assert_eq!(all_below(&folder(home).join("blobs")), kept);
        let snapshot = folder(home).join("snapshots").join(COMMIT);
        assert!(snapshot.join(name).symlink_metadata().is_err() && !folder(home).join("refs/main").exists());
        assert_eq!(run(home, NOBODY, &["show", "owner/model"]).0, 2);
        // The right bytes then come whole.
        let hub = Hub::with(&files, Manner::default());
        let (code, out, err) = run(home, &hub.endpoint, &["pull", "owner/model"]);
        assert_eq!((code, hub.starts()), (0, vec![0]), "{err}");
        assert_eq!(Path::new(out.trim()), snapshot.join(&parts[0].0));
        for (name, bytes) in &parts {
            assert_eq!(std::fs::read(snapshot.join(name)).unwrap(), *bytes, "{name}");
        }
    }
}

#[test]
fn of_several_gguf_files_one_is_named() {
    let home = tempfile::tempdir().unwrap();
    let (f32, q4) = (fixture("llama.gguf"), fixture("llama.q4_0.gguf"));
    let hub = Hub::with(&[("m.f32.gguf", f32.clone()), ("m.Q4_0.gguf", q4.clone())], Manner::default());
    // Without a name the type that most people take.
    let (code, out, err) = run(home.path(), &hub.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 0, "{err}");
    assert!(out.trim().ends_with("/m.Q4_0.gguf"), "{out}");
    let unknown = Hub::with(&[("large.gguf", f32), ("small.gguf", q4)], Manner::default());
    let (code, _, err) = run(home.path(), &unknown.endpoint, &["pull", "owner/model"]);
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("has several GGUF files; name one, owner/model:large.gguf"), "{err}");
    // Without its owner, too: no other model here is called so.
    for name in
        ["owner/model:q4_0", "owner/model:m.Q4_0.gguf", "owner/model", "model", "model:q4_0", "hf.co/owner/model"]
    {
        let (code, out, err) = run(home.path(), NOBODY, &["show", name, "--json"]);
        assert_eq!(code, 0, "{err}");
        assert!(out.contains("q4_0"), "{out}");
    }
    let (code, _, err) = run(home.path(), NOBODY, &["show", "owner/model:f32"]);
    assert_eq!(code, 2);
    assert!(err.contains("none of owner/model's files is called 'f32': m.Q4_0.gguf"), "{err}");
}

#[test]
fn what_cannot_be_fetched_is_said_with_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let says = |endpoint: &str, name: &str, code: i32, wanted: &str| {
        let (ended, out, err) = run(home, endpoint, &["pull", name]);
        assert_eq!((ended, out.as_str()), (code, ""), "{err}");
        assert!(err.contains(wanted), "no {wanted:?} in {err}");
    };
    says(NOBODY, "owner/model", 1, "cannot reach http://127.0.0.1:1: ");
    says(NOBODY, "owner/model", 1, "Without one, fetch the files elsewhere and give their directory or .gguf as MODEL");
    says(NOBODY, "demo", 2, "'demo' is not a name on the hub: give OWNER/MODEL");
    says(NOBODY, "../model", 2, "is not a name on the hub");
    let refuses = |status| Hub::with(&[], Manner { status, ..Manner::default() }).endpoint;
    says(&refuses(404), "owner/model", 1, "has no model owner/model");
    says(&refuses(401), "owner/model", 1, "set HF_TOKEN to your token, or run `hf auth login`");
    says(&refuses(503), "owner/model", 1, "answers status 503 for owner/model; try later");
    let pickled = Hub::with(&[("config.json", b"{}".to_vec()), ("pytorch_model.bin", vec![1])], Manner::default());
    says(&pickled.endpoint, "owner/model", 2, "has only PyTorch's pytorch_model.bin");
    let done = command(home, NOBODY, &["pull", "owner/model"]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("HF_HUB_OFFLINE is set"));
    // A name that was not fetched is no model, and says how it becomes one.
    let (code, _, err) = run(home, NOBODY, &["run", "owner/model", "x"]);
    assert_eq!(code, 2);
    assert!(err.contains("if the Hugging Face hub has it: dynamicinfer pull owner/model"), "{err}");
}
