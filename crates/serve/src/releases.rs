//! What is done once a link is gone: network cards let go of its memory, which is then freed. Either may take long.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use onehop_target::transport::Shareable;
use rustix::fs::{OFlags, fstat};

use crate::daemon::DaemonShared;
use crate::io::pool::SlowCall;
use crate::shm::open_shared;
use crate::table::{LinkContent, LinkedBuffer, SWEEP};

/// Bytes that are not freed at once.
const LONG: u64 = 64 << 20;

impl DaemonShared {
    /// Something is no longer in the table: lets go of it, and calls `then`. It is done at once where nothing of it takes long, and
    /// otherwise by a thread of its owner's, so that no thread that others need waits.
    pub fn release(self: &Arc<Self>, gone: Arc<LinkedBuffer>, then: impl FnOnce() + Send + 'static) {
        let is_quick = match &gone.what {
            LinkContent::Ring(_) => true,
            LinkContent::Host(_) => gone.len() < LONG && self.options.source.target().is_none(),
            // A GPU's driver unmaps it.
            LinkContent::Gpu(_) => false,
        };
        if is_quick {
            self.removed(&gone);
            drop(gone);
            return then();
        }
        let (shared, person) = (self.clone(), self.persons.of(gone.owner.uid));
        let call = move || {
            shared.removed(&gone);
            drop(gone);
            then();
        };
        self.releases.add(person, SlowCall(Box::new(call)));
    }

    fn removed(&self, buffer: &LinkedBuffer) {
        match &buffer.what {
            LinkContent::Ring(ring) => return self.workers.remove(ring),
            LinkContent::Gpu(gpu) => gpu.engine.let_go(),
            LinkContent::Host(_) => {}
        }
        self.forget_registrations(buffer);
    }

    /// Has network cards let go of a buffer's memory.
    pub fn forget_registrations(&self, buffer: &LinkedBuffer) {
        let Some(tree) = self.options.source.target() else { return };
        let memory: Shareable = match &buffer.what {
            LinkContent::Ring(_) => return,
            LinkContent::Host(mem) => Arc::new(mem.clone()),
            LinkContent::Gpu(gpu) => Arc::new(gpu.region.clone()),
        };
        tree.forget_memory(&memory);
    }

    /// Forgets the links of programs that have ended, and starts threads that could not be started, as long as the daemon runs.
    pub fn sweep(self: &Arc<Self>) {
        while !self.is_over() {
            self.sweep_once();
            self.start_missing_threads();
            std::thread::sleep(SWEEP);
        }
    }

    /// Names and rings go at once, whatever network cards do. Names go by this thread: one that acts as a user can no longer tell cards
    /// anything itself.
    fn sweep_once(self: &Arc<Self>) {
        for gone in self.table.sweep() {
            self.remove_name(&gone);
            self.release(gone, || ());
        }
    }

    /// Takes the name of a buffer away that its program can no longer take away itself: the memory would stay for ever.
    fn remove_name(&self, gone: &LinkedBuffer) {
        let ours = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b"hf3fs-iov-");
        let made_by_us =
            matches!(gone.what, LinkContent::Host(_)) && gone.target.file_name().is_some_and(ours);
        // The name may be another user's by now: this one may take their own away.
        let Ok(_acting) = self.act_as(gone.owner) else { return };
        let is_theirs = |file: OwnedFd| fstat(&file).is_ok_and(|stat| stat.st_uid == gone.owner.uid);
        if made_by_us && open_shared(&gone.target, OFlags::PATH).is_ok_and(is_theirs) {
            let _ = std::fs::remove_file(&gone.target);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::Path;
    use std::sync::RwLock;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use onehop_os::HostMem;
    use onehop_target::client::{ClientOptions, RemoteTree};
    use onehop_target::server::{ServerOptions, Target};
    use onehop_target::tcp::{TcpAcceptor, TcpConnector};
    use onehop_target::transport::{Connector, Link};
    use onehop_usrbio::{Id, Name};

    use super::*;
    use crate::daemon::MountOptions;
    use crate::fs::virt;
    use crate::table::Owner;

    const LONG_WAIT: Duration = Duration::from_secs(60);

    /// Network cards that take long to let go of memory.
    struct SlowCards {
        tcp: TcpConnector,
        gate: Arc<RwLock<()>>,
    }

    impl Connector for SlowCards {
        fn transport(&self) -> &'static str {
            self.tcp.transport()
        }

        fn peer(&self) -> &str {
            self.tcp.peer()
        }

        fn connect(&self, lane: usize, limit: Duration) -> onehop_target::Result<Box<dyn Link>> {
            self.tcp.connect(lane, limit)
        }

        fn forget(&self, _: &Shareable) {
            drop(self.gate.read());
        }
    }

