//! Work on foreign input in a process of its own: this program, started again, with limits on memory, processor time and stack. What
//! would kill this process there ends the child only, and the caller gets an error. A child whose answer is not waited for any more is
//! ended.

use crate::error::{Error, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Time between two checks of whether the answer is still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// The child's exit status where the system gives it no thread: EX_TEMPFAIL of sysexits.h.
const NO_THREAD: u8 = 75;

/// What a child is for, and what it may take.
#[derive(Debug)]
pub struct Work {
    /// The program's first argument, by which it knows that it is this child.
    pub argument: &'static str,
    /// What the child does, for messages: "rendering" in "rendering takes more than 2s".
    pub doing: &'static str,
    /// Most bytes of a request.
    pub longest_request: usize,
    /// Most bytes of an answer, with the newline that ends it; a longer one counts as none.
    pub longest_answer: usize,
    /// Bytes of address space that the child may take beyond the program's own.
    pub memory: u64,
    /// Stack of the thread that does the work, in bytes.
    pub stack: usize,
    /// Processor time that the child may take, in whole seconds.
    pub computed: Duration,
    /// Most time from the request to the answer, by the clock on the wall: other processes may have the cores meanwhile.
    pub wall: Duration,
}

/// A path to this program that leads to the file that is running, even if another file has its name by now.
pub fn this_program() -> PathBuf {
    PathBuf::from("/proc/self/exe")
}

/// Tells whether an answer is still wanted.
#[derive(Clone, Debug)]
pub struct Wanted(Option<Weak<()>>);

impl Wanted {
    /// An answer that is wanted for as long as it takes.
    pub fn always() -> Wanted {
        Wanted(None)
    }

    /// An answer that is wanted until the last clone of `asker` is dropped.
    pub fn by(asker: &Arc<()>) -> Wanted {
        Wanted(Some(Arc::downgrade(asker)))
    }

    /// Whether the asker is still there; always true of [`Wanted::always`].
    pub fn still(&self) -> bool {
        self.0.as_ref().is_none_or(|asker| asker.strong_count() > 0)
    }
}

/// How a child's work on a request has ended.
#[derive(Debug)]
pub enum End {
    /// It answered: one line, with its newline.
    Said(Vec<u8>),
    /// It ended without a whole answer.
    Died(ExitStatus),
    /// It took longer than [`Work::wall`].
    Late,
    /// Its answer was not wanted any more.
    Unwanted,
}

impl Work {
    /// The child's answer, or why its own work gave none.
    ///
    /// # Errors
    /// [`Error::Memory`] if others are to blame: the system ended it where memory ran out, or other processes had the cores.
    pub fn answer(&self, end: End) -> Result<std::result::Result<Vec<u8>, String>> {
        match end {
            End::Said(line) => Ok(Ok(line)),
            End::Died(status) => self.ended_by_others(status).map_or_else(|| Ok(Err(self.cause_of_death(status))), Err),
            // It cannot wait for anything, and its own processor time ends sooner.
            End::Late | End::Unwanted => {
                let (doing, wall) = (self.doing, self.wall);
                Err(Error::Memory(format!("{doing} got too little processor time in {wall:?}; ask again later")))
            }
        }
    }

    /// What a child's end without an answer means.
    fn cause_of_death(&self, status: ExitStatus) -> String {
        let doing = self.doing;
        match status.signal() {
            // A failed allocation and an overflowed stack both abort.
            Some(6 | 11) => format!("{doing} takes more than {} MiB of memory, or nests too deeply", self.memory >> 20),
            Some(24) => format!("{doing} takes more than {:?}", self.computed),
            Some(signal) => format!("{doing} was ended by signal {signal}"),
            None => format!("the {doing} process failed with {status}"),
        }
    }

    /// The error for a child that something else ended: the system where memory ran out, or a `kill`. `None` where its own work
    /// ended it.
    fn ended_by_others(&self, status: ExitStatus) -> Option<Error> {
        // SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGXCPU, SIGXFSZ, SIGSYS.
        let own = |signal: i32| matches!(signal, 4 | 6 | 7 | 8 | 11 | 24 | 25 | 31);
        let signal = status.signal().filter(|&signal| !own(signal))?;
        Some(Error::Memory(format!(
            "the {} process was killed by signal {signal}, as the system does where memory runs out; ask again later",
            self.doing
        )))
    }

    /// Has one request worked on by a process that is started for it.
    ///
    /// # Errors
    /// The child cannot be started.
    pub fn ask(&'static self, program: &Path, request: &[u8]) -> Result<End> {
        Child::start(self, program)?.ask(self, request, &Wanted::always()).end
    }

    /// What the child does from start to end: limits itself, reads a request from stdin, has `work` make the answer, and writes that to
    /// stdout as one line. The exit status is a failure if there is none.
    pub fn run(&'static self, work: impl FnOnce(Vec<u8>) -> Option<Vec<u8>> + Send + 'static) -> ExitCode {
        if self.limit_this_process().is_err() {
            return ExitCode::FAILURE;
        }
        let worker = std::thread::Builder::new().stack_size(self.stack).spawn(move || {
            let mut request = Vec::new();
            std::io::stdin().take(self.longest_request as u64 + 1).read_to_end(&mut request).ok()?;
            say(work(request)?)
        });
        match worker.map(|w| w.join()) {
            Ok(Ok(Some(()))) => ExitCode::SUCCESS,
            Ok(_) => ExitCode::FAILURE,
            Err(_) => NO_THREAD.into(),
        }
    }

    /// Limits memory and processor time, and allows neither files nor a core dump. A child does not outlive its parent for long: its
    /// input ends then, or its processor time runs out. (A signal at the parent's death would be sent at the death of the parent's
    /// thread, and threads of the daemon come and go.)
    fn limit_this_process(&self) -> std::io::Result<()> {
        // The program's own mappings are not the stranger's doing.
        let own = status_bytes("VmSize:").ok_or_else(|| std::io::Error::other("no VmSize"))?;
        let set = |resource: Resource, current: u64, maximum: u64| {
            // This program may have been given less.
            let limit = |limit: u64| Some(getrlimit(resource).maximum.map_or(limit, |most| most.min(limit)));
            setrlimit(resource, Rlimit { current: limit(current), maximum: limit(maximum) })
        };
        set(Resource::Core, 0, 0)?;
        set(Resource::Fsize, 0, 0)?;
        // SIGXCPU at the first, and SIGKILL, which others send too, only at the second.
        set(Resource::Cpu, self.computed.as_secs(), self.computed.as_secs() + 1)?;
        Ok(set(Resource::As, own + self.memory, own + self.memory)?)
    }
}

/// Writes the child's answer, to which it adds the newline, from any place in the child; `None` if it cannot be written.
pub fn say(mut answer: Vec<u8>) -> Option<()> {
    answer.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&answer).ok()?;
    stdout.flush().ok()
}

