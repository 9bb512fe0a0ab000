//! Streams from and to the simulated board: on every route, each sample is delivered once or reported as lost. Machines
//! without a working route are reported.

use std::time::Duration;

use onehop_board::{Board, BoardConfig};
use onehop_radio::Format;
use onehop_radio::event::RxReport;
use onehop_sdr::{Card, Error, Profile, Receiver, RxOptions, SampleRoute, Session, Transmitter, TxOptions};

use crate::common::{Bench, LONG, bench};

/// The bits of a sample of a block.
fn bits(bytes: &[u8], format: Format, sample: u32) -> u32 {
    let at = (sample * format.bytes()) as usize;
    bytes[at..at + format.bytes() as usize].iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte))
}

#[test]
fn every_sample_is_delivered_once_or_reported_as_lost() {
    for (route, format) in [
        (SampleRoute::Direct, Format::Ci16),
        (SampleRoute::Pinned, Format::Ci16),
        (SampleRoute::Pinned, Format::Ci12),
    ] {
        let bench = bench("usdr?signal=counter&rate=20M");
        let shape = bench.shape(format, 8192);
        if route == SampleRoute::Direct && !bench.gpu.simulated() {
            continue;
        }
        let mut receiver = bench.receiver(&RxOptions { only: Some(route), ..RxOptions::new(shape) }).unwrap();
        assert_eq!((receiver.route(), receiver.why_not_better()), (route, &[][..]));
        let before = bench.board.stats();
        receiver.start().unwrap();
        let mut next = 0;
        for turn in 0..200 {
            if turn % 80 == 79 {
                // Long enough to overflow the ring and the slots, so blocks are lost.
                std::thread::sleep(Duration::from_millis(60));
            }
            let block = receiver.acquire(LONG).unwrap().unwrap();
            assert_eq!(block.first, next + block.lost);
            let mut bytes = vec![0; shape.bytes() as usize];
            block.memory().read(0, &mut bytes).unwrap();
            for sample in 0..shape.samples() {
                assert_eq!(
                    bits(&bytes, format, sample),
                    (block.first as u32).wrapping_add(sample) & format.mask()
                );
            }
            next = block.first + u64::from(shape.samples());
        }
        receiver.stop().unwrap();
        while receiver.acquire(LONG).unwrap().is_some() {}
        let (counts, after) = (receiver.counts(), bench.board.stats());
        let samples = u64::from(shape.samples());
        assert!(counts.lost > 0 && counts.gaps > 0, "nothing was lost");
        assert_eq!(counts.delivered + counts.lost, (after.sent_blocks - before.sent_blocks) * samples);
        assert_eq!(counts.lost, (after.lost_blocks - before.lost_blocks) * samples);
        assert_eq!(counts.clock_errors, 0);
        drop(receiver);
        bench.assert_no_violations();
    }
}

#[test]
fn starts_and_stops_leave_nothing_behind() {
    let bench = bench("usdr?rate=50M&signal=noise");
    let shape = bench.shape(Format::Ci16, 16 << 10);
    let mapped = bench.board.mapper().mappings();
    let mut receiver = bench.receiver(&RxOptions { self_test: None, ..RxOptions::new(shape) }).unwrap();
    for _ in 0..1000 {
        receiver.start().unwrap();
        receiver.acquire(LONG).unwrap().unwrap();
    }
    drop(receiver);
    assert_eq!(bench.board.mapper().mappings(), mapped);
    assert!(bench.board.stats().starts >= 1000);
    bench.assert_no_violations();
}

#[test]
fn a_receiver_dropped_while_samples_flow_stops_before_it_frees_memory() {
    let bench = bench("usdr?rate=100M");
    let shape = bench.shape(Format::Ci16, 16 << 10);
    for _ in 0..100 {
        let mut receiver = bench.receiver(&RxOptions { self_test: None, ..RxOptions::new(shape) }).unwrap();
        assert!(matches!(bench.receiver(&RxOptions::new(shape)), Err(Error::Busy { .. })));
        receiver.start().unwrap();
        receiver.acquire(LONG).unwrap().unwrap();
    }
    assert_eq!(bench.board.mapper().mappings(), 1);
    // A write to unmapped memory would be a violation.
    bench.assert_no_violations();
}

