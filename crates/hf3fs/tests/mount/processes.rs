//! Daemons and targets in their own processes, so that they can be killed.

use std::io::Read;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, MountOptions};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::bed::{Bed, LONG, skipped};
use crate::target::{connect, serve};

/// A process that is killed on drop.
pub struct KilledOnDrop(pub Child);

/// The default descriptor limit.
const DESCRIPTORS: u64 = 1 << 16;

impl KilledOnDrop {
    fn start(bed: &Bed, test: &str, of: &str, files: u64) -> Self {
        let _ = std::fs::remove_file(bed.dir.join("ready"));
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["--exact", test]).env("ONEHOP_TEST_PROCESS", &bed.dir).env("ONEHOP_TEST_OF", of);
        process.env("ONEHOP_TEST_FILES", files.to_string());
        Self(process.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// A daemon that mounts the bed's folder, or a target. If it cannot, prints that the test is skipped and returns
    /// `None`.
    pub fn daemon(bed: &Bed, target: Option<SocketAddr>) -> Option<Self> {
        Self::daemon_with(bed, target, DESCRIPTORS)
    }

    /// As [`Self::daemon`], with a descriptor limit.
    pub fn daemon_with(bed: &Bed, target: Option<SocketAddr>, files: u64) -> Option<Self> {
        if std::fs::metadata("/dev/fuse").is_err() || !rustix::process::geteuid().is_root() {
            skipped("only root mounts and unmounts as it likes, and there must be a /dev/fuse");
            return None;
        }
        let of = target.map_or_else(String::new, |address| address.to_string());
        let mut this = Self::start(bed, "processes::daemon", &of, files);
        if let Err(status) = this.ready(bed) {
            skipped(&format!("nothing can be mounted here: {status}"));
            return None;
        }
        Some(this)
    }

    /// A target with the bed's folder, and its address.
    pub fn target(bed: &Bed, address: &str) -> (Self, String) {
        Self::target_with(bed, address, DESCRIPTORS)
    }

    /// As [`Self::target`], with a descriptor limit.
    pub fn target_with(bed: &Bed, address: &str, files: u64) -> (Self, String) {
        let mut this = Self::start(bed, "processes::target", address, files);
        let address = this.ready(bed).unwrap_or_else(|status| panic!("no target: {status}"));
        (this, address)
    }

    /// Waits until it is ready; its exit status if it ended before.
    fn ready(&mut self, bed: &Bed) -> Result<String, std::process::ExitStatus> {
        let start = Instant::now();
        loop {
            if let Ok(text) = std::fs::read_to_string(bed.dir.join("ready")) {
                return Ok(text);
            }
            if let Some(status) = self.0.try_wait().unwrap() {
                return Err(status);
            }
            assert!(start.elapsed() < LONG, "the process does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// In that process: the folder, and the address to serve at or to mount.
fn serve_arguments() -> Option<(PathBuf, String)> {
    let dir = std::env::var("ONEHOP_TEST_PROCESS").ok()?;
    let files = std::env::var("ONEHOP_TEST_FILES").unwrap().parse().unwrap();
    let limit = getrlimit(Resource::Nofile).maximum.map_or(files, |limit| limit.min(files));
    setrlimit(Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    Some((dir.into(), std::env::var("ONEHOP_TEST_OF").unwrap()))
}

fn report_ready(dir: &std::path::Path, text: &str) {
    std::fs::write(dir.join("ready.new"), text).unwrap();
    std::fs::rename(dir.join("ready.new"), dir.join("ready")).unwrap();
    // Until the test ends.
    let _ = std::io::stdin().read(&mut [0]);
}

/// Run by [`KilledOnDrop::daemon`].
#[test]
fn daemon() {
    let Some((dir, target)) = serve_arguments() else { return };
    let mut options = if target.is_empty() {
        MountOptions::new(&dir.join("mnt"), &dir.join("root"))
    } else {
        MountOptions::of_target(&dir.join("mnt"), connect(target.parse().unwrap()))
    };
    options.emulated_gpu = true;
    let _daemon = Daemon::start(options).unwrap();
    report_ready(&dir, "");
}

/// Run by [`KilledOnDrop::target`].
#[test]
fn target() {
    let Some((dir, address)) = serve_arguments() else { return };
    let (_target, address) = serve(&dir, &address);
    report_ready(&dir, &address.to_string());
}
