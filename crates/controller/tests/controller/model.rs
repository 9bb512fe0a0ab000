//! The model against a shadow copy: random commands, every shape of data pointer, every order.

use onehop_controller::layout::flag;
use onehop_controller::{Exit, Pair};
use onehop_proto::queue::Memory;
use onehop_proto::{Status, nvm};

use crate::rig::{PAGE, Rig, Setup, pointers};
use crate::rng::Rng;

/// Some pages, without duplicates.
fn some_pages(rng: &mut Rng, count: u64, of: u64) -> Vec<u64> {
    let mut pages: Vec<u64> = (0..of).collect();
    for i in 0..count {
        let other = i + rng.below(of - i);
        pages.swap(i as usize, other as usize);
    }
    pages.truncate(count as usize);
    pages
}

/// The words of a buffer made of pages.
fn words_of(pages: &[u64], offset: u64, bytes: u64) -> Vec<u64> {
    let at = |i: u64| {
        let byte = offset + 4 * i;
        pages[(byte / PAGE) as usize] * PAGE + byte % PAGE
    };
    (0..bytes / 4).map(at).collect()
}

fn random_commands(setup: &Setup, seed: u64, rounds: u32) {
    let mut rng = Rng(seed);
    let mut rig = Rig::new(setup);
    let (mem, data) = (rig.mem().clone(), rig.shared.data);
    let shift = setup.pair.lba_shift;
    let mut shadow = vec![0u32; ((setup.pair.blocks << shift) / 4) as usize];
    let (mut read, mut written, mut errors) = (0, 0, 0);
    for round in 0..rounds {
        let most = u64::from(setup.pair.max_bytes >> shift).min(setup.pair.blocks);
        let blocks = 1 + if rng.below(4) == 0 { rng.below(most) } else { rng.below(8.min(most)) };
        let lba = rng.below(setup.pair.blocks - blocks + 1);
        let bytes = blocks << shift;
        let offset = 4 * rng.below(PAGE / 4);
        let pages = some_pages(&mut rng, (offset + bytes).div_ceil(PAGE), setup.pages);
        let (prp1, prp2) = pointers(&rig.shared, &pages, offset, bytes, rng.below(512) as u32);
        let buffer = words_of(&pages, offset, bytes);
        let first = ((lba << shift) / 4) as usize;
        let blocks32 = blocks as u32;
        let place = first..first + buffer.len();
        let op = rng.below(5);
        if op != 0 {
            buffer.iter().for_each(|at| mem.store(data.plus(*at), rng.next() as u32));
        }
        match op {
            0 | 1 => {
                let sqe = nvm::read(1, lba, blocks32).unwrap().with_prps(prp1, prp2);
                assert_eq!(rig.one(sqe), Status::SUCCESS);
                let got: Vec<u32> = buffer.iter().map(|at| mem.load(data.plus(*at))).collect();
                assert!(got == shadow[place], "round {round}: read of {blocks} blocks at offset {offset}");
                read += bytes;
            }
            2 => {
                let sqe = nvm::write(1, lba, blocks32).unwrap().with_prps(prp1, prp2);
                assert_eq!(rig.one(sqe), Status::SUCCESS);
                let put: Vec<u32> = buffer.iter().map(|at| mem.load(data.plus(*at))).collect();
                shadow[place].copy_from_slice(&put);
                written += bytes;
            }
            3 => {
                let same = rng.below(2) == 0;
                for (at, value) in buffer.iter().zip(&shadow[place]) {
                    mem.store(data.plus(*at), *value);
                }
                if !same {
                    let at = data.plus(buffer[rng.below(buffer.len() as u64) as usize]);
                    mem.store(at, mem.load(at) ^ 1 << rng.below(32));
                    errors += 1;
                }
                let sqe = nvm::compare(1, lba, blocks32).unwrap().with_prps(prp1, prp2);
                let expected = if same { Status::SUCCESS } else { Status::COMPARE_FAILURE.with_dnr() };
                assert_eq!(rig.one(sqe), expected, "round {round}");
                read += bytes;
            }
            _ => {
                assert_eq!(rig.one(nvm::write_zeroes(1, lba, blocks32).unwrap()), Status::SUCCESS);
                shadow[place].fill(0);
                written += bytes;
            }
        }
    }
    assert_eq!(rig.one(nvm::flush(1)), Status::SUCCESS);
    let namespace = mem.words(rig.shared.pair.namespace, setup.pair.blocks << shift);
    assert!(namespace == shadow, "the namespace is not what was written");
    let (exit, shared) = rig.stop();
    assert_eq!(exit, Exit::Stopped);
    assert_eq!(shared.broken(), []);
    let report = shared.report();
    assert_eq!((report.commands, report.completions), (u64::from(rounds) + 1, u64::from(rounds) + 1));
    assert_eq!((report.bytes_read, report.bytes_written, report.errors), (read, written, errors));
}

