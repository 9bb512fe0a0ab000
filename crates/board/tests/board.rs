//! The board under a minimal driver: it fills, counts, loses and stops as a real one would, and records violations.

#![allow(clippy::unwrap_used, reason = "a test ends where something fails")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_board::{Board, BoardConfig, BoardRule};
use onehop_os::{ControllerBackend, HostMem, Interrupt, Mapped};
use onehop_radio::event::{self, EventEntry, RxReport};
use onehop_radio::{BUFFERS, BoardLimits, Format, RingAddresses, Shape, regs};

struct Host {
    board: Board,
    port: ControllerBackend,
    interrupt: Arc<dyn Interrupt>,
    page: HostMem,
    ring: HostMem,
    shape: Shape,
    read: u32,
    mapped: Vec<Mapped>,
}

impl Host {
    fn new(options: &str, format: Format, bytes: u32) -> Self {
        let board = Board::new(BoardConfig::parse(options).unwrap()).unwrap();
        let (port, interrupt) = (board.port(), board.interrupt());
        let shape = Shape::of_bytes(format, &board.limits(), bytes).unwrap();
        let page = port.mapper.alloc(4096).unwrap();
        page.fill(0, 4096, 0xff).unwrap();
        let ring = port.mapper.alloc(shape.ring_bytes() as usize).unwrap();
        let mapped = vec![port.mapper.map(&page).unwrap(), port.mapper.map(&ring).unwrap()];
        let host = Self { board, port, interrupt, page, ring, shape, read: 0, mapped };
        let runs: Vec<_> = host.mapped[1].runs().iter().map(|run| (run.addr.0, run.len)).collect();
        host.set_up(&runs);
        host
    }

    fn write(&self, register: u32, value: u32) {
        if register >= regs::VIRTUAL {
            self.write(regs::INDEX, register - regs::VIRTUAL);
            return self.write(regs::INDEX_DATA, value);
        }
        self.port.regs.write32(register * 4, value.swap_bytes());
    }

    fn read(&self, register: u32) -> u32 {
        self.port.regs.read32(register * 4).swap_bytes()
    }

    fn set_up(&self, runs: &[(u64, u64)]) {
        self.write(regs::NOTIFY_PAGE, self.mapped[0].contiguous().unwrap().0 as u32);
        self.write(regs::ROUTE, regs::route(event::RX, 0));
        let RingAddresses(addresses) =
            RingAddresses::plan(&self.shape, &BoardLimits::USDR_RX, runs.iter().copied()).unwrap();
        for (buffer, addr) in (0..).zip(addresses) {
            self.write(regs::RX_BASE + buffer, addr);
        }
        let Shape { format, burst_samples, bursts } = self.shape;
        let words = self.shape.burst_bytes() / 8;
        self.write(regs::RX_BASE + regs::BURST_WORDS_Z, words - 1);
        self.write(regs::RX_BASE + regs::BURSTS_Z, bursts - 1);
        self.write(regs::RX_BASE + regs::RX_LIMIT_Z, self.shape.bytes() - 1);
        use regs::front::{FORMAT, SAMPLES_Z, command};
        self.front(command(SAMPLES_Z, burst_samples - 1));
        self.front(command(FORMAT, regs::front::format(format.width(), words, 2)));
    }

    fn front(&self, command: u32) {
        self.write(regs::RX_BASE + regs::FRONT, command);
    }

    fn start(&self) {
        self.write(regs::RX_CONTROL, regs::RX_TIMER_RESET);
        self.write(regs::RX_CONTROL, regs::RX_START);
        self.front(regs::front::command(regs::front::ORDER, regs::front::START));
        self.write(regs::RX_CONTROL, regs::RX_READY);
    }

    fn stop(&self) {
        self.write(regs::RX_CONTROL, 0);
        let until = Instant::now() + Duration::from_secs(20);
        while regs::RxStatus(self.read(regs::RX_STATUS)).active() {
            assert!(Instant::now() < until, "the board does not stop");
            std::thread::yield_now();
        }
    }

