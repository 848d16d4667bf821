//! The TCP port: which address is meant, and the token that its clients have to show.

use crate::error::{Error, Result, excerpt};
use crate::formats::open_regular;
use crate::settings::Settings;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tokio::net::TcpListener;

/// Printable characters of a token, at least.
const SHORTEST_TOKEN: usize = 16;
/// Characters of a file that are read as tokens, at most.
const MAX_TOKENS: u64 = 65_536;

/// The address that `--listen` means: `8093`, `:8093`, `localhost:8093`, `127.0.0.1:8093` or `[::1]:8093`; with `lan` also one that other machines
/// reach.
///
/// # Errors
/// [`Error::Usage`] for what is no address with a port, or not one of this machine's own.
fn address(text: &str, lan: bool) -> Result<SocketAddr> {
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    let own = host.is_empty() || host.eq_ignore_ascii_case("localhost");
    let parsed = match port.parse::<u16>() {
        Ok(port) if own => Some(SocketAddr::from((Ipv4Addr::LOCALHOST, port))),
        _ => text.parse().ok(),
    };
    let address = parsed.ok_or_else(|| {
        Error::Usage(format!(
            "--listen {}: give a port, or an address of this machine with a port: 8093, localhost:8093, \
             127.0.0.1:8093",
            excerpt(text)
        ))
    })?;
    if !lan && !address.ip().is_loopback() {
        return Err(Error::Usage(format!(
            "--listen {address}: other machines could reach this address, and nothing would be encrypted; put a proxy with TLS in front of \
             127.0.0.1, or set serve.lan = true where you trust the network"
        )));
    }
    Ok(address)
}

/// Listens at `serve.listen`; `None` if it is empty.
///
/// # Errors
/// [`Error::Usage`] for what is no address of this machine; [`Error::Failed`] if something else listens there.
pub async fn listener(settings: &Settings) -> Result<Option<TcpListener>> {
    let Some(text) = settings.text("serve.listen") else { return Ok(None) };
    let address = address(text, settings.switch("serve.lan"))?;
    let listener = TcpListener::bind(address).await;
    listener.map(Some).map_err(|e| Error::Failed(format!("cannot listen at {address}: {e}; give another port")))
}

/// The tokens one of which requests over TCP must carry, 1 or more, and the file that they are kept in: that of the settings, or one in the
/// user's directory for state, which is made with one token at the first start. `None` for the file where there is no such directory; the
/// token is a new one then.
///
/// # Errors
/// [`Error::Usage`] for a file that holds no token, or that is not this user's alone; [`Error::Io`].
pub fn tokens(settings: &Settings) -> Result<(Vec<String>, Option<PathBuf>)> {
    if let Some(path) = settings.text("serve.token_file") {
        let path = PathBuf::from(path);
        let remedy = format!("protect it: chmod 600 '{}'", path.display());
        return Ok((read(&path, &remedy)?, Some(path)));
    }
    let Some(path) = crate::config::state_dir().map(|dir| dir.join("token")) else {
        return Ok((vec![fresh()?], None));
    };
    if !path.exists() {
        keep(&path, &fresh()?)?;
    }
    Ok((read(&path, "remove the file, and the next start makes a new one")?, Some(path)))
}

/// The tokens in a file that only this user can read and change, one a line; `remedy` says what to do where other users can read it.
fn read(path: &Path, remedy: &str) -> Result<Vec<String>> {
    let (file, meta) = open_regular(path)?;
    let shown = path.display();
    // Root reads every file, so one that is root's is as private.
    if ![0, rustix::process::geteuid().as_raw()].contains(&meta.uid()) {
        return Err(Error::Usage(format!("{shown}: this file belongs to another user; give a file of your own")));
    }
    if meta.mode() & 0o077 != 0 {
        return Err(Error::Usage(format!("{shown}: other users can read this token; {remedy}")));
    }
    if meta.nlink() != 1 {
        let why = "this file has other names (hard links), through which it can be read or changed";
        return Err(Error::Usage(format!("{shown}: {why}; remove the file, or the other names")));
    }
    let mut text = String::new();
    file.take(MAX_TOKENS).read_to_string(&mut text).map_err(Error::io("read", path))?;
    checked(path, &text)
}

fn checked(path: &Path, text: &str) -> Result<Vec<String>> {
    let tokens: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let good = |token: &&str| token.len() >= SHORTEST_TOKEN && token.bytes().all(|b| b.is_ascii_graphic());
    if tokens.is_empty() || !tokens.iter().all(good) {
        let path = path.display();
        return Err(Error::Usage(format!(
            "{path}: a line is not a token of {SHORTEST_TOKEN} or more printable characters; write one token a line, or \
             remove the file"
        )));
    }
    Ok(tokens.into_iter().map(str::to_owned).collect())
}

/// 128 random bits as hexadecimal digits.
fn fresh() -> Result<String> {
    let mut bytes = [0u8; 16];
    let source = Path::new("/dev/urandom");
    let read = std::fs::File::open(source).and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(Error::io("read", source))?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

/// Writes a token to a file that only this user can read. If two daemons start at once, the first one's token stays. The file gets its name
/// when it is complete, so no reader sees half of it. Until then it has a unique name: process numbers can be equal in two containers that
/// share the directory.
fn keep(path: &Path, token: &str) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let whole = dir.join(format!("token.{}.tmp", fresh()?));
    let file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&whole);
    let mut file = file.map_err(Error::io("create", &whole))?;
    let written = writeln!(file, "{token}").and_then(|()| file.sync_all()).and_then(|()| name(&whole, path));
    // Missing if it has its name now; a leftover is harmless.
    let _ = std::fs::remove_file(&whole);
    written.map_err(Error::io("write", path))
}

