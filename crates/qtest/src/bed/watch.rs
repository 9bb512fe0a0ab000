//! Ends QEMU and removes its files when this process is killed and cannot do so itself.

use std::process::{Child, Command, Stdio};

use super::files::Files;

/// A shell that waits for the end of this process: its standard input is a pipe that nobody writes to.
pub(super) struct Watch(Option<Child>);

impl Watch {
    /// Watches over the QEMU with this process id. Without a shell there is just no watch.
    pub(super) fn over(pid: u32, files: &Files) -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", r#"read -r _; kill -9 "$0"; rm -rf "$1" "$2""#, &pid.to_string()]);
        command.arg(files.dir()).arg(files.ram());
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Away from Ctrl-C, which is one of the ends that it waits for.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        Self(command.spawn().ok())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if let Some(shell) = &mut self.0 {
            // Killed before its standard input is closed, so that it does nothing.
            let _ = shell.kill();
            let _ = shell.wait();
        }
    }
}
