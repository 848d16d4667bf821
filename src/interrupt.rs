//! Ctrl-C: the first asks the running work to end in order, the second ends the process.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Installs the handler; called once by `main`.
pub fn install() {
    let handler = || {
        if REQUESTED.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    };
    // Without a handler Ctrl-C still ends the process, only less tidily.
    if let Err(error) = ctrlc::set_handler(handler) {
        tracing::debug!("no Ctrl-C handler: {error}");
    }
}

/// An error once Ctrl-C was pressed; long work calls this between its steps.
pub fn check() -> Result<()> {
    if REQUESTED.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}

/// Whether Ctrl-C was pressed, which then counts as answered: what it was meant for has ended, and the program goes on.
pub fn take() -> bool {
    REQUESTED.swap(false, Ordering::SeqCst)
}
