//! `onehop drive dump-bar0`: shows the controller's registers by name, without resetting it.

use onehop_drive::Options;
use onehop_os::Registers;
use onehop_proto::regs::{Aqa, Cap, Cc, Cmbloc, Cmbmsc, Cmbsts, Cmbsz, Crto, Csts, Version, offset as at};
use serde_json::{Value, json};

use crate::commands::CommandContext;
use crate::drives::{self, DriveArg};
use crate::error::Result;
use crate::report::{Report, ReportText};

/// Show a drive's registers (BAR0), decoded
#[derive(clap::Args)]
#[command(after_help = "Example:\n  onehop drive dump-bar0 -d 'sim:mem:64M?cmb=16M'")]
pub(crate) struct Args {
    #[command(flatten)]
    drive: DriveArg,
    /// Initialize the controller first, which resets it
    #[arg(long)]
    up: bool,
}

type Fields = Vec<(&'static str, u64)>;

/// A register: its offset, name, bits, meaning and fields.
struct Register {
    at: u32,
    name: &'static str,
    bits: u8,
    meaning: &'static str,
    fields: fn(u64) -> Fields,
}

const fn register(
    at: u32,
    name: &'static str,
    bits: u8,
    meaning: &'static str,
    fields: fn(u64) -> Fields,
) -> Register {
    Register { at, name, bits, meaning, fields }
}

/// The common registers, and those of boot partitions, the controller memory buffer and NVMe 2.0.
const REGISTERS: [Register; 21] = [
    register(at::CAP, "CAP", 64, "capabilities", cap),
    register(at::VS, "VS", 32, "version", version),
    register(at::INTMS, "INTMS", 32, "interrupt mask set", no_fields),
    register(at::INTMC, "INTMC", 32, "interrupt mask clear", no_fields),
    register(at::CC, "CC", 32, "configuration", cc),
    register(at::CSTS, "CSTS", 32, "status", csts),
    register(at::NSSR, "NSSR", 32, "subsystem reset", no_fields),
    register(at::AQA, "AQA", 32, "admin queue sizes", aqa),
    register(at::ASQ, "ASQ", 64, "admin submission queue", no_fields),
    register(at::ACQ, "ACQ", 64, "admin completion queue", no_fields),
    register(at::CMBLOC, "CMBLOC", 32, "memory buffer location", cmbloc),
    register(at::CMBSZ, "CMBSZ", 32, "memory buffer size", cmbsz),
    register(at::BPINFO, "BPINFO", 32, "boot partition information", no_fields),
    register(at::BPRSEL, "BPRSEL", 32, "boot partition read select", no_fields),
    register(at::BPMBL, "BPMBL", 64, "boot partition memory buffer", no_fields),
    register(at::CMBMSC, "CMBMSC", 64, "memory buffer control", cmbmsc),
    register(at::CMBSTS, "CMBSTS", 32, "memory buffer status", cmbsts),
    register(at::CMBEBS, "CMBEBS", 32, "memory buffer elasticity", no_fields),
    register(at::CMBSWTP, "CMBSWTP", 32, "memory buffer write throughput", no_fields),
    register(at::NSSD, "NSSD", 32, "subsystem shutdown", no_fields),
    register(at::CRTO, "CRTO", 32, "ready timeouts", crto),
];

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let found = drives::find(&args.drive.drive, &context.stop)?;
    let port = &found.backend;
    let (regs, name, simulated) = (port.regs.clone(), port.name.clone(), port.simulated);
    // Kept alive while registers are read, because dropping it shuts the drive down.
    let up = args.up.then(|| drives::bring_up(found, Options::default(), &context.stop)).transpose()?;
    if Cap(regs.read64(at::CAP)).gone() {
        return Err(onehop_drive::Error::Gone { drive: name, register: "CAP" }.into());
    }
    let mut text = ReportText::default();
    let state = if up.is_some() { "initialized" } else { "not initialized by onehop" };
    text.row("drive", format!("{name}{}, {state}", if simulated { " (simulated)" } else { "" }));
    text.row("bar0", format!("{} bytes", regs.size()));
    let mut list = Vec::new();
    for register in REGISTERS.iter().filter(|r| r.at + u32::from(r.bits) / 8 <= regs.size()) {
        list.push(dump(register, &*regs, &mut text));
    }
    Report::new(
        json!({
            "drive": name, "simulated": super::simulated_drive(simulated), "up": up.is_some(), "bytes": regs.size(), "registers": list,
        }),
        text,
    )
}

