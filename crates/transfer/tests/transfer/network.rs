//! Blocks of a drive across a network: the one route that it has, and the reasons why it has no other. With
//! `ONEHOP_TEST_GPU=0` they land in the memory of the real GPU of that name.

use std::sync::Arc;

use onehop_drive::Drive;
use onehop_gpu::cuda::Cuda;
use onehop_gpu::{Emulated, Gpu};
use onehop_os::StopSignal;
use onehop_transfer::{Chosen, Error, ErrorKind, RouteOptions, TransferSetup, controllers, read_blocks};

use crate::target::{BLOCK, Config, NQN, Target, pattern};

fn open(target: &Target) -> Drive {
    let found = controllers::find(&target.name(), &StopSignal::default()).unwrap();
    assert!(found.warnings.is_empty() && found.files.is_empty());
    Drive::open(found.backend, RouteOptions::default().drive_options(false)).unwrap()
}

fn gpu() -> Arc<dyn Gpu> {
    match std::env::var("ONEHOP_TEST_GPU") {
        Ok(name) => Arc::new(Cuda::load().unwrap().open(&name).unwrap()),
        Err(_) => Arc::new(Emulated::new()),
    }
}

#[test]
fn the_route_is_reported_and_others_are_refused_with_the_reason() {
    let target = Target::start(Config::default());
    let drive = open(&target);
    let ns = drive.namespace(1).unwrap();
    let gpu = Chosen { gpu: gpu(), why: "a test".into() };
    let options = RouteOptions::default();
    let setup = TransferSetup { drive: &drive, ns, gpu: &gpu, options: &options };
    let mut read = read_blocks(&setup, 17, 4000, &()).unwrap();
    let mut got = vec![0; 4000 * BLOCK];
    read.data.read(0, &mut got).unwrap();
    assert!(got == pattern(4017 * BLOCK)[17 * BLOCK..]);
    assert!(read.verify(&drive, ns, &()).unwrap().is_none());
    let outcome = &read.outcome;
    assert_eq!(
        (outcome.route, outcome.over_network, outcome.drive.clone()),
        ("cpu/pinned", true, target.name())
    );
    assert_eq!((outcome.placement.data, outcome.memory), ("host", "vram"));
    // At most half of the four queues that it grants.
    assert_eq!(outcome.queues.count, 2);
    assert_eq!(outcome.simulated.contains(&"gpu"), gpu.gpu.simulated());
    assert!(!outcome.simulated.contains(&"drive"));
    let tried: Vec<_> = outcome.why_not_better.iter().map(|no| no.route.as_str()).collect();
    for route in ["gpu/tier3", "gpu/posted", "gpu/tier2", "gpu/tier1", "cpu/direct"] {
        assert!(tried.contains(&route), "{tried:?}");
        let options = RouteOptions { route: route.parse().unwrap(), ..RouteOptions::default() };
        let refused = read_blocks(&TransferSetup { options: &options, ..setup }, 0, 8, &()).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::NotPossible, "{refused}");
        assert!(refused.to_string().contains("network"), "{refused}");
    }
    assert!(
        outcome.why_not_better.iter().all(|no| no.reason.contains("network")),
        "{:?}",
        outcome.why_not_better
    );
    assert_eq!(target.breaches(), Vec::<String>::new());
}

#[test]
fn discovery_is_asked_by_a_name_without_a_subsystem() {
    let target = Target::start(Config::default());
    let found =
        controllers::subsystems(&format!("nvme-tcp://127.0.0.1:{}", target.port), &StopSignal::default())
            .unwrap()
            .unwrap();
    assert_eq!(found[0].nqn, NQN);
    assert!(controllers::subsystems(&target.name(), &StopSignal::default()).unwrap().is_none());
    assert!(controllers::subsystems("sim:mem:1M", &StopSignal::default()).unwrap().is_none());
    assert!(matches!(controllers::subsystems("nvme-tcp://", &StopSignal::default()), Err(Error::Fabrics(_))));
}
