//! `onehop sim serve`: the simulated drive as a PCI device of QEMU, or of any other vfio-user client.

use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;

use clap::ValueEnum;
use onehop_sim::{Sim, Violation};
use onehop_vfio_user::{Event, Function, Nvme, Server};
use serde_json::{Value, json};

use crate::commands::Context;
use crate::error::{CliError, Result};
use crate::report::{Report, Text};

/// Breaches of rules that are printed; the count says how many there were.
const SHOWN: usize = 40;

/// Serve a simulated drive on a socket until Ctrl-C, and tell which rules its driver broke
#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  onehop sim serve -d 'sim:disk.img?size=256M' --socket /tmp/drive.sock\n\n\
                  QEMU 10.1 or later takes it with\n  \
                  -device '{\"driver\":\"vfio-user-pci\",\"socket\":{\"type\":\"unix\",\"path\":\"/tmp/drive.sock\"}}'\n\
                  and with guest memory that it shares:\n  \
                  -object memory-backend-memfd,id=ram,size=1G,share=on -machine q35,memory-backend=ram"
)]
pub(crate) struct Args {
    /// The drive: sim:mem:64M, sim:IMAGE?lba=4096&mdts=5
    #[arg(short = 'd', long = "drive", value_name = "DRIVE")]
    drive: String,
    /// The socket to make
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// What is spoken on it
    #[arg(long, value_enum, default_value = "vfio-user")]
    protocol: Protocol,
    /// End when the first client has gone
    #[arg(long)]
    once: bool,
}

/// What is spoken on a socket.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Protocol {
    /// vfio-user, which makes it a PCI device
    VfioUser,
}

/// Runs it.
pub(crate) fn run(args: &Args, context: &Context) -> Result<Report> {
    let Protocol::VfioUser = args.protocol;
    let Some(spec) = args.drive.strip_prefix("sim:") else {
        let what = args.drive.escape_debug();
        return Err(CliError::Usage(format!(
            "'{what}' is no simulated drive; one is sim:mem:64M or sim:IMAGE"
        )));
    };
    let sim = onehop_sim::open(spec)?;
    let function = Function::new(Box::new(Nvme::new(sim.clone())?));
    let server = Server::bind(&args.socket)?;
    say(&format!("{} is served on {}", args.drive, args.socket.display()));
    let (clients, refused, done) = (Cell::new(0), Cell::new(0), Cell::new(false));
    let tell = |event| {
        match &event {
            Event::Connected => clients.set(clients.get() + 1),
            Event::Refused { .. } => refused.set(refused.get() + 1),
            Event::Closed(_) => done.set(args.once),
        }
        say(&event.to_string());
    };
    server.run(&function, &|| done.get() || context.stop.is_set(), &tell)?;
    let report = report(args, &sim, clients.get(), refused.get())?;
    Ok(if context.stop.is_set() { report.failed(Some(CliError::ServerStopped)) } else { report })
}

/// To people who watch; a closed stderr is no reason to stop.
fn say(what: &str) {
    let _ = writeln!(std::io::stderr(), "onehop: {what}");
}

fn report(args: &Args, sim: &Sim, clients: u64, refused: u64) -> Result<Report> {
    let (stats, breaches) = (sim.stats(), sim.violations());
    let (admin, io) = (stats.admin_commands(), stats.io_commands());
    let mut text = Text::default();
    text.row("drive", &args.drive);
    text.row("clients", format!("{clients}, {refused} of their requests refused"));
    text.row("commands", format!("{admin} admin, {io} I/O, {} of them failed", stats.errors));
    text.row("breaches", breaches.len());
    for breach in breaches.iter().take(SHOWN) {
        text.line(format!("  {breach}"));
    }
    let document = json!({
        "drive": args.drive,
        "socket": args.socket.display().to_string(),
        "protocol": "vfio-user",
        "clients": clients,
        "refused_requests": refused,
        "admin_commands": admin,
        "io_commands": io,
        "errors": stats.errors,
        "interrupts": stats.interrupts,
        "resets": stats.resets,
        "faults": stats.faults,
        "breaches": breaches.iter().map(breach_document).collect::<Vec<_>>(),
    });
    Report::new(document, text)
}

fn breach_document(breach: &Violation) -> Value {
    json!({ "rule": breach.rule.name(), "queue": breach.queue, "detail": breach.detail })
}
