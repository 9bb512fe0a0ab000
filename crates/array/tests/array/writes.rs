//! Writes: they are read back, reach the drive, and are durable after a flush.

use std::collections::BTreeSet;

use onehop_array::{ArrayError, ArrayOptions, ArrayRows, Error, Flushed};

use onehop_proto::array::flush_slots;
use onehop_proto::queue::Memory;
use onehop_sim::Rule;

use crate::{BYTES, Bed, Pages, Random, bed, media, options};

/// Bytes that differ from one write to the next.
fn bytes_of(rows: ArrayRows, ids: &[u64], round: u64) -> Vec<u8> {
    ids.iter()
        .flat_map(|id| {
            (0..u64::from(rows.bytes) / 4).map(move |word| (id * 31 + word * 7 + round * 1_000_003) as u32)
        })
        .flat_map(u32::to_le_bytes)
        .collect()
}

fn put(shadow: &mut [u8], rows: ArrayRows, ids: &[u64], bytes: &[u8]) {
    for (id, row) in ids.iter().zip(bytes.chunks(rows.bytes as usize)) {
        let at = *id as usize * rows.stride as usize;
        shadow[at..at + row.len()].copy_from_slice(row);
    }
}

fn on_drive(bed: &Bed) -> Vec<u8> {
    let mut bytes = vec![0; BYTES];
    bed.sim.read_media(1, 0, &mut bytes).unwrap();
    bytes
}

#[test]
fn flushed_data_survives_a_power_loss() {
    let (bed, mut shadow) = (bed("mem:16M?vwc=1"), media());
    let array = bed.array(options(4096, 512));
    let rows = array.rows(264, 264);
    let ids: Vec<u64> = (0..200).map(|i| i * 19).collect();
    let bytes = bytes_of(rows, &ids, 1);
    bed.scatter(&array, rows, &ids, &bytes);
    put(&mut shadow, rows, &ids, &bytes);
    let (moved, got) = bed.gather(&array, rows, &ids);
    assert!(moved.failed.is_empty() && got == bytes);
    assert!(array.flush().unwrap().written > 0);
    assert_eq!(array.flush().unwrap(), Flushed { written: 0 });
    bed.sim.power_cycle();
    assert!(on_drive(&bed) == shadow);
    let (moved, got) = bed.gather(&array, rows, &ids);
    assert!(moved.failed.is_empty() && got == bytes);
    array.close().unwrap();
}

#[test]
fn a_flush_reports_writes_lost_with_the_power() {
    let bed = bed("mem:16M?vwc=1&to=2");
    let array = bed.array(options(4096, 8));
    let rows = array.rows(4096, 4096);
    // More than the cache holds: some were written back, and are not flushed.
    let ids: Vec<u64> = (0..64).collect();
    bed.scatter(&array, rows, &ids, &bytes_of(rows, &ids, 1));
    assert!(array.stats().unwrap().writes > 0);
    bed.sim.power_cycle();
    let end = array.flush();
    assert!(matches!(end, Err(Error::Drive(onehop_drive::Error::WritesLost { .. }))), "{end:?}");
}

#[test]
fn a_flush_reports_lost_writes_even_if_it_cannot_write_a_page() {
    let bed = bed("mem:16M?vwc=1&to=2");
    let array = bed.array(options(4096, 8));
    let rows = array.rows(4096, 4096);
    let ids: Vec<u64> = (0..64).collect();
    bed.scatter(&array, rows, &ids, &bytes_of(rows, &ids, 1));
    assert!(array.stats().unwrap().writes > 0);
    bed.sim.power_cycle();
    bed.inject("fail@op=write,count=1");
    let end = array.flush();
    assert!(matches!(end, Err(Error::Drive(onehop_drive::Error::WritesLost { .. }))), "{end:?}");
    // The page that failed is still there, and is reported now.
    assert_eq!(array.flush().unwrap().written, 1);
}

