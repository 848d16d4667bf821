//! What systemd is told: ready, stopping, and that the engine still answers.

use crate::config::systemd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends a state ("READY=1"); nothing without systemd. A supervisor that does not listen is no reason to stop.
pub fn notify(state: &str) {
    let Some(name) = systemd().notify else { return };
    let send = || -> std::io::Result<()> {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&name)?,
        };
        UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address)?;
        Ok(())
    };
    if let Err(error) = send() {
        tracing::warn!("cannot tell systemd '{state}': {error}");
    }
}
