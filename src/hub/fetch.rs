//! Fetches models from the hub. The only code that opens a connection to another machine. The cache is laid out as the hub's own tools
//! have it. A hub, or a mirror that stands for it, is not trusted: no path comes from a header, no answer is read beyond the length that
//! the listing gives, and bytes get a file's name only after their checksum was checked.

use super::choice::belongs;
use super::{Cache, Choice, Name, choose};
use crate::error::{Error, Result, excerpt, human_bytes, in_address, printable};
use crate::formats::open_regular;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

/// How long a machine may take to accept a connection, and after that to send its next bytes.
const SILENCE: Duration = Duration::from_secs(60);

/// Attempts at one file, as long as each brings something: a connection that breaks more often is not worth going on with now.
const ATTEMPTS: usize = 10;

/// Times that a lock's file may be removed by another program just before it is locked here: each time that program has ended its fetch.
const LOCK_ATTEMPTS: usize = 100;

/// Addresses that an answer may lead through: one for a repository that was renamed, and a few of a server of large files.
const MAX_REDIRECTS: usize = 10;

/// Bytes of a file's name with its folders, and words of it, beyond which it is none that a model has.
const MAX_NAME: usize = 1024;
const MAX_FOLDERS: usize = 4;

/// Bytes that are read between two looks at Ctrl-C.
const READ_AT_ONCE: usize = 1 << 20;

/// The hub, as the environment names it.
pub struct Hub {
    agent: Agent,
    endpoint: String,
    /// The endpoint as messages have it: without a password.
    shown: String,
    token: Option<String>,
    cache: Cache,
}

/// A file of a model on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    /// Its name in the repository.
    pub name: String,
    /// Its length, bytes.
    pub bytes: u64,
    /// By what it is known to be that file; also what its bytes are called in `blobs/`.
    pub sum: Sum,
}

/// A checksum, as lower-case hex digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sum {
    /// SHA-256 of the bytes, of a file that the hub keeps outside of git.
    Sha256(String),
    /// The SHA-1 by which git knows a file: of the word `blob`, the length and the bytes.
    Git(String),
}

impl Sum {
    /// The digits.
    pub fn digits(&self) -> &str {
        let (Sum::Sha256(digits) | Sum::Git(digits)) = self;
        digits
    }

    /// What it is called in a sentence.
    fn kind(&self) -> &'static str {
        match self {
            Sum::Sha256(_) => "the SHA-256",
            Sum::Git(_) => "git's hash",
        }
    }

    /// The checksum of the same kind that a file on this machine has, as digits.
    fn of(&self, path: &Path, step: Step<'_>) -> Result<String> {
        match self {
            Sum::Sha256(_) => digest(Sha256::new(), path, step),
            Sum::Git(_) => {
                let bytes = std::fs::symlink_metadata(path).map_err(Error::io("stat", path))?.len();
                digest(Sha1::new().chain_update(format!("blob {bytes}\0")), path, step)
            }
        }
    }
}

/// A file's lock, and with it the right to change what is kept of the file. Dropping it removes the lock's file.
pub struct Held {
    /// Locked for as long as it is open.
    _file: File,
    path: PathBuf,
}

