//! Nothing passes without evidence, and no fix does harm: a fix names one device, is withheld if that device is in use,
//! and states its cost.

mod fits;

use onehop_doctor::{Check, Diagnosis, Facts, FactsRequest, Only, Status, examine, recorded_files};
use onehop_pci::Root;

use crate::machines::compose::{ACS_ON, Machine};
use crate::machines::{self, ALL, nvme, rare, servers, unusual};

fn diagnose(machine: Machine) -> Diagnosis {
    let root = Root::recorded(machine.0);
    let facts =
        Facts::gather(&root, &FactsRequest { files: recorded_files(&root), ..FactsRequest::default() })
            .unwrap();
    examine(&facts, &Only::default(), root.about())
}

fn check<'a>(found: &'a Diagnosis, id: &str) -> &'a Check {
    found.checks.iter().find(|check| check.id == id).unwrap_or_else(|| panic!("no {id}"))
}

fn status(found: &Diagnosis, id: &str) -> Status {
    check(found, id).status
}

const ARM: &str = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n";

/// A GPU and a drive behind one switch without ACS: physical machines forward transfers.
fn behind_a_switch(files: &[(&str, &str)]) -> Diagnosis {
    let mut machine = servers::h100("a server", true, 0);
    for (path, text) in files {
        machine.file(path, text);
    }
    diagnose(machine)
}

#[test]
fn virtual_machines_are_recognised_on_every_cpu() {
    let arm = ("/proc/cpuinfo", ARM);
    let tree = "/sys/firmware/devicetree/base";
    let (compatible, node) = (format!("{tree}/compatible"), format!("{tree}/hypervisor/compatible"));
    let cases: [(&str, &[(&str, &str)]); 9] = [
        ("QEMU's firmware", &[arm, ("/sys/class/dmi/id/sys_vendor", "QEMU\n")]),
        (
            "EC2",
            &[
                arm,
                ("/sys/class/dmi/id/sys_vendor", "Amazon EC2\n"),
                ("/sys/class/dmi/id/product_name", "m7g.large\n"),
            ],
        ),
        ("Hyper-V", &[arm, ("/sys/class/dmi/id/product_name", "Virtual Machine\n")]),
        ("a cloud's own name", &[arm, ("/sys/class/dmi/id/product_name", "vServer\n")]),
        ("QEMU's board", &[arm, (&compatible, "linux,dummy-virt\0")]),
        (
            "a hypervisor's node",
            &[arm, (&compatible, "xen,xenvm-4.17\0xen,xenvm\0"), (&node, "xen,xen-4.17\0xen,xen\0")],
        ),
        (
            "QEMU's device",
            &[arm, (&compatible, "maker,board\0"), (&format!("{tree}/fw-cfg@9020000/compatible"), "qemu\0")],
        ),
        ("Xen", &[arm, ("/sys/hypervisor/type", "xen\n")]),
        ("a flag that is hidden", &[("/sys/class/dmi/id/sys_vendor", "QEMU\n")]),
    ];
    for (what, files) in cases {
        let found = behind_a_switch(files);
        assert_eq!(status(&found, "place.vm"), Status::Info, "{what}: {:?}", check(&found, "place.vm"));
        for id in ["path.p2p_write", "path.p2p_read"] {
            assert_eq!(status(&found, id), Status::Unknown, "{what}: {id}");
        }
        assert!(!check(&found, "place.vm").evidence.is_empty(), "{what}");
    }
}

#[test]
fn p2p_is_unknown_if_the_machine_may_be_virtual() {
    let found = behind_a_switch(&[("/proc/cpuinfo", ARM)]);
    assert_eq!(status(&found, "place.vm"), Status::Unknown);
    for id in ["path.p2p_write", "path.p2p_read"] {
        assert_eq!(status(&found, id), Status::Unknown, "{id}");
        assert!(check(&found, id).found.contains("place.vm"), "{}", check(&found, id).found);
    }
}

#[test]
fn firmware_placeholders_do_not_prove_a_physical_machine() {
    let arm = ("/proc/cpuinfo", ARM);
    let product = "/sys/class/dmi/id/product_name";
    let compatible = ("/sys/firmware/devicetree/base/compatible", "\0");
    for name in ["To Be Filled By O.E.M.\n", "Not Specified\n", "Default string\n", " \n"] {
        let found = behind_a_switch(&[arm, (product, name), compatible]);
        assert_eq!(status(&found, "place.vm"), Status::Unknown, "{name}");
    }
}

