//! The daemon's life: bind, load, answer, drain, end.

use super::connection::{self, Peer};
use super::daemon::{Daemon, ModelState};
use super::loader::Load;
use super::routes::router;
use super::socket::{self, Bound};
use super::systemd::{self, notify};
use super::tcp;
use crate::clock::Duration;
use crate::error::{Error, Result};
use crate::settings::Settings;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Threads of the runtime: connections check, tokenise and write there; the engine has its own.
const WORKERS: usize = 2;
/// Threads for work that waits or takes long (loading, tokenising, templates, checking files): more than work at once on any machine.
const MAX_BLOCKING: usize = 64;
/// How long such a thread is kept: practically for ever, so that work continues if the system refuses more threads later.
const KEPT: Duration = Duration::from_secs(365 * 24 * 3600);
/// Threads that a daemon starts with: the runtime's, one for long work, the engine's, and two for a template.
const THREADS_TO_BEGIN: usize = WORKERS + 4;
/// Time until the next try after a connection could not be accepted (because no descriptor is free, say).
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);
/// Time from cutting off running answers to the end, for the event that tells their clients. A second signal is obeyed within 200 ms.
const LAST_EVENTS: Duration = Duration::from_millis(150);
/// Time that is given twice between the engine's failure and the end, for errors to reach the clients.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Runs the daemon until it is told to end. `reread` reads the settings again (SIGHUP); `say` shows a line to the user.
///
/// # Errors
/// [`Error::Running`] if another daemon runs; [`Error::Fatal`] if the engine failed; errors of binding and of the first load.
pub fn run(
    settings: Settings,
    load: Arc<dyn Load>,
    reread: impl Fn() -> Result<Settings> + Send + Sync + 'static,
    say: impl Fn(&str) + Send + Sync + 'static,
) -> Result<()> {
    can_start(THREADS_TO_BEGIN)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(MAX_BLOCKING)
        .thread_keep_alive(KEPT)
        .enable_all()
        .build()
        .map_err(|e| Error::Failed(format!("cannot start the runtime: {e}")))?;
    let result = runtime.block_on(async {
        let mut quit = harmless_signals()?;
        tokio::select! {
            result = live(settings, load, reread, &say) => result,
            // Everything is dropped, the socket included.
            _ = quit.recv() => {
                say("SIGQUIT: ending now");
                Ok(())
            }
        }
    });
    // Work that is still running is not waited for: its client has been told.
    runtime.shutdown_background();
    result
}

/// How often [`can_start`] waits for its threads to be gone: some milliseconds.
const MAX_YIELDS: usize = 1000;

/// Starts that many threads at once, for a moment, because the runtime panics if it cannot start its own.
///
/// # Errors
/// [`Error::Memory`] if the system does not give that many.
fn can_start(threads: usize) -> Result<()> {
    // As the system counts them: it lists a thread for a moment longer than a join takes.
    let counted = || std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count);
    let (before, gate) = (counted(), parking_lot::Mutex::new(()));
    let started = std::thread::scope(|scope| {
        let _shut = gate.lock();
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, || drop(gate.lock())).map(drop);
        (0..threads).try_for_each(start)
    });
    (0..MAX_YIELDS).take_while(|_| counted() > before).for_each(|_| std::thread::yield_now());
    started.map_err(|e| {
        Error::Memory(format!(
            "the daemon cannot start its {threads} threads: {e}; raise the limit on processes (ulimit -u, \
             TasksMax) or on memory (ulimit -v)"
        ))
    })
}

