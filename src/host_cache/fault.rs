//! What of a file could not be read, and why.

use crate::disk::file_of;
use std::fmt;

/// How often a read that fails or is wrong is asked for once more.
pub(super) const TRIES: u8 = 3;

/// A read that failed for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadFault {
    /// Where in the files ([`crate::disk::place`]).
    pub offset: u64,
    /// What is wrong.
    pub why: Unread,
}

/// Why a read failed for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// The system's error number.
    System(i32),
    /// The file ends before what was asked for.
    Cut,
    /// A neuron or expert of a layer, by its number in the file, has not the checksum that it was packed with.
    Damaged {
        /// The layer.
        layer: usize,
        /// The neuron or expert.
        cluster: usize,
    },
    /// An expert that is read in place holds a number that is not finite.
    NotFinite {
        /// The layer.
        layer: usize,
        /// The expert.
        cluster: usize,
    },
}

impl ReadFault {
    /// The number of the file, and where in it.
    pub fn place(&self) -> (usize, u64) {
        file_of(self.offset)
    }
}

impl fmt::Display for ReadFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.why {
            Unread::System(errno) => write!(
                f,
                "neurons cannot be read: {}; the system's log says what is wrong with the disk; copy the file to another one",
                std::io::Error::from_raw_os_error(errno)
            ),
            Unread::Cut => write!(
                f,
                "neurons cannot be read: the file ends before them, so it was cut while it was used; put it back and start again"
            ),
            Unread::NotFinite { .. } => write!(
                f,
                "holds a number that is not finite, read {} times: the model is damaged; download or convert it again",
                TRIES + 1
            ),
            Unread::Damaged { .. } => write!(
                f,
                "its checksum is not the one it was packed with, read {} times: the file or the disk is damaged; `dynamicinfer show --verify` \
                 reads all of it; pack the model again",
                TRIES + 1
            ),
        }
    }
}
