//! Claim and release, in a folder in which a thread plays the kernel.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;

const DEVICE: &str = "0000:0b:00.0";
/// A driver that accepts no device.
const REFUSES: &str = "refuses";
/// Generous, for a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The environment variable that names the fake machine's folder to the child of a test.
const FOLDER: &str = "ONEHOP_TEST_CLAIM_FOLDER";
/// The environment variable that makes it share the guardian's pipe with a process that outlives it.
const SHARES: &str = "ONEHOP_TEST_CLAIM_SHARES";

/// A machine in a folder, whose kernel binds and unbinds.
struct FakeKernel {
    folder: PathBuf,
    over: Arc<AtomicBool>,
    kernel: Option<std::thread::JoinHandle<()>>,
}

impl FakeKernel {
    fn new(name: &str, drivers: &[&str]) -> Self {
        // In memory if possible, as sysfs is: a disk may block the writer.
        let shm = PathBuf::from("/dev/shm");
        let place = if shm.is_dir() { shm } else { std::env::temp_dir() };
        let folder = place.join(format!("onehop-pci-claim-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        let put = |file: &str, bytes: &[u8]| {
            let at = folder.join(file);
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            fs::write(at, bytes).unwrap();
        };
        let device = format!("sys/bus/pci/devices/{DEVICE}");
        let mut config = [0; 64];
        config[..6].copy_from_slice(&[0x4d, 0x14, 0x0a, 0xa8, 0x06, 0x04]);
        put(&format!("{device}/config"), &config);
        for (file, text) in [
            ("class", "0x010802\n"),
            ("driver_override", "(null)\n"),
            ("power/control", "auto\n"),
            ("enable", "0\n"),
            ("reset", ""),
        ] {
            put(&format!("{device}/{file}"), text.as_bytes());
        }
        put("sys/bus/pci/drivers_probe", b"");
        put("proc/self/mountinfo", b"");
        for driver in drivers {
            put(&format!("sys/bus/pci/drivers/{driver}/bind"), b"");
            put(&format!("sys/bus/pci/drivers/{driver}/unbind"), b"");
        }
        symlink("../../drivers/nvme", folder.join(&device).join("driver")).unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let (at, stop) = (folder.clone(), over.clone());
        let kernel = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                turn(&at);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Self { folder, over, kernel: Some(kernel) }
    }

    fn root(&self) -> Root {
        Root::below(&self.folder)
    }

    fn text(&self, file: &str) -> String {
        let at = self.folder.join(format!("sys/bus/pci/devices/{DEVICE}/{file}"));
        // A shorter text that overwrites a longer one leaves its end.
        fs::read_to_string(at).unwrap().lines().next().unwrap_or_default().to_owned()
    }

    fn driver(&self) -> Option<String> {
        self.root().link_name(&format!("/sys/bus/pci/devices/{DEVICE}/driver"))
    }

    /// Requests that the kernel thread has not done, and whether it still runs.
    fn state(&self) -> String {
        let drivers = self.folder.join("sys/bus/pci/drivers");
        let mut files: Vec<_> = fs::read_dir(drivers)
            .unwrap()
            .flat_map(|driver| ["bind", "unbind"].map(|file| driver.as_ref().unwrap().path().join(file)))
            .collect();
        files.push(self.folder.join("sys/bus/pci/drivers_probe"));
        let pending: Vec<_> =
            files.iter().filter(|file| fs::read(file).is_ok_and(|text| !text.is_empty())).collect();
        let ended = self.kernel.as_ref().is_none_or(std::thread::JoinHandle::is_finished);
        format!("pending {pending:?}, the kernel's thread has ended: {ended}")
    }

    fn wait_for(&self, driver: &str) {
        let begun = Instant::now();
        while self.driver().as_deref() != Some(driver) {
            assert!(
                begun.elapsed() < TEST_TIMEOUT,
                "it is with {:?}, not {driver}: {}",
                self.driver(),
                self.state()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for FakeKernel {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = self.kernel.take().unwrap().join();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Performs the requests in the drivers' files, and empties them.
fn turn(folder: &Path) {
    let bus = folder.join("sys/bus/pci");
    let link = bus.join(format!("devices/{DEVICE}/driver"));
    let asked = |file: PathBuf| {
        fs::read_to_string(&file).is_ok_and(|text| !text.is_empty() && fs::write(file, "").is_ok())
    };
    let drivers: Vec<_> =
        fs::read_dir(bus.join("drivers")).unwrap().map(|entry| entry.unwrap().path()).collect();
    for driver in &drivers {
        if asked(driver.join("unbind")) {
            let _ = fs::remove_file(&link);
        }
    }
    // Anything written after this turn began is left to the next.
    if link.symlink_metadata().is_ok() {
        return;
    }
    let over = fs::read_to_string(bus.join(format!("devices/{DEVICE}/driver_override"))).unwrap();
    let probed = asked(bus.join("drivers_probe"));
    for driver in &drivers {
        let name = driver.file_name().unwrap().to_str().unwrap();
        if name == REFUSES {
            continue;
        }
        if asked(driver.join("bind")) || (probed && over.starts_with(name)) {
            symlink(format!("../../drivers/{name}"), &link).unwrap();
        }
    }
}

fn take(root: &Root) -> Result<Claim> {
    Claim::take(root, DeviceKind::Drive, DEVICE.parse().unwrap(), NewDriver::Vfio, &[])
}

#[test]
fn claimed_and_released() {
    let machine = FakeKernel::new("back", &["nvme", "vfio-pci"]);
    let claim = take(&machine.root()).unwrap();
    assert_eq!(machine.driver().as_deref(), Some("vfio-pci"));
    assert_eq!(machine.text("driver_override"), "vfio-pci");
    // Written over "auto".
    assert_eq!(machine.text("power/control"), "onto");
    claim.release().unwrap();
    machine.wait_for("nvme");
    assert_eq!(
        (machine.text("driver_override").as_str(), machine.text("power/control").as_str()),
        ("", "auto")
    );
}

#[test]
fn a_driver_that_does_not_come_is_an_error_and_all_is_as_before() {
    let machine = FakeKernel::new("absent", &["nvme", "other"]);
    let error = take(&machine.root()).err().unwrap().to_string();
    assert!(error.contains("no driver claimed it"), "{error}");
    machine.wait_for("nvme");
    assert_eq!(machine.text("power/control"), "auto");
}

#[test]
fn a_drive_in_use_is_left_as_it_is() {
    let machine = FakeKernel::new("used", &["nvme", "vfio-pci"]);
    let (sys, device) = (machine.folder.join("sys"), format!("sys/bus/pci/devices/{DEVICE}"));
    fs::create_dir_all(machine.folder.join(device).join("nvme/nvme0/nvme0n1")).unwrap();
    fs::create_dir_all(sys.join("class/block/nvme0n1")).unwrap();
    fs::write(sys.join("class/block/nvme0n1/dev"), "259:0\n").unwrap();
    let mounts = machine.folder.join("proc/self/mountinfo");
    fs::write(mounts, "1 0 259:0 / /data rw - ext4 /dev/nvme0n1 rw\n").unwrap();
    let (root, address) = (machine.root(), DEVICE.parse().unwrap());
    for refused in [
        take(&root).err().unwrap(),
        bind(&root, DeviceKind::Drive, address, Some("vfio-pci")).unwrap_err(),
        rescan(&root, address, TEST_TIMEOUT).unwrap_err(),
    ] {
        assert!(refused.to_string().contains("mounted on /data"), "{refused}");
    }
    assert_eq!(machine.driver().as_deref(), Some("nvme"));
    assert_eq!(machine.text("driver_override"), "(null)");
}

#[test]
fn two_processes_cannot_claim_the_same() {
    let machine = FakeKernel::new("two", &["nvme", "vfio-pci"]);
    let first = take(&machine.root()).unwrap();
    let error = take(&machine.root()).err().unwrap().to_string();
    assert!(error.contains("another onehop process uses it"), "{error}");
    drop(first);
    machine.wait_for("nvme");
    take(&machine.root()).unwrap();
}

#[test]
fn an_unpowered_device_is_reported() {
    let machine = FakeKernel::new("gone", &["nvme"]);
    let config = machine.folder.join(format!("sys/bus/pci/devices/{DEVICE}/config"));
    fs::write(config, [0xff; 64]).unwrap();
    let error = take(&machine.root()).err().unwrap().to_string();
    assert!(error.contains("all ones") && error.contains("drive recover"), "{error}");
}

#[test]
fn binding_to_stay() {
    let machine = FakeKernel::new("stay", &["nvme", "vfio-pci"]);
    let (root, address) = (machine.root(), DEVICE.parse().unwrap());
    assert_eq!(
        bind(&root, DeviceKind::Drive, address, Some("vfio-pci")).unwrap().as_deref(),
        Some("vfio-pci")
    );
    // The former state is back after others have used the device.
    take(&root).unwrap().release().unwrap();
    assert_eq!(machine.driver().as_deref(), Some("vfio-pci"));
}

#[test]
fn a_driver_that_is_not_there_or_does_not_want_it_changes_nothing() {
    let machine = FakeKernel::new("unwanted", &["nvme", REFUSES]);
    let (root, address) = (machine.root(), DEVICE.parse().unwrap());
    for driver in ["vfio-pci", "", ".", "..", "../drivers/nvme", "a\nb"] {
        let error = bind(&root, DeviceKind::Drive, address, Some(driver)).unwrap_err().to_string();
        assert!(error.contains("no driver of this name"), "{driver:?}: {error}");
        assert_eq!(machine.driver().as_deref(), Some("nvme"));
        assert_eq!(machine.text("driver_override"), "(null)");
    }
    let error = bind(&root, DeviceKind::Drive, address, Some(REFUSES)).unwrap_err().to_string();
    assert!(error.contains("no driver claimed it"), "{error}");
    machine.wait_for("nvme");
    assert_eq!(machine.text("driver_override"), "");
}

#[test]
fn a_device_that_cannot_be_released_is_reported_with_both_reasons() {
    let machine = FakeKernel::new("neither", &["nvme", REFUSES]);
    fs::remove_file(machine.folder.join("sys/bus/pci/drivers/nvme/bind")).unwrap();
    let error = bind(&machine.root(), DeviceKind::Drive, DEVICE.parse().unwrap(), Some(REFUSES)).unwrap_err();
    let said = error.to_string();
    assert!(matches!(error, Error::NotReleased { .. }), "{said}");
    assert!(said.contains("no driver claimed it") && said.contains("drivers/nvme/bind"), "{said}");
}

#[test]
fn what_another_program_drives_stays_on_the_bus() {
    let machine = FakeKernel::new("stays", &["nvme", "vfio-pci"]);
    let (root, address) = (machine.root(), DEVICE.parse().unwrap());
    let _claim = take(&root).unwrap();
    for error in [
        rescan(&root, address, TEST_TIMEOUT).unwrap_err(),
        bind(&root, DeviceKind::Drive, address, None).unwrap_err(),
    ] {
        assert!(error.to_string().contains("another onehop process uses it"), "{error}");
    }
    assert_eq!(machine.driver().as_deref(), Some("vfio-pci"));
}

#[test]
fn what_a_virtual_machine_drives_is_not_taken_away() {
    let machine = FakeKernel::new("given", &["nvme", "vfio-pci", "onehop"]);
    let (root, address) = (machine.root(), DEVICE.parse().unwrap());
    bind(&root, DeviceKind::Drive, address, Some("vfio-pci")).unwrap();
    let (sys, fds) = (machine.folder.join("sys"), machine.folder.join("proc/77/fd"));
    let device = sys.join(format!("bus/pci/devices/{DEVICE}"));
    symlink("../../../../kernel/iommu_groups/17", device.join("iommu_group")).unwrap();
    fs::write(device.join("remove"), "").unwrap();
    fs::create_dir_all(sys.join("class/vfio/17")).unwrap();
    // The number of /dev/null.
    fs::write(sys.join("class/vfio/17/dev"), "1:3\n").unwrap();
    fs::create_dir_all(&fds).unwrap();
    fs::write(machine.folder.join("proc/77/comm"), "qemu\n").unwrap();
    // A bound device that no program has open is free.
    let claim = |owner| Claim::take(&root, DeviceKind::Drive, address, owner, &[]);
    let ours = claim(NewDriver::Vfio).unwrap();
    symlink("/dev/null", fds.join("9")).unwrap();
    // A device of another onehop process is reported as such, and released even if its file is open.
    let error = bind(&root, DeviceKind::Drive, address, None).unwrap_err().to_string();
    assert!(error.contains("another onehop process uses it"), "{error}");
    ours.release().unwrap();
    type Taking<'a> = &'a (dyn Fn() -> Result<()> + Sync);
    let takings: [Taking<'_>; 3] = [
        &|| bind(&root, DeviceKind::Drive, address, None).map(drop),
        &|| rescan(&root, address, TEST_TIMEOUT),
        &|| claim(NewDriver::NoDriver).map(drop),
    ];
    for taking in takings {
        let error = taking().unwrap_err().to_string();
        assert!(error.contains("qemu (process 77) drives it"), "{error}");
        assert_eq!(machine.driver().as_deref(), Some("vfio-pci"));
    }
    assert_eq!(machine.text("driver_override"), "vfio-pci");
    assert_eq!(fs::read_to_string(device.join("remove")).unwrap(), "");
    // The group's own file refuses a second opener, so the device need not be detached.
    claim(NewDriver::Vfio).unwrap().release().unwrap();
    fs::remove_file(fds.join("9")).unwrap();
    bind(&root, DeviceKind::Drive, address, Some("onehop")).unwrap();
    assert_eq!(machine.driver().as_deref(), Some("onehop"));
}

/// It has a copy of the claim, which it may drop, and of the guardian's pipe.
#[test]
#[allow(unsafe_code, reason = "a process is forked")]
fn a_forked_child_neither_releases_a_device_nor_delays_its_release() {
    let machine = FakeKernel::new("forked", &["nvme", "vfio-pci"]);
    let claim = take(&machine.root()).unwrap();
    let pipe = claim.guard.copy_of_pipe();
    // SAFETY: the child closes descriptors and frees memory, which glibc allows, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(claim);
        // SAFETY: ends the child without running what its parent registered.
        unsafe { libc::_exit(0) };
    }
    // SAFETY: the child is ours, and its status is not asked for.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(machine.driver().as_deref(), Some("vfio-pci"));
    // An error if the guardian does not act in time.
    claim.release().unwrap();
    machine.wait_for("nvme");
    drop(pipe);
}

/// The program that the next tests kill; run alone, it does nothing.
#[test]
fn a_program_that_holds_a_device() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let claim = take(&Root::below(folder)).unwrap();
    println!("taken");
    if std::env::var(SHARES).is_err() {
        return std::thread::sleep(TEST_TIMEOUT);
    }
    let mut sleep = Command::new("sleep");
    sleep.arg(TEST_TIMEOUT.as_secs().to_string()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut other = sleep.stdin(claim.guard.copy_of_pipe()).spawn().unwrap();
    println!("shared");
    other.wait().unwrap();
}

#[test]
fn released_when_the_program_is_killed_though_another_process_has_its_pipe() {
    let machine = FakeKernel::new("shared", &["nvme", "vfio-pci"]);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["claim::tests::a_program_that_holds_a_device", "--exact", "--nocapture"])
        .env(FOLDER, &machine.folder)
        .env(SHARES, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("shared")));
    assert_eq!(machine.driver().as_deref(), Some("vfio-pci"));
    child.kill().unwrap();
    child.wait().unwrap();
    // Earlier than the other process ends.
    let begun = Instant::now();
    while machine.driver().as_deref() != Some("nvme") {
        assert!(begun.elapsed() < TEST_TIMEOUT / 2, "{}", machine.state());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn released_when_the_program_is_killed() {
    let machine = FakeKernel::new("killed", &["nvme", "vfio-pci"]);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["claim::tests::a_program_that_holds_a_device", "--exact", "--nocapture"])
        .env(FOLDER, &machine.folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    machine.wait_for("vfio-pci");
    // It may be killed at any moment after its first change.
    child.kill().unwrap();
    child.wait().unwrap();
    machine.wait_for("nvme");
    let begun = Instant::now();
    while machine.text("power/control") != "auto" {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{}", machine.text("power/control"));
    }
    let mut said = String::new();
    child.stdout.unwrap().read_to_string(&mut said).unwrap();
}
