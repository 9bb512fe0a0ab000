//! SGLs: lists of every shape are walked back to their blocks, and what the rules forbid is refused.

use std::collections::HashMap;

use onehop_proto::sgl::*;
use onehop_proto::{BusAddr, Sqe, Status};
use proptest::prelude::*;

const RULES: Rules = Rules { support: Support(0x0001_0001), is_source: false, max_descriptors: 1000 };

/// Lays out descriptors in segments of at most `per` and returns the descriptor that leads to the first.
fn lay_out(list: &[Descriptor], per: usize) -> (Descriptor, HashMap<u64, (u64, u64)>) {
    let mut memory = HashMap::new();
    let mut put = |at: u64, i: usize, d: &Descriptor| memory.insert(at + i as u64 * 16, d.encode());
    let chunks: Vec<_> = list.chunks(per).collect();
    let at = |i: usize| BusAddr(0x1_0000 * (i as u64 + 1));
    let lead = |i: usize| {
        let last = i + 1 == chunks.len();
        let len = 16 * (chunks[i].len() + !last as usize) as u32;
        if last { Descriptor::LastSegment { at: at(i), len } } else { Descriptor::Segment { at: at(i), len } }
    };
    for (i, chunk) in chunks.iter().enumerate() {
        chunk.iter().enumerate().for_each(|(j, d)| _ = put(at(i).0, j, d));
        if i + 1 < chunks.len() {
            put(at(i).0, chunk.len(), &lead(i + 1));
        }
    }
    (lead(0), memory)
}

fn parts(
    first: Descriptor,
    memory: &HashMap<u64, (u64, u64)>,
    len: u64,
    rules: Rules,
) -> Result<Vec<Part>, SglError<()>> {
    Walk::new(first.encode(), len, rules, |at: BusAddr| memory.get(&at.0).copied().ok_or(())).collect()
}

fn data(at: u64, len: u32) -> Descriptor {
    Descriptor::Data { at: BusAddr(at), len }
}

