//! Composed machines and their expected diagnoses.

use std::fs;
use std::path::PathBuf;

use onehop_doctor::{
    Diagnosis, Direction, Facts, FactsRequest, Only, Status, Style, Verdict, examine, recorded_files, render,
    topo,
};
use onehop_pci::{Record, Root};

use crate::machines::{self, ALL, rare, unusual};

/// The folder of machines for `onehop doctor --from`.
fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

fn facts(root: &Root) -> Facts {
    Facts::gather(root, &FactsRequest { files: recorded_files(root), ..FactsRequest::default() }).unwrap()
}

fn diagnose(record: Record) -> Diagnosis {
    let root = Root::recorded(record);
    examine(&facts(&root), &Only::default(), root.about())
}

fn machine(name: &str) -> Diagnosis {
    diagnose(ALL.iter().find(|(known, _)| *known == name).unwrap().1().0)
}

impl Verdicts for Diagnosis {
    fn status(&self, id: &str) -> Status {
        let found = self.checks.iter().filter(|check| check.id == id).map(|check| check.status).max();
        found.unwrap_or_else(|| {
            panic!("no check {id} among {:?}", self.checks.iter().map(|c| c.id).collect::<Vec<_>>())
        })
    }

    fn found(&self, id: &str) -> String {
        self.checks.iter().find(|check| check.id == id).map(|check| check.found.clone()).unwrap_or_default()
    }

    fn has(&self, id: &str) -> bool {
        self.checks.iter().any(|check| check.id == id)
    }

    fn route(&self, device: &str, direction: Direction, route: &str) -> (Verdict, String, String) {
        let same = |row: &&onehop_doctor::RouteRow| {
            row.device == device && row.direction == direction && row.route == route
        };
        let row = self.routes.iter().find(same).unwrap_or_else(|| panic!("no row {device} {route}"));
        (row.verdict, row.reason.clone(), row.fix.clone().unwrap_or_default())
    }

    fn change(&self, device: &str, direction: Direction) -> (Option<&str>, Option<&str>, &str) {
        let same = |advice: &&onehop_doctor::Advice| advice.device == device && advice.direction == direction;
        let advice = self.advice.iter().find(same).unwrap();
        (advice.now, advice.next, advice.change.as_deref().unwrap_or_default())
    }
}

trait Verdicts {
    fn status(&self, id: &str) -> Status;
    fn found(&self, id: &str) -> String;
    fn has(&self, id: &str) -> bool;
    fn route(&self, device: &str, direction: Direction, route: &str) -> (Verdict, String, String);
    fn change(&self, device: &str, direction: Direction) -> (Option<&str>, Option<&str>, &str);
}

use Direction::{FromGpu, ToGpu};
use Verdict::{No, Untested, Yes};

#[test]
fn fixture_files_are_up_to_date() {
    let write = std::env::var_os("ONEHOP_WRITE_FIXTURES").is_some();
    for (name, compose) in ALL {
        let (path, bytes) = (folder().join(format!("{name}.json")), compose().0.to_bytes());
        if write {
            fs::create_dir_all(folder()).unwrap();
            fs::write(&path, &bytes).unwrap();
        }
        let text = fs::read(&path)
            .unwrap_or_else(|e| panic!("{}: {e}; ONEHOP_WRITE_FIXTURES=1 writes it", path.display()));
        assert!(text == bytes, "{name}.json is out of date; ONEHOP_WRITE_FIXTURES=1 rewrites it");
        let record = Record::parse(&text).unwrap();
        assert!(record.composed && record.about.starts_with("composed: "), "{name}");
    }
    assert_eq!(fs::read_dir(folder()).unwrap().count(), ALL.len());
}

#[test]
fn every_finding_has_a_fix() {
    for (name, compose) in ALL {
        let diagnosis = diagnose(compose().0);
        for check in &diagnosis.checks {
            let bad = matches!(check.status, Status::Fail | Status::Warn | Status::Unknown);
            assert!(!bad || check.fix.is_some(), "{name}: {} has no fix: {}", check.id, check.found);
            assert!(!check.found.is_empty() && !check.why.is_empty(), "{name}: {}", check.id);
        }
        for row in &diagnosis.routes {
            assert!(!row.reason.is_empty(), "{name}: {} {}", row.device, row.route);
            assert!(row.verdict != Yes || row.fix.is_none(), "{name}");
        }
        for all in [false, true] {
            let text = render(&diagnosis, Style { colour: false, all });
            assert!(text.starts_with("recorded system: composed: ") && !text.contains('\x1b'), "{text}");
        }
    }
}

