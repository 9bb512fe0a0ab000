//! Programs that drive a device themselves, through VFIO, UIO or the module onehop: virtual machines, SPDK, DPDK. The kernel offers
//! nothing of such a device that could be mounted, and unbinding it takes it from the program.

use std::path::Path;

use rustix::fs::FileType;

use crate::asked::{ExclusiveUse, claim};
use crate::nvme::{refused, undetermined};
use crate::open_handles::{MISC, OpenHandles, character};
use crate::root::if_there;
use crate::{Address, Error, Result, Root};

/// Who has a device or its IOMMU group open, by name.
pub(crate) fn named(root: &Root, address: Address, open_handles: &OpenHandles) -> Result<Vec<String>> {
    let folder = format!("/sys/bus/pci/devices/{address}");
    let mut files: Vec<_> = group(root, address)?.into_iter().map(|(_, number)| number).collect();
    for kind in ["vfio-dev", "uio"] {
        for name in if_there(root.list(&format!("{folder}/{kind}")))? {
            files.push(if_there(root.text(&format!("{folder}/{kind}/{name}/dev")))?);
        }
    }
    files.push(if_there(root.text(&format!("/{MISC}/onehop-{address}/dev")))?);
    let mut found: Vec<_> =
        files.iter().flat_map(|number| open_handles.of(&character(number)).collect::<Vec<_>>()).collect();
    found.sort();
    found.dedup();
    Ok(found)
}

/// In words; `None` if there are none.
pub(crate) fn in_words(by: &[String]) -> Option<String> {
    (!by.is_empty()).then(|| format!("{} drives it by VFIO, UIO or the module onehop", by.join(", ")))
}

/// Why a device of any kind must not be taken from programs that drive it; `None` if there are none. Callers hold the
/// device's lock, as every onehop process does while it drives one.
pub(crate) fn refusal(root: &Root, address: Address) -> Result<Option<Error>> {
    let fix = "Stop that program, or the virtual machine that uses it";
    let named = named(root, address, &OpenHandles::read(root))?;
    if let Some(why) = in_words(&named) {
        return Ok(Some(refused(address, why, fix)));
    }
    Ok(match claimed(root, address)? {
        ExclusiveUse::Known(false) => None,
        ExclusiveUse::Known(true) => {
            let why = "an unlisted process has its IOMMU group open, and drives it or another device of the group by VFIO";
            Some(refused(address, why.into(), fix))
        }
        ExclusiveUse::Unknown(why) => Some(undetermined(address, &why)),
    })
}

/// Whether any process, in any container, has the device's IOMMU group open. The test opens the group itself, so a
/// program that opens it at the same moment is refused; callers hold the device's lock and are about to claim it.
fn claimed(root: &Root, address: Address) -> Result<ExclusiveUse> {
    let Some((name, number)) = group(root, address)? else { return Ok(ExclusiveUse::Known(false)) };
    let path = format!("/dev/vfio/{name}");
    let ask = || claim(Path::new(&path), FileType::CharacterDevice, &number);
    Ok(root.answer(&format!("claimed:vfio/{name}"), ask).unwrap_or(ExclusiveUse::Known(false)))
}

