//! `bed/qtest.sh`, as people use it.

use std::path::PathBuf;
use std::process::Command;

use onehop_qtest::bed::{Qemu, QemuOptions};

use crate::driver::{enable, identify};

/// Ends QEMU however the test ends.
struct Stop(PathBuf, PathBuf);

impl Drop for Stop {
    fn drop(&mut self) {
        let _ = Command::new(&self.0).arg("stop").arg(&self.1).status();
        let _ = std::fs::remove_dir_all(&self.1);
    }
}

#[test]
fn the_script_starts_a_drive_and_prints_its_name() {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../bed/qtest.sh");
    if Qemu::start_or_skip(&QemuOptions::default()).unwrap().is_none() {
        return;
    }
    let dir = std::env::temp_dir().join(format!("onehop-script-{}", std::process::id()));
    let stop = Stop(script.clone(), dir.clone());
    let started = Command::new(&script)
        .arg("start")
        .arg(&dir)
        .args([
            "--size",
            "32M",
            "--ram",
            "64M",
            "--lba",
            "4096",
            "--ms",
            "8",
            "--namespaces",
            "2",
            "cmb_size_mb=2",
        ])
        .args(["mdts=5", "serial=SCRIPT1"])
        .output()
        .unwrap();
    let said = String::from_utf8(started.stdout).unwrap();
    assert!(started.status.success(), "{said}{}", String::from_utf8_lossy(&started.stderr));
    let name = said.trim_end();
    assert_eq!(name, format!("qtest:{0}/qt.sock,{0}/ram", dir.display()));

    let model = onehop_qtest::QemuDrive::open(name.strip_prefix("qtest:").unwrap()).unwrap();
    assert_eq!(model.cmb().unwrap().size(), 2 << 20);
    let port = model.port();
    let mut admin = enable(&port);
    let controller = identify(&port, &mut admin, 0, 1);
    assert_eq!((&controller[4..11], controller[77]), (b"SCRIPT1".as_slice(), 5));
    let namespace = identify(&port, &mut admin, 2, 0);
    assert_eq!(namespace[130 + 4 * usize::from(namespace[26] & 0xf)], 12);

    let again = Command::new(&script).arg("start").arg(&dir).output().unwrap();
    assert!(!again.status.success(), "one QEMU in one directory");
    let memory = std::fs::read_link(dir.join("ram")).ok();
    drop(stop);
    assert_eq!(port.regs.read32(8), u32::MAX);
    assert!(memory.is_none_or(|file| !file.exists()));
}
