//! What rings may ask for and what they may not, without a mount.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use onehop_target::tree::Local;
use onehop_target::wire::Access;
use onehop_usrbio::gpu::{Gpus, Memory, Mode};
use onehop_usrbio::ring::{Client, Completion, Request, Server, bytes};
use onehop_usrbio::{Id, Name, Priority, RingName};
use proptest::prelude::*;
use rustix::io::Errno;

use super::gpu::Engine;
use super::{IoStart, begin};
use crate::daemon::{Options, Shared};
use crate::table::{GpuMemory, Owner, What};
use crate::workers::Ring;

const SIZE: usize = 65_536;
const FILE: u64 = 50_000;
const INODE: u64 = 77;

const BOTH: Access = Access {
    read: true,
    write: true,
    truncate: false,
    sync: false,
    data_sync: false,
    no_atime: false,
    execute: false,
};

/// A file without a name.
fn file() -> File {
    let path =
        std::env::temp_dir().join(format!("onehop-io-{}-{}", std::process::id(), Id::random().unwrap()));
    std::fs::write(&path, vec![5; FILE as usize]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file
}

pub(super) struct Rig {
    pub shared: Arc<Shared>,
    host: Id,
    pub gpu: Id,
    mem: HostMem,
    /// In which a program that is its owner looks at the GPU's bytes.
    _gpus: Gpus,
    own: Memory,
}

fn owner(uid: u32) -> Owner {
    Owner { uid, gid: uid, pid: std::process::id() }
}

impl Rig {
    pub fn new() -> Self {
        let shared = Shared::new(Options::new(Path::new("/"), Path::new("/"))).unwrap();
        shared.opens.add(INODE, 1000, BOTH, Arc::new(Local::new(file())));
        let mem = HostMem::anonymous(SIZE).unwrap();
        let (host, gpu) = (Id::random().unwrap(), Id::random().unwrap());
        let name = Name::buffer(host, 4096);
        shared
            .table
            .add(name, &name.to_string(), Path::new("/"), owner(1000), What::Host(mem.clone()))
            .unwrap();
        // On a machine with a GPU, a person may have the same tests run on it.
        let real = std::env::var_os("ONEHOP_TEST_CUDA").is_some();
        let gpus = Gpus::new(if real { Mode::Cuda } else { Mode::Emulated });
        let own = Memory::create(&gpus.open(0).unwrap(), SIZE).unwrap();
        let rig = Self { shared, host, gpu, mem, _gpus: gpus, own };
        rig.add_gpu(|engine| engine);
        rig
    }

    /// Adds GPU memory under the rig's number, by an engine made of the daemon's own.
    pub fn add_gpu(&self, engine: impl FnOnce(Arc<Engine>) -> Arc<Engine>) {
        let offer = self.own.offer().unwrap();
        let (device, region) = self.shared.gpus.accept(&offer).unwrap();
        let engine = engine(self.shared.engine(device).unwrap());
        let memory = GpuMemory { region, engine, device: 0, secret: [0; 16], offer };
        let name = Name { gpu: Some(0), ..Name::buffer(self.gpu, 0) };
        let what = What::Gpu(Box::new(memory));
        self.shared.table.add(name, &name.to_string(), Path::new("/"), owner(1000), what).unwrap();
    }

    /// Carries one request out for a user; what came of it.
    fn one(&self, uid: u32, read: bool, request: &Request) -> i64 {
        let (client, ring) = Self::ring(uid, read);
        self.by(&client, &ring, request)
    }

    /// Both ends of a ring of a user's.
    pub fn ring(uid: u32, read: bool) -> (Client, Arc<Ring>) {
        let name = RingName { read, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags: 0 };
        let len = bytes(4).unwrap();
        let mem = HostMem::anonymous(len).unwrap().slice(0..len).unwrap();
        let server = Server::new(mem.clone(), name).unwrap();
        let ring = Arc::new(Ring::new(server, owner(uid), Id([1; 16])));
        (Client::new(mem).unwrap(), ring)
    }

    /// Has a ring begin one request.
    pub fn begin(&self, client: &Client, ring: &Arc<Ring>, request: &Request) -> IoStart {
        client.prepare(request).unwrap();
        let mut entries = Vec::new();
        assert_eq!(ring.server.take(Instant::now(), 9, &mut entries).count, 1);
        begin(&self.shared, ring, &entries[0])
    }

    fn by(&self, client: &Client, ring: &Arc<Ring>, request: &Request) -> i64 {
        match self.begin(client, ring, request) {
            IoStart::Over(result) => result,
            IoStart::UnderWay => {
                let mut done: Vec<Completion> = Vec::new();
                let start = Instant::now();
                while client.take(&mut done, 1).unwrap() == 0 {
                    assert!(start.elapsed() < Duration::from_secs(60));
                    client.wait(Duration::from_millis(1));
                }
                done[0].result
            }
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.shared.end();
    }
}

pub(super) fn request(buffer: Id, offset: u64, at: u64, len: u64) -> Request {
    Request { buffer, offset, inode: INODE, at, len, userdata: 0 }
}

fn refused(errno: Errno) -> i64 {
    -i64::from(errno.raw_os_error())
}

#[test]
fn users_reach_what_is_theirs() {
    let rig = Rig::new();
    for buffer in [rig.host, rig.gpu] {
        let good = request(buffer, 0, 0, 4096);
        assert_eq!(rig.one(1000, true, &good), 4096);
        assert_eq!(rig.one(1001, true, &good), refused(Errno::ACCESS));
        assert_eq!(rig.one(0, true, &good), 4096);
        assert_eq!(rig.one(1000, false, &Request { at: FILE, len: 10, ..good }), 10);
        assert_eq!(rig.one(1000, true, &Request { inode: 1, ..good }), refused(Errno::BADF));
        assert_eq!(rig.one(1000, true, &Request { buffer: Id([9; 16]), ..good }), refused(Errno::NOENT));
    }
    // A block ends after 4096 bytes.
    assert_eq!(rig.one(1000, true, &request(rig.host, 1, 0, 4096)), refused(Errno::INVAL));
    assert_eq!(rig.one(1000, true, &request(rig.host, 4096, 0, 4096)), 4096);
    // Forgotten buffers are nobody's.
    rig.shared.table.remove(rig.host);
    assert_eq!(rig.one(1000, true, &request(rig.host, 0, 0, 1)), refused(Errno::NOENT));
}

#[test]
fn a_ring_writes_by_what_was_opened_to_reach_the_disk_though_it_knows_another() {
    let rig = Rig::new();
    let (client, ring) = Rig::ring(1000, false);
    let wish = request(rig.host, 0, FILE, 4);
    assert_eq!(rig.by(&client, &ring, &wish), 4);
    // Another file behind the same number shows by which of the two is written.
    let synced = file();
    let seen = synced.try_clone().unwrap();
    let handle =
        rig.shared.opens.add(INODE, 1000, Access { data_sync: true, ..BOTH }, Arc::new(Local::new(synced)));
    assert_eq!(rig.by(&client, &ring, &wish), 4);
    assert_eq!(seen.metadata().unwrap().len(), FILE + 4);
    rig.shared.opens.close(handle);
    assert_eq!(rig.by(&client, &ring, &Request { at: FILE + 4, ..wish }), 4);
    assert_eq!(seen.metadata().unwrap().len(), FILE + 4);
}

#[test]
fn what_lies_behind_the_end_is_zero_in_gpu_memory() {
    let rig = Rig::new();
    rig.own.region().fill(0, SIZE, 9).unwrap();
    assert_eq!(rig.one(1000, true, &request(rig.gpu, 100, FILE - 50, 200)), 50);
    let mut seen = vec![0; 400];
    rig.own.region().read(0, &mut seen).unwrap();
    let wanted = |i| match i {
        100..150 => 5,
        150..300 => 0,
        _ => 9,
    };
    assert!(seen.iter().enumerate().all(|(i, byte)| *byte == wanted(i)));
}

fn edge() -> impl Strategy<Value = u64> {
    let near = |n: u64| n.saturating_sub(3)..n.saturating_add(3);
    prop_oneof![
        near(0),
        near(4096),
        near(FILE),
        near(SIZE as u64),
        near(i64::MAX as u64),
        near(u64::MAX),
        0..SIZE as u64
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_request_reaches_beyond_its_buffer(
        requests in proptest::collection::vec((edge(), edge(), edge(), any::<bool>()), 20),
    ) {
        let rig = Rig::new();
        for (offset, at, len, gpu) in requests {
            let wish = request(if gpu { rig.gpu } else { rig.host }, offset, at, len);
            rig.mem.fill(0, SIZE, 9).unwrap();
            rig.own.region().fill(0, SIZE, 9).unwrap();
            let result = rig.one(1000, true, &wish);
            let mut seen = vec![0; SIZE];
            if gpu { rig.own.region().read(0, &mut seen).unwrap() } else { rig.mem.read(0, &mut seen).unwrap() }
            let fits = len > 0 && offset.checked_add(len).is_some_and(|end| end <= SIZE as u64);
            let right = FILE.saturating_sub(at).min(len) as i64;
            let range = if result >= 0 { offset as usize..(offset + len) as usize } else { 0..0 };
            prop_assert!(result < 0 || fits && result == right, "{wish:?} {result}");
            for (i, byte) in seen.iter().enumerate() {
                let read = (offset as usize).saturating_add(result.max(0) as usize);
                let wanted = if !range.contains(&i) { 9 } else if i < read { 5 } else { 0 };
                prop_assert_eq!(*byte, wanted, "{:?} byte {}", wish, i);
            }
        }
    }
}
