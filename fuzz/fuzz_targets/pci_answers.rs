//! The kernel's answers about memory: VFIO's ranges, the process's mappings, the page map, our module's words.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use onehop_pci::{Content, Record, Root, parsers};

/// Address of the only BAR.
const BAR: (u64, u64) = (0xf800_0000, 0xfbff_ffff);

/// A machine with that BAR, as number 2 of the device 00:02.0.
static ROOT: LazyLock<Root> = LazyLock::new(|| {
    let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
    let text = format!("{none}{none}{:#018x} {:#018x} 0x000000000014220c\n", BAR.0, BAR.1);
    let mut record = Record::new();
    record.files.insert("/sys/bus/pci/devices/0000:00:02.0/resource".into(), Content::Text(text));
    Root::recorded(record)
});

fuzz_target!(|bytes: &[u8]| {
    let Some((kind, rest)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => assert!(parsers::iova_ranges(rest).iter().all(|(first, last)| first <= last)),
        1 => {
            let Some((numbers, maps)) = rest.split_at_checked(16) else { return };
            let number = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| numbers[at + i]));
            // A length is that of existing memory.
            let (start, len) = (number(0) as usize, number(8) as usize % (1 << 40) + 1);
            let maps = String::from_utf8_lossy(maps);
            if let Some(Ok((device, bar, offset, bus))) = parsers::peer_place(&ROOT, &maps, start, len) {
                assert_eq!((device.to_string().as_str(), bar), ("0000:00:02.0", 2));
                assert!(bus == BAR.0 + offset && bus + (len as u64 - 1) <= BAR.1);
            }
        }
        2 => {
            if let Ok(runs) = parsers::page_runs(rest) {
                assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), (rest.len() / 8 * 4096) as u64);
            }
        }
        _ => {
            let missing = parsers::missing(&String::from_utf8_lossy(rest));
            assert_eq!(missing.is_empty(), missing.names().is_empty());
        }
    }
});
