//! `onehop drive list`: lists the NVMe controllers of this machine and their users.

use onehop_fabrics::Subsystem;
use onehop_pci::{BlockDevice, Root, Usage};
use onehop_transfer::controllers;
use serde_json::{Value, json};

use crate::commands::CommandContext;
use crate::drives;
use crate::error::Result;
use crate::report::{Report, ReportText};
use crate::units;

/// List this machine's NVMe drives and their users; changes nothing
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  onehop drive list\n  onehop drive list -d sim:mem:64M --json")]
pub(crate) struct Args {
    /// Also list this drive, such as a simulated one. With nvme-tcp://HOST:PORT, list the subsystems that the
    /// discovery service there knows
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    drive: Option<String>,
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let found = Usage::all(&Root::here())?;
    let mut text = ReportText::default();
    for controller in &found {
        describe(controller, &mut text);
    }
    if found.is_empty() {
        text.line("no NVMe controllers in /sys/bus/pci (class 0x0108xx)");
    }
    let mut given = None;
    let stop = &context.stop;
    let subsystems = |spec| {
        controllers::subsystems(spec, &stop.signal())
            .map_err(|e| stop.check().err().unwrap_or_else(|| e.into()))
    };
    let subsystems = args.drive.as_deref().map(subsystems).transpose()?.flatten();
    for one in subsystems.iter().flatten() {
        text.line(subsystem(one));
    }
    if let Some(spec) = args.drive.as_ref().filter(|_| subsystems.is_none()) {
        let drive = drives::open(spec, &context.stop)?;
        let identity = drive.identity();
        let (model, serial) = (identity.model(), identity.serial());
        let mark = if identity.simulated { " (simulated)" } else { "" };
        text.line(format_args!("{}{mark}  {model}, serial {serial}", drive.name()));
        for ns in drive.namespaces() {
            let (id, size) = (ns.nsid, units::bytes(ns.data_bytes()));
            text.line(format_args!("  namespace {id}: {size} in blocks of {} bytes", ns.format.lba_bytes()));
        }
        given = Some(json!({
            "drive": drive.name(), "model": model, "serial": serial,
            "simulated": super::simulated_drive(identity.simulated),
            "namespaces": drive.namespaces().iter().map(|ns| ns.nsid).collect::<Vec<_>>(),
        }));
    }
    text.line("simulated drives are listed only by name: -d sim:mem:64M or -d sim:IMAGE");
    let mut document = json!({ "drives": found, "given": given });
    if let (Some(list), Some(fields)) = (subsystems, document.as_object_mut()) {
        fields.insert("subsystems".into(), list.iter().map(subsystem_document).collect());
    }
    Report::new(document, text)
}

/// Formats a subsystem as a value of `-d`, with a note if this build cannot use it.
fn subsystem(one: &Subsystem) -> String {
    let Subsystem { nqn, transport, address, service, .. } = one;
    let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
    let note = match (one.is_discovery, one.needs_tls) {
        (true, _) => "  (a discovery service)",
        (false, true) => "  (requires TLS, which this build does not have)",
        (false, false) if transport != &"tcp" => "  (a transport that this build does not have)",
        (false, false) => "",
    };
    format!("nvme-{transport}://{host}:{service}/{nqn}{note}")
}

fn subsystem_document(one: &Subsystem) -> Value {
    json!({
        "nqn": one.nqn, "transport": one.transport, "address": one.address, "service": one.service,
        "discovery": one.is_discovery, "requires_tls": one.needs_tls,
    })
}

fn describe(controller: &Usage, text: &mut ReportText) {
    let driver = controller.driver.as_deref().map_or("no driver".into(), |name| format!("driver {name}"));
    let Usage { address, vendor, device, .. } = controller;
    let model = controller.model.as_deref().unwrap_or("unknown model");
    let serial = controller.serial.as_deref().unwrap_or("unknown");
    let in_use = match (controller.in_use, controller.undetermined.is_empty()) {
        (true, _) => "in use",
        (false, true) => "not in use",
        (false, false) => "may be in use",
    };
    text.line(format_args!("{address}  {vendor}:{device}  {model}, serial {serial}, {driver}, {in_use}"));
    for ns in &controller.namespaces {
        text.line(format_args!("  {}: {}{}", ns.name, units::bytes(ns.bytes), users(ns)));
    }
    if !controller.opened_by.is_empty() {
        text.line(format_args!("  controller device open in {}", controller.opened_by.join(", ")));
    }
    if !controller.driven_by.is_empty() {
        text.line(format_args!("  driven by {}", controller.driven_by.join(", ")));
    }
    for why in &controller.undetermined {
        text.line(format_args!("  unknown: {why}"));
    }
}

fn users(ns: &BlockDevice) -> String {
    let mut words = String::new();
    if !ns.mounted.is_empty() {
        words.push_str(&format!(", mounted on {}", ns.mounted.join(", ")));
    }
    if !ns.held_by.is_empty() {
        words.push_str(&format!(", held by {}", ns.held_by.join(", ")));
    }
    if ns.swap {
        words.push_str(", used for swap");
    }
    if let Some(claimed) = ns.claimed.as_ref().filter(|_| words.is_empty()) {
        words.push_str(&format!(", {claimed} is mounted, held or exclusively open elsewhere"));
    }
    if !ns.opened_by.is_empty() {
        words.push_str(&format!(", open in {}", ns.opened_by.join(", ")));
    }
    words
}
