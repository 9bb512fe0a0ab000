//! The socket that clients come to, one at a time.

use std::fmt;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::{Error, Refusal, Result};
use crate::function::Function;
use crate::session;

/// How often it is looked whether to stop.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What happens while it serves.
#[derive(Debug)]
pub enum Event {
    /// A client has come.
    Connected,
    /// A request was refused.
    Refused {
        /// The command's number.
        command: u16,
        /// Why.
        refusal: Refusal,
    },
    /// The client has gone; where it did not just close, why.
    Closed(Option<String>),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected => f.write_str("a client has come"),
            Self::Refused { command, refusal: Refusal { errno, why } } => {
                write!(f, "command {command} of the client is refused ({errno}): {why}")
            }
            Self::Closed(None) => f.write_str("the client has gone"),
            Self::Closed(Some(why)) => write!(f, "the session is over: {why}"),
        }
    }
}

/// Serves one client on a connection until it closes or `stop` says so; why it ended, where the client did not just close.
pub fn serve(
    stream: UnixStream,
    function: &Function,
    stop: &dyn Fn() -> bool,
    tell: &dyn Fn(Event),
) -> Option<String> {
    session::run(stream, function, stop, tell).err().map(|broken| broken.to_string())
}

/// A socket, removed on drop.
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
}

impl Server {
    /// Makes the socket. One that is left over from a server that is gone is replaced.
    ///
    /// # Errors
    /// When the path is taken, or no socket can be made there.
    pub fn bind(path: &Path) -> Result<Self> {
        let failed = |call| move |source| Error::Socket { call, path: path.into(), source };
        if let Ok(found) = path.symlink_metadata() {
            if !found.file_type().is_socket() {
                return Err(Error::NotASocket(path.into()));
            }
            match UnixStream::connect(path) {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path).map_err(failed("removal"))?;
                }
                // Somebody answers, or might.
                _ => return Err(Error::InUse(path.into())),
            }
        }
        let listener = UnixListener::bind(path).map_err(failed("bind"))?;
        let server = Self { listener, path: path.into() };
        server.listener.set_nonblocking(true).map_err(failed("setup"))?;
        Ok(server)
    }

    /// Serves one client after the other until `stop` says so; `stop` is asked several times a second.
    ///
    /// # Errors
    /// When the socket fails. What goes wrong with one client ends its session only, and is told.
    pub fn run(&self, function: &Function, stop: &dyn Fn() -> bool, tell: &dyn Fn(Event)) -> Result<()> {
        while let Some(stream) = self.accept(stop)? {
            tell(Event::Connected);
            tell(Event::Closed(serve(stream, function, stop, tell)));
        }
        Ok(())
    }

    /// The next client; none when it is time to stop.
    fn accept(&self, stop: &dyn Fn() -> bool) -> Result<Option<UnixStream>> {
        let failed = |call, source| Error::Socket { call, path: self.path.clone(), source };
        while !stop() {
            match poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&TICK)) {
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
        let _ = std::fs::remove_file(&self.path);
    }
}
