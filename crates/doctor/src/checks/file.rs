//! Files that were asked for: the way from the file to its drive.

use crate::check::{Check, Group, Status, bytes};
use crate::checks::gpu::plural;
use crate::facts::Facts;
use crate::facts::file::{FileFacts, Trouble};

pub(super) fn checks(facts: &Facts) -> Vec<Check> {
    facts
        .files
        .iter()
        .flat_map(|file| [there(file), chain(facts, file), direct(file)])
        .flatten()
        .map(|(file, check)| check.about(file))
        .collect()
}

type MaybeCheck<'a> = Option<(&'a str, Check)>;

fn there(file: &FileFacts) -> MaybeCheck<'_> {
    let (found, fix) = match file.trouble.as_ref()? {
        Trouble::Missing => ("there is no such file".to_owned(), "Name a file that is there"),
        Trouble::Odd(what) if what == "a directory" => ("it is a directory".to_owned(), "Name a file in it"),
        Trouble::Odd(what) => (format!("it is {what}"), "Name a plain file"),
        Trouble::Refused => ("it is not for this user to read".to_owned(), "Ask as somebody who may read it"),
        Trouble::Failed(why) => (why.clone(), ""),
    };
    let why = "only of a file that can be read can it be told which ways its bytes have";
    let check = Check::new("file.there", Group::File, Status::Warn, found, why).fix_if(!fix.is_empty(), fix);
    Some((&file.path, check.by("tried: stat, open")))
}

fn chain<'a>(facts: &Facts, file: &'a FileFacts) -> MaybeCheck<'a> {
    let why = "a drive knows blocks: a direct route needs to know which are the file's";
    let check = |status, found: String| Check::new("file.chain", Group::File, status, found, why);
    let check = match file.places.as_ref()? {
        Err(error) => check(Status::Warn, error.clone())
            .fix("cpu/pinned and cpu/cached read it all the same; for direct routes copy it to ext4 or XFS right on an NVMe drive"),
        Ok(places) => {
            let fs = file.fs.as_deref().unwrap_or("its file system");
            let disks = places.disks.iter().map(|(name, pci)| match pci {
                Some(pci) => format!("{name} ({pci})"),
                None => format!("{name} (on no PCI bus)"),
            });
            let disks: Vec<_> = disks.into_iter().collect();
            let found = format!(
                "{} on {fs}, {} on {}; {}",
                bytes(places.bytes),
                plural(places.extents, "extent"),
                disks.join(", "),
                places.rung
            );
            let nvme = |pci: &Option<String>| {
                pci.as_deref().and_then(|at| facts.device(at.parse().ok()?)).is_some_and(|d| d.class.kind() == 0x0108)
            };
            if places.disks.iter().all(|(_, pci)| nvme(pci)) && !places.disks.is_empty() {
                check(Status::Pass, found)
            } else {
                check(Status::Info, found).fix("For direct routes copy it to a file system right on an NVMe drive")
            }
        }
    };
    Some((&file.path, check.by("FIEMAP, mountinfo, /sys/dev/block")))
}

fn direct(file: &FileFacts) -> MaybeCheck<'_> {
    let why = "reading past the page cache spares a copy (cpu/pinned)";
    let align = file
        .direct_align
        .map(|(memory, offset)| format!(", aligned to {memory} in memory and {offset} in the file"));
    let check = match file.direct.as_ref()? {
        Ok(()) => Check::new(
            "file.direct_io",
            Group::File,
            Status::Pass,
            format!("works{}", align.unwrap_or_default()),
            why,
        ),
        Err(error) => Check::new("file.direct_io", Group::File, Status::Warn, error.clone(), why)
            .fix("Its file system has no O_DIRECT, or it cannot be read: cpu/cached reads what can be read"),
    };
    Some((&file.path, check.by("tried: open with O_DIRECT, and a read")))
}