/// A receiver of a counter on each route that the GPU allows.
fn by_each_route() -> impl Iterator<Item = (Bench, Receiver)> {
    [SampleRoute::Direct, SampleRoute::Pinned].into_iter().filter_map(|route| {
        let bench = bench("usdr?rate=20M&signal=counter");
        if route == SampleRoute::Direct && !bench.gpu.simulated() {
            return None;
        }
        let shape = bench.shape(Format::Ci16, 8192);
        let options = RxOptions { only: Some(route), self_test: None, ..RxOptions::new(shape) };
        let receiver = bench.receiver(&options).unwrap();
        Some((bench, receiver))
    })
}

#[test]
fn held_blocks_are_released_in_order() {
    for (bench, mut receiver) in by_each_route() {
        let buffers = receiver.buffers().unwrap();
        receiver.start().unwrap();
        for _ in 0..40 {
            let mut held = Vec::new();
            for turn in 0..4 {
                let block = receiver.acquire(LONG).unwrap().unwrap();
                assert_eq!(block.memory().addr(), buffers[block.handle as usize].addr());
                // A block dropped between held ones is released with them.
                if turn != 2 {
                    held.push(block.hold());
                }
            }
            for block in held {
                let mut bytes = [0; 4];
                block.memory.read(0, &mut bytes).unwrap();
                assert_eq!(u32::from_le_bytes(bytes), block.first as u32);
                assert!(receiver.release());
            }
            assert!(!receiver.release());
        }
        drop(receiver);
        bench.assert_no_violations();
    }
}

#[test]
fn a_restart_releases_held_blocks() {
    for (bench, mut receiver) in by_each_route() {
        let route = receiver.route();
        // More rounds than either route has buffers.
        for round in 0..40 {
            receiver.start().unwrap();
            for _ in 0..=round % 3 {
                let block = receiver.acquire(LONG).unwrap();
                let block = block.unwrap_or_else(|| panic!("{}: nothing in round {round}", route.name()));
                let mut bytes = [0; 4];
                block.memory().read(0, &mut bytes).unwrap();
                assert_eq!(u32::from_le_bytes(bytes), block.first as u32);
                let _ = block.hold();
            }
        }
        // All blocks can be held again.
        receiver.start().unwrap();
        let slots = receiver.buffers().unwrap().len();
        for _ in 0..slots {
            let _ = receiver.acquire(LONG).unwrap().unwrap().hold();
        }
        assert!(receiver.acquire(Duration::ZERO).unwrap().is_none());
        drop(receiver);
        bench.assert_no_violations();
    }
}

#[test]
fn reasons_against_gpu_memory_are_reported() {
    let cases = [
        ("usdr?rate=20M&iommu=off", "mask", "IOMMU"),
        ("usdr?rate=20M&p2p=refused", "refused", "cpu/pinned"),
        ("usdr?rate=20M&p2p=dropped", "drops what the board writes", "cpu/pinned"),
    ];
    for (options, reason, fix) in cases {
        let bench = bench(options);
        let shape = bench.shape(Format::Ci16, 16 << 10);
        let mut receiver = bench.receiver(&RxOptions::new(shape)).unwrap();
        assert_eq!(receiver.route(), SampleRoute::Pinned);
        let [no] = receiver.why_not_better() else { panic!("{:?}", receiver.why_not_better()) };
        assert_eq!(no.route, SampleRoute::Direct);
        if bench.gpu.simulated() {
            assert!(no.reason.contains(reason) && no.fix.contains(fix), "{options}: {no:?}");
        }
        receiver.start().unwrap();
        assert!(receiver.acquire(LONG).unwrap().is_some());
        drop(receiver);
        let only = RxOptions { only: Some(SampleRoute::Direct), ..RxOptions::new(shape) };
        assert!(matches!(bench.receiver(&only), Err(Error::NoRoute(_))));
        bench.assert_no_violations();
    }
    // BAR1 below 4 GiB needs no IOMMU.
    let bench = bench("usdr?rate=20M&iommu=off&bar=low");
    let receiver = bench.receiver(&RxOptions::new(bench.shape(Format::Ci16, 16 << 10))).unwrap();
    assert_eq!(receiver.route() == SampleRoute::Direct, bench.gpu.simulated());
}

