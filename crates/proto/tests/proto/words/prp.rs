//! PRPs: what is built must be read back segment by segment, and what the rules forbid must be refused.

use std::collections::HashMap;

use onehop_proto::prp::*;
use onehop_proto::{BusAddr, Status};
use proptest::prelude::*;

const LISTS: u64 = 0xffff_0000_0000_0000;

/// A page address that reveals nothing about its neighbours.
fn scattered(shift: u32, offset: u64) -> impl Fn(u64) -> BusAddr {
    move |i| {
        let page = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20 << shift;
        BusAddr(if i == 0 { page + offset } else { page })
    }
}

fn list_page(shift: u32) -> impl Fn(u32) -> BusAddr {
    move |i| BusAddr(LISTS + ((i as u64 * 3) << shift))
}

struct Built {
    prps: (u64, u64),
    memory: HashMap<u64, u64>,
}

fn build_scattered(shift: u32, offset: u64, len: u64, first_index: u32) -> Built {
    let mut memory = HashMap::new();
    let at = list_page(shift);
    let prps = build(shift, scattered(shift, offset), len, first_index, &at, |page, index, entry| {
        assert!((index as u64) < entries_per_page(shift));
        assert_eq!(memory.insert(at(page).0 + index as u64 * 8, entry), None);
    });
    Built { prps: prps.unwrap(), memory }
}

fn read(memory: &HashMap<u64, u64>) -> impl FnMut(BusAddr) -> Result<u64, &'static str> {
    |at| memory.get(&at.0).copied().ok_or("nothing there")
}

fn check(shift: u32, offset: u64, len: u64, first_index: u32) {
    let built = build_scattered(shift, offset, len, first_index);
    let page = page_bytes(shift);
    let need = layout(shift, offset, len, first_index);
    assert_eq!(need.pages, (offset + len).div_ceil(page));
    let chain = need.list_pages.saturating_sub(1);
    assert_eq!(built.memory.len() as u64, need.list_entries + chain, "{need:?}");
    let mut left = len;
    let addr = scattered(shift, offset);
    let mut count = 0;
    for (i, segment) in walk(shift, built.prps.0, built.prps.1, len, read(&built.memory)).enumerate() {
        let want = (page - if i == 0 { offset } else { 0 }).min(left);
        assert_eq!(segment, Ok((addr(i as u64), want)));
        left -= want;
        count += 1;
    }
    assert_eq!((left, count), (0, need.pages));
}

#[test]
fn page_counts() {
    assert_eq!(pages(12, 0, 0), 0);
    assert_eq!(pages(12, 0, 4096), 1);
    assert_eq!(pages(12, 4, 4096), 2);
    assert_eq!(pages(12, 4092, 4), 1);
    assert_eq!(pages(12, 4092, 5), 2);
    assert_eq!(pages(12, 0, u64::MAX), 1 << 52);
    assert_eq!(pages(12, 4095, u64::MAX), (1 << 52) + 1);
    assert_eq!(pages(0, 0, 4097), 2);
    assert_eq!(layout(12, 0, 8192, 0), Layout { pages: 2, list_entries: 0, list_pages: 0 });
    assert_eq!(layout(12, 0, 513 * 4096, 0), Layout { pages: 513, list_entries: 512, list_pages: 1 });
    assert_eq!(layout(12, 0, 514 * 4096, 0), Layout { pages: 514, list_entries: 513, list_pages: 2 });
    assert_eq!(layout(12, 0, 1024 * 4096, 0), Layout { pages: 1024, list_entries: 1023, list_pages: 2 });
    assert_eq!(layout(12, 0, 1025 * 4096, 0), Layout { pages: 1025, list_entries: 1024, list_pages: 3 });
    assert_eq!(layout(12, 0, 3 * 4096, 511), Layout { pages: 3, list_entries: 2, list_pages: 2 });
}

#[test]
fn by_hand() {
    let one = build(12, contiguous(BusAddr(0x5004), 12), 4092, 0, |_| BusAddr(0), |_, _, _| panic!());
    assert_eq!(one, Ok((0x5004, 0)));
    let two = build(12, contiguous(BusAddr(0x5004), 12), 4096, 0, |_| BusAddr(0), |_, _, _| panic!());
    assert_eq!(two, Ok((0x5004, 0x6000)));
    let mut entries = Vec::new();
    let three = build(
        12,
        contiguous(BusAddr(0x5004), 12),
        8192,
        510,
        |page| BusAddr(0x10_0000 + page as u64 * 0x1000),
        |page, index, entry| entries.push((page, index, entry)),
    );
    assert_eq!(three, Ok((0x5004, 0x10_0ff0)));
    assert_eq!(entries, [(0, 510, 0x6000), (0, 511, 0x7000)]);
}

