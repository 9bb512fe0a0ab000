//! The page of queue costs: what a command costs by depth, commands per second, latency.

use std::collections::BTreeMap;

use super::chart::Scale;
use super::{Cell, Chart, Column, Page, Point, Section, Series, SortableTable, machine_facts, short_number};
use crate::QueueCost;
use crate::results::Machine;

/// A row, the place of its rings, and where the controller ran.
#[derive(Clone, Debug)]
pub struct QueueRow {
    /// The measurements.
    pub row: QueueCost,
    /// `vram`, `host` or `posted`.
    pub rings: &'static str,
    /// `cpu` or `gpu`.
    pub controller: &'static str,
}

/// The contents of a page of queue costs.
pub struct QueuePage<'a> {
    /// Where and when.
    pub machine: &'a Machine,
    /// Names and values: the drive, the clock, the GPU.
    pub facts: Vec<(String, String)>,
    /// The rows.
    pub rows: &'a [QueueRow],
}

const METHOD: [&str; 6] = [
    "The controller is one that answers at once and moves nothing, unless a drive was named: what is left is the cost of submission and completion. Its own share is measured beside it.",
    "CPU: one thread, batches as deep as the queue, one doorbell for each batch; medians of 15 parts of 20 ms. Latencies are those of all whole batches of all parts.",
    "A p99 is left out where fewer than ten samples lie beyond it. The controller by itself is a reference, the median of five measurements (CPU) or the best of three (GPU); a row may exceed it.",
    "GPU: the median of five launches, by the GPU's own events. Latencies and cycles are those of one more launch, by slower kernels that read the clock at each command.",
    "Every outcome is checked; on a drive that keeps data, a written block is read back first.",
    "Cycles are those of the clock where the queue runs: the time-stamp counter of a CPU, the clock of a multiprocessor of a GPU.",
];

/// The page of these rows.
#[must_use]
pub fn queue_page(queues: &QueuePage<'_>) -> Page {
    let facts = queues.facts.iter().cloned().chain(machine_facts(queues.machine)).collect();
    let cost = |row: &QueueCost| Some(row.ns_per_command);
    let mut charts = vec![
        chart("Time of a command: wall time over commands", "ns", Scale::Log, queues.rows, cost),
        chart("Commands a second", "millions", Scale::Log, queues.rows, |row| Some(row.iops / 1e6)),
    ];
    for (side, what) in [("cpu", "a whole batch"), ("gpu", "a command")] {
        let rows: Vec<QueueRow> = queues.rows.iter().filter(|row| row.row.side == side).cloned().collect();
        if rows.iter().any(|row| row.row.p99_ns.is_some()) {
            let title = format!("p99 latency: {what}, by the {}", side.to_uppercase());
            charts.push(chart(&title, "ns", Scale::Log, &rows, |row| row.p99_ns));
        }
    }
    let table = Section { title: "All rows".into(), table: Some(table(queues.rows)), ..Section::default() };
    Page {
        title: "What a command costs".into(),
        lead: "Submission and completion of NVMe commands, on the side that drives the queue.".into(),
        facts,
        sections: vec![Section { title: "By depth".into(), charts, ..Section::default() }, table],
        method: METHOD.iter().map(|line| (*line).to_owned()).collect(),
    }
}

/// Rows that differ in depth alone are one line.
fn name(row: &QueueRow) -> String {
    let QueueRow { row, rings, controller } = row;
    if row.side == "cpu" {
        return "CPU".into();
    }
    let queues = if row.queues == 1 { "1 queue".into() } else { format!("{} queues", row.queues) };
    let threads = if row.mode == "shared" { format!(", {} threads", row.threads) } else { String::new() };
    let by = if *controller == "cpu" { ", controller on the CPU" } else { "" };
    format!("GPU, {queues}{threads}, rings {rings}{by}")
}

fn chart(
    title: &str,
    unit: &str,
    scale: Scale,
    rows: &[QueueRow],
    value: impl Fn(&QueueCost) -> Option<f64>,
) -> Chart {
    let mut depths: Vec<u32> = rows.iter().map(|row| row.row.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    let mut series: Vec<Series> = Vec::new();
    for row in rows {
        let (name, count) = (name(row), kinds.len());
        let kind = *kinds.entry(name.clone()).or_insert(count);
        let Some(y) = value(&row.row) else { continue };
        let point = Point { x: row.row.depth.into(), y, low: y, high: y, tip: tip(row) };
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name, kind, points: vec![point] }),
        }
    }
    for series in &mut series {
        series.points.sort_by(|a, b| a.x.total_cmp(&b.x));
    }
    Chart {
        title: title.into(),
        x: depths.into_iter().map(|depth| (depth.into(), depth.to_string())).collect(),
        x_label: "commands in flight on each queue".into(),
        y_label: unit.into(),
        scale,
        series,
        limits: Vec::new(),
    }
}

