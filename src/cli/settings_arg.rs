//! Settings as the verbs read them, and the socket that they mean.

use crate::client::Client;
use crate::clock::Duration;
use crate::config;
use crate::error::{Error, Result};
use crate::settings::{Origin, Settings};
use clap::Args;
use std::path::{Path, PathBuf};

/// The arguments of every verb that talks to the daemon.
#[derive(Args, Clone)]
pub struct SocketArgs {
    /// The daemon's Unix socket [default: serve.socket, or $XDG_RUNTIME_DIR/dynamicinfer.sock,
    /// or /tmp/dynamicinfer-UID/dynamicinfer.sock without that directory]
    #[arg(long, global = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Seconds to wait for the daemon's answer; for long work such as `load`, for a sign of life
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

/// The options where none is given.
impl Default for SocketArgs {
    fn default() -> SocketArgs {
        SocketArgs { socket: None, timeout: 10 }
    }
}

impl SocketArgs {
    pub fn path(&self, settings: &Settings) -> PathBuf {
        let given = self.socket.clone().or_else(|| settings.text("serve.socket").map(PathBuf::from));
        given.unwrap_or_else(crate::serve::socket::default_path)
    }

    /// # Errors
    /// [`crate::Error::NoDaemon`] with how to start one.
    pub fn connect(&self) -> Result<Client> {
        self.connect_as(&read(None)?)
    }

    /// # Errors
    /// As [`SocketArgs::connect`]; [`Error::Usage`] where others could listen in the daemon's place.
    pub fn connect_as(&self, settings: &Settings) -> Result<Client> {
        let path = self.path(settings);
        crate::serve::socket::check_default_dir(&path)?;
        Client::connect(&path, Duration::from_secs(self.timeout))
    }
}

/// The system's file, the user's, the one that was named, the environment.
pub fn read(named: Option<&Path>) -> Result<Settings> {
    Settings::read(&config::config_files(), named, config::variable)
}

/// The option given for a key, else its setting; an option of `load` precedes both.
///
/// # Errors
/// [`Error::Usage`] with the origin of a setting that `parse` refuses.
pub fn chosen<T>(
    settings: &Settings,
    key: &'static str,
    typed: Option<T>,
    parse: impl Fn(&str) -> std::result::Result<T, String>,
) -> Result<Option<T>> {
    if typed.is_some() && !is_of_load(settings, key) {
        return Ok(typed);
    }
    let refused = |why| Error::Usage(format!("{key} ({}): {why}", settings.origin(key)));
    settings.text(key).map(|text| parse(text).map_err(refused)).transpose()
}

/// Whether `load` was given this key's value, for the model that it loads.
pub fn is_of_load(settings: &Settings, key: &str) -> bool {
    *settings.origin(key) == Origin::Load
}
