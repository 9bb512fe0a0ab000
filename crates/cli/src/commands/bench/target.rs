//! `onehop bench target`: measures the throughput of connections to a target over TCP and RDMA.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use onehop_bench::results::{IoType, RateLimit, Results};
use onehop_bench::sweep::{Cell, Effort, RemoteTarget, Sweep};
use onehop_target::auth::{Key, random};
use onehop_target::client::{self, RemoteTree};
use onehop_target::rdma::RdmaAcceptor;
use onehop_target::server::{self, Target};
use onehop_target::tcp::TcpAcceptor;
use onehop_target::transport::Acceptor;
use onehop_target::tree::{OpenFile, Tree};
use onehop_target::wire::{Caller, Name, OpenMode, ROOT};
use rustix::io::Errno;

use super::limits::{self, TRIES};
use super::{report, sweep};
use crate::commands::CommandContext;
use crate::commands::target::{Transport, connector, parse_listen, ports, target_key, to_error};
use crate::error::{CliError, Result};
use crate::noise::Noise;
use crate::progress::TransientBar;
use crate::report::{Report, ReportText, warn};
use crate::units;

/// Measure the throughput of connections to a target over TCP and RDMA, for several sizes and depths
#[derive(clap::Args)]
#[command(
    visible_alias = "rdma",
    after_help = "Examples:\n  onehop bench target\n  onehop bench target --block 4K,1M --depth 1,32 --io read --json\n  \
                        onehop bench target --target storage1:7464 --key-file key --transport rdma\n\nWithout --target, a target runs \
                        in this process, at --listen. A file of --size bytes is created in its folder and removed afterwards. Data \
                        moves between the target's page cache and this machine's memory. Every row's bytes are compared with what \
                        another connection reads."
)]
pub(crate) struct Args {
    /// The target: HOST:PORT [default: one in this process]
    #[arg(long, conflicts_with_all = ["listen", "root"])]
    target: Option<String>,
    /// The file with the target's key (mode 600)
    #[arg(long, requires = "target")]
    key_file: Option<PathBuf>,
    /// Measure a target without a key and without encryption. Only at a loopback address
    #[arg(long, requires = "target", conflicts_with = "key_file")]
    insecure_loopback_for_tests: bool,
    /// Where the target in this process listens; for RDMA, an address of an RDMA card
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0", value_parser = parse_listen)]
    listen: String,
    /// The folder that the target in this process serves [default: a temporary folder]
    #[arg(long)]
    root: Option<PathBuf>,
    /// Connections to the target, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = units::within::<u32>(1..=64))]
    connections: u32,
    /// The transport [default: both; with --target: tcp]
    #[arg(long, value_enum, value_delimiter = ',')]
    transport: Vec<Transport>,
    /// RDMA devices to use, in this order [default: all that are up]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    nic: Vec<String>,
    /// Size of the file
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = units::parse_size)]
    size: u64,
    /// Operations: read, randread, write, randwrite
    #[arg(long, value_name = "IO", value_delimiter = ',', default_value = "read,write", value_parser = sweep::parse_io)]
    io: Vec<IoType>,
    /// Block sizes, one row each
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "4K,64K,1M,4M", value_parser = units::parse_size)]
    block: Vec<u64>,
    /// Blocks in flight, 1 to 256
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8,32", value_parser = units::within::<u32>(1..=256))]
    depth: Vec<u32>,
    /// Repeats per row, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = units::within::<u32>(1..=1000))]
    repeats: u32,
    /// Approximate duration of a repeat
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = units::parse_time)]
    time: Duration,
}

/// Bytes written at a time when the file is created.
const CHUNK: usize = 1 << 20;
/// Bytes of one reference measurement, over all connections.
const LOOPBACK_BYTES: usize = 256 << 20;
/// Time limit for one chunk of the reference measurement.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a pass, all in memory.
const PASS_BYTES: u64 = 64 << 20;
const READ_WRITE: OpenMode = OpenMode {
    read: true,
    write: true,
    truncate: false,
    sync: false,
    data_sync: false,
    no_atime: false,
    execute: false,
};

/// A connection, and the open file at the target.
struct RemoteEnd {
    _tree: RemoteTree,
    file: Arc<dyn OpenFile>,
}

