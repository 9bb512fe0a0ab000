//! The self-test distinguishes what works, what does not, and what could not be tested.

use onehop_radio::Format;
use onehop_sdr::{Error, Profile, RxOptions, SampleRoute, SelfTest, Step, Transmitter, TxOptions, self_test};

use crate::common::{Bench, LONG, bench, bench_with};

fn run(bench: &Bench, counter: bool) -> Vec<Step> {
    let test = SelfTest { shape: bench.shape(Format::Ci16, 8192), counter, limit: LONG };
    let steps = self_test(&bench.session, &bench.gpu, &test, &mut |_| true).unwrap();
    assert!(steps.iter().all(|step| step.passed != Some(false) || !step.fix.is_empty()), "{steps:#?}");
    bench.assert_no_violations();
    steps
}

fn names(steps: &[Step], passed: Option<bool>) -> Vec<&str> {
    steps.iter().filter(|step| step.passed == passed).map(|step| step.name).collect()
}

#[test]
fn good_and_bad_machines_are_distinguished() {
    for (options, failing) in [
        ("usdr?rate=20M&signal=counter", &[][..]),
        ("usdr?rate=20M&signal=counter&p2p=dropped", &["rx to GPU memory", "tx from GPU memory"]),
        ("usdr?rate=20M&signal=counter&p2p=writes", &["tx from GPU memory"]),
        ("usdr?rate=20M&signal=counter&missing=0@n=5", &[]),
    ] {
        let bench = bench(options);
        if !bench.gpu.simulated() {
            return;
        }
        let steps = run(&bench, true);
        assert_eq!(
            (names(&steps, Some(false)), names(&steps, None)),
            (failing.to_vec(), vec![]),
            "{steps:#?}"
        );
        assert_eq!(steps.len(), 9);
    }
}

#[test]
fn untested_steps_do_not_pass() {
    for (options, untested) in [
        // A board that waits for software loses nothing.
        ("usdr?rate=20M&signal=counter&patient=1", &["overflow"][..]),
        ("usdr?rate=20M&signal=counter&time=0", &["clock"]),
        ("usdr?rate=20M", &["samples"]),
        // Without clock and counter, unreported losses go unnoticed.
        ("usdr?rate=20M&time=0", &["clock", "samples", "overflow"]),
    ] {
        let bench = bench(options);
        let steps = run(&bench, options.contains("counter"));
        let failing = names(&steps, Some(false));
        assert!(failing.is_empty() || !bench.gpu.simulated(), "{options}: {steps:#?}");
        assert_eq!(names(&steps, None), untested, "{options}: {steps:#?}");
    }
}

#[test]
fn without_a_loopback_transmission_is_unverified() {
    let bench = bench_with("usdr?rate=20M&signal=counter", |profile| Profile { loopback: false, ..profile });
    let steps = run(&bench, true);
    if bench.gpu.simulated() {
        assert_eq!(names(&steps, Some(false)), [""; 0], "{steps:#?}");
        assert_eq!(names(&steps, None), ["tx from GPU memory", "tx from host memory"], "{steps:#?}");
    }
}

#[test]
fn a_wrong_clock_fails() {
    // The profile claims a time stamp that the board does not report.
    let bench = bench_with("usdr?rate=20M&signal=counter&time=0", |profile| Profile {
        reports_time: true,
        ..profile
    });
    let steps = run(&bench, true);
    let failing = names(&steps, Some(false));
    assert!(failing.contains(&"clock") && failing.contains(&"overflow"), "{steps:#?}");
}

#[test]
fn unreported_losses_fail() {
    for options in ["usdr?rate=20M&untold=1&signal=counter&time=0", "usdr?rate=20M&untold=1"] {
        let bench = bench(options);
        let steps = run(&bench, options.contains("counter"));
        assert!(names(&steps, Some(false)).contains(&"overflow"), "{options}: {steps:#?}");
    }
}

#[test]
fn watch_can_cancel() {
    let bench = bench("usdr?rate=20M");
    let shape = bench.shape(Format::Ci16, 8192);
    for calls in [0, 3, 40] {
        let mut left = calls;
        let mut watch = |_| {
            left -= 1;
            left >= 0
        };
        let test = SelfTest { shape, counter: false, limit: LONG };
        let ended = self_test(&bench.session, &bench.gpu, &test, &mut watch);
        assert!(matches!(ended, Err(Error::Cancelled)), "{ended:?}");
    }
    let mut most = 0;
    let mut watch = |filled| {
        most = most.max(filled);
        most < 5
    };
    let options = RxOptions::new(shape);
    let opened = onehop_sdr::Receiver::open_watched(&bench.session, &bench.gpu, &options, &mut watch);
    assert!(matches!(opened.map(|_| ()), Err(Error::Cancelled)));
    assert_eq!(most, 5);
    // The board is free again.
    assert!(bench.receiver(&options).is_ok());
    let options = TxOptions { bytes: 8192, only: Some(SampleRoute::Pinned), self_test: LONG };
    assert!(Transmitter::open(&bench.session, &bench.gpu, &options).is_ok());
    bench.assert_no_violations();
}