fn tip(row: &QueueRow) -> String {
    let row = &row.row;
    let mut tip = format!(
        "depth {}\n{} ns a command\n{} commands a second",
        row.depth,
        short_number(row.ns_per_command),
        short_number(row.iops)
    );
    for (name, value) in [("p50", row.p50_ns), ("p99", row.p99_ns)] {
        if let Some(value) = value {
            tip.push_str(&format!("\n{name} of a {} {} ns", row.latency_of, short_number(value)));
        }
    }
    tip.push_str(&format!("\n{} samples", row.latency_samples));
    if let Some(own) = row.controller_ns {
        tip.push_str(&format!("\nthe controller by itself {} ns", short_number(own)));
    }
    tip
}

fn table(rows: &[QueueRow]) -> SortableTable {
    let columns = vec![
        Column::new("side", "who drives the queue"),
        Column::minor("mode", "owner: a thread or warp for each queue; shared: many threads on one"),
        Column::minor("rings", "where the queues are"),
        Column::new("queues", "how many"),
        Column::new("depth", "commands in flight on each"),
        Column::minor("threads", "CPU or GPU threads on each"),
        Column::minor("block", "bytes of a command"),
        Column::new("ns/command", "wall time over commands"),
        Column::new("commands/s", "commands a second"),
        Column::minor("latency of", "what the latencies are of: a whole batch, or a command"),
        Column::minor("p50 ns", "median latency"),
        Column::minor("p99 ns", "p99 latency; of 1000 samples or more"),
        Column::minor("samples", "how many the latencies are of"),
        Column::minor("submit", "cycles to submit a command"),
        Column::minor("complete", "cycles to take a completion"),
        Column::minor("registers", "of a GPU thread"),
        Column::new("reference", "what the controller by itself takes for a command, ns"),
        Column::minor("where", "where the controller ran"),
    ];
    let whole = |value: u64| Cell::number(value as f64, value.to_string());
    let cells = |QueueRow { row, rings, controller }: &QueueRow| {
        vec![
            Cell::text(row.side),
            Cell::text(row.mode),
            Cell::text(*rings),
            whole(row.queues.into()),
            whole(row.depth.into()),
            whole(row.threads.into()),
            whole(row.block),
            Cell::maybe(Some(row.ns_per_command)),
            Cell::maybe(Some(row.iops)),
            Cell::text(row.latency_of),
            Cell::maybe(row.p50_ns),
            Cell::maybe(row.p99_ns),
            whole(row.latency_samples),
            Cell::maybe(row.cycles_submit),
            Cell::maybe(row.cycles_complete),
            row.regs.map_or_else(|| Cell::maybe(None), |regs| whole(regs.into())),
            Cell::maybe(row.controller_ns),
            Cell::text(*controller),
        ]
    };
    SortableTable { columns, rows: rows.iter().map(cells).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(side: &'static str, queues: u32, depth: u32, ns: f64) -> QueueRow {
        let row = QueueCost {
            side,
            mode: "owner",
            queues,
            depth,
            threads: 1,
            block: 4096,
            iops: 1e9 / ns,
            ns_per_command: ns,
            p50_ns: Some(ns),
            p99_ns: Some(ns * 2.0),
            latency_of: if side == "cpu" { "batch" } else { "command" },
            latency_samples: 4321,
            cycles_submit: None,
            cycles_complete: None,
            timed_iops: None,
            controller_ns: Some(1.0),
            regs: (side == "gpu").then_some(56),
        };
        QueueRow { row, rings: "vram", controller: side }
    }

    #[test]
    fn every_row_is_a_point_and_a_line_of_the_table() {
        let rows = [
            row("cpu", 1, 64, 100.0),
            row("cpu", 1, 1, 300.0),
            row("gpu", 16, 64, 3.0),
            row("gpu", 1, 64, 40.0),
        ];
        let facts = vec![("Drive".into(), "<sim>".into())];
        let html = queue_page(&QueuePage { machine: &Machine::default(), facts, rows: &rows }).to_html();
        // Two charts have all rows, the other two those of one side.
        assert_eq!(html.matches("class=\"point\"").count(), 12);
        assert_eq!(html.matches("<tr>").count(), 1 + rows.len());
        assert!(html.contains("GPU, 16 queues, rings vram") && html.contains("&lt;sim&gt;"));
        assert!(html.contains("p99 latency: a whole batch, by the CPU") && html.contains("4321 samples"));
        assert!(!html.contains("NaN"));
        let none = QueuePage { machine: &Machine::default(), facts: Vec::new(), rows: &[] };
        assert!(queue_page(&none).to_html().contains("</html>"));
    }
}