#[test]
fn random_reads_and_writes_are_those_of_a_shadow() {
    for (page, pages, count, bytes, stride, fault) in [
        (512, 8, 120, 264, 264, ""),
        (4096, 1, 20, 256, 256, "&fault=late@every=50,delay=2ms"),
        (4096, 24, 120, 512, 520, "&fault=reorder@every=3,by=4"),
        (65536, 9, 40, 4096, 4096, "&fault=fail-once@every=20"),
    ] {
        let (bed, mut shadow) = (bed(&format!("mem:16M?vwc=1{fault}")), media());
        let array = bed.array(options(page, pages));
        let rows = ArrayRows { count: 3000, bytes, stride };
        let mut random = Random(u64::from(page));
        for round in 0..4 {
            let ids: BTreeSet<u64> = (0..count).map(|_| random.below(rows.count)).collect();
            let ids: Vec<u64> = ids.into_iter().collect();
            let bytes = bytes_of(rows, &ids, round);
            bed.scatter(&array, rows, &ids, &bytes);
            put(&mut shadow, rows, &ids, &bytes);
            let ids: Vec<u64> = (0..count).map(|_| random.below(rows.count)).collect();
            let (moved, got) = bed.gather(&array, rows, &ids);
            assert_eq!(moved.failed, []);
            assert!(got == crate::expected(&shadow, rows, &ids), "round {round}, pages of {page}, {fault}");
            if round % 3 == 0 {
                array.flush().unwrap();
                bed.sim.power_cycle();
                assert!(on_drive(&bed) == shadow, "round {round}, pages of {page}, {fault}");
            }
        }
        array.close().unwrap();
        assert!(on_drive(&bed) == shadow, "{fault}");
        // Kernels ring until the host notices that power was lost.
        let mut rules = bed.sim.violations().into_iter().map(|violation| violation.rule);
        assert!(rules.all(|rule| rule == Rule::DoorbellNotReady), "{fault}");
    }
}

#[test]
fn a_reader_does_not_wait_for_a_write_back_when_a_clean_page_can_go() {
    let bed = bed("mem:16M");
    let array = bed.array(options(4096, 8));
    let rows = array.rows(4096, 4096);
    let dirty: Vec<u64> = (0..7).collect();
    bed.scatter(&array, rows, &dirty, &bytes_of(rows, &dirty, 1));
    // One at a time: a page being read cannot be evicted.
    let reads = |first: u64| {
        let one_by_one = move |mem: &_, array: &Pages, _| {
            (first..first + 100)
                .all(|page| array.pin(mem, page * 4096).map(|pin| mem.load(pin.address())).is_ok())
        };
        assert_eq!(bed.run(&array, 1, one_by_one), [true]);
    };
    reads(100);
    assert_eq!(array.stats().unwrap().writes, 0);
    // The eighth evicts one.
    bed.scatter(&array, rows, &[7], &bytes_of(rows, &[7], 1));
    reads(200);
    assert!(array.stats().unwrap().writes > 0);
    let all: Vec<u64> = (0..8).collect();
    let (moved, got) = bed.gather(&array, rows, &all);
    assert!(moved.failed.is_empty() && got == bytes_of(rows, &all, 1));
    array.close().unwrap();
}

#[test]
fn threads_that_write_parts_of_one_page_while_others_flush_lose_nothing() {
    let bed = bed("mem:16M");
    // Four pages compete for room.
    let array = bed.array(options(4096, 2));
    let said = bed.run(&array, 40, |mem, array, index| {
        if index >= 36 {
            return (0..5).all(|_| {
                let flushed = flush_slots(mem, array, (0, 1), u64::MAX);
                flushed.failed == 0 || flushed.error == Some(ArrayError::TimedOut)
            });
        }
        (0..4096 / 36).all(|i| {
            let word = u64::from(i * 36 + index);
            array.pin_mut(mem, word * 4).map(|pin| mem.store(pin.address(), word as u32 ^ 0x5a5a)).is_ok()
        })
    });
    assert!(said.iter().all(|well| *well), "{said:?}");
    let written = 4096 / 36 * 36;
    let bytes: Vec<u8> = (0..written).flat_map(|word: u32| (word ^ 0x5a5a).to_le_bytes()).collect();
    let ids: Vec<u64> = (0..written.into()).collect();
    let (moved, got) = bed.gather(&array, array.rows(4, 4), &ids);
    assert!(moved.failed.is_empty() && got == bytes);
    array.close().unwrap();
    assert!(on_drive(&bed)[..bytes.len()] == bytes);
}

#[test]
fn an_array_that_is_read_only_is_not_written() {
    let bed = bed("mem:16M");
    let array = bed.array(ArrayOptions { writable: false, ..options(4096, 8) });
    let rows = array.rows(256, 256);
    let from = bed.region(256);
    assert_eq!(array.scatter(rows, &[3], &from).unwrap().failed, [(0, ArrayError::ReadOnly)]);
    array.close().unwrap();
    assert!(on_drive(&bed) == media());
}
