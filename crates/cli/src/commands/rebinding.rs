//! Tests the JSON documents of `drive bind`, `unbind` and `recover` on a folder that stands for a machine.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::time::Duration;

use boon::{Compiler, Schemas};
use onehop_pci::Root;
use serde_json::{Value, json};

use super::{bind, recover, schema};
use crate::report::Report;

const DRIVE: &str = "0000:0b:00.0";

/// Files of a drive bound to vfio-pci. No kernel acts on writes to them, so nothing changes.
struct DriveFolder(PathBuf);

impl DriveFolder {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("onehop-rebinding-{}", std::process::id()));
        let device = format!("sys/bus/pci/devices/{DRIVE}");
        let of_device = |file: &str| format!("{device}/{file}");
        let put = |path: &str, bytes: &[u8]| {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        let mut config = [0; 64];
        config[..6].copy_from_slice(&[0x4d, 0x14, 0x0a, 0xa8, 0x06, 0x04]);
        put(&of_device("config"), &config);
        for (file, text) in [("class", "0x010802\n"), ("driver_override", "vfio-pci\n"), ("remove", "")] {
            put(&of_device(file), text.as_bytes());
        }
        for file in ["drivers_probe", "rescan", "drivers/vfio-pci/bind", "drivers/vfio-pci/unbind"] {
            put(&format!("sys/bus/pci/{file}"), b"");
        }
        put("sys/kernel/iommu_groups/17/type", b"DMA\n");
        put("proc/self/mountinfo", b"");
        symlink("../../drivers/vfio-pci", folder.join(of_device("driver"))).unwrap();
        symlink("../../../../kernel/iommu_groups/17", folder.join(of_device("iommu_group"))).unwrap();
        Self(folder)
    }
}

impl Drop for DriveFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The document of a successful command. It must match the command's schema, without other fields.
fn document(command: &str, report: Report) -> Value {
    let (document, _, failed) = report.into_parts().unwrap();
    assert!(failed.is_none(), "{document:#}");
    let schema = schema::of(command);
    let known = &schema["anyOf"][0];
    let common = &schema["$defs"]["document"]["properties"];
    for field in document.as_object().unwrap().keys() {
        let is_known = known["properties"].get(field).or_else(|| common.get(field)).is_some();
        assert!(is_known, "onehop schema {command} lacks {field}");
    }
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource("schema.json", schema).unwrap();
    // The first variant is the success; the other is a failure.
    let index = compiler.compile("schema.json#/anyOf/0", &mut schemas).unwrap_or_else(|e| panic!("{e:#}"));
    schemas.validate(&document, index).unwrap_or_else(|e| panic!("{command}: {e:#}\n{document:#}"));
    document
}

#[test]
fn successes_match_their_schemas() {
    let machine = DriveFolder::new();
    let root = Root::below(&machine.0);
    let bound = document("drive bind", bind::change(&root, DRIVE, Some("vfio-pci")).unwrap());
    let expected = json!({
        "schema": 1, "drive": DRIVE, "before": "vfio-pci", "driver": "vfio-pci", "iommu_group": "17", "onehop_missing": null,
    });
    assert_eq!(bound, expected);
    let unbound = document("drive unbind", bind::change(&root, DRIVE, None).unwrap());
    assert_eq!((&unbound["before"], &unbound["drive"]), (&json!("vfio-pci"), &json!(DRIVE)));
    // As reported by the kernel module onehop.
    let missing = machine.0.join(format!("sys/bus/pci/devices/{DRIVE}/onehop_missing"));
    fs::write(missing, "an IOMMU\n").unwrap();
    let bound = document("drive bind", bind::change(&root, DRIVE, Some("vfio-pci")).unwrap());
    assert_eq!(bound["onehop_missing"], "an IOMMU");
    let timeout = Duration::from_secs(30);
    let recovered = document("drive recover", recover::recover(&root, DRIVE, timeout).unwrap());
    assert_eq!((&recovered["drive"], &recovered["was_present"]), (&json!(DRIVE), &json!(true)));
}