    /// The next event, if there is one.
    fn event(&mut self) -> Option<RxReport> {
        let at = (self.read % event::ENTRIES) as usize * 16;
        let mut words = [0; 4];
        words[0] = self.page.word(at).unwrap().load(std::sync::atomic::Ordering::Acquire);
        if !EventEntry(words).is(self.read % 512) {
            return None;
        }
        for (i, word) in words.iter_mut().enumerate().skip(1) {
            *word = self.page.word(at + i * 4).unwrap().load(std::sync::atomic::Ordering::Relaxed);
        }
        self.read += 1;
        if self.read.is_multiple_of(event::ACK_EVERY) {
            self.write(regs::NOTIFY_ACK, regs::ack(0, self.read));
        }
        Some(RxReport::from_data(EventEntry(words).data()))
    }

    fn next(&mut self) -> RxReport {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(report) = self.event() {
                return report;
            }
            assert!(Instant::now() < until, "no event: {:?}", self.board.violations());
            self.interrupt.wait(Duration::from_millis(50));
        }
    }

    /// The bits of a sample of a buffer.
    fn bits(&self, buffer: u64, sample: u32) -> u32 {
        let at = buffer * self.shape.stride() + u64::from(sample * self.shape.format.bytes());
        let bytes = self.ring.to_vec(at as usize, self.shape.format.bytes() as usize).unwrap();
        bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte))
    }

    fn rules(&self) -> Vec<BoardRule> {
        self.board.violations().iter().map(|violation| violation.rule).collect()
    }
}

#[test]
fn every_sample_is_sent_once_or_counted_as_lost() {
    for format in Format::ALL {
        let mut host = Host::new("usdr?signal=counter&rate=20M", format, 8192);
        let samples = u64::from(host.shape.samples());
        host.start();
        let (mut delivered, mut lost) = (0u64, 0u64);
        for block in 0..300u64 {
            if block % 100 == 99 {
                // Longer than the ring lasts, so blocks are lost.
                std::thread::sleep(Duration::from_millis(20));
            }
            let report = host.next();
            lost += u64::from(report.lost);
            assert_eq!(report.bursts, RxReport::whole(host.shape.bursts));
            let first = (delivered + lost) * samples;
            assert_eq!(report.time, first as u32);
            for sample in [0, 1, host.shape.samples() - 1] {
                let expected = (first as u32 + sample) & format.mask();
                assert_eq!(host.bits(block % u64::from(BUFFERS), sample), expected, "block {block}");
            }
            delivered += 1;
            host.write(regs::RX_CONFIRM, 0);
        }
        host.stop();
        while let Some(report) = host.event() {
            lost += u64::from(report.lost);
            delivered += 1;
        }
        lost += u64::from(host.read(regs::RX_LOST));
        let stats = host.board.stats();
        assert!(stats.lost_blocks > 0, "nothing was lost");
        assert_eq!((stats.sent_blocks, stats.lost_blocks), (delivered + lost, lost));
        assert_eq!(host.rules(), []);
    }
}

