//! Non-exclusive users of a drive's file, which are in no list of the kernel: programs that use the raw device (virtual
//! machines, databases), user-space drivers, and exports of the kernel's NVMe target.

use std::cell::LazyCell;
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::Root;

/// The kernel's block devices; only those of NVMe drives are checked.
const BLOCK: &str = "sys/class/block";
/// Character devices: NVMe controllers, their namespaces, and those for user-space drivers.
const CHARACTER: [&str; 5] =
    ["sys/class/nvme", "sys/class/nvme-generic", "sys/class/vfio", "sys/class/vfio-dev", "sys/class/uio"];
/// The module onehop has a device file of this class for each of its devices.
pub(crate) const MISC: &str = "sys/class/misc";
/// Configuration of the kernel's NVMe target.
const TARGET: &str = "sys/kernel/config/nvmet/subsystems";
/// Configuration of the kernel's SCSI target, whose exports of files may be exports of devices.
const SCSI_TARGET: &str = "sys/kernel/config/target/core";
/// "No such process": it ended meanwhile.
const SRCH: i32 = rustix::io::Errno::SRCH.raw_os_error();
/// Reasons that are kept.
const MAX_UNSEEN: usize = 4;
/// The PID namespace that has all processes.
const FIRST_PIDS: &str = "pid:[4026531836]";
/// File systems whose files may not be asked about: their server may not respond.
const REMOTE: [&str; 22] = [
    "nfs",
    "cifs",
    "smb",
    "9p",
    "fuse",
    "ceph",
    "afs",
    "lustre",
    "glusterfs",
    "autofs",
    "virtiofs",
    "orangefs",
    "coda",
    "ocfs2",
    "gfs2",
    "gpfs",
    "beegfs",
    "wekafs",
    "panfs",
    "pvfs2",
    "vboxsf",
    "vmhgfs",
];

/// Who has which device open.
#[derive(Default)]
pub(crate) struct OpenHandles {
    /// Device number, and who has it open.
    found: Vec<(String, String)>,
    /// Why there may be others, if so.
    pub unseen: Vec<String>,
}

impl OpenHandles {
    pub(crate) fn read(root: &Root) -> Self {
        if let Some(folder) = root.folder().filter(|_| !root.is_here()) {
            return look(folder);
        }
        let here = LazyCell::new(|| look(Path::new("/")));
        let found = root.answer("open drives", || here.found.clone()).unwrap_or_default();
        let unseen = root.answer("unseen users", || here.unseen.clone()).unwrap_or_default();
        Self { found, unseen }
    }

    /// Who has the block device of this number (`259:0`), or the [`character`] device, open.
    pub(crate) fn of<'a>(&'a self, number: &'a str) -> impl Iterator<Item = String> + 'a {
        self.found.iter().filter(move |(of, _)| of == number).map(|(_, who)| who.clone())
    }
}

/// A character device's number, marked because block devices may have the same number.
pub(crate) fn character(number: &str) -> String {
    format!("character {number}")
}

fn look(folder: &Path) -> OpenHandles {
    let dev = |file: PathBuf| Some(fs::read_to_string(file.join("dev")).ok()?.trim().to_owned());
    let drives = entries(folder.join(BLOCK)).filter(|file| name(file).starts_with("nvme")).filter_map(dev);
    let ours = entries(folder.join(MISC)).filter(|file| name(file).starts_with("onehop-"));
    let others = CHARACTER.iter().flat_map(|class| entries(folder.join(class)));
    let others = others.chain(ours).filter_map(dev);
    let wanted: BTreeSet<String> = drives.chain(others.map(|number| character(&number))).collect();
    let mut all = OpenHandles::default();
    for process in entries(folder.join("proc")) {
        all.add_process(&process);
    }
    all.found.extend(entries(folder.join(TARGET)).flat_map(|subsystem| exported(&subsystem)));
    let files = entries(folder.join(SCSI_TARGET)).filter(|group| name(group).starts_with("fileio_"));
    all.found.extend(files.flat_map(entries).filter_map(|export| exported_file(&export)));
    all.found.retain(|(number, _)| wanted.contains(number));
    all.found.sort();
    all.found.dedup();
    all.add_unseen(folder);
    all
}

