//! Live files: the kernel's places against the raw device, and against our own reader after unmounting.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use onehop_files::live::{LiveFile, Rung, System};
use onehop_files::{Error, Image, Place};
use onehop_os::DmTarget;

use crate::ext::{TOOLS, mkfs};
use crate::kernel::mount;
use crate::support::{Rng, Scratch, Tree, have, open, run, skip, try_run};

/// Data, a hole, data, preallocated space.
fn write_file(path: &Path, rng: &mut Rng) -> Vec<u8> {
    let mut bytes = rng.bytes(3_000_000);
    bytes[1_000_000..2_000_000].fill(0);
    let file = fs::File::create(path).unwrap();
    file.write_all_at(&bytes[..1_000_000], 0).unwrap();
    file.write_all_at(&bytes[2_000_000..], 2_000_000).unwrap();
    file.set_len(3_500_000).unwrap();
    bytes.resize(3_500_000, 0);
    bytes
}

/// The file's bytes, read from the device that holds them.
fn from_device(live: &LiveFile, device: &fs::File) -> Vec<u8> {
    let mut bytes = vec![0x55; live.size() as usize];
    for part in live.extents() {
        let out = &mut bytes[part.extent.offset as usize..][..part.extent.len as usize];
        match part.extent.place {
            Place::Drive(at) => device.read_exact_at(out, at).unwrap(),
            _ => out.fill(0),
        }
    }
    bytes
}

#[test]
fn a_file_of_this_machine_is_where_the_kernel_reports_it() {
    let scratch = Scratch::new();
    let path = scratch.path("live");
    let bytes = write_file(&path, &mut Rng::new());
    let live = match LiveFile::open(&path, &System::default()) {
        Ok(live) => live,
        Err(error) => return skip(&format!("files here have no places: {error}")),
    };
    assert!(live.size() == 3_500_000 && live.rung() <= Rung::Unchangeable);
    let names: Vec<_> = live.disks().iter().map(|d| format!("/dev/{}", d.name)).collect();
    let [name] = &names[..] else { return skip("the temporary files are on several drives") };
    match fs::File::open(name) {
        Err(error) => skip(&format!("{name} cannot be read raw here: {error}")),
        Ok(device) => assert!(from_device(&live, &device) == bytes, "the device holds something else"),
    }
    live.recheck().unwrap();
}

/// The number and the name of the device that holds a mounted file system.
fn device_of(at: &Path) -> (String, String) {
    let device = fs::metadata(at).unwrap().dev();
    let number = format!("{}:{}", device >> 8 & 0xFFF, device & 0xFF | device >> 12 & !0xFF);
    let dir = fs::canonicalize(Path::new("/sys/dev/block").join(&number)).unwrap();
    (number, dir.file_name().unwrap().to_str().unwrap().to_owned())
}

