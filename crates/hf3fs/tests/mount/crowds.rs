//! A user whose threads have as many groups as there can be: what they ask for takes long, and what others ask for does not.

use std::io::{ErrorKind, Read, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{Bed, LONG, part, part_of, skipped, wait};
use crate::stalled::{finds_nothing, until};

/// The most that a thread can have.
const GROUPS: u32 = 65_536;
const THREADS: usize = 16;
/// What another user looks up beside them, in hundreds.
const HUNDREDS: usize = 2;

/// Run by the test below: looks names up by many threads, and says how many while others did.
#[test]
fn asker() {
    let Some(dir) = part_of() else { return };
    become_user(ATTACKER, &(100_000..100_000 + GROUPS).collect::<Vec<_>>());
    let (asked, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (folder, asked, is_over) = (dir.join("mnt/folder"), &asked, &is_over);
            scope.spawn(move || {
                for number in 0.. {
                    let name = folder.join(format!("{thread} {number}"));
                    let found = std::fs::symlink_metadata(name);
                    assert!(found.is_err_and(|error| error.kind() == ErrorKind::NotFound));
                    asked.fetch_add(1, Ordering::AcqRel);
                    if is_over.load(Ordering::Acquire) {
                        return;
                    }
                }
            });
        }
        while asked.load(Ordering::Acquire) < 2 * THREADS {
            std::thread::sleep(Duration::from_millis(5));
        }
        let before = asked.load(Ordering::Acquire);
        println!("ready");
        std::io::stdout().flush().unwrap();
        let _ = std::io::stdin().read(&mut [0]);
        println!("asked: {}", asked.load(Ordering::Acquire) - before);
        is_over.store(true, Ordering::Release);
    });
}

#[test]
fn a_user_with_many_groups_keeps_no_lookup_of_another_waiting() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    let Some(bed) = Bed::start() else { return };
    let mut asker = part("crowds::asker", &bed);
    let mut asker = asker.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    until(&mut asker, "ready");
    let (say, said) = channel();
    let path = bed.mount();
    std::thread::spawn(move || say.send((0..HUNDREDS).all(|_| finds_nothing(&path))));
    let found = said.recv_timeout(LONG);
    drop(asker.stdin.take());
    let output = wait(asker);
    let text = String::from_utf8_lossy(&output.stdout);
    let asked = text.lines().find_map(|line| line.strip_prefix("asked: ")?.parse::<usize>().ok());
    assert!(output.status.success() && found == Ok(true), "{output:?}");
    // Each of theirs takes a processor longer than many of the other's. Where threads have turns and users have none, it is several
    // of theirs to one.
    println!("{asked:?} of theirs");
    assert!(asked.is_some_and(|asked| asked < 100 * HUNDREDS), "{asked:?} of theirs went first");
}
