//! A program that must end, for tests that start one.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::process::{Child, ExitStatus};
use std::time::Duration;

/// Its status. One that goes on for longer than `patience` is killed, and there is none.
pub fn ended(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
    let patience = Timespec::try_from(patience).unwrap();
    if poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience)).unwrap() == 0 {
        let _ = child.kill();
        child.wait().unwrap();
        return None;
    }
    Some(child.wait().unwrap())
}
