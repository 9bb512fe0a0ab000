//! Kills QEMU and removes its files when this process is killed and cannot do so itself.

use std::process::{Child, Command, Stdio};

use super::files::Files;

/// A shell that waits for this process to end: its standard input is a pipe that is never written to.
pub(super) struct QemuWatch(Option<Child>);

impl QemuWatch {
    /// Watches the QEMU with this process ID. Without a shell there is no watch.
    pub(super) fn over(pid: u32, files: &Files) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", r#"read -r _; kill -9 "$0"; rm -rf "$1" "$2""#, &pid.to_string()]);
        command.arg(files.dir()).arg(files.ram());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // In its own process group: Ctrl-C is one of the ends that it waits for.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Self(command.spawn().ok())
    }
}

impl Drop for QemuWatch {
    fn drop(&mut self) {
        if let Some(shell) = &mut self.0 {
            // Killed before its standard input is closed, so that it does nothing.
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}
