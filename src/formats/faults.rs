//! For tests: a step of writing a file that fails as on a full disk (SQLite's way: fail the first, the second, and so on until
//! none is left to fail).

use std::cell::Cell;
use std::io;

thread_local! {
    /// Steps of this thread until one fails; none does at 0.
    static LEFT: Cell<u64> = const { Cell::new(0) };
}

/// The `n`th step of this thread from now on fails, the first being 1; 0 lets all be.
pub fn fail_write(n: u64) {
    LEFT.set(n);
}

/// Steps until one fails: 0 if it has, or none is to.
pub fn left() -> u64 {
    LEFT.get()
}

/// Before each step: creating, writing, giving a length, syncing, renaming.
pub(super) fn step() -> io::Result<()> {
    match LEFT.get() {
        0 => Ok(()),
        1 => {
            LEFT.set(0);
            Err(io::Error::from_raw_os_error(libc::ENOSPC))
        }
        n => {
            LEFT.set(n - 1);
            Ok(())
        }
    }
}
