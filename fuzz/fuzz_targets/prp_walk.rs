//! PRP lists: for any memory contents, a walk ends, covers each byte once and obeys the rules for pages; and lists that
//! we build are walked back.
#![no_main]

use std::collections::HashMap;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_proto::BusAddr;
use onehop_proto::prp::{self, WalkError};

#[derive(Arbitrary, Debug)]
struct Input {
    page_shift: u8,
    prp1: u64,
    prp2: u64,
    len: u64,
    first_index: u16,
    /// Memory contents from address 0 on, repeated.
    memory: Vec<u64>,
}

/// Limit of segments, which drivers bound by MDTS.
const MOST: usize = 4096;

fuzz_target!(|input: Input| {
    walk(&input);
    build(&input);
});

fn walk(input: &Input) {
    let shift = u32::from(input.page_shift);
    let page = prp::page_bytes(shift);
    let read = |at: BusAddr| {
        assert_eq!(at.0 & 7, 0, "an entry is read off its alignment");
        input.memory.get((at.0 / 8) as usize % (input.memory.len() + 1)).copied().ok_or("a hole")
    };
    let mut walk = prp::walk(shift, input.prp1, input.prp2, input.len, read);
    let mut done = 0;
    for (i, segment) in walk.by_ref().take(MOST).enumerate() {
        match segment {
            Ok((at, len)) => {
                assert!(len > 0 && (at.0 & (page - 1)) + len <= page, "segment {i}: {at} + {len}");
                assert!(if i == 0 { at.0 == input.prp1 } else { at.0 & (page - 1) == 0 });
                done += len;
            }
            Err(error) => {
                let _ = (error.status().name(), error.to_string());
                assert!(!matches!(error, WalkError::PageShift(_)) || !(12..=27).contains(&shift));
                return;
            }
        }
    }
    assert_eq!(done + walk.left(), input.len);
    assert!(walk.left() == 0 || walk.next().is_some());
}

fn build(input: &Input) {
    let shift = 12 + u32::from(input.page_shift % 4);
    let page = prp::page_bytes(shift);
    let len = input.len % (256 * page) + 1;
    let first_index = u32::from(input.first_index);
    let seed = input.memory.first().copied().unwrap_or(7);
    let base = |index: u64, salt: u64| {
        (index + 1).wrapping_mul(seed | 1).wrapping_add(salt << 50) & !(page - 1) & ((1 << 60) - 1)
    };
    let page_addr = |index| BusAddr(base(index, 1) + if index == 0 { input.prp1 & (page - 1) } else { 0 });
    let mut lists = HashMap::new();
    // Pages of the list must be distinct, so they are numbered instead of scattered.
    let list_page = |index: u32| (1 << 61) + u64::from(index) * page;
    let put = |list: u32, slot: u32, entry: u64| {
        let old = lists.insert(list_page(list) + u64::from(slot) * 8, entry);
        assert_eq!(old, None, "an entry is written twice");
    };
    let built = prp::build(shift, page_addr, len, first_index, |i| BusAddr(list_page(i)), put);
    let need = prp::layout(shift, page_addr(0).0 & (page - 1), len, first_index);
    let Ok((prp1, prp2)) = built else {
        let entries = prp::entries_per_page(shift);
        assert!(input.prp1 & 3 != 0 || u64::from(first_index) >= entries && need.list_pages > 0, "{built:?}");
        return;
    };
    assert_eq!(lists.len() as u64, need.list_entries + need.list_pages.saturating_sub(1));
    let segments: Result<Vec<_>, _> =
        prp::walk(shift, prp1, prp2, len, |at: BusAddr| lists.get(&at.0).copied().ok_or(at)).collect();
    let segments = segments.expect("what was built can be walked");
    assert_eq!(segments.len() as u64, need.pages);
    assert_eq!(segments.iter().map(|(_, len)| len).sum::<u64>(), len);
    assert!(segments.iter().enumerate().all(|(i, (at, _))| *at == page_addr(i as u64)));
}