fn entries(folder: impl AsRef<Path>) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

fn name(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

impl OpenHandles {
    /// Adds the devices that a process has open.
    fn add_process(&mut self, process: &Path) {
        let id = name(process);
        if !id.bytes().all(|b| b.is_ascii_digit()) {
            return;
        }
        let folder = process.join("fd");
        let files = match fs::read_dir(&folder) {
            Ok(files) => files.filter_map(|entry| Some(entry.ok()?.path())),
            // A process that has ended has nothing open.
            Err(error) if error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(SRCH) => return,
            Err(error) => return self.unseen.push(format!("{}: {error}", folder.display())),
        };
        let mounts = LazyCell::new(|| local_mounts(process));
        let mut denied = None;
        let is_local = |file: &PathBuf| {
            let target = match fs::read_link(file) {
                Ok(target) => target,
                Err(error) => {
                    let is_denied = error.kind() == ErrorKind::PermissionDenied;
                    is_denied.then(|| denied.get_or_insert(format!("{}: {error}", file.display())));
                    return false;
                }
            };
            let target = target.to_string_lossy();
            // Any other name leads to a device too: in a container, it may have any name.
            target.contains("/dev/")
                || target.starts_with('/') && mount_of(process, file).is_some_and(|id| mounts.contains(&id))
        };
        let numbers: Vec<_> = files.filter(is_local).filter_map(|file| number(&file)).collect();
        self.unseen.extend(denied);
        if numbers.is_empty() {
            return;
        }
        let program = fs::read_to_string(process.join("comm")).unwrap_or_default();
        let who = format!("{} (process {id})", program.trim());
        self.found.extend(numbers.into_iter().map(|number| (number, who.clone())));
    }

    /// Adds where users may be that nothing here shows.
    fn add_unseen(&mut self, folder: &Path) {
        let own = fs::read_link(folder.join("proc/self/ns/pid"));
        if own.is_ok_and(|own| own != Path::new(FIRST_PIDS)) {
            self.unseen.push("this PID namespace does not show the processes outside of it".into());
        }
        let is_there = |path: &str| folder.join(path).exists();
        if is_there("sys/module/nvmet") && !is_there("sys/kernel/config/nvmet") {
            self.unseen.push(
                "the kernel's NVMe target is loaded, and its exports are not in /sys/kernel/config".into(),
            );
        }
        self.unseen.truncate(MAX_UNSEEN);
    }
}

/// The mounts of a process whose files can be asked about without waiting for a server, and may be devices.
fn local_mounts(process: &Path) -> BTreeSet<String> {
    let mounts = fs::read(process.join("mountinfo")).unwrap_or_default();
    let local = |line: &str| {
        let (front, back) = line.split_once(" - ")?;
        let (kind, mut front) = (back.split(' ').next()?, front.split(' '));
        let (id, options) = (front.next()?, front.nth(4)?);
        let is_remote = REMOTE.iter().any(|remote| kind.starts_with(remote));
        (!is_remote && options.split(',').all(|option| option != "nodev")).then(|| id.to_owned())
    };
    String::from_utf8_lossy(&mounts).lines().filter_map(local).collect()
}

/// The mount that a process's open file is on.
fn mount_of(process: &Path, file: &Path) -> Option<String> {
    let about = fs::read_to_string(process.join("fdinfo").join(name(file))).ok()?;
    about.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(|id| id.trim().to_owned())
}

/// A device that the kernel's SCSI target exports as a file, which claims nothing.
fn exported_file(export: &Path) -> Option<(String, String)> {
    let path = fs::read_to_string(export.join("udev_path")).ok()?;
    let path = path.trim();
    let found = path.starts_with("/dev/").then(|| number(Path::new(path)))??;
    Some((found, format!("the kernel's SCSI target (as {})", name(export))))
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
