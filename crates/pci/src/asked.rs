//! Detects exclusive use of a device file by opening it: the kernel also knows of other containers, and of users in no
//! list.

use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, fstat};
use serde::{Deserialize, Serialize};

/// The kernel's answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(crate) enum ExclusiveUse {
    /// Whether it is in exclusive use.
    Known(bool),
    /// Why that cannot be determined.
    Unknown(String),
}

/// Tests the device of this type and number (`259:0`) through its file. A container's `/dev` may lack the file, or have
/// another device under its name.
pub(crate) fn claim(path: &Path, kind: FileType, number: &str) -> ExclusiveUse {
    let unknown = |why: String| ExclusiveUse::Unknown(format!("{}: {why}", path.display()));
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let about = match rustix::fs::open(path, flags, Mode::empty()).and_then(fstat) {
        Err(rustix::io::Errno::BUSY) => return ExclusiveUse::Known(true),
        Err(error) => return unknown(std::io::Error::from(error).to_string()),
        Ok(about) => about,
    };
    let found = format!("{}:{}", rustix::fs::major(about.st_rdev), rustix::fs::minor(about.st_rdev));
    if FileType::from_raw_mode(about.st_mode) == kind && found == number {
        return ExclusiveUse::Known(false);
    }
    unknown(format!("this file is not the device {number:?}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_kernel_is_asked_by_the_right_file_only() {
        let folder = std::env::temp_dir().join(format!("onehop-pci-asked-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let unknown =
            |name: &str, number: &str| match claim(&folder.join(name), FileType::BlockDevice, number) {
                ExclusiveUse::Unknown(why) => why,
                answer => panic!("{answer:?}"),
            };
        assert!(unknown("nvme0n1", "259:0").contains("No such file"));
        fs::write(folder.join("nvme0n1"), "").unwrap();
        assert!(unknown("nvme0n1", "259:0").contains("not the device"));
        assert!(unknown("nvme0n1/part", "259:1").contains("Not a directory"));
        std::os::unix::fs::symlink("/dev/null", folder.join("null")).unwrap();
        assert!(unknown("null", "1:3").contains("not the device"));
        let null = |number: &str| claim(Path::new("/dev/null"), FileType::CharacterDevice, number);
        assert_eq!(null("1:3"), ExclusiveUse::Known(false));
        assert!(null("1:5") != ExclusiveUse::Known(false) && null("") != ExclusiveUse::Known(false));
        fs::remove_dir_all(folder).unwrap();
    }
}