/// The folder of the target in this process, removed on drop if this command created it.
struct TargetFolder(PathBuf, bool);

impl Drop for TargetFolder {
    fn drop(&mut self) {
        if self.1 {
            // The file in it was removed earlier.
            let _ = std::fs::remove_dir(&self.0);
        }
    }
}

/// The file at the target, removed on drop.
struct RemoteScratch<'a> {
    tree: &'a RemoteTree,
    name: Name,
    /// Its path in messages.
    path: String,
}

impl Drop for RemoteScratch<'_> {
    fn drop(&mut self) {
        match self.tree.remove(ROOT, &self.name, false, &Caller::ROOT) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => warn_of_leftover(&self.path, error),
        }
    }
}

/// Warns that the file may still exist: a target that does not answer may still execute the request.
fn warn_of_leftover(path: &str, error: Errno) {
    let error = std::io::Error::from(error);
    warn(&format!("the file {path} may still exist, and can be removed: {error}"));
}

pub(super) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    // After Ctrl-C, any error is a consequence of it.
    measure_all(args, context)
        .map_err(|error| context.stop.check().err().unwrap_or(error).or_stopped("the connections are closed"))
}

fn measure_all(args: &Args, context: &CommandContext) -> Result<Report> {
    let transports = match (&args.target, args.transport.as_slice()) {
        (Some(_), []) => vec![Transport::Tcp],
        (Some(_), [_, _, ..]) => {
            return Err(CliError::Usage("a target has only one --transport".into()));
        }
        (None, []) => vec![Transport::Rdma, Transport::Tcp],
        (_, transports) => transports.to_vec(),
    };
    let key = match &args.target {
        Some(_) => target_key(args.key_file.as_ref(), args.insecure_loopback_for_tests)?,
        // Other users of this machine can reach the address, too.
        None => Key::new(&random::<32>().map_err(to_error)?),
    };
    let (lanes, stop) = (args.connections as usize, context.stop.signal());
    let options = client::ClientOptions { lanes, stop, ..client::ClientOptions::new(key.clone()) };
    let root = args.target.is_none().then(|| folder(args)).transpose()?;
    let (mut served, mut sides, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
    for transport in &transports {
        let address = match (&args.target, &root) {
            (Some(target), _) => Ok(target.clone()),
            (None, root) => serve(*transport, args, root.as_ref(), key.clone()).map(|(target, address)| {
                served.push(target);
                addresses.push(address.clone());
                address
            }),
        };
        // A failure of the only transport fails the command.
        match address.and_then(|address| tree(*transport, &address, args, &options)) {
            Ok(tree) => sides.push((*transport, Ok(tree))),
            Err(error) if transports.len() > 1 => sides.push((*transport, Err(error.to_string()))),
            Err(error) => return Err(error),
        }
    }
    let check = match (&args.target, served.first()) {
        (Some(address), _) => tree(transports[0], address, args, &options)?,
        _ => {
            let (target, address) = serve(Transport::Tcp, args, root.as_ref(), key.clone())?;
            served.push(target);
            tree(Transport::Tcp, &address, args, &options)?
        }
    };
    let folder = match (&args.target, &root) {
        (None, Some(root)) => root.0.display().to_string(),
        _ => format!("the folder of {}", check.report().target),
    };
    let scratch = create_scratch(&check, &folder, args.size, context)?;
    let mut files =
        [Err("not requested (--transport)".to_owned()), Err("not requested (--transport)".to_owned())];
    for (transport, tree) in sides {
        let end = tree.and_then(|tree| remote_end(tree, &scratch.name).map_err(|e| e.to_string()));
        files[usize::from(transport == Transport::Rdma)] = end;
    }
    let opened = open(&check, &scratch.name)?;
    let name = args
        .target
        .clone()
        .unwrap_or_else(|| format!("a target in this process, at {}", addresses.join(" and ")));
    measure(args, name, &transports, files, opened, context)
}

fn folder(args: &Args) -> Result<TargetFolder> {
    if let Some(root) = &args.root {
        return Ok(TargetFolder(root.clone(), false));
    }
    let path = std::env::temp_dir().join(format!("onehop-bench-target-{}", std::process::id()));
    std::fs::create_dir(&path).map_err(|e| CliError::file("creating", &path, e))?;
    Ok(TargetFolder(path, true))
}

/// Starts a target in this process; returns its address, too.
fn serve(
    transport: Transport,
    args: &Args,
    root: Option<&TargetFolder>,
    key: Option<Key>,
) -> Result<(Target, String)> {
    let Some(root) = root else {
        return Err(CliError::Usage("a target in this process needs a folder".into()));
    };
    let acceptor: Box<dyn Acceptor> = match transport {
        Transport::Tcp => Box::new(TcpAcceptor::listen(&args.listen).map_err(to_error)?),
        Transport::Rdma => Box::new(RdmaAcceptor::listen(&args.listen, ports(&args.nic)?).map_err(to_error)?),
    };
    let address = acceptor.address();
    let target = Target::start(server::ServerOptions::new(&root.0, key), vec![acceptor]).map_err(to_error)?;
    Ok((target, address))
}

fn tree(
    transport: Transport,
    address: &str,
    args: &Args,
    options: &client::ClientOptions,
) -> Result<RemoteTree> {
    let connector = connector(transport, address, &args.nic, options.key.is_none())?;
    RemoteTree::connect(connector, options.clone()).map_err(to_error)
}

fn failed(what: &str, error: impl std::fmt::Display) -> CliError {
    CliError::Failed(format!("{what} at the target: {error}"))
}

/// Creates the file in the target's folder, with pseudo-random bytes.
fn create_scratch<'a>(
    tree: &'a RemoteTree,
    folder: &str,
    bytes: u64,
    context: &CommandContext,
) -> Result<RemoteScratch<'a>> {
    let text = format!(".onehop-bench-{}-{}", std::process::id(), bytes);
    let name = Name::new(text.as_bytes()).ok_or_else(|| failed("creating a file", "its name"))?;
    // A target that does not run as root creates the file as its own user.
    let created = tree.create(ROOT, &name, 0o600, READ_WRITE, true, &Caller::ROOT);
    let path = format!("{folder}/{text}");
    let (_, file) = created.map_err(|error| {
        // Without an answer, it is unknown whether the file exists.
        if matches!(error, Errno::TIMEDOUT | Errno::IO) {
            warn_of_leftover(&path, error);
        }
        failed("creating a file", std::io::Error::from(error))
    })?;
    let scratch = RemoteScratch { tree, name, path };
    let (mut noise, mut chunk) = (Noise(0), vec![0_u8; CHUNK]);
    let mut done = 0;
    while done < bytes {
        context.stop.check()?;
        noise.fill(&mut chunk);
        let count = (bytes - done).min(CHUNK as u64) as usize;
        match file.write_bytes(&chunk[..count], done).map_err(|e| failed("writing a file", e))? {
            0 => return Err(failed("writing a file", "it accepts no more bytes")),
            written => done += written as u64,
        }
    }
    Ok(scratch)
}

