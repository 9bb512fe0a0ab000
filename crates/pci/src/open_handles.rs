//! Non-exclusive users of a drive's file, which are in no list of the kernel: programs that use the raw device (virtual
//! machines, databases), user-space drivers, and exports of the kernel's NVMe target.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::Root;

/// The kernel's block devices; only those of NVMe drives are checked.
const BLOCK: &str = "sys/class/block";
/// Character devices: NVMe controllers, their namespaces, and those for user-space drivers.
const CHARACTER: [&str; 5] =
    ["sys/class/nvme", "sys/class/nvme-generic", "sys/class/vfio", "sys/class/vfio-dev", "sys/class/uio"];
/// Configuration of the kernel's NVMe target.
const TARGET: &str = "sys/kernel/config/nvmet/subsystems";

/// Device number, and who has it open.
pub(crate) struct OpenHandles(Vec<(String, String)>);

impl OpenHandles {
    pub(crate) fn read(root: &Root) -> Self {
        Self(match root.folder().filter(|_| !root.is_here()) {
            Some(folder) => look(folder),
            None => root.answer("open drives", || look(Path::new("/"))).unwrap_or_default(),
        })
    }

    /// Who has the block device of this number (`259:0`), or the [`character`] device, open.
    pub(crate) fn of<'a>(&'a self, number: &'a str) -> impl Iterator<Item = String> + 'a {
        self.0.iter().filter(move |(of, _)| of == number).map(|(_, who)| who.clone())
    }
}

/// A character device's number, marked because block devices may have the same number.
pub(crate) fn character(number: &str) -> String {
    format!("character {number}")
}

fn look(folder: &Path) -> Vec<(String, String)> {
    let dev = |file: PathBuf| Some(fs::read_to_string(file.join("dev")).ok()?.trim().to_owned());
    let drives = entries(folder.join(BLOCK)).filter(|file| name(file).starts_with("nvme")).filter_map(dev);
    let others = CHARACTER.iter().flat_map(|class| entries(folder.join(class))).filter_map(dev);
    let wanted: BTreeSet<String> = drives.chain(others.map(|number| character(&number))).collect();
    let mut found: Vec<_> = entries(folder.join("proc")).flat_map(|process| opened(&process)).collect();
    found.extend(entries(folder.join(TARGET)).flat_map(|subsystem| exported(&subsystem)));
    found.retain(|(number, _)| wanted.contains(number));
    found.sort();
    found.dedup();
    found
}

fn entries(folder: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The devices that a process has open. Only paths of devices are followed: a file on an unresponsive server would
/// block.
fn opened(process: &Path) -> Vec<(String, String)> {
    let id = name(process);
    if !id.bytes().all(|b| b.is_ascii_digit()) {
        return Vec::new();
    }
    let devices = entries(process.join("fd"))
        .filter(|fd| fs::read_link(fd).is_ok_and(|name| name.to_string_lossy().contains("/dev/")));
    let numbers: Vec<_> = devices.filter_map(|fd| number(&fd)).collect();
    if numbers.is_empty() {
        return Vec::new();
    }
    let program = fs::read_to_string(process.join("comm")).unwrap_or_default();
    let who = format!("{} (process {id})", program.trim());
    numbers.into_iter().map(|number| (number, who.clone())).collect()
}

/// What a subsystem of the kernel's NVMe target exports: namespaces by their block devices, or a whole controller.
fn exported(subsystem: &Path) -> Vec<(String, String)> {
    let text = |file: PathBuf| fs::read_to_string(file).unwrap_or_default().trim().to_owned();
    let is_on = |export: &PathBuf| text(export.join("enable")) == "1";
    entries(subsystem.join("namespaces"))
        .chain([subsystem.join("passthru")])
        .filter(is_on)
        .filter_map(|export| number(Path::new(&text(export.join("device_path")))))
        .map(|number| (number, format!("the kernel's NVMe target (as {})", name(subsystem))))
        .collect()
}

/// The number of a device, from its file.
fn number(file: &Path) -> Option<String> {
    let about = fs::metadata(file).ok()?;
    let device = about.rdev();
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    match about.file_type() {
        kind if kind.is_block_device() => Some(number),
        kind if kind.is_char_device() => Some(character(&number)),
        _ => None,
    }
}