fn dump(register: &Register, regs: &dyn Registers, text: &mut ReportText) -> Value {
    let wide = register.bits == 64;
    let value = if wide { regs.read64(register.at) } else { regs.read32(register.at).into() };
    let hex = if wide { format!("{value:#018x}") } else { format!("{value:#010x}") };
    let fields = (register.fields)(value);
    let words: Vec<_> = fields.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let (at, name, meaning) = (format!("{:#04x}", register.at), register.name, register.meaning);
    text.line(format_args!("{at}  {name:<8} {hex:<18}  {meaning}"));
    if !words.is_empty() {
        text.line(format_args!("                  {}", words.join(", ")));
    }
    let fields: serde_json::Map<_, _> =
        fields.into_iter().map(|(name, value)| (name.to_owned(), json!(value))).collect();
    json!({ "offset": at, "name": name, "bits": register.bits, "value": hex, "fields": fields })
}

fn no_fields(_: u64) -> Fields {
    Vec::new()
}

fn cap(value: u64) -> Fields {
    let cap = Cap(value);
    vec![
        ("MQES", cap.mqes_z().into()),
        ("CQR", cap.cqr().into()),
        ("AMS", cap.ams().into()),
        ("TO", cap.to().into()),
        ("DSTRD", cap.dstrd().into()),
        ("NSSRS", cap.nssrs().into()),
        ("CSS", cap.css().into()),
        ("BPS", cap.bps().into()),
        ("CPS", cap.cps().into()),
        ("MPSMIN", cap.mpsmin().into()),
        ("MPSMAX", cap.mpsmax().into()),
        ("PMRS", cap.pmrs().into()),
        ("CMBS", cap.cmbs().into()),
        ("NSSS", cap.nsss().into()),
        ("CRMS", cap.crms().into()),
    ]
}

fn version(value: u64) -> Fields {
    let version = Version(value as u32);
    vec![("MJR", version.major().into()), ("MNR", version.minor().into()), ("TER", version.tertiary().into())]
}

fn cc(value: u64) -> Fields {
    let cc = Cc(value as u32);
    vec![
        ("EN", cc.en().into()),
        ("CSS", cc.css().into()),
        ("MPS", cc.mps().into()),
        ("AMS", cc.ams().into()),
        ("SHN", cc.shn().into()),
        ("IOSQES", cc.iosqes().into()),
        ("IOCQES", cc.iocqes().into()),
        ("CRIME", cc.crime().into()),
    ]
}

fn csts(value: u64) -> Fields {
    let csts = Csts(value as u32);
    vec![
        ("RDY", csts.rdy().into()),
        ("CFS", csts.cfs().into()),
        ("SHST", csts.shst().into()),
        ("NSSRO", csts.nssro().into()),
        ("PP", csts.pp().into()),
        ("ST", csts.st().into()),
    ]
}

fn aqa(value: u64) -> Fields {
    let aqa = Aqa(value as u32);
    vec![("ASQS", aqa.asqs_z().into()), ("ACQS", aqa.acqs_z().into())]
}

fn cmbloc(value: u64) -> Fields {
    let cmbloc = Cmbloc(value as u32);
    vec![("BIR", cmbloc.bir().into()), ("CQMMS", cmbloc.cqmms().into()), ("OFST", cmbloc.ofst().into())]
}

fn cmbsz(value: u64) -> Fields {
    let cmbsz = Cmbsz(value as u32);
    vec![
        ("SQS", cmbsz.sqs().into()),
        ("CQS", cmbsz.cqs().into()),
        ("LISTS", cmbsz.lists().into()),
        ("RDS", cmbsz.rds().into()),
        ("WDS", cmbsz.wds().into()),
        ("SZU", cmbsz.szu().into()),
        ("SZ", cmbsz.sz().into()),
    ]
}

fn cmbmsc(value: u64) -> Fields {
    let cmbmsc = Cmbmsc(value);
    vec![("CRE", cmbmsc.cre().into()), ("CMSE", cmbmsc.cmse().into())]
}

fn cmbsts(value: u64) -> Fields {
    vec![("CBAI", Cmbsts(value as u32).cbai().into())]
}

fn crto(value: u64) -> Fields {
    let crto = Crto(value as u32);
    vec![("CRWMT", crto.crwmt().into()), ("CRIMT", crto.crimt().into())]
}
