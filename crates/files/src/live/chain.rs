//! From a file system's device down to drives: partitions, linear device-mapper tables, RAID 0. Devices that transform
//! bytes are refused by name.

use std::path::{Path, PathBuf};

use super::places::FsExtent;
use super::{LiveExtent, System};
use crate::{DriveId, Extent, Place};

/// Upper limit of stacked devices, above any real setup.
const MOST_LEVELS: u32 = 8;
/// Upper limit of devices below one. Rows of a table may name the same device repeatedly.
const MOST_DEVICES: u32 = 4096;
/// Upper limit of extents of one file after striping.
const MOST_EXTENTS: usize = 1 << 22;
/// The unit of sysfs, for every block size of the drive.
const SECTOR: u64 = 512;

type Resolved<T> = std::result::Result<T, String>;

/// A drive at the bottom of the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disk {
    /// The kernel's name, such as `nvme0n1`.
    pub name: String,
    /// Its identity.
    pub id: DriveId,
    /// Its PCI address, if it has one.
    pub pci: Option<String>,
}

/// What is below a device.
#[derive(Debug)]
enum Below {
    Disk(usize),
    Part {
        start: u64,
        len: u64,
        on: Box<Below>,
    },
    /// Rows of a table: first byte, length, what is below, and the first byte there.
    Linear(Vec<(u64, u64, Below, u64)>),
    /// Chunks are distributed over the members in turn.
    Stripes {
        chunk: u64,
        members: Vec<Below>,
    },
}

/// A file system's device and the drives below it.
#[derive(Debug)]
pub(super) struct Chain {
    top: Below,
    pub(super) disks: Vec<Disk>,
}

impl Chain {
    pub(super) fn resolve(system: &System, device: (u32, u32)) -> Resolved<Self> {
        let mut resolver = Resolver { system, disks: Vec::new(), seen: 0 };
        let top = resolver.device(&format!("{}:{}", device.0, device.1), 0)?;
        Ok(Self { top, disks: resolver.disks })
    }

    /// The extents of a file of `len` bytes, from those that its file system reports.
    pub(super) fn extents(&self, kept: &[FsExtent], len: u64) -> Resolved<Vec<LiveExtent>> {
        let mut out = Out { len, at: 0, list: Vec::new() };
        for part in kept.iter().filter(|k| k.offset < len) {
            out.zeros_until(part.offset);
            let bytes = part.len.min(len - part.offset);
            match part.position {
                None => out.zeros_until(part.offset + bytes),
                Some(position) => self.top.find(position, bytes, &mut out)?,
            }
        }
        out.zeros_until(len);
        Ok(out.list)
    }
}

impl Below {
    /// Maps `len` bytes of this device, starting at byte `at`, to drives.
    fn find(&self, at: u64, len: u64, out: &mut Out) -> Resolved<()> {
        let outside = || format!("{len} bytes at {at} of its device are outside of it");
        let end = at.checked_add(len).ok_or_else(outside)?;
        match self {
            Self::Disk(disk) => out.put(*disk, at, len),
            Self::Part { start, len: size, on } if end <= *size => on.find(start + at, len, out),
            Self::Part { .. } => Err(outside()),
            Self::Linear(rows) => {
                let mut at = at;
                while at < end {
                    let row = rows.iter().find(|(start, size, ..)| (*start..start + size).contains(&at));
                    let (start, size, on, there) = row.ok_or_else(outside)?;
                    let part = end.min(start + size) - at;
                    on.find(there + (at - start), part, out)?;
                    at += part;
                }
                Ok(())
            }
            Self::Stripes { chunk, members } => {
                let mut at = at;
                while at < end {
                    let (number, within) = (at / chunk, at % chunk);
                    let part = (chunk - within).min(end - at);
                    let count = members.len() as u64;
                    members[(number % count) as usize].find(number / count * chunk + within, part, out)?;
                    at += part;
                }
                Ok(())
            }
        }
    }
}

/// Collects extents in order, merging neighbours on the same drive.
struct Out {
    len: u64,
    at: u64,
    list: Vec<LiveExtent>,
}

impl Out {
    fn zeros_until(&mut self, offset: u64) {
        let offset = offset.min(self.len);
        if offset > self.at {
            let extent = Extent { offset: self.at, len: offset - self.at, place: Place::Zeros };
            match self.list.last_mut() {
                Some(last) if last.extent.place == Place::Zeros => last.extent.len += extent.len,
                _ => self.list.push(LiveExtent { disk: 0, extent }),
            }
            self.at = offset;
        }
    }

