//! Pages of many and of unusual numbers, checked by our own reader of pages.
#![allow(clippy::unwrap_used)]

#[path = "common/page.rs"]
mod page;

use onehop_bench::QueueCost as QueueFigures;
use onehop_bench::page::{LoadRow, Loads, QueuePage, QueueRow, load_page, queue_page, sweep_page};
use onehop_bench::results::{IoType, Machine, Measured, RateLimit, Results, SweepRow};

/// Width of a letter of a chart's font, 11.5 pixels high, about.
const LETTER: f64 = 5.9;

fn measured(block: u64, gbps: f64, limit: f64) -> Measured {
    Measured {
        data_set_kib: 1024.0,
        io_size_kib: block as f64 / 1024.0,
        throughput_gib: gbps * 0.93,
        avg_latency_us: 1e3 / gbps,
        ops: 1000,
        total_time: 1.0,
        gbps,
        gbps_each: vec![gbps * 0.9, gbps, gbps * 1.1],
        iops: gbps * 1e9 / block as f64,
        p50_us: Some(900.0 / gbps),
        p99_us: Some(2e3 / gbps),
        p999_us: None,
        latency_samples: 123_456,
        latency_apart: block == 512,
        cpu_ns_per_byte: 0.3,
        limit: Some(RateLimit {
            what: "the drive's link, Gen4 x4, by sysfs & friends".into(),
            gbps: limit,
            hard: true,
        }),
        of_limit: Some(gbps / limit),
        verified: true,
    }
}

/// Rows of several routes over all sizes, up to this rate; each route has a limit of its own, close to the others'.
fn sweep(most: f64) -> Results {
    let machine = Machine { cpu: "a <CPU> \"X\"".into(), ..Machine::default() };
    let mut results = Results::new(machine, "/data/a & b".into(), "a GPU".into(), Vec::new());
    for io in [IoType::Read, IoType::RandWrite] {
        for (nth, route) in
            ["gpu/tier3", "gpu/tier1", "cpu/direct", "cpu/pinned", "cufile"].iter().enumerate()
        {
            for step in 0..8 {
                let block = 512 << (step * 2);
                let gbps = most * f64::from(step + 1) / 8.0 * (1.0 - nth as f64 / 20.0);
                results.rows.push(SweepRow {
                    route: (*route).into(),
                    io,
                    xfer_type: "GPUD".into(),
                    threads: 1,
                    depth: 1 + 127 * (step % 2),
                    block,
                    result: Some(measured(block, gbps, most * (1.0 + nth as f64 / 50.0))),
                    note: Some("<note>".into()),
                });
            }
        }
    }
    results
}

#[test]
fn sweeps_of_any_size_are_well_formed() {
    for most in [1e-7, 0.0031, 0.9, 12.5, 63.0, 4.2e5] {
        page::check(&sweep_page(&sweep(most)).to_html(), LETTER);
    }
    page::check(
        &sweep_page(&Results::new(Machine::default(), String::new(), String::new(), Vec::new())).to_html(),
        LETTER,
    );
}

#[test]
fn queues_and_loads_are_well_formed() {
    let row = |side: &'static str, queues: u32, depth: u32, ns: f64| {
        let (p50, p99) = (Some(ns * 3.0), Some(ns * 40.0));
        let row = QueueFigures {
            side,
            mode: if queues > 4 { "shared" } else { "owner" },
            queues,
            depth,
            threads: 1024,
            block: 4096,
            iops: 1e9 / ns,
            ns_per_command: ns,
            p50_ns: p50,
            p99_ns: p99,
            latency_of: if side == "cpu" { "batch" } else { "command" },
            latency_samples: 200_000,
            cycles_submit: None,
            cycles_complete: None,
            timed_iops: None,
            controller_ns: Some(0.25),
            regs: None,
        };
        QueueRow { row, rings: "posted", controller: "cpu" }
    };
    let mut rows = Vec::new();
    for depth in [1, 2, 8, 32, 64, 128, 256, 512, 1023] {
        rows.push(row("cpu", 1, depth, 1e4 / f64::from(depth)));
        rows.extend(
            [1, 16, 64, 128, 1024]
                .map(|queues| row("gpu", queues, depth, 1300.0 / f64::from(depth * queues))),
        );
    }
    let machine = Machine::default();
    page::check(
        &queue_page(&QueuePage { machine: &machine, facts: Vec::new(), rows: &rows }).to_html(),
        LETTER,
    );
    for count in [1, 5, 17, 1000] {
        let load = |i: usize| LoadRow {
            gbps: 40.0 + (i % 7) as f64,
            seconds: 0.1,
            prepare_seconds: 0.01,
            route: "cpu/cached".into(),
            reference: (
                if i.is_multiple_of(2) { "the copy engine" } else { "the disk" }.into(),
                Some(46.0 + (i % 2) as f64),
            ),
        };
        let rows: Vec<_> = (0..count).map(load).collect();
        let loads = Loads { machine: &machine, facts: Vec::new(), simulated: &[], rows: &rows };
        page::check(&load_page(&loads).to_html(), LETTER);
    }
}
