//! Fixes fit the machine: its CPU and GPU generation, virtual machines, containers, and this user's permissions.

use onehop_doctor::{RouteRow, Verdict};
use onehop_pci::Content;
use serde_json::json;

use super::*;
use crate::machines::compose::Function;
use crate::machines::{cuda, cuda_gpu, identity, nvidia, refused};

/// A composed machine by its name.
pub fn composed(name: &str) -> Machine {
    ALL.iter().find(|(known, _)| *known == name).unwrap().1()
}

fn all_fixes(machine: Machine) -> Vec<String> {
    fixes(&diagnose(machine))
}

fn route<'a>(found: &'a Diagnosis, device: &str, route: &str) -> &'a RouteRow {
    found.routes.iter().find(|row| row.device == device && row.route == route).unwrap()
}

/// A drive bound to vfio-pci; `unseen` is why some processes are hidden.
fn bound_to_vfio(root: bool, unseen: &str) -> Machine {
    let mut machine = servers::h100("a server", root, ACS_ON);
    machine.0.files.retain(|path, _| !path.contains("nvme0"));
    machine.link(&format!("{AT}/driver"), "../../../../bus/pci/drivers/vfio-pci");
    machine.file("/sys/class/vfio/42/dev", "10:196\n").there("/dev/vfio/42");
    machine.answer("unseen users", if unseen.is_empty() { json!([]) } else { json!([unseen]) });
    machine
}

#[test]
fn hidden_processes_may_use_a_drive() {
    let unbound = |fixes: &[String]| fixes.iter().any(|fix| fix.contains("unbind"));
    let hidden = diagnose(bound_to_vfio(false, "/proc/77/fd: Permission denied (os error 13)"));
    assert_eq!(status(&hidden, "drive.use"), Status::Unknown);
    assert!(check(&hidden, "drive.use").found.starts_with("cannot determine: /proc/77/fd"));
    assert!(fix(&hidden, "drive.use").contains("as root"), "{}", fix(&hidden, "drive.use"));
    assert!(!unbound(&fixes(&hidden)), "{:?}", fixes(&hidden));
    assert!(route(&hidden, DRIVE, "cpu/cached").fix.as_ref().unwrap().contains("/proc/77/fd"));
    let seen = diagnose(bound_to_vfio(false, ""));
    assert_eq!(status(&seen, "drive.use"), Status::Pass);
    assert!(unbound(&fixes(&seen)), "{:?}", fixes(&seen));
}

/// A drive bound to vfio-pci or the module can be tried; a drive of the nvme driver is not claimed.
#[test]
fn the_fix_for_unknown_users_fits_this_user() {
    let hidden = "this PID namespace does not show the processes outside of it";
    let found = diagnose(bound_to_vfio(true, hidden));
    let row = route(&found, DRIVE, "gpu/tier1");
    assert_eq!(row.verdict, Verdict::Untested, "{row:?}");
    assert!(row.reason.contains("cannot determine") && row.fix.as_ref().unwrap().contains("host"), "{row:?}");
    for (root, why, fix) in [(true, hidden, "host"), (false, "/proc/77/fd: Permission denied", "as root")] {
        let mut machine = servers::h100("a server", root, ACS_ON);
        machine.answer("unseen users", json!([why]));
        let found = diagnose(machine);
        let row = route(&found, DRIVE, "cpu/direct");
        assert_eq!(row.verdict, Verdict::No, "{row:?}");
        let given = row.fix.as_ref().unwrap();
        assert!(given.contains(fix) && !given.contains("Mount /proc"), "{row:?}");
    }
}

#[test]
fn mig_fixes_name_one_gpu() {
    let mut machine = servers::h100_mig();
    cuda(&mut machine, 13000, &[]);
    let found = diagnose(machine);
    for given in [fix(&found, "gpu.cuda"), route(&found, DRIVE, "gpu/tier3").fix.clone().unwrap()] {
        assert!(given.contains("nvidia-smi mig -i 0000:18:00.0 -cgi"), "{given}");
        assert!(!given.contains("mig -cgi") && !given.contains("mig -lgi"), "{given}");
    }
    assert!(fixes(&found).iter().all(|fix| !fix.contains("Unset CUDA_VISIBLE_DEVICES")));
}