#[test]
fn descriptors_by_hand() {
    let bytes = data(0x1122_3344, 0x1000).to_bytes();
    assert_eq!(bytes, [0x44, 0x33, 0x22, 0x11, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Descriptor::LastSegment { at: BusAddr(8), len: 32 }.to_bytes()[15], 0x30);
    for kind in [0x01, 0x0f, 0x21, 0x40, 0x4f, 0x50, 0x5a, 0x60, 0xf0] {
        assert_eq!(Descriptor::decode(0, kind << 56), Err(BadKind(kind as u8)));
    }
    let sqe = data(0x5000, 512).put_in(Sqe::new(2, 1).with_cid(9));
    assert_eq!((sqe.psdt(), sqe.cid(), sqe.opcode()), (1, 9, 2));
    assert_eq!(Descriptor::of(&sqe), Ok(data(0x5000, 512)));
    assert_eq!(sqe.with_prps(1, 2).psdt(), 0);
}

#[test]
fn support_of_qemu() {
    let support = Support(0x0008_0001);
    assert!(support.usable() && support.metadata_sgl() && !support.longer() && !support.keyed());
    assert!(!Support(0).usable() && !Support(3).usable());
}

#[test]
fn one_block_is_the_whole_list() {
    let none = HashMap::new();
    let memory = Part::Memory { at: BusAddr(0x1001), len: 4096 };
    assert_eq!(parts(data(0x1001, 4096), &none, 4096, RULES), Ok(vec![memory]));
    assert_eq!(parts(data(0x1001, 4095), &none, 4096, RULES), Err(SglError::Short { missing: 1 }));
    assert_eq!(parts(data(0x1001, 4097), &none, 4096, RULES), Err(SglError::Long));
    let longer = Rules { support: RULES.support.with_longer(true), ..RULES };
    assert_eq!(parts(data(0x1001, 4097), &none, 4096, longer), Ok(vec![memory]));
    let dwords = Rules { support: RULES.support.with_kind(Support::DWORDS), ..RULES };
    let crooked = SglError::Granularity { at: BusAddr(0x1001), len: 4096 };
    assert_eq!(crooked.status(), Status::SGL_GRANULARITY_INVALID);
    assert_eq!(parts(data(0x1001, 4096), &none, 4096, dwords), Err(crooked));
}

#[test]
fn bit_buckets() {
    let (first, memory) =
        lay_out(&[data(0x1000, 512), Descriptor::BitBucket { len: 512 }, data(0x2000, 512)], 8);
    let block = |at| Part::Memory { at: BusAddr(at), len: 512 };
    let read = parts(first, &memory, 1536, RULES);
    assert_eq!(read, Ok(vec![block(0x1000), Part::Discard { len: 512 }, block(0x2000)]));
    let source = Rules { is_source: true, ..RULES };
    assert_eq!(parts(first, &memory, 1024, source), Ok(vec![block(0x1000), block(0x2000)]));
    let without = Rules { support: Support(1), ..RULES };
    assert_eq!(parts(first, &memory, 1536, without), Err(SglError::BitBucket));
}

#[test]
fn what_the_rules_forbid() {
    let none = HashMap::new();
    let segment = |at, len| Descriptor::Segment { at: BusAddr(at), len };
    let last = |at, len| Descriptor::LastSegment { at: BusAddr(at), len };
    assert_eq!(parts(last(0x1004, 16), &none, 1, RULES), Err(SglError::SegmentUnaligned(BusAddr(0x1004))));
    assert_eq!(parts(last(0x1000, 0), &none, 1, RULES), Err(SglError::SegmentLength(0)));
    assert_eq!(parts(segment(0x1000, 24), &none, 1, RULES), Err(SglError::SegmentLength(24)));
    assert_eq!(parts(last(0x1008, 16), &none, 1, RULES), Err(SglError::Read(())));
    let memory = |list: &[Descriptor]| {
        list.iter().enumerate().map(|(i, d)| (0x1000 + i as u64 * 16, d.encode())).collect::<HashMap<_, _>>()
    };
    let early = memory(&[segment(0x2000, 16), data(0, 1), last(0x2000, 16)]);
    assert_eq!(parts(segment(0x1000, 48), &early, 1, RULES), Err(SglError::SegmentPlace));
    assert_eq!(parts(last(0x1000, 48), &early, 1, RULES), Err(SglError::SegmentInLast));
    let no_next = memory(&[data(0, 1), data(1, 1)]);
    assert_eq!(parts(segment(0x1000, 32), &no_next, 2, RULES), Err(SglError::NoNextSegment));
    let keyed = HashMap::from([(0x1000, (0, 0x40 << 56))]);
    assert_eq!(parts(last(0x1000, 16), &keyed, 1, RULES), Err(SglError::Kind(BadKind(0x40))));
    assert_eq!(SglError::<()>::SegmentPlace.status(), Status::INVALID_SGL_COUNT);
    assert_eq!(SglError::<()>::Kind(BadKind(0x40)).status(), Status::SGL_TYPE_INVALID);
}

#[test]
fn a_loop_ends() {
    let around = HashMap::from([(0x1000, Descriptor::Segment { at: BusAddr(0x1000), len: 16 }.encode())]);
    let first = Descriptor::Segment { at: BusAddr(0x1000), len: 16 };
    assert_eq!(parts(first, &around, 1, RULES), Err(SglError::TooMany));
    assert_eq!(parts(first, &around, 1, Rules { max_descriptors: 0, ..RULES }), Err(SglError::TooMany));
}

proptest! {
    #[test]
    fn laid_out_then_walked(lens in prop::collection::vec(0u32..1 << 20, 1..40), per in 1usize..9) {
        let list: Vec<_> = lens.iter().enumerate().map(|(i, len)| data((i as u64) << 32, *len)).collect();
        let (first, memory) = lay_out(&list, per);
        let total = lens.iter().map(|len| *len as u64).sum();
        let want: Vec<_> = lens
            .iter()
            .enumerate()
            .filter(|(_, len)| **len != 0)
            .map(|(i, len)| Part::Memory { at: BusAddr((i as u64) << 32), len: *len as u64 })
            .collect();
        prop_assert_eq!(parts(first, &memory, total, RULES), Ok(want));
        prop_assert_eq!(parts(first, &memory, total + 1, RULES), Err(SglError::Short { missing: 1 }));
    }

    #[test]
    fn descriptors_there_and_back(low: u64, high: u64) {
        if let Ok(descriptor) = Descriptor::decode(low, high & 0xf0ff_ffff_ffff_ffff) {
            prop_assert_eq!(Descriptor::from_bytes(&descriptor.to_bytes()), Ok(descriptor));
        }
    }

    #[test]
    fn any_words_can_be_walked(words: [(u64, u32, u8); 8], len: u32, support: u32, max in 0u32..100, is_source: bool) {
        let word = |i: usize| (words[i].0 & !7, words[i].1 as u64 & !15 | (words[i].2 as u64 & 3) << 60);
        let rules = Rules { support: Support(support), is_source, max_descriptors: max };
        let walk = Walk::new(word(0), len as u64, rules, |at: BusAddr| Ok::<_, ()>(word((at.0 >> 4) as usize & 7)));
        let mut got = 0;
        for part in walk.map_while(Result::ok) {
            got += match part { Part::Memory { len, .. } | Part::Discard { len } => len };
        }
        prop_assert!(got <= len as u64);
    }
}