    fn put(&mut self, disk: usize, position: u64, len: u64) -> Resolved<()> {
        let offset = self.at;
        self.at += len;
        if let Some(LiveExtent { disk: same, extent: Extent { len: have, place: Place::Drive(start), .. } }) =
            self.list.last_mut()
            && *same == disk
            && *start + *have == position
        {
            *have += len;
            return Ok(());
        }
        if self.list.len() >= MOST_EXTENTS {
            return Err(format!("it has more than {MOST_EXTENTS} extents"));
        }
        let extent = Extent { offset, len, place: Place::Drive(position) };
        self.list.push(LiveExtent { disk, extent });
        Ok(())
    }
}

struct Resolver<'a> {
    system: &'a System,
    disks: Vec<Disk>,
    seen: u32,
}

impl Resolver<'_> {
    /// The device `major:minor`.
    fn device(&mut self, number: &str, level: u32) -> Resolved<Below> {
        let link = self.system.sysfs.join("dev/block").join(number);
        let dir = link.canonicalize().map_err(|e| format!("its device {number} is not in sysfs: {e}"))?;
        self.dir(&dir, number, level)
    }

    fn dir(&mut self, dir: &Path, number: &str, level: u32) -> Resolved<Below> {
        let name = name_of(dir);
        self.seen += 1;
        if level > MOST_LEVELS || self.seen > MOST_DEVICES {
            return Err(format!(
                "more than {MOST_LEVELS} devices are on top of each other, or {MOST_DEVICES} below one"
            ));
        }
        if dir.join("partition").exists() {
            let parent =
                dir.parent().ok_or_else(|| format!("{name} is a partition without a parent device"))?;
            let (start, len) = (sectors(dir, "start")?, sectors(dir, "size")?);
            let on = Box::new(self.dir(parent, &word(parent, "dev")?, level + 1)?);
            return Ok(Below::Part { start, len, on });
        }
        if dir.join("dm").exists() {
            return self.mapped(dir, number, level);
        }
        if dir.join("md").exists() {
            return self.striped(dir, level);
        }
        if dir.join("loop").exists() || name.starts_with("loop") {
            return Err(format!("{name} is a loop device: its bytes are in a file on another file system"));
        }
        if dir.join("bcache").exists() || name.starts_with("bcache") {
            return Err(format!("{name} is bcache: its bytes are on one of two drives"));
        }
        // NVMe's multipath head is virtual, too; its controllers are next to it in sysfs.
        let virtual_device = dir.components().any(|c| c.as_os_str() == "virtual");
        if virtual_device && !dir.components().any(|c| c.as_os_str() == "nvme-subsystem") {
            return Err(format!("{name} is a virtual device of the kernel, not a drive"));
        }
        self.disk(dir)
    }

    fn mapped(&mut self, dir: &Path, number: &str, level: u32) -> Resolved<Below> {
        let name = name_of(dir);
        let numbers =
            parse_number(number).ok_or_else(|| format!("{name} has an invalid device number, {number}"))?;
        let table = self.system.dm_table(numbers).map_err(|e| format!("{name} is a mapped device: {e}"))?;
        let mut rows = Vec::new();
        for target in table {
            let words: Vec<_> = target.args.split(' ').collect();
            let ([on, start], "linear") = (&words[..], target.kind.as_str()) else {
                let what = word(dir, "dm/name").unwrap_or_default();
                return Err(format!(
                    "{name} ({what}) has a target of kind {}: only linear targets leave the bytes unchanged",
                    target.kind
                ));
            };
            let there = start.parse::<u64>().ok().and_then(|s| s.checked_mul(SECTOR));
            let (first, len) = (target.start.checked_mul(SECTOR), target.sectors.checked_mul(SECTOR));
            let fits = |(start, len): (u64, u64)| start.checked_add(len).is_some();
            let row = first
                .zip(len)
                .zip(there)
                .filter(|((first, len), there)| fits((*first, *len)) && fits((*there, *len)));
            let Some(((first, len), there)) = row else {
                return Err(format!("{name} has an invalid row: {target:?}"));
            };
            rows.push((first, len, self.device(on, level + 1)?, there));
        }
        Ok(Below::Linear(rows))
    }

    fn striped(&mut self, dir: &Path, level: u32) -> Resolved<Below> {
        let name = name_of(dir);
        let kind = word(dir, "md/level")?;
        if kind != "raid0" {
            return Err(format!("{name} is {kind}: only raid0 stores each byte in one place"));
        }
        let parse = |text: String| text.parse::<u64>().map_err(|e| format!("{name}: {text}: {e}"));
        let chunk = parse(word(dir, "md/chunk_size")?)?;
        let count = parse(word(dir, "md/raid_disks")?)?;
        if chunk == 0 || !chunk.is_multiple_of(SECTOR) || !(1..=256).contains(&count) {
            return Err(format!("{name} has {count} members and chunks of {chunk} bytes"));
        }
        let (mut members, mut sizes) = (Vec::new(), Vec::new());
        for i in 0..count {
            let member = dir.join(format!("md/rd{i}"));
            let block =
                member.join("block").canonicalize().map_err(|e| format!("{name} has no member {i}: {e}"))?;
            let start = sectors(&member, "offset")?;
            let on = Box::new(self.dir(&block, &word(&block, "dev")?, level + 1)?);
            // In KiB. An incomplete last chunk of a member is unused.
            sizes.push(parse(word(&member, "size")?)?.saturating_mul(1024) / chunk);
            members.push(Below::Part { start, len: u64::MAX - start, on });
        }
        if sizes.windows(2).any(|w| w[0] != w[1]) {
            return Err(format!("{name} has members of different sizes, so its striping is not uniform"));
        }
        Ok(Below::Stripes { chunk, members })
    }

    fn disk(&mut self, dir: &Path) -> Resolved<Below> {
        let name = name_of(dir);
        let or_empty = |path: &str| word(dir, path).unwrap_or_default();
        let serial = word(dir, "device/serial").or_else(|_| word(dir, "serial")).unwrap_or_default();
        let wwid = word(dir, "wwid").or_else(|_| word(dir, "device/wwid")).unwrap_or_default();
        let lba = or_empty("queue/logical_block_size")
            .parse()
            .map_err(|e| format!("the block size of {name}: {e}"))?;
        let id = DriveId {
            serial,
            nsid: or_empty("nsid").parse().unwrap_or(0),
            wwid,
            lba_bytes: lba,
            bytes: sectors(dir, "size")?,
        };
        let disk = Disk { pci: pci_address(dir), name, id };
        if let Some(known) = self.disks.iter().position(|d| d.name == disk.name) {
            return Ok(Below::Disk(known));
        }
        self.disks.push(disk);
        Ok(Below::Disk(self.disks.len() - 1))
    }
}