/// VFIO's file for the device's IOMMU group, and its number; `None` if it has none.
fn group(root: &Root, address: Address) -> Result<Option<(String, String)>> {
    let link = format!("/sys/bus/pci/devices/{address}/iommu_group");
    let target = if_there(root.link(&link))?;
    let Some(number) = target.rsplit('/').find(|part| !part.is_empty()) else { return Ok(None) };
    // Without an IOMMU, VFIO's unsafe mode makes a nominal group.
    for name in [number.to_owned(), format!("noiommu-{number}")] {
        let dev = if_there(root.text(&format!("/sys/class/vfio/{name}/dev")))?;
        if !dev.is_empty() {
            return Ok(Some((name, dev)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;
    use crate::Usage;

    const DEVICE: &str = "0000:01:00.0";

    fn put(root: &Path, file: &str, text: &str) {
        let at = root.join(file);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        fs::write(at, text).unwrap();
    }

    /// A drive in group 17, and a program that has /dev/null open, whose number is 1:3.
    fn machine(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("onehop-pci-programs-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        put(&root, &format!("sys/bus/pci/devices/{DEVICE}/class"), "0x010802\n");
        let group = root.join(format!("sys/bus/pci/devices/{DEVICE}/iommu_group"));
        symlink("../../../../kernel/iommu_groups/17", group).unwrap();
        put(&root, "proc/self/mountinfo", "");
        put(&root, "proc/77/comm", "qemu\n");
        fs::create_dir_all(root.join("proc/77/fd")).unwrap();
        symlink("/dev/null", root.join("proc/77/fd/9")).unwrap();
        root
    }

    #[test]
    fn who_drives_a_device_is_named() {
        let said = |name: &str, files: &[(&str, &str)]| {
            let folder = machine(name);
            for (file, number) in files {
                put(&folder, &file.replace("DEVICE", DEVICE), number);
            }
            let (root, address) = (Root::below(&folder), DEVICE.parse().unwrap());
            let (usage, refusal) = (Usage::of(&root, address).unwrap(), refusal(&root, address).unwrap());
            fs::remove_dir_all(folder).unwrap();
            assert_eq!((usage.in_use, usage.users().is_some()), (refusal.is_some(), refusal.is_some()));
            // Only the device's lock shows whether it is a program of ours.
            assert_eq!(usage.refusal(), None);
            refusal.map(|why| why.to_string()).unwrap_or_default()
        };
        let own = |kind: &str| format!("sys/bus/pci/devices/DEVICE/{kind}/dev");
        for (name, files) in [
            ("group", vec![("sys/class/vfio/17/dev", "1:3\n")]),
            ("noiommu", vec![("sys/class/vfio/noiommu-17/dev", "1:3\n")]),
            ("cdev", vec![("sys/class/vfio-dev/vfio0/dev", "1:3\n"), (&own("vfio-dev/vfio0"), "1:3\n")]),
            ("module", vec![("sys/class/misc/onehop-DEVICE/dev", "1:3\n")]),
            ("uio", vec![("sys/class/uio/uio2/dev", "1:3\n"), (&own("uio/uio2"), "1:3\n")]),
        ] {
            let why = said(name, &files);
            assert!(why.contains("qemu (process 77) drives it"), "{name}: {why}");
        }
        for (name, file) in [
            ("fellow", "sys/class/vfio/18/dev"),
            ("else", "sys/class/uio/uio3/dev"),
            ("misc", "sys/class/misc/onehop-0000:02:00.0/dev"),
        ] {
            assert_eq!(said(name, &[(file, "1:3\n")]), "");
        }
        // Neither an idle group nor a block device with its number counts.
        assert_eq!(said("free", &[("sys/class/vfio/17/dev", "240:0\n")]), "");
        assert_eq!(said("block", &[("sys/class/block/nvme0n1/dev", "1:3\n")]), "");
    }

    #[test]
    fn the_kernel_knows_users_that_no_list_shows() {
        let (folder, address) = (machine("unseen"), DEVICE.parse().unwrap());
        put(&folder, "sys/class/vfio/17/dev", "240:0\n");
        let seen = Root::below(&folder).recording();
        assert_eq!(refusal(&seen, address).unwrap(), None);
        let answered = |answer: serde_json::Value| {
            let mut record = seen.record().unwrap();
            record.answers.insert("claimed:vfio/17".into(), answer);
            refusal(&Root::recorded(record), address).unwrap().map(|why| why.to_string()).unwrap_or_default()
        };
        assert_eq!(answered(false.into()), "");
        assert!(answered(true.into()).contains("unlisted process"));
        let undetermined = answered("/dev/vfio/17: No such file or directory".into());
        assert!(
            undetermined.contains("cannot determine") && undetermined.contains("/dev/vfio/17"),
            "{undetermined}"
        );
        // Unreadable is not taken for unused.
        fs::remove_dir_all(folder.join("sys/class/vfio/17")).unwrap();
        symlink("17", folder.join("sys/class/vfio/17")).unwrap();
        assert!(refusal(&Root::below(&folder), address).is_err());
        fs::remove_dir_all(folder).unwrap();
    }
}
