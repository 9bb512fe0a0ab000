//! Success: reads and writes of every kind, discovery, and what GPUs cannot do.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onehop_drive::{Error, GpuSetup, Op, Placement};
use onehop_gpu::{Emulated, Gpu, Place};
use onehop_os::StopSignal;

use crate::target::{BLOCK, Config, NQN, Target, pattern};
use crate::{open, try_open};

/// Writes and reads ranges of many lengths, and compares them with the target's content.
fn exercise(config: Config, options: &str) {
    let target = Target::start(config);
    let drive = open(&target, options);
    assert_eq!(drive.identity().serial(), "FABRIC0001");
    assert!(!drive.identity().simulated);
    let ns = drive.namespace(1).unwrap().clone();
    let queue = drive.queue().unwrap();
    let all = 300 * BLOCK;
    let buffer = drive.buffer(all).unwrap();
    let host = buffer.host().unwrap().clone();
    for (lba, blocks) in [(0, 1), (7, 8), (8, 9), (100, 300), (3796, 300)] {
        let bytes = blocks as usize * BLOCK;
        host.fill(0, all, 0).unwrap();
        queue.read(&ns, lba, blocks, &buffer, 0).unwrap();
        let want = target.shared.media.lock().unwrap()[lba as usize * BLOCK..][..bytes].to_vec();
        assert!(host.to_vec(0, bytes).unwrap() == want, "read of {blocks} at {lba}, {options}");
        assert!(host.to_vec(bytes, all - bytes).unwrap().iter().all(|byte| *byte == 0), "beyond the read");
        let fresh: Vec<u8> = pattern(bytes).iter().map(|byte| byte ^ lba as u8 ^ 0x5a).collect();
        host.write(0, &fresh).unwrap();
        queue.write(&ns, lba, blocks, &buffer, 0).unwrap();
        let now = target.shared.media.lock().unwrap()[lba as usize * BLOCK..][..bytes].to_vec();
        assert!(now == fresh, "write of {blocks} at {lba}, {options}");
    }
    queue.flush(&ns).unwrap();
    assert_eq!(drive.log_page(2, u32::MAX, 512).unwrap().len(), 512);
    drop((queue, drive));
    assert_eq!(target.breaches(), Vec::<String>::new(), "{options}");
    assert_eq!(target.shared.seen.lock().unwrap().shutdowns, 1);
}

#[test]
fn blocks_are_written_and_read_unchanged() {
    exercise(Config::default(), "");
    exercise(Config { success: false, split: 4 << 20, max_h2c: 128 << 10, ..Config::default() }, "");
    exercise(Config { cpda: 31, padding: 9, split: 1000, ..Config::default() }, "");
    exercise(Config { capsule: 0, mdts: 0, ..Config::default() }, "");
}

#[test]
fn digests_are_made_and_checked() {
    for digests in ["?digests=header", "?digests=data", "?digests=all"] {
        exercise(Config::default(), digests);
        exercise(Config { cpda: 3, padding: 4, success: false, split: 700, ..Config::default() }, digests);
    }
}

#[test]
fn a_missing_or_refusing_target_is_reported_with_the_reason() {
    let refused = |target: &Target, options: &str| try_open(target, options).err().unwrap();
    let without = Target::start(Config { digests: 1, ..Config::default() });
    let said = refused(&without, "?digests=all");
    assert!(said.contains("header and data digests were asked for and header digests granted"), "{said}");
    let closed = Target::start(Config::default());
    closed.shared.is_down.store(true, std::sync::atomic::Ordering::Release);
    let said = refused(&closed, "");
    assert!(said.contains("may not speak NVMe/TCP") || said.contains("reset"), "{said}");
    let secret = Target::start(Config { authreq: 2, ..Config::default() });
    assert!(refused(&secret, "").contains("dhchap=FILE"));
    let other = Target::start(Config::default());
    let name: onehop_fabrics::SubsystemAddress =
        format!("nvme-tcp://127.0.0.1:{}/nqn.no", other.port).parse().unwrap();
    let said = onehop_fabrics::open(&name, &StopSignal::default()).err().unwrap().to_string();
    assert!(said.contains("no subsystem of this name"), "{said}");
    // A port without a listener.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let name: onehop_fabrics::SubsystemAddress =
        format!("nvme-tcp://127.0.0.1:{free}/{NQN}").parse().unwrap();
    let start = Instant::now();
    let said = onehop_fabrics::open(&name, &StopSignal::default()).err().unwrap().to_string();
    assert!(said.contains("refused") && start.elapsed() < Duration::from_secs(5), "{said}");
}

