//! Who has a drive's file open without having it to himself, of which no list of the kernel tells: programs that read and
//! write it as it is (virtual machines, databases), and exports of the kernel's own NVMe target.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::Root;

/// The kernel's block devices, and the character devices that are beside NVMe namespaces.
const FILES: [&str; 2] = ["/sys/class/block", "/sys/class/nvme-generic"];
/// Where the kernel's NVMe target is set up.
const TARGET: &str = "/sys/kernel/config/nvmet/subsystems";

/// Device number, and who has it open.
pub(crate) struct Openers(Vec<(String, String)>);

impl Openers {
    pub(crate) fn read(root: &Root) -> Self {
        Self(root.answer("open drives", look).unwrap_or_default())
    }

    /// Who has the device of this number (`259:0`) open.
    pub(crate) fn of<'a>(&'a self, number: &'a str) -> impl Iterator<Item = String> + 'a {
        self.0.iter().filter(move |(of, _)| of == number).map(|(_, who)| who.clone())
    }
}

fn look() -> Vec<(String, String)> {
    let drives: BTreeSet<String> = FILES
        .iter()
        .flat_map(entries)
        .filter(|file| name(file).starts_with("nvme") || name(file).starts_with("ng"))
        .filter_map(|file| Some(fs::read_to_string(file.join("dev")).ok()?.trim().to_owned()))
        .collect();
    let mut found: Vec<_> = entries("/proc").flat_map(|process| opened(&process)).collect();
    found.extend(entries(TARGET).flat_map(|subsystem| exported(&subsystem)));
    found.retain(|(number, _)| drives.contains(number));
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

/// The devices that a process has open. Only what is called a device is looked at: a file on a server that does not answer
/// would keep us waiting.
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

/// What a subsystem of the kernel's NVMe target exports.
fn exported(subsystem: &Path) -> Vec<(String, String)> {
    let text = |file: PathBuf| fs::read_to_string(file).unwrap_or_default().trim().to_owned();
    entries(subsystem.join("namespaces"))
        .filter(|namespace| text(namespace.join("enable")) == "1")
        .filter_map(|namespace| number(Path::new(&text(namespace.join("device_path")))))
        .map(|number| (number, format!("the kernel's NVMe target (as {})", name(subsystem))))
        .collect()
}

/// The number of a device by its file.
fn number(file: &Path) -> Option<String> {
    let about = fs::metadata(file).ok()?;
    let is_device = about.file_type().is_block_device() || about.file_type().is_char_device();
    let device = about.rdev();
    is_device.then(|| format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device)))
}
