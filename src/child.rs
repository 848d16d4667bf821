//! A stranger's work in a process of its own: this program, called again, with limits on memory, processor time and stack. What
//! kills the child is an error here, and when nobody waits for its answer any more it is ended.

use crate::error::{Error, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// How often it is looked whether anybody still waits for the answer.
const LOOK: Duration = Duration::from_millis(20);

/// The child's exit status where the system gives it no thread: EX_TEMPFAIL of sysexits.h.
const NO_THREAD: u8 = 75;

/// What a child is for, and what it may take.
#[derive(Debug)]
pub struct Work {
    /// The program's first argument that makes it this child.
    pub argument: &'static str,
    /// For messages, as in "rendering takes more than 2s".
    pub doing: &'static str,
    /// In bytes.
    pub longest_request: usize,
    pub longest_answer: usize,
    /// Of address space beyond the program itself.
    pub memory: u64,
    pub stack: usize,
    /// Of processor time, in whole seconds.
    pub computed: Duration,
    /// From the request to the answer, whoever else has the cores meanwhile.
    pub wall: Duration,
}

/// This program: the file that runs, even if another has taken its name since.
pub fn this_program() -> PathBuf {
    PathBuf::from("/proc/self/exe")
}

/// Whether somebody waits for an answer.
#[derive(Clone, Debug)]
pub struct Wanted(Option<Weak<()>>);

impl Wanted {
    pub fn always() -> Wanted {
        Wanted(None)
    }

    /// For as long as the asker keeps this.
    pub fn by(asker: &Arc<()>) -> Wanted {
        Wanted(Some(Arc::downgrade(asker)))
    }

    pub fn still(&self) -> bool {
        self.0.as_ref().is_none_or(|asker| asker.strong_count() > 0)
    }
}

/// What came of a child.
#[derive(Debug)]
pub enum End {
    /// One line.
    Said(Vec<u8>),
    Died(ExitStatus),
    /// It took longer than [`Work::wall`].
    Late,
    /// Nobody waited for it any more.
    Unwanted,
}

impl Work {
    /// What a child's end without an answer means.
    pub fn cause_of_death(&self, status: ExitStatus) -> String {
        let doing = self.doing;
        match status.signal() {
            // A failed allocation and an overflowed stack both abort.
            Some(6 | 11) => format!("{doing} takes more than {} MiB of memory, or nests too deeply", self.memory >> 20),
            Some(24 | 9) => format!("{doing} takes more than {:?}", self.computed),
            Some(signal) => format!("{doing} was ended by signal {signal}"),
            None => format!("the {doing} process failed with {status}"),
        }
    }

    /// One request, by a process that is started for it.
    ///
    /// # Errors
    /// The child cannot be started.
    pub fn ask(&'static self, program: &Path, request: &[u8]) -> Result<End> {
        Child::start(self, program)?.ask(self, request, &Wanted::always()).end
    }

    /// The child's whole life: reads a request, has it worked on, and writes the answer as one line.
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

    /// Memory, processor time, no files, no core dump. It ends with the parent: what it reads from then ends, or its processor
    /// time does. (A signal at the parent's death is one of the parent's thread, and threads of the daemon come and go.)
    fn limit_this_process(&self) -> std::io::Result<()> {
        // The program's own mappings are not the stranger's doing.
        let own = status_bytes("VmSize:").ok_or_else(|| std::io::Error::other("no VmSize"))?;
        let set = |resource: Resource, limit: u64| {
            // This program may have been given less.
            let limit = Some(getrlimit(resource).maximum.map_or(limit, |most| most.min(limit)));
            setrlimit(resource, Rlimit { current: limit, maximum: limit })
        };
        set(Resource::Core, 0)?;
        set(Resource::Fsize, 0)?;
        set(Resource::Cpu, self.computed.as_secs())?;
        Ok(set(Resource::As, own + self.memory)?)
    }
}

/// The child's answer, from wherever in it.
pub fn say(mut answer: Vec<u8>) -> Option<()> {
    answer.push(b'\n');
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&answer).ok()?;
    stdout.flush().ok()
}

/// A size of this process as the kernel tells it: "VmSize:", "VmHWM:".
pub fn status_bytes(name: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|l| l.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib << 10)
}

/// Many requests, each worked on by a process of its own that was started beforehand: starting one takes longer than most work.
/// None sees two requests.
#[derive(Debug)]
pub struct Children {
    work: &'static Work,
    program: PathBuf,
    spare: Mutex<Option<Child>>,
}

impl Children {
    pub fn new(work: &'static Work, program: PathBuf) -> Arc<Children> {
        Arc::new(Children { work, program, spare: Mutex::new(None) })
    }

    /// Has a process wait for the next request, beside what this thread does.
    pub fn prepare(self: &Arc<Self>) {
        self.replace(None);
    }

    /// The same, once one that has done its work has ended.
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

    /// # Errors
    /// The child cannot be started.
    pub fn ask(self: &Arc<Self>, request: &[u8], wanted: &Wanted) -> Result<End> {
        let spare = self.spare.lock().unwrap_or_else(|e| e.into_inner()).take();
        let waited = spare.is_some();
        let child = spare.map_or_else(|| Child::start(self.work, &self.program), Ok)?;
        let mut asked = child.ask(self.work, request, wanted);
        // One that was ended while it waited has taken nothing in: that is not the request's doing.
        if waited && !asked.taken && wanted.still() {
            asked = Child::start(self.work, &self.program)?.ask(self.work, request, wanted);
        }
        let Asked { end, child, .. } = asked;
        self.replace(Some(child));
        end
    }
}

/// A process that works on one request, or waits for it. Dropped, it is ended.
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
                    // Its end is not waited for: that takes as long as the work.
                    let _ = BufReader::new(stdout.take(work.longest_answer as u64)).read_until(b'\n', &mut answer);
                }
                let _ = send.send(answer);
            };
            // Without its reader the child would be waited for by the one who writes.
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
        // What the system gives no thread for was not begun: it is not tried once more.
        .map_or_else(|error| (true, Err(error)), |(taken, answer)| (taken, Ok(answer)));
        let end = match answer {
            Err(error) => Err(no_room(error, &this_program())),
            Ok(answer) => self.end(answer),
        };
        Asked { end, taken, child: self }
    }

    /// What came of it, from the bytes that it has said, or why there are none.
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

/// A process or a thread that the system does not give: for a lack of them, of descriptors or of memory, which may end.
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

/// What comes within `wall`, while somebody wants it.
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
