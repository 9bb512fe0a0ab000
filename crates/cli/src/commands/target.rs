//! `onehop target`: serves a folder to mounts on other machines until it is stopped.

use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use onehop_target::auth::Key;
use onehop_target::rdma::{Ports, RdmaAcceptor, RdmaConnector};
use onehop_target::server::{ServerOptions, Target};
use onehop_target::tcp::{TcpAcceptor, TcpConnector};
use onehop_target::transport::{Acceptor, Connector};

use super::CommandContext;
use crate::error::{CliError, Result};
use crate::report::{self, Report, ReportText};
use crate::units;

/// The transport between a mount and its target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub(crate) enum Transport {
    /// Over TCP: for machines without RDMA
    Tcp,
    /// By RDMA
    Rdma,
}

impl Transport {
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

/// The RDMA ports that were named, or all.
pub(crate) fn ports(names: &[String]) -> Result<Ports> {
    Ports::open(names).map_err(|error| match error {
        onehop_target::Error::Rdma(onehop_rdma::Error::NoRdma { why }) => CliError::not_possible(
            "RDMA",
            why,
            "Use --transport tcp, or see docs/set-up-a-machine.md on RDMA cards",
        ),
        other => refused(other),
    })
}

/// Serve a folder to `onehop mount --target` on other machines
#[derive(clap::Args)]
#[command(
    after_help = "Runs until Ctrl-C or SIGTERM, then finishes the requests that it has, and exits 0. Anyone who has the key \
    may do in the folder what this command's user may; if that is root, they may act as any user. Over TCP everything is \
    encrypted; by RDMA everything but the data of files.\n\n\
                        Example:\n  (umask 077; head -c 32 /dev/urandom | base64 > key)\n  \
                        onehop target --root /data/models --listen 0.0.0.0:7464 --key-file key"
)]
pub(crate) struct Args {
    /// The folder whose files are served
    #[arg(long)]
    root: PathBuf,
    /// The address to listen at: HOST:PORT; with port 0 the system chooses one
    #[arg(long, value_parser = parse_listen)]
    listen: String,
    /// The transport
    #[arg(long, value_enum, default_value = "tcp")]
    transport: Transport,
    /// RDMA devices to use, in this order [default: all that are up]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    nic: Vec<String>,
    /// The file with the key that clients need (mode 600)
    #[arg(long, required_unless_present = "insecure_loopback_for_tests")]
    key_file: Option<PathBuf>,
    /// No key and no encryption, on a loopback address only. Every user of this machine can then read and write the folder
    /// as this command's user
    #[arg(long, conflicts_with = "key_file")]
    insecure_loopback_for_tests: bool,
    /// Refuse all changes
    #[arg(long)]
    read_only: bool,
    /// Acknowledge writes only when they are on the disk; by default fsync does that
    #[arg(long, conflicts_with = "read_only")]
    write_through: bool,
}

/// An address as people write it. Its host is looked up later.
pub(crate) fn parse_listen(text: &str) -> std::result::Result<String, String> {
    let is_address = |(host, port): (&str, &str)| !host.is_empty() && port.parse::<u16>().is_ok();
    if text.rsplit_once(':').is_some_and(is_address) {
        return Ok(text.to_owned());
    }
    Err("expected HOST:PORT, such as 0.0.0.0:7464".into())
}

/// How often the main thread polls for the end.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long requests may still take at the end.
const DRAIN: Duration = Duration::from_secs(10);

/// Runs the command.
pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let key = key(args.key_file.as_ref())?;
    if key.is_none() && !is_loopback(&args.listen) {
        return Err(CliError::Usage(format!(
            "other machines could read and write the folder at {}: use --key-file",
            args.listen
        )));
    }
    context.stop.end_in_order();
    let start = Instant::now();
    let acceptor: Box<dyn Acceptor> = match args.transport {
        Transport::Tcp => Box::new(TcpAcceptor::listen(&args.listen).map_err(refused)?),
        Transport::Rdma => Box::new(RdmaAcceptor::listen(&args.listen, ports(&args.nic)?).map_err(refused)?),
    };
    let address = acceptor.address();
    let options = ServerOptions {
        read_only: args.read_only,
        write_through: args.write_through,
        ..ServerOptions::new(&args.root, key)
    };
    let target = Target::start(options, vec![acceptor]).map_err(refused)?;
    if args.key_file.is_none() {
        report::note("no key: every user of this machine has access, and nothing is encrypted");
    }
    // People, and scripts that wait for it, read this on stderr.
    report::note(&format!("{} is served at {address}; Ctrl-C ends", args.root.display()));
    while !context.stop.is_set() {
        std::thread::sleep(STOP_POLL_INTERVAL);
    }
    let report = target.report();
    let drained = target.drain(DRAIN);
    let mut text = ReportText::default();
    text.row("served", format!("{} for {}", args.root.display(), units::time(start.elapsed())));
    text.row("address", &address);
    text.row(
        "clients",
        format!(
            "{} at the end, with {}",
            report.sessions,
            units::count(report.connections as u64, "connection")
        ),
    );
    text.row("requests", format!("{}, {} of them repeated", report.requests, report.repeated));
    text.row("read", units::bytes(report.read_bytes));
    text.row("written", units::bytes(report.written_bytes));
    text.row("refused", report.refused);
    text.row("modified", format!("{} connections, in transit", report.forged));
    text.row("violations", report.broken);
    if !drained {
        let limit = DRAIN.as_secs();
        return Err(CliError::Failed(format!("a request was not finished within {limit} s of the end")));
    }
    let mut document = serde_json::to_value(&report)
        .map_err(|e| CliError::Failed(format!("the report cannot be written: {e}")))?;
    document["address"] = address.into();
    document["transport"] = args.transport.name().into();
    Report::new(document, text)
}

/// The key in a file.
pub(crate) fn key(file: Option<&PathBuf>) -> Result<Option<Key>> {
    file.map(|path| Key::read(path).map_err(|e| CliError::Usage(e.to_string()))).transpose()
}

/// The key for a target that this command connects to. Without one, any server that answers is trusted, so the user must ask for that.
pub(crate) fn key_of_target(file: Option<&PathBuf>, insecure: bool) -> Result<Option<Key>> {
    if file.is_none() && !insecure {
        return Err(CliError::Usage(
            "without its key a target cannot be authenticated, and nothing is encrypted: use --key-file"
                .into(),
        ));
    }
    key(file)
}

/// Connects to a target; to one on this machine only, where that is wanted.
pub(crate) fn connector(
    transport: Transport,
    target: &str,
    nics: &[String],
    loopback_only: bool,
) -> Result<Box<dyn Connector>> {
    Ok(match transport {
        Transport::Tcp => {
            let tcp = TcpConnector::new(target).map_err(refused)?;
            Box::new(if loopback_only { tcp.loopback_only() } else { tcp })
        }
        Transport::Rdma => {
            let rdma = RdmaConnector::new(target, &ports(nics)?).map_err(refused)?;
            Box::new(if loopback_only { rdma.loopback_only() } else { rdma })
        }
    })
}

/// Whether an address is one that only this machine reaches.
fn is_loopback(address: &str) -> bool {
    // The command listens at the addresses that it resolves to.
    address.to_socket_addrs().is_ok_and(|mut all| all.all(|address| address.ip().is_loopback()))
}

/// Why there is no target.
pub(crate) fn refused(error: onehop_target::Error) -> CliError {
    match error {
        onehop_target::Error::Address(_) | onehop_target::Error::NotLoopback { .. } => {
            CliError::Usage(error.to_string())
        }
        _ => CliError::Failed(error.to_string()),
    }
}
