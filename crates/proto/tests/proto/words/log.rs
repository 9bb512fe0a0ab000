//! Log pages and events: known offsets, and views that take any bytes.

use onehop_proto::Status;
use onehop_proto::log::*;
use proptest::prelude::*;

#[test]
fn events() {
    let event = AsyncEvent(0x0001_0100);
    assert_eq!(event, AsyncEvent::INVALID_DOORBELL_VALUE);
    assert_eq!((event.kind(), event.info(), event.page()), (event_type::ERROR, 1, id::ERROR));
    assert_eq!(event.to_string(), "Invalid Doorbell Write Value (0/01h), log page 01h");
    assert_eq!(AsyncEvent::NAMESPACE_CHANGED.0, 0x0004_0002);
    assert_eq!(AsyncEvent(0x0002_0101).name(), "Temperature Threshold");
    assert_eq!(AsyncEvent(7).name(), "Vendor Specific Event");
    assert_eq!(AsyncEvent(5).name(), "Unknown Event");
}

#[test]
fn error_log() {
    let mut log = [0; 192];
    let (entries, _) = log.as_chunks_mut();
    let status = Status::LBA_OUT_OF_RANGE.with_dnr();
    let _ =
        build::ErrorEntry::new(&mut entries[1]).error_count(9).sqid(1).cid(0x55).status(status).lba(1 << 33);
    assert_eq!(log[64 + 12..64 + 14], (status.0 << 1).to_le_bytes());
    let used: Vec<_> = error_entries(&log).collect();
    assert_eq!(used.len(), 1);
    assert_eq!((used[0].error_count(), used[0].cid(), used[0].lba()), (9, 0x55, 1 << 33));
    assert_eq!(used[0].status(), status);
    assert_eq!(error_entries(&log[..100]).count(), 0);
}

#[test]
fn health() {
    let mut bytes = [0; 512];
    let _ = build::Health::new(&mut bytes)
        .critical_warning(CriticalWarning(0).with_temperature(true))
        .temperature(0x0140)
        .percentage_used(3)
        .data_units_read(u128::MAX - 1)
        .critical_minutes(5)
        .sensor(7, 300)
        .sensor(8, 1);
    assert_eq!((bytes[0], bytes[1], bytes[2], bytes[5], bytes[196]), (2, 0x40, 1, 3, 5));
    assert_eq!(bytes[214..217], [44, 1, 0]);
    let view = Health::parse(&bytes).unwrap();
    assert_eq!((view.temperature(), view.data_units_read()), (320, u128::MAX - 1));
    assert_eq!((view.sensor(0), view.sensor(7), view.sensor(8)), (None, Some(300), None));
    assert!(Health::parse(&bytes[..511]).is_err());
}

#[test]
fn firmware_slots() {
    let mut bytes = [0; 512];
    let _ = build::FirmwareSlots::new(&mut bytes).afi(0x21).slot1("1.0").slot2("2.0");
    let view = FirmwareSlots::new(&bytes);
    assert_eq!((view.active(), view.next()), (1, Some(2)));
    assert_eq!((view.slot2(), view.slot7()), (Text::new(b"2.0"), Text::new(b"")));
}

#[test]
fn changed_namespaces_there_and_back() {
    let mut bytes = [0; 4096];
    build::put_changed(&mut bytes, [3, 9]);
    let Changed::These(these) = changed_namespaces(&bytes) else { panic!() };
    assert_eq!(these.collect::<Vec<_>>(), [3, 9]);
    build::put_changed(&mut bytes, 1..=1024);
    assert!(matches!(changed_namespaces(&bytes), Changed::These(these) if these.clone().count() == 1024));
    build::put_changed(&mut bytes, 1..=1025);
    assert!(matches!(changed_namespaces(&bytes), Changed::TooMany));
    assert_eq!(bytes[4..], [0; 4092]);
}

#[test]
fn supported_log_pages() {
    let mut bytes = [0; SUPPORTED_BYTES];
    build::put_log_support(&mut bytes, id::HEALTH, LogSupport(0).with_supported(true));
    assert_eq!(bytes[8], 1);
    assert!(log_support(&bytes, id::HEALTH).supported() && !log_support(&bytes, 255).supported());
}

proptest! {
    #[test]
    fn any_bytes_can_be_viewed(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        if let Ok(health) = Health::parse(&bytes) {
            prop_assert!((8..=255).all(|i| health.sensor(i).is_none()));
        }
        let _ = FirmwareSlots::parse(&bytes).map(|slots| format!("{:?} {:?}", slots.slot1(), slots.next()));
        for entry in error_entries(&bytes) {
            let _ = format!("{} {}", entry.status(), entry.parameter());
        }
    }

    #[test]
    fn any_event_has_a_name(raw: u32) {
        prop_assert!(!AsyncEvent(raw).name().is_empty());
    }
}