/// Targets that do not know the secrets, or violate the protocol of proving it.
#[test]
fn an_invalid_proof_is_rejected() {
    const SECRET: &str = "DHHC-1:00:HyKIofh8AbmtBGU0XjaATtRK+MfwUBYJV+Oy2GdVHAwbo+Ie:";
    let file = std::env::temp_dir().join(format!("onehop-fabrics-secret-{}", std::process::id()));
    std::fs::write(&file, SECRET).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let one = format!("?dhchap={}", file.display());
    let both = format!("{one}&dhchap-ctrl={}", file.display());
    let challenge = |length: u8, hash: u8, group: u8| {
        [&[1, 1, 0, 0, 0, 0, length, 0, hash, group, 0, 0, 9, 0, 0, 0][..], &[5; 64]].concat()
    };
    let proved = |is: u8| [&[1, 3, 0, 0, 0, 0, 32, 0, is, 0, 0, 0, 0, 0, 0, 0][..], &[6; 32]].concat();
    let good = challenge(32, 1, 0);
    let last =
        |target: &Target| target.shared.seen.lock().unwrap().proofs.last().map(|sent| sent[..2].to_vec());
    for (authreq, proofs, options, words) in [
        (2, vec![], &one, "came out of order"),
        (2, vec![challenge(64, 1, 0)], &one, "a challenge of 64 bytes"),
        (2, vec![challenge(32, 9, 0)], &one, "hash 9 is not known"),
        (2, vec![challenge(32, 1, 1)], &one, "DH group 1 with 0 bytes"),
        (2, vec![vec![0, 0xf1, 0, 0, 0, 0, 1, 1]], &one, "does not accept the secret"),
        (2, vec![good.clone(), vec![0, 0xf1, 0, 0, 0, 0, 1, 1]], &one, "does not accept the secret"),
        (2, vec![good.clone(), proved(0)], &both, "does not know its own secret"),
        (2, vec![good.clone(), proved(1)], &both, "does not know its own secret"),
        (0, vec![], &both, "the target proves nothing"),
        (6, vec![], &one, "secure channel"),
    ] {
        let target = Target::start(Config { authreq, proofs: proofs.clone(), ..Config::default() });
        let said = try_open(&target, options).err().unwrap();
        assert!(said.contains(words), "{proofs:?}: {said}");
        if proofs.len() == 2 && options == &both {
            assert_eq!(last(&target), Some(vec![0, 0xf0]), "the target gets the verdict");
        }
    }
    // Any proof satisfies a target that is not asked for its own.
    let known = Target::start(Config { authreq: 2, proofs: vec![good, proved(0)], ..Config::default() });
    let said = try_open(&known, &one).err();
    assert!(said.as_deref().is_none_or(|said| !said.contains("authentication of the admin")), "{said:?}");
    std::fs::remove_file(file).unwrap();
}

#[test]
fn discovery_lists_subsystems() {
    let target = Target::start(Config::default());
    let name = format!("nvme-tcp://127.0.0.1:{}", target.port).parse().unwrap();
    let found = onehop_fabrics::discover(&name, &StopSignal::default()).unwrap();
    let [one] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((one.nqn.as_str(), one.transport, one.address.as_str()), (NQN, "tcp", "10.0.0.1"));
    assert!(one.service == "4420" && !one.is_discovery && one.needs_tls);
    assert!(
        onehop_fabrics::open(&name, &StopSignal::default())
            .err()
            .unwrap()
            .to_string()
            .contains("names no subsystem")
    );
    assert_eq!(target.breaches(), Vec::<String>::new());
}

