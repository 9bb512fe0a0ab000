//! A served SDR board: our receiver on it, its PCI function, and what stops it.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use onehop_board::{Board, BoardConfig, BoardRule};
use onehop_gpu::{Emulated, Gpu};
use onehop_os::Interrupt;
use onehop_radio::{BoardLimits, Format, Shape, regs};
use onehop_sdr::{Card, Counts, Profile, Receiver, RxOptions, SampleRoute, Session};
use onehop_vfio_user::{Function, Sdr, serve};
use rustix::event::{EventfdFlags, eventfd};

use crate::client::{CONFIG, Client, memfd, raised};

const LONG: Duration = Duration::from_secs(20);
/// MSI, and the flags for connecting its event fds.
const MSI: u32 = 1;
const EVENTS: u32 = 0x24;

struct Served {
    board: Arc<Board>,
    client: Arc<Client>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<String>>>,
}

impl Served {
    fn start(options: &str) -> Self {
        let board = Arc::new(Board::new(BoardConfig::parse(options).unwrap()).unwrap());
        let function = Function::new(Box::new(Sdr::new(board.clone())));
        let (mine, yours) = UnixStream::pair().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread =
            std::thread::spawn(move || serve(yours, &function, &|| stopped.load(Ordering::Relaxed), &|_| {}));
        Self { board, client: Client::connect(mine), stop, thread: Some(thread) }
    }