#[test]
fn the_last_slot_holds_data_unless_more_follow() {
    let full = build_scattered(12, 0, 513 * 4096, 0);
    assert_eq!(full.memory[&(LISTS + 511 * 8)], scattered(12, 0)(512).0);
    let more = build_scattered(12, 0, 514 * 4096, 0);
    assert_eq!(more.memory[&(LISTS + 511 * 8)], list_page(12)(1).0);
    assert_eq!(more.memory[&list_page(12)(1).0], scattered(12, 0)(512).0);
}

#[test]
fn every_length_around_every_boundary() {
    for shift in 12..=16 {
        let (page, per) = (page_bytes(shift), entries_per_page(shift));
        for data_pages in [1, 2, 3, per - 1, per, per + 1, per + 2, 2 * per - 1, 2 * per, 2 * per + 1] {
            for offset in [0, 4, page - 4] {
                for (tail, first_index) in [(0, 0), (page - 4, 0), (4, per as u32 - 1), (0, 1)] {
                    let len = (data_pages * page).saturating_sub(offset + tail);
                    if len > 0 {
                        check(shift, offset, len, first_index);
                    }
                }
            }
        }
    }
}

#[test]
fn a_buffer_that_cannot_be_described() {
    let none = |_: u32, _: u32, _: u64| {};
    let list = |_: u32| BusAddr(0x1000);
    let at = |addr: u64| contiguous(BusAddr(addr), 12);
    assert_eq!(build(12, at(0), 0, 0, list, none), Err(PrpError::Empty));
    assert_eq!(build(11, at(0), 1, 0, list, none), Err(PrpError::PageShift(11)));
    assert_eq!(build(28, at(0), 1, 0, list, none), Err(PrpError::PageShift(28)));
    assert_eq!(build(12, at(2), 4, 0, list, none), Err(PrpError::Unaligned(BusAddr(2))));
    let crooked = |i: u64| BusAddr(if i == 2 { 0x2004 } else { i << 12 });
    assert_eq!(build(12, crooked, 8192, 0, list, none), Ok((0, 0x1000)));
    assert_eq!(build(12, crooked, 12288, 0, list, none), Err(PrpError::PageOffset { index: 2 }));
    let short = |_: u32| BusAddr(0x1008);
    assert_eq!(build(12, at(0), 12288, 0, short, none), Err(PrpError::ListOffset { list_page: 0 }));
    assert_eq!(build(12, at(0), 12288, 512, list, none), Err(PrpError::FirstIndex(512)));
    let bad_chain = |page: u32| BusAddr(if page == 0 { 0x1000 } else { 0x2008 });
    assert_eq!(build(12, at(0), 514 << 12, 0, bad_chain, none), Err(PrpError::ListOffset { list_page: 1 }));
    assert_eq!(build(12, at(0), u64::MAX, 0, list, none), Err(PrpError::TooLong));
}

/// The first error of a walk.
fn first_error(built: &Built, len: u64) -> Option<WalkError<&'static str>> {
    walk(12, built.prps.0, built.prps.1, len, read(&built.memory)).find_map(Result::err)
}

#[test]
fn what_the_rules_forbid() {
    let len = 600 * 4096;
    let change = |f: fn(&mut Built)| {
        let mut built = build_scattered(12, 0, len, 0);
        f(&mut built);
        first_error(&built, len)
    };
    assert_eq!(change(|_| {}), None);
    assert!(matches!(change(|b| b.prps.0 += 2), Some(WalkError::Prp1Unaligned(_))));
    assert_eq!(change(|b| b.prps.1 += 4), Some(WalkError::ListUnaligned(LISTS + 4)));
    assert!(matches!(
        change(|b| *b.memory.get_mut(&(LISTS + 8)).unwrap() += 4),
        Some(WalkError::EntryOffset { at: BusAddr(at), .. }) if at == LISTS + 8
    ));
    assert!(matches!(
        change(|b| *b.memory.get_mut(&(LISTS + 511 * 8)).unwrap() += 8),
        Some(WalkError::ChainOffset { at: BusAddr(at), .. }) if at == LISTS + 511 * 8
    ));
    assert_eq!(change(|b| b.memory.clear()), Some(WalkError::Read("nothing there")));
    let two = walk(12, 0x1000, 0x2004, 8192, read(&HashMap::new())).find_map(Result::err);
    assert_eq!(two, Some(WalkError::Prp2Offset(0x2004)));
    assert_eq!(two.unwrap().status(), Status::INVALID_PRP_OFFSET);
    assert_eq!(walk(9, 0, 0, 1, read(&HashMap::new())).next(), Some(Err(WalkError::PageShift(9))));
    assert_eq!(walk(12, 1, 1, 0, read(&HashMap::new())).next(), None);
}