#[test]
fn bursts_that_are_missing_leave_the_others_packed() {
    // At every position in a block of four bursts: start, middle, end, all but one.
    for (missing, there) in
        [("0", 0b1110), ("1-2", 0b1001), ("3", 0b0111), ("0+2", 0b1010), ("0-2", 0b1000), ("1-3", 0b0001)]
    {
        for format in Format::ALL {
            let options = format!("usdr?signal=counter&rate=20M&missing={missing}@n=3");
            let mut host = Host::new(&options, format, 32768 * format.bytes());
            assert_eq!(host.shape.bursts, 4);
            host.ring.fill(0, host.ring.len(), 0xa5).unwrap();
            host.start();
            let (mut position, mut gone) = (0, 0);
            for block in 0..12u64 {
                let report = host.next();
                position += u64::from(report.lost) * u64::from(host.shape.samples());
                assert_eq!(u64::from(report.time), position);
                let sent = position / u64::from(host.shape.samples());
                let which = if sent % 3 == 2 { there } else { 0b1111 };
                assert_eq!(report.bursts, which << 28, "block {sent} without {missing}");
                let extents = report.extents(host.shape);
                gone += u64::from(host.shape.samples() - extents.samples());
                for extent in extents.clone() {
                    for sample in [0, extent.samples - 1] {
                        let expected = (position as u32 + extent.first + sample) & format.mask();
                        assert_eq!(host.bits(block, extent.at + sample), expected, "{missing} {extent:?}");
                    }
                }
                let end = block * host.shape.stride() + u64::from(extents.samples() * format.bytes());
                let behind = u64::from(host.shape.bytes()) - u64::from(extents.samples() * format.bytes());
                let behind = host.ring.to_vec(end as usize, behind as usize).unwrap();
                assert!(behind.iter().all(|byte| *byte == 0xa5), "written behind what is there");
                position += u64::from(host.shape.samples());
                host.write(regs::RX_CONFIRM, 0);
            }
            host.stop();
            let stats = host.board.stats();
            assert!(gone > 0 && stats.missing_samples >= gone);
            assert_eq!(host.rules(), []);
        }
    }
}

#[test]
fn a_block_of_which_nothing_arrives_is_lost_as_a_whole() {
    let mut host = Host::new("usdr?signal=counter&rate=20M&missing=0@n=4", Format::Ci16, 8192);
    assert_eq!(host.shape.bursts, 1);
    host.start();
    for _ in 0..3 {
        assert_eq!(host.next().lost, 0);
        host.write(regs::RX_CONFIRM, 0);
    }
    let report = host.next();
    assert_eq!((report.lost, report.bursts), (1, RxReport::whole(1)));
    assert_eq!(u64::from(report.time), 4 * u64::from(host.shape.samples()));
    host.stop();
    assert_eq!(host.board.stats().missing_samples, 0);
}

