//! The other end of the daemon's socket, for the verbs that use one.

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

/// How often a waiting call looks whether Ctrl-C was pressed.
const LOOK: Duration = Duration::from_millis(20);
/// More than any answer or event of a daemon has.
const MOST_BYTES: usize = 64 << 20;

/// Calls one daemon; each call is a connection of its own, so that ending it cancels what it asked for.
pub struct Client {
    socket: PathBuf,
    runtime: Runtime,
    timeout: Duration,
}

impl Client {
    /// For `timeout` an answer is waited for, and of what takes long a sign of life.
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
        // Ends when the response does; its errors come out there.
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
        let bytes = Limited::new(response.into_body(), MOST_BYTES).collect().await;
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

    /// Work that takes as long as it takes: whenever it is not done for a while, the daemon has to show that it is alive.
    async fn while_alive<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut work = std::pin::pin!(work);
        loop {
            if let Ok(done) = tokio::time::timeout(self.timeout, work.as_mut()).await {
                return done;
            }
            // Whatever it says: a daemon that is loading, or has failed, says something.
            self.in_time(self.send(Method::GET, "/health", None)).await?;
        }
    }

    /// The answer's text.
    ///
    /// # Errors
    /// [`Error::Failed`] with the daemon's own words for a refusal, or if it does not answer in time; [`Error::Interrupted`] on Ctrl-C.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<String> {
        self.runtime.block_on(until_interrupted(self.in_time(self.answer(method, path, body))))
    }

    /// # Errors
    /// As [`Client::call`].
    pub fn json(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        json(&self.call(method, path, body)?)
    }

    /// Of what may take long, as loading a model does: waits for as long as the daemon is alive.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn long(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        json(&self.runtime.block_on(until_interrupted(self.while_alive(self.answer(method, path, body))))?)
    }

    /// # Errors
    /// As [`Client::call`].
    pub fn get(&self, path: &str) -> Result<Value> {
        self.json("GET", path, None)
    }

    /// Each event of a stream, until it ends or Ctrl-C, which closes the connection: the daemon then stops.
    ///
    /// # Errors
    /// As [`Client::call`]; an error event is one, and so is a stream without its end.
    pub fn stream(&self, path: &str, body: &Value, mut event: impl FnMut(Value) -> Result<()>) -> Result<()> {
        self.runtime.block_on(until_interrupted(self.while_alive(async {
            let response = self.send(Method::POST, path, Some(body)).await?;
            let status = response.status().as_u16();
            let mut body = response.into_body();
            let mut text = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|e| Error::Failed(format!("the daemon broke off: {e}")))?;
                let Some(data) = frame.data_ref() else { continue };
                if text.len() + data.len() > MOST_BYTES {
                    return Err(Error::Failed(format!("the daemon sent an event of more than {MOST_BYTES} bytes")));
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

/// Verbs name methods as HTTP does.
fn method_of(name: &str) -> Method {
    Method::from_bytes(name.as_bytes()).unwrap_or(Method::GET)
}

fn refused(status: u16, text: &str) -> Error {
    let value: Value = serde_json::from_str(text).unwrap_or_default();
    match value["error"]["message"].as_str() {
        Some(message) if value["error"]["code"] == "context_length_exceeded" => {
            Error::TooLong(crate::error::printable(message))
        }
        Some(message) => Error::Failed(crate::error::printable(message)),
        None => Error::Failed(format!("the daemon answered {status}: {}", excerpt(text))),
    }
}

/// # Errors
/// [`Error::Interrupted`] on Ctrl-C; `work` is dropped then.
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
