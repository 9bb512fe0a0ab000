//! An association: a connected admin queue with its keep-alive.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::{HostMem, StopSignal};
use onehop_proto::fabrics::{self, ANY_CONTROLLER, Connect, Connected, connect_data, wide_result};
use onehop_proto::identify;
use onehop_proto::regs::{Cap, Cc, Csts, Version, offset};
use onehop_proto::{Cqe, Sqe, Status, admin};

use crate::auth::{ChapParties, authenticate};
use crate::connect::{connect_to_address, connect_to_host, left};
use crate::health::LinkHealth;
use crate::link::{LinkHandle, LinkSetup, QueueLink};
use crate::queue::{Data, MAX_DEPTH};
use crate::ring::RingPair;
use crate::{Error, Host, Result, SubsystemAddress, patch};

/// Time limit for connecting a controller, from the name of its host to its capabilities.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for connecting an I/O queue, and for the check that follows.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(4);
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit of each of this crate's own commands.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of a controller's shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// A shorter time than this is not enough for another command.
const LEAST_TIME: Duration = Duration::from_millis(50);
/// How often the status is polled.
const STATUS_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Entries of the admin queue.
pub(crate) const ADMIN_ENTRIES: u16 = 32;
/// How long the controller may take to release a disconnected queue.
const FORGET_TIMEOUT: Duration = Duration::from_secs(2);
/// Statuses that targets return for a queue that still has a connection: Command Sequence Error, Invalid Queue
/// Identifier, Controller Busy.
const STILL_CONNECTED: [Status; 3] = [Status::new(0, 0x0c), Status::new(1, 0x01), Status::new(1, 0x81)];

/// A connected controller.
pub(crate) struct Association {
    target: Arc<SubsystemAddress>,
    host: Arc<Host>,
    /// Where the admin queue is connected. The host's name may lead elsewhere the next time.
    peer: SocketAddr,
    cntlid: u16,
    pub(crate) cap: Cap,
    pub(crate) version: Version,
    pub(crate) health: Arc<LinkHealth>,
    /// Maximum data in the capsule of an I/O command.
    capsule: AtomicU32,
    keep_alive_thread: Option<JoinHandle<()>>,
    stop: StopSignal,
    admin: LinkHandle,
}

impl Association {
    /// Connects the admin queue and reads the controller's capabilities. It is not enabled yet. Each `turn` starts with
    /// another address of the target's host.
    pub(crate) fn connect(
        target: Arc<SubsystemAddress>,
        host: Arc<Host>,
        turn: u32,
        stop: StopSignal,
    ) -> Result<Self> {
        let (health, due) = (Arc::new(LinkHealth::default()), Instant::now() + CONNECT_TIMEOUT);
        let label = format!("the admin queue of {target}");
        let stream = connect_to_host(&target, turn, due, &stop)?;
        let failed = |source| Error::Io { queue: label.clone(), source: Arc::new(source) };
        let peer = stream.peer_addr().map_err(failed)?;
        let admin = QueueLink::open(LinkSetup {
            stream,
            label: label.clone(),
            depth: ADMIN_ENTRIES - 1,
            digests: target.digests,
            capsule: 0,
            health: Some(health.clone()),
            due,
            stop: stop.clone(),
        })?;
        let connect = Connect {
            qid: 0,
            size_z: ADMIN_ENTRIES - 1,
            no_flow_control: false,
            keep_alive_ms: target.keep_alive.as_millis().min(u32::MAX.into()) as u32,
        };
        let connected = connect_queue(&admin, &label, (&target, &host), connect, ANY_CONTROLLER, due)?;
        let mut this = Self {
            target,
            host,
            peer,
            cntlid: connected.cntlid,
            cap: Cap(0),
            version: Version(0),
            health,
            capsule: AtomicU32::new(0),
            keep_alive_thread: None,
            stop,
            admin,
        };
        this.cap = Cap(this.property(offset::CAP, true, due)?);
        this.version = Version(this.property(offset::VS, false, due)? as u32);
        this.keep_alive()?;
        Ok(this)
    }

    pub(crate) fn admin_link(&self) -> Arc<QueueLink> {
        Arc::clone(&self.admin)
    }

