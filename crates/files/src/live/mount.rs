//! The mount of a file: file systems that report physical extents, and mount options that invalidate them.

use std::fs::File;

use onehop_os::file as ioctls;
use rustix::fs::IFlags;

use super::System;
use crate::{Error, Result};

const EXT: u64 = 0xEF53;
const XFS: u64 = 0x5846_5342;

/// Other file systems by magic number, with the reason why they are refused.
const OTHERS: &[(u64, &str)] = &[
    (0x9123_683E, "btrfs: it reports logical addresses"),
    (0x2FC1_2FC1, "ZFS: it does not report places"),
    (0xF2F5_2010, "F2FS: its garbage collector moves blocks"),
    (0xCA45_1A4E, "bcachefs: it moves and encodes extents"),
    (0x794C_7630, "overlayfs: open the file of the layer below"),
    (0x0102_1994, "tmpfs: it is in memory"),
    (0x8584_58F6, "ramfs: it is in memory"),
    (0x4D44, "FAT: it does not report places while mounted; unmount it, and onehop reads it itself"),
    (0x2011_BAB0, "exFAT: it does not report places while mounted; unmount it, and onehop reads it itself"),
    (0x7366_746E, "NTFS"),
    (0x6969, "NFS: it is on another machine"),
    (0xFE53_4D42, "SMB: it is on another machine"),
    (0x00C3_6400, "Ceph: it is on other machines"),
    (0x0BD0_0BD0, "Lustre: it is on other machines"),
    (0x0102_1997, "9P: it is on another machine"),
    (0x6573_5546, "FUSE: only its daemon knows the places"),
    (0x7371_7368, "SquashFS: it is compressed"),
    (0xE0F5_E1E2, "EROFS: it may be compressed"),
];

/// Refuses file systems whose extents are not places on a device.
pub(super) fn check_magic(file: &File, path: &str) -> Result<()> {
    let found = rustix::fs::fstatfs(file)
        .map_err(|e| Error::System { what: format!("statfs of {path}"), source: e.into() })?;
    let magic = u64::from(found.f_type as u32);
    if [EXT, XFS].contains(&magic) {
        return Ok(());
    }
    let known = OTHERS.iter().find(|(m, _)| *m == magic).map(|(_, why)| (*why).to_owned());
    let why = known.unwrap_or_else(|| format!("a file system with the magic number {magic:#x}"));
    Err(Error::NotByBlocks {
        path: path.to_owned(),
        why: format!("it is on {why}; ext2, ext3, ext4 and XFS report physical places"),
    })
}

/// A row of the mount table.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mount {
    pub fs: String,
    /// Whether the file system itself is read-only, not only this mount of it.
    pub read_only: bool,
    options: Vec<String>,
}

impl Mount {
    /// Finds a mount of a device: in what matters here, all mounts of a device are equal.
    pub(super) fn find(system: &System, device: (u32, u32)) -> Result<Option<Self>> {
        let path = system.proc.join("self/mountinfo");
        let text = std::fs::read_to_string(&path)
            .map_err(|source| Error::System { what: format!("reading {}", path.display()), source })?;
        let mut found = text.lines().find_map(|line| Self::parse(line, device));
        if let Some(mount) = &mut found {
            // The mount table omits options that the superblock has as default; ext4 lists all of them here.
            let name = system.device_name(device);
            let path = system.proc.join("fs/ext4").join(&name).join("options");
            match std::fs::read_to_string(&path) {
                Ok(all) => mount.options.extend(all.lines().map(str::to_owned)),
                Err(source) if mount.is_by_ext4(system, &name) => {
                    let what = format!(
                        "reading {}, which alone shows whether the newest bytes may be in the journal (unmount the \
                         file system, and onehop reads it by itself)",
                        path.display()
                    );
                    return Err(Error::System { what, source });
                }
                Err(_) => {}
            }
        }
        Ok(found)
    }

