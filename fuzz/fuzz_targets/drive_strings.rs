//! Drive names after `sim:` and `qtest:`, and faults: accepted or refused with a reason, and accepted ones can be
//! built.
#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use onehop_proto::regs::{Cap, offset};
use onehop_sim::{Config, Fault, Media, Sim};

fuzz_target!(|text: &str| {
    if let Err(error) = Fault::parse(text) {
        assert!(!error.to_string().is_empty());
    }
    if let Err(error) = onehop_qtest::check(text) {
        assert!(error.to_string().contains("qtest:SOCKET,MEMORY-FILE"));
    }
    match Config::parse(text) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(config) => build(config),
    }
});

fn build(config: Config) {
    config.check().expect("what was parsed is checked");
    let _ = config.longest_ready();
    // No local files, no threads, no gigabytes.
    if !matches!(config.media, Media::Memory(_)) || config.cmb > 1 << 20 {
        return;
    }
    let config = Config { workers: false, ready: Duration::ZERO, ..config };
    let (mqes_z, dstrd) = (config.mqes_z, config.dstrd);
    let sim = Sim::new(config).expect("what passes the check can be built");
    let cap = Cap(sim.registers().read64(offset::CAP));
    assert!(cap.gone() || (cap.mqes_z(), cap.dstrd()) == (mqes_z, dstrd));
}