#[test]
fn a_walk_ends_after_an_error() {
    let mut walk = walk(12, 2, 0, 1 << 30, |_| Ok::<_, ()>(0));
    assert!(walk.next().unwrap().is_err());
    assert_eq!((walk.next(), walk.left()), (None, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn built_then_walked(
        shift in 12u32..=16, near in 0u64..4, delta in 0u64..5, offset: u64, tail: u64, first in any::<u32>(), mid: bool,
    ) {
        let (page, per) = (page_bytes(shift), entries_per_page(shift));
        let first_index = if mid { first % per as u32 } else { 0 };
        let pages = (near * (per - 1) + delta).max(1);
        let (offset, tail) = ((offset % page) & !3, tail % page);
        let len = (pages * page).saturating_sub(offset + tail).max(1);
        check(shift, offset, len, first_index);
    }

    #[test]
    fn any_words_can_be_walked(prp1: u64, prp2: u64, len in 0u64..1 << 22, words: [u64; 8], shift in 0u32..40) {
        let mut reads = 0u64;
        let got: u64 = walk(shift, prp1, prp2, len, |at| {
            reads += 1;
            if words[7] == at.0 { Err(()) } else { Ok(words[(at.0 >> 3) as usize & 7] & !0xfff) }
        })
        .filter_map(Result::ok)
        .map(|(_, len)| len)
        .sum();
        prop_assert!(got <= len && reads <= 2 * pages(12, 0, len) + 2);
    }

    #[test]
    fn any_layout_can_be_asked_for(shift: u32, offset: u64, len: u64, first: u32) {
        let need = layout(shift, offset, len, first);
        prop_assert!(need.list_entries < need.pages.max(1));
        prop_assert!(need.list_pages <= need.list_entries.max(1));
    }
}

/// Prebuilt lists for `pages` pages of scattered memory, as a controller would read them.
fn stand(shift: u32, pages: u64) -> HashMap<u64, u64> {
    let (prebuilt, page) = (PrebuiltPrpLists::new(shift), scattered(shift, 0));
    let mut memory = HashMap::new();
    for list in 0..prebuilt.list_pages(pages) {
        for (index, of) in prebuilt.entries(list).enumerate().filter(|(_, of)| *of < pages) {
            memory.insert(list_page(shift)(list as u32).0 + index as u64 * 8, page(of).0);
        }
    }
    memory
}

fn check_standing(memory: &HashMap<u64, u64>, shift: u32, offset: u64, len: u64) {
    let (page_len, page) = (page_bytes(shift), scattered(shift, 0));
    let list = list_page(shift);
    let prps = PrebuiltPrpLists::new(shift).point(offset, len, &page, |i| list(i as u32));
    let mut at = offset;
    for segment in walk(shift, prps.0, prps.1, len, read(memory)) {
        let (addr, bytes) = segment.unwrap();
        assert_eq!(addr.0, page(at / page_len).0 + at % page_len, "{len} bytes from {offset} on");
        at += bytes;
    }
    assert_eq!(at, offset + len);
}

#[test]
fn standing_lists_serve_every_transfer() {
    for shift in [12, 16] {
        let (page, step) = (page_bytes(shift), entries_per_page(shift) / 2);
        let pages = 3 * step + 5;
        let memory = stand(shift, pages);
        let most = PrebuiltPrpLists::new(shift).most_bytes();
        assert_eq!(most, step * page);
        for first in [0, 1, step - 2, step - 1, step, step + 1, 2 * step - 1, 2 * step, pages - 3] {
            for within in [0, 4, page - 4] {
                for len in [4, page - 4, page, page + 4, 2 * page, 2 * page + 4, most - page, most - 4, most]
                {
                    let offset = first * page + within;
                    if offset + len <= pages * page {
                        check_standing(&memory, shift, offset, len);
                    }
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn standing_lists_serve_any_transfer(offset in 0u64..(700 << 10), len in 1u64..(256 << 10)) {
        check_standing(&stand(12, 1024), 12, offset * 4, len * 4);
    }
}
