//! `onehop mount`: serves a local folder or a target through FUSE and usrbio, until it is stopped.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, Error as Serve, MountOptions};
use onehop_target::client::{self, RemoteTree};
use serde_json::Value;

use super::CommandContext;
use super::target::{Transport, way_text};
use crate::error::{CliError, Result};
use crate::report::{self, Report, ReportText};
use crate::units;

/// Mount a folder for programs written for 3FS (usrbio), with reads into GPU memory
#[derive(clap::Args)]
#[command(
    after_help = "Runs until Ctrl-C, SIGTERM or an unmount, then exits 0. Files that programs still have open \
                        then return errors.\n\n\
                        Examples:\n  onehop mount /mnt/hf3fs --root /data/models\n  \
                        onehop mount /mnt/hf3fs --target storage1:7464 --key-file key\n  onehop mount /mnt/hf3fs --status --json"
)]
pub(crate) struct Args {
    /// Where to mount: an empty folder
    mount_point: PathBuf,
    /// Mount over a folder that is not empty, hiding its contents
    #[arg(long, conflicts_with = "status")]
    nonempty: bool,
    /// The local folder to serve; --target serves one of another machine instead
    #[arg(long, required_unless_present_any = ["status", "target"])]
    root: Option<PathBuf>,
    /// The `onehop target` to mount: HOST:PORT, or several addresses of one target, separated by commas
    #[arg(long, conflicts_with = "root")]
    target: Option<String>,
    /// The transport to the target
    #[arg(long, value_enum, default_value = "tcp", requires = "target", conflicts_with = "root")]
    transport: Transport,
    /// RDMA devices to use, in this order [default: all that are up, nearest to a GPU first]
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "target", conflicts_with = "root")]
    nic: Vec<String>,
    /// The file with the target's key (mode 600)
    #[arg(long, requires = "target", conflicts_with = "root")]
    key_file: Option<PathBuf>,
    /// Mount a target without a key and without encryption. Only at a loopback address
    #[arg(long, requires = "target", conflicts_with_all = ["key_file", "root"])]
    insecure_loopback_for_tests: bool,
    /// Connections to the target, 1 to 64
    #[arg(long, value_name = "N", default_value_t = 4, requires = "target", conflicts_with = "root", value_parser = units::within::<u32>(1..=64))]
    connections: u32,
    /// How long to wait for the target's answer before a request fails
    #[arg(long, value_name = "TIME", default_value = "60s", requires = "target", conflicts_with = "root", value_parser = units::parse_time)]
    give_up: Duration,
    /// Allow file locks, which other mounts of the target do not see. Without this option, locks on a target's files
    /// fail (ENOLCK)
    #[arg(long, requires = "target", conflicts_with = "root")]
    local_locks: bool,
    /// Show the statistics of a mount's daemon, by route
    #[arg(long, conflicts_with_all = ["root", "target"])]
    status: bool,
}

/// Interval at which the main thread polls for the end of the mount.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) fn run(args: &Args, context: &CommandContext) -> Result<Report> {
    match (&args.root, &args.target) {
        (Some(root), _) => {
            let options = MountOptions::new(&args.mount_point, root);
            serve(args, options, &root.display().to_string(), context)
        }
        (None, Some(target)) => serve(args, target_options(args, target)?, target, context),
        (None, None) => {
            status(&args.mount_point, context).map_err(|error| error.or_stopped("the mount is not affected"))
        }
    }
}

/// Refuses a mount point that is not empty. One that cannot be read is accepted: a killed daemon leaves a dead mount,
/// which is replaced.
fn ensure_empty(point: &Path) -> Result<()> {
    if std::fs::read_dir(point).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(CliError::Usage(format!(
            "{} is not empty, and a mount would hide its contents: use an empty folder, or --nonempty",
            point.display()
        )));
    }
    Ok(())
}

fn target_options(args: &Args, target: &str) -> Result<MountOptions> {
    let key = super::target::target_key(args.key_file.as_ref(), args.insecure_loopback_for_tests)?;
    let lanes = args.connections as usize;
    let to_error = super::target::to_error;
    let connector = super::target::connector(args.transport, target, &args.nic, key.is_none())?;
    let options = client::ClientOptions { give_up: args.give_up, lanes, ..client::ClientOptions::new(key) };
    let tree = RemoteTree::connect(connector, options).map_err(to_error)?;
    let local_locks = args.local_locks;
    Ok(MountOptions { local_locks, ..MountOptions::of_target(&args.mount_point, tree) })
}

fn serve(args: &Args, mut options: MountOptions, what: &str, context: &CommandContext) -> Result<Report> {
    if !args.nonempty {
        ensure_empty(&args.mount_point)?;
    }
    // Programs request an emulated GPU by this variable.
    options.emulated_gpu = std::env::var_os("HF3FS_GDR_ENABLED").is_some_and(|mode| mode == "emulated");
    context.stop.ignore_second_signal();
    let start = Instant::now();
    let point = options.mount_point.clone();
    let daemon = Daemon::start(options).map_err(mount_error)?;
    // Scripts wait for this line on stderr.
    report::note(&format!("{what} is mounted at {}; Ctrl-C unmounts", point.display()));
    while !daemon.is_over() && !context.stop.is_set() {
        std::thread::sleep(STOP_POLL_INTERVAL);
    }
    let document = document(&daemon.report())?;
    daemon.end().map_err(mount_error)?;
    let mut text = text(&document);
    text.row("mounted", format!("for {}", units::time(start.elapsed())));
    Report::new(document, text)
}

