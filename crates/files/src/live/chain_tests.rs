//! Device chains in synthetic sysfs trees that follow the kernel's documentation and drivers.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use onehop_os::DmTarget;

use super::*;

/// A sysfs tree, removed on drop.
struct FakeSysfs(PathBuf);

impl FakeSysfs {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("onehop-chain-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let tree = Self(std::env::temp_dir().join(name));
        fs::create_dir_all(tree.0.join("sys/dev/block")).unwrap();
        tree
    }

    /// Adds a device at `path` below `devices`, with its files.
    fn device(&self, number: &str, path: &str, files: &[(&str, &str)]) -> PathBuf {
        let dir = self.0.join("sys/devices").join(path);
        fs::create_dir_all(&dir).unwrap();
        for (name, text) in files.iter().chain(&[("dev", number)]) {
            let file = dir.join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{text}\n")).unwrap();
        }
        symlink(&dir, self.0.join("sys/dev/block").join(number)).unwrap();
        dir
    }

    fn nvme(&self, i: u32) -> PathBuf {
        let path = format!("pci0000:00/0000:00:01.0/0000:0{i}:00.0/nvme/nvme{i}/nvme{i}n1");
        let serial = format!("SN{i}   ");
        let files = [
            ("size", "2097152"),
            ("nsid", "1"),
            ("wwid", "eui.0025"),
            ("queue/logical_block_size", "4096"),
            ("device/serial", &serial),
        ];
        self.device(&format!("259:{i}"), &path, &files)
    }

    fn part(&self, i: u32, start: u64, len: u64) {
        let path = format!("pci0000:00/0000:00:01.0/0000:0{i}:00.0/nvme/nvme{i}/nvme{i}n1/nvme{i}n1p2");
        let (start, len) = (start.to_string(), len.to_string());
        self.device(&format!("259:1{i}"), &path, &[("partition", "2"), ("start", &start), ("size", &len)]);
    }

    fn raid(&self, level: &str, chunk: &str, sizes: &[&str]) {
        let count = sizes.len().to_string();
        let files = [("md/level", level), ("md/chunk_size", chunk), ("md/raid_disks", &count)];
        let dir = self.device("9:0", "virtual/block/md0", &files);
        for (i, size) in sizes.iter().enumerate() {
            let member = dir.join(format!("md/dev-nvme{i}n1p2"));
            fs::create_dir_all(&member).unwrap();
            fs::write(member.join("offset"), "2048\n").unwrap();
            fs::write(member.join("size"), size).unwrap();
            symlink(
                fs::canonicalize(self.0.join(format!("sys/dev/block/259:1{i}"))).unwrap(),
                member.join("block"),
            )
            .unwrap();
            symlink(&member, dir.join(format!("md/rd{i}"))).unwrap();
        }
    }

    fn resolve(&self, number: (u32, u32), rows: &[(u64, u64, &str, &str)]) -> Resolved<Chain> {
        let row = |&(start, sectors, kind, args): &(u64, u64, &str, &str)| DmTarget {
            start,
            sectors,
            kind: kind.to_owned(),
            args: args.to_owned(),
        };
        let rows: Vec<_> = rows.iter().map(row).collect();
        Chain::resolve(&System::recorded(&self.0, move |_, _| Ok(rows.clone())), number)
    }
}

impl Drop for FakeSysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn at(offset: u64, len: u64, position: u64) -> FsExtent {
    FsExtent { offset, len, position: Some(position) }
}

/// Drive, offset in the file, length, and byte of the drive; `None` for zeros.
fn short(list: &[LiveExtent]) -> Vec<(usize, u64, u64, Option<u64>)> {
    let place = |e: &LiveExtent| if let Place::Drive(at) = e.extent.place { Some(at) } else { None };
    list.iter().map(|e| (e.disk, e.extent.offset, e.extent.len, place(e))).collect()
}

#[test]
fn a_partition_of_an_nvme_drive() {
    let tree = FakeSysfs::new();
    tree.nvme(1);
    tree.part(1, 2048, 4096);
    let chain = tree.resolve((259, 11), &[]).unwrap();
    let id =
        DriveId { serial: "SN1".into(), nsid: 1, wwid: "eui.0025".into(), lba_bytes: 4096, bytes: 1 << 30 };
    let disk = Disk { name: "nvme1n1".into(), id, pci: Some("0000:01:00.0".into()) };
    assert_eq!(chain.disks, [disk]);
    let kept = [at(0, 4096, 8192), at(4096, 4096, 12288), at(16384, 4096, 0), at(40960, 4096, 0)];
    let unwritten = FsExtent { offset: 20480, len: 4096, position: None };
    let got = chain.extents(&[&kept[..3], &[unwritten], &kept[3..]].concat(), 30_000).unwrap();
    let start = 2048 * 512;
    let want = [
        (0, 0, 8192, Some(start + 8192)),
        (0, 8192, 8192, None),
        (0, 16384, 4096, Some(start)),
        (0, 20480, 30_000 - 20480, None),
    ];
    assert_eq!(short(&got), want);
    let error = chain.extents(&[at(0, 4096, 4095 * 512)], 4096).unwrap_err();
    assert!(error.contains("outside of it"), "{error}");
}

