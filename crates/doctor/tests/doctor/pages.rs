//! Pages of composed machines: text does not overlap, and does not exceed its box.

use onehop_doctor::{Facts, FactsRequest, topo};
use onehop_pci::Root;

use crate::{machines, page};

/// Approximate width of a character in the tree's 12-pixel font.
const CHAR_WIDTH: f64 = 7.25;

#[test]
fn pages_of_all_machines_are_well_formed() {
    for (name, compose) in machines::ALL {
        let facts = Facts::gather(&Root::recorded(compose().0), &FactsRequest::default()).unwrap();
        let pairs = facts
            .gpus
            .iter()
            .flat_map(|gpu| facts.peers().into_iter().map(move |device| (gpu.address, device)));
        let explanations: Vec<_> =
            pairs.filter_map(|(gpu, device)| topo::explain(&facts, gpu, device)).collect();
        for all in [false, true] {
            page::check(
                &topo::page(&facts, all, Some(name), &explanations, topo::missing(&facts)),
                CHAR_WIDTH,
            );
        }
    }
}
