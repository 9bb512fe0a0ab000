//! Formats: bytes and blocks at every edge of 64 bits.

use onehop_proto::format::*;
use proptest::prelude::*;

fn format(flbas: u8, ms: u16, lbads: u8, dps: u8) -> Result<Format, FormatError> {
    Format::new(Flbas(flbas), LbaFormat(0).with_ms(ms).with_lbads(lbads), dps)
}

#[test]
fn formats() {
    let plain = Format::plain(9).unwrap();
    assert_eq!(plain.transfer_bytes(65536), Some(32 << 20));
    assert_eq!(plain.metadata_bytes(9), Some(0));
    assert!(!plain.has_separate_metadata());
    let extended = format(0x10, 8, 12, 1).unwrap();
    assert_eq!((extended.extended, extended.pi), (true, 1));
    assert_eq!(extended.transfer_bytes(3), Some(3 * 4104));
    assert_eq!(extended.data_bytes(3), Some(3 * 4096));
    assert_eq!(extended.blocks_within(2 * 4104 + 4103), 2);
    let separate = format(0x00, 64, 12, 0x0b).unwrap();
    assert!(separate.has_separate_metadata() && separate.pi_first && separate.pi == 3);
    assert_eq!((separate.transfer_bytes(2), separate.metadata_bytes(2)), (Some(8192), Some(128)));
    assert!(!format(0x10, 0, 12, 0).unwrap().extended);
}

#[test]
fn refused() {
    for lbads in [0, 1, 8, 17, 255] {
        assert_eq!(Format::plain(lbads), Err(FormatError::BlockSize { lbads }));
    }
    assert_eq!(format(0, 7, 9, 1), Err(FormatError::Protection { kind: 1, metadata: 7 }));
    assert_eq!(format(0, 8, 9, 4), Err(FormatError::Protection { kind: 4, metadata: 8 }));
}

#[test]
fn the_upper_bits_of_flbas_count_above_16_formats() {
    assert_eq!(Flbas(0x63).index(15), 3);
    assert_eq!(Flbas(0x63).index(16), 0x33);
    assert_eq!(Flbas(0x23).index(63), 0x13);
}

#[test]
fn transfer_limits() {
    assert_eq!(max_transfer_bytes(0, 0), None);
    assert_eq!(max_transfer_bytes(7, 0), Some(512 << 10));
    assert_eq!(max_transfer_bytes(5, 1), Some(256 << 10));
    assert_eq!(max_transfer_bytes(51, 0), Some(1 << 63));
    assert_eq!(max_transfer_bytes(52, 0), None);
    assert_eq!(max_transfer_bytes(255, 255), None);
}

#[test]
fn ranges_at_the_edges() {
    let bad = |nsze, lba, blocks| Err(RangeError::OutOfRange { lba, blocks, nsze });
    assert_eq!(check_range(100, 0, 0), Err(RangeError::Empty));
    assert_eq!(check_range(100, 99, 1), Ok(()));
    assert_eq!(check_range(100, 100, 1), bad(100, 100, 1));
    assert_eq!(check_range(100, 99, 2), bad(100, 99, 2));
    assert_eq!(check_range(0, 0, 1), bad(0, 0, 1));
    assert_eq!(check_range(u64::MAX, u64::MAX - 1, 1), Ok(()));
    assert_eq!(check_range(u64::MAX, u64::MAX, 1), bad(u64::MAX, u64::MAX, 1));
    assert_eq!(check_range(u64::MAX, 2, u64::MAX), bad(u64::MAX, 2, u64::MAX));
}

/// Numbers near the powers of two, where arithmetic goes wrong.
fn edge() -> impl Strategy<Value = u64> {
    (0u32..64, -2i64..=2).prop_map(|(bit, delta)| (1u64 << bit).wrapping_add_signed(delta))
}

proptest! {
    #[test]
    fn arithmetic_is_that_of_wide_numbers(
        nsze in edge(), lba in edge(), blocks in edge(), shift in 9u8..=16, ms: u16, extended: bool,
    ) {
        let ok = blocks != 0 && lba as u128 + blocks as u128 <= nsze as u128;
        prop_assert_eq!(check_range(nsze, lba, blocks).is_ok(), ok);
        let format = format((extended as u8) << 4, ms, shift, 0).unwrap();
        let narrow = |wide: u128| u64::try_from(wide).ok();
        let per = 1u128 << shift;
        let with_metadata = per + if extended { ms as u128 } else { 0 };
        prop_assert_eq!(format.data_bytes(blocks), narrow(blocks as u128 * per));
        prop_assert_eq!(format.transfer_bytes(blocks), narrow(blocks as u128 * with_metadata));
        prop_assert_eq!(format.metadata_bytes(blocks), narrow(blocks as u128 * ms as u128));
        let fit = format.blocks_within(nsze);
        prop_assert!(fit as u128 * with_metadata <= nsze as u128);
        prop_assert!((fit as u128 + 1) * with_metadata > nsze as u128);
    }

    #[test]
    fn any_format_is_understood_or_refused(flbas: u8, lbaf: u32, dps: u8, blocks: u64) {
        if let Ok(format) = Format::new(Flbas(flbas), LbaFormat(lbaf), dps) {
            prop_assert!((9..=16).contains(&format.lba_shift) && format.pi <= 3);
            let _ = (format.transfer_bytes(blocks), format.metadata_bytes(blocks));
        }
    }
}
