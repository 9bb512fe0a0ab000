//! Tests of what rings may and may not request, without a mount.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use onehop_os::HostMem;
use onehop_target::tree::{Local, OpenFile};
use onehop_target::wire::OpenMode;
use onehop_usrbio::flag::FORBID_READ_HOLES;
use onehop_usrbio::gpu::{GpuChoice, Gpus, SharedGpuMemory};
use onehop_usrbio::ring::{Client, Completion, Request, RingServer, bytes};
use onehop_usrbio::{Id, Name, Priority, RingName, SHM};
use proptest::prelude::*;
use rustix::io::Errno;

use super::gpu::GpuLanes;
use super::job::CHUNK_BYTES;
use super::{IoStart, TransferJob, begin};
use crate::daemon::{DaemonShared, MountOptions};
use crate::persons::Persons;
use crate::table::{GpuMemory, LinkContent, LinkTable, Owner};
use crate::workers::ServedRing;

const SIZE: usize = 65_536;
const FILE: u64 = 50_000;
pub(super) const INODE: u64 = 77;

const BOTH: OpenMode = OpenMode {
    read: true,
    write: true,
    truncate: false,
    sync: false,
    data_sync: false,
    no_atime: false,
    execute: false,
};

/// An unlinked file.
fn file() -> File {
    let path =
        std::env::temp_dir().join(format!("onehop-io-{}-{}", std::process::id(), Id::random().unwrap()));
    std::fs::write(&path, vec![5; FILE as usize]).unwrap();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file
}

pub(super) struct Rig {
    pub shared: Arc<DaemonShared>,
    host: Id,
    pub gpu: Id,
    mem: HostMem,
    /// Through which the owner's program sees the GPU memory.
    _gpus: Gpus,
    own: SharedGpuMemory,
}

fn owner(uid: u32) -> Owner {
    Owner { uid, gid: uid, pid: std::process::id() }
}

impl Rig {
    pub fn new() -> Self {
        let options =
            MountOptions { emulated_gpu: true, ..MountOptions::new(Path::new("/"), Path::new("/")) };
        let shared = DaemonShared::new(options).unwrap();
        shared.opens.add(INODE, 1000, BOTH, Arc::new(Local::new(file())));
        let mem = HostMem::anonymous(SIZE).unwrap();
        let (host, gpu) = (Id::random().unwrap(), Id::random().unwrap());
        let name = Name::buffer(host, 4096);
        shared
            .table
            .add(name, &name.to_string(), Path::new("/"), owner(1000), LinkContent::Host(mem.clone()))
            .unwrap();
        // Set on a machine with a GPU, to run the same tests on it.
        let real = std::env::var_os("ONEHOP_TEST_CUDA").is_some();
        let gpus = Gpus::new(if real { GpuChoice::Cuda } else { GpuChoice::Emulated });
        let own = SharedGpuMemory::create(&gpus.open(0).unwrap(), SIZE).unwrap();
        let rig = Self { shared, host, gpu, mem, _gpus: gpus, own };
        rig.add_gpu(|engine| engine);
        rig
    }

    /// Registers GPU memory under the rig's ID. `engine` may replace the daemon's lanes.
    pub fn add_gpu(&self, engine: impl FnOnce(Arc<GpuLanes>) -> Arc<GpuLanes>) {
        let offer = self.own.offer().unwrap();
        let (device, region) = self.shared.gpus.accept(&offer).unwrap();
        let engine = engine(self.shared.engine(device).unwrap());
        let memory = GpuMemory { region, engine, device: 0, secret: [0; 16], offer };
        let name = Name { gpu: Some(0), ..Name::buffer(self.gpu, 0) };
        let what = LinkContent::Gpu(Box::new(memory));
        self.shared.table.add(name, &name.to_string(), Path::new("/"), owner(1000), what).unwrap();
    }

    /// Executes one request for a user, and returns its result.
    fn one(&self, uid: u32, read: bool, request: &Request) -> i64 {
        let (client, ring) = Self::ring(uid, read);
        self.by(&client, &ring, request)
    }

    /// Both ends of a user's ring.
    pub fn ring(uid: u32, read: bool) -> (Client, Arc<ServedRing>) {
        Self::ring_of(uid, read, 4)
    }

