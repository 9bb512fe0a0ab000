//! Threads that compete for pages, and wait for each other.

use std::time::Duration;

use onehop_array::{ArrayError, ArrayOptions, ArrayRows};
use onehop_gpu::EmulatedThread;
use onehop_proto::queue::Memory;

use crate::{BYTES, Pages, Random, bed, expected, media, options, within, word};

const PAGE: u64 = 4096;

/// Pins a page and reads a word of it.
fn read(mem: &EmulatedThread, array: &Pages, byte: u64) -> Result<u32, ArrayError> {
    let pin = array.pin(mem, byte)?;
    Ok(mem.load(pin.address()))
}

#[test]
fn a_cache_of_one_page_serves_any_number_of_threads() {
    let bed = bed("mem:16M");
    // Threads wait for one another, perhaps on a busy machine.
    let array = bed.array(ArrayOptions { patience: Duration::from_secs(300), ..options(4096, 1) });
    assert_eq!(array.pages(), 1);
    let said = bed.run(&array, 96, |mem, array, index| {
        let byte = Random(index.into()).below(BYTES as u64 / 4) * 4;
        read(mem, array, byte).map(|value| assert_eq!(value, word(byte / 4)))
    });
    assert!(said.iter().all(|end| *end == Ok(())), "{said:?}");
    array.close().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn warps_gather_through_a_cache_of_one_page() {
    let (bed, media) = (bed("mem:16M"), media());
    let array = bed.array(options(4096, 1));
    // Every row straddles two pages.
    let rows = ArrayRows { count: 2000, bytes: 4096, stride: 8188 };
    let ids: Vec<u64> = (0..300).map(|i| i * 37 % rows.count).collect();
    let (moved, got) = bed.gather(&array, rows, &ids);
    assert_eq!(moved.failed, []);
    assert!(got == expected(&media, rows, &ids));
    array.close().unwrap();
}

#[test]
fn threads_that_hold_one_page_and_want_another_end() {
    let bed = bed("mem:16M");
    let patience = Duration::from_millis(300);
    let array = bed.array(ArrayOptions { patience, ..options(4096, 2) });
    let pairs = |mem: &EmulatedThread, array: &Pages, index: u32| {
        let mut said = Vec::new();
        for round in 0..3 {
            let (one, other) = (u64::from(index * 2 + round), u64::from(index * 2 + round + 1));
            let first = match array.pin(mem, one * PAGE) {
                Ok(pin) => pin,
                Err(error) => {
                    said.push(Err(error));
                    continue;
                }
            };
            let second = read(mem, array, other * PAGE);
            assert_eq!(mem.load(first.address()), word(one * PAGE / 4), "a page that is pinned stays");
            said.push(second.map(|value| assert_eq!(value, word(other * PAGE / 4))));
        }
        said
    };
    let said = within(Duration::from_secs(60), || bed.run(&array, 16, pairs)).concat();
    assert!(
        said.iter().all(|end| matches!(end, Ok(()) | Err(ArrayError::NoRoom | ArrayError::TimedOut))),
        "{said:?}"
    );
    // Two threads that hold both pages and want two more get an error.
    let stuck = bed.run(&array, 2, |mem, array, index| {
        let _pin = array.pin(mem, u64::from(index) * PAGE).unwrap();
        // Until the other thread holds its page.
        std::thread::sleep(Duration::from_millis(200));
        read(mem, array, (100 + u64::from(index)) * PAGE)
    });
    assert!(stuck.contains(&Err(ArrayError::NoRoom)), "{stuck:?}");
    // Its pins are released.
    assert_eq!(bed.run(&array, 1, |mem, array, _| read(mem, array, 7 * PAGE)), [Ok(word(7 * PAGE / 4))]);
    array.close().unwrap();
}

#[test]
fn all_pinned_is_an_error_and_ends_with_the_pins() {
    let bed = bed("mem:16M");
    let array = bed.array(ArrayOptions { patience: Duration::from_millis(100), ..options(4096, 8) });
    let said = within(Duration::from_secs(30), || {
        bed.run(&array, 1, |mem, array, _| {
            let pins: Vec<_> = (0..8).map(|page| array.pin(mem, page * PAGE).unwrap()).collect();
            let refused = read(mem, array, 100 * PAGE);
            // Cached pages stay available and unchanged.
            let there = (0..8).all(|page| read(mem, array, page * PAGE) == Ok(word(page * PAGE / 4)));
            let same = pins
                .iter()
                .zip(0..)
                .all(|(pin, page): (_, u64)| mem.load(pin.address()) == word(page * PAGE / 4));
            drop(pins);
            (refused, there && same, read(mem, array, 100 * PAGE))
        })
    });
    assert_eq!(said, [(Err(ArrayError::NoRoom), true, Ok(word(100 * PAGE / 4)))]);
    array.close().unwrap();
}

#[test]
fn pages_are_not_replaced_under_their_readers() {
    let bed = bed("mem:16M");
    let array = bed.array(options(4096, 16));
    let right = bed.run(&array, 12, |mem, array, index| {
        let mut random = Random(u64::from(index) + 77);
        (0..40).all(|_| {
            let page = random.below(200);
            let pin = array.pin(mem, page * PAGE).unwrap();
            // Reads the whole page slowly, while the other threads want its place.
            (0..PAGE / 4).step_by(97).all(|at| {
                mem.pause();
                mem.load(pin.address().plus(at * 4)) == word(page * PAGE / 4 + at)
            })
        })
    });
    assert!(right.iter().all(|right| *right));
    array.close().unwrap();
    assert_eq!(bed.sim.violations(), []);
}

#[test]
fn threads_of_a_warp_may_go_different_ways() {
    let bed = bed("mem:16M");
    let array = bed.array(options(4096, 8));
    let said = bed.run(&array, 64, |mem, array, index| match index % 4 {
        0 => {
            read(mem, array, u64::from(index) * PAGE).map(|value| value == word(u64::from(index) * PAGE / 4))
        }
        1 => {
            let byte = (1000 + u64::from(index)) * PAGE;
            array.pin_mut(mem, byte).map(|pin| mem.store(pin.address(), index))?;
            read(mem, array, byte).map(|value| value == index)
        }
        2 => read(mem, array, u64::MAX).map(|_| false),
        _ => (0..5).try_fold(true, |right, _| Ok(right & (read(mem, array, 4)? == word(1)))),
    });
    for (index, answer) in said.into_iter().enumerate() {
        assert_eq!(answer, if index % 4 == 2 { Err(ArrayError::Range) } else { Ok(true) }, "thread {index}");
    }
    array.close().unwrap();
}

#[test]
fn a_page_that_all_want_is_read_once() {
    let bed = bed("mem:16M?latency=2ms");
    let array = bed.array(options(4096, 64));
    let said = bed.run(&array, 64, |mem, array, _| read(mem, array, 12 * PAGE));
    assert!(said.iter().all(|value| *value == Ok(word(12 * PAGE / 4))));
    assert_eq!(array.stats().unwrap().reads, 1);
}
