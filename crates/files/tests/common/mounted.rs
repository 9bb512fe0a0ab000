//! An image that the kernel has mounted.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// An image that is mounted until this is dropped.
pub struct Mounted {
    image: PathBuf,
    at: PathBuf,
}

impl Mounted {
    /// Mounts the image. The error is what this machine said.
    pub fn new(image: &Path, at: PathBuf) -> Result<Self, String> {
        std::fs::create_dir_all(&at).unwrap();
        let image = image.canonicalize().unwrap();
        done(Command::new("mount").args(["-o", "loop"]).args([&image, &at]).output())?;
        Ok(Self { image, at })
    }

    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Whether the file system is gone. It lives, and keeps the loop device, until its last mount is gone, and a
    /// container that is being started copies the mount table with our mount in it.
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
            false => Err(format!("{} is unmounted here but still mounted elsewhere", self.image.display())),
        });
    }
}

/// Unmounts, with retries: a process that another thread starts briefly holds all open files.
pub fn unmount(at: &Path) {
    in_time(|| done(Command::new("umount").arg(at).output()));
}

/// Retries until it succeeds, or fails after too long.
pub fn in_time(done: impl Fn() -> Result<(), String>) {
    let start = Instant::now();
    while let Err(why) = done() {
        assert!(start.elapsed() < Duration::from_secs(20), "{why}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn done(output: std::io::Result<Output>) -> Result<(), String> {
    let output = output.map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(said.trim().to_owned()) }
}