    pub fn ring_of(uid: u32, read: bool, entries: i32) -> (Client, Arc<ServedRing>) {
        Self::ring_with(uid, read, entries, 0)
    }

    fn ring_with(uid: u32, read: bool, entries: i32, flags: u64) -> (Client, Arc<ServedRing>) {
        let name = RingName { read, depth: 0, priority: Priority::Normal, timeout: Duration::ZERO, flags };
        let len = bytes(entries).unwrap();
        let mem = HostMem::anonymous(len).unwrap().slice(0..len).unwrap();
        let server = RingServer::new(mem.clone(), name).unwrap();
        let ring = Arc::new(ServedRing::new(server, owner(uid)));
        (Client::new(mem).unwrap(), ring)
    }

    /// Submits one request and starts it. Returns its result if it was done at once.
    pub fn begin(&self, client: &Client, ring: &Arc<ServedRing>, request: &Request) -> Option<i64> {
        client.prepare(request).unwrap();
        let mut entries = Vec::new();
        assert_eq!(ring.server.take(Instant::now(), 9, &mut entries).count, 1);
        match begin(&self.shared, ring, &entries[0], request.len) {
            IoStart::Done(result) => Some(result),
            IoStart::Written(request) => Some(request.len as i64),
            IoStart::Later(job) => {
                TransferJob::begin_all([*job]);
                None
            }
        }
    }