    fn property(&self, at: u32, is_wide: bool, due: Instant) -> Result<u64> {
        let cqe = self.run("Property Get", &fabrics::property_get(at, is_wide), due)?;
        Ok(if is_wide { wide_result(&cqe) } else { cqe.result().into() })
    }

    fn set_property(&self, at: u32, value: u32, due: Instant) -> Result<()> {
        self.run("Property Set", &fabrics::property_set(at, value), due).map(|_| ())
    }

    fn run(&self, what: &'static str, sqe: &Sqe, due: Instant) -> Result<Cqe> {
        answered(what, self.admin.exchange(what, sqe, Data::None, None, command_limit(due))?)
    }

    /// Runs an admin command that fills `memory`.
    pub(crate) fn read(
        &self,
        what: &'static str,
        sqe: &Sqe,
        memory: &HostMem,
        bytes: u32,
        due: Instant,
    ) -> Result<Cqe> {
        let answer = self.admin.exchange(what, sqe, Data::In(bytes), Some(memory), command_limit(due))?;
        answered(what, answer)
    }

    /// Enables the controller and waits until it is ready: for the time that it may need, and no longer than `due`. Its
    /// answers have the time of any command.
    pub(crate) fn enable(&self, cc: Cc, due: Option<Instant>) -> Result<()> {
        let limit = Duration::from_millis(u64::from(self.cap.timeout_ms().max(500)));
        self.wait_for("ready", cc, (limit, due), Some(&self.stop), |csts| csts.rdy())
    }

    /// Shuts the controller down and waits for it; returns its status.
    pub(crate) fn shut_down(&self, cc: Cc) -> Result<()> {
        let due = Some(Instant::now() + SHUTDOWN_TIMEOUT);
        let is_done = |csts: Csts| csts.shst() == Csts::SHST_COMPLETE;
        self.wait_for("shut down", cc, (SHUTDOWN_TIMEOUT, due), None, is_done)
    }

    /// Sets the configuration, and asks for the status until it is the wanted one: for `limit` from the answer to the
    /// first on, and all of it no longer than `due`.
    fn wait_for(
        &self,
        want: &'static str,
        cc: Cc,
        (limit, due): (Duration, Option<Instant>),
        stop: Option<&StopSignal>,
        done: impl Fn(Csts) -> bool,
    ) -> Result<()> {
        let next_due = || due.unwrap_or_else(|| Instant::now() + COMMAND_TIMEOUT);
        self.set_property(offset::CC, cc.0, next_due())?;
        let start = Instant::now();
        loop {
            let asked = start.elapsed();
            let csts = Csts(self.property(offset::CSTS, false, next_due())? as u32);
            if done(csts) {
                return Ok(());
            }
            if stop.is_some_and(StopSignal::is_set) {
                return Err(Error::Interrupted);
            }
            if csts.cfs() || asked >= limit || left(next_due()) < LEAST_TIME {
                return Err(Error::NotReady { want, waited: start.elapsed(), csts: csts.0 });
            }
            std::thread::sleep(STATUS_POLL_INTERVAL);
        }
    }

    /// Determines how much data the capsules of I/O commands hold.
    fn learn_capsule(&self, due: Instant) -> Result<u32> {
        let memory = HostMem::anonymous(identify::BYTES)?;
        let sqe = admin::identify(admin::cns::CONTROLLER, 0, 0, 0);
        self.read("Identify Controller", &sqe, &memory, identify::BYTES as u32, due)?;
        let mut page = [0; identify::BYTES];
        memory.read(0, &mut page)?;
        Ok(patch::capsule_room(&page))
    }

