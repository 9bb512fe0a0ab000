//! Named files: whether each can be read, and how it maps to its drive.

use crate::check::{Check, CheckGroup, Status, bytes};
use crate::checks::gpu::plural;
use crate::facts::Facts;
use crate::facts::file::{FileFacts, Trouble};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    facts
        .files
        .iter()
        .flat_map(|file| [readable(file), chain(facts, file), direct(file)])
        .flatten()
        .map(|(file, check)| check.about(file))
        .collect()
}

type MaybeCheck<'a> = Option<(&'a str, Check)>;

fn readable(file: &FileFacts) -> MaybeCheck<'_> {
    let (found, fix) = match file.trouble.as_ref()? {
        Trouble::Missing => ("no such file".to_owned(), "Name an existing file"),
        Trouble::NotRegular(what) if what == "a directory" => {
            ("it is a directory".to_owned(), "Name a file in it")
        }
        Trouble::NotRegular(what) => (format!("it is {what}"), "Name a regular file"),
        Trouble::Refused => ("this user may not read it".to_owned(), "Run as a user who may read it"),
        Trouble::Failed(why) => (why.clone(), ""),
    };
    let why = "routes can be determined only for a readable file";
    let check =
        Check::new("file.there", CheckGroup::File, Status::Warn, found, why).fix_if(!fix.is_empty(), fix);
    Some((&file.path, check.by("tried: stat, open")))
}

fn chain<'a>(facts: &Facts, file: &'a FileFacts) -> MaybeCheck<'a> {
    let why = "a drive knows only blocks, so a direct route needs the file's extents";
    let check = |status, found: String| Check::new("file.chain", CheckGroup::File, status, found, why);
    let check = match file.layout.as_ref()? {
        Err(error) => check(Status::Warn, error.clone())
            .fix("cpu/pinned and cpu/cached read it anyway. For direct routes, copy it to ext4 or XFS directly on an NVMe drive"),
        Ok(layout) => {
            let fs = file.fs.as_deref().unwrap_or("an unknown file system");
            let disks = layout.disks.iter().map(|(name, pci)| match pci {
                Some(pci) => format!("{name} ({pci})"),
                None => format!("{name} (not on the PCI bus)"),
            });
            let disks: Vec<_> = disks.into_iter().collect();
            let found = format!(
                "{} on {fs}, {} on {}; {}",
                bytes(layout.bytes),
                plural(layout.extents, "extent"),
                disks.join(", "),
                layout.rung
            );
            let nvme = |pci: &Option<String>| {
                pci.as_deref().and_then(|at| facts.device(at.parse().ok()?)).is_some_and(|d| d.class.kind() == 0x0108)
            };
            if layout.disks.iter().all(|(_, pci)| nvme(pci)) && !layout.disks.is_empty() {
                check(Status::Pass, found)
            } else {
                check(Status::Info, found).fix("For direct routes, copy it to a file system directly on an NVMe drive")
            }
        }
    };
    Some((&file.path, check.by("FIEMAP, mountinfo, /sys/dev/block")))
}

fn direct(file: &FileFacts) -> MaybeCheck<'_> {
    let why = "bypassing the page cache saves a copy (cpu/pinned)";
    let align = file
        .direct_align
        .map(|(memory, offset)| format!(", aligned to {memory} bytes in memory and {offset} in the file"));
    let check = match file.direct.as_ref()? {
        Ok(()) => Check::new(
            "file.direct_io",
            CheckGroup::File,
            Status::Pass,
            format!("works{}", align.unwrap_or_default()),
            why,
        ),
        Err(error) => Check::new("file.direct_io", CheckGroup::File, Status::Warn, error.clone(), why)
            .fix("Use cpu/cached: the file system has no O_DIRECT, or the file cannot be read"),
    };
    Some((&file.path, check.by("tried: open with O_DIRECT, and a read")))
}