fn name_of(dir: &Path) -> String {
    dir.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}

fn parse_number(number: &str) -> Option<(u32, u32)> {
    let (major, minor) = number.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn word(dir: &Path, file: &str) -> Resolved<String> {
    let path: PathBuf = dir.join(file);
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(text.trim().to_owned())
}

/// A number of sectors, in bytes.
fn sectors(dir: &Path, file: &str) -> Resolved<u64> {
    let text = word(dir, file)?;
    let bytes = text.parse::<u64>().ok().and_then(|s| s.checked_mul(SECTOR));
    bytes.ok_or_else(|| format!("{}: {text:?} is not a number of sectors", dir.join(file).display()))
}

/// The last PCI function on a disk's sysfs path; for a multipath head, that of its first live controller.
fn pci_address(dir: &Path) -> Option<String> {
    let is_address = |name: &str| {
        let b = name.as_bytes();
        b.len() == 12 && b[4] == b':' && b[7] == b':' && b[10] == b'.'
    };
    let names = dir.components().rev().map(|c| c.as_os_str().to_string_lossy().into_owned());
    if let Some(last) = names.into_iter().find(|n| is_address(n)) {
        return Some(last);
    }
    let subsystem = dir.parent()?;
    let mut controllers: Vec<_> = std::fs::read_dir(subsystem).ok()?.flatten().map(|e| e.path()).collect();
    controllers.sort();
    let live = |c: &&PathBuf| {
        word(c, "state").is_ok_and(|s| s == "live") && word(c, "transport").is_ok_and(|t| t == "pcie")
    };
    controllers.iter().find(live).and_then(|c| word(c, "address").ok()).filter(|a| is_address(a))
}

#[cfg(test)]
#[path = "chain_tests.rs"]
mod tests;
