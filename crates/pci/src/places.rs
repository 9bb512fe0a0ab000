//! What is behind an address of this process: `/proc/self/maps`.

use crate::{Address, Root, parse_resource};

/// A mapping of this process.
struct MapsEntry {
    start: usize,
    end: usize,
    offset: u64,
    path: String,
}

/// Another device's memory, mapped into this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PeerPlace {
    /// The device.
    pub(crate) device: Address,
    /// The BAR.
    pub(crate) bar: u8,
    /// Offset in the BAR.
    pub(crate) offset: u64,
    /// Bus address.
    pub(crate) bus: u64,
}

/// The mappings of this process.
pub(crate) struct ProcessMaps(Vec<MapsEntry>);

impl ProcessMaps {
    pub(crate) fn read() -> onehop_os::Result<Self> {
        let path = "/proc/self/maps";
        let text = std::fs::read_to_string(path).map_err(|source| onehop_os::Error::System {
            call: format!("reading {path}"),
            source,
            hint: "",
        })?;
        Ok(Self::parse(&text))
    }

    pub(crate) fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(line).collect())
    }

    /// The BAR behind some memory, if it was mapped through sysfs; `None` for other memory. Fails if it is device
    /// memory of unknown bus address.
    pub(crate) fn device_memory(
        &self,
        root: &Root,
        start: usize,
        len: usize,
    ) -> Option<Result<PeerPlace, String>> {
        let place = self.0.iter().find(|place| place.start <= start && start < place.end)?;
        if !place.path.starts_with("/sys/") && !place.path.contains("vfio") {
            return None;
        }
        Some(self.in_bar(root, place, start, len))
    }

    fn in_bar(&self, root: &Root, place: &MapsEntry, start: usize, len: usize) -> Result<PeerPlace, String> {
        let path = &place.path;
        let unknown = || {
            format!("its bus address is not known: it is a mapping of {path}, not of a sysfs resource file")
        };
        let (folder, file) = path.rsplit_once('/').ok_or_else(unknown)?;
        let index = file.strip_prefix("resource").map(|n| n.trim_end_matches("_wc"));
        let index: u8 = index.and_then(|n| n.parse().ok()).ok_or_else(unknown)?;
        let device: Address =
            folder.rsplit('/').next().and_then(|name| name.parse().ok()).ok_or_else(unknown)?;
        if len > place.end - start {
            return Err(format!("it extends beyond the mapping of {path}"));
        }
        let file = format!("/sys/bus/pci/devices/{device}/resource");
        let bars =
            root.text(&file).and_then(|text| parse_resource(&file, &text)).map_err(|e| e.to_string())?;
        let bar =
            bars.iter().find(|bar| bar.index == usize::from(index) && bar.assigned).ok_or_else(unknown)?;
        // The kernel stores the bus address as the offset of such a mapping; other mappings may keep the requested
        // offset.
        let first =
            if place.offset < bar.start { bar.start.saturating_add(place.offset) } else { place.offset };
        let at = first.saturating_add((start - place.start) as u64);
        let inside = bar.start <= at && at.saturating_add(len as u64 - 1) <= bar.last();
        if inside {
            Ok(PeerPlace { device, bar: index, offset: at - bar.start, bus: at })
        } else {
            Err(format!("{path} is mapped at {at:#x}, which is not inside of its BAR ({bar})"))
        }
    }
}

/// `START-END PERMISSIONS OFFSET DEVICE INODE PATH`
fn line(line: &str) -> Option<MapsEntry> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let hex = |text: &str| usize::from_str_radix(text, 16).ok();
    let (start, end) = (hex(start)?, hex(end)?);
    let offset = u64::from_str_radix(words.nth(1)?, 16).ok()?;
    // Anonymous memory has no path.
    let path = words.nth(2).unwrap_or_default().to_owned();
    (start < end).then_some(MapsEntry { start, end, offset, path })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
400000-401000 r-xp 00000000 fe:00 12 /bin/x
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
7f0000400000-7f0000800000 rw-s 00010000 00:15 99 /sys/devices/pci0000:00/0000:00:02.0/resource2
7f0000800000-7f0000900000 rw-s f8020000 00:15 99 /sys/devices/pci0000:00/0000:00:02.0/resource2
7f0000900000-7f0000a00000 rw-s 20000000000 00:0e 3 anon_inode:[vfio-device]
nonsense
5-4 rw-p 0 0:0 0
";

    #[test]
    fn bars_and_memory_are_distinguished() {
        let folder = std::env::temp_dir().join(format!("onehop-pci-maps-{}", std::process::id()));
        let device = folder.join("sys/bus/pci/devices/0000:00:02.0");
        std::fs::create_dir_all(&device).unwrap();
        let none = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        let bar = "0x00000000f8000000 0x00000000fbffffff 0x000000000014220c\n";
        std::fs::write(device.join("resource"), format!("{none}{none}{bar}")).unwrap();
        let (root, places) = (Root::below(&folder), ProcessMaps::parse(MAPS));
        assert_eq!(places.0.len(), 5);
        assert_eq!(places.device_memory(&root, 0x7f00_0000_1000, 4096), None);
        assert_eq!(places.device_memory(&root, 0x1000, 4096), None);
        let device = "0000:00:02.0".parse().unwrap();
        let in_bar = |offset| Ok(PeerPlace { device, bar: 2, offset, bus: 0xf800_0000 + offset });
        assert_eq!(places.device_memory(&root, 0x7f00_0040_3000, 4096).unwrap(), in_bar(0x1_0000 + 0x3000));
        assert_eq!(places.device_memory(&root, 0x7f00_0080_1000, 4096).unwrap(), in_bar(0x2_1000));
        assert!(places.device_memory(&root, 0x7f00_007f_f000, 8192).unwrap().is_err());
        assert!(places.device_memory(&root, 0x7f00_0090_0000, 4096).unwrap().unwrap_err().contains("vfio"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