impl Drop for Held {
    fn drop(&mut self) {
        // Still locked: a process that opened it before and locks it afterwards sees that it has no name any more.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// What a model consists of on the hub.
#[derive(Debug)]
pub struct Listing {
    /// Commit that its branch `main` points to.
    pub commit: String,
    /// The files to fetch.
    pub files: Vec<HubFile>,
}

/// Callback for progress: bytes done and all bytes. An error ends the work where that is possible.
pub type Step<'a> = &'a dyn Fn(u64, u64) -> Result<()>;

impl Hub {
    /// The hub at `endpoint` (`https://...`). `token` is that of a user, for models that are not open to all.
    pub fn new(endpoint: &str, cache: Cache, token: Option<String>) -> Hub {
        let agent = Agent::config_builder()
            // Large files come from other machines, and the token is for the hub alone: `get` follows by itself.
            .max_redirects(0)
            .timeout_connect(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .accept_encoding("identity")
            .user_agent(concat!("dynamicinfer/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        Hub { agent, shown: without_password(&endpoint), endpoint, token, cache }
    }

    /// The files that `name` means.
    ///
    /// # Errors
    /// [`Error::Failed`] where the hub cannot be reached or gives none, [`Error::Usage`] where the name fits none or several of them.
    pub fn list(&self, name: &Name) -> Result<Listing> {
        let path = format!("api/models/{}/revision/main?blobs=true", name.repository);
        let mut answer = self.get(&path, 0).map_err(|why| self.refused(name, &why))?;
        let page: serde_json::Value = answer.body_mut().read_json().map_err(|why| self.odd(&why.to_string()))?;
        let commit =
            page["sha"].as_str().filter(|sha| is_hex(sha, 40)).ok_or_else(|| self.odd("it names no commit"))?;
        let files: Vec<HubFile> = page["siblings"].as_array().into_iter().flatten().filter_map(hub_file).collect();
        let names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
        let odd = |name: &&String| name.chars().any(misleads) && (belongs(name) || name.ends_with(".gguf"));
        if let Some(name) = names.iter().find(odd) {
            let shown = name.escape_default();
            return Err(self.odd(&format!("its file '{shown}' has characters that a terminal does not show")));
        }
        let wanted = match choose(name, &names) {
            Ok(Choice::Directory(wanted) | Choice::Gguf(wanted)) => wanted,
            Err(Some(why)) => return Err(Error::Usage(why)),
            Err(None) => return Err(no_model(name, &names)),
        };
        Ok(Listing {
            commit: commit.to_owned(),
            files: files.into_iter().filter(|file| wanted.contains(&file.name)).collect(),
        })
    }

    /// Bytes of a file that are here already, whole or as the beginning that a broken fetch has left. What is longer than the file is
    /// neither.
    pub fn here(&self, name: &Name, file: &HubFile) -> u64 {
        let bytes = |path: PathBuf| length(&path).filter(|&bytes| bytes <= file.bytes).unwrap_or(0);
        match bytes(self.blob(name, file)) {
            whole if whole == file.bytes => whole,
            _ => bytes(self.part(name, file)),
        }
    }

    /// Fetches a file, or what is missing of it. It has no name yet: see [`Hub::keep`]. Other programs are kept from fetching it until the
    /// answer is dropped.
    ///
    /// # Errors
    /// [`Error::Failed`] where the hub cannot be reached, refuses, or breaks off again and again; what came is kept. [`Error::BadFile`]
    /// where it sends more than the file's length; nothing of that is kept.
    pub fn fetch(&self, name: &Name, listing: &Listing, file: &HubFile, step: Step<'_>) -> Result<Held> {
        let (held, part) = (self.lock(name, file)?, self.part(name, file));
        if length(&self.blob(name, file)) == Some(file.bytes) {
            return Ok(held);
        }
        let mut opened = open_ours(&part)?;
        if length(&part).is_some_and(|bytes| bytes > file.bytes) {
            // No beginning of this file: asked to go on behind its end, a hub refuses each time.
            opened.set_len(0).map_err(Error::io("cut", &part))?;
        }
        let mut had = length(&part).unwrap_or(0);
        for attempt in 1.. {
            let why = match self.download(name, listing, file, (&mut opened, &part), step) {
                Ok(()) => return Ok(held),
                Err(Stop::Here(why)) => return Err(why),
                Err(Stop::There(why)) => why,
            };
            let has = length(&part).unwrap_or(0);
            if has <= had || attempt == ATTEMPTS {
                return Err(self.broken(name, file, has, &why));
            }
            tracing::info!("{}: {why}; going on at byte {has}", file.name);
            had = has;
        }
        unreachable!("the loop ends with its last attempt")
    }

    /// Asks once for what is missing of a file and adds it to what has come.
    fn download(
        &self,
        name: &Name,
        listing: &Listing,
        file: &HubFile,
        (part, path): (&mut File, &Path),
        step: Step<'_>,
    ) -> Result<(), Stop> {
        let mut has = length(path).unwrap_or(0);
        if has == file.bytes {
            return Ok(());
        }
        let url = format!("{}/resolve/{}/{}", name.repository, listing.commit, in_address(&file.name));
        let answer = match self.get(&url, has) {
            // It gives no parts, or has none behind this one: the whole may still be had.
            Err(ureq::Error::StatusCode(416)) if has > 0 => self.get(&url, 0)?,
            answer => answer?,
        };
        if has == 0 || !goes_on(&answer, has) {
            if answer.status() != 200 {
                return Err(Stop::There(ureq::Error::StatusCode(answer.status().as_u16())));
            }
            part.set_len(0).map_err(Error::io("cut", path))?;
            has = 0;
        }
        let (mut body, mut piece) = (answer.into_body().into_reader(), vec![0; READ_AT_ONCE]);
        loop {
            let n = body.read(&mut piece).map_err(ureq::Error::from)?;
            if n == 0 {
                break;
            }
            has += n as u64;
            if has > file.bytes {
                return Err(Stop::Here(remove(
                    name,
                    file,
                    &[path],
                    "goes on behind the length that the hub's list gives",
                )));
            }
            part.write_all(&piece[..n]).map_err(Error::io("write", path))?;
            step(has, file.bytes)?;
        }
        match has == file.bytes {
            true => Ok(()),
            false => Err(Stop::There(std::io::Error::from(ErrorKind::UnexpectedEof).into())),
        }
    }

    /// Asks the hub for what is at `path`, from byte `start` on, wherever the hub says that this is. The token goes to the hub's own scheme,
    /// host and port only.
    fn get(&self, path: &str, start: u64) -> Result<Response<Body>, ureq::Error> {
        let mut at: Uri = format!("{}/{path}", self.endpoint).parse().map_err(|_| bad_address("the hub's address"))?;
        let hub = origin(&at);
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.agent.get(&at);
            if let Some(token) = self.token.as_ref().filter(|_| hub.is_some() && origin(&at) == hub) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if start > 0 {
                request = request.header("Range", format!("bytes={start}-"));
            }
            let answer = request.call()?;
            if !answer.status().is_redirection() {
                return Ok(answer);
            }
            let location = answer.headers().get("Location").and_then(|to| to.to_str().ok());
            at =
                location.and_then(|to| behind(&at, to)).ok_or_else(|| bad_address("an answer that leads elsewhere"))?;
        }
        Err(ureq::Error::TooManyRedirects)
    }

    /// Checks a fetched file against the hub's length and checksum, and then gives it its name in the cache. What does not agree is
    /// removed. `_held` is what [`Hub::fetch`] gave: no other process names or removes it meanwhile.
    ///
    /// # Errors
    /// [`Error::BadFile`] where it does not agree, [`Error::Io`] where it cannot be read or named, and what `step` returns.
    pub fn keep(&self, name: &Name, listing: &Listing, file: &HubFile, _held: &Held, step: Step<'_>) -> Result<()> {
        let (blob, part) = (self.blob(name, file), self.part(name, file));
        let link = self.cache.folder(name).join("snapshots").join(&listing.commit).join(&file.name);
        // Files may lie in folders of the repository.
        let blobs = "../".repeat(2 + file.name.matches('/').count()) + "blobs";
        let came = if length(&blob) == Some(file.bytes) { &blob } else { &part };
        let bytes = std::fs::symlink_metadata(came).map_err(Error::io("stat", came))?.len();
        let why = match bytes == file.bytes {
            false => Some(format!("has {bytes} bytes, and the hub says {}", file.bytes)),
            true => {
                let (sum, wanted) = (file.sum.of(came, step)?, file.sum.digits());
                (sum != wanted).then(|| format!("has {} {sum}, and the hub says {wanted}", file.sum.kind()))
            }
        };
        if let Some(why) = why {
            return Err(remove(name, file, &[came, &link], &why));
        }
        if came == &part {
            std::fs::rename(&part, &blob).map_err(Error::io("rename", &part))?;
        }
        point(&link, &Path::new(&blobs).join(file.sum.digits()))
    }

    /// Makes the listing's commit the one that the model's name means. For when all its files are kept.
    ///
    /// # Errors
    /// [`Error::Io`] where that cannot be written.
    pub fn finish(&self, name: &Name, listing: &Listing) -> Result<()> {
        let refs = self.cache.folder(name).join("refs");
        std::fs::create_dir_all(&refs).map_err(Error::io("create", &refs))?;
        // Whatever has the name now is replaced, not written to: it may be a link or a pipe.
        let (main, new) = (refs.join("main"), refs.join(format!(".main.{}", std::process::id())));
        let _ = std::fs::remove_file(&new);
        let written = File::options().write(true).create_new(true).open(&new);
        written.and_then(|mut file| file.write_all(listing.commit.as_bytes())).map_err(Error::io("write", &new))?;
        std::fs::rename(&new, &main).map_err(Error::io("rename", &main))
    }

    fn blob(&self, name: &Name, file: &HubFile) -> PathBuf {
        self.cache.folder(name).join("blobs").join(file.sum.digits())
    }

    /// Where the beginning of a file is kept, and the whole until it is checked.
    fn part(&self, name: &Name, file: &HubFile) -> PathBuf {
        self.blob(name, file).with_extension("part")
    }

    /// Keeps other programs from fetching the same file, until the answer is dropped.
    fn lock(&self, name: &Name, file: &HubFile) -> Result<Held> {
        use rustix::fs::{FlockOperation, flock};
        let path = self.blob(name, file).with_extension("lock");
        let blobs = path.parent().expect("it lies in blobs/");
        std::fs::create_dir_all(blobs).map_err(Error::io("create", blobs))?;
        for _ in 0..LOCK_ATTEMPTS {
            let opened = open_ours(&path)?;
            match flock(&opened, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_named(&opened, &path) => return Ok(Held { _file: opened, path }),
                // Its last owner removed it in between; later processes lock another file of that name.
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => break,
                Err(error) => return Err(Error::io("lock", &path)(error.into())),
            }
        }
        Err(Error::Failed(format!("{} is being fetched by another program; wait for it", printable(&file.name))))
    }

    fn odd(&self, why: &str) -> Error {
        let why = excerpt(why);
        Error::Failed(format!("{} does not answer as a Hugging Face hub: {why}; look at HF_ENDPOINT", self.shown))
    }

    /// Why the hub gave nothing, with what to do about it.
    fn refused(&self, name: &Name, why: &ureq::Error) -> Error {
        let (repository, endpoint) = (&name.repository, &self.shown);
        let status = if let ureq::Error::StatusCode(status) = why { Some(*status) } else { None };
        Error::Failed(match status {
            Some(404) => format!("{endpoint} has no model {repository}: look for its name there"),
            Some(status @ (401 | 403)) => format!(
                "{endpoint} denies access to {repository} (status {status}): the repository does not exist, or its licence must be \
                 accepted first; accept it on its page and set HF_TOKEN to your token, or run `hf auth login`"
            ),
            Some(status) => format!("{endpoint} answers status {status} for {repository}; try later"),
            None => format!(
                "cannot reach {endpoint}: {}. `pull` is the only verb that needs a network. Without one, fetch the files elsewhere and give \
                 their directory or .gguf as MODEL (docs/start.md)",
                excerpt(why)
            ),
        })
    }

    fn broken(&self, name: &Name, file: &HubFile, has: u64, why: &ureq::Error) -> Error {
        if has == 0 {
            return self.refused(name, why);
        }
        Error::Failed(format!(
            "{}: the connection broke after {} of {} ({}); what came is kept: pull it again, and it goes on there",
            printable(&file.name),
            human_bytes(has),
            human_bytes(file.bytes),
            excerpt(why)
        ))
    }
}

/// Why a download ended before its file did.
enum Stop {
    /// The hub's doing, or the network's: another attempt may go on.
    There(ureq::Error),
    /// What no other attempt changes.
    Here(Error),
}

impl From<ureq::Error> for Stop {
    fn from(why: ureq::Error) -> Stop {
        Stop::There(why)
    }
}

impl From<Error> for Stop {
    fn from(why: Error) -> Stop {
        Stop::Here(why)
    }
}

/// Whether an answer is the rest of a file from byte `start` on, not the whole.
fn goes_on(answer: &Response<Body>, start: u64) -> bool {
    let range = answer.headers().get("Content-Range").and_then(|range| range.to_str().ok());
    answer.status() == 206 && range.is_some_and(|range| range.starts_with(&format!("bytes {start}-")))
}

/// Whether an open file is the one that has this name now.
fn is_named(file: &File, path: &Path) -> bool {
    let identity = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
    match (file.metadata(), std::fs::symlink_metadata(path)) {
        (Ok(opened), Ok(named)) => identity(opened) == identity(named),
        _ => false,
    }
}

/// The length of a regular file; a link to one is none.
fn length(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().filter(|meta| meta.is_file()).map(|meta| meta.len())
}

/// Opens a file of the cache to add to it, or creates it. Links are not followed and pipes not waited for: a program that can write to the cache would
/// otherwise choose a file to be overwritten.
fn open_ours(path: &Path) -> Result<File> {
    use rustix::fs::OFlags;
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let opened = File::options().append(true).create(true).custom_flags(flags as i32).open(path);
    let regular = |file: &File| file.metadata().is_ok_and(|meta| meta.is_file());
    match opened {
        Ok(file) if regular(&file) => Ok(file),
        Err(why) if std::fs::symlink_metadata(path).map_or(true, |meta| meta.is_file()) => {
            Err(Error::io("open", path)(why))
        }
        _ => Err(Error::bad(path, "", "not a regular file but a link, pipe or device: remove it, and pull again")),
    }
}

/// Scheme, host and port of an address.
fn origin(at: &Uri) -> Option<(String, String, u16)> {
    let scheme = at.scheme_str()?.to_lowercase();
    let port = at.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
    Some((scheme, at.host()?.to_lowercase(), port))
}

/// The address that `location` means in an answer of `at`; `None` where it is none of the web's.
fn behind(at: &Uri, location: &str) -> Option<Uri> {
    let whole = match location.strip_prefix("//") {
        Some(_) => format!("{}:{location}", at.scheme_str()?),
        None if location.starts_with('/') => format!("{}://{}{location}", at.scheme_str()?, at.authority()?),
        None => location.to_owned(),
    };
    let uri: Uri = whole.parse().ok()?;
    (matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some()).then_some(uri)
}

fn bad_address(what: &str) -> ureq::Error {
    ureq::Error::Io(std::io::Error::new(ErrorKind::InvalidData, format!("{what} is no address")))
}

/// An address without the name and password that may stand in it.
fn without_password(endpoint: &str) -> String {
    let Some((scheme, rest)) = endpoint.split_once("://") else { return endpoint.to_owned() };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    match authority.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://{host}{path}"),
        None => endpoint.to_owned(),
    }
}

/// Removes what is not the hub's file; the error says why.
fn remove(name: &Name, file: &HubFile, wrong: &[&Path], why: &str) -> Error {
    for path in wrong {
        match std::fs::remove_file(path) {
            Err(why) if why.kind() != ErrorKind::NotFound => return Error::io("remove", path)(why),
            _ => (),
        }
    }
    let path = Path::new(&name.repository).join(&file.name);
    Error::bad(&path, "", format!("{why}: it is not the hub's file, and was removed; pull it again"))
}

/// Makes `link` lead to `target`, whatever it was before.
fn point(link: &Path, target: &Path) -> Result<()> {
    if std::fs::read_link(link).is_ok_and(|old| old == target) {
        return Ok(());
    }
    let snapshot = link.parent().expect("it lies in a snapshot");
    std::fs::create_dir_all(snapshot).map_err(Error::io("create", snapshot))?;
    if link.symlink_metadata().is_ok() {
        std::fs::remove_file(link).map_err(Error::io("remove", link))?;
    }
    std::os::unix::fs::symlink(target, link).map_err(Error::io("link", link))
}

fn no_model(name: &Name, files: &[String]) -> Error {
    let repository = &name.repository;
    let pickled = files.iter().find(|file| file.ends_with(".bin") || file.ends_with(".pt"));
    Error::Usage(match pickled {
        Some(file) => format!(
            "{repository} has only PyTorch's {}, which is a program as much as a file and is not read: look for a GGUF or safetensors \
             form of it, or convert it (in Python: model.save_pretrained(DIR, safe_serialization=True))",
            printable(file)
        ),
        None => format!("{repository} holds neither safetensors with a config.json nor a GGUF file"),
    })
}

/// A file of the hub's list. One whose name leads elsewhere, or that has no checksum or none that is one, is none.
fn hub_file(sibling: &serde_json::Value) -> Option<HubFile> {
    let name = sibling["rfilename"].as_str().filter(|name| is_plain(name))?.to_owned();
    let digits = |sum: &serde_json::Value, count| Some(sum.as_str().filter(|sum| is_hex(sum, count))?.to_lowercase());
    let (lfs, git) = (&sibling["lfs"], &sibling["blobId"]);
    // Of a file outside of git, git has only a pointer, whose hash says nothing of the file.
    let sum = match lfs.is_null() {
        false => Sum::Sha256(digits(&lfs["sha256"], 64)?),
        true => Sum::Git(digits(git, 40)?),
    };
    let bytes = lfs["size"].as_u64().or(sibling["size"].as_u64())?;
    Some(HubFile { name, bytes, sum })
}

/// Whether a name of the hub's leads to a file in the repository or in one of its folders, and nowhere else.
fn is_plain(name: &str) -> bool {
    let plain = |word: &str| !word.is_empty() && !word.starts_with('.') && !word.contains(['\\', '\0']);
    name.len() <= MAX_NAME && name.split('/').count() <= MAX_FOLDERS && name.split('/').all(plain)
}

/// Whether a character does not show in a name, or turns the direction of those behind it.
fn misleads(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// The checksum, as hex digits, of what `hash` has taken already and a file's bytes behind it.
fn digest(mut hash: impl Digest, path: &Path, step: Step<'_>) -> Result<String> {
    let (mut file, meta) = open_regular(path)?;
    let all = meta.len();
    let (mut done, mut piece) = (0, vec![0; READ_AT_ONCE]);
    loop {
        let n = file.read(&mut piece).map_err(Error::io("read", path))?;
        if n == 0 {
            break;
        }
        hash.update(&piece[..n]);
        done += n as u64;
        step(done, all)?;
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server that leads from https to http on its own host and port would get the token in the clear.
    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let of = |at: &str| origin(&at.parse().unwrap());
        let hub = of("https://hub.example/api");
        assert!(hub.is_some() && hub == of("https://HUB.example:443/other"));
        for other in [
            "http://hub.example/api",
            "http://hub.example:443/api",
            "https://hub.example:444/api",
            "https://cdn.hub.example/",
        ] {
            assert_ne!(of(other), hub, "{other}");
        }
        assert_eq!(of("/api"), None);
    }
}