/// Programs parse this JSON: fields and values are stable, and every id is documented.
#[test]
fn the_json_is_as_documented() {
    let documented = fs::read_to_string(folder().join("../../../docs/doctor.md")).unwrap();
    for (name, compose) in ALL {
        let json = serde_json::to_value(diagnose(compose().0)).unwrap();
        let keys = |value: &serde_json::Value| {
            value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(keys(&json), "advice checks routes system", "{name}");
        for check in json["checks"].as_array().unwrap() {
            assert_eq!(keys(check), "about evidence fix found group id status why", "{name}");
            let (id, group) = (check["id"].as_str().unwrap(), check["group"].as_str().unwrap());
            assert!(documented.contains(&format!("`{id}`")), "docs/doctor.md does not name {id}");
            assert!(
                id.starts_with(&format!("{group}.")) || (id, group) == ("pci.garbage", "place"),
                "{id} {group}"
            );
            let status = check["status"].as_str().unwrap();
            assert!(["pass", "info", "unknown", "warn", "fail"].contains(&status), "{status}");
        }
        for row in json["routes"].as_array().unwrap() {
            assert_eq!(keys(row), "device direction fix gpu kind reason route verdict", "{name}");
            assert!(["nvme", "rdma", "sdr"].contains(&row["kind"].as_str().unwrap()));
            assert!(["to_gpu", "from_gpu"].contains(&row["direction"].as_str().unwrap()));
            assert!(["yes", "no", "untested"].contains(&row["verdict"].as_str().unwrap()));
        }
        for advice in json["advice"].as_array().unwrap() {
            assert_eq!(keys(advice), "change device direction gpu next now", "{name}");
        }
    }
}

#[test]
fn the_b550_machine_as_found() {
    let found = machine("b550-rtx3090-before");
    let drive = "0000:0b:00.0";
    for id in ["gpu.driver", "gpu.register_bar", "gpu.bar1", "gpu.dma_buf", "iommu.mode", "memory.lock"] {
        assert_eq!(found.status(id), Status::Warn, "{id}");
    }
    assert_eq!(found.status("gpu.link"), Status::Info, "an idle GPU's slow link is not a fault");
    assert_eq!((found.status("drive.link"), found.status("drive.limits")), (Status::Pass, Status::Unknown));
    assert!(!found.has("gpu.rebar"), "without root the capability is not shown");
    assert_eq!(found.route(drive, ToGpu, "cpu/pinned").0, Yes);
    let (verdict, reason, fix) = found.route(drive, ToGpu, "gpu/tier1");
    assert!(verdict == No && reason.contains("no IOMMU") && fix.contains("AMD-Vi"), "{reason} {fix}");
    assert_eq!(found.change(drive, ToGpu).0, Some("cpu/pinned"));
}

#[test]
fn the_b550_machine_afterwards() {
    let found = machine("b550-rtx3090-after");
    let drive = "0000:0b:00.0";
    assert_eq!((found.status("gpu.driver"), found.status("gpu.register_bar")), (Status::Pass, Status::Pass));
    assert_eq!((found.status("gpu.bar1"), found.status("gpu.rebar")), (Status::Pass, Status::Pass));
    assert_eq!(
        (found.status("path.p2p_write"), found.status("path.p2p_read")),
        (Status::Unknown, Status::Warn)
    );
    let (verdict, reason, fix) = found.route(drive, ToGpu, "gpu/tier1");
    assert!(
        verdict == Untested && reason.contains("forward writes") && fix.contains("--route gpu/tier1"),
        "{reason} {fix}"
    );
    let (verdict, _, fix) = found.route(drive, ToGpu, "gpu/tier2");
    assert!(verdict == No && fix.contains("RMForceStaticBar1"), "{fix}");
    let (verdict, reason, _) = found.route(drive, ToGpu, "cpu/cached");
    assert!(verdict == No && reason.contains("vfio-pci"), "{reason}");
    let (verdict, _, fix) = found.route(drive, ToGpu, "cpu/pinned");
    assert!(
        verdict == Untested && fix.contains("-d '0000:0b:00.0?via=pagemap'"),
        "by onehop's driver: {fix}"
    );
    assert_eq!(found.change(drive, ToGpu).1, Some("gpu/tier1"));
    assert!(found.change(drive, ToGpu).2.contains("?via=pagemap"));
}

#[test]
fn an_h100_behind_a_switch() {
    let found = machine("h100-switch-acs-on");
    let (drive, card) = ("0000:19:00.0", "0000:1a:00.0");
    assert_eq!((found.status("path.class"), found.status("path.acs")), (Status::Pass, Status::Warn));
    assert_eq!((found.status("gpu.dma_buf"), found.has("iommu.lazy")), (Status::Pass, false));
    assert_eq!((found.status("nic.present"), found.status("nic.distance")), (Status::Pass, Status::Pass));
    assert_eq!(found.route(card, ToGpu, "cpu/direct").0, Untested);
    let (verdict, reason, fix) = found.route(drive, ToGpu, "cpu/direct");
    assert!(
        verdict == No && reason.contains("BAR1 is not static") && fix.contains("RMForceStaticBar1"),
        "{reason}"
    );
    let found = machine("h100-switch-acs-off-module");
    assert_eq!((found.status("path.acs"), found.status("path.p2p_read")), (Status::Pass, Status::Pass));
    assert_eq!(found.status("iommu.lazy"), Status::Warn);
    for route in ["gpu/tier3", "gpu/posted", "cpu/direct"] {
        let (verdict, reason, fix) = found.route(drive, FromGpu, route);
        assert!(verdict == Untested && reason.starts_with("nothing known prevents it"), "{route}: {reason}");
        assert!(
            fix.contains(&format!("onehop write -d '{drive}?via=kmod' --lba N")) && fix.contains(route),
            "{fix}"
        );
    }
    assert_eq!(found.change(drive, ToGpu).1, Some("gpu/tier3"));
    let found = machine("h100-switch-not-root");
    assert_eq!((found.status("path.acs"), found.status("drive.limits")), (Status::Unknown, Status::Unknown));
    assert!(found.route(drive, ToGpu, "gpu/tier1").2.contains("root"));
}

#[test]
fn a_drive_bound_to_the_module() {
    let (found, drive) = (machine("h100-module-bound-strict"), "0000:19:00.0");
    for id in ["kernel.onehop", "kernel.onehop_device", "gpu.dma_buf", "drive.link"] {
        assert_eq!(found.status(id), Status::Pass, "{id}");
    }
    assert!(!found.has("iommu.lazy"), "its group is strict");
    let (verdict, reason, fix) = found.route(drive, ToGpu, "cpu/direct");
    assert_eq!(verdict, Untested, "{reason}");
    assert!(fix.contains(&format!("onehop read -d '{drive}?via=kmod'")), "{fix}");
    // The module lets the user open the drive; NVIDIA's driver does not let the user map the doorbells.
    let (verdict, _, fix) = found.route(drive, ToGpu, "gpu/tier3");
    assert!(verdict == No && fix.contains("PeerMappingOverride"), "{fix}");
    let (verdict, reason, _) = found.route(drive, ToGpu, "cpu/cached");
    assert!(verdict == No && reason.contains("onehop"), "{reason}");
}

#[test]
fn a_laptop_asleep() {
    let found = machine("laptop-vmd-gpu-asleep");
    assert_eq!((found.status("gpu.cuda"), found.status("gpu.link")), (Status::Fail, Status::Info));
    assert_eq!((found.status("drive.vmd"), found.status("drive.use")), (Status::Warn, Status::Info));
    assert_eq!(found.status("gpu.register_bar"), Status::Warn, "565 under 6.11 has no follow_pfn");
    assert!(found.has("gpu.others"));
    let root = Root::recorded(ALL.iter().find(|(name, _)| *name == "laptop-vmd-gpu-asleep").unwrap().1().0);
    let tree = topo::tree(&facts(&root), false);
    assert!(tree.contains("└─ 10000:e1:00.0"), "the drive is missing, only its port should be: {tree}");
    assert!(found.routes.iter().all(|row| row.verdict == No));
}

#[test]
fn an_am5_desktop() {
    let (mounted, free) = ("0000:02:00.0", "0000:03:00.0");
    let off = machine("am5-rtx5090-rebar-off");
    assert_eq!((off.status("gpu.bar1"), off.status("gpu.rebar")), (Status::Warn, Status::Warn));
    assert!(off.route(free, ToGpu, "cpu/direct").2.contains("Resizable BAR"));
    let on = machine("am5-rtx5090-rebar-on");
    assert_eq!((on.status("gpu.bar1"), on.status("gpu.static_bar1")), (Status::Pass, Status::Pass));
    let (verdict, reason, _) = on.route(mounted, ToGpu, "cpu/direct");
    assert!(verdict == No && reason.contains("this system runs from nvme0n1"), "{reason}");
    assert_eq!(on.route(mounted, ToGpu, "cpu/cached").0, Yes);
    for route in ["gpu/posted", "gpu/tier2", "cpu/direct"] {
        assert_eq!(on.route(free, ToGpu, route).0, Untested, "{route}");
    }
    let (verdict, reason, _) = on.route(free, ToGpu, "gpu/tier3");
    assert!(verdict == Untested && reason.contains("drop reads"), "{reason}");
    assert_eq!(on.change(free, ToGpu).0, Some("cpu/pinned"));
    let bad = machine("am5-rtx5090-static-bar1-misplaced");
    assert_eq!(bad.status("gpu.static_bar1"), Status::Warn);
}

#[test]
fn an_sdr_host() {
    let board = "0000:02:00.0";
    let identity = machine("sdr-rtx4090-gen2x2-iommu-pt");
    assert_eq!((identity.status("sdr.mask"), identity.status("sdr.link")), (Status::Fail, Status::Info));
    let on = machine("sdr-rtx4090-gen2x2-iommu-on");
    assert_eq!(on.status("sdr.mask"), Status::Pass);
    let (verdict, reason, _) = on.route(board, ToGpu, "cpu/direct");
    assert!(verdict == No && reason.contains("dma-buf"), "GeForce boards export no dma-bufs: {reason}");
    assert_eq!(on.route(board, ToGpu, "cpu/pinned").0, Untested);
}

#[test]
fn virtual_machines_containers_and_servers() {
    let vm = machine("vm-a100-passthrough");
    assert_eq!((vm.status("place.vm"), vm.status("path.p2p_write")), (Status::Info, Status::Unknown));
    // In this machine the GPU has no port above it.
    assert_eq!(vm.status("gpu.link"), Status::Pass);
    assert_eq!(vm.route("0000:00:06.0", ToGpu, "cpu/pinned").0, Yes);
    let inside = machine("container-h100");
    assert_eq!(
        (inside.status("place.container"), inside.status("kernel.io_uring")),
        (Status::Warn, Status::Warn)
    );
    assert_eq!(
        (inside.status("kernel.p2pdma"), inside.status("file.chain")),
        (Status::Unknown, Status::Warn)
    );
    assert_eq!((inside.status("place.user"), inside.status("file.direct_io")), (Status::Warn, Status::Pass));
    let bare = machine("server-no-gpu");
    assert_eq!((bare.status("gpu.present"), bare.routes.len()), (Status::Info, 0));
    assert!(!bare.has("gpu.cuda") && render(&bare, Style { colour: false, all: false }).contains("-g emu"));
    let far = machine("epyc-two-sockets");
    assert_eq!((far.status("path.class"), far.status("gpu.static_bar1")), (Status::Warn, Status::Pass));
    assert!(far.route("0000:81:00.0", ToGpu, "cpu/direct").1.contains("between sockets"));
    let locked = machine("xeon-lockdown-proprietary");
    assert_eq!(
        (locked.status("kernel.lockdown"), locked.status("gpu.register_bar")),
        (Status::Warn, Status::Warn)
    );
    assert!(locked.route("0000:19:00.0", ToGpu, "cpu/direct").1.contains("lockdown"));
    let old = machine("old-driver-new-kernel");
    assert_eq!(old.status("gpu.register_bar"), Status::Warn);
    assert!(old.route("0000:19:00.0", ToGpu, "gpu/tier1").2.contains("570.133.07"));
}

#[test]
fn the_diagnosis_can_be_restricted_to_one_device() {
    let root = Root::recorded(ALL[3].1().0);
    let only = Only { gpu: None, device: Some("0000:03:00.0".parse().unwrap()) };
    let found = examine(&facts(&root), &only, None);
    assert!(!found.routes.is_empty() && found.routes.iter().all(|row| row.device == "0000:03:00.0"));
}

#[test]
fn links_behind_a_cable_set_no_limit() {
    let found = machine("thunderbolt-rtx4090");
    for id in ["gpu.link", "path.limit"] {
        assert_eq!(found.status(id), Status::Info, "{id}");
        assert!(found.found(id).contains("cable"), "{}", found.found(id));
    }
}

#[test]
fn a_gpu_bound_to_another_driver() {
    let (found, drive) = (machine("two-gpus-one-vfio"), "0000:42:00.0");
    assert!(found.found("gpu.present").contains("bound to vfio-pci"));
    let row = found.routes.iter().find(|row| row.gpu == "0000:c1:00.0" && row.route == "cpu/pinned").unwrap();
    assert!(row.verdict == No && row.reason.contains("bound to vfio-pci"), "{}", row.reason);
    assert!(row.fix.as_deref().unwrap().contains("0000:c1:00.0/driver_override"));
    assert_eq!(found.route(drive, ToGpu, "cpu/pinned").0, Yes, "the other GPU works");
    let checks = found.checks.iter().filter(|check| check.id == "gpu.static_bar1");
    assert_eq!(checks.count(), 1, "only NVIDIA's driver has a static BAR1");
}

#[test]
fn a_group_that_holds_the_gpu() {
    let (found, drive) = (machine("nested-switch-shared-group"), "0000:46:00.0");
    assert_eq!((found.status("path.class"), found.status("iommu.group")), (Status::Pass, Status::Warn));
    let (verdict, reason, fix) = found.route(drive, ToGpu, "cpu/direct");
    assert!(verdict == No && reason.contains("0000:45:00.0"), "{reason}");
    assert!(fix.contains("CUDA needs the GPU") && !fix.contains("to vfio-pci"), "{fix}");
}

#[test]
fn fixes_for_arm_name_no_intel_options() {
    let found = machine("arm-no-smmu");
    let fixes: Vec<_> = found.checks.iter().filter_map(|check| check.fix.as_deref()).collect();
    assert!(fixes.iter().all(|fix| !fix.contains("intel_iommu") && !fix.contains("VT-d")), "{fixes:?}");
    assert_eq!((found.status("iommu.mode"), found.status("path.p2p_write")), (Status::Warn, Status::Unknown));
}

#[test]
fn missing_features_are_not_recommended() {
    let found = diagnose(unusual::no_namespace().0);
    assert_eq!(found.status("drive.link"), Status::Unknown);
    assert!(found.found("path.limit").starts_with("at most"), "{}", found.found("path.limit"));
    let (_, reason, fix) = found.route("0000:19:00.0", ToGpu, "gpu/tier1");
    assert!(reason.contains("no namespace") && fix.contains("create-ns"), "{reason} {fix}");
    let found = diagnose(unusual::intel_two_bridges().0);
    for id in ["gpu.driver", "gpu.dma_buf"] {
        assert_eq!(found.status(id), Status::Info, "open modules do not drive a Volta: {id}");
    }
}

#[test]
fn hidden_or_malformed_data_is_unknown() {
    let found = diagnose(unusual::no_pci().0);
    assert_eq!(found.status("gpu.driver"), Status::Unknown, "CUDA works, so the driver is loaded");
    let found = diagnose(unusual::garbage().0);
    assert_eq!(
        (found.status("gpu.driver"), found.status("kernel.version")),
        (Status::Unknown, Status::Unknown)
    );
    assert!(!found.found("path.p2p_write").ends_with(' '), "{}", found.found("path.p2p_write"));
    let (verdict, reason, _) = found.route("0000:1a:00.0", ToGpu, "cpu/direct");
    assert_eq!(verdict, Untested, "{reason}");
    let found = diagnose(unusual::mounts_garbage().0);
    assert_eq!(found.status("drive.use"), Status::Unknown);
    assert_eq!(found.route("0000:19:00.0", ToGpu, "gpu/tier1").0, No);
}

#[test]
fn a_desktop_die_is_recognised_despite_its_name() {
    let found = machine("desktop-epyc-l4");
    assert_eq!(
        (found.status("path.p2p_write"), found.status("path.p2p_read")),
        (Status::Unknown, Status::Warn)
    );
    let limit = found.found("path.limit");
    assert!(
        limit.starts_with("7.9 GB/s") && limit.contains("idle"),
        "an idle GPU's link is no limit: {limit}"
    );
    let far = machine("epyc-two-sockets");
    assert!(!far.found("path.p2p_write").contains("desktop"), "server EPYCs are not desktops");
}

#[test]
fn meaningless_links_are_not_faults() {
    let found = machine("grace-hopper");
    for id in ["gpu.link", "path.limit", "path.class"] {
        assert_eq!(found.status(id), Status::Info, "{id}: {}", found.found(id));
    }
    assert!(found.found("place.vm").contains("Server of one Grace Hopper"));
    let library = found.found("cufile.library");
    assert!(library.starts_with("programs ") && library.contains("onehop cufile run"), "{library}");
    let found = diagnose(rare::qemu().0);
    for id in ["gpu.link", "drive.link", "path.limit"] {
        assert_eq!(found.status(id), Status::Info, "{id}: {}", found.found(id));
    }
    let window = found.checks.iter().find(|check| check.id == "gpu.bar1").unwrap();
    assert!(window.fix.as_deref().unwrap().contains("its host"), "{window:?}");
    assert!(found.found("gpu.register_bar").contains("not loaded"));
}

#[test]
fn assigned_virtual_functions_are_not_gpus() {
    let found = machine("vgpu-host");
    assert!(found.found("gpu.present").ends_with("; 2 virtual functions for virtual machines"));
    assert!(found.routes.iter().all(|row| row.gpu == "0000:17:00.0"));
    let link = |about: &str| {
        let check = found.checks.iter().find(|c| c.id == "drive.link" && c.about.as_deref() == Some(about));
        check.unwrap().found.clone()
    };
    assert_eq!(
        link("0000:18:00.1"),
        link("0000:18:00.0"),
        "a virtual function has the link of its physical function"
    );
    let limits = found
        .checks
        .iter()
        .find(|c| c.fix.as_deref().is_some_and(|fix| fix.starts_with("Run onehop drive identify")));
    assert!(limits.unwrap().fix.as_deref().unwrap().contains("-d 0000:18:00.1"));
    let tree = topo::tree(&facts(&Root::recorded(rare::vgpu_host().0)), false);
    assert!(tree.contains("virtual function of 0000:17:00.0"), "{tree}");
    // A virtual function that CUDA shows is a GPU.
    let mut machine = rare::vgpu_host();
    machines::cuda(
        &mut machine,
        12040,
        &[machines::cuda_gpu("0000:17:00.4", "A30-4C", 4, machines::works())],
    );
    assert!(diagnose(machine.0).routes.iter().any(|row| row.gpu == "0000:17:00.4"));
}

#[test]
fn gpus_that_only_cuda_shows() {
    let found = machine("jetson-orin");
    assert_eq!((found.status("gpu.present"), found.status("gpu.dma_buf")), (Status::Info, Status::Info));
    assert!(!found.has("gpu.bar1") && found.found("gpu.present").contains("CPU's memory"));
    let found = diagnose(rare::wsl().0);
    let present = found.checks.iter().find(|check| check.id == "gpu.present").unwrap();
    assert!(present.fix.as_deref().unwrap().contains("WSL"), "{present:?}");
    assert_eq!(found.status("gpu.register_bar"), Status::Unknown, "the driver's version is unknown");
    assert!(!found.has("gpu.others") && found.found("place.vm").contains("WSL"));
}

#[test]
fn long_names_are_truncated() {
    let mut machine = rare::vgpu_host();
    machine.file("/sys/bus/pci/devices/0000:18:00.0/nvme/nvme0/model", &"M".repeat(100_000));
    let found = diagnose(machine.0);
    assert!(
        found.found("drive.present").len() < 100
            && render(&found, Style { colour: false, all: true }).len() < 40_000
    );
}

#[test]
fn only_the_closest_of_many_pairs_are_shown() {
    let found = diagnose(rare::many().0);
    let pairs = |text: &str| text.matches("  <->  ").count();
    let text = render(&found, Style { colour: false, all: false });
    assert_eq!(pairs(&text), 16, "two GPUs for each of eight drives: {text}");
    assert!(text.contains("not shown: 48 pairs") && !text.contains("SYS:"), "{text}");
    assert_eq!(pairs(&render(&found, Style { colour: false, all: true })), 64);
    assert_eq!(found.advice.len(), 128, "the JSON contains all pairs");
}

#[test]
fn the_module_claims_a_drive_that_shares_the_gpus_group() {
    let (_, compose) = ALL.iter().find(|(name, _)| *name == "nested-switch-shared-group").unwrap();
    let mut machine = compose();
    machine.there("/sys/module/onehop");
    assert_eq!(diagnose(machine.0).status("iommu.group"), Status::Info);
}
