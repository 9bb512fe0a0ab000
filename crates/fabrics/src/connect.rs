//! TCP connections, whose setup ends in time and on a request to stop.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use onehop_os::StopSignal;

use crate::{Error, Result, SubsystemAddress};

/// Time limit for each address of a host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a wait checks for a request to stop.
pub(crate) const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time that is left until `due`.
pub(crate) fn left(due: Instant) -> Duration {
    due.saturating_duration_since(Instant::now())
}

/// Connects to the first address of the target's host that answers, at the latest at `due`. Each `turn` starts with another
/// address.
pub(crate) fn connect_to_host(
    target: &SubsystemAddress,
    turn: u32,
    due: Instant,
    stop: &StopSignal,
) -> Result<TcpStream> {
    let (host, port) = (target.host.clone(), target.port);
    let resolve = move || {
        let mut addresses = (host.as_str(), port).to_socket_addrs()?.collect();
        take_turn(&mut addresses, turn);
        Ok(addresses)
    };
    connect_within(target.address(), due, stop, resolve)
}

/// Puts another address first. Turns after the first do not depend on the resolver's order, which may take turns itself.
fn take_turn(addresses: &mut Vec<SocketAddr>, turn: u32) {
    if turn > 0 {
        addresses.sort_unstable();
        addresses.dedup();
        let first = turn as usize % addresses.len().max(1);
        addresses.rotate_left(first);
    }
}

/// Connects to one address, at the latest at `due`.
pub(crate) fn connect_to_address(at: SocketAddr, due: Instant, stop: &StopSignal) -> Result<TcpStream> {
    connect_within(at.to_string(), due, stop, move || Ok(vec![at]))
}

/// Connects on another thread: neither the resolver nor a connection attempt can be interrupted. If the thread is too
/// late, it closes its connection.
fn connect_within(
    name: String,
    due: Instant,
    stop: &StopSignal,
    resolve: impl FnOnce() -> std::io::Result<Vec<SocketAddr>> + Send + 'static,
) -> Result<TcpStream> {
    let (sender, receiver) = mpsc::channel();
    let label = name.clone();
    let work = move || {
        let end = resolve().map_err(|error| unreachable(label.clone(), error));
        // Nobody receives it after a request to stop, or when it is too late.
        let _ = sender.send(end.and_then(|addresses| reach(label, &addresses, due)));
    };
    let spawned = std::thread::Builder::new().name("nvme-tcp connect".into()).spawn(work);
    spawned.map_err(|source| unreachable(name.clone(), source))?;
    loop {
        if stop.is_set() {
            return Err(Error::Interrupted);
        }
        let pause = left(due).min(STOP_POLL_INTERVAL);
        match receiver.recv_timeout(pause) {
            Ok(end) => return end,
            Err(RecvTimeoutError::Timeout) if pause.is_zero() => {
                return Err(unreachable(name, std::io::ErrorKind::TimedOut.into()));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                let ended = std::io::Error::other("the thread that connects has ended");
                return Err(unreachable(name, ended));
            }
        }
    }
}

/// Tries each address in turn. Those that do not answer leave the others their share of the time.
fn reach(name: String, addresses: &[SocketAddr], due: Instant) -> Result<TcpStream> {
    let mut last = unreachable(name, std::io::Error::other("the name has no address"));
    for (i, address) in addresses.iter().enumerate() {
        let share = left(due) / (addresses.len() - i) as u32;
        // A time limit of zero is refused.
        let limit = share.clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
        match TcpStream::connect_timeout(address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = unreachable(address.to_string(), error),
        }
    }
    Err(last)
}

fn unreachable(address: String, source: std::io::Error) -> Error {
    Error::Unreachable { address, source: Arc::new(source) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resolver_that_does_not_answer_ends_in_time() {
        let resolve = || {
            std::thread::sleep(Duration::from_secs(60));
            Ok(Vec::new())
        };
        let (start, stop) = (Instant::now(), StopSignal::default());
        let due = start + Duration::from_millis(200);
        let error = connect_within("store.example:4420".into(), due, &stop, resolve).unwrap_err();
        assert!(error.to_string().contains("no connection to store.example:4420"), "{error}");
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }

    #[test]
    fn the_name_of_a_host_is_written_as_in_the_targets_name() {
        let target = "nvme-tcp://[::1]:4420/nqn.2026-11.org.example:x".parse().unwrap();
        // Too late from the start, unless nobody listens there.
        let error = connect_to_host(&target, 0, Instant::now(), &StopSignal::default()).unwrap_err();
        assert!(error.to_string().contains("no connection to [::1]:4420"), "{error}");
    }

    #[test]
    fn every_address_of_a_host_has_its_turn() {
        let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let first = |turn, ports: [u16; 3]| {
            let mut addresses = ports.map(address).to_vec();
            take_turn(&mut addresses, turn);
            addresses[0].port()
        };
        // The resolver's own choice, and then all, although the resolver takes turns as well.
        assert_eq!(first(0, [2, 3, 1]), 2);
        let orders = [[3, 1, 2], [2, 3, 1], [1, 2, 3]];
        let mut reached: Vec<_> = (1..).zip(orders).map(|(turn, ports)| first(turn, ports)).collect();
        reached.sort_unstable();
        assert_eq!(reached, [1, 2, 3]);
        take_turn(&mut Vec::new(), 1);
    }
}