    /// Whether the ext4 driver mounted it; it serves ext2 and ext3, too. The ext2 driver has no journal.
    fn is_by_ext4(&self, system: &System, name: &str) -> bool {
        match self.fs.as_str() {
            "ext3" | "ext4" => true,
            "ext2" => system.sysfs.join("fs/ext4").join(name).exists(),
            _ => false,
        }
    }

    /// `36 35 98:0 /root /point options … - type source super-options`
    fn parse(line: &str, device: (u32, u32)) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        if left.split(' ').nth(2)? != format!("{}:{}", device.0, device.1) {
            return None;
        }
        let mut words = right.split(' ');
        let (fs, _, options) = (words.next()?, words.next()?, words.next()?);
        let options: Vec<_> = options.split(',').map(str::to_owned).collect();
        Some(Self { fs: fs.to_owned(), read_only: options.iter().any(|o| o == "ro"), options })
    }

    /// Refuses options under which the newest bytes may be elsewhere.
    pub(super) fn check(&self, file: &File) -> std::result::Result<(), String> {
        if self.options.iter().any(|o| o == "data=journal") {
            return Err(
                "its file system is mounted with data=journal, so the newest bytes may be in the journal; \
                        mount it with data=ordered"
                    .to_owned(),
            );
        }
        if rustix::fs::ioctl_getflags(file).is_ok_and(|f| f.contains(IFlags::JOURNALING)) {
            return Err(
                "its newest bytes may be in the journal (attribute j); `chattr -j` changes that".to_owned()
            );
        }
        if self.fs == "xfs" && ioctls::is_realtime(file).unwrap_or(true) {
            return Err("it is on the realtime device of its XFS".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_list_of_mounts() {
        let row = |options: &str| {
            format!("27 1 254:0 / /with\\040blank rw,relatime shared:1 - ext4 /dev/vda {options}")
        };
        let found = Mount::parse(&row("rw,discard"), (254, 0)).unwrap();
        assert_eq!((found.fs.as_str(), found.read_only), ("ext4", false));
        assert_eq!(Mount::parse(&row("rw"), (254, 1)), None);
        assert!(Mount::parse(&row("ro"), (254, 0)).unwrap().read_only);
        let file = File::open("/dev/null").unwrap();
        assert!(found.check(&file).is_ok());
        let journal = Mount::parse(&row("rw,data=journal"), (254, 0)).unwrap();
        assert!(journal.check(&file).unwrap_err().contains("data=journal"));
        assert_eq!(Mount::parse("broken", (254, 0)), None);
    }

    #[test]
    fn ext4_lists_all_its_options_or_is_refused() {
        let root = std::env::temp_dir().join(format!("onehop-mount-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("sys/devices/vda/dev", "254:0");
        std::fs::create_dir_all(root.join("sys/dev/block")).unwrap();
        std::os::unix::fs::symlink(root.join("sys/devices/vda"), root.join("sys/dev/block/254:0")).unwrap();
        let system = System::recorded(&root, |_, _| Ok(Vec::new()));
        let found = |fs: &str| {
            write("proc/self/mountinfo", &format!("27 1 254:0 / / rw shared:1 - {fs} /dev/vda rw\n"));
            Mount::find(&system, (254, 0)).map(Option::unwrap)
        };
        for fs in ["ext4", "ext3"] {
            let error = found(fs).unwrap_err().to_string();
            assert!(error.contains("proc/fs/ext4/vda/options") && error.contains("unmount"), "{error}");
        }
        for fs in ["ext2", "xfs"] {
            assert_eq!(found(fs).unwrap().options, ["rw"]);
        }
        write("sys/fs/ext4/vda/session_write_kbytes", "0");
        assert!(found("ext2").unwrap_err().to_string().contains("proc/fs/ext4/vda/options"));
        write("proc/fs/ext4/vda/options", "rw\nbsddf\ndata=journal\n");
        for fs in ["ext2", "ext3", "ext4"] {
            let error = found(fs).unwrap().check(&File::open("/dev/null").unwrap()).unwrap_err();
            assert!(error.contains("data=journal"), "{error}");
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
