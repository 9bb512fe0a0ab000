//! The listening socket, which serves one client at a time.

use std::fmt;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::{Error, Refusal, Result};
use crate::function::Function;
use crate::link::connect_at_once;
use crate::session;

/// Interval between checks of `stop`.
const STOP_POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What a server reports.
#[derive(Debug)]
pub enum ServerEvent {
    /// A client has connected.
    Connected,
    /// A request was refused.
    Refused {
        /// The command's number.
        command: u16,
        /// The reason.
        refusal: Refusal,
    },
    /// The session has ended, with the reason if the client did not just close.
    Closed(Option<String>),
}

impl fmt::Display for ServerEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected => f.write_str("a client has connected"),
            Self::Refused { command, refusal: Refusal { errno, why } } => {
                write!(f, "command {command} of the client is refused ({errno}): {why}")
            }
            Self::Closed(None) => f.write_str("the client has disconnected"),
            Self::Closed(Some(why)) => write!(f, "the session ended: {why}"),
        }
    }
}

/// Serves one client on a connection until it closes or `stop` returns true. Returns why the session ended, if the
/// client did not just close.
pub fn serve(
    stream: UnixStream,
    function: &Function,
    stop: &dyn Fn() -> bool,
    report: &dyn Fn(ServerEvent),
) -> Option<String> {
    session::run(stream, function, stop, report).err().map(|broken| broken.to_string())
}

/// A socket, removed on drop.
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode: by then, the path may be another server's.
    file: Option<(u64, u64)>,
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    path.symlink_metadata().ok().map(|found| (found.dev(), found.ino()))
}

/// Binds a socket beside `path` under an unused name; `None` if that is too long for a socket.
fn bind_early(path: &Path) -> std::io::Result<Option<(UnixListener, PathBuf)>> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    loop {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let early = path.with_file_name(format!(".{}-{count}", std::process::id()));
        match UnixListener::bind(&early) {
            Ok(listener) => return Ok(Some((listener, early))),
            // Left behind by a process that was killed and had our number.
            Err(error) if error.kind() == ErrorKind::AddrInUse => {}
            Err(error) if error.kind() == ErrorKind::InvalidInput => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

impl Server {
    /// Creates the socket, replacing one that a former server left behind.
    ///
    /// # Errors
    /// When the path is in use, or the socket cannot be created.
    pub fn bind(path: &Path) -> Result<Self> {
        let failed = |call| move |source| Error::Socket { call, path: path.into(), source };
        if let Ok(found) = path.symlink_metadata() {
            if !found.file_type().is_socket() {
                return Err(Error::NotASocket(path.into()));
            }
            match connect_at_once(path) {
                Err(Errno::CONNREFUSED) => {
                    std::fs::remove_file(path).map_err(failed("removal"))?;
                }
                // A server responds, or may.
                _ => return Err(Error::InUse(path.into())),
            }
        }
        // It gets its name once it listens: clients that wait for the name must not be refused, and another server must not
        // take it for one that was left behind.
        let Some((listener, early)) = bind_early(path).map_err(failed("bind"))? else {
            let listener = UnixListener::bind(path).map_err(failed("bind"))?;
            return Self::named(listener, path);
        };
        let named = std::fs::hard_link(&early, path);
        let removed = std::fs::remove_file(&early);
        named.map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => Error::InUse(path.into()),
            _ => failed("bind")(error),
        })?;
        removed.map_err(failed("bind"))?;
        Self::named(listener, path)
    }

    fn named(listener: UnixListener, path: &Path) -> Result<Self> {
        let server = Self { listener, path: path.into(), file: identity(path) };
        let failed = |source| Error::Socket { call: "setup", path: path.into(), source };
        server.listener.set_nonblocking(true).map_err(failed)?;
        Ok(server)
    }

    /// Serves one client after another until `stop` returns true; it is called several times a second.
    ///
    /// # Errors
    /// When the socket fails. Errors of a session only end that session, and are reported through `report`.
    pub fn run(
        &self,
        function: &Function,
        stop: &dyn Fn() -> bool,
        report: &dyn Fn(ServerEvent),
    ) -> Result<()> {
        while let Some(stream) = self.accept(stop)? {
            report(ServerEvent::Connected);
            report(ServerEvent::Closed(serve(stream, function, stop, report)));
        }
        Ok(())
    }

    /// The next client; `None` if `stop` returned true.
    fn accept(&self, stop: &dyn Fn() -> bool) -> Result<Option<UnixStream>> {
        let failed = |call, source| Error::Socket { call, path: self.path.clone(), source };
        while !stop() {
            match poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&STOP_POLL_INTERVAL)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(failed("poll", error.into())),
            }
            match self.listener.accept() {
                Ok((stream, _)) => return Ok(Some(stream)),
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => {}
                Err(error) => return Err(failed("accept", error)),
            }
        }
        Ok(None)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.file.is_some() && identity(&self.path) == self.file {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