/// A size of this process in bytes, by its name in `/proc/self/status`: "VmSize:", "VmHWM:". `None` where the kernel does not tell it.
pub fn status_bytes(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|l| l.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
}

/// Works on requests with a fresh process for each. The next process is started ahead of its request, because starting one takes
/// longer than most work; none sees two requests.
#[derive(Debug)]
pub struct Children {
    work: &'static Work,
    program: PathBuf,
    spare: Mutex<Option<Child>>,
}

impl Children {
    /// Children that run `program` for `work`; no process is started yet.
    pub fn new(work: &'static Work, program: PathBuf) -> Arc<Children> {
        Arc::new(Children { work, program, spare: Mutex::new(None) })
    }

    /// Starts a process for the next request on a thread of its own, and does not wait for it.
    pub fn prepare(self: &Arc<Self>) {
        self.replace(None);
    }

    /// As [`Children::prepare`]; first ends `done`, a child that has done its work.
    fn replace(self: &Arc<Self>, done: Option<Child>) {
        let children = self.clone();
        let start = move || {
            drop(done);
            let mut spare = children.spare.lock().unwrap_or_else(|e| e.into_inner());
            // One is enough where several have ended together. What cannot be started now is started when it is needed, and complained
            // of then.
            if spare.is_none() {
                *spare = Child::start(children.work, &children.program).ok();
            }
        };
        drop(std::thread::Builder::new().name("child".into()).spawn(start));
    }

    /// Has one request worked on, for as long as the answer is `wanted`.
    ///
    /// # Errors
    /// The child cannot be started.
    pub fn ask(self: &Arc<Self>, request: &[u8], wanted: &Wanted) -> Result<End> {
        let spare = self.spare.lock().unwrap_or_else(|e| e.into_inner()).take();
        let waited = spare.is_some();
        let child = spare.map_or_else(|| Child::start(self.work, &self.program), Ok)?;
        let mut asked = child.ask(self.work, request, wanted);
        // A child that was killed while it waited has not read the request, so the request is not to blame: another child gets it.
        if waited && !asked.taken && wanted.still() {
            asked = Child::start(self.work, &self.program)?.ask(self.work, request, wanted);
        }
        let Asked { end, child, .. } = asked;
        self.replace(Some(child));
        end
    }
}

