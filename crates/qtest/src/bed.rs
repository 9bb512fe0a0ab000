//! QEMU for tests: started with files of its own, stopped and cleaned up on drop.

mod files;
mod options;
mod watch;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use onehop_os::{ControllerBackend, Deadline};

use crate::link::QemuLink;
use crate::{Error, QemuDrive, Result};
use files::Files;
pub use options::QemuOptions;
use watch::QemuWatch;

/// QEMU is ready in well under a second; the rest is for a busy host.
const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// A QEMU with an NVMe drive and stopped vCPUs. Dropping it kills it and removes its files.
pub struct Qemu {
    child: Child,
    files: Files,
    images: Vec<PathBuf>,
    watch: Option<QemuWatch>,
}

impl Qemu {
    /// Starts QEMU and waits until it responds. `None` if it is not installed.
    ///
    /// # Errors
    /// When its files cannot be created, or it refuses its options.
    pub fn start(options: &QemuOptions) -> Result<Option<Self>> {
        let files = Files::make(options)?;
        let images = files.images(options)?;
        let log = files.log_file()?;
        let mut command = Command::new(&options.program);
        command
            .args(options.command_line(&files, &images))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        // In its own process group: Ctrl-C would end QEMU before the driver under test can clean up.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let child = match command.spawn() {
            Ok(child) => child,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::bed(format!("starting {}", options.program.display()), e)),
        };
        let watch = Some(QemuWatch::over(child.id(), &files));
        let mut qemu = Self { child, files, images, watch };
        qemu.wait_until_ready()?;
        Ok(Some(qemu))
    }

    /// As [`Qemu::start`]; if QEMU is not installed, stderr says that the test was skipped.
    ///
    /// # Errors
    /// As for [`Qemu::start`].
    pub fn start_or_skip(options: &QemuOptions) -> Result<Option<Self>> {
        let qemu = Self::start(options)?;
        if qemu.is_none() {
            // The test runner would hide the output of eprintln in a passing test.
            let line = format!("SKIPPED: {} is not installed\n", options.program.display());
            let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
        }
        Ok(qemu)
    }

    /// The drive's backend. QEMU serves one user at a time: drop the earlier backend first.
    ///
    /// # Errors
    /// As for [`crate::open`].
    pub fn port(&self) -> Result<ControllerBackend> {
        crate::open(&self.spec())
    }

    /// The drive with what its backend does not show. One user at a time, as for [`Qemu::port`].
    ///
    /// # Errors
    /// As for [`crate::open`].
    pub fn model(&self) -> Result<QemuDrive> {
        QemuDrive::open(&self.spec())
    }

    /// The drive's name, without `qtest:`.
    #[must_use]
    pub fn spec(&self) -> String {
        format!("{},{}", self.files.socket().display(), self.files.ram().display())
    }

    /// The image of namespace `nsid`. A block's data is at its number times the block size.
    #[must_use]
    pub fn image(&self, nsid: u32) -> Option<&Path> {
        self.images.get(nsid.checked_sub(1)? as usize).map(PathBuf::as_path)
    }

    /// QEMU's stderr.
    #[must_use]
    pub fn log(&self) -> String {
        self.files.log()
    }

    /// Kills QEMU, like a crash.
    pub fn kill(&mut self) {
        // Before QEMU's process ID can be reused.
        self.watch = None;
        // Fails only if QEMU has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let until = Deadline::after(READY_TIMEOUT);
        loop {
            let ended = self.child.try_wait().map_err(|e| Error::bed("waiting for QEMU", e))?;
            if let Some(status) = ended {
                return Err(Error::NotReady { why: format!("{status}: {}", self.log().trim()) });
            }
            // It responds once the whole machine has been created.
            if let Ok(link) =
                QemuLink::connect(&self.files.socket(), until.left().max(Duration::from_millis(1)))
                && link.read32(0).is_ok()
            {
                return Ok(());
            }
            if until.passed() {
                return Err(Error::NotReady { why: format!("no response within {READY_TIMEOUT:?}") });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        self.kill();
    }
}
