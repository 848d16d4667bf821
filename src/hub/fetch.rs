//! Fetches models from the hub. The only code that opens a connection to another machine. The hf-hub crate speaks the protocol and keeps
//! the cache as other tools have it; what it lacks is here: the sizes before the first byte, going on after a cut, and SHA-256.

use super::{Cache, Choice, Name, choose};
use crate::error::{Error, Result, excerpt, human_bytes, printable};
use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Attempts at one file, as long as each brings something: a connection that breaks more often is not worth going on with now.
const ATTEMPTS: usize = 10;

/// Bytes that are hashed between two looks at Ctrl-C.
const HASHED_AT_ONCE: usize = 1 << 20;

/// The hub, as the environment names it.
pub struct Hub {
    api: Api,
    endpoint: String,
    cache: Cache,
}

/// A file of a model on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    /// Its name in the repository.
    pub name: String,
    /// Its length, bytes.
    pub bytes: u64,
    /// Its SHA-256, 64 hex digits. Small files have none on the hub.
    pub sha256: Option<String>,
    /// What its bytes are called in `blobs/`: the SHA-256, else git's hash.
    blob: String,
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
    ///
    /// # Errors
    /// [`Error::Failed`] where no client can be made.
    pub fn new(endpoint: &str, cache: Cache, token: Option<String>) -> Result<Hub> {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let builder = ApiBuilder::from_cache(hf_hub::Cache::new(cache.0.clone()));
        let builder = builder.with_endpoint(endpoint.clone()).with_token(token).with_progress(false);
        let api = builder.build().map_err(|why| Error::Failed(format!("cannot speak to {endpoint}: {why}")))?;
        Ok(Hub { api, endpoint, cache })
    }

    /// The files that `name` means.
    ///
    /// # Errors
    /// [`Error::Failed`] where the hub cannot be reached or gives none, [`Error::Usage`] where the name fits none or several of them.
    pub fn list(&self, name: &Name) -> Result<Listing> {
        let request = self.api.model(name.repository.clone()).info_request().query("blobs", "true");
        let mut answer = request.call().map_err(|why| self.refused(name, &ApiError::RequestError(Box::new(why))))?;
        let page: serde_json::Value = answer.body_mut().read_json().map_err(|why| self.odd(&why.to_string()))?;
        let commit =
            page["sha"].as_str().filter(|sha| is_hex(sha, 40)).ok_or_else(|| self.odd("it names no commit"))?;
        let files: Vec<HubFile> = page["siblings"].as_array().into_iter().flatten().filter_map(hub_file).collect();
        let names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
        let wanted = match choose(name, &names) {
            Ok(Choice::Directory(wanted)) => wanted,
            Ok(Choice::File(file)) => vec![file],
            Err(Some(why)) => return Err(Error::Usage(why)),
            Err(None) => return Err(no_model(name, &names)),
        };
        Ok(Listing {
            commit: commit.to_owned(),
            files: files.into_iter().filter(|file| wanted.contains(&file.name)).collect(),
        })
    }

    /// Bytes of a file that are here already, whole or as the beginning that a broken fetch has left.
    pub fn here(&self, name: &Name, file: &HubFile) -> u64 {
        let bytes = |path: PathBuf| std::fs::metadata(path).map_or(0, |meta| meta.len());
        bytes(self.blob(name, file)).max(bytes(self.part(name, file))).min(file.bytes)
    }

    /// Fetches a file, or what is missing of it, and gives it its name in the cache. It is not checked yet.
    ///
    /// # Errors
    /// [`Error::Failed`] where the hub cannot be reached, refuses, or breaks off again and again; what came is kept.
    pub fn fetch(&self, name: &Name, listing: &Listing, file: &HubFile, step: Step<'_>) -> Result<PathBuf> {
        let blob = self.blob(name, file);
        if std::fs::metadata(&blob).is_ok_and(|meta| meta.len() == file.bytes) {
            return self.point_to(name, listing, file, &blob);
        }
        let repository = self.api.model(name.repository.clone());
        let mut had = self.prepare(name, file)?;
        for attempt in 1.. {
            let progress = Steps { done: 0, all: file.bytes, step };
            match repository.download_with_progress(&file.name, progress) {
                Ok(path) => return Ok(path),
                Err(why) => {
                    let has = self.here(name, file);
                    if has <= had || attempt == ATTEMPTS {
                        return Err(self.broken(name, file, has, &why));
                    }
                    tracing::info!("{}: {why}; going on at byte {has}", file.name);
                    had = self.prepare(name, file)?;
                }
            }
        }
        unreachable!("the loop ends with its last attempt")
    }

    /// Checks a fetched file against the hub's length and SHA-256. What does not agree is removed.
    ///
    /// # Errors
    /// [`Error::BadFile`] where it does not agree, and what `step` returns.
    pub fn check(&self, name: &Name, file: &HubFile, path: &Path, step: Step<'_>) -> Result<()> {
        let bytes = std::fs::metadata(path).map_err(Error::io("stat", path))?.len();
        let why = match &file.sha256 {
            _ if bytes != file.bytes => format!("has {bytes} bytes, and the hub says {}", file.bytes),
            None => return Ok(()),
            Some(wanted) => match sha256(path, step)? {
                sum if sum == *wanted => return Ok(()),
                sum => format!("has the SHA-256 {sum}, and the hub says {wanted}"),
            },
        };
        for wrong in [path.to_owned(), self.blob(name, file)] {
            std::fs::remove_file(&wrong).map_err(Error::io("remove", &wrong))?;
        }
        Err(Error::bad(path, "", format!("{why}: it is not the hub's file, and was removed; pull it again")))
    }

    fn blob(&self, name: &Name, file: &HubFile) -> PathBuf {
        self.cache.folder(name).join("blobs").join(&file.blob)
    }

    /// Where hf-hub keeps what has come of a file.
    fn part(&self, name: &Name, file: &HubFile) -> PathBuf {
        self.blob(name, file).with_extension("part")
    }

    /// Makes sure that hf-hub can go on with what has come; returns its bytes.
    fn prepare(&self, name: &Name, file: &HubFile) -> Result<u64> {
        let (part, lock) = (self.part(name, file), self.blob(name, file).with_extension("lock"));
        let blobs = part.parent().expect("it lies in blobs/");
        std::fs::create_dir_all(blobs).map_err(Error::io("create", blobs))?;
        // hf-hub waits for it for some seconds and then gives up without saying what to do.
        let held = File::create(&lock).map_err(Error::io("create", &lock))?;
        rustix::fs::flock(&held, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            Error::Failed(format!("{} is being fetched by another program; wait for it", printable(&file.name)))
        })?;
        let Ok(meta) = std::fs::metadata(&part) else { return Ok(0) };
        if meta.len() < file.bytes {
            return Ok(meta.len());
        }
        // All of it came, and it did not get its name. A server has no bytes behind the last one: the last is asked for again.
        let opened = File::options().write(true).open(&part).map_err(Error::io("open", &part))?;
        let keep = file.bytes.saturating_sub(1);
        opened.set_len(keep).map_err(Error::io("cut", &part))?;
        Ok(keep)
    }

    /// Gives bytes that are here already their name in this commit.
    fn point_to(&self, name: &Name, listing: &Listing, file: &HubFile, blob: &Path) -> Result<PathBuf> {
        let folder = self.cache.folder(name);
        let (refs, snapshot) = (folder.join("refs"), folder.join("snapshots").join(&listing.commit));
        for dir in [&refs, &snapshot] {
            std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
        }
        let path = snapshot.join(&file.name);
        if path.symlink_metadata().is_err() {
            let target = Path::new("../../blobs").join(blob.file_name().expect("it has a name"));
            std::os::unix::fs::symlink(target, &path).map_err(Error::io("link", &path))?;
        }
        let main = refs.join("main");
        std::fs::write(&main, &listing.commit).map_err(Error::io("write", &main))?;
        Ok(path)
    }

    fn odd(&self, why: &str) -> Error {
        let why = excerpt(why);
        Error::Failed(format!("{} does not answer as a Hugging Face hub: {why}; look at HF_ENDPOINT", self.endpoint))
    }

    /// Why the hub gave nothing, with what to do about it.
    fn refused(&self, name: &Name, why: &ApiError) -> Error {
        let (repository, endpoint) = (&name.repository, &self.endpoint);
        Error::Failed(match status(why) {
            Some(404) => format!("{endpoint} has no model {repository}: look for its name there"),
            Some(status @ (401 | 403)) => format!(
                "{endpoint} does not give out {repository} (status {status}): there is none of this name, or it is only for those who \
                 accepted its licence; accept it there and set HF_TOKEN to a token of yours, or run `hf auth login`"
            ),
            Some(status) => format!("{endpoint} answers status {status} for {repository}; try later"),
            None => format!(
                "cannot reach {endpoint}: {}. `pull` is the only verb that needs a network. Without one, fetch the files elsewhere and give \
                 their directory or .gguf as MODEL (docs/start.md)",
                excerpt(why)
            ),
        })
    }

    fn broken(&self, name: &Name, file: &HubFile, has: u64, why: &ApiError) -> Error {
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

/// The status that a server answered with; `None` where there was no answer.
fn status(why: &ApiError) -> Option<u16> {
    // The number stands in hf-hub's text and nowhere else that it shows.
    let text = why.to_string();
    let (_, rest) = text.split_once("http status: ")?;
    rest.get(..3)?.parse().ok()
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

/// A file of the hub's list. One whose name leads elsewhere, or whose checksum is no such, is none.
fn hub_file(sibling: &serde_json::Value) -> Option<HubFile> {
    let name = sibling["rfilename"].as_str().filter(|name| is_plain(name))?.to_owned();
    let sha256 = match sibling["lfs"]["sha256"].as_str() {
        None => None,
        Some(sum) if is_hex(sum, 64) => Some(sum.to_lowercase()),
        Some(_) => return None,
    };
    let git = || sibling["blobId"].as_str().filter(|id| is_hex(id, 40)).map(str::to_owned);
    let blob = sha256.clone().or_else(git)?;
    let bytes = sibling["lfs"]["size"].as_u64().or(sibling["size"].as_u64())?;
    Some(HubFile { name, bytes, sha256, blob })
}

/// Whether a name of the hub's is that of a file right in the repository.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.chars().all(|c| c.is_ascii_hexdigit())
}

/// SHA-256 of a file, 64 hex digits.
fn sha256(path: &Path, step: Step<'_>) -> Result<String> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let all = file.metadata().map_err(Error::io("stat", path))?.len();
    let (mut hash, mut done, mut piece) = (Sha256::new(), 0, vec![0; HASHED_AT_ONCE]);
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

/// Progress as hf-hub tells it. It cannot be ended from here.
struct Steps<'a> {
    done: u64,
    all: u64,
    step: Step<'a>,
}

impl Progress for Steps<'_> {
    fn init(&mut self, size: usize, _: &str) {
        (self.done, self.all) = (0, size as u64);
    }

    fn update(&mut self, bytes: usize) {
        self.done += bytes as u64;
        let _ = (self.step)(self.done, self.all);
    }

    fn finish(&mut self) {}
}
