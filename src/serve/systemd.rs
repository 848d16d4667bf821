//! The protocol with systemd: a socket that it hands over, and messages that the daemon is ready, is stopping, or still answers.

use crate::clock::{self, Duration, Seldom};
use crate::config::systemd;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};

/// The first descriptor that is handed over (sd_listen_fds).
const FIRST_SOCKET: i32 = 3;

/// The socket that systemd listens at for this process; `None` if it handed over none.
pub fn listener() -> Option<UnixListener> {
    if !systemd().socket {
        return None;
    }
    // SAFETY: systemd passes this descriptor to this process and names it in LISTEN_PID; nothing else in this process has it.
    let socket = unsafe { OwnedFd::from_raw_fd(FIRST_SOCKET) };
    // It was inherited through exec; child processes must not inherit it further. Fails only for an invalid descriptor.
    let _ = rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC);
    Some(socket.into())
}

/// How often systemd's watchdog expects a message; `None` if it expects none.
pub fn watchdog() -> Option<Duration> {
    systemd().watchdog
}

/// Sends a state (`READY=1`) to systemd; does nothing without it. If it cannot be sent, the daemon runs on.
pub fn notify(state: &str) {
    static WARNED: Seldom = Seldom::new();
    let Some(name) = systemd().notify else { return };
    let send = || -> std::io::Result<()> {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&name)?,
        };
        UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address)?;
        Ok(())
    };
    if let Err(error) = send()
        && WARNED.is_due(clock::unix_seconds())
    {
        tracing::warn!("cannot tell systemd '{state}': {error}");
    }
}
