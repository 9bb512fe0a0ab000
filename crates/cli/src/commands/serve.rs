//! `onehop sim serve`: serves a simulated drive or SDR board as a PCI device to QEMU or another vfio-user client.

use std::cell::Cell;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use clap::ValueEnum;
use onehop_board::Board;
use onehop_sim::Sim;
use onehop_vfio_user::{Function, Nvme, Sdr, Server, ServerEvent};
use serde_json::{Map, Value, json};

use crate::commands::CommandContext;
use crate::error::{CliError, Result};
use crate::report::{self, Report, ReportText};

/// Number of violations that are printed, in addition to the first of each rule.
const PRINTED: usize = 40;

/// Serve a simulated drive or SDR board on a socket until Ctrl-C, and report rule violations
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop sim serve -d 'sim:disk.img?size=256M' --socket /tmp/drive.sock\n  \
                  onehop sim serve -d 'sim:usdr?signal=counter&rate=2M' --socket /tmp/board.sock\n\n\
                  QEMU 10.1 or later uses it with\n  \
                  -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"/tmp/drive.sock\"}}'\n\
                  and with shared guest memory:\n  \
                  -object memory-backend-memfd,id=ram,size=1G,share=on -machine q35,memory-backend=ram\n\n\
                  onehop uses it as -d vfio-user:/tmp/drive.sock. For SPDK, name the socket cntrl,\n\
                  use its folder as address, and add --map-doorbells and --forgive-memory-space."
)]
pub(crate) struct Args {
    /// The drive: sim:mem:64M, sim:IMAGE?lba=4096&mdts=5; or the board: sim:usdr?rate=1M (see onehop sdr rx --help)
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    drive: String,
    /// The socket to create
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The protocol of the socket
    #[arg(long, value_enum, default_value = "vfio-user")]
    protocol: Protocol,
    /// End when the first client disconnects
    #[arg(long)]
    once: bool,
    /// Let clients map the drive's doorbells, as SPDK requires; a thread polls them
    #[arg(long)]
    map_doorbells: bool,
    /// Accept clients that never set Memory Space Enable in the command register, such as SPDK
    #[arg(long)]
    forgive_memory_space: bool,
}

/// The protocol of a socket.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Protocol {
    /// vfio-user, which makes it a PCI device
    VfioUser,
}

/// What is served.
enum ServedDevice {
    Drive(Sim),
    Board(Arc<Board>),
}

impl ServedDevice {
    /// Opens a device: `usdr`, with or without options, is a board, other names are drives.
    fn open(name: &str) -> Result<Self> {
        let Some(spec) = name.strip_prefix("sim:") else {
            let what = name.escape_debug();
            return Err(CliError::Usage(format!(
                "'{what}' is not a simulated device: use sim:mem:64M or sim:IMAGE for a drive, sim:usdr for a board"
            )));
        };
        if spec.split('?').next() == Some("usdr") {
            return Ok(Self::Board(Arc::new(super::sdr::simulated(spec)?)));
        }
        Ok(Self::Drive(onehop_sim::open(spec)?))
    }

    fn function(&self, args: &Args) -> Result<Function> {
        let function = Function::new(match self {
            Self::Drive(sim) if args.map_doorbells => {
                Box::new(Nvme::new(sim.clone())?.with_mapped_doorbells()?)
            }
            Self::Drive(sim) => Box::new(Nvme::new(sim.clone())?),
            Self::Board(_) if args.map_doorbells => {
                let why = "--map-doorbells is for drives; an SDR board has none".to_owned();
                return Err(CliError::Usage(why));
            }
            Self::Board(board) => Box::new(Sdr::new(board.clone())),
        });
        Ok(if args.forgive_memory_space { function.forgiving_memory_space() } else { function })
    }

