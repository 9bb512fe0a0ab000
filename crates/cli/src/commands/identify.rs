//! `onehop drive identify`: a drive's identity, features and namespaces.

use onehop_drive::{Drive, Identity, Namespace};
use onehop_proto::identify::Controller;
use serde_json::{Value, json};

use crate::commands::CommandContext;
use crate::drives::{self, DriveArg};
use crate::error::Result;
use crate::report::{Report, ReportText, number};
use crate::units;

/// Show a drive's identity, features and namespaces
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  onehop drive identify -d sim:mem:64M\n  \
                        onehop drive identify -d 'sim:disk.img?ns=2' --nsid 2 --json")]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
    /// Show only this namespace
    #[arg(long, value_name = "N")]
    nsid: Option<u32>,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let drive = drives::open(&args.drive.drive, &context.stop)?;
    let namespaces: Vec<&Namespace> = match args.nsid {
        Some(nsid) => vec![drive.namespace(nsid)?],
        None => drive.namespaces().iter().collect(),
    };
    let mut text = ReportText::default();
    describe(&drive, &mut text);
    for ns in &namespaces {
        describe_namespace(ns, &mut text);
    }
    let mut document = document(&drive);
    document["namespaces"] = namespaces.iter().map(|ns| namespace(ns)).collect();
    Report::new(document, text)
}

fn describe(drive: &Drive, text: &mut ReportText) {
    let identity = drive.identity();
    let view = identity.controller();
    text.row("drive", format!("{}{}", drive.name(), if identity.simulated { " (simulated)" } else { "" }));
    text.row("model", identity.model());
    text.row("serial", identity.serial());
    text.row("firmware", identity.firmware());
    text.row(
        "version",
        format!("NVMe {}; PCI vendor {:04x}, controller {}", identity.version, view.vid(), view.cntlid()),
    );
    let limit = format!("{} per command", units::bytes(identity.max_transfer));
    let note = if view.mdts() == 0 { " (onehop's limit; the drive has none)" } else { "" };
    text.row("transfers", format!("at most {limit}{note}, by {}", pointers(&view)));
    text.row(
        "queues",
        format!(
            "{} granted, at most {} entries each, doorbell stride {} bytes",
            identity.queues,
            u32::from(identity.cap.mqes_z()) + 1,
            4u64 << identity.cap.dstrd()
        ),
    );
    text.row("pages", format!("{} to {}", page(identity.cap.mpsmin()), page(identity.cap.mpsmax())));
    let cache = if view.vwc().present() {
        "volatile: a flush makes writes durable"
    } else {
        "no volatile write cache"
    };
    text.row("cache", cache);
    text.row(
        "buffer",
        if identity.cap.cmbs() {
            "controller memory buffer (CMB)"
        } else {
            "no controller memory buffer (CMB)"
        },
    );
    text.row("commands", abilities(&view).join(", "));
}

fn page(shift: u8) -> String {
    units::bytes(4096 << shift.min(15))
}

fn pointers(view: &Controller<'_>) -> &'static str {
    if view.sgls().usable() { "PRPs or SGLs" } else { "PRPs" }
}

/// Names of the supported commands and features.
fn abilities(view: &Controller<'_>) -> Vec<&'static str> {
    let (oncs, oacs) = (view.oncs(), view.oacs());
    let all = [
        (oncs.compare(), "compare"),
        (oncs.write_zeroes(), "write zeroes"),
        (oncs.dataset_management(), "deallocate"),
        (oncs.verify(), "verify"),
        (oncs.copy(), "copy"),
        (oncs.write_uncorrectable(), "write uncorrectable"),
        (oncs.reservations(), "reservations"),
        (oncs.timestamp(), "timestamp"),
        (oacs.format(), "format"),
        (oacs.firmware(), "firmware download"),
        (oacs.security(), "security commands"),
        (oacs.namespaces(), "namespace management"),
        (oacs.self_test(), "self-test"),
        (oacs.doorbell_buffer(), "shadow doorbells"),
        (oacs.virtualization(), "virtualisation"),
    ];
    let mut can = vec!["read", "write", "flush"];
    can.extend(all.into_iter().filter(|(able, _)| *able).map(|(_, words)| words));
    can
}

fn describe_namespace(ns: &Namespace, text: &mut ReportText) {
    let format = ns.medium;
    let metadata = match (format.metadata, format.extended) {
        (0, _) => String::new(),
        (bytes, true) => format!(", each followed by {bytes} bytes of metadata"),
        (bytes, false) => format!(", {bytes} bytes of separate metadata"),
    };
    text.row(
        &format!("namespace {}", ns.nsid),
        format!(
            "{} in {} blocks of {} bytes{metadata}{}",
            units::bytes(ns.data_bytes()),
            ns.blocks,
            format.lba_bytes(),
            if format.pi == 0 { String::new() } else { format!(", protection type {}", format.pi) }
        ),
    );
}

fn document(drive: &Drive) -> Value {
    let identity: &Identity = drive.identity();
    let view = identity.controller();
    let cap = identity.cap;
    json!({
        "drive": drive.name(),
        "simulated": super::simulated_drive(identity.simulated),
        "model": identity.model(),
        "serial": identity.serial(),
        "firmware": identity.firmware(),
        "version": identity.version.to_string(),
        "vendor": format!("{:#06x}", view.vid()),
        "subsystem_vendor": format!("{:#06x}", view.ssvid()),
        "controller_id": view.cntlid(),
        "subsystem_nqn": view.subnqn().to_string(),
        "capacity_bytes": number(view.tnvmcap()),
        "max_transfer_bytes": identity.max_transfer,
        "mdts": view.mdts(),
        "queue_count": identity.queues,
        "queue_entries": u32::from(cap.mqes_z()) + 1,
        "doorbell_stride_bytes": 4u64 << cap.dstrd(),
        "page_min_bytes": 4096u64 << cap.mpsmin(),
        "page_max_bytes": 4096u64 << cap.mpsmax(),
        "ready_timeout_ms": cap.timeout_ms(),
        "cmb": cap.cmbs(),
        "pmr": cap.pmrs(),
        "sgl": view.sgls().usable(),
        "volatile_cache": view.vwc().present(),
        "retry_delays_ms": (1..=3).map(|crd| view.retry_delay_ms(crd)).collect::<Vec<_>>(),
        "host_memory_pages_wanted": view.hmpre(),
        "error_log_size": u16::from(view.elpe_z()) + 1,
        "abilities": abilities(&view),
        "active_namespaces": drive.namespaces().iter().map(|ns| ns.nsid).collect::<Vec<_>>(),
    })
}

fn namespace(ns: &Namespace) -> Value {
    let view = ns.identify();
    let formats: Vec<_> = (0..=view.nlbaf_z())
        .filter_map(|index| view.lbaf(index))
        .map(|f| json!({ "block_shift": f.lbads(), "metadata_bytes": f.ms() }))
        .collect();
    json!({
        "nsid": ns.nsid,
        "blocks": ns.blocks,
        "block_bytes": ns.format.lba_bytes(),
        "metadata_bytes": ns.medium.metadata,
        "metadata_extended": ns.medium.extended,
        "protection_type": ns.medium.pi,
        "bytes": ns.data_bytes(),
        "used_blocks": view.nuse(),
        "capacity_blocks": view.ncap(),
        "format_index": view.format_index(),
        "formats": formats,
        "nguid": units::hex(&view.nguid()),
        "eui64": units::hex(&view.eui64()),
    })
}