/// A process that works on one request, or waits for it. Dropping it kills the process.
#[derive(Debug)]
struct Child(std::process::Child);

struct Asked {
    end: Result<End>,
    /// Whether it has read the request.
    taken: bool,
    child: Child,
}

impl Child {
    fn start(work: &Work, program: &Path) -> Result<Child> {
        let mut command = Command::new(program);
        command.arg(work.argument).env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Ctrl-C is this process's to handle.
        command.process_group(0).spawn().map(Child).map_err(|error| no_room(error, program))
    }

    fn ask(mut self, work: &Work, request: &[u8], wanted: &Wanted) -> Asked {
        let (mut stdin, stdout) = (self.0.stdin.take(), self.0.stdout.take());
        let (taken, answer) = std::thread::scope(|scope| {
            let (send, receive) = channel();
            // A child that died early does not read; its end says why.
            let thread = std::thread::Builder::new;
            let write = move || stdin.take().is_some_and(|mut stdin| stdin.write_all(request).is_ok());
            let writing = thread().spawn_scoped(scope, write)?;
            let read = move || {
                let mut answer = Vec::new();
                if let Some(stdout) = stdout {
                    // The answer's line is enough: the end of the process, which may come much later, is not waited for.
                    let _ = BufReader::new(stdout.take(work.longest_answer as u64)).read_until(b'\n', &mut answer);
                }
                let _ = send.send(answer);
            };
            // Without a reader of its answer the child might never end, and the thread that writes to it would wait for ever.
            if let Err(error) = thread().spawn_scoped(scope, read) {
                let _ = self.0.kill();
                return Err(error);
            }
            let answer = wait(&receive, work.wall, wanted);
            if answer.is_err() {
                // Fails only if it has just ended by itself.
                let _ = self.0.kill();
            }
            Ok((writing.join().unwrap_or(false), answer))
        })
        // Where the system gives no thread, the request counts as taken: it is not to be tried once more.
        .map_or_else(|error| (true, Err(error)), |(taken, answer)| (taken, Ok(answer)));
        let end = match answer {
            Err(error) => Err(no_room(error, &this_program())),
            Ok(answer) => self.end(answer),
        };
        Asked { end, taken, child: self }
    }

    /// How it ended, by the bytes of its answer or by why there are none.
    fn end(&mut self, answer: Result<Vec<u8>, End>) -> Result<End> {
        match answer {
            Ok(answer) if answer.ends_with(b"\n") => Ok(End::Said(answer)),
            Ok(_) => match self.0.wait() {
                Ok(status) if status.code() == Some(NO_THREAD.into()) => {
                    Err(no_room(rustix::io::Errno::AGAIN.into(), &this_program()))
                }
                Ok(status) => Ok(End::Died(status)),
                Err(e) => Err(Error::Failed(format!("a child cannot be waited for: {e}"))),
            },
            Err(end) => Ok(end),
        }
    }
}

/// The error for a process or thread that could not be started: [`Error::Memory`] where processes, descriptors or memory are used up
/// for now.
fn no_room(error: std::io::Error, program: &Path) -> Error {
    use rustix::io::Errno;
    match Errno::from_io_error(&error) {
        Some(Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Error::Memory(format!(
            "the process that does this with limits cannot be started: {error}; ask again later, or raise the limits on processes \
             (ulimit -u) and descriptors (ulimit -n)"
        )),
        _ => Error::io("start", program)(error),
    }
}

/// The answer, if it comes within `wall` and while it is wanted; else why there is none.
fn wait(answer: &Receiver<Vec<u8>>, wall: Duration, wanted: &Wanted) -> Result<Vec<u8>, End> {
    let mut left = wall;
    while !left.is_zero() {
        let turn = left.min(LOOK);
        if let Ok(answer) = answer.recv_timeout(turn) {
            return Ok(answer);
        }
        if !wanted.still() {
            return Err(End::Unwanted);
        }
        left -= turn;
    }
    Err(End::Late)
}

impl Drop for Child {
    fn drop(&mut self) {
        // Fails if it has ended, and then there is nothing to do.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
