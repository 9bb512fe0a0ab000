//! Sessions of a client that sends random messages, valid and invalid, and shares and unshares memory while the device
//! uses it. The server survives each session and serves the next. (`fuzz/` covers more.)

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use onehop_board::{Board, BoardConfig};
use onehop_sim::Sim;
use onehop_vfio_user::wire::{MessageHeader, command};
use onehop_vfio_user::{DeviceModel, Function, Nvme, Sdr, serve};
use rustix::event::{EventfdFlags, eventfd};

use crate::client::{memfd, send};

const SESSIONS: u64 = 300;
const MEMORY: u64 = 1 << 20;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Mostly small, sometimes any number.
    fn number(&mut self) -> u64 {
        match self.below(8) {
            0 => self.next(),
            1 => u64::MAX - self.below(0x2000),
            2 => self.below(1 << 32),
            _ => self.below(0x4000),
        }
    }

    fn bytes(&mut self, most: u64) -> Vec<u8> {
        (0..self.below(most)).map(|_| self.next() as u8).collect()
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn access(region: u64, offset: u64, count: u64, data: &[u8]) -> Vec<u8> {
    [words(&[offset, region & 0xffff_ffff | count << 32]).as_slice(), data].concat()
}

/// The served device, as far as the client needs to know it.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Drive,
    Board,
}

/// A register that makes the device act, and a value for it.
fn register(rng: &mut Rng, kind: Kind) -> (u64, [u8; 4]) {
    match kind {
        Kind::Drive => (0x1000 + rng.below(12) * 4, (rng.below(80) as u32).to_le_bytes()),
        Kind::Board => {
            // Those below 16 and the loopback; mostly the indexed space, in any order.
            let at = [4, 5, 6, 7, 7, 8, 9, 12, 13, 14, 15, 52][rng.below(12) as usize];
            let value = match rng.below(4) {
                0 => rng.number() as u32,
                1 => rng.below(300) as u32 * 4096,
                2 => (rng.below(4) as u32) << 28 | rng.below(16) as u32,
                _ => rng.below(1200) as u32,
            };
            (at * 4, value.to_be_bytes())
        }
    }
}

/// The next message: command, flags, payload, and number of file descriptors.
fn message(rng: &mut Rng, kind: Kind) -> (u16, u32, Vec<u8>, usize) {
    let page = |rng: &mut Rng| if rng.below(8) == 0 { rng.number() } else { rng.below(300) << 12 };
    match rng.below(10) {
        0 => (rng.below(20) as u16, rng.next() as u32 & 0x30, rng.bytes(80), rng.below(4) as usize),
        1 | 2 => {
            let flags = rng.below(5) << 32;
            (
                command::DMA_MAP,
                0,
                words(&[32 | flags, page(rng), page(rng), page(rng)]),
                rng.below(3) as usize,
            )
        }
        3 => (command::DMA_UNMAP, 0, words(&[24 | rng.below(4) << 32, page(rng), page(rng)]), 0),
        4 => {
            let (start, count) = (rng.below(6), rng.below(6));
            let payload = words(&[20 | rng.below(64) << 32, 2 | start << 32, count]);
            (command::SET_IRQS, 0, payload[..20].to_vec(), rng.below(6) as usize)
        }
        5 => (command::REGION_READ, 0, access(rng.below(10), rng.number(), rng.below(5000), &[]), 0),
        6 => {
            let data = rng.bytes(70);
            let write = access(rng.below(10), rng.number(), data.len() as u64, &data);
            (command::REGION_WRITE, rng.below(2) as u32 * 16, write, 0)
        }
        7 => {
            let (at, value) = register(rng, kind);
            (command::REGION_WRITE, 16, access(0, at, 4, &value), 0)
        }
        8 => {
            let data = (rng.next() as u32).to_le_bytes();
            (command::REGION_WRITE, 0, access(7, rng.below(64) * 4, 4, &data), 0)
        }
        _ => (command::RESET, 0, Vec::new(), 0),
    }
}

/// Memory space, bus mastering, admin queues of 64 entries, and a doorbell for some of their contents.
fn bring_up(stream: &UnixStream, tail: u32) {
    let steps = [
        (7, 4, 6),
        (0, 0x14, 0),
        (0, 0x24, 0x003f_003f),
        (0, 0x28, 0),
        (0, 0x2c, 0),
        (0, 0x30, 0x2000),
        (0, 0x34, 0),
        (0, 0x14, 0x46_0001),
        (0, 0x1000, tail),
    ];
    for (region, at, value) in steps {
        put(stream, command::REGION_WRITE, 0, &access(region, at, 4, &u32::to_le_bytes(value)), &[]);
    }
}

fn put(stream: &UnixStream, command: u16, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
    let header = MessageHeader { flags, ..MessageHeader::request(1, command, payload.len()) };
    send(stream, &[header.encode().as_slice(), payload].concat(), fds);
}