const INTEL: &str = "vendor_id\t: GenuineIntel\ncpu family\t: 6\nflags\t\t: fpu\n";
const AMD: &str = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t\t: fpu\n";

/// The drive is bound to the module, and no IOMMU translates its addresses.
pub fn untranslated(cpu: &str, in_a_group: bool) -> Machine {
    let mut machine = servers::h100_bound();
    machine.file("/proc/cpuinfo", cpu).file("/sys/class/dmi/id/sys_vendor", "Supermicro\n");
    machine.file(&format!("{AT}/onehop_missing"), "translation\n");
    machine.file("/sys/kernel/iommu_groups/42/type", "identity\n");
    if !in_a_group {
        machine.0.links.retain(|path, _| !path.ends_with("/iommu_group"));
        machine.0.files.retain(|path, _| !path.starts_with("/sys/kernel/iommu_groups"));
        machine.0.links.retain(|path, _| !path.starts_with("/sys/kernel/iommu_groups"));
    }
    machine
}

#[test]
fn iommu_fixes_fit_the_cpu() {
    for (cpu, enabled, pass) in [
        (INTEL, "intel_iommu=on", "iommu=pt"),
        (AMD, "without amd_iommu=off", "iommu=pt"),
        (ARM, "SMMU", "iommu.passthrough=1"),
    ] {
        for in_a_group in [true, false] {
            let given = fix(&diagnose(untranslated(cpu, in_a_group)), "kernel.onehop_device");
            assert_eq!(given.contains(enabled), !in_a_group, "{given}");
            assert!(given.contains(&format!("oot without {pass}")) && given.contains("costs"), "{given}");
        }
        let given = fix(&diagnose(untranslated(cpu, false)), "iommu.mode");
        assert!(given.contains(enabled) && given.contains("costs"), "{given}");
    }
}

/// A V100, which only the proprietary modules drive.
pub fn volta(driver: &str, kernel: &str) -> Machine {
    let mut machine = servers::h100("a server with a V100", true, ACS_ON);
    machine.file("/proc/sys/kernel/osrelease", kernel);
    nvidia(&mut machine, driver, false, "");
    let mut gpu = cuda_gpu("0000:18:00.0", "Tesla V100", 32, refused());
    gpu["compute"] = json!([7, 0]);
    cuda(&mut machine, 12080, &[gpu]);
    machine
}

#[test]
fn gpus_older_than_turing_do_not_get_open_modules() {
    let offered = |fixes: &[String]| {
        fixes.iter().any(|fix| fix.contains("Install NVIDIA's open") || fix.contains("nvidia-open"))
    };
    let found = diagnose(volta("580.95.05", "6.17.0-14-generic\n"));
    assert!(!offered(&fixes(&found)), "{:?}", fixes(&found));
    assert!(!check(&found, "gpu.register_bar").found.contains("install"));
    let row = route(&found, DRIVE, "gpu/tier1");
    for given in [fix(&found, "gpu.register_bar"), row.fix.clone().unwrap()] {
        assert!(given.contains("older than Turing") && given.contains("cpu/pinned"), "{given}");
    }
    assert!(!row.reason.contains("install"), "{row:?}");
    // No other fix enables a direct route either.
    assert!(route(&found, DRIVE, "cpu/direct").fix.as_ref().unwrap().contains("Use cpu/pinned"));
    // Under kernels before 6.12, a newer driver helps.
    let given = fix(&diagnose(volta("565.57.01", "6.11.0-9-generic\n")), "gpu.register_bar");
    assert!(given.contains("driver 570.133.07") && !given.contains("open"), "{given}");
    // If another GPU would benefit, the fix names the old one.
    let mut both = composed("two-gpus-one-vfio");
    nvidia(&mut both, "575.57.08", false, "");
    both.link("/sys/bus/pci/devices/0000:c1:00.0/driver", "../../../../bus/pci/drivers/nvidia");
    let mut old = cuda_gpu("0000:c1:00.0", "Tesla V100", 32, refused());
    old["compute"] = json!([7, 0]);
    cuda(&mut both, 12080, &[cuda_gpu("0000:41:00.0", "NVIDIA RTX PRO 6000", 96, refused()), old]);
    let found = diagnose(both);
    for given in [fix(&found, "gpu.driver"), fix(&found, "gpu.register_bar"), fix(&found, "gpu.dma_buf")] {
        assert!(given.contains("do not drive 0000:c1:00.0") && given.contains("to end"), "{given}");
    }
}

