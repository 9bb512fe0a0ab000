//! Log pages and events.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_fuzz::padded;
use onehop_proto::log::{self, AsyncEvent, Changed, FirmwareSlots, Health};

fuzz_target!(|bytes: &[u8]| {
    let used = log::error_entries(bytes).count();
    assert!(used <= bytes.len() / 64);
    for entry in log::error_entries(bytes) {
        assert!(entry.is_used());
        let _ = (entry.status().name(), entry.lba(), entry.nsid(), entry.parameter());
    }

    let health = &padded(bytes);
    let health = Health::new(health);
    let _ =
        (health.critical_warning(), health.temperature(), health.data_units_read(), health.media_errors());
    assert!((8..=u8::MAX).all(|i| health.sensor(i).is_none()));
    assert!((0..8).filter_map(|i| health.sensor(i)).all(|kelvins| kelvins != 0));

    let firmware = &padded(bytes);
    let firmware = FirmwareSlots::new(firmware);
    assert!(firmware.active() < 8 && firmware.next().is_none_or(|slot| (1..8).contains(&slot)));
    for slot in [firmware.slot1(), firmware.slot4(), firmware.slot7()] {
        let _ = (slot.to_string(), slot.as_str());
    }

    let page = padded(bytes);
    if let Changed::These(these) = log::changed_namespaces(&page) {
        let mut again = [0; 4096];
        log::build::put_changed(&mut again, these.clone());
        let Changed::These(same) = log::changed_namespaces(&again) else {
            unreachable!("at most 1024 were put")
        };
        assert!(same.eq(these));
    }
    let supported = padded(bytes);
    let _ = (0..=u8::MAX).filter(|lid| log::log_support(&supported, *lid).supported()).count();

    for event in
        bytes.chunks_exact(4).take(64).map(|b| AsyncEvent(u32::from_le_bytes([b[0], b[1], b[2], b[3]])))
    {
        assert!(!event.to_string().is_empty() && event.is(event));
        let same = AsyncEvent::new(event.kind(), event.info(), event.page());
        assert_eq!(same.name(), event.name());
    }
});
