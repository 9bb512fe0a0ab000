//! Calls that wait for something which does not come keep no lookup waiting: here for a file system that is frozen.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, MountOptions};

use crate::attacks::Disk;
use crate::bed::{Bed, part, part_of, skipped, wait};
use crate::target::{connect, serve};

/// How long lookups may take on a machine that has much else to do.
const SOON: Duration = Duration::from_secs(20);

/// Run by the tests below: calls of all kinds, from many threads, all of which wait.
#[test]
fn caller() {
    let Some(dir) = part_of() else { return };
    // Their own: the kernel that asks locks a folder while names in it change.
    let folder = dir.join("mnt/folder");
    let files: Vec<_> = (0..48)
        .map(|number| {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false);
            if number % 2 == 0 {
                options.custom_flags(rustix::fs::OFlags::DSYNC.bits() as i32);
            }
            options.open(folder.join(number.to_string())).unwrap()
        })
        .collect();
    // The last who have these open: what they hold of the disk is given up when they close them.
    let nameless: Vec<_> = (0..40)
        .map(|number| {
            let name = folder.join(format!("nameless {number}"));
            let file = File::create(&name).unwrap();
            file.write_all_at(&[2; 9000], 0).unwrap();
            std::fs::remove_file(name).unwrap();
            file
        })
        .collect();
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    std::thread::scope(|scope| {
        for (number, file) in files.iter().enumerate() {
            let name = folder.join(number.to_string());
            scope.spawn(move || match number % 8 {
                0..4 => file.write_all_at(&[1; 9000], 0).unwrap(),
                4 => file.set_len(5000).unwrap(),
                5 => std::fs::remove_file(name).unwrap(),
                6 => std::fs::create_dir(name.with_extension("new")).unwrap(),
                _ => std::fs::rename(&name, name.with_extension("moved")).unwrap(),
            });
        }
        drop(nameless);
        std::thread::sleep(Duration::from_secs(2));
        println!("waiting");
        std::io::stdout().flush().unwrap();
    });
}

/// Reads what a program says, until it says this.
fn until(child: &mut Child, word: &str) {
    let (mut said, out) = (String::new(), child.stdout.as_mut().unwrap());
    while !said.contains(word) {
        let mut bytes = [0; 256];
        let count = out.read(&mut bytes).unwrap();
        assert_ne!(count, 0, "{said}");
        said.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
}

/// A bed whose root is a file system of its own, which can be frozen.
struct Freezable {
    disk: Disk,
    bed: Bed,
}

impl Freezable {
    fn start() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            skipped("only root freezes file systems");
            return None;
        }
        let bed = Bed::folder();
        let disk = Disk::mount(&bed.dir)?;
        std::fs::create_dir(disk.0.join("folder")).unwrap();
        Some(Self { disk, bed })
    }

    /// Freezes it, or thaws it; whether that was possible.
    fn freeze(&self, how: &str) -> bool {
        let mut program = Command::new("fsfreeze");
        program.arg(how).arg(&self.disk.0).stderr(Stdio::null());
        program.status().is_ok_and(|status| status.success())
    }

    /// With the folder mounted, lookups go on while calls of all kinds wait.
    fn look_beside(&self, options: MountOptions) {
        let daemon = Daemon::start(options).unwrap();
        let mut caller = part("stalled::caller", &self.bed);
        caller.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut caller = caller.spawn().unwrap();
        until(&mut caller, "ready");
        let is_frozen = self.freeze("--freeze");
        drop(caller.stdin.take());
        until(&mut caller, "waiting");
        // By a thread that may wait for ever where this fails.
        let (say, said) = channel();
        let path = self.bed.mount();
        std::thread::spawn(move || {
            let begun = Instant::now();
            let found = (0..100).all(|number| {
                let name = path.join(format!("nothing{number}"));
                std::fs::symlink_metadata(name).is_err_and(|error| error.kind() == ErrorKind::NotFound)
            });
            let _ = say.send((found, begun.elapsed()));
        });
        let looked = said.recv_timeout(SOON);
        let is_waiting = caller.try_wait().unwrap().is_none();
        self.freeze("--unfreeze");
        let output = wait(caller);
        daemon.end().unwrap();
        if !is_frozen {
            return skipped("fsfreeze is missing, or cannot freeze");
        }
        assert!(output.status.success() && is_waiting);
        let (found, took) = looked.unwrap_or_else(|_| panic!("lookups did not end within {SOON:?}"));
        println!("100 lookups took {took:?}");
        assert!(found);
    }
}

impl Drop for Freezable {
    fn drop(&mut self) {
        // Where a test has failed while it was frozen.
        self.freeze("--unfreeze");
    }
}

#[test]
fn lookups_do_not_wait_behind_calls_that_do() {
    let Some(disk) = Freezable::start() else { return };
    disk.look_beside(MountOptions::new(&disk.bed.mount(), &disk.bed.dir.join("root")));
}

#[test]
fn lookups_of_a_target_do_not_wait_behind_calls_that_do() {
    let Some(disk) = Freezable::start() else { return };
    let (_target, address) = serve(&disk.bed.dir, "127.0.0.1:0");
    disk.look_beside(MountOptions::of_target(&disk.bed.mount(), connect(address)));
}