    /// Statistics, as rows of text and as JSON fields.
    fn statistics(&self) -> (Vec<(&'static str, String)>, Value) {
        match self {
            Self::Drive(sim) => drive_statistics(sim),
            Self::Board(board) => board_statistics(board),
        }
    }

    /// The number of violations, including those not recorded.
    fn violation_count(&self) -> u64 {
        match self {
            Self::Drive(sim) => sim.violation_count(),
            Self::Board(board) => board.violation_count(),
        }
    }

    /// The recorded violations, as JSON and as text.
    fn violations(&self) -> Vec<(Value, String)> {
        match self {
            Self::Drive(sim) => {
                let list = sim.violations();
                let one = |b: &onehop_sim::Violation| {
                    let value = json!({ "rule": b.rule.name(), "queue": b.queue, "detail": b.detail });
                    (value, b.to_string())
                };
                list.iter().map(one).collect()
            }
            Self::Board(board) => {
                let list = board.violations();
                let one = |b: &onehop_board::BoardViolation| {
                    let value = json!({ "rule": b.rule.name(), "detail": b.detail });
                    (value, format!("{}: {}", b.rule.name(), b.detail))
                };
                list.iter().map(one).collect()
            }
        }
    }
}

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let Protocol::VfioUser = args.protocol;
    let served = ServedDevice::open(&args.drive)?;
    let function = served.function(args)?;
    let server = Server::bind(&args.socket)?;
    report::note(&format!("{} is served on {}; Ctrl-C ends", args.drive, args.socket.display()));
    let (clients, refused, done) = (Cell::new(0), Cell::new(0), Cell::new(false));
    let on_event = |event| {
        match &event {
            ServerEvent::Connected => clients.set(clients.get() + 1),
            ServerEvent::Refused { .. } => refused.set(refused.get() + 1),
            ServerEvent::Closed(_) => done.set(args.once),
        }
        report::note(&event.to_string());
    };
    server.run(&function, &|| done.get() || context.stop.is_set(), &on_event)?;
    let report = report(args, &served, clients.get(), refused.get())?;
    Ok(if context.stop.is_set() {
        report.failed(Some(CliError::Stopped("the socket is removed")))
    } else {
        report
    })
}

fn report(args: &Args, served: &ServedDevice, clients: u64, refused: u64) -> Result<Report> {
    let (rows, fields) = served.statistics();
    let (count, recorded) = (served.violation_count(), served.violations());
    let mut text = ReportText::default();
    text.row("device", &args.drive);
    text.row("clients", format!("{clients}, {refused} of their requests refused"));
    for (name, what) in rows {
        text.row(name, what);
    }
    text.row("violations", violation_text(count, recorded.len()));
    let mut rules = HashSet::new();
    for (n, (value, violation)) in recorded.iter().enumerate() {
        if rules.insert(value["rule"].as_str()) || n < PRINTED {
            text.line(format!("  {violation}"));
        }
    }
    let mut document: Map<String, Value> = fields.as_object().cloned().unwrap_or_default();
    document.extend([
        ("drive".to_owned(), json!(args.drive)),
        ("socket".to_owned(), json!(args.socket.display().to_string())),
        ("protocol".to_owned(), json!("vfio-user")),
        ("clients".to_owned(), json!(clients)),
        ("refused_requests".to_owned(), json!(refused)),
        ("breach_count".to_owned(), json!(count)),
        ("breaches".to_owned(), recorded.into_iter().map(|(value, _)| value).collect()),
    ]);
    Report::new(document, text)
}

/// The number of violations, and of those recorded if that is less.
fn violation_text(count: u64, recorded: usize) -> String {
    if count == recorded as u64 {
        return count.to_string();
    }
    format!("{count}, {recorded} of them recorded: the first ones, and the first of each rule")
}

fn drive_statistics(sim: &Sim) -> (Vec<(&'static str, String)>, Value) {
    let stats = sim.stats();
    let (admin, io) = (stats.admin_commands(), stats.io_commands());
    let row = format!("{admin} admin, {io} I/O, {} of them failed", stats.errors);
    let fields = json!({
        "admin_commands": admin,
        "io_commands": io,
        "errors": stats.errors,
        "interrupts": stats.interrupts,
        "resets": stats.resets,
        "faults_struck": stats.faults,
    });
    (vec![("commands", row)], fields)
}

fn board_statistics(board: &Board) -> (Vec<(&'static str, String)>, Value) {
    let (stats, flows) = (board.stats(), board.flows());
    let row = format!(
        "{} starts, {} blocks sent, {} of them lost, at worst {:.3} s behind the clock",
        stats.starts,
        stats.sent_blocks,
        stats.lost_blocks,
        stats.most_behind.as_secs_f64()
    );
    let flow = |flow: &onehop_board::Flow| {
        let samples = u64::from(flow.block_samples);
        let lost = flow.lost_blocks * samples + flow.missing_samples;
        json!({ "sent_samples": flow.sent_blocks * samples, "lost_samples": lost })
    };
    let fields = json!({
        "starts": stats.starts,
        "sent_blocks": stats.sent_blocks,
        "lost_blocks": stats.lost_blocks,
        "board_behind_seconds": stats.most_behind.as_secs_f64(),
        "transmitted_samples": stats.transmitted_samples,
        "flows": flows.iter().map(flow).collect::<Vec<_>>(),
    });
    (vec![("samples", row)], fields)
}