/// Valid streams, apart from what the session did before: pages from 4096 on.
fn flow(stream: &UnixStream) {
    use onehop_radio::{BoardLimits, Format, Shape, event, regs};
    let shape = Shape::of_bytes(Format::Ci16, &BoardLimits::USDR_RX, 4096).unwrap();
    let (words, front) = (shape.burst_bytes() / 8, regs::RX_BASE + regs::FRONT);
    let front = |what, value| (front, regs::front::command(what, value));
    let mut writes = vec![(regs::NOTIFY_PAGE, 4096), (regs::ROUTE, regs::route(event::RX, 0))];
    writes.push((regs::RX_CONTROL, regs::RX_TIMER_RESET));
    writes.extend((0..32).map(|buffer| (regs::RX_BASE + buffer, (2 + buffer) * 4096)));
    writes.push((regs::RX_BASE + regs::BURST_WORDS_Z, words - 1));
    writes.push((regs::RX_BASE + regs::BURSTS_Z, shape.bursts - 1));
    writes.push((regs::RX_BASE + regs::RX_LIMIT_Z, shape.bytes() - 1));
    writes.push(front(regs::front::SAMPLES_Z, shape.burst_samples - 1));
    writes.push(front(regs::front::FORMAT, regs::front::format(Format::Ci16.width(), words, 2)));
    writes.push((regs::RX_CONTROL, regs::RX_START));
    writes.push(front(regs::front::ORDER, regs::front::START));
    writes.push((regs::RX_CONTROL, regs::RX_READY));
    let [entry, time] = regs::tx_entry(64, None);
    writes.extend([(regs::TX_BASE, 40 * 4096), (regs::TX_BASE + regs::TX_LIMIT_Z, 4095)]);
    writes.extend([regs::TX_RESET, regs::TX_RUN].map(|value| (regs::TX_CONTROL, value)));
    writes.extend([(regs::TX_ENTRY, entry), (regs::TX_TIME, time)]);
    put(stream, command::REGION_WRITE, 0, &access(7, 4, 4, &6u32.to_le_bytes()), &[]);
    for (register, value) in writes {
        let write = |at: u32, value: u32| {
            put(
                stream,
                command::REGION_WRITE,
                16,
                &access(0, u64::from(at) * 4, 4, &value.to_be_bytes()),
                &[],
            );
        };
        if register >= regs::VIRTUAL {
            write(regs::INDEX, register - regs::VIRTUAL);
            write(regs::INDEX_DATA, value);
        } else {
            write(register, value);
        }
    }
}

fn session(seed: u64, kind: Kind, function: &Function, event: &OwnedFd) {
    let (mine, yours) = UnixStream::pair().unwrap();
    let mut reader = mine.try_clone().unwrap();
    let memory = memfd(MEMORY);
    std::thread::scope(|scope| {
        scope.spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
        scope.spawn(move || {
            let mut rng = Rng(seed);
            // Memory contents for the controller: entries with valid opcodes, and lists.
            let noise: Vec<u8> =
                (0..MEMORY / 8).flat_map(|_| (rng.next() & 0xff_000f_f00f).to_le_bytes()).collect();
            rustix::io::pwrite(&memory, &noise, 0).unwrap();
            put(&mine, command::VERSION, 0, &[0, 0, 1, 0], &[]);
            put(&mine, command::DMA_MAP, 0, &words(&[32 | 3 << 32, 0, 0, MEMORY]), &[memory.as_fd()]);
            for _ in 0..rng.below(100) {
                if rng.below(8) == 0 {
                    match kind {
                        Kind::Drive => bring_up(&mine, 1 + rng.below(63) as u32),
                        Kind::Board => flow(&mine),
                    }
                }
                let (command, flags, payload, count) = message(&mut rng, kind);
                let fd = if command == command::SET_IRQS { event.as_fd() } else { memory.as_fd() };
                put(&mine, command, flags, &payload, &vec![fd; count]);
            }
            mine.shutdown(std::net::Shutdown::Write).unwrap();
        });
        // All of these streams can be parsed to their end.
        assert_eq!(serve(yours, function, &|| false, &|_| {}), None, "seed {seed}");
    });
}

#[test]
fn any_session_comes_to_its_end() {
    let sim: Sim = onehop_sim::open("mem:1M?queues=4&cmb=64K").unwrap();
    let function = Function::new(Box::new(Nvme::new(sim.clone()).unwrap()));
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    for seed in 0..SESSIONS {
        session(seed, Kind::Drive, &function, &event);
    }
    // Some sessions executed commands.
    assert!(sim.stats().admin_commands() > 100, "{:?}", sim.stats());
}

/// The same while another thread scribbles over the mapped doorbells.
#[test]
fn any_session_with_mapped_doorbells_comes_to_its_end() {
    let sim: Sim = onehop_sim::open("mem:1M?queues=4").unwrap();
    let nvme = Nvme::new(sim.clone()).unwrap().with_mapped_doorbells().unwrap();
    let file = nvme.mapping(0).unwrap().file.clone();
    assert!(file.set_len(0).is_err(), "no client can take the memory away");
    let function = Function::new(Box::new(nvme)).forgiving_memory_space();
    let (event, done) = (eventfd(0, EventfdFlags::empty()).unwrap(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng(77);
            while !done.load(Ordering::Relaxed) {
                let value = (rng.below(80) as u32).to_le_bytes();
                rustix::io::pwrite(&file, &value, 0x1000 + rng.below(12) * 4).unwrap();
                std::thread::sleep(std::time::Duration::from_micros(rng.below(100)));
            }
        });
        for seed in 0..SESSIONS / 3 {
            session(seed, Kind::Drive, &function, &event);
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(sim.stats().admin_commands() > 20, "{:?}", sim.stats());
}

#[test]
fn any_session_with_a_board_comes_to_its_end() {
    let config = BoardConfig::parse("usdr?signal=noise&rate=200M").unwrap();
    let board = Arc::new(Board::new(config).unwrap());
    let function = Function::new(Box::new(Sdr::new(board.clone())));
    let event = eventfd(0, EventfdFlags::empty()).unwrap();
    for seed in 0..SESSIONS {
        session(seed, Kind::Board, &function, &event);
    }
    // Some sessions moved samples, and the board's thread is alive.
    let stats = board.stats();
    assert!(stats.starts > 20 && stats.sent_blocks > 20 && stats.transmitted_samples > 0, "{stats:?}");
}
