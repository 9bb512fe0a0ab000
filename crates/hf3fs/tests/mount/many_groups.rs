//! A user whose threads have the most groups possible: requests take long, but do not delay other users.

use std::io::{ErrorKind, Read, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{Bed, LONG, skipped, subtest, subtest_dir, wait};
use crate::stalled::{missing_names_are_not_found, read_until};

/// The most groups of a thread.
const GROUPS: u32 = 65_536;
const THREADS: usize = 16;
/// How often another user looks up a hundred names.
const HUNDREDS: usize = 2;

/// Run by the test below: looks names up with many threads. Prints how many while the other user did.
#[test]
fn asker() {
    let Some(dir) = subtest_dir() else { return };
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
fn many_groups_do_not_delay_other_users() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root acts as other users");
    }
    let Some(bed) = Bed::start() else { return };
    let mut asker = subtest("many_groups::asker", &bed);
    let mut asker = asker.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    read_until(&mut asker, "ready");
    let (tx, rx) = channel();
    let path = bed.mount();
    std::thread::spawn(move || tx.send((0..HUNDREDS).all(|_| missing_names_are_not_found(&path))));
    let found = rx.recv_timeout(LONG);
    drop(asker.stdin.take());
    let output = wait(asker);
    let text = String::from_utf8_lossy(&output.stdout);
    let asked = text.lines().find_map(|line| line.strip_prefix("asked: ")?.parse::<usize>().ok());
    assert!(output.status.success() && found == Ok(true), "{output:?}");
    // Each of their lookups takes longer than many of the other's. If requests were scheduled by thread instead of by
    // user, several of theirs would run for each of the other's.
    println!("{asked:?} slow lookups meanwhile");
    assert!(asked.is_some_and(|asked| asked < 100 * HUNDREDS), "{asked:?} slow lookups went first");
}