/// Gives a file its name, unless another has it: then that one stays.
fn name(whole: &Path, path: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    let named = match renameat_with(CWD, whole, CWD, path, RenameFlags::NOREPLACE) {
        // Not on every file system. With a link, the file has two names for a moment, and a read just then is refused.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => std::fs::hard_link(whole, path),
        renamed => renamed.map_err(Into::into),
    };
    match named {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        named => named,
    }
}

/// What a user is told of an address that other machines reach; `None` for one of this machine alone.
pub fn warning(address: SocketAddr) -> Option<String> {
    let open = !address.ip().is_loopback();
    open.then(|| {
        "warning: other machines reach this port, and nothing is encrypted: any listener in the network reads the token and every text; \
         put a proxy with TLS in front unless you trust it"
            .to_owned()
    })
}

/// The name of this machine; `None` where it has none.
pub fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?.trim().to_owned();
    (!name.is_empty() && name != "(none)").then_some(name)
}

/// Host and port by which clients reach an address: any address is shown as the machine's name.
pub fn reached_at(address: SocketAddr) -> String {
    match host_name().filter(|_| address.ip().is_unspecified()) {
        Some(name) => format!("{name}:{}", address.port()),
        None => address.to_string(),
    }
}

/// The address of the page, with the token where it is `shown`.
pub fn page(at: &str, tokens: &[String], shown: bool) -> String {
    match tokens.first().filter(|_| shown) {
        Some(token) => format!("http://{at}/#token={token}"),
        None => format!("http://{at}/, which asks for the token"),
    }
}

/// What a user types so that clients made for OpenAI find this server; `file` has the tokens. The first token itself is `shown` on a terminal
/// only, and where no file has it: what the start says may go to a journal that others read.
pub fn exports(at: &str, tokens: &[String], file: Option<&Path>, shown: bool) -> [String; 2] {
    let key = match file.filter(|_| !shown) {
        Some(file) => {
            let (read, file) = (if tokens.len() > 1 { "head -n 1" } else { "cat" }, file.display().to_string());
            format!("$({read} '{}')", file.replace('\'', r"'\''"))
        }
        None => tokens.first().cloned().unwrap_or_default(),
    };
    [format!("export OPENAI_BASE_URL=http://{at}/v1"), format!("export OPENAI_API_KEY={key}")]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_tokens_file_that_others_can_read_is_refused_and_a_long_one_is_not_read_to_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let mut settings = Settings::read(&[], None, |_| None).unwrap();
        settings.flag("serve.token_file", "x", Some(path.display())).unwrap();
        std::fs::write(&path, "0123456789abcdef\n").unwrap();
        for (mode, taken) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false), (0o620, false)] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            match tokens(&settings) {
                Ok((tokens, file)) => assert!(taken && tokens == ["0123456789abcdef"] && file == Some(path.clone())),
                Err(error) => assert!(!taken && error.to_string().contains("chmod 600"), "{mode:o}: {error}"),
            }
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        assert!(matches!(tokens(&settings), Err(Error::Usage(_))), "a terabyte of zeros");
    }

    #[test]
    fn a_file_has_a_token_a_line() {
        let of = |text: &str| checked(Path::new("tokens"), text);
        let [one, two] = ["0123456789abcdef", "fedcba9876543210"];
        assert_eq!(of(&format!("{one}\r\n\n  {two}\n")).unwrap(), [one, two]);
        for bad in ["", "\n\n", "short", &format!("{one}\nshort"), &format!("{one} {two}")] {
            assert!(matches!(of(bad), Err(Error::Usage(_))), "{bad:?}");
        }
    }

    #[test]
    fn a_token_that_a_file_has_is_shown_on_a_terminal_only() {
        let file = Path::new("/a b/it's");
        let one = ["secret".to_owned()];
        let key = |file, shown| exports("localhost:8093", &one, file, shown)[1].clone();
        assert_eq!(key(Some(file), true), "export OPENAI_API_KEY=secret");
        assert_eq!(key(None, false), "export OPENAI_API_KEY=secret");
        assert_eq!(key(Some(file), false), r"export OPENAI_API_KEY=$(cat '/a b/it'\''s')");
        assert_eq!(page("localhost:8093", &one, true), "http://localhost:8093/#token=secret");
        assert!(!page("localhost:8093", &one, false).contains("secret"));
    }

    #[test]
    fn a_port_alone_and_localhost_are_addresses_of_this_machine() {
        for (text, wanted) in [
            ("8093", "127.0.0.1:8093"),
            (":8093", "127.0.0.1:8093"),
            ("localhost:8093", "127.0.0.1:8093"),
            ("LocalHost:0", "127.0.0.1:0"),
            ("127.0.0.2:80", "127.0.0.2:80"),
            ("[::1]:8093", "[::1]:8093"),
        ] {
            assert_eq!(address(text, false).unwrap().to_string(), wanted, "{text}");
            assert_eq!(warning(address(text, true).unwrap()), None, "{text}");
        }
        for bad in ["", "localhost", "127.0.0.1", "65536", "-1", "example.org:80", "0.0.0.0:80", "[::]:80", "here"] {
            assert!(matches!(address(bad, false), Err(Error::Usage(_))), "{bad}");
        }
        for open in ["0.0.0.0:80", "[::]:80", "192.0.2.1:80"] {
            assert!(address(open, false).unwrap_err().to_string().contains("serve.lan"), "{open}");
            assert!(warning(address(open, true).unwrap()).unwrap().contains("TLS"), "{open}");
        }
        assert!(matches!(address("example.org:80", true), Err(Error::Usage(_))));
    }
}
