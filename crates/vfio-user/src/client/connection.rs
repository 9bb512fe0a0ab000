//! A connection to a server: one request and reply at a time, each with a time limit.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use onehop_os::StopSignal;
use rustix::io::Errno;

use crate::error::{Broken, ClientError};
use crate::link::{MESSAGE_TIMEOUT, Message, MessageSocket, connect_at_once};
use crate::wire::{self, MAX_DATA, MAX_FDS, MessageHeader, command};

/// The region of the configuration space.
pub(super) const CONFIG: u32 = 7;

/// How long a reply may still take after a request to stop: a working server needs less.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// A server's reply.
pub(super) struct Reply {
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

/// Ends the wait for a reply some time after a request to stop.
struct StopGrace {
    stop: StopSignal,
    /// When the current wait first saw the request.
    since: Mutex<Option<Instant>>,
}

impl StopGrace {
    fn since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.stop.is_set() && self.since().get_or_insert_with(Instant::now).elapsed() >= STOP_TIMEOUT
    }
}

struct ConnectionState {
    link: MessageSocket<Box<dyn Fn() -> bool + Send>>,
    grace: Arc<StopGrace>,
    last: u16,
    /// Why the connection is unusable.
    broken: Option<String>,
    /// A request to stop made it so.
    is_stopped: bool,
}

/// A connection with a negotiated version.
pub(super) struct Connection {
    state: Mutex<ConnectionState>,
    path: PathBuf,
    name: String,
}

impl Connection {
    pub(super) fn open(path: &Path, stop: &StopSignal) -> Result<Self, ClientError> {
        let stream = reach(path)?;
        let grace = Arc::new(StopGrace { stop: stop.clone(), since: Mutex::default() });
        let ends = grace.clone();
        let link =
            MessageSocket::new(stream, Box::new(move || ends.is_over()) as Box<dyn Fn() -> bool + Send>);
        let state = Mutex::new(ConnectionState { link, grace, last: 0, broken: None, is_stopped: false });
        let name = format!("vfio-user:{}", path.display());
        let connection = Self { state, path: path.into(), name };
        let capabilities = serde_json::json!({ "capabilities": {
            "max_msg_fds": MAX_FDS,
            "max_data_xfer_size": MAX_DATA,
        }});
        let ask = [&[0, 0, 1, 0], capabilities.to_string().as_bytes(), &[0]].concat();
        let said = connection.request(command::VERSION, &ask, None).map_err(|error| match error {
            // A server that is busy with another client still accepts the connection.
            ClientError::Broken { path, what, why } => {
                ClientError::Broken { path, what, why: format!("{why}; it may be serving another client") }
            }
            other => other,
        })?;
        match said.payload.get(..2) {
            Some([0, 0]) => Ok(connection),
            major => {
                let major = major.and_then(|raw| raw.try_into().ok()).map(u16::from_le_bytes);
                let why = match major {
                    Some(major) => format!("its protocol version is {major}, not 0"),
                    None => "it does not say its protocol version".into(),
                };
                Err(ClientError::Unfit { path: path.into(), why })
            }
        }
    }

    /// The controller's name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn state(&self) -> MutexGuard<'_, ConnectionState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request to stop ended the wait for a reply. The connection is unusable since.
    pub(super) fn is_stopped(&self) -> bool {
        self.state().is_stopped
    }

    /// Sends a request and waits for its reply.
    pub(super) fn request(
        &self,
        number: u16,
        payload: &[u8],
        file: Option<&File>,
    ) -> Result<Reply, ClientError> {
        let what = wire::name(number);
        let mut state = self.state();
        let exchanged = state.exchange(number, payload, file);
        drop(state);
        let Message { header, payload, fds } =
            exchanged.map_err(|why| ClientError::Broken { path: self.path.clone(), what, why })?;
        if header.is_error() {
            let source = std::io::Error::from_raw_os_error(header.errno.cast_signed());
            return Err(ClientError::Refused { path: self.path.clone(), what, source });
        }
        Ok(Reply { payload, fds })
    }

