//! Untrusted devices and system files: config spaces, BARs, whole recorded systems.
#![no_main]

use libfuzzer_sys::fuzz_target;
use onehop_pci::{DeviceConfig, Record, Root, Tree, parse_resource};

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, rest)) = bytes.split_first() else { return };
    match kind % 3 {
        0 => {
            let mut space = vec![0; 4096];
            let len = rest.len().min(space.len());
            space[..len].copy_from_slice(&rest[..len]);
            let _ = DeviceConfig::parse(&space);
            let _ = DeviceConfig::parse(rest);
        }
        1 => {
            if let Ok(bars) = parse_resource("resource", &String::from_utf8_lossy(rest)) {
                assert!(bars.len() <= 7 && bars.iter().all(|bar| bar.size > 0 && bar.last() >= bar.start));
            }
        }
        _ => {
            let Ok(record) = Record::parse(rest) else { return };
            let tree = Tree::scan(&Root::recorded(record)).expect("a record can be listed");
            for from in tree.devices.keys() {
                for to in tree.devices.keys() {
                    let path = tree.path(*from, *to);
                    path.map(|path| tree.access_control(&path));
                }
            }
        }
    }
});
