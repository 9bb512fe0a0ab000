//! Pages of composed machines: no overlaps, and nothing exceeds its box.
#![allow(clippy::unwrap_used)]

mod machines;
#[path = "../../bench/tests/common/page.rs"]
mod page;

use onehop_doctor::{Facts, FactsRequest, topo};
use onehop_pci::Root;

/// Approximate width of a character of the tree's font, 12 pixels high.
const LETTER: f64 = 7.25;

#[test]
fn every_machine_is_drawn_well() {
    for (name, compose) in machines::ALL {
        let facts = Facts::gather(&Root::recorded(compose().0), &FactsRequest::default()).unwrap();
        let pairs = facts
            .gpus
            .iter()
            .flat_map(|gpu| facts.peers().into_iter().map(move |device| (gpu.address, device)));
        let ways: Vec<_> = pairs.filter_map(|(gpu, device)| topo::explain(&facts, gpu, device)).collect();
        for all in [false, true] {
            page::check(&topo::page(&facts, all, Some(name), &ways, topo::missing(&facts)), LETTER);
        }
    }
}
