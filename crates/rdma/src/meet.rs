//! How two sides establish a connection: over TCP they exchange their endpoints, and then keep that connection open as
//! a sign of life. The kernel closes it when a process ends in any way, and drops it when the other machine no longer
//! answers.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use onehop_os::Deadline;
use rustix::net::sockopt;

use crate::channel::{Channel, ChannelSize, PreparedChannel};
use crate::endpoint::Endpoint;
use crate::nic::Nic;
use crate::{Error, Result};

/// Idle time before a silent machine is probed, and the interval of further probes before it counts as gone.
const IDLE: Duration = Duration::from_secs(2);
const AGAIN: Duration = Duration::from_secs(1);
const TIMES: u32 = 3;

/// Client: makes a connection with the server at the other end of `stream`.
///
/// # Errors
/// When the other side is not such a server, does not answer in time, or the device refuses.
pub fn connect(nic: &Arc<Nic>, size: ChannelSize, stream: TcpStream, deadline: Deadline) -> Result<Channel> {
    let prepared = PreparedChannel::new(nic, size)?;
    prepare(&stream, deadline)?;
    send_endpoint(&stream, prepared.endpoint())?;
    let other = receive_endpoint(&stream)?;
    prepared.connect(&other, stream.into())
}

/// Server: the same with the client of this TCP connection, over the port that `choose` returns for its request.
///
/// # Errors
/// As for [`connect`].
pub fn accept<'a>(
    choose: impl FnOnce(&Endpoint) -> &'a Arc<Nic>,
    size: ChannelSize,
    stream: TcpStream,
    deadline: Deadline,
) -> Result<Channel> {
    prepare(&stream, deadline)?;
    let other = receive_endpoint(&stream)?;
    let prepared = PreparedChannel::new(choose(&other), ChannelSize { lane: other.lane, ..size })?;
    let mine = *prepared.endpoint();
    let met = stream.try_clone().map_err(|e| Error::system("dup of a socket", e))?;
    // Ready to receive before the other side can send.
    let channel = prepared.connect(&other, met.into())?;
    send_endpoint(&stream, &mine)?;
    Ok(channel)
}

fn prepare(stream: &TcpStream, deadline: Deadline) -> Result<()> {
    let left = deadline.left().max(Duration::from_millis(1));
    let set = || -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(left))?;
        stream.set_write_timeout(Some(left))?;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, IDLE)?;
        sockopt::set_tcp_keepintvl(stream, AGAIN)?;
        sockopt::set_tcp_keepcnt(stream, TIMES)?;
        Ok(())
    };
    set().map_err(|e| Error::system("setsockopt", e))
}

fn send_endpoint(mut stream: &TcpStream, endpoint: &Endpoint) -> Result<()> {
    stream.write_all(&endpoint.to_bytes()).map_err(|e| missed("sending this side's endpoint", e))
}

fn receive_endpoint(mut stream: &TcpStream) -> Result<Endpoint> {
    let mut bytes = [0; Endpoint::BYTES];
    stream.read_exact(&mut bytes).map_err(|e| missed("receiving the other side's endpoint", e))?;
    Endpoint::from_bytes(&bytes)
}

fn missed(what: &'static str, error: std::io::Error) -> Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::TimedOut(what),
        ErrorKind::UnexpectedEof => {
            Error::Broken("the other side has closed it before it sent its endpoint".into())
        }
        _ => Error::system(what, error),
    }
}
