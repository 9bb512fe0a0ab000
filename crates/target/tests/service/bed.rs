//! A target in a temporary folder, clients, and a TCP proxy between them that can cut, stall and corrupt connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use onehop_target::auth::Key;
use onehop_target::client::{self, RemoteTree};
use onehop_target::server::{self, Target};
use onehop_target::tcp::{TcpAcceptor, TcpConnector};
use onehop_target::wire::{Caller, Name, OpenMode};

/// A timeout that a busy machine does not reach.
pub const LONG: Duration = Duration::from_secs(60);
pub const ME: Caller = Caller::ROOT;
pub const BOTH: OpenMode = OpenMode {
    read: true,
    write: true,
    truncate: false,
    sync: false,
    data_sync: false,
    no_atime: false,
    execute: false,
};
pub const READ: OpenMode = OpenMode { write: false, ..BOTH };

pub fn key() -> Key {
    Key::new(&[5; 32]).unwrap()
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

/// A temporary folder.
pub struct Bed {
    pub dir: PathBuf,
}

impl Bed {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("onehop-target-{}-{number}", std::process::id()));
        std::fs::create_dir_all(dir.join("root")).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { dir }
    }

    pub fn root(&self) -> PathBuf {
        self.dir.join("root")
    }

    pub fn options(&self) -> server::ServerOptions {
        server::ServerOptions::new(&self.root(), Some(key()))
    }

    pub fn target(&self) -> (Target, SocketAddr) {
        start(self.options(), "127.0.0.1:0")
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

pub fn start(options: server::ServerOptions, address: &str) -> (Target, SocketAddr) {
    let begun = Instant::now();
    // The port of a target that has just ended may be in use for a moment.
    let acceptor = loop {
        match TcpAcceptor::listen(address) {
            Ok(acceptor) => break acceptor,
            Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let address = acceptor.local().unwrap();
    (Target::start(options, vec![Box::new(acceptor)]).unwrap(), address)
}

pub fn options() -> client::ClientOptions {
    client::ClientOptions { lanes: 2, ..client::ClientOptions::new(Some(key())) }
}

pub fn connect(address: SocketAddr, options: client::ClientOptions) -> RemoteTree {
    let connector = TcpConnector::new(&address.to_string()).unwrap();
    RemoteTree::connect(Box::new(connector), options).unwrap()
}

/// A TCP proxy that can be disturbed.
pub struct Wire {
    pub address: SocketAddr,
    state: Arc<State>,
}

struct State {
    to: std::sync::Mutex<SocketAddr>,
    /// Nothing passes.
    stalled: AtomicBool,
    /// Nothing passes from the target to the client.
    replies_blocked: AtomicBool,
    /// Counts cuts, which end all connections.
    cuts: AtomicU64,
    /// Changes one byte in this many; 0 for none.
    corrupt: AtomicU64,
    over: AtomicBool,
}

impl Wire {
    pub fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let state = Arc::new(State {
            to: to.into(),
            stalled: false.into(),
            replies_blocked: false.into(),
            cuts: 0.into(),
            corrupt: 0.into(),
            over: false.into(),
        });
        let shared = state.clone();
        std::thread::spawn(move || {
            while !shared.over.load(Ordering::Acquire) {
                match listener.accept() {
                    Ok((near, _)) => carry(near, &shared),
                    Err(_) => std::thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        Self { address, state }
    }

    pub fn lead_to(&self, to: SocketAddr) {
        *self.state.to.lock().unwrap() = to;
    }

    pub fn stall(&self, stalled: bool) {
        self.state.stalled.store(stalled, Ordering::Release);
    }

    /// Stops everything from the target, but not to it.
    pub fn block_replies(&self, replies_blocked: bool) {
        self.state.replies_blocked.store(replies_blocked, Ordering::Release);
    }

    pub fn cut(&self) {
        self.state.cuts.fetch_add(1, Ordering::AcqRel);
    }

    pub fn corrupt(&self, one_in: u64) {
        self.state.corrupt.store(one_in, Ordering::Release);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::Release);
    }
}

fn carry(near: TcpStream, state: &Arc<State>) {
    let to = *state.to.lock().unwrap();
    let Ok(far) = TcpStream::connect(to) else { return };
    for (from, to, is_back) in [(near.try_clone(), far.try_clone(), false), (Ok(far), Ok(near), true)] {
        let (mut from, mut to, state) = (from.unwrap(), to.unwrap(), state.clone());
        std::thread::spawn(move || {
            let is_stalled = || {
                state.stalled.load(Ordering::Acquire)
                    || (is_back && state.replies_blocked.load(Ordering::Acquire))
            };
            from.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
            let (cuts, mut bytes, mut seen) = (state.cuts.load(Ordering::Acquire), vec![0; 65_536], 0_u64);
            loop {
                let is_disconnected =
                    state.cuts.load(Ordering::Acquire) != cuts || state.over.load(Ordering::Acquire);
                if is_disconnected {
                    break;
                }
                if is_stalled() {
                    std::thread::sleep(Duration::from_millis(2));
                    continue;
                }
                let count = match from.read(&mut bytes) {
                    Ok(0) => break,
                    Ok(count) => count,
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                    Err(_) => break,
                };
                // Data read before a stall must not pass during it.
                while is_stalled() && !state.over.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                let corrupt = state.corrupt.load(Ordering::Acquire);
                seen += count as u64;
                if corrupt > 0 && seen / corrupt != (seen - count as u64) / corrupt {
                    bytes[count / 2] ^= 0x10;
                }
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = from.shutdown(std::net::Shutdown::Both);
            let _ = to.shutdown(std::net::Shutdown::Both);
        });
    }
}
