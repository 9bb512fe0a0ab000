//! A small vfio-user client, so that our driver drives the served function: registers, memory and reset as a
//! `ControllerBackend`. Each mapping is shared in two parts, so that buffers and queues straddle them, and unshared
//! when it is dropped.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_os::{
    Allocations, BusRange, ControllerBackend, DmaMemory, Error, FunctionReset, HostMem, Mapped, Mapper,
    Registers,
};
use onehop_proto::BusAddr;
use onehop_sim::Sim;
use onehop_vfio_user::wire::{HEADER, MessageHeader, command};
use onehop_vfio_user::{Function, Nvme, serve};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

pub const CONFIG: u32 = 7;
const PAGE: u64 = 4096;

/// A served drive: its thread ends on drop.
pub struct Served {
    pub sim: Sim,
    pub refused: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<String>>>,
}

impl Served {
    /// Serves a drive to one client; returns the client's end of the socket.
    pub fn start(spec: &str) -> (Self, UnixStream) {
        let sim = onehop_sim::open(spec).unwrap();
        let function = Function::new(Box::new(Nvme::new(sim.clone()).unwrap()));
        Self::serve(sim, function)
    }

    /// Serves the function of a drive.
    pub fn serve(sim: Sim, function: Function) -> (Self, UnixStream) {
        let (mine, yours) = UnixStream::pair().unwrap();
        let (stop, refused) = (Arc::new(AtomicBool::new(false)), Arc::<Mutex<Vec<String>>>::default());
        let (stopped, refusals) = (stop.clone(), refused.clone());
        let thread = std::thread::spawn(move || {
            serve(yours, &function, &|| stopped.load(Ordering::Relaxed), &|event| {
                refusals.lock().unwrap().push(event.to_string());
            })
        });
        (Self { sim, refused, stop, thread: Some(thread) }, mine)
    }

