//! The driver suite on the simulator, which must find nothing to complain about.

use crate::suite::{Case, PLAIN, matrix, run};

fn on_sim(case: Case, more: &str) {
    let Case { lba, ms, ext, mdts, queues, sgl, .. } = case;
    let (ext, sgl) = (u8::from(ext), u8::from(sgl));
    let spec = format!("mem:24M?lba={lba}&ms={ms}&ext={ext}&mdts={mdts}&queues={queues}&sgl={sgl}&{more}");
    let sim = onehop_sim::open(&spec).unwrap();
    run(sim.port(), case);
    assert!(sim.violations().is_empty(), "{spec}: {:?}", sim.violations());
}

#[test]
fn matrix_inline() {
    for case in matrix(64) {
        on_sim(case, "mqes=63&workers=0");
    }
}

#[test]
fn matrix_threaded() {
    for case in matrix(256) {
        on_sim(case, "mqes=255&latency=5us&jitter=20us");
    }
}

#[test]
fn doorbell_strides() {
    for dstrd in 0..=4 {
        on_sim(PLAIN, &format!("dstrd={dstrd}&workers=0"));
    }
}

#[test]
fn queue_limits() {
    for mqes in [1, 2, 3, 6, 4095] {
        on_sim(Case { depth: mqes, ..PLAIN }, &format!("mqes={mqes}&workers=0"));
    }
}

#[test]
fn larger_pages() {
    for shift in 1..=3 {
        on_sim(PLAIN, &format!("mpsmin={shift}&mpsmax=4&workers=0"));
    }
}

#[test]
fn scattered_memory() {
    on_sim(Case { depth: 200, ..PLAIN }, "scatter=1&workers=0");
    on_sim(Case { sgl: false, lba: 4096, ..PLAIN }, "scatter=1");
}

#[test]
fn other_controllers() {
    on_sim(PLAIN, "version=2.0&crto=3&hmb=64&nssrs=1&vwc=1&workers=0");
    on_sim(PLAIN, "ns=3&dbbuf=1&aerl=0&acl=0&cqr=0&workers=0");
    on_sim(Case { mdts: 0, ..PLAIN }, "latency=1us");
    on_sim(PLAIN, "latency=50us&jitter=200us&bandwidth=2G");
}