#[test]
fn data_is_what_the_shadow_says() {
    random_commands(&Setup::default(), 1, 400);
}

#[test]
fn few_lanes_and_large_blocks_do_the_same() {
    let pair = Pair { lba_shift: 12, blocks: 80, ..Setup::default().pair };
    for lanes in [1, 3, 8] {
        random_commands(&Setup { pair, lanes, ..Setup::default() }, u64::from(lanes), 100);
    }
}

#[test]
fn every_offset_of_a_list_is_followed() {
    // Long transfers through lists that start anywhere, including the last entries of a page, so that they chain.
    let pair = Pair { max_bytes: 2 << 20, blocks: 4096, span_count: 513, ..Setup::default().pair };
    let setup = Setup { pair, pages: 514, list_pages: 4, ..Setup::default() };
    let mut rig = Rig::new(&setup);
    let mem = rig.mem().clone();
    for i in 0..(2 << 20) / 4 {
        mem.store(rig.shared.pair.namespace.plus(4 * i), (i as u32).wrapping_mul(0x9e37_79b1));
    }
    for (first_index, bytes) in [
        (0, 2 << 20),
        (1, 2 << 20),
        (510, 2 << 20),
        (511, 2 << 20),
        (509, 3 * PAGE),
        (510, 3 * PAGE),
        (511, 3 * PAGE),
    ] {
        for offset in [0, 4, 8, 2048, 4092] {
            let pages: Vec<u64> = (0..(offset + bytes).div_ceil(PAGE)).rev().collect();
            let (prp1, prp2) = pointers(&rig.shared, &pages, offset, bytes, first_index);
            let sqe = nvm::read(1, 0, (bytes / 512) as u32).unwrap().with_prps(prp1, prp2);
            assert_eq!(rig.one(sqe), Status::SUCCESS);
            for (i, at) in words_of(&pages, offset, bytes).into_iter().enumerate() {
                let word = mem.load(rig.shared.data.plus(at));
                assert_eq!(
                    word,
                    (i as u32).wrapping_mul(0x9e37_79b1),
                    "word {i}, list at {first_index}, offset {offset}"
                );
            }
        }
    }
    assert_eq!(rig.stop().1.broken(), []);
}

/// The order in which a batch of reads is completed.
fn order_of(flags: u32, lanes: u32, delay: u64) -> Vec<u16> {
    let pair = Pair { flags, delay, ..Setup::default().pair };
    let mut rig = Rig::new(&Setup { pair, lanes, ..Setup::default() });
    let (prp1, _) = pointers(&rig.shared, &[0], 0, 512, 0);
    let mut order = Vec::new();
    for _ in 0..8 {
        rig.stage(nvm::read(1, 5, 1).unwrap().with_prps(prp1, 0));
    }
    rig.ring();
    for _ in 0..10 {
        rig.run();
        let found = rig.completions();
        assert!(found.iter().all(|cqe| cqe.status().is_ok()));
        order.extend(found.iter().map(|cqe| cqe.cid()));
        rig.advance(delay);
    }
    assert_eq!(rig.stop().1.broken(), []);
    order
}

#[test]
fn completions_come_in_the_requested_order() {
    assert_eq!(order_of(0, 32, 0), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(order_of(flag::REVERSE, 32, 0), [7, 6, 5, 4, 3, 2, 1, 0]);
    assert_eq!(order_of(flag::REVERSE, 4, 0), [3, 2, 1, 0, 7, 6, 5, 4]);
    let delayed = order_of(flag::DELAY, 32, 1000);
    let mut sorted = delayed.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_ne!(delayed, sorted);
}

#[test]
fn queues_are_renewed_and_limits_kept() {
    let limit = 1_000_000_000;
    let pair = Pair { limit, ..Setup::default().pair };
    let mut rig = Rig::new(&Setup { pair, ..Setup::default() });
    for round in 0..3 {
        for _ in 0..20 {
            assert_eq!(rig.one(nvm::flush(1)), Status::SUCCESS, "round {round}");
        }
        rig.renew();
    }
    rig.advance(limit + 1);
    let mut turns = 0;
    while rig.run() {
        turns += 1;
        assert!(turns < 100, "it does not end");
    }
    let report = rig.shared.report();
    assert_eq!(Exit::from_code(report.exit), Some(Exit::TimedOut));
    assert_eq!((report.commands, rig.shared.broken()), (60, vec![]));
}

#[test]
fn invalid_descriptors_are_refused() {
    let good = Setup::default().pair;
    let bad = [
        Pair { sq_entries: 1, ..good },
        Pair { cq_entries: 65537, ..good },
        Pair { lba_shift: 8, ..good },
        Pair { page_shift: 28, ..good },
        Pair { max_bytes: (1 << 30) + 1, ..good },
    ];
    for pair in bad {
        let rig = Rig::new(&Setup { pair, ..Setup::default() });
        while rig.run() {}
        assert_eq!(Exit::from_code(rig.shared.report().exit), Some(Exit::Refused));
    }
}