async fn live(
    settings: Settings,
    load: Arc<dyn Load>,
    reread: impl Fn() -> Result<Settings>,
    say: &impl Fn(&str),
) -> Result<()> {
    raise_descriptor_limit();
    // Starts the first of the threads that are kept.
    drop(tokio::task::spawn_blocking(|| ()));
    if !crate::formats::survive() {
        tracing::warn!("this process will end if a model file is truncated while it is in use");
    }
    let path = settings.text("serve.socket").map_or_else(socket::default_path, Into::into);
    let (unix, _bound) = unix_listener(&path)?;
    let tcp = tcp::listener(&settings).await?;
    let daemon = Arc::new(Daemon::new(settings.clone(), load));
    if let Some(tcp) = &tcp {
        let address = tcp.local_addr().map_err(|e| Error::Failed(format!("TCP has no address: {e}")))?;
        let (tokens, file) = tcp::tokens(&settings)?;
        let kept = file.as_ref().map_or("until it ends".into(), |file| format!("kept in {}", file.display()));
        let (at, shown) = (tcp::reached_at(address), io::stderr().is_terminal());
        say(&format!("listening at http://{at}/v1; it asks for a token, {kept}. For clients made for OpenAI:"));
        tcp::exports(&at, &tokens, file.as_deref(), shown).iter().for_each(|line| say(&format!("  {line}")));
        if settings.switch("serve.ui") {
            say(&format!("chat in a browser: {}", tcp::page(&at, &tokens, shown)));
        }
        tcp::warning(address).iter().for_each(|warning| say(warning));
        *daemon.tokens.lock() = tokens;
    }
    let why = socket::why_not_in_runtime_dir(&path).map_or(String::new(), |why| format!(" ({why})"));
    say(&format!("listening at {}{why}", path.display()));
    tracing::info!(version = env!("CARGO_PKG_VERSION"), process = std::process::id(), socket = %path.display(), "starts");
    let _ends = Ends(daemon.clone());
    let (end, ending) = watch::channel(false);
    let mut tasks = JoinSet::new();
    let app = router(daemon.clone());
    // Each has a limit of its own, so that filling the TCP port does not keep out the socket's owner.
    let room = |name| Arc::new(Semaphore::new(settings.whole(name) as usize));
    tasks.spawn(accept(unix, daemon.clone(), app.clone(), ending.clone(), room("serve.connections")));
    if let Some(tcp) = tcp {
        tasks.spawn(accept(tcp, daemon.clone(), app, ending, room("serve.tcp_connections")));
    }
    let (mut signals, mut reload) = (Signals::new()?, listen(SignalKind::hangup())?);
    // The socket answers from here on, also while a model is being loaded.
    notify("READY=1\nSTATUS=listening");
    if let Some(interval) = systemd::watchdog() {
        tokio::spawn(feed_watchdog(daemon.clone(), interval));
    }
    if let Some(model) = settings.text("serve.model") {
        notify(&format!("STATUS=loading {model}"));
        let result = tokio::select! {
            result = daemon.load(model) => result,
            () = signals.end() => return Ok(()),
        };
        let loaded = result?;
        say(&format!(
            "{} is ready: {} answers at once, {} tokens each",
            loaded.model.name, loaded.handle.limits.slots, loaded.model.context
        ));
        notify(&format!("STATUS=serving {}", loaded.model.name));
    }
    loop {
        tokio::select! {
            () = signals.end() => break,
            () = daemon.fatal.notified() => {
                notify("STATUS=the engine has failed");
                // Gives clients that wait for an answer, and health checks, time to notice.
                tokio::time::sleep(LAST_WORDS).await;
                let _ = end.send(true);
                let _ = tokio::time::timeout(LAST_WORDS, async { while tasks.join_next().await.is_some() {} }).await;
                return Err(failed(&daemon).unwrap_or_else(|| Error::Fatal("the engine has failed".into())));
            }
            _ = reload.recv() => match reread() {
                Ok(new) => {
                    let left = daemon.reload(&new);
                    let rest = if left.is_empty() { String::new() } else { format!("; only a restart changes {}", left.join(", ")) };
                    say(&format!("settings reloaded{rest}"));
                }
                Err(error) => say(&format!("settings are unchanged: {error}")),
            },
        }
    }
    drain(&daemon, &daemon.settings(), &mut signals, &end, &mut tasks, say).await
}

/// Writes the log's last line, whichever way the daemon ends.
struct Ends(Arc<Daemon>);

impl Drop for Ends {
    fn drop(&mut self) {
        tracing::info!(requests = self.0.counters.requests.get(), "ends");
    }
}

/// The engine's failure, if it has failed.
fn failed(daemon: &Daemon) -> Option<Error> {
    let ModelState::Ready(loaded) = daemon.state() else { return None };
    let why = loaded.handle.failure()?;
    Some(match why.is_fatal() {
        true => Error::Fatal(format!("{why}. The daemon ends and can be started again")),
        false => Error::Failed(why.to_string()),
    })
}

/// Lets running answers finish, for as long as the settings say; a second signal ends it at once.
///
/// # Errors
/// The engine failed meanwhile.
async fn drain(
    daemon: &Arc<Daemon>,
    settings: &Settings,
    signals: &mut Signals,
    end: &watch::Sender<bool>,
    tasks: &mut JoinSet<()>,
    say: &impl Fn(&str),
) -> Result<()> {
    notify("STOPPING=1");
    daemon.draining.store(true, Ordering::SeqCst);
    // No swap waits any longer.
    daemon.steered.send_modify(|waiting| *waiting += 1);
    // Fails only if there is no connection.
    let _ = end.send(true);
    let patience = Duration::from_secs(settings.whole("serve.drain_seconds"));
    let Some(loaded) = daemon.state().at_work().cloned() else {
        let _ = tokio::time::timeout(LAST_EVENTS, async { while tasks.join_next().await.is_some() {} }).await;
        return Ok(());
    };
    if loaded.handle.jobs() > 0 {
        say(&format!(
            "ending: {} answers have {} s to finish; a second signal ends at once",
            loaded.handle.jobs(),
            patience.as_secs()
        ));
    }
    let all_answered = async {
        loaded.handle.idle().await;
        // Waits until connections have written their last bytes.
        while tasks.join_next().await.is_some() {}
        loaded.end().await;
    };
    tokio::select! {
        () = all_answered => {}
        () = tokio::time::sleep(patience) => say("the time to end is over"),
        () = signals.end() => {}
    }
    loaded.handle.stop();
    // Clients whose answers are cut off are told so.
    let _ = tokio::time::timeout(LAST_EVENTS, async { while tasks.join_next().await.is_some() {} }).await;
    failed(daemon).map_or(Ok(()), Err)
}

