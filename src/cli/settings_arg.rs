//! Settings as the verbs read them, and the socket that they mean.

use crate::config;
use crate::error::Result;
use crate::settings::Settings;
use clap::Args;
use std::path::{Path, PathBuf};

/// What every verb takes that talks to the daemon.
#[derive(Args, Clone)]
pub struct SocketArgs {
    /// The daemon's Unix socket [default: serve.socket, or $XDG_RUNTIME_DIR/dynamicinfer.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

impl SocketArgs {
    pub fn path(&self, settings: &Settings) -> PathBuf {
        let given = self.socket.clone().or_else(|| settings.text("serve.socket").map(PathBuf::from));
        given.unwrap_or_else(crate::serve::socket::default_path)
    }

    /// # Errors
    /// [`crate::Error::NoDaemon`] with how to start one.
    pub fn connect(&self) -> Result<crate::client::Client> {
        crate::client::Client::connect(&self.path(&read(None)?))
    }
}

/// The system's file, the user's, the one that was named, the environment.
pub fn read(named: Option<&Path>) -> Result<Settings> {
    Settings::read(&config::config_files(), named, config::variable)
}
