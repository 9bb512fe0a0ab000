//! TCP connections, whose setup ends on a request to stop.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use onehop_os::StopSignal;

use crate::{Error, Result};

/// Time limit for each address of a host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a wait checks for a request to stop.
pub(crate) const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Connects to the first address of a host that answers.
pub(crate) fn connect(host: &str, port: u16, stop: &StopSignal) -> Result<TcpStream> {
    let (name, (sender, receiver)) = (host.to_owned(), mpsc::channel());
    // On a separate thread: neither the resolver nor a connection attempt can be interrupted.
    let work = move || {
        // After a request to stop there is no receiver.
        let _ = sender.send(reach(&name, port));
    };
    let spawned = std::thread::Builder::new().name("nvme-tcp connect".into()).spawn(work);
    spawned.map_err(|source| unreachable(format!("{host}:{port}"), source))?;
    loop {
        if stop.is_set() {
            return Err(Error::Interrupted);
        }
        match receiver.recv_timeout(STOP_POLL_INTERVAL) {
            Ok(end) => return end,
            // The resolver and each address have their own time limits.
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let ended = std::io::Error::other("the thread that connects has ended");
                return Err(unreachable(format!("{host}:{port}"), ended));
            }
        }
    }
}

fn reach(host: &str, port: u16) -> Result<TcpStream> {
    let found =
        (host, port).to_socket_addrs().map_err(|error| unreachable(format!("{host}:{port}"), error))?;
    let mut last = None;
    for address in found {
        match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(unreachable(address.to_string(), error)),
        }
    }
    let none = || unreachable(format!("{host}:{port}"), std::io::Error::other("the name has no address"));
    Err(last.unwrap_or_else(none))
}

fn unreachable(address: String, source: std::io::Error) -> Error {
    Error::Unreachable { address, source: Arc::new(source) }
}