    /// Connects an I/O queue for the driver's rings.
    pub(crate) fn connect_io(&self, qid: u16, entries: u32, ring: RingPair) -> Result<LinkHandle> {
        let start = Instant::now();
        let due = start + QUEUE_TIMEOUT;
        let mut capsule = self.capsule.load(Ordering::Relaxed);
        if capsule == 0 {
            capsule = match self.learn_capsule(due) {
                // Every queue works without data in capsules; the next one may have better luck.
                Err(Error::Command { .. }) => 0,
                learned => learned?,
            };
            self.capsule.store(capsule, Ordering::Relaxed);
        }
        let label = format!("queue {qid} of {}", self.target);
        let mut pause = STATUS_POLL_INTERVAL;
        loop {
            let link = QueueLink::open(LinkSetup {
                stream: connect_to_address(self.peer, due, &self.stop)?,
                label: label.clone(),
                depth: entries.min(MAX_DEPTH.into()).saturating_sub(1) as u16,
                digests: self.target.digests,
                capsule,
                health: None,
                due,
                stop: self.stop.clone(),
            })?;
            let size_z = entries.saturating_sub(1).min(u16::MAX.into()) as u16;
            let connect = Connect { qid, size_z, no_flow_control: true, keep_alive_ms: 0 };
            match connect_queue(&link, &label, (&self.target, &self.host), connect, self.cntlid, due) {
                Ok(_) => {
                    // If another target has taken over this address, it may have a controller of the same number. But it does
                    // not answer on the admin connection.
                    self.property(offset::CSTS, false, due + CHECK_TIMEOUT)?;
                    link.set_ring(ring);
                    link.watch(&self.health);
                    return Ok(link);
                }
                // The controller may not have noticed yet that the queue's last connection has closed.
                Err(Error::Refused { status, .. })
                    if STILL_CONNECTED.iter().any(|known| status.is(*known))
                        && start.elapsed() < FORGET_TIMEOUT
                        && !self.stop.is_set() =>
                {
                    drop(link);
                    self.stop.sleep(pause);
                    pause *= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Keeps the association alive, and notices when the controller is gone.
    fn keep_alive(&mut self) -> Result<()> {
        let (health, admin) = (self.health.clone(), Arc::clone(&self.admin));
        let pause = self.target.keep_alive / 2;
        let work = move || {
            while !health.wait(pause) {
                let answer = admin.exchange("Keep Alive", &admin::keep_alive(), Data::None, None, pause);
                if answer.is_err() {
                    // The health records the reason.
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("nvme keep alive".into()).spawn(work);
        let failed = |source| Error::Io { queue: "the keep-alive thread".into(), source: Arc::new(source) };
        self.keep_alive_thread = Some(spawned.map_err(failed)?);
        Ok(())
    }
}

impl Drop for Association {
    fn drop(&mut self) {
        self.health.lose(&Error::Over { queue: format!("the admin queue of {}", self.target) });
        self.admin.close();
        if let Some(keep_alive_thread) = self.keep_alive_thread.take() {
            // It ends when its command does, and its commands have just ended.
            let _ = keep_alive_thread.join();
        }
    }
}

pub(crate) fn answered(what: &'static str, cqe: Cqe) -> Result<Cqe> {
    if cqe.status().is_ok() { Ok(cqe) } else { Err(Error::Command { what, status: cqe.status() }) }
}

/// Time limit for the next command, if all of them must end by `due`.
pub(crate) fn command_limit(due: Instant) -> Duration {
    COMMAND_TIMEOUT.min(left(due))
}

fn connect_queue(
    link: &QueueLink,
    label: &str,
    (target, host): (&SubsystemAddress, &Host),
    connect: Connect,
    cntlid: u16,
    due: Instant,
) -> Result<Connected> {
    let data = connect_data(host.id, cntlid, target.subsystem(), &host.nqn);
    let memory = HostMem::anonymous(data.len())?;
    memory.write(0, &data)?;
    // Always in the capsule, regardless of the limit for other commands.
    let data = Data::InCapsule(data.len() as u32);
    let cqe = link.exchange("Connect", &connect.command(), data, Some(&memory), command_limit(due))?;
    let (status, result) = (cqe.status(), cqe.result());
    if !status.is_ok() {
        return Err(if status.0 & 0x7ff == AUTHENTICATION_REQUIRED.0 {
            Error::Authentication { host: host.nqn.clone() }
        } else {
            Error::Refused { queue: label.to_owned(), status, result }
        });
    }
    let connected = Connected::from(result);
    let parties = ChapParties { queue: label, host, subsystem: target.subsystem() };
    match connected.authreq {
        // Targets may request it on the admin queue only; the other queues name its controller.
        0 if connect.qid == 0 && host.secrets.target.is_some() => {
            let why = "the target proves nothing: it asks for no authentication, and dhchap-ctrl does".into();
            Err(Error::AuthenticationFailed { queue: label.to_owned(), why })
        }
        0 => Ok(connected),
        fabrics::AUTHENTICATION => authenticate(link, &parties, due).map(|()| connected),
        _ => Err(Error::Unsupported("it asks for a secure channel (TLS), which onehop does not have".into())),
    }
}

/// Status of a Connect command if the host must authenticate.
const AUTHENTICATION_REQUIRED: Status = Status::new(1, 0x91);

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Mutex;
    use std::sync::atomic::AtomicBool;

    use onehop_os::Mapper;

    use super::*;
    use crate::ring::RingAt;
    use crate::space::MemorySpace;

    /// A target that answers every command with success.
    #[derive(Default)]
    struct ScriptedTarget {
        port: u16,
        /// The queues that were connected.
        connects: Mutex<Vec<u16>>,
        /// It answers no more commands of the admin queue.
        is_admin_silent: AtomicBool,
    }

    impl ScriptedTarget {
        fn start() -> Arc<Self> {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let this = Arc::new(Self { port: listener.local_addr().unwrap().port(), ..Self::default() });
            let target = this.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let target = target.clone();
                    std::thread::spawn(move || target.serve(stream));
                }
            });
            this
        }

        fn name(&self) -> SubsystemAddress {
            format!("nvme-tcp://127.0.0.1:{}/nqn.2026-11.org.example:x", self.port).parse().unwrap()
        }

        fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
            let mut init = [0; 128];
            stream.read_exact(&mut init)?;
            init[0] = 1;
            init[12..16].copy_from_slice(&4096u32.to_le_bytes());
            stream.write_all(&init)?;
            let mut qid = u16::MAX;
            loop {
                let mut pdu = vec![0; 8];
                stream.read_exact(&mut pdu)?;
                pdu.resize(usize::from(pdu[4]) | usize::from(pdu[5]) << 8, 0);
                stream.read_exact(&mut pdu[8..])?;
                if pdu[12] == fabrics::fctype::CONNECT {
                    qid = u16::from_le_bytes([pdu[50], pdu[51]]);
                    self.connects.lock().unwrap().push(qid);
                }
                let mut answer = [0; 24];
                (answer[0], answer[2], answer[4], answer[8]) = (5, 24, 24, 1);
                answer[20..22].copy_from_slice(&pdu[10..12]);
                if !(qid == 0 && self.is_admin_silent.load(Ordering::Acquire)) {
                    stream.write_all(&answer)?;
                }
            }
        }
    }

    fn connect(target: &ScriptedTarget) -> Association {
        let name = Arc::new(target.name());
        let host = Arc::new(Host::of(&name).unwrap());
        let association = Association::connect(name, host, 0, StopSignal::default()).unwrap();
        // Otherwise determined by a command that has data.
        association.capsule.store(4096, Ordering::Relaxed);
        association
    }

    /// Connects the first I/O queue.
    fn connect_first(association: &Association) -> Result<()> {
        let space = MemorySpace::new("t".into());
        let memory = space.alloc(8192).unwrap();
        let map = space.map(&memory).unwrap();
        let at = map.contiguous().unwrap().0;
        let ring = |at| RingAt { addr: at, entries: 8 };
        let rings = RingPair::new(&space, 1, ring(at), ring(at + 4096)).unwrap();
        association.connect_io(1, 8, rings).map(|_| ())
    }

    #[test]
    fn all_queues_are_connected_to_the_same_machine() {
        let [first, second] = [(); 2].map(|()| ScriptedTarget::start());
        let mut association = connect(&first);
        // From now on the name leads to the second.
        association.target = Arc::new(second.name());
        connect_first(&association).unwrap();
        assert_eq!(*first.connects.lock().unwrap(), [0, 1]);
        assert!(second.connects.lock().unwrap().is_empty());
    }

    #[test]
    fn a_queue_is_not_used_if_the_admin_connection_is_dead() {
        let target = ScriptedTarget::start();
        let association = connect(&target);
        target.is_admin_silent.store(true, Ordering::Release);
        let error = connect_first(&association).unwrap_err();
        assert!(matches!(error, Error::Silent { .. }), "{error}");
        assert_eq!(*target.connects.lock().unwrap(), [0, 1]);
    }
}
