//! Blocks with missing bursts: present samples are delivered with their numbers, missing ones are counted, and stale
//! buffer contents are never delivered.

use onehop_radio::Format;
use onehop_sdr::{Error, Processor, RxOptions, SampleRoute, Settings};

use crate::common::{LONG, bench};

/// Missing bursts at every position in a block of four.
const MISSING_BURSTS: [&str; 7] = ["0", "1", "3", "0-1", "1-2", "0+2", "1-3"];

#[test]
fn present_samples_are_numbered_and_missing_ones_counted() {
    for (route, format) in [
        (SampleRoute::Direct, Format::Ci16),
        (SampleRoute::Pinned, Format::Ci16),
        (SampleRoute::Pinned, Format::Ci12),
    ] {
        for missing in MISSING_BURSTS {
            let bench = bench(&format!("usdr?signal=counter&rate=40M&missing={missing}@n=5"));
            if route == SampleRoute::Direct && !bench.gpu.simulated() {
                continue;
            }
            let shape = bench.shape(format, 32768 * format.bytes());
            assert_eq!(shape.bursts, 4);
            let options = RxOptions { only: Some(route), ..RxOptions::new(shape) };
            // The self-test repeats until every burst of every buffer was written.
            let mut receiver = bench.receiver(&options).unwrap();
            let before = bench.board.stats();
            receiver.start().unwrap();
            let (mut next, mut partial) = (0, 0);
            for _ in 0..20 {
                let block = receiver.acquire(LONG).unwrap().unwrap();
                assert_eq!(block.first, next + block.lost);
                next = block.first + u64::from(shape.samples());
                let is_partial = block.first / u64::from(shape.samples()) % 5 == 4;
                assert_eq!(block.missing > 0, is_partial, "without {missing}");
                assert_eq!(u64::from(block.extents().samples()) + block.missing, u64::from(shape.samples()));
                partial += u64::from(is_partial);
                for (memory, first) in block.parts().unwrap() {
                    let mut bytes = vec![0; memory.len()];
                    memory.read(0, &mut bytes).unwrap();
                    for (n, sample) in (first..).zip(bytes.chunks_exact(format.bytes() as usize)) {
                        let bits = sample.iter().rev().fold(0, |bits, byte| bits << 8 | u32::from(*byte));
                        assert_eq!(bits, n as u32 & format.mask(), "without {missing}");
                    }
                }
            }
            assert!(partial >= 2);
            receiver.stop().unwrap();
            while receiver.acquire(LONG).unwrap().is_some() {}
            let (counts, after) = (receiver.counts(), bench.board.stats());
            let samples = u64::from(shape.samples());
            assert!(counts.partial >= partial && counts.clock_errors == 0);
            assert_eq!(counts.delivered + counts.lost, (after.sent_blocks - before.sent_blocks) * samples);
            let lost = (after.lost_blocks - before.lost_blocks) * samples;
            assert_eq!(counts.lost, lost + after.missing_samples - before.missing_samples);
            drop(receiver);
            bench.assert_no_violations();
        }
    }
}

#[test]
fn only_present_samples_are_processed() {
    for missing in MISSING_BURSTS {
        let bench = bench(&format!("usdr?signal=counter&rate=20M&missing={missing}@n=3"));
        let shape = bench.shape(Format::Ci16, 128 << 10);
        let mut receiver = bench.receiver(&RxOptions::new(shape)).unwrap();
        let settings = Settings { counter: true, ..Settings::default() };
        let mut processor = Processor::new(&bench.gpu, shape, settings).unwrap();
        receiver.start().unwrap();
        for _ in 0..6 {
            let block = receiver.acquire(LONG).unwrap().unwrap().hold();
            let parts = block.parts().unwrap();
            let parts: Vec<_> = parts.iter().map(|(memory, first)| (memory, *first)).collect();
            processor.process_all(&parts).unwrap();
            receiver.release();
        }
        let measurements = processor.take().unwrap();
        assert_eq!(
            (measurements.wrong, measurements.samples),
            (Some(0), receiver.counts().delivered),
            "without {missing}"
        );
        assert!(receiver.counts().partial >= 2);
    }
}

#[test]
fn a_ring_with_always_missing_bursts_is_refused() {
    let bench = bench("usdr?rate=40M&missing=2");
    let options = RxOptions::new(bench.shape(Format::Ci16, 128 << 10));
    let Err(Error::NoRoute(list)) = bench.receiver(&options) else {
        panic!("the ring was never filled completely")
    };
    assert!(list.iter().any(|no| no.reason.contains("bursts were missing in 32 of 32")), "{list:?}");
    bench.assert_no_violations();
}