/// In a virtual machine that conceals itself, the host's ports decide.
#[test]
fn acs_off_is_not_recommended_if_the_machine_may_be_virtual() {
    let acs = |place: Status| {
        let cpu = |machine: &mut Machine| {
            if place == Status::Unknown {
                machine.file("/proc/cpuinfo", ARM);
            }
        };
        let found = server(None, cpu);
        assert_eq!(status(&found, "place.vm"), place);
        (status(&found, "path.acs"), fix(&found, "path.acs").contains("disable_acs_redir"))
    };
    assert_eq!(acs(Status::Unknown), (Status::Info, false));
    assert_eq!(acs(Status::Pass), (Status::Warn, true));
}

#[test]
fn physical_machines_are_recognised() {
    let arm = ("/proc/cpuinfo", ARM);
    let cases: [(&str, &[(&str, &str)]); 4] = [
        ("x86", &[]),
        (
            "firmware",
            &[
                arm,
                ("/sys/class/dmi/id/sys_vendor", "Supermicro\n"),
                ("/sys/class/dmi/id/product_name", "ARS-111GL-NHR\n"),
            ],
        ),
        (
            "device tree",
            &[arm, ("/sys/firmware/devicetree/base/compatible", "nvidia,p3737\0nvidia,tegra234\0")],
        ),
        (
            "a cloud's whole machine",
            &[
                arm,
                ("/sys/class/dmi/id/sys_vendor", "Amazon EC2\n"),
                ("/sys/class/dmi/id/product_name", "c7g.metal\n"),
            ],
        ),
    ];
    for (what, files) in cases {
        let found = behind_a_switch(files);
        for id in ["place.vm", "path.p2p_write", "path.p2p_read"] {
            assert_eq!(status(&found, id), Status::Pass, "{what}: {id}: {}", check(&found, id).found);
        }
    }
}

const DRIVE: &str = "0000:19:00.0";
const AT: &str = "/sys/bus/pci/devices/0000:19:00.0";

/// A server whose drive is mounted, or not.
fn server(mounted: Option<&str>, change: impl Fn(&mut Machine)) -> Diagnosis {
    let mut machine = servers::h100("a server", true, ACS_ON);
    nvme(&mut machine, DRIVE, 0, "KIOXIA KCM7DRJE3T84", mounted);
    change(&mut machine);
    diagnose(machine)
}

fn fix(found: &Diagnosis, id: &str) -> String {
    check(found, id).fix.clone().unwrap_or_else(|| panic!("{id} has no fix"))
}

/// All recommended fixes.
fn fixes(found: &Diagnosis) -> Vec<String> {
    let checks = found.checks.iter().filter_map(|check| check.fix.clone());
    let rows = found.routes.iter().filter_map(|row| row.fix.clone());
    let advice = found.advice.iter().filter_map(|advice| advice.change.clone());
    checks.chain(rows).chain(advice).collect()
}

const ASLEEP: fn(&mut Machine) = |machine| {
    machine.file(&format!("{AT}/power_state"), "D3hot\n");
};
const DEAD: fn(&mut Machine) = |machine| {
    machine.file(&format!("{AT}/nvme/nvme0/state"), "dead\n");
};

type Change<'a> = &'a dyn Fn(&mut Machine);