fn listen(kind: SignalKind) -> Result<tokio::signal::unix::Signal> {
    signal(kind).map_err(|e| Error::Failed(format!("cannot listen for signals: {e}")))
}

/// Ignores, from now on, signals that would end the process at once and leave its socket behind. The returned signal (SIGQUIT) is the one
/// that is to end it at once. SIGXFSZ comes with a write beyond the limit on file sizes; the write then fails with an error.
fn harmless_signals() -> Result<tokio::signal::unix::Signal> {
    let numbers = [libc::SIGVTALRM, libc::SIGPROF, libc::SIGXFSZ].map(SignalKind::from_raw);
    let named = [SignalKind::user_defined1(), SignalKind::user_defined2(), SignalKind::alarm(), SignalKind::io()];
    for kind in named.into_iter().chain(numbers) {
        // The listener is dropped; the handler stays.
        drop(listen(kind)?);
    }
    listen(SignalKind::quit())
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Signals> {
        Ok(Signals { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    /// Waits for a signal to end.
    async fn end(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The socket that systemd handed over, or our own, whose file is removed at the end.
fn unix_listener(path: &Path) -> Result<(UnixListener, Option<Bound>)> {
    let (listener, bound) = match systemd::listener() {
        Some(listener) => (listener, None),
        None => {
            let bound = socket::bind(path)?;
            (bound.listener.try_clone().map_err(Error::io("listen at", path))?, Some(bound))
        }
    };
    listener.set_nonblocking(true).map_err(Error::io("listen at", path))?;
    Ok((UnixListener::from_std(listener).map_err(Error::io("listen at", path))?, bound))
}

/// Accepts connections.
trait Door: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    fn next(&self) -> impl Future<Output = io::Result<(Self::Stream, Peer)>> + Send;
}

impl Door for UnixListener {
    type Stream = UnixStream;

    async fn next(&self) -> io::Result<(UnixStream, Peer)> {
        let (stream, _) = self.accept().await?;
        let pid = stream.peer_cred().ok().and_then(|peer| peer.pid()).unwrap_or_default() as u32;
        Ok((stream, Peer::Unix { pid }))
    }
}

impl Door for TcpListener {
    type Stream = TcpStream;

    async fn next(&self) -> io::Result<(TcpStream, Peer)> {
        let (stream, address) = self.accept().await?;
        // Events with tokens are small and should be sent at once.
        let _ = stream.set_nodelay(true);
        Ok((stream, Peer::Tcp(address)))
    }
}

/// Serves every connection, until it is time to end and all are closed.
async fn accept(
    door: impl Door,
    daemon: Arc<Daemon>,
    app: axum::Router,
    mut ending: watch::Receiver<bool>,
    room: Arc<Semaphore>,
) {
    let mut connections = JoinSet::new();
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else { break };
        let next = tokio::select! {
            next = door.next() => next,
            () = connection::told(&mut ending) => break,
        };
        let Ok((stream, peer)) = next else {
            tokio::time::sleep(ACCEPT_AGAIN).await;
            continue;
        };
        let served = connection::serve(daemon.clone(), app.clone(), stream, peer, ending.clone());
        connections.spawn(async move {
            served.await;
            drop(permit);
        });
        while connections.try_join_next().is_some() {}
    }
    drop(door);
    while connections.join_next().await.is_some() {}
}

/// Tells systemd's watchdog that all is well whenever the engine's thread has just answered; a plain timer would go on for a daemon whose
/// engine hangs.
async fn feed_watchdog(daemon: Arc<Daemon>, interval: Duration) {
    loop {
        tokio::time::sleep(interval / 3).await;
        let alive = match daemon.state() {
            ModelState::Ready(loaded) => {
                matches!(tokio::time::timeout(interval / 3, loaded.handle.beat()).await, Ok(Ok(())))
            }
            // There is no engine that could hang.
            _ => true,
        };
        if alive {
            notify("WATCHDOG=1");
        }
    }
}

/// Raises the limit on descriptors as far as the system allows: each connection needs one.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // If it cannot be raised, further connections wait to be accepted.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