/// libcufile is installed, and its P2PDMA path lacks something.
pub fn cufile() -> Machine {
    let mut machine = servers::h100("a server with libcufile", true, ACS_ON);
    machine.there("/usr/lib/x86_64-linux-gnu/libcufile.so.0");
    machine
}

/// A second drive behind the laptop's VMD. The first drive is in use if `system`.
pub fn two_behind_vmd(system: bool) -> Machine {
    let mut machine = composed("laptop-vmd-gpu-asleep");
    if !system {
        machine.file("/proc/self/mountinfo", "1 0 0:30 / /proc rw - proc proc rw\n");
    }
    machine.add(
        &Function::new("10000:e2:00.0", (0x1c5c, 0x1959), 0x010802)
            .under(&["0000:00:0e.0", "pci10000:e0", "10000:e0:07.0"])
            .driver("nvme"),
    );
    nvme(&mut machine, "10000:e2:00.0", 1, "SKHynix_HFS001TEJ9X115N", None);
    machine
}

#[test]
fn vmd_stays_on_while_a_drive_behind_it_is_in_use() {
    let offers = |fixes: Vec<String>| fixes.iter().filter(|fix| fix.contains("disable VMD")).count();
    assert_eq!(offers(all_fixes(two_behind_vmd(true))), 0);
    assert!(offers(all_fixes(two_behind_vmd(false))) >= 2);
    let mut hidden = two_behind_vmd(false);
    hidden.answer("claimed:nvme1n1", json!("/dev/nvme1n1: Permission denied (os error 13)"));
    assert_eq!(offers(all_fixes(hidden)), 0);
    // The routes withhold it too, once CUDA works.
    let mut machine = two_behind_vmd(true);
    cuda(&mut machine, 12080, &[cuda_gpu("0000:01:00.0", "NVIDIA GeForce RTX 4060", 8, refused())]);
    identity(&mut machine, 1, 5);
    let found = diagnose(machine);
    let row = route(&found, "10000:e2:00.0", "gpu/tier3");
    assert!(row.reason.contains("VMD"), "{row:?}");
    assert!(row.fix.as_ref().unwrap().contains("10000:e1:00.0: this system runs from nvme0n1"), "{row:?}");
}

/// BAR1 is too small, in a virtual machine.
pub fn small_window_in_a_vm() -> Machine {
    let mut machine = composed("am5-rtx5090-rebar-off");
    machine.file("/sys/class/dmi/id/sys_vendor", "QEMU\n");
    machine
}

#[test]
fn bar1_fixes_in_a_virtual_machine_name_the_host() {
    let found = diagnose(small_window_in_a_vm());
    let rows: Vec<_> = found.routes.iter().filter(|row| row.reason.contains("BAR1 covers only")).collect();
    assert!(!rows.is_empty());
    for row in rows {
        assert!(row.fix.as_ref().unwrap().contains("gets BAR1 from its host"), "{row:?}");
    }
    assert!(
        all_fixes(composed("am5-rtx5090-rebar-off")).iter().any(|fix| fix.contains("in the firmware setup"))
    );
}

type Files = Vec<(&'static str, &'static str)>;

