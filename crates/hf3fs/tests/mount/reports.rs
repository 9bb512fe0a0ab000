//! The statistics that programs read. The daemon keeps the text of each open file, so their number is limited per user.

use std::fs::File;
use std::io::Read;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::attacks::{ATTACKER, become_user};
use crate::bed::{run, subtest, subtest_dir};
use crate::clock::Attack;
use crate::exhaustion::{SmallDaemon, make_folder_writable};

/// Run by [`open_reports_are_limited_per_user`]: opens the statistics until an error, then as another user.
#[test]
fn report_reader() {
    let Some(dir) = subtest_dir() else { return };
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
                assert!(held.len() < 2000, "there is no limit");
            };
            assert_eq!(refused.raw_os_error(), Some(Errno::MFILE.raw_os_error()));
            held
        })
    };
    let held = held.join().unwrap();
    assert!(held.len() >= 100, "only {} reports", held.len());
    become_user(ATTACKER + 1, &[]);
    let mut text = String::new();
    File::open(&stats).unwrap().read_to_string(&mut text).unwrap();
    assert!(text.starts_with('{'), "{text}");
}

#[test]
fn open_reports_are_limited_per_user() {
    let _attack = Attack::begin();
    let Some(small) = SmallDaemon::start(false) else { return };
    make_folder_writable(&small.bed);
    run(subtest("reports::report_reader", &small.bed));
}
