//! SGLs: for any memory contents, including loops, a walk ends within its bound and returns the transfer or less.
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use onehop_proto::BusAddr;
use onehop_proto::sgl::{Descriptor, Part, Rules, Support, Walk};

#[derive(Arbitrary, Debug)]
struct Input {
    first: Words,
    len: u64,
    support: u32,
    is_source: bool,
    max_descriptors: u16,
    /// Memory contents from address 0 on, repeated.
    memory: Vec<Words>,
}

/// A descriptor, mostly valid.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Words {
    Raw(u64, u64),
    Data(u32, u32),
    BitBucket(u32),
    Segment(u8, u8),
    Last(u8, u8),
}

impl Words {
    fn encode(self) -> (u64, u64) {
        let at = |place: u8| BusAddr(u64::from(place) * 16);
        match self {
            Self::Raw(low, high) => return (low, high),
            Self::Data(at, len) => Descriptor::Data { at: BusAddr(at.into()), len },
            Self::BitBucket(len) => Descriptor::BitBucket { len },
            Self::Segment(place, count) => Descriptor::Segment { at: at(place), len: u32::from(count) * 16 },
            Self::Last(place, count) => Descriptor::LastSegment { at: at(place), len: u32::from(count) * 16 },
        }
        .encode()
    }
}

fuzz_target!(|input: Input| {
    let most = u32::from(input.max_descriptors);
    let rules = Rules { support: Support(input.support), is_source: input.is_source, max_descriptors: most };
    let mut reads = 0u32;
    let read = |at: BusAddr| {
        assert_eq!(at.0 & 7, 0, "a descriptor is read off its alignment");
        reads += 1;
        input.memory.get((at.0 / 16) as usize % (input.memory.len() + 1)).map(|w| w.encode()).ok_or("a hole")
    };
    let (mut done, mut failed) = (0u64, false);
    for part in Walk::new(input.first.encode(), input.len, rules, read) {
        assert!(!failed, "it goes on after an error");
        match part {
            Ok(Part::Memory { len, .. } | Part::Discard { len }) => {
                assert!(len > 0);
                done += len;
                assert!(done <= input.len, "more bytes than the transfer has");
            }
            Err(error) => {
                let _ = (error.status().name(), error.to_string());
                failed = true;
            }
        }
    }
    assert!(failed || done == input.len, "{done} of {} bytes without an error", input.len);
    assert!(reads <= most);
    let (low, high) = input.first.encode();
    if let Ok(descriptor) = Descriptor::decode(low, high) {
        assert_eq!(Descriptor::from_bytes(&descriptor.to_bytes()), Ok(descriptor));
    }
});