    /// A daemon whose cards let go of memory when they may, and the target that it uses.
    fn with_slow_cards(gate: &Arc<RwLock<()>>) -> (Arc<DaemonShared>, Target) {
        let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
        let address = acceptor.local().unwrap().to_string();
        let served = ServerOptions::new(&std::env::temp_dir(), None);
        let target = Target::start(served, vec![Box::new(acceptor)]).unwrap();
        let cards = SlowCards { tcp: TcpConnector::new(&address).unwrap(), gate: gate.clone() };
        let tree = RemoteTree::connect(Box::new(cards), ClientOptions::new(None)).unwrap();
        (DaemonShared::new(MountOptions::of_target(Path::new("/"), tree)).unwrap(), target)
    }

    #[test]
    fn names_of_ended_programs_go_whatever_cards_do() {
        let gate = Arc::new(RwLock::new(()));
        let (shared, target) = with_slow_cards(&gate);
        let mut program = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let owner = Owner { uid, gid, pid: program.id() };
        let names: Vec<_> = (0..3)
            .map(|_| {
                let id = Id::random().unwrap();
                let path = Path::new(onehop_usrbio::SHM).join(format!("hf3fs-iov-{id}"));
                std::fs::write(&path, "").unwrap();
                let content = LinkContent::Host(HostMem::anonymous(4096).unwrap());
                shared.table.add(Name::buffer(id, 0), &id.to_string(), &path, owner, content).unwrap();
                path
            })
            .collect();
        program.kill().unwrap();
        program.wait().unwrap();
        let closed = gate.write().unwrap();
        shared.sweep_once();
        let left: Vec<_> = names.iter().filter(|path| path.exists()).collect();
        assert!(left.is_empty(), "{left:?} wait for the cards");
        drop(closed);
        shared.end();
        drop(target);
    }

    #[test]
    fn cards_that_take_long_keep_no_thread_of_others_waiting() {
        let gate = Arc::new(RwLock::new(()));
        let (shared, target) = with_slow_cards(&gate);
        let add = |uid| {
            let (owner, id) = (Owner { uid, gid: uid, pid: std::process::id() }, Id::random().unwrap());
            let (name, mem) = (Name::buffer(id, 0), HostMem::anonymous(4096).unwrap());
            let content = LinkContent::Host(mem);
            shared.table.add(name, &id.to_string(), Path::new("/"), owner, content).unwrap().link.clone()
        };
        let [first, second, third] = [21_001, 21_001, 21_002].map(add);
        let closed = gate.write().unwrap();
        let (say, said) = channel();
        let ((ask, asked), by) = (channel(), shared.clone());
        let session = std::thread::spawn(move || {
            // As the thread of a session that takes the calls of all users.
            virt::unlink(&by, OsStr::new(&first), 21_001).unwrap();
            virt::remove(&by, OsStr::new(&second), 21_001, move |done| say.send(done).unwrap());
            assert_eq!(virt::lookup(&by, virt::IOVS, OsStr::new(&third), 21_002).err(), None);
            ask.send(()).unwrap();
        });
        assert!(asked.recv_timeout(LONG_WAIT).is_ok(), "a thread of the session waits for the cards");
        assert!(said.try_recv().is_err(), "a program that waits for that was answered");
        assert_eq!(shared.table.all().len(), 1);
        drop(closed);
        assert_eq!(said.recv_timeout(LONG_WAIT), Ok(Ok(())));
        session.join().unwrap();
        shared.end();
        drop(target);
    }
}
