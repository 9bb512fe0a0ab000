//! The driver suite on a controller that works in GPU memory: its queues, its namespace and the data lie there, and warps
//! of the GPU serve them. On the emulated GPU these are threads.

use crate::common::Bed;
use crate::suite::{Case, PLAIN, matrix, run};

fn on_gpu(case: Case, more: &str) {
    let case = Case { sgl: false, reaches_vram: true, ..case };
    let Case { lba, mdts, queues, .. } = case;
    let spec = format!("mem:24M?lba={lba}&mdts={mdts}&queues={queues}&{more}");
    let (sim, port) = Bed::Resident.open(&spec);
    run(port, case);
    assert!(sim.violations().is_empty(), "{spec}: {:?}", sim.violations());
    assert!(sim.stats().engine_commands > 0, "{spec}: nobody served it");
}

/// All cases without metadata; a warp for each of at most 16 queues.
#[test]
fn matrix_on_the_gpu() {
    for case in matrix(64).into_iter().filter(|case| case.ms == 0) {
        on_gpu(Case { queues: case.queues.min(16), ..case }, "mqes=63");
    }
}

#[test]
fn queue_limits() {
    for mqes in [1, 2, 3, 6, 4095] {
        on_gpu(Case { depth: mqes, ..PLAIN }, &format!("mqes={mqes}"));
    }
}

#[test]
fn larger_pages_and_other_doorbells() {
    on_gpu(PLAIN, "mpsmin=1&mpsmax=4&dstrd=4");
    on_gpu(Case { lba: 4096, ..PLAIN }, "mpsmin=3&mpsmax=4&dstrd=1&cmb=1M");
}