#[test]
fn submitted_samples_are_transmitted() {
    for (options, route) in
        [("usdr?rate=50M", SampleRoute::Direct), ("usdr?rate=50M&p2p=writes", SampleRoute::Pinned)]
    {
        let bench = bench(options);
        let tx = TxOptions { bytes: 16 << 10, only: None, self_test: LONG };
        let mut transmitter = Transmitter::open(&bench.session, &bench.gpu, &tx).unwrap();
        let route = if bench.gpu.simulated() { route } else { SampleRoute::Pinned };
        assert_eq!(transmitter.route(), route, "{:?}", transmitter.why_not_better());
        let samples = transmitter.bytes() / 4;
        for round in 0..50u32 {
            let block = transmitter.acquire(LONG).unwrap().unwrap();
            let data: Vec<u8> = (0..samples).flat_map(|n| (round * samples + n).to_le_bytes()).collect();
            block.memory().write(0, &data).unwrap();
            block.submit(samples, None).unwrap();
        }
        assert!(transmitter.drain(LONG).unwrap());
        let sent = bench.board.transmitted();
        let expected: Vec<u8> = (0..50 * samples).flat_map(u32::to_le_bytes).collect();
        assert!(sent.ends_with(&expected[expected.len() - sent.len().min(expected.len())..]));
        let block = transmitter.acquire(LONG).unwrap().unwrap();
        assert!(matches!(block.submit(samples + 1, None), Err(Error::NotPossible { .. })));
        drop(transmitter);
        bench.assert_no_violations();
    }
}

#[test]
fn a_transmitter_next_to_a_receiver_uses_host_memory() {
    let bench = bench("usdr?rate=20M&signal=counter");
    let mut receiver = bench.receiver(&RxOptions::new(bench.shape(Format::Ci16, 16 << 10))).unwrap();
    receiver.start().unwrap();
    let tx = TxOptions { bytes: 16 << 10, only: None, self_test: LONG };
    let mut transmitter = Transmitter::open(&bench.session, &bench.gpu, &tx).unwrap();
    assert_eq!(transmitter.route(), SampleRoute::Pinned);
    let [no] = transmitter.why_not_better() else { panic!("{:?}", transmitter.why_not_better()) };
    assert_eq!(no.route, SampleRoute::Direct);
    if bench.gpu.simulated() {
        assert!(no.reason.contains("receiver is in use") && no.fix.contains("before the receiver"), "{no:?}");
    }
    let block = transmitter.acquire(LONG).unwrap().unwrap();
    block.memory().fill(0, block.memory().len(), 7).unwrap();
    block.submit(1024, None).unwrap();
    assert!(transmitter.drain(LONG).unwrap());
    assert!(bench.board.transmitted().ends_with(&[7; 4096]));
    // The receiver continues with the counter, not with the transmitted samples.
    for _ in 0..40 {
        let block = receiver.acquire(LONG).unwrap().unwrap();
        let mut bytes = [0; 4];
        block.memory().read(0, &mut bytes).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), block.first as u32);
    }
    // A second transmitter is refused.
    assert!(matches!(Transmitter::open(&bench.session, &bench.gpu, &tx), Err(Error::Busy { .. })));
    drop(transmitter);
    let only = TxOptions { only: Some(SampleRoute::Direct), ..tx };
    assert!(matches!(Transmitter::open(&bench.session, &bench.gpu, &only), Err(Error::NoRoute(_))));
    bench.assert_no_violations();
}

