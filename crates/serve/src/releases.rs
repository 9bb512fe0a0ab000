//! Releases the memory of a link after it was removed: network cards deregister it, and it is unmapped. Either may take
//! long.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use onehop_target::transport::Shareable;
use rustix::fs::{OFlags, fstat};

use crate::daemon::DaemonShared;
use crate::io::pool::SlowCall;
use crate::shm::open_shared;
use crate::table::{LinkContent, LinkedBuffer, SWEEP};

/// Freeing more bytes than this takes long.
const SLOW_BYTES: u64 = 64 << 20;

impl DaemonShared {
    /// Releases the memory of a removed link, and then calls `then`: at once if that is quick, otherwise on a pool
    /// thread of its owner, so that no other user waits.
    pub fn release(self: &Arc<Self>, gone: Arc<LinkedBuffer>, then: impl FnOnce() + Send + 'static) {
        let is_quick = match &gone.what {
            LinkContent::Ring(_) => true,
            LinkContent::Host(_) => gone.len() < SLOW_BYTES && self.options.source.target().is_none(),
            // The GPU's driver unmaps it.
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
            LinkContent::Gpu(gpu) => gpu.engine.drop_removed_buffers(),
            LinkContent::Host(_) => {}
        }
        self.forget_registrations(buffer);
    }

    /// Makes network cards deregister a buffer's memory.
    pub fn forget_registrations(&self, buffer: &LinkedBuffer) {
        let Some(tree) = self.options.source.target() else { return };
        let memory: Shareable = match &buffer.what {
            LinkContent::Ring(_) => return,
            LinkContent::Host(mem) => Arc::new(mem.clone()),
            LinkContent::Gpu(gpu) => Arc::new(gpu.region.clone()),
        };
        tree.forget_memory(&memory);
    }

    /// Removes the links of ended programs, and retries to start threads, until the daemon ends.
    pub fn sweep(self: &Arc<Self>) {
        while !self.is_over() {
            self.sweep_once();
            self.start_missing_threads();
            std::thread::sleep(SWEEP);
        }
    }

    /// Removes names and rings at once, without waiting for network cards. Names are removed on this thread: one that
    /// acts as a user can no longer call the cards' library.
    fn sweep_once(self: &Arc<Self>) {
        for gone in self.table.sweep() {
            self.remove_name(&gone);
            self.release(gone, || ());
        }
    }

    /// Removes the file of a buffer whose program has ended and cannot remove it itself. Otherwise the memory would
    /// never be freed.
    fn remove_name(&self, gone: &LinkedBuffer) {
        let ours = |name: &std::ffi::OsStr| name.as_encoded_bytes().starts_with(b"hf3fs-iov-");
        let made_by_us =
            matches!(gone.what, LinkContent::Host(_)) && gone.target.file_name().is_some_and(ours);
        // The name may be another user's by now, so act as the owner.
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

    const LONG: Duration = Duration::from_secs(60);

    /// Network cards whose deregistration takes long.
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

    /// A daemon whose cards deregister memory when the gate is open, and its target.
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
    fn names_of_ended_programs_are_removed_before_slow_cards() {
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
    fn slow_cards_block_no_thread_of_others() {
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
        let (tx, rx) = channel();
        let ((ask, asked), by) = (channel(), shared.clone());
        let session = std::thread::spawn(move || {
            // Like a session thread, which serves all users.
            virt::unlink(&by, OsStr::new(&first), 21_001).unwrap();
            virt::remove(&by, OsStr::new(&second), 21_001, move |done| tx.send(done).unwrap());
            assert_eq!(virt::lookup(&by, virt::IOVS, OsStr::new(&third), 21_002).err(), None);
            ask.send(()).unwrap();
        });
        assert!(asked.recv_timeout(LONG).is_ok(), "a thread of the session waits for the cards");
        assert!(rx.try_recv().is_err(), "the removal was answered too early");
        assert_eq!(shared.table.all().len(), 1);
        drop(closed);
        assert_eq!(rx.recv_timeout(LONG), Ok(Ok(())));
        session.join().unwrap();
        shared.end();
        drop(target);
    }
}