/// Firmware, device tree and virtio on an ARM machine; the result of `place.vm`, and whether transfers pass.
#[test]
fn physical_machines_without_a_cpu_flag_are_recognised() {
    let vendor = |name: &'static str| ("/sys/class/dmi/id/sys_vendor", name);
    let product = |name: &'static str| ("/sys/class/dmi/id/product_name", name);
    let virtio = ("/sys/bus/virtio/devices/virtio0/status", "0xf\n");
    let board = |name: &'static str| ("/sys/firmware/devicetree/base/compatible", name);
    let cases: [(&str, Files, Status); 9] = [
        ("a cloud", vec![vendor("Scaleway\n"), product("SCW-COPARM1-4C-16G\n")], Status::Unknown),
        ("its virtio", vec![vendor("Scaleway\n"), product("SCW-COPARM1-4C-16G\n"), virtio], Status::Info),
        ("a product alone", vec![product("ARS-111GL-NHR\n")], Status::Unknown),
        ("a word within", vec![vendor("Cloud of Dell\n")], Status::Unknown),
        ("an unknown board", vec![board("maker,board\0")], Status::Unknown),
        ("a maker", vec![vendor("Giga Computing\n")], Status::Pass),
        ("a board's maker", vec![("/sys/class/dmi/id/board_vendor", "ASRockRack\n")], Status::Pass),
        ("a DPU", vec![vendor("Supermicro\n"), virtio], Status::Unknown),
        ("POWER", vec![board("ibm,p9-host\0ibm,powernv\0")], Status::Pass),
    ];
    for (what, files, expected) in cases {
        let mut all = vec![("/proc/cpuinfo", ARM)];
        all.extend(files);
        let found = behind_a_switch(&all);
        assert_eq!(status(&found, "place.vm"), expected, "{what}: {:?}", check(&found, "place.vm"));
        let passes = if expected == Status::Pass { Status::Pass } else { Status::Unknown };
        assert_eq!(status(&found, "path.p2p_write"), passes, "{what}");
    }
    // The BIOS characteristics, which only root can read.
    for (length, bits, expected) in
        [(24, 0x1c, Status::Info), (24, 0x0c, Status::Pass), (0x13, b'P', Status::Pass)]
    {
        let mut machine = servers::h100("a server", true, 0);
        machine.file("/proc/cpuinfo", ARM).file("/sys/class/dmi/id/sys_vendor", "Supermicro\n");
        let mut table = vec![0; 24];
        (table[1], table[0x13]) = (length, bits);
        machine.0.files.insert("/sys/firmware/dmi/entries/0-0/raw".into(), Content::from_bytes(&table));
        assert_eq!(status(&diagnose(machine), "place.vm"), expected, "{bits:#x}");
    }
}

#[test]
fn the_io_uring_fix_names_its_risk() {
    let given = fix(&diagnose(composed("container-h100")), "kernel.io_uring");
    assert!(given.contains("allow io_uring_setup") && given.contains("risk"), "{given}");
}

/// More machines whose fixes are checked.
pub fn variants() -> Vec<(&'static str, Machine)> {
    vec![
        ("vfio, hidden processes", bound_to_vfio(false, "/proc/77/fd: Permission denied (os error 13)")),
        ("libcufile", cufile()),
        ("Volta", volta("580.95.05", "6.17.0-14-generic\n")),
        ("untranslated Intel", untranslated(INTEL, false)),
        ("untranslated AMD", untranslated(AMD, false)),
        ("untranslated ARM", untranslated(ARM, false)),
        ("two behind VMD", two_behind_vmd(true)),
        ("a small window in a VM", small_window_in_a_vm()),
    ]
}

/// Text in a fix that does not fit the machine.
pub fn unsuitable_text(machine: &Machine, found: &Diagnosis, fix: &str) -> Option<&'static str> {
    let text = |path: &str| match machine.0.files.get(path) {
        Some(Content::Text(text)) => text.as_str(),
        _ => "",
    };
    let cpu = text("/proc/cpuinfo");
    let intel = cpu.contains("GenuineIntel");
    let amd = cpu.contains("AuthenticAMD");
    let virtual_machine = status(found, "place.vm") == Status::Info;
    let container = found.checks.iter().any(|check| check.id == "place.container");
    let old = text("/proc/driver/nvidia/version").contains("Kernel Module")
        && found
            .checks
            .iter()
            .any(|check| check.id == "gpu.driver" && check.found.contains("older than Turing"));
    [
        (!intel, "intel_iommu"),
        (!intel, "VT-d"),
        (!amd, "AMD-Vi"),
        (true, "amd_iommu=on"),
        (!(intel || amd), "iommu=pt"),
        (virtual_machine, "firmware setup"),
        (virtual_machine, "disable_acs"),
        (container, "Run ulimit"),
        (old, "Install NVIDIA's open"),
        (old, "nvidia-open"),
        (true, "mig -cgi"),
    ]
    .into_iter()
    .find_map(|(wrong, words)| (wrong && fix.contains(words)).then_some(words))
}