#[test]
fn no_fix_removes_or_resets_a_drive_in_use() {
    let removed = |found: &Diagnosis| fixes(found).iter().any(|fix| fix.contains("/remove"));
    let reset = |found: &Diagnosis| fixes(found).iter().any(|fix| fix.contains("reset_controller"));
    for place in ["/", "/models"] {
        let sleeping = server(Some(place), ASLEEP);
        assert!(!removed(&sleeping) && fix(&sleeping, "drive.power").contains("power/control"), "{place}");
        assert!(fix(&sleeping, "drive.power").contains("free it first"), "{}", fix(&sleeping, "drive.power"));
        let dead = server(Some(place), DEAD);
        assert!(
            !reset(&dead) && fix(&dead, "drive.state").contains("nvme0"),
            "{}",
            fix(&dead, "drive.state")
        );
    }
    let swapped = |machine: &mut Machine| {
        ASLEEP(machine);
        machine.file("/proc/swaps", "Filename Type Size Used Priority\n/dev/nvme0n1 partition 8 0 -2\n");
    };
    let held = |machine: &mut Machine| {
        ASLEEP(machine);
        machine.folder("/sys/class/block/nvme0n1/holders", &["dm-0"]);
    };
    let unreadable = |machine: &mut Machine| {
        ASLEEP(machine);
        machine.denied("/proc/self/mountinfo");
    };
    let cases: [(&str, Change<'_>); 3] =
        [("swap", &swapped), ("held", &held), ("unreadable mounts", &unreadable)];
    for (what, change) in cases {
        let found = server(None, change);
        assert_ne!(status(&found, "drive.use"), Status::Pass, "{what}");
        assert!(!removed(&found), "{what}: {}", fix(&found, "drive.power"));
    }
    let sleeping = server(None, ASLEEP);
    let removal = fix(&sleeping, "drive.power");
    assert!(removal.contains(&format!("{AT}/remove")) && removal.contains("gone"), "{removal}");
    let reset = fix(&server(None, DEAD), "drive.state");
    assert!(
        reset.contains("/sys/class/nvme/nvme0/reset_controller") && reset.contains("in flight"),
        "{reset}"
    );
}

#[test]
fn no_fix_unbinds_a_drive_in_use() {
    let other = |machine: &mut Machine| {
        machine.link(&format!("{AT}/driver"), "../../../../bus/pci/drivers/other");
    };
    let used = server(Some("/"), other);
    assert!(!fix(&used, "drive.driver").contains("unbind"), "{}", fix(&used, "drive.driver"));
    let free = server(None, other);
    let bind = fix(&free, "drive.driver");
    assert!(
        bind.contains(&format!("echo nvme > {AT}/driver_override"))
            && bind.contains("detaches it from other"),
        "{bind}"
    );
}

/// The devices that a fix writes to, by their addresses in it.
fn writes_to(fix: &str) -> Vec<&str> {
    let is_address = |word: &&str| {
        let b = word.as_bytes();
        b.len() == 12 && b[4] == b':' && b[7] == b':' && b[10] == b'.'
    };
    fix.split(|c: char| !(c.is_ascii_hexdigit() || ":.".contains(c))).filter(is_address).collect()
}

/// Fixes that weaken protection, and the word that must name the cost.
const COSTS: [(&str, &str); 18] = [
    ("iomem=relaxed", "overwrites"),
    ("PeerMappingOverride", "every user"),
    ("disable_acs_redir", "isolation"),
    ("RMForceStaticBar1", "to end"),
    ("--privileged", "all of the host"),
    ("kernel.io_uring_disabled=0", "risk"),
    ("iommu_group/type", "costs"),
    ("/type (root; for", "costs"),
    ("VMD (", "backup"),
    ("PeerMappingOverride=1", "to end"),
    ("Install NVIDIA's open", "to end"),
    ("Install the open", "to end"),
    ("allow io_uring_setup", "risk"),
    ("intel_iommu=on", "costs"),
    ("without amd_iommu=off", "costs"),
    ("SMMU", "costs"),
    ("oot without iommu", "costs"),
    ("-mig 0", "ends every program"),
];

#[test]
fn fixes_name_their_device_and_their_cost() {
    let composed = ALL.iter().map(|(name, compose)| (*name, compose()));
    let more = [
        ("qemu", rare::qemu()),
        ("wsl", rare::wsl()),
        ("no namespace", unusual::no_namespace()),
        ("garbage", unusual::garbage()),
    ];
    for (name, machine) in composed.chain(more).chain(fits::variants()) {
        let root = Root::recorded(machine.0.clone());
        let facts =
            Facts::gather(&root, &FactsRequest { files: recorded_files(&root), ..FactsRequest::default() })
                .unwrap();
        let used: Vec<String> = facts
            .drives
            .iter()
            .filter(|drive| drive.may_be_in_use().is_some())
            .filter_map(|drive| Some(drive.address?.to_string()))
            .collect();
        let found = diagnose(Machine(machine.0.clone()));
        for fix in fixes(&found) {
            assert_eq!(fits::unsuitable_text(&machine, &found, &fix), None, "{name}: {fix}");
            let writes = ["/remove", "/unbind", "reset_controller", "group", "vfio-pci too"]
                .iter()
                .any(|word| fix.contains(word));
            let command = fix.contains("echo ") || fix.contains("nvidia-smi -i");
            assert!(
                !command || !fix.contains("/*") && !fix.contains("/N/") && !fix.contains("ADDRESS"),
                "{name}: {fix}"
            );
            let target = writes_to(&fix).into_iter().find(|at| used.iter().any(|used| used == at));
            assert!(!(writes && command && target.is_some()), "{name}: {fix}");
            for (opens, cost) in COSTS {
                assert!(!fix.contains(opens) || fix.contains(cost), "{name}: {opens} without {cost}: {fix}");
            }
            for vague in ["Secure Boot off", "ADDRESS", "GROUP", "/N/"] {
                assert!(!fix.contains(vague), "{name}: {vague}: {fix}");
            }
        }
    }
}

#[test]
fn in_a_virtual_machine_acs_is_left_to_the_host() {
    let guest = server(None, |machine| {
        machine.file("/sys/class/dmi/id/sys_vendor", "QEMU\n");
    });
    assert_eq!(status(&guest, "path.acs"), Status::Info);
    assert!(fixes(&guest).iter().all(|fix| !fix.contains("disable_acs")), "{:?}", fixes(&guest));
    assert!(fix(&guest, "path.acs").contains("host"));
    let bare = server(None, |_| {});
    let off = fix(&bare, "path.acs");
    assert!(off.contains("groups become one") && off.contains("VFIO"), "{off}");
}

/// Devices behind ports without ACS share one IOMMU group.
#[test]
fn without_acs_the_gpu_shares_the_drives_group() {
    let mut machine = servers::h100("a server", true, 0);
    nvme(&mut machine, DRIVE, 0, "KIOXIA KCM7DRJE3T84", None);
    let found = diagnose(machine);
    assert_eq!(status(&found, "path.acs"), Status::Pass);
    let group = check(&found, "iommu.group");
    assert!(group.status == Status::Warn && group.found.contains("0000:18:00.0"), "{group:?}");
    let row = found.routes.iter().find(|row| row.device == DRIVE && row.route == "gpu/tier1").unwrap();
    assert!(row.verdict == onehop_doctor::Verdict::No && row.reason.contains("IOMMU group"), "{row:?}");
}

#[test]
fn other_devices_of_a_group_are_detached_only_if_unused() {
    let second = |machine: &mut Machine, driver: &str, mounted: Option<&str>| {
        // A second drive in place of the network card, in the first one's group.
        let card = "/sys/bus/pci/devices/0000:1a:00.0";
        machine.file(&format!("{card}/class"), "0x010802\n");
        machine.link(&format!("{card}/driver"), &format!("../../../../bus/pci/drivers/{driver}"));
        machine.link(&format!("{card}/iommu_group"), "../../../../kernel/iommu_groups/42");
        machine.there("/sys/kernel/iommu_groups/42/devices/0000:1a:00.0");
        nvme(machine, "0000:1a:00.0", 1, "KIOXIA KCM7DRJE3T84", mounted);
    };
    let free = server(None, |machine| second(machine, "nvme", None));
    let given = fix(&free, "iommu.group");
    assert!(given.contains("0000:1a:00.0 to vfio-pci too"), "{given}");
    let used = server(None, |machine| second(machine, "nvme", Some("/")));
    for fix in fixes(&used) {
        assert!(!fix.contains("to vfio-pci too"), "{fix}");
    }
    assert!(fix(&used, "iommu.group").contains("a slot of its own"), "{}", fix(&used, "iommu.group"));
}

#[test]
fn vfio_without_an_iommu_does_not_pass() {
    let unsafe_mode = "/sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
    let mut machine = unusual::arm_smmu();
    machine.file(unsafe_mode, "Y\n");
    let alone = diagnose(machine);
    assert_eq!(status(&alone, "iommu.vfio"), Status::Warn, "{:?}", check(&alone, "iommu.vfio"));
    assert!(fix(&alone, "iommu.vfio").contains("SMMU"));
    let mut machine = unusual::arm_smmu();
    machine.file(unsafe_mode, "Y\n").there("/sys/module/vfio_pci").there("/dev/vfio/vfio");
    assert_eq!(status(&diagnose(machine), "iommu.vfio"), Status::Warn);
    // With an IOMMU, the unsafe mode alone is no finding.
    let with_iommu = server(None, |machine| {
        machine.file(unsafe_mode, "Y\n");
    });
    assert_eq!(status(&with_iommu, "iommu.vfio"), Status::Pass);
    let nothing = server(None, |machine| {
        machine.file(unsafe_mode, "Y\n");
        machine.0.files.retain(|path, _| !path.contains("vfio_pci") && !path.starts_with("/dev/vfio"));
    });
    assert_ne!(status(&nothing, "iommu.vfio"), Status::Pass);
}

#[test]
fn mig_is_reported() {
    let with_mig = diagnose(servers::h100_mig());
    assert_eq!(status(&with_mig, "gpu.mig"), Status::Info);
    assert!(check(&with_mig, "gpu.mig").found.contains("MIG 1g.10gb"));
    assert!(
        fix(&with_mig, "gpu.mig").contains("-i 0000:18:00.0") && fix(&with_mig, "gpu.mig").contains("end")
    );
    // The BAR belongs to the GPU; CUDA reports the memory of one instance.
    assert_eq!(status(&with_mig, "gpu.bar1"), Status::Info);
    assert!(check(&with_mig, "gpu.bar1").found.contains("MIG"));
    // CUDA's name or NVML suffices, even if CUDA shows no instance.
    for (gpus, mig) in [(&["NVIDIA H100 80GB HBM3 MIG 1g.10gb"][..], false), (&[], true)] {
        let mut machine = servers::h100_mig();
        let gpus: Vec<_> =
            gpus.iter().map(|name| machines::cuda_gpu("0000:18:00.0", name, 10, machines::works())).collect();
        machines::cuda(&mut machine, 13000, &gpus);
        let health = serde_json::json!({ "pci": "0000:18:00.0", "link": [5, 16], "best_link": [5, 16], "power": [null, null],
                                         "state": null, "mig": mig });
        machine.answer("nvml", serde_json::json!({ "error": null, "gpus": [health] }));
        let found = diagnose(machine);
        assert_eq!(status(&found, "gpu.mig"), Status::Info);
        assert!(!mig || fix(&found, "gpu.cuda").contains("nvidia-smi mig"), "{}", fix(&found, "gpu.cuda"));
    }
    assert!(server(None, |_| {}).checks.iter().all(|check| check.id != "gpu.mig"));
}

/// Binds the drive to the module; a program has its device file open.
const BOUND_TO_MODULE: fn(&mut Machine) = |machine| {
    machine.there("/sys/module/onehop").link(&format!("{AT}/driver"), "../../../../bus/pci/drivers/onehop");
    machine.file(&format!("/sys/class/misc/onehop-{DRIVE}/dev"), "10:99\n");
    machine.file(&format!("{AT}/onehop_missing"), "strict\n").there(&format!("/dev/onehop-{DRIVE}"));
    machine.answer("open drives", serde_json::json!([["character 10:99", "train (process 9)"]]));
};

#[test]
fn a_drive_opened_through_the_module_is_in_use() {
    let used = server(None, BOUND_TO_MODULE);
    assert!(check(&used, "drive.use").found.contains("train (process 9)"), "{:?}", check(&used, "drive.use"));
    assert!(!fix(&used, "kernel.onehop_device").contains("echo"), "{}", fix(&used, "kernel.onehop_device"));
    let idle = server(None, |machine| {
        BOUND_TO_MODULE(machine);
        machine.answer("open drives", serde_json::json!([]));
    });
    assert_eq!(status(&idle, "drive.use"), Status::Pass);
    assert!(fix(&idle, "kernel.onehop_device").contains(&format!("echo DMA > {AT}/iommu_group/type")));
}

#[test]
fn a_groups_type_is_changed_only_if_nothing_in_it_is_in_use() {
    // A second drive in place of the network card, in the first one's group, which is lazy.
    let lazy = |mounted: Option<&str>| {
        let found = server(None, |machine| {
            let card = "/sys/bus/pci/devices/0000:1a:00.0";
            machine.there("/sys/module/onehop").file("/sys/kernel/iommu_groups/42/type", "DMA-FQ\n");
            machine.file(&format!("{card}/class"), "0x010802\n");
            machine.link(&format!("{card}/driver"), "../../../../bus/pci/drivers/nvme");
            machine.link(&format!("{card}/iommu_group"), "../../../../kernel/iommu_groups/42");
            machine.there("/sys/kernel/iommu_groups/42/devices/0000:1a:00.0");
            nvme(machine, "0000:1a:00.0", 1, "KIOXIA KCM7DRJE3T84", mounted);
        });
        fix(&found, "iommu.lazy")
    };
    assert!(lazy(None).contains("/type (root"), "{}", lazy(None));
    assert!(!lazy(Some("/models")).contains("/type (root"), "{}", lazy(Some("/models")));
}

#[test]
fn vfio_passes_only_with_groups_of_an_iommu() {
    let with = |kind: Option<&'static str>| {
        let mut machine = unusual::arm_smmu();
        machine.there("/sys/module/vfio_pci").there("/dev/vfio/vfio").there("/sys/class/iommu/smmu3.0");
        if let Some(kind) = kind {
            let drive = "000d:01:00.0";
            machine.link(
                &format!("/sys/bus/pci/devices/{drive}/iommu_group"),
                "../../../../kernel/iommu_groups/7",
            );
            machine.there(&format!("/sys/kernel/iommu_groups/7/devices/{drive}"));
            machine.file("/sys/kernel/iommu_groups/7/type", kind);
        }
        status(&diagnose(machine), "iommu.vfio")
    };
    assert_eq!(
        [with(None), with(Some("unknown\n")), with(Some("DMA\n"))],
        [Status::Warn, Status::Warn, Status::Pass]
    );
}
