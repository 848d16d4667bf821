//! Client of the daemon's socket, for the commands that talk to a daemon.

use crate::clock::Duration;
use crate::error::{Error, Result, excerpt};
use crate::interrupt;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokio::runtime::Runtime;

/// How often a waiting call checks whether Ctrl-C was pressed.
const LOOK: Duration = Duration::from_millis(20);
/// Largest answer or event that is accepted, bytes: more than a daemon sends.
const MAX_BYTES: usize = 64 << 20;

/// Calls one daemon. Each call has its own connection, so that closing it cancels the request.
pub struct Client {
    socket: PathBuf,
    runtime: Runtime,
    timeout: Duration,
}

impl Client {
    /// A client of the daemon at `socket`. An answer, or a sign of life from a request that takes long, must come within `timeout`.
    ///
    /// # Errors
    /// [`Error::NoDaemon`] if nothing listens at `socket`.
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Client> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::Failed(format!("cannot start the runtime: {e}")))?;
        let client = Client { socket: socket.to_owned(), runtime, timeout };
        client.runtime.block_on(client.open())?;
        Ok(client)
    }

    async fn open(&self) -> Result<tokio::net::UnixStream> {
        tokio::net::UnixStream::connect(&self.socket).await.map_err(|error| {
            Error::NoDaemon(format!(
                "no daemon answers at {} ({error}); start one: dynamicinfer serve MODEL",
                self.socket.display()
            ))
        })
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Response<Incoming>> {
        let broken = |e: hyper::Error| Error::Failed(format!("the daemon broke off: {e}"));
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(self.open().await?)).await.map_err(broken)?;
        // The task ends with the response, which also reports its errors.
        tokio::spawn(connection);
        let body = body.map_or_else(Bytes::new, |body| body.to_string().into());
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "localhost")
            .header("content-type", "application/json")
            .body(Full::new(body))
            .map_err(|e| Error::Failed(format!("cannot ask for {path}: {e}")))?;
        sender.send_request(request).await.map_err(broken)
    }

    async fn answer(&self, method: &str, path: &str, body: Option<&Value>) -> Result<String> {
        let response = self.send(method_of(method), path, body).await?;
        let status = response.status().as_u16();
        let bytes = Limited::new(response.into_body(), MAX_BYTES).collect().await;
        let bytes = bytes.map_err(|e| Error::Failed(format!("the daemon broke off: {e}")))?.to_bytes();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if status >= 400 { Err(refused(status, &text)) } else { Ok(text) }
    }

    async fn in_time<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let late = |_| {
            Error::Failed(format!(
                "the daemon at {} has not answered for {} s: it is stopped, or very busy; --timeout SECONDS waits longer",
                self.socket.display(),
                self.timeout.as_secs()
            ))
        };
        tokio::time::timeout(self.timeout, work).await.map_err(late)?
    }

    /// Waits for `work` for as long as it takes; whenever it is not done within the timeout, the daemon has to answer that it is alive.
    async fn while_alive<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut work = std::pin::pin!(work);
        loop {
            if let Ok(done) = tokio::time::timeout(self.timeout, work.as_mut()).await {
                return done;
            }
            // Any answer will do: a daemon that is loading, or has failed, answers, too.
            self.in_time(self.send(Method::GET, "/health", None)).await?;
        }
    }

    /// Sends a request and returns the text of the answer.
    ///
    /// # Errors
    /// [`Error::Failed`] with the daemon's own words for a refusal, or if it does not answer in time; [`Error::NoDaemon`] if nothing
    /// listens any more; [`Error::TooLong`] for a prompt beyond the context; [`Error::Interrupted`] on Ctrl-C.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<String> {
        self.runtime.block_on(until_interrupted(self.in_time(self.answer(method, path, body))))
    }

    /// As [`Client::call`], with the answer parsed as JSON.
    ///
    /// # Errors
    /// As [`Client::call`]; [`Error::Failed`] for an answer that is not JSON.
    pub fn json(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        json(&self.call(method, path, body)?)
    }

    /// As [`Client::json`], for requests that may take long, such as loading a model: waits for as long as the daemon is alive.
    ///
    /// # Errors
    /// As [`Client::json`].
    pub fn long(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        json(&self.runtime.block_on(until_interrupted(self.while_alive(self.answer(method, path, body))))?)
    }

    /// A GET request whose answer is parsed as JSON.
    ///
    /// # Errors
    /// As [`Client::json`].
    pub fn get(&self, path: &str) -> Result<Value> {
        self.json("GET", path, None)
    }

    /// Posts `body` and gives each event of the answer's stream to `event`, until the stream ends. Ctrl-C closes the connection, and the
    /// daemon then stops generating.
    ///
    /// # Errors
    /// As [`Client::call`], and those of `event`; [`Error::Failed`] for an event that reports an error and for a stream that breaks off.
    pub fn stream(&self, path: &str, body: &Value, mut event: impl FnMut(Value) -> Result<()>) -> Result<()> {
        self.runtime.block_on(until_interrupted(self.while_alive(async {
            let response = self.send(Method::POST, path, Some(body)).await?;
            let status = response.status().as_u16();
            let mut body = response.into_body();
            let mut text = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|e| Error::Failed(format!("the daemon broke off: {e}")))?;
                let Some(data) = frame.data_ref() else { continue };
                if text.len() + data.len() > MAX_BYTES {
                    return Err(Error::Failed(format!("the daemon sent an event of more than {MAX_BYTES} bytes")));
                }
                text.extend_from_slice(data);
                if status >= 400 {
                    continue;
                }
                while let Some(end) = text.windows(2).position(|two| two == b"\n\n") {
                    let line: Vec<u8> = text.drain(..end + 2).collect();
                    let Some(data) = line.strip_prefix(b"data: ") else { continue };
                    if data.starts_with(b"[DONE]") {
                        return Ok(());
                    }
                    let value: Value = serde_json::from_slice(data)
                        .map_err(|e| Error::Failed(format!("the daemon sent an event that is no JSON: {e}")))?;
                    if let Some(error) = value.get("error") {
                        return Err(Error::Failed(excerpt(error["message"].as_str().unwrap_or_default())));
                    }
                    event(value)?;
                }
            }
            if status >= 400 {
                return Err(refused(status, &String::from_utf8_lossy(&text)));
            }
            Err(Error::Failed("the answer ended before its end".into()))
        })))
    }
}

