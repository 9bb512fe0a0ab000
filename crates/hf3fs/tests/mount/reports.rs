//! The statistics that programs read: each open one is a text that the daemon keeps, so each user has some.

use std::fs::File;
use std::io::Read;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{part, part_of, run};
use crate::clock::Attack;
use crate::exhaustion::{Small, open_to_all};

/// Run by [`reports_are_shared`]: opens the statistics until there are no more, then as another user.
#[test]
fn reader_of_reports() {
    let Some(dir) = part_of() else { return };
    let stats = dir.join("mnt/3fs-virt/onehop/stats");
    let few = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: few.maximum, ..few }).unwrap();
    let held = {
        let stats = stats.clone();
        std::thread::spawn(move || {
            become_user(ATTACKER, &[]);
            let mut held = Vec::new();
            let refused = loop {
                match File::open(&stats) {
                    Ok(file) => held.push(file),
                    Err(error) => break error,
                }
                assert!(held.len() < 2000, "nothing limits them");
            };
            assert_eq!(refused.raw_os_error(), Some(Errno::MFILE.raw_os_error()));
            held
        })
    };
    let held = held.join().unwrap();
    assert!(held.len() >= 100, "{} are few", held.len());
    become_user(ATTACKER + 1, &[]);
    let mut said = String::new();
    File::open(&stats).unwrap().read_to_string(&mut said).unwrap();
    assert!(said.starts_with('{'), "{said}");
}

#[test]
fn reports_are_shared() {
    let _attack = Attack::begin();
    let Some(small) = Small::start(false) else { return };
    open_to_all(&small.bed);
    run(part("reports::reader_of_reports", &small.bed));
}
