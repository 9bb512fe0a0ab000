//! Tests of config spaces.

use super::*;
use crate::{Acs, PortType};

/// A config space of this length with a header.
fn space(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    put(&mut bytes, 0, &[0xde, 0x10, 0x04, 0x22, 6, 0, 0x10, 0]);
    bytes
}

fn put(bytes: &mut [u8], at: usize, what: &[u8]) {
    bytes[at..at + what.len()].copy_from_slice(what);
}

fn word(bytes: &mut [u8], at: usize, value: u32) {
    put(bytes, at, &value.to_le_bytes());
}

#[test]
fn capabilities_are_found() {
    let mut bytes = space(4096);
    bytes[0x34] = 0x60;
    put(&mut bytes, 0x60, &[0x01, 0x78, 0, 0, 0x0b, 0]);
    put(&mut bytes, 0x78, &[0x10, 0xb0, 0x02, 0x00]);
    word(&mut bytes, 0x7c, 1 << 28);
    word(&mut bytes, 0x80, 0x2810 | 1 << 5);
    word(&mut bytes, 0x84, 0x0000_0105);
    put(&mut bytes, 0x8a, &[0x01, 0x01]);
    put(&mut bytes, 0xb0, &[0x11, 0, 0x3f, 0x80, 3, 0x20, 0, 0]);
    word(&mut bytes, 0x100, 0x1401_000d);
    put(&mut bytes, 0x104, &[0x7f, 0, 0x1d, 0]);
    word(&mut bytes, 0x140, 0x2001_0015);
    word(&mut bytes, 0x144, 0x7f_f0 << 4);
    word(&mut bytes, 0x148, 1 | 1 << 5 | 14 << 8);
    word(&mut bytes, 0x200, 0x0001_000f);
    put(&mut bytes, 0x206, &[0, 0x80]);
    let config = DeviceConfig::parse(&bytes).unwrap();
    assert!(config.bus_master() && config.memory() && !config.broken_list && config.has_extended());
    assert_eq!(config.power.map(|p| (p.state, p.control_at)), Some((3, 0x64)));
    let express = config.express.unwrap();
    assert_eq!((express.kind, express.function_reset), (PortType::Endpoint, true));
    assert_eq!((express.max_payload, express.max_read_request, express.relaxed_ordering), (256, 512, true));
    assert_eq!(
        (express.link.now().unwrap(), express.link.best().unwrap()),
        ("Gen1 x16".into(), "Gen5 x16".into())
    );
    assert_eq!(config.msix.map(|m| (m.vectors, m.bar, m.offset, m.enabled)), Some((64, 3, 0x2000, true)));
    let acs = config.acs.unwrap();
    assert!(acs.redirects() && acs.control & Acs::REQUEST_REDIRECT != 0);
    assert_eq!(acs.names(), ["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"]);
    let bar = config.resizable[0];
    assert_eq!((config.resizable.len(), bar.bar, bar.size, bar.largest()), (1, 1, 16 << 30, 16 << 30));
    assert_eq!(config.ats, Some(true));
}

#[test]
fn without_root_there_is_a_header_only() {
    let config = DeviceConfig::parse(&space(64)).unwrap();
    assert!(!config.has_capabilities() && config.express.is_none() && config.acs.is_none());
}

#[test]
fn invalid_config_space_is_none() {
    assert_eq!(DeviceConfig::parse(&[0xff; 256]), None);
    assert_eq!(DeviceConfig::parse(&[]), None);
    assert_eq!(DeviceConfig::parse(&[1; 63]), None);
}

#[test]
fn lists_that_run_in_circles_end() {
    let mut bytes = space(4096);
    bytes[0x34] = 0x40;
    put(&mut bytes, 0x40, &[0x05, 0x40]);
    word(&mut bytes, 0x100, 0x1001_000d);
    assert!(DeviceConfig::parse(&bytes).unwrap().broken_list);
    let mut bytes = space(4096);
    bytes[0x34] = 0x10;
    assert!(DeviceConfig::parse(&bytes).unwrap().broken_list, "a list that leads into the header");
    let mut bytes = space(4096);
    word(&mut bytes, 0x100, 0x0401_000d);
    assert!(DeviceConfig::parse(&bytes).unwrap().broken_list, "an extended list that leads out of its half");
}

proptest::proptest! {
    #[test]
    fn no_bytes_make_it_panic(mut bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..4200), listed: bool) {
        if listed && bytes.len() > 8 {
            bytes[6] |= 0x10;
        }
        let _ = DeviceConfig::parse(&bytes);
    }
}
