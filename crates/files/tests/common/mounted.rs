//! An image that the kernel has mounted.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// An image that is mounted as long as this lives.
pub struct Mounted {
    image: PathBuf,
    at: PathBuf,
}

impl Mounted {
    /// Where this machine does not let us, what it said.
    pub fn new(image: &Path, at: PathBuf) -> Result<Self, String> {
        std::fs::create_dir_all(&at).unwrap();
        let image = image.canonicalize().unwrap();
        told(Command::new("mount").args(["-o", "loop"]).args([&image, &at]).output())?;
        Ok(Self { image, at })
    }

    pub fn path(&self) -> &Path {
        &self.at
    }

    /// A file system ends with its last mount, and lets go of the loop device: whoever starts a container copies the
    /// table of mounts, ours with it.
    fn has_ended(&self) -> bool {
        let image = |device: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(device.ok()?.path().join("loop/backing_file")).ok()
        };
        let mut images = std::fs::read_dir("/sys/block").unwrap().filter_map(image);
        images.all(|image| Path::new(image.trim_end()) != self.image)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(&self.at);
        in_time(|| match self.has_ended() {
            true => Ok(()),
            false => Err(format!("{} is unmounted here, and still mounted elsewhere", self.image.display())),
        });
    }
}

/// A process that another thread is starting holds all open files for a moment, so it may take several tries.
pub fn unmount(at: &Path) {
    in_time(|| told(Command::new("umount").arg(at).output()));
}

/// Tries until it is done, or for too long.
pub fn in_time(done: impl Fn() -> Result<(), String>) {
    let start = Instant::now();
    while let Err(why) = done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{why}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn told(output: std::io::Result<Output>) -> Result<(), String> {
    let output = output.map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(said.trim().to_owned()) }
}