/// Blocks of half a nanosecond and of four: counted one by one, they would keep the board from everything else.
#[test]
fn losses_at_any_rate_leave_the_board_responsive() {
    const MANY: u64 = 200_000_000;
    let (done, over) = std::sync::mpsc::channel();
    // Waited for from outside, because a board that hangs does not return from accesses.
    std::thread::spawn(move || {
        for (options, burst_samples) in [
            ("usdr?rate=4G&signal=counter", 2),
            ("usdr?rate=4G&signal=counter", 16),
            ("usdr?rate=4G&missing=0", 16),
        ] {
            let mut host = Host::new(options, Format::Ci16, 64);
            host.shape = Shape { format: Format::Ci16, burst_samples, bursts: 1 };
            let runs: Vec<_> = host.mapped[1].runs().iter().map(|run| (run.addr.0, run.len)).collect();
            host.set_up(&runs);
            let begun = Instant::now();
            host.start();
            while host.board.stats().lost_blocks < MANY {
                assert!(host.read(regs::RX_STATUS) != u32::MAX);
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(host.read(regs::RX_LOST), RxReport::MOST_LOST);
            host.stop();
            // No more blocks than there was time for.
            let (stats, most) = (host.board.stats(), begun.elapsed().as_secs_f64() * 4e9);
            assert!((stats.sent_blocks * u64::from(burst_samples)) as f64 <= most, "{stats:?}");
            let filled = stats.sent_blocks - stats.lost_blocks;
            assert_eq!(filled, if options.contains("missing") { 0 } else { BUFFERS.into() });
            for block in 0..filled {
                let report = host.next();
                assert_eq!((report.lost, u64::from(report.time)), (0, block * u64::from(burst_samples)));
                assert_eq!(host.bits(block, 1), block as u32 * burst_samples + 1);
            }
            assert_eq!(host.rules(), []);
        }
        done.send(()).unwrap();
    });
    over.recv_timeout(Duration::from_secs(60)).unwrap();
}

#[test]
fn losses_are_reported_unless_that_is_the_fault() {
    for (options, reported) in [("usdr?rate=20M", true), ("usdr?rate=20M&untold=1", false)] {
        let mut host = Host::new(options, Format::Ci16, 8192);
        host.start();
        let until = Instant::now() + Duration::from_secs(20);
        while host.board.stats().lost_blocks == 0 {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut lost = 0;
        for _ in 0..BUFFERS + 1 {
            lost += host.next().lost;
            host.write(regs::RX_CONFIRM, 0);
        }
        host.stop();
        assert_eq!(lost > 0, reported, "{options}");
        assert!(reported || host.read(regs::RX_LOST) == 0);
    }
}

#[test]
fn buffers_are_played_at_the_board_s_rate() {
    let host = Host::new("usdr?rate=1M", Format::Ci16, 8192);
    let samples = 10_000;
    for buffer in 0..BUFFERS {
        host.write(regs::TX_BASE + buffer, host.mapped[1].runs()[0].addr.0 as u32);
    }
    host.write(regs::TX_BASE + regs::TX_LIMIT_Z, 4 * samples - 1);
    host.write(regs::TX_CONTROL, regs::TX_RESET);
    host.write(regs::TX_CONTROL, regs::TX_RUN);
    let begun = Instant::now();
    for _ in 0..10 {
        let [entry, low] = regs::tx_entry(samples, None);
        host.write(regs::TX_ENTRY, entry);
        host.write(regs::TX_TIME, low);
    }
    while host.board.stats().transmitted_samples < u64::from(10 * samples) {
        assert!(begun.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(begun.elapsed() >= Duration::from_millis(100), "{:?}", begun.elapsed());
    host.write(regs::TX_CONTROL, 0);
    assert_eq!(host.rules(), []);
}

#[test]
fn looped_samples_without_a_free_buffer_are_lost_and_counted() {
    let mut host = Host::new("usdr?rate=100M", Format::Ci16, 8192);
    let (samples, buffers) = (host.shape.samples(), 3 * u64::from(BUFFERS));
    for buffer in 0..BUFFERS {
        host.write(regs::TX_BASE + buffer, host.mapped[1].runs()[0].addr.0 as u32);
    }
    host.write(regs::TX_BASE + regs::TX_LIMIT_Z, host.shape.bytes() - 1);
    host.write(regs::LOOPBACK, 1);
    host.start();
    host.write(regs::TX_CONTROL, regs::TX_RESET);
    host.write(regs::TX_CONTROL, regs::TX_RUN);
    let until = Instant::now() + Duration::from_secs(20);
    for buffer in 0..buffers {
        while host.board.stats().transmitted_samples < buffer * u64::from(samples) {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        let [entry, low] = regs::tx_entry(samples, None);
        host.write(regs::TX_ENTRY, entry);
        host.write(regs::TX_TIME, low);
    }
    while host.board.stats().sent_blocks < buffers {
        assert!(Instant::now() < until, "{:?}", host.board.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    let lost = buffers - u64::from(BUFFERS);
    assert_eq!(host.board.stats().lost_blocks, lost);
    assert_eq!(u64::from(host.read(regs::RX_LOST)), lost);
    for block in 0..BUFFERS {
        assert_eq!(host.next(), RxReport { lost: 0, bursts: RxReport::whole(1), time: block * samples });
    }
    host.stop();
    assert_eq!(host.rules(), []);
}

#[test]
fn nothing_is_written_after_a_stop() {
    let mut host = Host::new("usdr?signal=noise&rate=50M", Format::Ci16, 65536);
    for _ in 0..50 {
        host.start();
        host.next();
        host.stop();
        host.ring.fill(0, host.ring.len(), 0xa5).unwrap();
        while host.event().is_some() {}
        std::thread::sleep(Duration::from_millis(1));
        assert!(host.ring.to_vec(0, host.ring.len()).unwrap().iter().all(|byte| *byte == 0xa5));
    }
    assert_eq!(host.rules(), []);
}

#[test]
fn a_reset_does_not_bring_back_a_board_that_is_gone() {
    let port = Board::new(BoardConfig::default()).unwrap().port();
    assert_eq!(port.regs.read32(regs::RX_STATUS * 4), u32::MAX);
    port.reset.unwrap().function_reset().unwrap();
    assert_eq!(port.regs.read32(regs::RX_STATUS * 4), u32::MAX);
}

#[test]
fn impossible_requests_are_recorded_and_not_executed() {
    let host = Host::new("usdr?rate=1M", Format::Ci16, 8192);
    host.port.regs.read32(4096);
    host.port.regs.write32(2, 0);
    host.write(regs::INDEX, regs::VIRTUAL_COUNT);
    host.write(regs::RX_CONFIRM, 0);
    host.write(regs::RX_BASE + 3, 0x1010);
    assert_eq!(
        host.rules(),
        [BoardRule::Access, BoardRule::Access, BoardRule::Index, BoardRule::Confirm, BoardRule::Alignment]
    );

    let host = Host::new("usdr", Format::Ci16, 8192);
    host.write(regs::RX_BASE + regs::BURST_WORDS_Z, 7);
    host.start();
    host.write(regs::RX_BASE + regs::RX_LIMIT_Z, 99);
    host.write(regs::RX_BASE + regs::BURST_WORDS_Z, host.shape.burst_bytes() / 8 - 1);
    host.start();
    host.write(regs::RX_BASE + regs::RX_LIMIT_Z, u32::MAX);
    host.write(regs::NOTIFY_PAGE, 0);
    host.start();
    let rules = host.rules();
    for rule in [BoardRule::Shape, BoardRule::Limit, BoardRule::Events] {
        assert!(rules.contains(&rule), "{rule:?} is not in {rules:?}");
    }
    assert_eq!(host.board.stats().starts, 0);
}

#[test]
fn dma_reaches_only_mapped_memory() {
    for (options, rule) in [
        ("usdr?rate=10M", BoardRule::Unmapped),
        ("usdr?rate=10M", BoardRule::BusMaster),
        ("usdr?rate=10M&mask=24", BoardRule::Mask),
    ] {
        let host = Host::new(options, Format::Ci16, 8192);
        // Unmapped addresses, set by a driver that assumes 32 bits.
        host.set_up(&[(0x4000_0000, host.shape.ring_bytes())]);
        host.board.set_bus_master(rule != BoardRule::BusMaster);
        host.start();
        let until = Instant::now() + Duration::from_secs(20);
        while !host.rules().contains(&rule) {
            assert!(Instant::now() < until, "{rule:?}: {:?}", host.rules());
            std::thread::sleep(Duration::from_millis(1));
        }
        host.stop();
    }
}

#[test]
fn unread_events_are_not_overwritten() {
    let mut host = Host::new("usdr?rate=100M", Format::Ci16, 4096);
    host.start();
    // Buffers are released, but events are not acknowledged.
    for _ in 0..256 {
        let until = Instant::now() + Duration::from_secs(20);
        while (host.read(regs::RX_STATUS) & 0x3f) == (host.read(regs::RX_STATUS) >> 8 & 0x3f) {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        host.write(regs::RX_CONFIRM, 0);
    }
    let until = Instant::now() + Duration::from_secs(20);
    while !host.rules().contains(&BoardRule::EventOverrun) {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(1));
    }
    host.stop();
    assert_eq!((0..256).filter(|_| host.event().is_some()).count(), 256);
    assert!(host.event().is_none());
}
