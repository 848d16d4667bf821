//! Whose texts a request may be answered from.

use super::connection::Peer;
use super::daemon::Daemon;
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, header};

/// The owner of a request's text ([`Job::owner`](crate::generation::Job::owner)).
#[derive(Clone, Copy, Default)]
pub struct Owner(pub u64);

/// All clients whose texts are not kept apart.
const SHARED: u64 = 0;
/// The socket's clients that show no token, where they are kept apart from others.
const SOCKET: u64 = 1;

/// The header in which Anthropic's clients send the token.
pub const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// The token that a client shows.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// The token as Anthropic's clients show it.
pub fn api_key(headers: &HeaderMap) -> Option<&str> {
    headers.get(API_KEY)?.to_str().ok()
}

/// Whose text an admitted request's is, as `serve.isolate` says: that of its token, the same after a restart. On the socket the
/// token is not checked; a gateway that forwards the tokens of its clients has their texts kept apart.
pub fn owner(daemon: &Daemon, request: &Request) -> Owner {
    let apart = match daemon.settings().text("serve.isolate") {
        Some("off") => false,
        Some("on") => true,
        _ => !is_on_socket(request) && daemon.tokens.lock().len() > 1,
    };
    Owner(if apart { shown_by(daemon, request) } else { SHARED })
}

/// Whose a kept answer is: that of the token that is shown, whatever `serve.isolate` says, because an answer says more than a prompt's time.
pub fn keeper(daemon: &Daemon, request: &Request) -> u64 {
    shown_by(daemon, request)
}

fn is_on_socket(request: &Request) -> bool {
    matches!(request.extensions().get(), Some(Peer::Unix { .. }))
}

/// The number of the token that a request shows.
fn shown_by(daemon: &Daemon, request: &Request) -> u64 {
    let of = |token: &str| xxhash_rust::xxh3::xxh3_64(token.as_bytes()).max(SOCKET + 1);
    let (bearer, key) = (bearer(request.headers()), api_key(request.headers()));
    if is_on_socket(request) {
        return bearer.map_or(SOCKET, of);
    }
    // Over TCP it is the one that has admitted the request: another that is shown beside it may be anybody's.
    let tokens = daemon.tokens.lock();
    let known = |token: &str| tokens.iter().fold(false, |known, one| known | same(token.as_bytes(), one.as_bytes()));
    [bearer, key].into_iter().flatten().find(|token| known(token)).map_or(SOCKET, of)
}

/// Compares in the same time wherever the two differ, so that a token cannot be guessed byte by byte.
pub fn same(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0u8, |differ, (a, b)| differ | (a ^ b)) == 0
}