    fn session(&self) -> Arc<Session> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        self.client.set_irqs_of(MSI, EVENTS, 0, 1, &[event.as_fd()]).unwrap();
        // Enables MSI, as a host's kernel does.
        self.client.write(CONFIG, 0x52, &1u16.to_le_bytes());
        Session::open(Card::new(&self.client.port(), Arc::new(Event(event)), Profile::SIMULATED)).unwrap()
    }

    fn rules(&self) -> Vec<BoardRule> {
        let mut rules: Vec<_> = self.board.violations().iter().map(|v| v.rule).collect();
        rules.dedup();
        rules
    }

    fn within(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let until = Instant::now() + LONG;
        while !holds() {
            assert!(Instant::now() < until, "{what}: {:?}", self.board.violations());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

struct Event(OwnedFd);

impl Interrupt for Event {
    fn wait(&self, limit: Duration) -> bool {
        raised(&self.0, limit) > 0
    }
}

fn shape(format: Format) -> Shape {
    Shape::of_bytes(format, &BoardLimits::USDR_RX, 8192).unwrap()
}

fn receiver(session: &Arc<Session>, format: Format) -> Receiver {
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    let options = RxOptions { only: Some(SampleRoute::Pinned), ..RxOptions::new(shape(format)) };
    Receiver::open(session, &gpu, &options).unwrap()
}

/// Releases what has arrived. A board without free buffers does nothing that the test could observe.
fn make_room(flowing: &mut Receiver) {
    // Other tests check its errors.
    let _ = flowing.acquire(Duration::ZERO);
}

#[test]
fn every_sample_comes_through_once_or_is_counted_as_lost() {
    for format in Format::ALL {
        let served = Served::start("usdr?signal=counter&rate=4M");
        let session = served.session();
        let mut receiver = receiver(&session, format);
        receiver.start().unwrap();
        for turn in 0..150 {
            if turn == 70 {
                std::thread::sleep(Duration::from_millis(120));
            }
            let block = receiver.acquire(LONG).unwrap().unwrap();
            let mut bytes = vec![0; block.memory().len()];
            block.memory().read(0, &mut bytes).unwrap();
            let samples = bytes.chunks_exact(format.bytes() as usize);
            for (n, sample) in (block.first as u32..).zip(samples) {
                let bits = sample.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
                assert_eq!(bits, n & format.mask(), "{format}");
            }
        }
        receiver.stop().unwrap();
        while receiver.acquire(LONG).unwrap().is_some() {}
        let Counts { delivered, lost, clock_errors, .. } = receiver.counts();
        let flow = *served.board.flows().last().unwrap();
        assert!(lost > 0 && clock_errors == 0);
        assert_eq!(delivered + lost, flow.sent_blocks * u64::from(flow.block_samples));
        assert_eq!(lost, flow.lost_blocks * u64::from(flow.block_samples));
        drop((receiver, session));
        assert_eq!(served.rules(), []);
    }
}

#[test]
fn the_function_is_a_board_with_msi() {
    for (options, flr) in [("usdr", true), ("usdr?flr=0&id=10ee:7031", false)] {
        let served = Served::start(options);
        let read = |at| u32::from_le_bytes(served.client.read(CONFIG, at, 4).try_into().unwrap());
        assert_eq!((read(0), read(8) >> 8), (if flr { 0x7045_10ee } else { 0x7031_10ee }, 0x11_8000));
        assert_eq!(read(0x64) >> 28 & 1 == 1, flr);
        // It has no MSI-X.
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert!(served.client.set_irqs(EVENTS, 0, 1, &[event.as_fd()]).is_err());
        // Registers survive an unsupported reset, but no other.
        let index = |value: u32| served.client.write(0, 24, &value.to_be_bytes());
        let indexed = || u32::from_be_bytes(served.client.read(0, 28, 4).try_into().unwrap());
        index(7);
        served.client.write(0, 28, &0x5000u32.to_be_bytes());
        served.client.write(CONFIG, 0x68, &0x8000u16.to_le_bytes());
        served.client.turn_on();
        index(7);
        assert_eq!(indexed(), if flr { 0 } else { 0x5000 });
        assert_eq!(served.client.read(0, 2, 2), [0xff; 2]);
        assert_eq!(served.rules(), [BoardRule::Access]);
    }
}

#[test]
fn dma_ends_with_bus_mastering_and_with_the_memory() {
    let served = Served::start("usdr?rate=20M");
    let session = served.session();
    let mut flowing = receiver(&session, Format::Ci16);
    flowing.start().unwrap();
    flowing.acquire(LONG).unwrap().unwrap();
    // Memory space stays on.
    served.client.write(CONFIG, 4, &[2]);
    served.within("the board noticed nothing", || {
        make_room(&mut flowing);
        served.rules().contains(&BoardRule::BusMaster)
    });
    served.client.write(CONFIG, 4, &[6]);
    flowing.stop().unwrap();
    drop((flowing, session));
    let before = served.board.violation_count();
    let session = served.session();
    let mut flowing = receiver(&session, Format::Ci16);
    let addresses = flowing.addresses();
    flowing.start().unwrap();
    flowing.acquire(LONG).unwrap().unwrap();
    assert_eq!(served.board.violation_count(), before);
    // The client unshares everything, in use or not, and shares nothing again.
    let all = [24 | 2 << 32, 0, 0].map(u64::to_le_bytes).concat();
    served.client.request(onehop_vfio_user::wire::command::DMA_UNMAP, &all, &[]).unwrap();
    served.within("the board noticed nothing", || {
        make_room(&mut flowing);
        let names = |v: &onehop_board::BoardViolation, at: &u32| v.detail.contains(&format!("{at:#x}"));
        let reported = |v: &onehop_board::BoardViolation| {
            v.rule == BoardRule::Unmapped && addresses.iter().any(|at| names(v, at))
        };
        served.board.violations().iter().any(reported)
    });
    served.client.request(onehop_vfio_user::wire::command::RESET, &[], &[]).unwrap();
    let status = served.client.read(0, u64::from(regs::RX_STATUS) * 4, 4);
    assert_eq!(status, [0xff; 4], "memory space is off after a reset");
    // There is nothing left to release.
    std::mem::forget((flowing, session));
}

#[test]
fn dropped_gpu_writes_are_detected_by_data() {
    let served = Served::start("usdr?rate=4M&iommu=off&bar=low&p2p=dropped");
    let memory = memfd(4096);
    for (at, arrives) in [(0x1000_0000, true), (0xd000_0000, false)] {
        served.client.share(at, 4096, &memory, 0, 3).unwrap();
        served.client.write(CONFIG, 4, &[6]);
        let session_page = (regs::NOTIFY_PAGE, at as u32);
        for (register, value) in [session_page, (regs::ROUTE, regs::route(onehop_radio::event::TX, 0))] {
            served.client.write(0, u64::from(register) * 4, &value.to_be_bytes());
        }
        // A new event shows whether writes arrive.
        rustix::io::pwrite(&memory, &[0xa5; 4096], 0).unwrap();
        let before = bytes_of(&memory);
        transmit(&served, at);
        let holds = || (bytes_of(&memory) != before) == arrives;
        if arrives {
            served.within("no event", holds);
        } else {
            std::thread::sleep(Duration::from_millis(50));
            assert!(holds(), "an event came where nothing arrives");
        }
        served.client.unshare(at, 4096).unwrap();
    }
}

/// Submits a buffer of sixteen samples, to be played at once.
fn transmit(served: &Served, at: u64) {
    let indexed = |register: u32, value: u32| {
        served.client.write(0, u64::from(regs::INDEX) * 4, &(register - regs::VIRTUAL).to_be_bytes());
        served.client.write(0, u64::from(regs::INDEX_DATA) * 4, &value.to_be_bytes());
    };
    indexed(regs::TX_BASE, at as u32);
    indexed(regs::TX_BASE + regs::TX_LIMIT_Z, 4095);
    let [entry, time] = regs::tx_entry(16, None);
    for (register, value) in [
        (regs::TX_CONTROL, regs::TX_RESET),
        (regs::TX_CONTROL, regs::TX_RUN),
        (regs::TX_ENTRY, entry),
        (regs::TX_TIME, time),
    ] {
        served.client.write(0, u64::from(register) * 4, &value.to_be_bytes());
    }
}

fn bytes_of(memory: &std::fs::File) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    rustix::io::pread(memory, &mut bytes, 0).unwrap();
    bytes
}