    /// Reads a region.
    pub(super) fn read(&self, region: u32, offset: u64, bytes: usize) -> Result<Vec<u8>, ClientError> {
        let mut payload =
            self.request(command::REGION_READ, &access(region, offset, bytes, &[]), None)?.payload;
        let head = access(region, offset, bytes, &[]).len();
        if payload.len() != head + bytes {
            let why = format!("received {} bytes instead of {bytes}", payload.len().saturating_sub(head));
            self.state().broken.get_or_insert_with(|| format!("REGION_READ: {why}"));
            return Err(ClientError::Broken { path: self.path.clone(), what: "REGION_READ", why });
        }
        Ok(payload.split_off(head))
    }

    /// Writes a region, and waits for the reply.
    pub(super) fn write(&self, region: u32, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let payload = access(region, offset, data.len(), data);
        self.request(command::REGION_WRITE, &payload, None).map(|_| ())
    }

    /// Writes a region without waiting. Later requests take effect after it. It is lost if the connection fails.
    pub(super) fn post(&self, region: u32, offset: u64, data: &[u8]) {
        let payload = access(region, offset, data.len(), data);
        let mut state = self.state();
        if state.broken.is_none() {
            let header = state.header(command::REGION_WRITE, payload.len()).posted();
            if let Err(broken) = state.link.send(&header, &payload, None) {
                state.broken = Some(broken.to_string());
            }
        }
    }
}

impl ConnectionState {
    fn header(&mut self, number: u16, payload: usize) -> MessageHeader {
        self.last = self.last.wrapping_add(1);
        MessageHeader::request(self.last, number, payload)
    }

    /// Sends a request and receives its reply; after a failure the connection is unusable.
    fn exchange(&mut self, number: u16, payload: &[u8], file: Option<&File>) -> Result<Message, String> {
        if let Some(why) = &self.broken {
            return Err(why.clone());
        }
        *self.grace.since() = None;
        let header = self.header(number, payload.len());
        let done = self.link.send(&header, payload, file).and_then(|()| self.await_reply(&header));
        match done {
            Ok(Some(message)) => return Ok(message),
            Ok(None) if self.grace.is_over() => {
                self.is_stopped = true;
                self.broken = Some("stopped on request".into());
            }
            Ok(None) => self.broken = Some("the server closed it".into()),
            Err(broken) => self.broken = Some(broken.to_string()),
        }
        Err(self.broken.clone().unwrap_or_default())
    }

    /// Waits for the reply to a request. Refuses requests of the server, and ignores replies to posted writes, which
    /// some servers send.
    fn await_reply(&self, ask: &MessageHeader) -> Result<Option<Message>, Broken> {
        let due = Instant::now() + MESSAGE_TIMEOUT;
        while Instant::now() < due {
            let Some(message) = self.link.receive_by(Some(due))? else { return Ok(None) };
            let header = &message.header;
            if header.is_request() && header.wants_reply() {
                let errno = Errno::OPNOTSUPP.raw_os_error().unsigned_abs();
                self.link.send(&header.refusal(errno), &[], None)?;
            } else if !header.is_request() && header.id == ask.id {
                return Ok(Some(message));
            }
        }
        Err(Broken::Slow("answer", MESSAGE_TIMEOUT.as_secs()))
    }
}

fn reach(path: &Path) -> Result<UnixStream, ClientError> {
    connect_at_once(path).map_err(|errno| ClientError::Connect {
        path: path.into(),
        source: errno.into(),
        hint: match errno {
            Errno::AGAIN => "; other clients are already waiting for this server",
            Errno::NOENT | Errno::CONNREFUSED => "; start its server first, such as `onehop sim serve`",
            _ => "",
        },
    })
}

/// The payload of a region access.
fn access(region: u32, offset: u64, bytes: usize, data: &[u8]) -> Vec<u8> {
    let count = (bytes as u32).to_le_bytes();
    [offset.to_le_bytes().as_slice(), &region.to_le_bytes(), &count, data].concat()
}
