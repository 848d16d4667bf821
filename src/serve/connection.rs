//! One connection: limits on headers and time, and its end when the daemon ends.

use super::daemon::Daemon;
use crate::clock::Duration;
use axum::Router;
use axum::body::Body;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::Sleep;
use tower::ServiceExt;

/// Bytes of a request's line and headers together, and how many headers.
const MAX_HEADER_BYTES: usize = 64 << 10;
const MAX_HEADERS: usize = 100;

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this machine that may open the socket.
    Unix { pid: u32 },
    /// A program of this machine, over TCP: its address.
    Tcp(std::net::SocketAddr),
}

impl Peer {
    /// Whose turn in the queue this is: each process is a client. A gateway's process asks for many, so each address that it names in
    /// X-Real-IP is a client; that header is trusted only on the Unix socket, because anybody may reach the TCP port.
    pub fn client(&self, real_ip: Option<&[u8]>) -> u64 {
        match (self, real_ip) {
            (Peer::Unix { .. }, Some(address)) => xxhash_rust::xxh3::xxh3_64(address),
            (Peer::Unix { pid }, None) => u64::from(*pid),
            (Peer::Tcp(address), _) => xxhash_rust::xxh3::xxh3_64(address.ip().to_string().as_bytes()),
        }
    }
}

/// Whether a connection has shown that it may make requests.
#[derive(Clone)]
pub struct Entered(Arc<AtomicBool>);

impl Entered {
    /// Notes that it has shown it.
    pub fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Returns when `patience` is over, if the connection has not shown that by then; else never.
    async fn refused(&self, patience: Duration) {
        tokio::time::sleep(patience).await;
        if self.0.load(Ordering::Relaxed) {
            std::future::pending().await
        }
    }
}

/// Serves one connection until it closes, stalls, sends no token in time, or `ending` is set.
pub async fn serve(
    daemon: Arc<Daemon>,
    app: Router,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: Peer,
    mut ending: watch::Receiver<bool>,
) {
    daemon.counters.connections.add(1);
    let seconds = |name| Duration::from_secs(daemon.settings().whole(name));
    let (stall, patience) = (seconds("serve.stall_seconds"), seconds("serve.token_seconds"));
    // A client that could open the socket needs no token.
    let entered = Entered(Arc::new(matches!(peer, Peer::Unix { .. }).into()));
    let enters = entered.clone();
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(enters.clone());
        app.clone().oneshot(request.map(Body::new))
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(stall)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(Patience::new(stream, stall)), service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = entered.refused(patience) => return,
        () = told(&mut ending) => {
            connection.as_mut().graceful_shutdown();
            connection.as_mut().await
        }
    };
    if let Err(error) = result {
        // A client may disconnect at any time.
        tracing::debug!("{peer:?}: {error}");
    }
}

/// Until it is time to end.
pub async fn told(ending: &mut watch::Receiver<bool>) {
    // A dropped sender is an end, too.
    drop(ending.wait_for(|ending| *ending).await);
}

/// A stream whose writes fail once the other end has taken nothing for a while.
struct Patience<S> {
    stream: S,
    stall: Duration,
    waits: Option<Pin<Box<Sleep>>>,
}

impl<S> Patience<S> {
    fn new(stream: S, stall: Duration) -> Patience<S> {
        Patience { stream, stall, waits: None }
    }

    /// Passes the result of a write on, and counts the time without progress.
    fn patient<T>(&mut self, context: &mut Context<'_>, write: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if write.is_ready() {
            self.waits = None;
            return write;
        }
        let stall = self.stall;
        let waits = self.waits.get_or_insert_with(|| Box::pin(tokio::time::sleep(stall)));
        match waits.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client reads nothing"))),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patience<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patience<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.patient(context, write)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let write = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.patient(context, write)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateways_clients_are_told_apart_and_nobody_else_chooses_who_he_is() {
        let (gateway, tcp) = (Peer::Unix { pid: 7 }, Peer::Tcp("127.0.0.1:99".parse().unwrap()));
        assert_ne!(gateway.client(Some(b"10.0.0.1")), gateway.client(Some(b"10.0.0.2")));
        assert_eq!(gateway.client(Some(b"10.0.0.1")), Peer::Unix { pid: 8 }.client(Some(b"10.0.0.1")));
        assert_ne!(gateway.client(None), Peer::Unix { pid: 8 }.client(None));
        assert_eq!(tcp.client(Some(b"10.0.0.1")), tcp.client(None));
    }
}
