//! `onehop drive bind` and `unbind`: rebind a drive until the next boot or rebind.

use onehop_pci::{DeviceKind, Root, Usage};
use serde_json::json;

use crate::drives::{self, RealDriveArg};
use crate::error::Result;
use crate::report::{Report, ReportText};

/// Bind a drive to vfio-pci or the module onehop, so that programs can use it without root
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop drive bind -d 0000:0b:00.0\n  onehop drive bind -d 0000:0b:00.0 --driver onehop\n\nOther commands detach a drive from its driver \
                  and rebind it at the end, which needs root. A drive bound by this command can also be used by other \
                  users: give them the printed device file (chown USER /dev/vfio/N)."
)]
pub(crate) struct BindArgs {
    #[command(flatten)]
    drive: RealDriveArg,
    /// The kernel driver to bind the drive to
    #[arg(long, value_name = "NAME", default_value = "vfio-pci", value_parser = ["vfio-pci", "onehop"])]
    driver: String,
}

/// Rebind a drive to the kernel's own driver
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop drive unbind -d 0000:0b:00.0")]
pub(crate) struct UnbindArgs {
    #[command(flatten)]
    drive: RealDriveArg,
}

pub(crate) fn bind(args: &BindArgs) -> Result<Report> {
    change(&Root::here(), &args.drive.drive, Some(&args.driver))
}

pub(crate) fn unbind(args: &UnbindArgs) -> Result<Report> {
    change(&Root::here(), &args.drive.drive, None)
}

pub(super) fn change(root: &Root, drive: &str, driver: Option<&str>) -> Result<Report> {
    let name = drives::address(drive)?;
    drives::present(root, &name)?;
    let before = Usage::of(root, name.address)?;
    let now = onehop_pci::bind(root, DeviceKind::Drive, name.address, driver)?;
    let group = root.link_name(&format!("/sys/bus/pci/devices/{}/iommu_group", name.address));
    let mut text = ReportText::default();
    text.row("drive", name.address);
    text.row("before", before.driver.as_deref().unwrap_or("no driver"));
    text.row("now", now.as_deref().unwrap_or("no driver: no loaded driver matches it"));
    if let (Some(group), Some("vfio-pci")) = (&group, now.as_deref()) {
        text.row("file", format!("/dev/vfio/{group}: users who can open it can use the drive"));
        let devices =
            root.list(&format!("/sys/bus/pci/devices/{}/vfio-dev", name.address)).unwrap_or_default();
        for device in devices {
            text.row("file", format!("/dev/vfio/devices/{device} and /dev/iommu, for `?via=iommufd`"));
        }
    }
    let missing = root.text(&format!("/sys/bus/pci/devices/{}/onehop_missing", name.address)).ok();
    if let Some(missing) = &missing {
        let access = match missing.as_str() {
            "nothing" => "users who can open it can use the drive".to_owned(),
            missing => format!("root only, because of: {missing} (docs/kernel-module.md)"),
        };
        text.row("file", format!("/dev/onehop-{}: {access}", name.address));
    }
    Report::new(
        json!({ "drive": name.address, "before": before.driver, "driver": now, "iommu_group": group, "onehop_missing": missing }),
        text,
    )
}