/// Writes a device's files in sysfs.
fn describe(dir: &Path, files: &[(&str, &str)]) {
    for (file, text) in files {
        let file = dir.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
}

/// Adds drives to such a sysfs.
fn describe_drive(sysfs: &Path, i: u32, size: u64) -> PathBuf {
    let disk = sysfs.join(format!("devices/pci0000:00/0000:0b:0{i}.0/nvme/nvme{i}/nvme{i}n1"));
    let (dev, size) = (format!("259:{i}"), (size / 512).to_string());
    let files = [("dev", &*dev), ("size", &size), ("queue/logical_block_size", "512"), ("serial", "S")];
    describe(&disk, &files);
    fs::create_dir_all(sysfs.join("dev/block")).unwrap();
    symlink(&disk, sysfs.join("dev/block").join(dev)).unwrap();
    disk
}

/// A sysfs in which the loop device that holds `at` is the only partition of a drive of the same size. It keeps its
/// name, because ext4 lists its options under that.
pub fn pretend_drive(scratch: &Scratch, at: &Path, size: u64) -> System {
    let (number, name) = device_of(at);
    let sysfs = scratch.path("sys");
    let part = describe_drive(&sysfs, 0, size).join(name);
    describe(&part, &[("partition", "1"), ("start", "0"), ("size", &(size / 512).to_string())]);
    symlink(&part, sysfs.join("dev/block").join(number)).unwrap();
    System::default().with_sysfs(sysfs)
}

#[test]
fn a_map_of_a_mounted_file_holds_after_unmounting() {
    if !have(&TOOLS) || !have(&["mount", "umount"]) {
        return;
    }
    let mut rng = Rng::new();
    let size = 64 << 20;
    for kind in ["-t ext4 -b 1024", "-t ext4 -b 4096 -O inline_data", "-t ext2 -b 2048"] {
        println!("{kind}");
        let scratch = Scratch::new();
        let image = mkfs(&scratch, kind, &Tree::new(), size);
        let Some(mounted) = mount(&scratch, &image) else { return };
        let at = mounted.path().to_owned();
        let refused = LiveFile::open(at.join("lost+found"), &System::default()).unwrap_err().to_string();
        assert!(refused.contains("not a regular file"), "{refused}");
        let bytes = write_file(&at.join("file"), &mut rng);
        fs::write(at.join("tiny"), b"tiny").unwrap();
        let refused = LiveFile::open(at.join("file"), &System::default()).unwrap_err().to_string();
        assert!(refused.contains("loop device"), "{refused}");
        let system = pretend_drive(&scratch, &at, size);
        if kind.contains("inline_data") {
            let refused = LiveFile::open(at.join("tiny"), &system).unwrap_err().to_string();
            assert!(refused.contains("DATA_INLINE"), "{refused}");
        }
        let live = LiveFile::open(at.join("file"), &system).unwrap();
        assert_eq!((live.rung(), live.fs_name()), (Rung::Rechecked, &kind[3..7]));
        let map = live.map().unwrap();
        assert_eq!(map.drive.serial, "S");
        changes_are_seen(&at, &system);
        files_with_many_extents_take_several_calls(&at, &system);
        if kind.contains("ext4") {
            journalled_data_is_refused(&at.join("file"), &system);
        }
        drop(live);
        drop(mounted);
        let volume = open(&image);
        let file = volume.lookup("file").unwrap();
        map.check_file(&volume.uuid(), &file.id).unwrap();
        assert_eq!(map.extents().unwrap(), volume.extents(&file).unwrap());
        map.verify(&Image::open(&image).unwrap()).unwrap();
        let mut again = vec![1; bytes.len()];
        assert_eq!(volume.read(&file, 0, &mut again).unwrap(), bytes.len());
        assert!(again == bytes);
    }
}

fn changes_are_seen(at: &Path, system: &System) {
    let path = at.join("other");
    fs::write(&path, vec![7; 100_000]).unwrap();
    let live = LiveFile::open(&path, system).unwrap();
    live.recheck().unwrap();
    fs::File::options().append(true).open(&path).unwrap().write_all(b"more").unwrap();
    let error = live.recheck().unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
    // Same length and same bytes: only the times differ.
    let live = LiveFile::open(&path, system).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::File::options().write(true).open(&path).unwrap().write_all_at(b"\x07", 5).unwrap();
    assert!(matches!(live.recheck(), Err(Error::Changed { .. })));
}

/// One call returns 128 extents.
fn files_with_many_extents_take_several_calls(at: &Path, system: &System) {
    let path = at.join("pieces");
    let file = fs::File::create(&path).unwrap();
    for i in 0..257 {
        file.write_all_at(&[1; 4096], i * 8192).unwrap();
        if [0, 126, 127, 128, 254, 255, 256].contains(&i) {
            file.set_len((i + 1) * 8192).unwrap();
            let live = LiveFile::open(&path, system).unwrap();
            let on_drive = live.extents().iter().filter(|e| e.extent.place != Place::Zeros).count();
            assert_eq!(on_drive as u64, i + 1);
            live.recheck().unwrap();
        }
    }
    file.set_len(0).unwrap();
    file.set_len(100_000).unwrap();
    assert_eq!(LiveFile::open(&path, system).unwrap().extents().len(), 1);
}

fn journalled_data_is_refused(path: &Path, system: &System) {
    let path = path.to_str().unwrap();
    let (good, said) = try_run("chattr", &["+j", path], "");
    if !good {
        return skip(&format!("files cannot get attribute j here: {}", said.trim()));
    }
    let error = LiveFile::open(path, system).unwrap_err().to_string();
    assert!(error.contains("attribute j"), "{error}");
    run("chattr", &["-j", path]);
}

#[test]
fn changes_below_a_file_or_at_its_mount_are_seen() {
    if !have(&TOOLS) || !have(&["mount", "umount"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = mkfs(&scratch, "-t ext4", &Tree::new(), 32 << 20);
    let Some(mounted) = mount(&scratch, &image) else { return };
    let path = mounted.path().join("file");
    fs::write(&path, vec![7; 100_000]).unwrap();
    let (number, name) = device_of(mounted.path());
    let sysfs = scratch.path("sys");
    (0..2).for_each(|i| drop(describe_drive(&sysfs, i, 1 << 30)));
    let mapped = sysfs.join("devices/virtual/block").join(name);
    describe(&mapped, &[("dm/name", "vg-models")]);
    symlink(&mapped, sysfs.join("dev/block").join(number)).unwrap();
    symlink("/proc", scratch.path("proc")).unwrap();
    let row = Arc::new(AtomicUsize::new(0));
    let which = row.clone();
    let rows = ["259:0 2048", "259:0 4096", "259:1 2048"];
    let system = System::recorded(scratch.path(""), move |_, _| {
        let args = rows[which.load(Ordering::Relaxed)].to_owned();
        Ok(vec![DmTarget { start: 0, sectors: 65536, kind: "linear".to_owned(), args }])
    });
    let live = LiveFile::open(&path, &system).unwrap();
    live.recheck().unwrap();
    for moved in [1, 2] {
        row.store(moved, Ordering::Relaxed);
        let error = live.recheck().unwrap_err();
        assert!(matches!(&error, Error::Changed { why, .. } if why.contains("moved")), "{error}");
    }
    row.store(0, Ordering::Relaxed);
    live.recheck().unwrap();
    run("mount", &["-o", "remount,ro", mounted.path().to_str().unwrap()]);
    let error = live.recheck().unwrap_err();
    assert!(matches!(&error, Error::Changed { why, .. } if why.contains("mount")), "{error}");
    assert_eq!(LiveFile::open(&path, &system).unwrap().rung(), Rung::ReadOnly);
}

#[test]
fn an_active_swap_file_is_refused() {
    if !have(&TOOLS) || !have(&["mount", "umount", "mkswap"]) {
        return;
    }
    let scratch = Scratch::new();
    let size = 32 << 20;
    let image = mkfs(&scratch, "-t ext4", &Tree::new(), size);
    let Some(mounted) = mount(&scratch, &image) else { return };
    let path = mounted.path().join("swap");
    fs::write(&path, vec![0; 1 << 20]).unwrap();
    run("mkswap", &[path.to_str().unwrap()]);
    pretend_drive(&scratch, mounted.path(), size);
    let proc = scratch.path("proc");
    fs::create_dir(&proc).unwrap();
    ["self", "fs"].iter().for_each(|name| symlink(Path::new("/proc").join(name), proc.join(name)).unwrap());
    let system = System::recorded(scratch.path(""), |_, _| Ok(Vec::new()));
    let list = |rows: &str| fs::write(proc.join("swaps"), format!("Filename Type\n{rows}")).unwrap();
    list("");
    let live = LiveFile::open(&path, &system).unwrap();
    live.recheck().unwrap();
    list(&format!("{}   file\t\t1020\t\t0\t\t-2\n", path.display()));
    for error in [live.recheck().unwrap_err(), LiveFile::open(&path, &system).unwrap_err()] {
        assert!(error.to_string().contains("active swap file"), "{error}");
    }
}

/// XFS allocates and frees space behind the end of a growing file at any time.
#[test]
fn space_behind_the_end_of_a_file_may_come_and_go() {
    if !have(&["mkfs.xfs", "xfs_spaceman", "mount", "umount"]) {
        return;
    }
    let scratch = Scratch::new();
    let size = 320 << 20;
    let image = scratch.image("xfs", size, 0);
    run("mkfs.xfs", &["-q", &image]);
    let Some(mounted) = mount(&scratch, &image) else { return };
    let system = pretend_drive(&scratch, mounted.path(), size);
    let path = mounted.path().join("file");
    let mut file = fs::File::create(&path).unwrap();
    let bytes = Rng::new().bytes(2_600_000);
    bytes.chunks(65_000).for_each(|part| file.write_all(part).unwrap());
    file.sync_all().unwrap();
    let before = fs::metadata(&path).unwrap().blocks();
    let live = LiveFile::open(&path, &system).unwrap();
    files_with_many_extents_take_several_calls(mounted.path(), &system);
    run("xfs_spaceman", &["-c", "prealloc -s", mounted.path().to_str().unwrap()]);
    if fs::metadata(&path).unwrap().blocks() == before {
        skip("XFS allocated no space behind the end here, or did not free it");
    }
    live.recheck().unwrap();
    assert_eq!((live.fs_name(), live.size()), ("xfs", 2_600_000));
    assert!(from_device(&live, &fs::File::open(&image).unwrap()) == bytes);
}

#[test]
fn a_mount_that_journals_data_by_default_is_refused() {
    if !have(&TOOLS) || !have(&["mount", "umount", "tune2fs"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = mkfs(&scratch, "-t ext4", &Tree::new(), 32 << 20);
    run("tune2fs", &["-o", "journal_data", &image]);
    let Some(mounted) = mount(&scratch, &image) else { return };
    fs::write(mounted.path().join("file"), b"data").unwrap();
    let error = LiveFile::open(mounted.path().join("file"), &System::default()).unwrap_err().to_string();
    assert!(error.contains("data=journal"), "{error}");
}

#[test]
fn paths_that_are_not_files_on_a_drive_are_refused() {
    let system = System::default();
    let error = |path: &str| LiveFile::open(path, &system).unwrap_err().to_string();
    assert!(error("/proc/self/maps").contains("magic number 0x9fa0"), "{}", error("/proc/self/maps"));
    assert!(error("/dev/null").contains("not a regular file"));
    assert!(error("/nowhere/at/all").contains("opening /nowhere"));
    if fs::write("/dev/shm/onehop-files-live", b"x").is_ok() {
        assert!(error("/dev/shm/onehop-files-live").contains("tmpfs"));
        fs::remove_file("/dev/shm/onehop-files-live").unwrap();
    }
}
