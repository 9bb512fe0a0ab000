//! Reads from a drive without faults: the right rows, one command per page.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use onehop_array::{Array, ArrayError, ArrayOptions, ArrayRows, Error};
use onehop_drive::Placement;

use crate::{BLOCK, BYTES, Bed, Pages, Random, bed, expected, media, options};

fn ids(count: u64, rows: u64, seed: u64) -> Vec<u64> {
    let mut random = Random(seed);
    (0..count).map(|_| random.below(rows)).collect()
}

fn pages(rows: ArrayRows, ids: &[u64], page: u64) -> usize {
    let of = |id: &u64| {
        let first = id * u64::from(rows.stride);
        first / page..(first + u64::from(rows.bytes) - 1) / page + 1
    };
    ids.iter().flat_map(of).collect::<BTreeSet<_>>().len()
}

fn rows_of(bytes: u32, stride: u32) -> ArrayRows {
    ArrayRows { count: (BYTES as u64 - u64::from(bytes)) / u64::from(stride) + 1, bytes, stride }
}

#[test]
fn rows_of_every_kind_are_right_and_each_page_takes_one_command() {
    let (bed, media) = (bed("mem:16M"), media());
    for (page, bytes, stride) in [
        (512, 256, 256),
        (512, 264, 264),
        (512, 264, 512),
        (4096, 264, 264),
        (4096, 16384, 16384),
        (65536, 4, 12),
    ] {
        let array = bed.array(options(page, (BYTES as u64 / u64::from(page)).min(4096)));
        let rows = rows_of(bytes, stride);
        assert_eq!(array.rows(bytes, stride), rows);
        // All within a part of the array that fits in the cache, some of them twice.
        let ids = ids(700, rows.count.min((1 << 20) / u64::from(stride)), u64::from(bytes));
        let (moved, got) = bed.gather(&array, rows, &ids);
        assert_eq!(moved.failed, []);
        assert!(got == expected(&media, rows, &ids), "rows of {bytes} every {stride} in pages of {page}");
        let stats = array.stats().unwrap();
        assert_eq!(stats.reads as usize, pages(rows, &ids, page.into()), "pages of {page}");
        let (moved, got) = bed.gather(&array, rows, &ids);
        assert!(moved.failed.is_empty() && got == expected(&media, rows, &ids));
        let again = array.stats().unwrap();
        assert_eq!((again.reads, again.hits - stats.hits), (stats.reads, again.wanted - stats.wanted));
        array.close().unwrap();
    }
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn threads_that_act_on_their_own_read_the_same() {
    let (bed, media) = (bed("mem:16M"), media());
    let array = bed.array(options(4096, 16));
    let rows = rows_of(264, 264);
    let ids = ids(500, rows.count, 9);
    let out = bed.region(ids.len() * 264);
    assert_eq!(array.read(rows, &ids, &out).unwrap().failed, []);
    let mut got = vec![0; ids.len() * 264];
    out.read(0, &mut got).unwrap();
    assert!(got == expected(&media, rows, &ids));
    array.close().unwrap();
}

#[test]
fn rows_past_the_end_fail_and_others_do_not() {
    let (bed, media) = (bed("mem:16M"), media());
    let array = bed.array(options(4096, 64));
    let rows = rows_of(256, 256);
    let (moved, got) = bed.gather(&array, rows, &[rows.count - 1, rows.count, 0, u64::MAX]);
    assert_eq!(moved.failed, [(1, ArrayError::Range), (3, ArrayError::Range)]);
    assert_eq!(got[..256], expected(&media, rows, &[rows.count - 1]));
    assert_eq!(got[512..768], expected(&media, rows, &[0]));
    let beyond = bed.run(&array, 1, |mem, array, _| array.pin(mem, array.bytes(mem)).map(|_| ()));
    assert_eq!(beyond, [Err(ArrayError::Range)]);
}

#[test]
fn the_last_page_may_be_short_and_the_first_block_anywhere() {
    let (bed, media) = (bed("mem:16M"), media());
    let ns = bed.drive.namespace(1).unwrap();
    let (first, end) = (3, ns.blocks - 2);
    let blocks = first..end;
    let array = Array::open(&bed.drive, Arc::new(bed.gpu.clone()), ns, blocks, options(65536, 16)).unwrap();
    let rows = array.rows(512, 512);
    assert_eq!((rows.count, array.bytes()), (end - first, (end - first) * BLOCK));
    let ids = [0, 1, 126, 127, 128, rows.count - 1];
    let (moved, got) = bed.gather(&array, rows, &ids);
    assert_eq!(moved.failed, []);
    assert!(got == expected(&media[(first * BLOCK) as usize..], rows, &ids));
    // The last page has 123 blocks, and room for 128.
    let at_the_end = |mem: &_, array: &Pages, _| {
        let end = array.bytes(mem);
        let pin = |byte| array.pin(mem, byte).map(|_| ());
        let write = |byte| array.pin_mut(mem, byte).map(|_| ());
        [pin(end - 4), pin(end), write(end), write(end + 4 * BLOCK)]
    };
    let behind = Err(ArrayError::Range);
    assert_eq!(bed.run(&array, 1, at_the_end), [[Ok(()), behind, behind, behind]]);
    array.close().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn arrays_of_more_than_2_32_pages_work() {
    let bed = bed("mem:4T");
    let array = bed.array(options(512, 64));
    let rows = array.rows(512, 512);
    assert!(rows.count > 1 << 32);
    let far = [1, (1 << 32) + 1, (2 << 32) - 1, 5];
    for (i, row) in far.iter().enumerate() {
        bed.sim.write_media(1, row * 512, &[i as u8 + 1; 512]).unwrap();
    }
    let (moved, got) = bed.gather(&array, rows, &far);
    assert_eq!(moved.failed, []);
    for (i, row) in got.chunks(512).enumerate() {
        assert!(row.iter().all(|byte| *byte == i as u8 + 1), "row {}", far[i]);
    }
}

#[test]
fn rows_of_a_larger_array_are_refused() {
    let bed = bed("mem:16M");
    let ns = bed.drive.namespace(1).unwrap();
    let short = ns.blocks - 3;
    let open =
        |end| Array::open(&bed.drive, Arc::new(bed.gpu.clone()), ns, 0..end, options(4096, 8)).unwrap();
    let (array, larger) = (open(short), open(ns.blocks));
    let (rows, ids) = (larger.rows(512, 512), [short - 1, short]);
    let memory = bed.region(2 * 512);
    let moves = [Array::gather, Array::read, Array::scatter];
    for end in moves.map(|one| one(&array, rows, &ids, &memory)) {
        let Err(Error::Rows { rows: refused, most }) = end else { panic!("{end:?}") };
        assert_eq!((refused, most), (rows, short));
    }
    // Even before there is anything to move.
    assert!(matches!(array.gather(rows, &[], &memory), Err(Error::Rows { .. })));
    let (moved, _) = bed.gather(&array, array.rows(512, 512), &ids);
    assert_eq!(moved.failed, [(1, ArrayError::Range)]);
    // Rows may also be fewer than there is room for.
    let (moved, _) = bed.gather(&larger, array.rows(512, 512), &ids);
    assert_eq!(moved.failed, [(1, ArrayError::Range)]);
}

#[test]
fn time_limits_may_be_as_long_as_can_be() {
    let (bed, media) = (bed("mem:16M"), media());
    let ever = Duration::MAX;
    let array = bed.array(ArrayOptions { patience: ever, limit: ever, stall: ever, ..options(4096, 8) });
    let rows = rows_of(4096, 4096);
    bed.scatter(&array, rows, &[5], &expected(&media, rows, &[5]));
    let (moved, got) = bed.gather(&array, rows, &[5, 70, 9]);
    assert!(moved.failed.is_empty() && got == expected(&media, rows, &[5, 70, 9]));
    assert_eq!(array.flush().unwrap().written, 1);
    array.close().unwrap();
}

#[test]
fn invalid_requests_are_refused() {
    let bed = bed("mem:16M?lba=4096");
    let ns = bed.drive.namespace(1).unwrap();
    let open = |blocks, options: ArrayOptions| match Array::open(
        &bed.drive,
        Arc::new(bed.gpu.clone()),
        ns,
        blocks,
        options,
    ) {
        Err(Error::Refused(why)) => why,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was opened"),
    };
    let all = 0..ns.blocks;
    assert!(open(0..ns.blocks + 1, options(4096, 8)).contains("blocks"));
    assert!(open(5..5, options(4096, 8)).contains("blocks"));
    assert!(open(all.clone(), options(2048, 8)).contains("4096"));
    assert!(open(all.clone(), options(12288, 8)).contains("12288"));
    assert!(open(all.clone(), options(128 << 10, 8)).contains("65536"));
    assert!(open(all.clone(), options(4096, 0)).contains("cache"));
    let array = bed.array(options(4096, 8));
    let small = bed.region(4096).slice(0..100).unwrap();
    assert!(matches!(array.gather(array.rows(256, 256), &[0], &small), Err(Error::Gpu(_))));
    assert!(matches!(array.gather(array.rows(256, 128), &[0], &small), Err(Error::Gpu(_))));
    assert!(matches!(array.gather(array.rows(6, 6), &[0], &small), Err(Error::Gpu(_))));
}

/// Including a queue with less room than a warp has lanes.
#[test]
fn every_placement_and_a_queue_with_little_room() {
    for placement in [Placement::TIER1, Placement::TIER2, Placement::TIER3, Placement::POSTED] {
        let (bed, media): (Bed, _) = (bed("mem:16M"), media());
        let array = bed.array(ArrayOptions { placement, depth: 3, ..options(4096, 64) });
        let rows = rows_of(256, 256);
        let ids = ids(400, rows.count, 5);
        let (moved, got) = bed.gather(&array, rows, &ids);
        assert_eq!(moved.failed, []);
        assert!(got == expected(&media, rows, &ids), "{placement:?}");
        array.close().unwrap();
        assert_eq!(bed.sim.violations(), []);
    }
}
