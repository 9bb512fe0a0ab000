//! Tests of what drives are used for.

use std::fs;
use std::path::PathBuf;

use super::*;
use crate::DeviceKind;

fn put(root: &Path, file: &str, text: &str) {
    let at = root.join(file);
    fs::create_dir_all(at.parent().unwrap()).unwrap();
    fs::write(at, text).unwrap();
}

fn machine(name: &str) -> PathBuf {
    let root = std::env::temp_dir().join(format!("onehop-pci-nvme-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&root);
    for (bdf, class) in
        [("0000:01:00.0", "0x010802"), ("0000:02:00.0", "0x030000"), ("0000:03:00.0", "0x010802")]
    {
        let at = format!("sys/bus/pci/devices/{bdf}");
        put(&root, &format!("{at}/class"), class);
        put(&root, &format!("{at}/vendor"), "0x144d\n");
        put(&root, &format!("{at}/device"), "0xa80a\n");
    }
    put(&root, "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/serial", "S1  \n");
    put(&root, "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/nvme0c0n1/size", "8\n");
    put(&root, "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/ng0n1/dev", "1:1\n");
    put(&root, "sys/class/block/nvme0n1/size", "2048\n");
    put(&root, "sys/class/block/nvme0n1/dev", "259:0\n");
    put(&root, "sys/class/block/nvme0n1/nvme0n1p1/partition", "1\n");
    put(&root, "sys/class/block/nvme0n1/nvme0n1p1/dev", "259:1\n");
    put(&root, "proc/swaps", "Filename Type\n/dev/sda1 partition\n");
    put(&root, "proc/self/mountinfo", "1 0 0:5 / /proc rw - proc proc rw\n");
    root
}

fn of(machine: &Path, address: &str) -> Result<Usage> {
    Usage::of(&Root::below(machine), address.parse().unwrap())
}

#[test]
fn finds_controllers_and_their_users() {
    let root = machine("users");
    put(&root, "sys/class/block/nvme0n1/nvme0n1p1/holders/dm-0/x", "");
    put(&root, "proc/self/mountinfo", "1 0 259:1 / /data rw - ext4 /dev/x rw\nnonsense\n");
    let found = Usage::all(&Root::below(&root)).unwrap();
    assert_eq!(found.len(), 2);
    let first = &found[0];
    assert_eq!((first.address.to_string().as_str(), first.serial.as_deref()), ("0000:01:00.0", Some("S1")));
    let ns = &first.namespaces[0];
    assert_eq!((first.namespaces.len(), ns.name.as_str(), ns.bytes), (1, "nvme0n1", 1 << 20));
    assert_eq!((&ns.mounted[..], &ns.held_by[..]), (&["/data".into()][..], &["dm-0".into()][..]));
    assert!(first.in_use && !ns.swap);
    assert!(!found[1].in_use && found[1].driver.is_none() && found[1].refusal().is_none());
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn every_kind_of_use_is_a_refusal_that_names_it() {
    let refused = |name: &str, file: &str, text: &str| {
        let root = machine(name);
        assert!(of(&root, "0000:01:00.0").unwrap().refusal().is_none());
        put(&root, file, text);
        let refusal = of(&root, "0000:01:00.0").unwrap().refusal();
        fs::remove_dir_all(root).unwrap();
        refusal.map(|why| why.to_string()).unwrap_or_default()
    };
    let mounts = "proc/self/mountinfo";
    assert!(refused("mount", mounts, "1 0 259:0 / /data rw - xfs x rw").contains("mounted on /data"));
    assert!(
        refused("boot", mounts, "1 0 259:1 / / rw - ext4 x rw").contains("this system runs from nvme0n1")
    );
    assert!(
        refused("source", mounts, "1 0 0:40 / /b rw - btrfs /dev/nvme0n1p1 rw").contains("mounted on /b")
    );
    assert!(refused("swap", "proc/swaps", "/dev/nvme0n1p1 partition").contains("used for swap"));
    let holder = "sys/class/block/nvme0n1/nvme0n1p1/holders/md0/x";
    assert!(refused("held", holder, "").contains("held by md0"));
    let backing = "sys/class/block/loop3/loop/backing_file";
    assert!(refused("loop", backing, "/dev/nvme0n1p1\n").contains("held by loop3"));
    assert_eq!(refused("file", backing, "/images/nvme0n1\n"), "");
}

#[test]
fn unknown_use_does_not_count_as_unused() {
    let root = machine("undetermined");
    fs::remove_file(root.join("proc/self/mountinfo")).unwrap();
    assert!(of(&root, "0000:01:00.0").unwrap_err().is_missing());
    let other = of(&machine("undetermined"), "0000:02:00.0").unwrap_err().to_string();
    assert!(other.contains("another kind of device"), "{other}");
    assert!(of(&root, "0000:04:00.0").unwrap_err().is_missing());
    fs::remove_dir_all(root).unwrap();
}

/// A record of the folder, with the answer that the running machine would have given.
fn answered(root: &Path, question: &str, answer: serde_json::Value) -> Root {
    let seen = Root::below(root).recording();
    Usage::of(&seen, "0000:01:00.0".parse().unwrap()).unwrap();
    let mut record = seen.record().unwrap();
    record.answers.insert(question.into(), answer);
    Root::recorded(record)
}

#[test]
fn a_block_device_that_cannot_be_asked_may_be_in_use() {
    let (root, address) = (machine("unasked"), "0000:01:00.0".parse().unwrap());
    let of = |answer: serde_json::Value| {
        let root = answered(&root, "claimed:nvme0n1p1", answer);
        (Usage::of(&root, address).unwrap(), DeviceKind::Drive.allows(&root, address))
    };
    assert_eq!(of(false.into()).1, Ok(()));
    let why = "/dev/nvme0n1p1: No such file or directory";
    let (usage, taken) = of(why.into());
    // It is listed, with what is unknown about it.
    assert_eq!((usage.in_use, &usage.undetermined[..]), (false, &[why.to_owned()][..]));
    let refusal = taken.unwrap_err().to_string();
    assert!(refusal.contains(why) && refusal.contains("cannot determine"), "{refusal}");
    let (usage, taken) = of(true.into());
    assert!(usage.in_use && taken.unwrap_err().to_string().contains("exclusively open"));
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn an_unreadable_folder_does_not_mean_unused() {
    let folders = [
        "sys/bus/pci/devices/0000:01:00.0/nvme",
        "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0",
        "sys/class/block/nvme0n1",
        "sys/class/block/nvme0n1/holders",
        "sys/class/block/nvme0n1/nvme0n1p1/dev",
    ];
    for folder in folders {
        let root = machine("unread");
        let at = root.join(folder);
        let _ = fs::remove_dir_all(&at);
        let _ = fs::remove_file(&at);
        // A link to itself fails to open with an error other than "not found", even for root.
        std::os::unix::fs::symlink(&at, &at).unwrap();
        let usage = of(&root, "0000:01:00.0").unwrap();
        let refused = usage.refusal().map(|why| why.to_string()).unwrap_or_default();
        assert!(!usage.in_use && refused.contains(&format!("/{folder}: ")), "{folder}: {refused}");
        fs::remove_dir_all(root).unwrap();
    }
    for list in ["proc/swaps", "sys/class/block"] {
        let root = machine("unread");
        let at = root.join(list);
        let _ = fs::remove_dir_all(&at);
        let _ = fs::remove_file(&at);
        std::os::unix::fs::symlink(&at, &at).unwrap();
        assert!(!of(&root, "0000:01:00.0").unwrap_err().is_missing(), "{list}");
        fs::remove_dir_all(root).unwrap();
    }
}

#[test]
fn who_has_the_whole_controller_is_named() {
    let users = |name: &str, files: &[(&str, &str)]| {
        let root = machine(name);
        put(&root, "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/dev", "1:3\n");
        put(&root, "sys/class/nvme/nvme0/dev", "1:3\n");
        put(&root, "proc/77/comm", "stores\n");
        fs::create_dir_all(root.join("proc/77/fd")).unwrap();
        for (file, text) in files {
            match file.contains("/fd/") {
                true => std::os::unix::fs::symlink(text, root.join(file)).unwrap(),
                false => put(&root, file, text),
            }
        }
        let usage = of(&root, "0000:01:00.0").unwrap();
        fs::remove_dir_all(root).unwrap();
        assert_eq!(usage.in_use, usage.refusal().is_some());
        usage.refusal().map(|why| why.to_string()).unwrap_or_default()
    };
    assert!(users("opened", &[("proc/77/fd/3", "/dev/null")]).contains("open in stores (process 77)"));
    assert_eq!(users("other", &[("proc/77/fd/3", "/dev/zero")]), "");
    let export = "sys/kernel/config/nvmet/subsystems/bed/passthru";
    let (path, enable) = (format!("{export}/device_path"), format!("{export}/enable"));
    let exported = |on: &str| users("exported", &[(&path, "/dev/null\n"), (&enable, on)]);
    assert!(exported("1\n").contains("the kernel's NVMe target (as bed)"));
    assert_eq!(exported("0\n"), "");
}

#[test]
fn a_device_is_found_under_any_name_in_a_container() {
    let said = |name: &str, mount: &str| {
        let root = machine(name);
        put(&root, "sys/bus/pci/devices/0000:01:00.0/nvme/nvme0/dev", "1:3\n");
        put(&root, "sys/class/nvme/nvme0/dev", "1:3\n");
        put(&root, "proc/77/comm", "guest\n");
        put(&root, "proc/77/fdinfo/3", "pos:\t0\nmnt_id:\t31\n");
        put(&root, "proc/77/mountinfo", mount);
        fs::create_dir_all(root.join("proc/77/fd")).unwrap();
        std::os::unix::fs::symlink("/dev/null", root.join("disk")).unwrap();
        std::os::unix::fs::symlink(root.join("disk"), root.join("proc/77/fd/3")).unwrap();
        let refusal = of(&root, "0000:01:00.0").unwrap().refusal();
        fs::remove_dir_all(root).unwrap();
        refusal.map(|why| why.to_string()).unwrap_or_default()
    };
    assert!(said("jail", "31 1 0:9 / / rw - tmpfs none rw\n").contains("open in guest (process 77)"));
    // Where no device can be opened, and where a server may not respond, nothing is asked.
    for mount in [
        "31 1 0:9 / / rw,nodev - tmpfs x rw\n",
        "31 1 0:9 / / rw - nfs4 x rw\n",
        "30 1 0:9 / / rw - xfs x rw\n",
    ] {
        assert_eq!(said("unasked-fd", mount), "", "{mount}");
    }
}

#[test]
fn users_that_may_be_out_of_sight_are_a_refusal() {
    let said = |name: &str, change: &dyn Fn(&Path)| {
        let root = machine(name);
        put(&root, "sys/bus/pci/devices/0000:03:00.0/driver/x", "");
        change(&root);
        let refusal = |address| of(&root, address).unwrap().refusal().map(|why| why.to_string());
        let both = (refusal("0000:01:00.0").unwrap_or_default(), refusal("0000:03:00.0"));
        fs::remove_dir_all(root).unwrap();
        both
    };
    let pids = |which: &'static str| {
        move |root: &Path| {
            fs::create_dir_all(root.join("proc/self/ns")).unwrap();
            std::os::unix::fs::symlink(which, root.join("proc/self/ns/pid")).unwrap();
        }
    };
    let unread = |root: &Path| {
        let at = root.join("proc/77/fd");
        fs::create_dir_all(root.join("proc/77")).unwrap();
        std::os::unix::fs::symlink(&at, &at).unwrap();
    };
    for (name, change, why) in [
        ("pids", &pids("pid:[4026532000]") as &dyn Fn(&Path), "PID namespace"),
        ("unread-fd", &unread, "/proc/77/fd: "),
        ("nvmet", &|root| put(root, "sys/module/nvmet/refcnt", "1"), "NVMe target is loaded"),
    ] {
        let (used, free) = said(name, change);
        assert!(used.contains("cannot determine") && used.contains(why), "{name}: {used}");
        // The kernel does not drive this one: it has no such users.
        assert_eq!(free, None, "{name}");
    }
    assert_eq!(said("first-pids", &pids("pid:[4026531836]")), (String::new(), None));
    let functions = |number: &'static str| {
        move |root: &Path| put(root, "sys/bus/pci/devices/0000:03:00.0/sriov_numvfs", number)
    };
    assert!(said("functions", &functions("2\n")).1.unwrap().contains("2 virtual functions"));
    assert_eq!(said("no-functions", &functions("0\n")).1, None);
}

/// Claiming it excludes them by its lock and by asking the kernel, so they are no refusal here.
#[test]
fn programs_that_drive_it_may_be_out_of_sight() {
    let root = machine("unseen-driver");
    let device = root.join("sys/bus/pci/devices/0000:03:00.0");
    let fds = root.join("proc/77/fd");
    fs::create_dir_all(root.join("proc/77")).unwrap();
    std::os::unix::fs::symlink(&fds, &fds).unwrap();
    let seen = || of(&root, "0000:03:00.0").unwrap();
    assert_eq!((seen().undetermined, seen().refusal()), (Vec::new(), None), "no driver, no program");
    std::os::unix::fs::symlink("../../../bus/pci/drivers/vfio-pci", device.join("driver")).unwrap();
    let bound = seen();
    assert!(!bound.in_use && bound.users().is_none());
    assert!(bound.undetermined.iter().any(|why| why.contains("/proc/77/fd")), "{:?}", bound.undetermined);
    assert_eq!(bound.refusal(), None);
    // In `onehop drive list --json`, `untold` has all of it.
    let fields = serde_json::to_value(&bound).unwrap();
    assert!(fields.get("kernel_undetermined").is_none() && fields["untold"][0].is_string(), "{fields}");
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn the_same_drive_behind_another_controller_is_found_by_its_users() {
    let root = machine("ports");
    for file in ["nvme0/model", "nvme0/serial"] {
        let text = if file.ends_with("model") { "Fast  \n" } else { "S1\n" };
        put(&root, &format!("sys/bus/pci/devices/0000:01:00.0/nvme/{file}"), text);
        let other = file.replace("nvme0", "nvme1");
        put(&root, &format!("sys/bus/pci/devices/0000:03:00.0/nvme/{other}"), text);
    }
    let other = |serial: &str, model: &str| {
        let all = Usage::all(&Root::below(&root)).unwrap();
        let own = "0000:03:00.0".parse().unwrap();
        Usage::other_path(&all, own, serial, model).map(|usage| usage.address.to_string())
    };
    assert_eq!(other("S1", "Fast"), None);
    put(&root, "proc/self/mountinfo", "1 0 259:1 / /data rw - ext4 /dev/x rw\n");
    assert_eq!(other("S1", "Fast").as_deref(), Some("0000:01:00.0"));
    assert_eq!((other("S2", "Fast"), other("S1", "Slow")), (None, None));
    fs::remove_dir_all(root).unwrap();
}

#[test]
fn a_machine_without_pci_has_none() {
    let root = machine("nothing");
    fs::remove_dir_all(root.join("sys/bus")).unwrap();
    assert_eq!(Usage::all(&Root::below(&root)).unwrap(), []);
    fs::remove_dir_all(root).unwrap();
}
