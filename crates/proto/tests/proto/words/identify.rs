//! Identify data: known offsets, builders that agree with views, and views that take any bytes.

use onehop_proto::format::{Flbas, FormatError, LbaFormat};
use onehop_proto::identify::*;
use onehop_proto::regs::Version;
use onehop_proto::sgl::Support;
use proptest::prelude::*;

#[test]
fn controller_there_and_back() {
    let mut bytes = [0; BYTES];
    let _ = build::Controller::new(&mut bytes)
        .vid(0x1b36)
        .sn("S1")
        .mn("onehop simulated drive")
        .fr("0.1")
        .ieee([1, 2, 3])
        .mdts(5)
        .cntlid(7)
        .ver(Version::V2_0)
        .rtd3e(500_000)
        .crdt2(3)
        .oacs(Oacs(0).with_doorbell_buffer(true))
        .aerl_z(3)
        .npss_z(1)
        .hmpre(0x1_0000)
        .tnvmcap(1 << 100)
        .sqes(EntrySizes(0x66))
        .cqes(EntrySizes(0x44))
        .nn(256)
        .oncs(Oncs(0).with_dataset_management(true).with_verify(true))
        .vwc(Vwc(0).with_present(true).with_flush_all(3))
        .sgls(Support(0x0008_0001))
        .subnqn("nqn.2024-01.onehop");
    assert_eq!(bytes[0..2], [0x36, 0x1b]);
    assert_eq!(&bytes[4..24], b"S1                  ");
    assert_eq!((bytes[77], bytes[78], bytes[512], bytes[513]), (5, 7, 0x66, 0x44));
    assert_eq!(bytes[80..84], [0, 0, 2, 0]);
    assert_eq!(bytes[256..258], [0, 1]);
    assert_eq!(bytes[516..520], [0, 1, 0, 0]);
    assert_eq!((bytes[520], bytes[525]), (0x84, 0x07));
    assert_eq!(bytes[536..540], [1, 0, 8, 0]);
    let mut state = [0; 32];
    let _ = build::PowerState::new(&mut state).mp(900).exlat(7).flags(2);
    build::put_power_state(&mut bytes, 1, &state);
    build::put_power_state(&mut bytes, 32, &state);
    let view = Controller::new(&bytes);
    assert_eq!((view.sn(), view.fr()), (Text::new(b"S1"), Text::new(b"0.1")));
    assert_eq!(view.mn().to_string(), "onehop simulated drive");
    assert_eq!(view.subnqn(), "nqn.2024-01.onehop");
    assert_eq!((view.mdts(), view.ver(), view.rtd3e()), (5, Version::V2_0, 500_000));
    assert_eq!((view.tnvmcap(), view.hmpre(), view.aer_limit()), (1 << 100, 0x1_0000, 4));
    assert_eq!((view.retry_delay_ms(2), view.retry_delay_ms(1), view.retry_delay_ms(9)), (300, 0, 0));
    assert!(view.sqes().allows(6) && !view.sqes().allows(7) && view.oacs().doorbell_buffer());
    let state = view.power_state(1).unwrap();
    assert_eq!((state.max_microwatts(), state.exlat(), state.non_operational()), (9_000_000, 7, true));
    assert!(view.power_state(2).is_none());
}

#[test]
fn text_is_made_safe() {
    assert_eq!(Text::new(b"  a b \0junk"), "a b");
    let text = Text::new(b"a\x1b[31m\xffb");
    assert_eq!(text.as_str(), None);
    assert_eq!(text.to_string(), "a\u{fffd}[31m\u{fffd}b");
    assert_eq!(format!("[{:>5}]", Text::new(b"ab")), "[   ab]");
    let mut bytes = [0; BYTES];
    let _ = build::Controller::new(&mut bytes).fr("longer than eight");
    assert_eq!(Controller::new(&bytes).fr(), "longer t");
    assert_eq!(bytes[72], 0);
}

#[test]
fn namespace_there_and_back() {
    let mut bytes = [0; BYTES];
    assert!(!Namespace::new(&bytes).active());
    let _ = build::Namespace::new(&mut bytes)
        .nsze(1 << 40)
        .nlbaf_z(16)
        .nulbaf(3)
        .flbas(Flbas(0x32))
        .dps(1)
        .nows_z(31)
        .nguid([7; 16])
        .eui64([8; 8])
        .lbaf(0x12, LbaFormat(0).with_lbads(12).with_ms(8))
        .lbaf(64, LbaFormat(u32::MAX));
    assert_eq!((bytes[5], bytes[25], bytes[26], bytes[29], bytes[72], bytes[82]), (1, 16, 0x32, 1, 31, 3));
    assert_eq!((bytes[104], bytes[120], bytes[128 + 0x12 * 4 + 2]), (7, 8, 12));
    assert_eq!(bytes[384], 0);
    let view = Namespace::new(&bytes);
    assert!(view.active());
    let format = view.format().unwrap();
    assert_eq!((format.lba_shift, format.metadata, format.extended, format.pi), (12, 8, true, 1));
    assert!(view.lbaf(19).is_some() && view.lbaf(20).is_none());
    let _ = build::Namespace::new(&mut bytes).flbas(Flbas(0x6f));
    assert_eq!(Namespace::new(&bytes).format(), Err(FormatError::NoSuchFormat { index: 0x3f }));
}

