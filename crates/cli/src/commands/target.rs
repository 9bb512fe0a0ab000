//! `onehop target`: serves a folder to mounts on other machines, until it is stopped.

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
    /// Over RDMA
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

/// The ports of the named RDMA devices, or of all.
pub(crate) fn ports(names: &[String]) -> Result<Ports> {
    Ports::open(names).map_err(|error| match error {
        onehop_target::Error::Rdma(onehop_rdma::Error::NoRdma { why }) => CliError::not_possible(
            "RDMA",
            why,
            "Use --transport tcp, or see docs/set-up-a-machine.md on RDMA cards",
        ),
        other => to_error(other),
    })
}

/// Serve a folder to `onehop mount --target` on other machines
#[derive(clap::Args)]
#[command(
    after_help = "Runs until Ctrl-C or SIGTERM, then finishes pending requests and exits 0. Clients with the key have the rights \
    of this command's user in the folder; if that is root, they may act as any user. Over TCP everything is encrypted, over \
    RDMA everything except file data.\n\n\
                        Example:\n  (umask 077; head -c 32 /dev/urandom | base64 > key)\n  \
                        onehop target --root /data/models --listen 0.0.0.0:7464 --key-file key"
)]
pub(crate) struct Args {
    /// The folder to serve
    #[arg(long)]
    root: PathBuf,
    /// The address to listen on: HOST:PORT; with port 0 the system chooses a port
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
    /// No key and no encryption, on a loopback address only. Every user of this machine can then access the folder as
    /// this command's user
    #[arg(long, conflicts_with = "key_file")]
    insecure_loopback_for_tests: bool,
    /// Refuse all changes
    #[arg(long)]
    read_only: bool,
    /// Acknowledge writes only once they are on disk; by default only fsync waits for that
    #[arg(long, conflicts_with = "read_only")]
    write_through: bool,
}

/// Parses a listen address. The host is resolved later.
pub(crate) fn parse_listen(text: &str) -> std::result::Result<String, String> {
    let is_address = |(host, port): (&str, &str)| !host.is_empty() && port.parse::<u16>().is_ok();
    if text.rsplit_once(':').is_some_and(is_address) {
        return Ok(text.to_owned());
    }
    Err("expected HOST:PORT, such as 0.0.0.0:7464".into())
}

/// Interval at which the main thread polls for the end.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time limit for pending requests at the end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    let key = key(args.key_file.as_ref())?;
    if key.is_none() && !is_loopback(&args.listen) {
        return Err(CliError::Usage(format!(
            "other machines could read and write the folder at {}: use --key-file",
            args.listen
        )));
    }
    context.stop.ignore_second_signal();
    let start = Instant::now();
    let acceptor: Box<dyn Acceptor> = match args.transport {
        Transport::Tcp => Box::new(TcpAcceptor::listen(&args.listen).map_err(to_error)?),
        Transport::Rdma => Box::new(RdmaAcceptor::listen(&args.listen, ports(&args.nic)?).map_err(to_error)?),
    };
    let address = acceptor.address();
    let options = ServerOptions {
        read_only: args.read_only,
        write_through: args.write_through,
        ..ServerOptions::new(&args.root, key)
    };
    let target = Target::start(options, vec![acceptor]).map_err(to_error)?;
    if args.key_file.is_none() {
        report::note("no key: every user of this machine has access, and nothing is encrypted");
    }
    // Scripts wait for this line on stderr.
    report::note(&format!("{} is served at {address}; Ctrl-C ends", args.root.display()));
    while !context.stop.is_set() {
        std::thread::sleep(STOP_POLL_INTERVAL);
    }
    let report = target.report();
    let drained = target.drain(DRAIN_TIMEOUT);
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
    for way in &report.writes {
        text.row("", way_text(way.by, way.why, way.bytes, way.writes));
    }
    text.row("refused", report.refused);
    text.row("modified", format!("{} connections, in transit", report.forged));
    text.row("violations", report.broken);
    if !drained {
        let limit = DRAIN_TIMEOUT.as_secs();
        return Err(CliError::Failed(format!("a request was not finished within {limit} s after the stop")));
    }
    let mut document = serde_json::to_value(&report)
        .map_err(|e| CliError::Failed(format!("the report cannot be written: {e}")))?;
    document["address"] = address.into();
    document["transport"] = args.transport.name().into();
    Report::new(document, text)
}

/// The row of writes by one way.
pub(crate) fn way_text(by: &str, why: Option<&str>, bytes: u64, writes: u64) -> String {
    let why = why.map(|why| format!(", {why}")).unwrap_or_default();
    format!("{} by {by} in {}{why}", units::bytes(bytes), units::count(writes, "write"))
}

/// Reads the key file, if one is named.
pub(crate) fn key(file: Option<&PathBuf>) -> Result<Option<Key>> {
    file.map(|path| Key::read(path).map_err(|e| CliError::Usage(e.to_string()))).transpose()
}

/// The key of a target to connect to. Without one, any server that answers would be trusted, so the user must request
/// that.
pub(crate) fn target_key(file: Option<&PathBuf>, insecure: bool) -> Result<Option<Key>> {
    if file.is_none() && !insecure {
        return Err(CliError::Usage(
            "without its key a target cannot be authenticated, and nothing is encrypted: use --key-file"
                .into(),
        ));
    }
    key(file)
}

/// A connector for a target; with `loopback_only`, for one on this machine.
pub(crate) fn connector(
    transport: Transport,
    target: &str,
    nics: &[String],
    loopback_only: bool,
) -> Result<Box<dyn Connector>> {
    Ok(match transport {
        Transport::Tcp => {
            let tcp = TcpConnector::new(target).map_err(to_error)?;
            Box::new(if loopback_only { tcp.loopback_only() } else { tcp })
        }
        Transport::Rdma => {
            let rdma = RdmaConnector::new(target, &ports(nics)?).map_err(to_error)?;
            Box::new(if loopback_only { rdma.loopback_only() } else { rdma })
        }
    })
}

/// Whether only this machine can reach an address.
fn is_loopback(address: &str) -> bool {
    // Checks every address to which it resolves.
    address.to_socket_addrs().is_ok_and(|mut all| all.all(|address| address.ip().is_loopback()))
}

/// Converts an error of a target.
pub(crate) fn to_error(error: onehop_target::Error) -> CliError {
    match error {
        onehop_target::Error::Address(_) | onehop_target::Error::NotLoopback { .. } => {
            CliError::Usage(error.to_string())
        }
        _ => CliError::Failed(error.to_string()),
    }
}