fn open(tree: &RemoteTree, name: &Name) -> Result<Arc<dyn OpenFile>> {
    let found = tree
        .lookup(ROOT, name, &Caller::ROOT)
        .and_then(|attr| tree.open(attr.node, READ_WRITE, &Caller::ROOT));
    found.map_err(|e| failed("opening a file", std::io::Error::from(e)))
}

fn remote_end(tree: RemoteTree, name: &Name) -> Result<RemoteEnd> {
    Ok(RemoteEnd { file: open(&tree, name)?, _tree: tree })
}

fn measure(
    args: &Args,
    name: String,
    transports: &[Transport],
    [tcp, rdma]: [std::result::Result<RemoteEnd, String>; 2],
    check: Arc<dyn OpenFile>,
    context: &CommandContext,
) -> Result<Report> {
    let file = |end: &std::result::Result<RemoteEnd, String>| {
        end.as_ref().map(|end| end.file.clone()).map_err(Clone::clone)
    };
    let target = RemoteTarget::new(file(&tcp), file(&rdma), check, args.size);
    let is_local = args.target.is_none();
    let (memory, loopback) =
        (limits::memory_rate()?, if is_local { Some(loopback_rate(args.connections)?) } else { None });
    let limit = |route: &str, _: IoType| match (route, &loopback) {
        ("tcp/host", Some(loopback)) => Some(loopback.clone()),
        _ => Some(memory.clone()),
    };
    let effort = Effort { bytes: PASS_BYTES, ops: 4096, time: args.time, repeats: args.repeats };
    let sweep_of = Sweep::new(&target, effort, &limit).stopped_by(context.stop.signal());
    let routes: Vec<&str> =
        transports.iter().map(|t| if *t == Transport::Tcp { "tcp/host" } else { "rdma/host" }).collect();
    let mut results = Results::new(report::machine(), name, "none: host memory".into(), Vec::new());
    let bar =
        TransientBar::of_steps("measuring", (args.io.len() * args.block.len() * args.depth.len()) as u64);
    for io in &args.io {
        for (block, depth) in args.block.iter().flat_map(|b| args.depth.iter().map(move |d| (*b, *d))) {
            context.stop.check()?;
            let cell = Cell { io: *io, block, depth, threads: 1 };
            results.rows.extend(sweep_of.cell(&cell, &routes, &mut |_| context.stop.check().is_ok())?);
            bar.add(1);
        }
    }
    context.stop.check()?;
    results.limits = loopback.into_iter().chain([memory]).collect();
    drop(bar);
    let mut text = ReportText::default();
    text.row("measured", &results.target);
    sweep::rows(&results, &mut text);
    let failure = sweep::no_results(&results.rows).or_else(|| sweep::too_fast(&results.rows));
    Ok(Report::new(&results, text)?.failed(failure))
}