#[test]
fn linear_rows_on_two_drives() {
    let tree = FakeSysfs::new();
    tree.nvme(1);
    tree.nvme(2);
    tree.part(2, 4096, 10_000);
    tree.device("253:0", "virtual/block/dm-0", &[("dm/name", "vg-models"), ("size", "3000")]);
    let chain = tree
        .resolve((253, 0), &[(0, 1000, "linear", "259:1 384"), (1000, 2000, "linear", "259:12 0")])
        .unwrap();
    assert_eq!(chain.disks.len(), 2);
    let got = chain.extents(&[at(0, 1024, 999 * 512)], 1024).unwrap();
    assert_eq!(short(&got), [(0, 0, 512, Some((384 + 999) * 512)), (1, 512, 512, Some(4096 * 512))]);
    assert!(chain.extents(&[at(0, 1024, 2999 * 512)], 1024).is_err());
    for (kind, args) in
        [("crypt", "aes-xts-plain64 :64 0 259:1 32768"), ("thin", "253:1 1"), ("linear", "259:1")]
    {
        let error = tree.resolve((253, 0), &[(0, 8, kind, args)]).unwrap_err();
        assert!(error.contains("vg-models") && error.contains(kind), "{error}");
    }
    let error = tree.resolve((253, 0), &[(0, u64::MAX, "linear", "259:1 0")]).unwrap_err();
    assert!(error.contains("invalid row"), "{error}");
    let error = tree.resolve((253, 0), &[(0, 8, "linear", "253:0 0")]).unwrap_err();
    assert!(error.contains("on top of each other"), "{error}");
}

#[test]
fn stripes_on_two_drives() {
    let tree = FakeSysfs::new();
    for i in 0..2 {
        tree.nvme(i);
        tree.part(i, 2048, 1_000_000);
    }
    tree.raid("raid0", "65536", &["400000", "400010"]);
    let chain = tree.resolve((9, 0), &[]).unwrap();
    let start = (2048 + 2048) * 512;
    let got = chain.extents(&[at(0, 200_000, 60_000)], 200_000).unwrap();
    let want = [
        (0, 0, 5536, Some(start + 60_000)),
        (1, 5536, 65536, Some(start)),
        (0, 71_072, 65536, Some(start + 65536)),
        (1, 136_608, 63_392, Some(start + 65536)),
    ];
    assert_eq!(short(&got), want);
}

#[test]
fn devices_that_transform_bytes_are_refused() {
    let tree = FakeSysfs::new();
    (0..2).for_each(|i| drop(tree.nvme(i)));
    (0..2).for_each(|i| tree.part(i, 2048, 1_000_000));
    tree.raid("raid5", "65536", &["400000", "400000"]);
    tree.device("7:0", "virtual/block/loop0", &[("loop/backing_file", "/x")]);
    tree.device("252:0", "virtual/block/zram0", &[]);
    tree.device("251:0", "virtual/block/bcache0", &[]);
    for (number, said) in
        [((9, 0), "raid5"), ((7, 0), "loop device"), ((252, 0), "virtual device"), ((251, 0), "bcache")]
    {
        let error = tree.resolve(number, &[]).unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    assert!(tree.resolve((1, 2), &[]).unwrap_err().contains("1:2 is not in sysfs"));
    let uneven = FakeSysfs::new();
    (0..2).for_each(|i| drop(uneven.nvme(i)));
    (0..2).for_each(|i| uneven.part(i, 2048, 1_000_000));
    uneven.raid("raid0", "65536", &["400000", "500000"]);
    assert!(uneven.resolve((9, 0), &[]).unwrap_err().contains("different sizes"));
}

#[test]
fn the_head_of_a_multipath_drive_has_the_address_of_a_live_controller() {
    let tree = FakeSysfs::new();
    let files = [
        ("size", "8"),
        ("nsid", "3"),
        ("wwid", "w"),
        ("queue/logical_block_size", "512"),
        ("device/serial", "S"),
    ];
    let head = tree.device("259:0", "virtual/nvme-subsystem/nvme-subsys0/nvme0n3", &files);
    for (i, state) in [(0, "dead"), (1, "live")] {
        let controller = head.parent().unwrap().join(format!("nvme{i}"));
        fs::create_dir_all(&controller).unwrap();
        let address = format!("0000:4{i}:00.0");
        for (file, text) in [("state", state), ("transport", "pcie"), ("address", &address)] {
            fs::write(controller.join(file), text).unwrap();
        }
    }
    let chain = tree.resolve((259, 0), &[]).unwrap();
    assert_eq!(chain.disks[0].pci.as_deref(), Some("0000:41:00.0"));
    assert_eq!(chain.disks[0].id.nsid, 3);
}
