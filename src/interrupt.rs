//! Ctrl-C, SIGTERM and SIGHUP: the first signal asks the running work to end in order, the second ends the process. While the program
//! waits at a prompt, where it could not react, the first one ends the process; work that may take long between two looks at [`check`]
//! is given half a second.

use crate::error::{Error, Result};
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Undoes what a prompt has changed on the terminal.
type Restore = Box<dyn FnOnce() + Send>;
static PROMPT: Mutex<Option<Restore>> = Mutex::new(None);
/// What is to be done before work is ended that does not end by itself, and what tells that it has.
static HURRIED: Mutex<Option<Restore>> = Mutex::new(None);
static ENDED: Condvar = Condvar::new();

/// How long hurried work may go on after a signal: with what the process takes to end, half a second.
#[cfg(feature = "cli")]
const PATIENCE: std::time::Duration = std::time::Duration::from_millis(350);

/// Installs the handler; called once by `main`.
#[cfg(feature = "cli")]
pub fn install() {
    let handler = || {
        let before = REQUESTED.swap(true, Ordering::SeqCst);
        let prompt = PROMPT.lock().take();
        if before || prompt.is_some() {
            prompt.into_iter().for_each(|restore| restore());
            end();
        }
        let mut hurried = HURRIED.lock();
        ENDED.wait_while_for(&mut hurried, |hurried| hurried.is_some(), PATIENCE);
        if let Some(restore) = hurried.take() {
            restore();
            end();
        }
    };
    // Without a handler Ctrl-C still ends the process, only less tidily.
    if let Err(error) = ctrlc::set_handler(handler) {
        tracing::debug!("no Ctrl-C handler: {error}");
    }
}

/// Ends the process from the thread that handles signals, without what libraries have to do when a process ends by itself: a card's driver would
/// take down what another thread still uses.
#[cfg(feature = "cli")]
fn end() -> ! {
    // SAFETY: it does not return, and nothing of this process is used any more.
    unsafe { libc::_exit(130) }
}

/// Long work calls this between its steps.
///
/// # Errors
/// [`Error::Interrupted`] once a signal has come.
pub fn check() -> Result<()> {
    if REQUESTED.load(Ordering::Relaxed) { Err(Error::Interrupted) } else { Ok(()) }
}

/// Calls `wait`, which waits for the user to type, and returns its result. A signal meanwhile calls `restore` and ends the process.
///
/// # Errors
/// As [`check`], if a signal came before; `wait` is then not called.
pub fn at_prompt<T>(restore: impl FnOnce() + Send + 'static, wait: impl FnOnce() -> T) -> Result<T> {
    *PROMPT.lock() = Some(Box::new(restore));
    // A signal may have come before there was a prompt.
    let waited = check().map(|()| wait());
    *PROMPT.lock() = None;
    waited
}

/// Calls `work` and returns its result. A signal meanwhile asks it to end, as everywhere; where it goes on for another third of a second,
/// `restore` is called and the process ended with status 130. For work that leaves nothing but what `restore` can tidy up.
pub fn hurried<T>(restore: impl FnOnce() + Send + 'static, work: impl FnOnce() -> T) -> T {
    let outer = HURRIED.lock().replace(Box::new(restore));
    let done = work();
    *HURRIED.lock() = outer;
    ENDED.notify_all();
    done
}

/// Whether a signal has come; it then counts as answered. For programs that go on after the work that it was meant for has ended.
pub fn take() -> bool {
    REQUESTED.swap(false, Ordering::SeqCst)
}