/// The throughput of TCP connections from this machine to itself, as many as to the target, without processing the
/// bytes.
fn loopback_rate(connections: u32) -> Result<RateLimit> {
    let gbps = limits::best_of(TRIES, || loopback_once(connections))?;
    let connections = units::count(connections.into(), "TCP connection");
    let what = format!("{connections} from this machine to itself, the best of {TRIES}");
    Ok(RateLimit { what, gbps, hard: false })
}

fn loopback_once(connections: u32) -> Result<f64> {
    let failed = |e: std::io::Error| CliError::Failed(format!("a loopback connection failed: {e}"));
    let listener = TcpListener::bind("127.0.0.1:0").map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let pair = |_| {
        let (near, far) = (TcpStream::connect(address)?, listener.accept()?.0);
        near.set_write_timeout(Some(CHUNK_TIMEOUT))?;
        far.set_read_timeout(Some(CHUNK_TIMEOUT))?;
        Ok((near, far))
    };
    let pairs: Vec<_> = (0..connections).map(pair).collect::<std::io::Result<_>>().map_err(failed)?;
    let chunks = (LOOPBACK_BYTES / CHUNK).div_ceil(pairs.len().max(1));
    let together = Barrier::new(pairs.len());
    let spans: Result<Vec<_>> = std::thread::scope(|scope| {
        let (mut senders, mut receivers) = (Vec::new(), Vec::new());
        for (mut near, mut far) in pairs {
            senders.push(scope.spawn(move || {
                let chunk = vec![7; CHUNK];
                (0..chunks).try_for_each(|_| near.write_all(&chunk))
            }));
            let together = &together;
            receivers.push(scope.spawn(move || {
                let mut chunk = vec![0; CHUNK];
                together.wait();
                let start = Instant::now();
                (0..chunks).try_for_each(|_| far.read_exact(&mut chunk))?;
                Ok((start, Instant::now()))
            }));
        }
        let panicked = |_| CliError::Failed("a thread of a loopback connection panicked".into());
        let spans = receivers.into_iter().map(|thread| thread.join().map_err(panicked)?.map_err(failed));
        let spans = spans.collect();
        senders.into_iter().try_for_each(|thread| thread.join().map_err(panicked)?.map_err(failed))?;
        spans
    });
    Ok(limits::rate_of(chunks * CHUNK, &spans?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_uses_the_same_number_of_connections() {
        let limit = loopback_rate(3).unwrap();
        assert!(limit.gbps > 0.0 && limit.kind() == "reference", "{limit:?}");
        assert_eq!(limit.what, "3 TCP connections from this machine to itself, the best of 5");
    }
}
