//! The driver's test suite on a served drive, through the socket, with memory shared and unshared in parts.

use crate::client::{Client, Served};
use crate::suite::{Case, PLAIN, run};

fn served(case: Case, more: &str) {
    let Case { lba, ms, ext, mdts, queues, sgl, .. } = case;
    let (ext, sgl) = (u8::from(ext), u8::from(sgl));
    let spec = format!("mem:24M?lba={lba}&ms={ms}&ext={ext}&mdts={mdts}&queues={queues}&sgl={sgl}&{more}");
    let (served, stream) = Served::start(&spec);
    let client = Client::connect(stream);
    run(client.port(), case);
    drop(client);
    let (sim, refused) = (served.sim.clone(), served.refused.clone());
    assert_eq!(served.end(), None);
    assert!(refused.lock().unwrap().is_empty(), "{spec}: {:?}", refused.lock());
    assert!(sim.violations().is_empty(), "{spec}: {:?}", sim.violations());
}

#[test]
fn small_blocks() {
    served(Case { depth: 200, ..PLAIN }, "mqes=255");
}

#[test]
fn large_blocks_and_metadata() {
    served(Case { lba: 4096, ms: 16, ext: true, mdts: 7, queues: 8, sgl: false, ..PLAIN }, "mqes=1023");
}

#[test]
fn wide_doorbells() {
    served(Case { queues: 4, sgl: false, ..PLAIN }, "dstrd=3&version=2.0&latency=20us");
}