#[test]
fn small_records() {
    let mut bytes = [0; BYTES];
    let _ = build::NvmController::new(&mut bytes).vsl(3).dmrl(64).dmrsl(0x1234).dmsl(1 << 40);
    assert_eq!((bytes[0], bytes[3], bytes[4], bytes[13]), (3, 64, 0x34, 1));
    assert_eq!(NvmController::new(&bytes).dmsl(), 1 << 40);
    let mut bytes = [0; BYTES];
    let _ = build::NvmNamespace::new(&mut bytes).elbaf(1, ExtendedFormat(0).with_pif(2).with_sts(32));
    assert_eq!(bytes[16..18], [0x20, 0x01]);
    assert_eq!(NvmNamespace::new(&bytes).elbaf(1).unwrap().pif(), 2);
    assert!(NvmNamespace::new(&bytes).elbaf(64).is_none());
    let mut bytes = [0; BYTES];
    let _ = build::IndependentNamespace::new(&mut bytes).anagrpid(9).nstat(1);
    assert_eq!((bytes[4], bytes[14]), (9, 1));
    assert_eq!(Controller::parse(&bytes[1..]).err(), Some(TooShort { need: 4096, have: 4095 }));
}

#[test]
fn active_namespaces_there_and_back() {
    let mut bytes = [0xff; BYTES];
    put_and_compare(&mut bytes, &[]);
    put_and_compare(&mut bytes, &[1, 5, 0xffff_fffd]);
    put_and_compare(&mut bytes, &(1..=1024).collect::<Vec<_>>());
    build::put_active(&mut bytes, 1..=2000);
    assert_eq!(active_namespaces(&bytes).last(), Some(1024));
}

fn put_and_compare(bytes: &mut [u8; BYTES], nsids: &[u32]) {
    build::put_active(bytes, nsids.iter().copied());
    assert_eq!(active_namespaces(bytes).collect::<Vec<_>>(), nsids);
}

#[test]
fn descriptors_there_and_back() {
    let mut bytes = [0xff; BYTES];
    let names = [NamespaceId::Eui64([1; 8]), NamespaceId::Uuid([2; 16]), NamespaceId::Csi(0)];
    build::put_descriptors(&mut bytes, names);
    assert_eq!(bytes[..5], [1, 8, 0, 0, 1]);
    assert_eq!(descriptors(&bytes).collect::<Result<Vec<_>, _>>(), Ok(names.to_vec()));
    bytes[13] = 15;
    let mut bad = descriptors(&bytes);
    assert_eq!(bad.next(), Some(Ok(names[0])));
    assert_eq!(bad.next(), Some(Err(DescriptorError::Length { at: 12, kind: 3, len: 15 })));
    assert_eq!(bad.next(), None);
    let mut bytes = [0xff; BYTES];
    bytes[0] = 0x99;
    assert_eq!(descriptors(&bytes).next(), Some(Ok(NamespaceId::Unknown { kind: 0x99, len: 0xff })));
    assert_eq!(descriptors(&bytes).last(), Some(Err(DescriptorError::PastEnd { at: 259 * 15 })));
}

fn block() -> impl Strategy<Value = Box<[u8; BYTES]>> {
    prop::collection::vec(any::<u8>(), BYTES).prop_map(|bytes| bytes.try_into().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_can_be_viewed(bytes in block(), small in 0u8..5) {
        let mut bytes = bytes;
        bytes[263] = small;
        let c = Controller::new(&bytes);
        let _ = format!("{} {:?} {} {} {}", c.sn(), c.mn(), c.fr(), c.subnqn(), c.ver());
        let _ = (c.sgls(), c.tnvmcap(), c.megcap(), c.maxcna(), c.maxdna(), c.vwc(), c.fguid());
        prop_assert!((0..=small).all(|i| c.power_state(i).is_some()) && c.power_state(small + 1).is_none());
        let n = Namespace::new(&bytes);
        let _ = (n.format(), n.nvmcap(), n.nguid(), n.eui64(), n.nsze());
        prop_assert!((0..=255).filter(|i| n.lbaf(*i).is_some()).count() <= 64);
        let ids: Vec<_> = active_namespaces(&bytes).collect();
        prop_assert!(ids.len() <= 1024 && !ids.contains(&0));
        let names: Vec<_> = descriptors(&bytes).collect();
        prop_assert!(names.iter().rev().skip(1).all(Result::is_ok));
    }
}