fn status(point: &Path, context: &CommandContext) -> Result<Report> {
    let path = point.join(onehop_serve::STATS);
    let (sender, answer) = channel();
    let file = path.clone();
    // Read by another thread: a stopped daemon does not answer, and only the end of this process ends such a read. Once
    // the daemon has received the request, the kernel delays even that.
    let reader = move || sender.send(std::fs::read_to_string(file));
    std::thread::Builder::new()
        .spawn(reader)
        .map_err(|e| CliError::file("starting a thread to read", &path, e))?;
    let words = loop {
        match answer.recv_timeout(STOP_POLL_INTERVAL) {
            Ok(words) => break words,
            Err(RecvTimeoutError::Timeout) => context.stop.check()?,
            Err(RecvTimeoutError::Disconnected) => {
                break Err(std::io::Error::other("the thread that reads it has ended"));
            }
        }
    };
    let words = words.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => CliError::Failed(format!("no onehop mount at {}", point.display())),
        _ => CliError::file("reading", &path, error),
    })?;
    let document = document(&words)?;
    let text = text(&document);
    Report::new(document, text)
}

fn document(words: &str) -> Result<Value> {
    serde_json::from_str(words)
        .map_err(|e| CliError::Failed(format!("the daemon's report cannot be read: {e}")))
}

fn text(document: &Value) -> ReportText {
    let mut text = ReportText::default();
    let number = |name: &str| document[name].as_u64().unwrap_or(0);
    let counts = ["programs", "buffers", "rings", "open_files"].map(number);
    let [programs, buffers, rings, files] = counts;
    text.row("now", format!("{programs} programs, {buffers} buffers, {rings} rings, {files} open files"));
    if let Some(yours) = document.get("yours") {
        let share =
            |of: &str| (yours[of]["taken"].as_u64().unwrap_or(0), yours[of]["left"].as_u64().unwrap_or(0));
        let ((rings, more), (all, more_of_all)) = (share("rings"), share("rings_and_buffers"));
        let all = format!("{all} rings and buffers ({more_of_all} more are possible)");
        text.row("this user", format!("{rings} rings ({more} more are possible), {all}"));
    }
    for route in document["routes"].as_array().into_iter().flatten() {
        let name = |field: &str| route[field].as_str().unwrap_or_default();
        let simulated = if route["simulated"].as_array().is_some_and(|list| !list.is_empty()) {
            ", simulated"
        } else {
            ""
        };
        let bytes = units::bytes(route["bytes"].as_u64().unwrap_or(0));
        let transfers = route["transfers"].as_u64().unwrap_or(0);
        let (direction, memory) = (name("direction"), name("memory"));
        text.row(name("route"), format!("{direction} {memory}{simulated}: {bytes} in {transfers} transfers"));
    }
    for way in document["writes"].as_array().into_iter().flatten() {
        let count = |field: &str| way[field].as_u64().unwrap_or(0);
        let by = way["by"].as_str().unwrap_or_default();
        text.row("files written", way_text(by, way["why"].as_str(), count("bytes"), count("writes")));
    }
    if let Some(target) = document.get("remote") {
        let name = |field: &str| target[field].as_str().unwrap_or_default();
        let count = |field: &str| target[field].as_u64().unwrap_or(0);
        let connections =
            format!("{} by {}, {} connections", name("target"), name("transport"), count("connections"));
        text.row("target", connections);
        text.row("encrypted", name("encrypted"));
        let (again, repeated) = (count("reconnects"), count("repeated"));
        let lost = count("sessions_lost");
        text.row(
            "outages",
            format!("{again} reconnects, {repeated} requests repeated, {lost} target restarts"),
        );
        if count("forged") > 0 {
            let changed = "connections closed because their data was modified in transit";
            text.row("attacked", format!("{} {changed}", count("forged")));
        }
        if let Some(why) = target["why"].as_str() {
            text.row("no connection", why);
        }
    }
    text.row("refused", number("refused"));
    text.row(
        "failed",
        format!("{}, and {} rings that violated the protocol", number("failed"), number("broken_rings")),
    );
    text
}

fn mount_error(error: Serve) -> CliError {
    match &error {
        Serve::Mount { source, .. } if source.raw_os_error().is_some() => {
            let fix = "Run it as root where /dev/fuse exists, or install fuse3";
            CliError::not_possible("mounting", error.to_string(), fix)
        }
        Serve::Folder { .. } => CliError::Usage(error.to_string()),
        _ => CliError::Failed(error.to_string()),
    }
}
