use onehop_bench::*;
fn main() {
    let clock = Clock::calibrate();
    for depth in [1, 8, 64, 256] {
        let sim = onehop_sim::open(NULL_DRIVE).unwrap();
        let q = CpuQueue::open(sim.port(), depth, 4096).unwrap();
        let r = q.row(&clock).unwrap();
        println!("{depth}: {:.1} ns/cmd {:.2} M/s submit {:.0} complete {:.0} cycles, ctrl {:?}", r.ns_per_command, r.iops/1e6, r.cycles_submit, r.cycles_complete, r.controller_ns);
    }
}