#[test]
fn drain_waits_while_buffers_are_played() {
    // Buffers of 0.1 s: more than three seconds of them.
    let bench = bench("usdr?rate=160k");
    let tx = TxOptions { bytes: 64 << 10, only: Some(SampleRoute::Pinned), self_test: LONG };
    let mut transmitter = Transmitter::open(&bench.session, &bench.gpu, &tx).unwrap();
    for _ in 0..32 {
        transmitter.acquire(LONG).unwrap().unwrap().submit(16384, None).unwrap();
    }
    assert!(transmitter.drain(Duration::from_secs(2)).unwrap());
    assert_eq!(bench.board.stats().transmitted_samples, 32 * 16384);
    // A buffer that takes longer than the limit.
    transmitter.acquire(LONG).unwrap().unwrap().submit(16384, None).unwrap();
    assert!(!transmitter.drain(Duration::ZERO).unwrap());
}

#[test]
fn transmit_buffers_respect_the_address_mask() {
    // GPU memory at 0xd000_0000, and a board with 31 address bits.
    let bench = bench("usdr?rate=20M&iommu=off&bar=low&mask=31");
    let tx = TxOptions { bytes: 16 << 10, only: None, self_test: LONG };
    let transmitter = Transmitter::open(&bench.session, &bench.gpu, &tx).unwrap();
    assert_eq!(transmitter.route(), SampleRoute::Pinned);
    let reason = &transmitter.why_not_better()[0].reason;
    assert!(reason.contains("31 address bits") || !bench.gpu.simulated(), "{reason}");
    bench.assert_no_violations();
}

/// An event has a maximum number of lost blocks.
#[test]
fn more_losses_than_a_board_can_report_are_an_error() {
    let bench = bench("usdr?rate=4G&time=0");
    let options = RxOptions { self_test: None, ..RxOptions::new(bench.shape(Format::Ci16, 64)) };
    let mut receiver = bench.receiver(&options).unwrap();
    receiver.start().unwrap();
    while bench.board.stats().lost_blocks < u64::from(RxReport::MOST_LOST) {
        std::thread::sleep(Duration::from_millis(1));
    }
    receiver.stop().unwrap();
    assert!(receiver.counts().clock_errors > 0);
    receiver.start().unwrap();
    while bench.board.stats().lost_blocks < 3 * u64::from(RxReport::MOST_LOST) {
        std::thread::sleep(Duration::from_millis(1));
    }
    for _ in 0..64 {
        assert!(receiver.acquire(LONG).unwrap().is_some());
    }
    assert!(receiver.counts().clock_errors > 0);
    receiver.stop().unwrap();
    bench.assert_no_violations();
}

#[test]
fn a_silent_board_fails_within_the_time_limit() {
    let bench = bench("usdr?rate=1k");
    let shape = bench.shape(Format::Ci16, 1 << 20);
    let options = RxOptions { self_test: Some(Duration::from_millis(50)), ..RxOptions::new(shape) };
    let Err(Error::NoRoute(list)) = bench.receiver(&options) else {
        panic!("the board cannot have filled a buffer")
    };
    assert!(list.iter().all(|no| no.reason.contains("filled 0 of 32") || !bench.gpu.simulated()), "{list:?}");
}

#[test]
fn a_board_that_left_the_bus_is_reported() {
    let board = Board::new(BoardConfig::default()).unwrap();
    let (port, interrupt) = (board.port(), board.interrupt());
    drop(board);
    let card = Card::new(&port, interrupt, Profile::SIMULATED);
    assert!(matches!(Session::open(card).map(|_| ()), Err(Error::Gone { .. })));
}