    fn by(&self, client: &Client, ring: &Arc<ServedRing>, request: &Request) -> i64 {
        match self.begin(client, ring, request) {
            Some(result) => result,
            None => {
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
fn users_reach_their_own_buffers_and_files() {
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
    // Blocks are 4096 bytes.
    assert_eq!(rig.one(1000, true, &request(rig.host, 1, 0, 4096)), refused(Errno::INVAL));
    assert_eq!(rig.one(1000, true, &request(rig.host, 4096, 0, 4096)), 4096);
    // Removed buffers are gone for everybody.
    rig.shared.table.remove(&rig.shared.table.get(rig.host).unwrap());
    assert_eq!(rig.one(1000, true, &request(rig.host, 0, 0, 1)), refused(Errno::NOENT));
}

#[test]
fn a_ring_writes_through_a_synchronous_open_despite_its_cache() {
    let rig = Rig::new();
    let (client, ring) = Rig::ring(1000, false);
    let req = request(rig.host, 0, FILE, 4);
    assert_eq!(rig.by(&client, &ring, &req), 4);
    // Another file under the same inode number shows which open is used.
    let synced = file();
    let seen = synced.try_clone().unwrap();
    let handle =
        rig.shared.opens.add(INODE, 1000, OpenMode { data_sync: true, ..BOTH }, Arc::new(Local::new(synced)));
    assert_eq!(rig.by(&client, &ring, &req), 4);
    assert_eq!(seen.metadata().unwrap().len(), FILE + 4);
    assert!(rig.shared.opens.close(handle).is_some());
    assert_eq!(rig.by(&client, &ring, &Request { at: FILE + 4, ..req }), 4);
    assert_eq!(seen.metadata().unwrap().len(), FILE + 4);
}

#[test]
fn gpu_memory_behind_the_end_of_a_file_is_zeroed() {
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

/// Blocks reads and writes until it is open. Reads then leave the memory as it is.
#[derive(Default)]
pub(super) struct Gated {
    pub open: AtomicBool,
    begun: AtomicU64,
    /// Calls of `local`.
    located: AtomicU64,
}

impl Gated {
    fn until(&self, what: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !what(self) {
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn pass(&self, len: usize) -> usize {
        self.begun.fetch_add(1, Ordering::AcqRel);
        self.until(|gate| gate.open.load(Ordering::Acquire));
        len
    }
}

/// A file behind a gate; other operations are not implemented.
struct GatedFile(Arc<Gated>);

fn unasked<T>() -> std::io::Result<T> {
    Err(Errno::NOSYS.into())
}

impl OpenFile for GatedFile {
    fn has_name(&self) -> bool {
        true
    }

    fn local(&self) -> Option<&File> {
        self.0.located.fetch_add(1, Ordering::AcqRel);
        None
    }
    fn read_now(
        &self,
        _to: onehop_target::tree::TransferMemory<'_>,
        _at: u64,
    ) -> std::io::Result<Option<usize>> {
        Ok(None)
    }
    fn read(&self, to: onehop_target::tree::TransferMemory<'_>, _at: u64) -> std::io::Result<usize> {
        Ok(self.0.pass(to.len))
    }
    fn write(&self, from: onehop_target::tree::TransferMemory<'_>, _at: u64) -> std::io::Result<usize> {
        Ok(self.0.pass(from.len))
    }
    fn read_bytes(&self, _to: &mut [u8], _at: u64) -> std::io::Result<usize> {
        unasked()
    }
    fn write_bytes(&self, _from: &[u8], _at: u64) -> std::io::Result<usize> {
        unasked()
    }
    fn append_bytes(&self, _from: &[u8]) -> std::io::Result<usize> {
        unasked()
    }
    fn has_hole(&self, _at: u64, _bytes: u64) -> std::io::Result<bool> {
        self.0.pass(0);
        Ok(true)
    }
    fn is_cold(&self, _at: u64, _bytes: u64) -> bool {
        false
    }
    fn read_past(
        &self,
        _to: onehop_target::tree::TransferMemory<'_>,
        _at: u64,
    ) -> std::io::Result<Option<usize>> {
        unasked()
    }
    fn sync(&self, _data_only: bool) -> std::io::Result<()> {
        unasked()
    }
    fn drop_set_id(&self) -> std::io::Result<()> {
        unasked()
    }
    fn set_len(&self, _bytes: u64) -> std::io::Result<()> {
        unasked()
    }
    fn allocate(&self, _mode: u32, _at: u64, _bytes: u64) -> std::io::Result<()> {
        unasked()
    }
    fn seek(&self, _at: u64, _hole: bool) -> std::io::Result<u64> {
        unasked()
    }
}

#[test]
fn the_mount_of_a_file_is_looked_up_at_open() {
    let rig = Rig::new();
    let gate = rig.gated();
    let open = rig.shared.opens.find(GATED, 1000, true).unwrap();
    open.lock_turn();
    assert_eq!(gate.located.load(Ordering::Acquire), 1, "asked a file system that may hang");
}

/// Inode numbers of a file with a closed gate, and of one with an open gate.
pub(super) const GATED: u64 = INODE + 1;
const OPEN: u64 = INODE + 2;

impl Rig {
    pub fn gated(&self) -> Arc<Gated> {
        let gates = [GATED, OPEN].map(|inode| {
            let gate = Arc::<Gated>::default();
            self.shared.opens.add(inode, 1000, BOTH, Arc::new(GatedFile(gate.clone())));
            gate
        });
        gates[1].open.store(true, Ordering::Release);
        gates.into_iter().next().unwrap()
    }

    /// Starts many transfers of a user that block.
    fn begin_gated(&self, buffer: Id, reads: bool) -> (Client, Arc<ServedRing>) {
        let (client, ring) = Self::ring_of(1000, reads, 200);
        let req = Request { inode: GATED, ..request(buffer, 0, 0, 4096) };
        for _ in 0..100 {
            assert!(self.begin(&client, &ring, &req).is_none());
        }
        (client, ring)
    }

    /// Registers a buffer that is one hole. Returns it and its file.
    fn hole(&self, bytes: u64) -> (Id, File) {
        let path = Path::new(SHM).join(format!("onehop-test-hole-{}", Id::random().unwrap()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(bytes).unwrap();
        let (id, mem) = (Id::random().unwrap(), HostMem::of_shared(&file).unwrap());
        let name = Name::buffer(id, 0);
        self.shared.table.add(name, &name.to_string(), &path, owner(1000), LinkContent::Host(mem)).unwrap();
        (id, file)
    }
}

#[test]
fn memory_far_behind_the_end_of_a_file_stays_a_hole() {
    const LONG: u64 = 256 << 20;
    let rig = Rig::new();
    let (hole, file) = rig.hole(LONG);
    let (within, behind) = (FILE - 10, 1 << 30);
    for (at, wanted) in [(within, 10), (behind, 0)] {
        assert_eq!(rig.one(1000, true, &request(hole, 0, at, LONG)), wanted);
        let bytes = file.metadata().unwrap().blocks() * 512;
        assert!(bytes <= CHUNK_BYTES, "{bytes} bytes for a file of {FILE}");
    }
    let mut seen = [9; 20];
    file.read_exact_at(&mut seen, 0).unwrap();
    assert_eq!(seen, [0; 20], "memory behind the end is zeroed");
}

#[test]
fn a_long_transfer_takes_memory_for_chunks_in_flight_only() {
    let rig = Rig::new();
    let (hole, _file) = rig.hole(1 << 40);
    let gate = rig.gated();
    let (client, ring) = Rig::ring(1000, true);
    let req = Request { inode: GATED, ..request(hole, 0, 0, 1 << 40) };
    assert!(rig.begin(&client, &ring, &req).is_none());
    gate.until(|gate| gate.begun.load(Ordering::Acquire) > 0);
    // Every chunk in flight holds the transfer, and so does the queue.
    let buffer = rig.shared.table.get(hole).unwrap();
    assert!(rig.shared.table.remove(&rig.shared.table.get(hole).unwrap()));
    gate.open.store(true, Ordering::Release);
    let (mut done, start) = (Vec::new(), Instant::now());
    while client.take(&mut done, 1).unwrap() == 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "it continues after the memory was unregistered");
        client.wait(Duration::from_millis(1));
    }
    assert_eq!(done[0].result, refused(Errno::CANCELED));
    let begun = gate.begun.load(Ordering::Acquire);
    assert!(begun <= 64, "{begun} chunks were begun");
    drop(buffer);
}

#[test]
fn blocked_writes_do_not_delay_their_user_s_reads() {
    let rig = Rig::new();
    let gate = rig.gated();
    let _writes = rig.begin_gated(rig.host, false);
    gate.until(|gate| gate.begun.load(Ordering::Acquire) >= 32);
    let req = Request { inode: OPEN, ..request(rig.host, 0, 0, 4096) };
    assert_eq!(rig.one(1000, true, &req), 4096);
    gate.open.store(true, Ordering::Release);
}

#[test]
fn holes_are_looked_for_by_threads_that_may_block() {
    let rig = Rig::new();
    let gate = rig.gated();
    for buffer in [rig.host, rig.gpu] {
        gate.open.store(false, Ordering::Release);
        let (client, ring) = Rig::ring_with(1000, true, 4, FORBID_READ_HOLES);
        let (begin, begun) = channel();
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                let req = Request { inode: GATED, ..request(buffer, 0, 0, 4096) };
                begin.send(rig.begin(&client, &ring, &req).is_none()).unwrap();
            });
            let is_under_way = begun.recv_timeout(Duration::from_secs(20));
            // So that the test ends if it fails.
            gate.open.store(true, Ordering::Release);
            assert_eq!(is_under_way, Ok(true), "the ring's thread blocked");
            let (mut done, start) = (Vec::new(), Instant::now());
            while client.take(&mut done, 1).unwrap() == 0 {
                assert!(start.elapsed() < Duration::from_secs(60));
                client.wait(Duration::from_millis(1));
            }
            done[0].result
        });
        assert_eq!(result, refused(Errno::NODATA));
    }
}

#[test]
fn gpu_memory_of_one_user_leaves_descriptors_to_those_of_others() {
    let rig = Rig::new();
    let table = LinkTable::new(8, &Persons::default());
    let add = |uid| {
        let offer = rig.own.offer().unwrap();
        let (device, region) = rig.shared.gpus.accept(&offer).unwrap();
        let engine = rig.shared.engine(device).unwrap();
        let name = Name { gpu: Some(0), ..Name::buffer(Id::random().unwrap(), 0) };
        let memory = GpuMemory { region, engine, device: 0, secret: [0; 16], offer };
        let what = LinkContent::Gpu(Box::new(memory));
        table.add(name, &name.to_string(), Path::new("/"), owner(uid), what)
    };
    let each = rig.own.offer().unwrap().descriptors();
    let theirs: Vec<_> = std::iter::repeat_with(|| add(21_001)).take_while(Result::is_ok).collect();
    assert_eq!((theirs.len() as u64, add(21_001).err()), (4 / each, Some(Errno::MFILE)));
    add(21_002).unwrap();
    // Removing buffers makes room.
    theirs.into_iter().for_each(|one| assert!(table.remove(&one.unwrap())));
    add(21_001).unwrap();
}

#[test]
fn a_user_who_holds_gpu_lanes_leaves_some_to_others() {
    let rig = Rig::new();
    let gate = rig.gated();
    let req = Request { inode: OPEN, ..request(rig.gpu, 0, 0, 4096) };
    let begun = || gate.begun.load(Ordering::Acquire);
    let _writes = rig.begin_gated(rig.gpu, false);
    gate.until(|_| begun() > 0);
    // Reads do not wait for the same user's writes.
    assert_eq!(rig.one(1000, true, &req), 4096);
    let of_writes = begun();
    let _reads = rig.begin_gated(rig.gpu, true);
    gate.until(|_| begun() > of_writes);
    assert_eq!((rig.one(0, true, &req), rig.one(0, false, &req)), (4096, 4096));
    gate.open.store(true, Ordering::Release);
}

#[test]
fn transfers_in_flight_are_shared_among_users() {
    let mut rig = Rig::new();
    let shared = Arc::get_mut(&mut rig.shared).unwrap();
    shared.jobs = onehop_target::shares::Shares::new(8);
    let gate = rig.gated();
    let (client, ring) = Rig::ring_of(1000, true, 16);
    let req = Request { inode: GATED, ..request(rig.host, 0, 0, 4096) };
    for _ in 0..4 {
        assert!(rig.begin(&client, &ring, &req).is_none());
    }
    match rig.begin(&client, &ring, &req) {
        Some(result) => assert_eq!(result, refused(Errno::AGAIN)),
        None => panic!("a user has more in flight than their share"),
    }
    gate.open.store(true, Ordering::Release);
    let (mut done, start) = (Vec::new(), Instant::now());
    while done.len() < 4 {
        assert!(start.elapsed() < Duration::from_secs(60));
        client.take(&mut done, 8).unwrap();
        client.wait(Duration::from_millis(1));
    }
    assert!(done.iter().all(|one| one.result == 4096) && rig.shared.jobs.taken() == 0);
    assert!(rig.begin(&client, &ring, &req).is_none());
}

#[test]
fn memory_of_the_emulated_gpu_is_opt_in_and_counted() {
    let rig = Rig::new();
    if std::env::var_os("ONEHOP_TEST_CUDA").is_some() {
        return;
    }
    let offer = || rig.own.offer().unwrap();
    let plain = DaemonShared::new(MountOptions::new(Path::new("/"), Path::new("/"))).unwrap();
    assert!(plain.gpus.accept(&offer()).is_err());
    plain.end();
    assert!(rig.shared.gpus.accept(&offer()).is_ok());
    // Host memory, and as much GPU memory.
    let room = LinkTable::new(1, &Persons::default()).room(1000);
    assert_eq!(room - rig.shared.table.room(1000), 2 * SIZE as u64);
    assert!(rig.shared.table.remove(&rig.shared.table.get(rig.gpu).unwrap()));
    assert_eq!(room - rig.shared.table.room(1000), SIZE as u64);
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
            let req = request(if gpu { rig.gpu } else { rig.host }, offset, at, len);
            rig.mem.fill(0, SIZE, 9).unwrap();
            rig.own.region().fill(0, SIZE, 9).unwrap();
            let result = rig.one(1000, true, &req);
            let mut seen = vec![0; SIZE];
            if gpu { rig.own.region().read(0, &mut seen).unwrap() } else { rig.mem.read(0, &mut seen).unwrap() }
            let fits = len > 0 && offset.checked_add(len).is_some_and(|end| end <= SIZE as u64);
            let right = FILE.saturating_sub(at).min(len) as i64;
            let range = if result >= 0 { offset as usize..(offset + len) as usize } else { 0..0 };
            prop_assert!(result < 0 || fits && result == right, "{req:?} {result}");
            for (i, byte) in seen.iter().enumerate() {
                let read = (offset as usize).saturating_add(result.max(0) as usize);
                let wanted = if !range.contains(&i) { 9 } else if i < read { 5 } else { 0 };
                prop_assert_eq!(*byte, wanted, "{:?} byte {}", req, i);
            }
        }
    }
}