fn json(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|e| Error::Failed(format!("the daemon answered no JSON: {e}")))
}

/// The HTTP method of this name.
fn method_of(name: &str) -> Method {
    Method::from_bytes(name.as_bytes()).unwrap_or(Method::GET)
}

fn refused(status: u16, text: &str) -> Error {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    match value["error"]["message"].as_str() {
        Some(message) if value["error"]["code"] == "context_length_exceeded" => {
            Error::TooLong(crate::error::printable(message))
        }
        Some(message) => {
            let exit = match value["error"]["code"].as_str() {
                Some(crate::error::BAD_FILE) => 5,
                Some(crate::error::MEMORY) => 6,
                // What is wrong use where no daemon is asked.
                _ if status == 400 => 2,
                _ => 1,
            };
            Error::Refused { message: crate::error::printable(message), exit }
        }
        None => Error::Failed(format!("the daemon answered {status}: {}", excerpt(text))),
    }
}

/// Waits for `work`, or until Ctrl-C is pressed.
///
/// # Errors
/// Those of `work`; [`Error::Interrupted`] on Ctrl-C, after which `work` is dropped.
pub async fn until_interrupted<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let mut work = std::pin::pin!(work);
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            result = &mut work => return result,
            _ = look.tick() => interrupt::check()?,
        }
    }
}