    /// How the session ended, once the client has closed.
    pub fn end(mut self) -> Option<String> {
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// The client's end.
pub struct Client {
    stream: Mutex<(UnixStream, u16)>,
    next: AtomicU64,
    /// The file of each allocation.
    files: Allocations<Arc<File>>,
}

impl Client {
    /// Negotiates the version, and enables memory space and bus mastering.
    pub fn connect(stream: UnixStream) -> Arc<Self> {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let client = Arc::new(Self {
            stream: Mutex::new((stream, 0)),
            next: AtomicU64::new(0x10_0000),
            files: Allocations::default(),
        });
        client.request(command::VERSION, b"\0\0\x01\0{\"capabilities\":{}}\0", &[]).unwrap();
        client.turn_on();
        client
    }

    pub fn turn_on(&self) {
        self.write(CONFIG, 4, &0x406u16.to_le_bytes());
    }

    /// Sends a request; returns the payload of its reply, or the error number.
    pub fn request(&self, command: u16, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>, u32> {
        let mut socket = self.stream.lock().unwrap();
        socket.1 = socket.1.wrapping_add(1);
        let header = MessageHeader::request(socket.1, command, payload.len());
        send(&socket.0, &[header.encode().as_slice(), payload].concat(), fds);
        let mut raw = [0; HEADER];
        socket.0.read_exact(&mut raw).unwrap();
        let reply = MessageHeader::decode(&raw);
        assert_eq!((reply.id, reply.command, reply.is_request()), (header.id, command, false));
        let mut payload = vec![0; reply.payload().unwrap()];
        socket.0.read_exact(&mut payload).unwrap();
        if reply.is_error() { Err(reply.errno) } else { Ok(payload) }
    }

    /// A write without a reply.
    fn post(&self, region: u32, offset: u64, data: &[u8]) {
        let mut socket = self.stream.lock().unwrap();
        socket.1 = socket.1.wrapping_add(1);
        let payload = access(region, offset, data);
        let header = MessageHeader {
            flags: 1 << 4,
            ..MessageHeader::request(socket.1, command::REGION_WRITE, payload.len())
        };
        send(&socket.0, &[header.encode().as_slice(), &payload].concat(), &[]);
    }

    pub fn read(&self, region: u32, offset: u64, bytes: usize) -> Vec<u8> {
        let mut payload = access(region, offset, &[]);
        payload[12..].copy_from_slice(&(bytes as u32).to_le_bytes());
        self.request(command::REGION_READ, &payload, &[]).unwrap().split_off(16)
    }

    pub fn write(&self, region: u32, offset: u64, data: &[u8]) {
        self.request(command::REGION_WRITE, &access(region, offset, data), &[]).unwrap();
    }

    pub fn share(&self, at: u64, bytes: u64, file: &File, offset: u64, flags: u32) -> Result<(), u32> {
        let payload = [32 | u64::from(flags) << 32, offset, at, bytes].map(u64::to_le_bytes).concat();
        self.request(command::DMA_MAP, &payload, &[file.as_fd()]).map(|_| ())
    }

    pub fn unshare(&self, at: u64, bytes: u64) -> Result<(), u32> {
        let payload = [24, at, bytes].map(u64::to_le_bytes).concat();
        self.request(command::DMA_UNMAP, &payload, &[]).map(|_| ())
    }

    pub fn set_irqs(&self, flags: u32, start: u32, count: u32, fds: &[BorrowedFd<'_>]) -> Result<(), u32> {
        self.set_irqs_of(2, flags, start, count, fds)
    }

    /// For a kind of interrupts: 1 is MSI, 2 is MSI-X.
    pub fn set_irqs_of(
        &self,
        kind: u32,
        flags: u32,
        start: u32,
        count: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), u32> {
        let payload = [20, flags, kind, start, count].map(u32::to_le_bytes).concat();
        self.request(command::SET_IRQS, &payload, fds).map(|_| ())
    }

    /// The server's answer about a region, with room for this many bytes.
    pub fn region_info(&self, region: u32, room: u32) -> Result<Vec<u8>, u32> {
        let ask = [room, 0, region, 0, 0, 0, 0, 0].map(u32::to_le_bytes).concat();
        self.request(command::REGION_INFO, &ask, &[])
    }

    /// The served function as a backend for the driver.
    pub fn port(self: &Arc<Self>) -> ControllerBackend {
        let info = self.region_info(0, 32).unwrap();
        let size = u32::from_le_bytes(info[16..20].try_into().unwrap());
        ControllerBackend {
            regs: Arc::new(Bar0 { client: self.clone(), size }),
            mapper: Arc::new(Memory(self.clone())),
            reset: Some(Arc::new(Reset(self.clone()))),
            name: "vfio-user".into(),
            simulated: true,
        }
    }
}

fn access(region: u32, offset: u64, data: &[u8]) -> Vec<u8> {
    let count = (data.len() as u32).to_le_bytes();
    [offset.to_le_bytes().as_slice(), &region.to_le_bytes(), &count, data].concat()
}

pub fn send(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let mut left = bytes;
    while !left.is_empty() {
        let sent = sendmsg(stream, &[IoSlice::new(left)], &mut control, SendFlags::NOSIGNAL).unwrap();
        control.clear();
        left = &left[sent..];
    }
}

/// Waits for an event fd; returns how often it was raised.
pub fn raised(event: &OwnedFd, wait: Duration) -> u64 {
    let until = Instant::now() + wait;
    loop {
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).unwrap();
        if poll(&mut [PollFd::new(event, PollFlags::IN)], Some(&left)) == Ok(1) {
            let mut count = [0; 8];
            rustix::io::read(event, &mut count).unwrap();
            return u64::from_ne_bytes(count);
        }
        if Instant::now() >= until {
            return 0;
        }
    }
}

pub fn memfd(bytes: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}

struct Bar0 {
    client: Arc<Client>,
    size: u32,
}

impl Registers for Bar0 {
    fn read32(&self, offset: u32) -> u32 {
        u32::from_le_bytes(self.client.read(0, offset.into(), 4).try_into().unwrap())
    }

    fn write32(&self, offset: u32, value: u32) {
        self.client.post(0, offset.into(), &value.to_le_bytes());
    }

    fn size(&self) -> u32 {
        self.size
    }
}

struct Reset(Arc<Client>);

impl FunctionReset for Reset {
    fn function_reset(&self) -> onehop_os::Result<()> {
        self.0.request(command::RESET, &[], &[]).unwrap();
        self.0.turn_on();
        Ok(())
    }
}

struct Memory(Arc<Client>);

/// Unshares memory on drop.
struct Hold {
    client: Arc<Client>,
    ranges: Vec<(u64, u64)>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        for (at, bytes) in &self.ranges {
            self.client.unshare(*at, *bytes).unwrap();
        }
    }
}

impl Mapper for Memory {
    fn name(&self) -> &str {
        "vfio-user"
    }

    fn alloc(&self, bytes: usize) -> onehop_os::Result<HostMem> {
        let bytes = bytes.max(1).next_multiple_of(PAGE as usize);
        let file = memfd(bytes as u64);
        let memory = HostMem::of_file(&file, bytes)?;
        Ok(self.0.files.add(memory, Arc::new(file)))
    }

    fn map(&self, memory: &dyn DmaMemory) -> onehop_os::Result<Mapped> {
        let no = |why: &str| Error::CannotMap { mapper: "vfio-user".into(), why: why.into() };
        let host = memory.host().ok_or_else(|| no("it is not host memory"))?;
        let (start, file) = self.0.files.find(host).ok_or_else(|| no("it has no file"))?;
        let (skew, first) = (start as u64 % PAGE, start as u64 / PAGE * PAGE);
        let bytes = (skew + host.len() as u64).next_multiple_of(PAGE);
        let at = self.0.next.fetch_add(bytes.next_multiple_of(1 << 20) + (1 << 20), Ordering::Relaxed);
        let half = (bytes / 2).next_multiple_of(PAGE);
        let ranges: Vec<_> =
            [(0, half), (half, bytes - half)].into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        for (offset, bytes) in &ranges {
            self.0
                .share(at + offset, *bytes, &file, first + offset, 3)
                .map_err(|e| no(&format!("error {e}")))?;
        }
        let ranges = ranges.iter().map(|(offset, bytes)| (at + offset, *bytes)).collect();
        let runs = vec![BusRange { addr: BusAddr(at + skew), len: host.len() as u64 }];
        Ok(Mapped::new(runs, Box::new(Hold { client: self.0.clone(), ranges })))
    }
}