#[test]
fn the_connection_is_kept_alive() {
    let target = Target::start(Config::default());
    let drive = open(&target, "?keepalive=1");
    std::thread::sleep(Duration::from_millis(1700));
    assert!(target.shared.seen.lock().unwrap().keep_alives >= 2);
    drop(drive);
}

#[test]
fn gpus_drive_no_queue_and_get_no_data_directly() {
    let target = Target::start(Config::default());
    let drive = open(&target, "");
    let gpu: Arc<dyn Gpu> = Arc::new(Emulated::new());
    for placement in [Placement::TIER1, Placement::TIER2, Placement::TIER3, Placement::POSTED] {
        let refused = drive.gpu_queues(gpu.clone(), GpuSetup::new(placement)).err().unwrap();
        assert!(matches!(&refused, Error::Unsupported { why, .. } if why.contains("network")), "{refused}");
    }
    let refused = drive.gpu_buffer(&*gpu, Place::Vram, 4096).err().unwrap();
    assert!(matches!(refused, Error::Placement { part: "data", place: "vram", .. }), "{refused}");
    // A GPU's pinned host memory is host memory.
    let (region, buffer) = drive.gpu_buffer(&*gpu, Place::PinnedHost, 4096).unwrap();
    let ns = drive.namespace(1).unwrap();
    drive.queue().unwrap().transfer(Op::Read, ns, 3, 8, &buffer, 0).unwrap();
    let mut seen = vec![0; 4096];
    region.read(0, &mut seen).unwrap();
    assert!(seen == pattern(11 * BLOCK)[3 * BLOCK..]);
}

/// Blocks per command of one queue, in rotation.
const MIXED: [u64; 5] = [8, 1, 40, 8, 3];

/// Three queues with 64 commands each in flight, small ones among large ones.
fn many_commands(config: Config, options: &str) {
    let target = Target::start(config);
    let drive = open(&target, options);
    let room = *MIXED.iter().max().unwrap();
    std::thread::scope(|scope| {
        for seed in 0..3u64 {
            let (drive, all) = (&drive, pattern(4096 * BLOCK));
            scope.spawn(move || {
                let queue = drive.queue().unwrap();
                let ns = drive.namespace(1).unwrap();
                let place = |i: usize| i * room as usize * BLOCK;
                let buffer = drive.buffer(place(64)).unwrap();
                for round in 0..8u64 {
                    let command = |i: u64| {
                        ((i * 61 + round * 977 + seed * 331) % (4096 - room), MIXED[(i + round) as usize % 5])
                    };
                    let mut tokens = VecDeque::new();
                    for (i, (lba, blocks)) in (0..64).map(command).enumerate() {
                        let io =
                            onehop_drive::Io::new(Op::Read, lba, blocks as u32, &buffer, place(i) as u64);
                        loop {
                            match queue.submit(ns, &io) {
                                Ok(token) => break tokens.push_back(token),
                                Err(Error::Full(_)) => queue.wait(tokens.pop_front().unwrap()).unwrap(),
                                Err(error) => panic!("{error}"),
                            };
                        }
                    }
                    for token in tokens {
                        queue.wait(token).unwrap();
                    }
                    for (i, (lba, blocks)) in (0..64).map(command).enumerate() {
                        let bytes = blocks as usize * BLOCK;
                        let seen = buffer.host().unwrap().to_vec(place(i), bytes).unwrap();
                        assert!(seen == all[lba as usize * BLOCK..][..bytes], "lba {lba}, {options}");
                    }
                }
            });
        }
    });
    assert_eq!(target.breaches(), Vec::<String>::new(), "{options}");
}

#[test]
fn many_commands_of_many_queues_are_told_apart() {
    many_commands(Config { split: 512, ..Config::default() }, "");
    many_commands(Config::default(), "");
    many_commands(Config { success: false, ..Config::default() }, "?digests=all");
    many_commands(Config { cpda: 31, padding: 9, split: 12_000, ..Config::default() }, "");
}
