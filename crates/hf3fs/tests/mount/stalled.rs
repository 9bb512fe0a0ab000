//! Calls that wait, here for a frozen file system, must not delay lookups.

use std::fs::{File, Permissions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use onehop_serve::{Daemon, MountOptions};
use onehop_target::server::{ServerOptions, Target};
use onehop_target::tcp::TcpAcceptor;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::attacks::{ATTACKER, Disk, become_user};
use crate::bed::{Bed, skipped, subtest, subtest_dir, wait};
use crate::clock::Attack;
use crate::target::{connect, key, serve};

/// The time limit of lookups on a busy machine.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(20);

/// The limit on a target mount's open files in these tests.
const FILES: usize = 256;

/// Hundreds of lookups: more requests than a target accepts after one that it has not answered.
const HUNDREDS: usize = 42;

/// Run by the tests below: calls of all kinds from many threads, all of which wait.
#[test]
fn caller() {
    let Some(dir) = subtest_dir() else { return };
    // A folder of their own, because the kernel locks it while names in it change.
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
    // The last references to these files: closing them frees their blocks.
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

/// Run by the tests below: an ordinary user opens and closes a file more often than a mount may have files open.
#[test]
fn opener() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let (path, start) = (dir.join("mnt/read"), Instant::now());
    for _ in 0..2 * FILES {
        while let Err(error) = File::open(&path) {
            let is_full = error.raw_os_error() == Some(Errno::MFILE.raw_os_error());
            assert!(is_full && start.elapsed() < LOOKUP_TIMEOUT, "{error}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// The length of each write: the most that the kernel passes at once.
const LONG_WRITE: usize = 1 << 20;

/// Run by the tests below: an ordinary user's long writes, each on its own thread. Prints how many were refused.
#[test]
fn writer() {
    let Some(dir) = subtest_dir() else { return };
    let of = |name: &str| std::env::var(name).unwrap();
    let (mount, count) = (of("ONEHOP_TEST_MOUNT"), of("ONEHOP_TEST_WRITES").parse().unwrap());
    become_user(ATTACKER, &[]);
    let all_sync = std::env::var_os("ONEHOP_TEST_ALL_SYNC").is_some();
    let files: Vec<_> = (0..count)
        .map(|number| {
            let mut options = File::options();
            options.write(true).create(true).truncate(false);
            if all_sync || number % 2 == 0 {
                options.custom_flags(rustix::fs::OFlags::DSYNC.bits() as i32);
            }
            options.open(dir.join(&mount).join(format!("folder/{mount} {number}"))).unwrap()
        })
        .collect();
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    let (bytes, begin) = (vec![1; LONG_WRITE], Barrier::new(count + 1));
    let write = |file: &File| {
        begin.wait();
        file.write_all_at(&bytes, 0)
    };
    let done: Vec<_> = std::thread::scope(|scope| {
        let writes: Vec<_> = files.iter().map(|file| scope.spawn(|| write(file))).collect();
        begin.wait();
        std::thread::sleep(Duration::from_secs(4));
        if all_sync {
            // Their own reads still work. If they do not, this returns when the file system is thawed.
            let read = std::fs::read(dir.join(&mount).join("own"));
            assert_eq!(read.unwrap().len(), LONG_WRITE);
        }
        println!("waiting");
        std::io::stdout().flush().unwrap();
        writes.into_iter().map(|write| write.join().unwrap()).collect()
    });
    let errors: Vec<_> = done.into_iter().filter_map(Result::err).collect();
    let is_refused = |error: &std::io::Error| error.raw_os_error() == Some(Errno::NOMEM.raw_os_error());
    assert!(errors.iter().all(is_refused), "{errors:?}");
    println!("refused: {}", errors.len());
}

/// The number of files whose attributes are set, and how many of the calls must be refused.
const FILES_TO_SET: usize = 300;
const REFUSED: usize = 200;

/// Run by the test below: an ordinary user sets long attributes, each on its own thread. Prints how many were refused.
#[test]
fn attribute_setter() {
    let Some(dir) = subtest_dir() else { return };
    become_user(ATTACKER, &[]);
    let create = |number| File::create(dir.join(format!("mnt/folder/file {number}"))).unwrap();
    let (files, value): (Vec<_>, _) = ((0..FILES_TO_SET).map(create).collect(), vec![1; 57_000]);
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    let set_attribute = |file: &File| rustix::fs::fsetxattr(file, "user.long", &value, XattrFlags::empty());
    let refused = std::thread::scope(|scope| {
        let calls: Vec<_> = files.iter().map(|file| scope.spawn(|| set_attribute(file))).collect();
        let start = Instant::now();
        while calls.iter().filter(|call| call.is_finished()).count() < REFUSED
            && start.elapsed() < LOOKUP_TIMEOUT
        {
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("waiting");
        std::io::stdout().flush().unwrap();
        calls
            .into_iter()
            .filter_map(|call| call.join().unwrap().err())
            .filter(|why| *why == Errno::NOMEM)
            .count()
    });
    println!("refused: {refused}");
}

/// Reads a program's output up to this word.
pub fn read_until(child: &mut Child, word: &str) {
    let (mut stdout, out) = (String::new(), child.stdout.as_mut().unwrap());
    while !stdout.contains(word) {
        let mut bytes = [0; 256];
        let count = out.read(&mut bytes).unwrap();
        assert_ne!(count, 0, "{stdout}");
        stdout.push_str(&String::from_utf8_lossy(&bytes[..count]));
    }
}

/// A file system with room for all writes.
fn disk(dir: &Path) -> Option<Disk> {
    let (image, root) = (dir.join("image"), dir.join("root"));
    File::create(&image).unwrap().set_len(512 << 20).unwrap();
    let ran = |program: &str, arguments: &[&str], paths: &[&Path]| {
        let output = Command::new(program).args(arguments).args(paths).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !ran("mkfs.ext4", &["-q", "-F"], &[&image]) || !ran("mount", &["-o", "loop"], &[&image, &root]) {
        skipped("there is no mkfs.ext4, or there are no loop devices");
        return None;
    }
    Some(Disk(root))
}

/// Looks up names that do not exist. Returns whether the errors are right.
pub fn missing_names_are_not_found(path: &Path) -> bool {
    (0..100).all(|number| {
        let name = path.join(format!("nothing{number}"));
        std::fs::symlink_metadata(name).is_err_and(|error| error.kind() == ErrorKind::NotFound)
    })
}

/// A bed whose root is a separate file system, which can be frozen.
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
        let disk = disk(&bed.dir)?;
        std::fs::create_dir(disk.0.join("folder")).unwrap();
        std::fs::set_permissions(disk.0.join("folder"), Permissions::from_mode(0o777)).unwrap();
        for name in ["read", "own"] {
            std::fs::write(disk.0.join(name), vec![7; LONG_WRITE]).unwrap();
        }
        Some(Self { disk, bed })
    }

    /// Makes an ordinary user's writes wait on the first `of` mounts, `writes` on each. Meanwhile another user must be
    /// able to look up names and to read on all mounts. Returns how many writes were refused; the others must succeed.
    fn write_while_frozen(&self, mounts: &[&str], (of, writes): (usize, usize)) -> Option<usize> {
        let mut writers: Vec<_> = mounts[..of]
            .iter()
            .map(|mount| {
                let mut writer = subtest("stalled::writer", &self.bed);
                writer.env("ONEHOP_TEST_MOUNT", mount).env("ONEHOP_TEST_WRITES", writes.to_string());
                writer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
            })
            .collect();
        writers.iter_mut().for_each(|writer| read_until(writer, "ready"));
        let is_frozen = self.freeze("--freeze");
        writers.iter_mut().for_each(|writer| drop(writer.stdin.take()));
        writers.iter_mut().for_each(|writer| read_until(writer, "waiting"));
        let (tx, rx) = channel();
        let paths: Vec<_> = mounts.iter().map(|mount| self.bed.dir.join(mount)).collect();
        std::thread::spawn(move || {
            for path in paths {
                let _ = tx.send((missing_names_are_not_found(&path), std::fs::read(path.join("read"))));
            }
        });
        let went_on: Vec<_> = mounts.iter().map_while(|_| rx.recv_timeout(LOOKUP_TIMEOUT).ok()).collect();
        let are_waiting = writers.iter_mut().all(|writer| writer.try_wait().unwrap().is_none());
        self.freeze("--unfreeze");
        let outputs: Vec<_> = writers.into_iter().map(wait).collect();
        if !is_frozen {
            skipped("fsfreeze is missing, or cannot freeze");
            return None;
        }
        assert_eq!(went_on.len(), mounts.len(), "lookups and reads did not return within {LOOKUP_TIMEOUT:?}");
        for (found, bytes) in went_on {
            assert!(found && bytes.unwrap() == vec![7; LONG_WRITE]);
        }
        let refused = outputs.into_iter().map(|output| {
            let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{stdout}");
            let count = stdout.lines().find_map(|line| line.split("refused: ").nth(1));
            count.unwrap_or_else(|| panic!("{stdout}")).trim().parse::<usize>().unwrap()
        });
        let refused = refused.sum();
        assert!(are_waiting);
        Some(refused)
    }

    /// Freezes or thaws the file system. Returns whether it succeeded.
    fn freeze(&self, how: &str) -> bool {
        let mut program = Command::new("fsfreeze");
        program.arg(how).arg(&self.disk.0).stderr(Stdio::null());
        program.status().is_ok_and(|status| status.success())
    }

    /// Mounts the folder, and checks that lookups work while calls of all kinds wait.
    fn look_up_while_frozen(&self, options: MountOptions) {
        let daemon = Daemon::start(options).unwrap();
        let mut caller = subtest("stalled::caller", &self.bed);
        caller.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut caller = caller.spawn().unwrap();
        read_until(&mut caller, "ready");
        let is_frozen = self.freeze("--freeze");
        drop(caller.stdin.take());
        read_until(&mut caller, "waiting");
        // By another thread, which waits forever if this fails.
        let (tx, rx) = channel();
        let path = self.bed.mount();
        std::thread::spawn(move || {
            let hundred = || {
                let begun = Instant::now();
                tx.send((missing_names_are_not_found(&path), begun.elapsed()))
            };
            (0..HUNDREDS).try_for_each(|_| hundred())
        });
        let looked: Vec<_> = (0..HUNDREDS).map_while(|_| rx.recv_timeout(LOOKUP_TIMEOUT).ok()).collect();
        let opened = wait(subtest("stalled::opener", &self.bed).spawn().unwrap());
        let is_waiting = caller.try_wait().unwrap().is_none();
        self.freeze("--unfreeze");
        let output = wait(caller);
        daemon.end().unwrap();
        if !is_frozen {
            return skipped("fsfreeze is missing, or cannot freeze");
        }
        assert!(output.status.success() && is_waiting);
        assert!(opened.status.success(), "another user cannot open files, because closed ones still count");
        assert_eq!(looked.len(), HUNDREDS, "lookups did not return within {LOOKUP_TIMEOUT:?}");
        println!("100 lookups took {:?}", looked.iter().map(|(_, took)| took).max());
        assert!(looked.iter().all(|(found, _)| *found));
    }
}

impl Drop for Freezable {
    fn drop(&mut self) {
        // A failed test may have left it frozen.
        self.freeze("--unfreeze");
    }
}

#[test]
fn lookups_do_not_wait_for_stalled_calls() {
    let _attack = Attack::begin();
    let Some(disk) = Freezable::start() else { return };
    disk.look_up_while_frozen(MountOptions::new(&disk.bed.mount(), &disk.bed.dir.join("root")));
}

#[test]
fn lookups_of_a_target_do_not_wait_for_stalled_calls() {
    let _attack = Attack::begin();
    let Some(disk) = Freezable::start() else { return };
    let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
    let address = acceptor.local().unwrap();
    let mut options = ServerOptions::new(&disk.bed.dir.join("root"), key());
    options.limits.files = FILES;
    let _target = Target::start(options, vec![Box::new(acceptor)]).unwrap();
    disk.look_up_while_frozen(MountOptions::of_target(&disk.bed.mount(), connect(address)));
}

#[test]
fn stalled_writes_do_not_block_other_calls() {
    let _attack = Attack::begin();
    let Some(disk) = Freezable::start() else { return };
    let options = MountOptions::new(&disk.bed.mount(), &disk.bed.dir.join("root"));
    // As on a machine with 4 GiB.
    let daemon = Daemon::start(MountOptions { write_memory: 1 << 30, ..options }).unwrap();
    let refused = disk.write_while_frozen(&["mnt"], (1, 300));
    daemon.end().unwrap();
    assert!(refused.is_none_or(|refused| refused == 0), "{refused:?}");
}

#[test]
fn reads_do_not_wait_for_durable_writes_of_their_user() {
    let _attack = Attack::begin();
    let Some(disk) = Freezable::start() else { return };
    let (_target, address) = serve(&disk.bed.dir, "127.0.0.1:0");
    let daemon = Daemon::start(MountOptions::of_target(&disk.bed.mount(), connect(address))).unwrap();
    let mut writer = subtest("stalled::writer", &disk.bed);
    writer.env("ONEHOP_TEST_MOUNT", "mnt").env("ONEHOP_TEST_WRITES", "100").env("ONEHOP_TEST_ALL_SYNC", "1");
    let mut writer = writer.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    read_until(&mut writer, "ready");
    let is_frozen = disk.freeze("--freeze");
    drop(writer.stdin.take());
    let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
    let (tx, rx) = channel();
    std::thread::spawn(move || lines.for_each(|line| drop(tx.send(line.unwrap()))));
    let has_read =
        std::iter::from_fn(|| rx.recv_timeout(LOOKUP_TIMEOUT).ok()).any(|line| line.contains("waiting"));
    let is_waiting = writer.try_wait().unwrap().is_none();
    disk.freeze("--unfreeze");
    let output = wait(writer);
    daemon.end().unwrap();
    if !is_frozen {
        return skipped("fsfreeze is missing, or cannot freeze");
    }
    assert!(has_read && is_waiting && output.status.success(), "{has_read} {is_waiting} {output:?}");
}

#[test]
fn writes_beyond_the_memory_limit_are_refused() {
    let _attack = Attack::begin();
    let Some(disk) = Freezable::start() else { return };
    let options = MountOptions::new(&disk.bed.mount(), &disk.bed.dir.join("root"));
    let daemon = Daemon::start(MountOptions { write_memory: 16 << 20, ..options }).unwrap();
    let refused = disk.write_while_frozen(&["mnt"], (1, 300));
    daemon.end().unwrap();
    assert!(refused.is_none_or(|refused| refused > 200), "{refused:?}");
}

#[test]
fn attributes_beyond_the_memory_limit_are_refused() {
    let _attack = Attack::begin();
    let Some(disk) = Freezable::start() else { return };
    let options = MountOptions::new(&disk.bed.mount(), &disk.bed.dir.join("root"));
    let daemon = Daemon::start(MountOptions { write_memory: 8 << 20, ..options }).unwrap();
    let mut attribute_setter = subtest("stalled::attribute_setter", &disk.bed);
    let mut attribute_setter = attribute_setter.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    read_until(&mut attribute_setter, "ready");
    let is_frozen = disk.freeze("--freeze");
    drop(attribute_setter.stdin.take());
    read_until(&mut attribute_setter, "waiting");
    disk.freeze("--unfreeze");
    let output = wait(attribute_setter);
    daemon.end().unwrap();
    if !is_frozen {
        return skipped("fsfreeze is missing, or cannot freeze");
    }
    let stdout = String::from_utf8_lossy(&output.stdout);
    let refused = stdout.lines().find_map(|line| line.strip_prefix("refused: ")?.parse::<usize>().ok());
    assert!(output.status.success() && refused.is_some_and(|refused| refused >= REFUSED), "{stdout}");
}

/// On a target with few buffers, two mounts need all of them.
#[test]
fn stalled_writes_of_two_mounts_leave_buffers_to_others() {
    let _attack = Attack::begin();
    let Some(disk) = Freezable::start() else { return };
    let acceptor = TcpAcceptor::listen("127.0.0.1:0").unwrap();
    let address = acceptor.local().unwrap();
    let mut options = ServerOptions::new(&disk.bed.dir.join("root"), key());
    options.limits.buffers = 32;
    let _target = Target::start(options, vec![Box::new(acceptor)]).unwrap();
    let mounts = ["mnt", "second", "third"];
    let daemons = mounts.map(|mount| {
        let path: PathBuf = disk.bed.dir.join(mount);
        std::fs::create_dir_all(&path).unwrap();
        let options = MountOptions::of_target(&path, connect(address));
        let options = MountOptions { write_memory: 1 << 30, ..options };
        Daemon::start(options).unwrap()
    });
    let refused = disk.write_while_frozen(&mounts, (2, 100));
    daemons.into_iter().for_each(|daemon| daemon.end().unwrap());
    assert!(refused.is_none_or(|refused| refused == 0), "{refused:?}");
}
