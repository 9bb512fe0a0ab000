//! The page of a sweep: for each kind of I/O throughput, latency and CPU time of each route by block size.

use std::collections::{BTreeMap, HashSet};

use super::chart::Scale;
use super::{
    Cell, Chart, Column, Page, Point, ReferenceLine, Section, Series, SortableTable, machine_facts,
    short_number, size,
};
use crate::results::{IoType, Measured, RateLimit, Results, SweepRow};

/// Routes in the order of the page; each has its kind of line.
const ROUTES: [&str; 9] = [
    "gpu/tier3",
    "gpu/posted",
    "gpu/tier2",
    "gpu/tier1",
    "cpu/direct",
    "cpu/pinned",
    "cpu/memcpy",
    "cpu/cached",
    "cufile",
];

/// The page of these results.
#[must_use]
pub fn sweep_page(results: &Results) -> Page {
    let models = match simulated(results).as_slice() {
        [] => String::new(),
        parts => format!(
            " The {} here {} simulated: these numbers say what the software costs, and nothing about hardware.",
            parts.join(" and the "),
            if parts.len() == 1 { "is" } else { "are" }
        ),
    };
    let measured = results.rows.iter().filter(|row| row.result.is_some()).count();
    Page {
        title: format!("{} into {}", results.target, results.gpu),
        lead: format!(
            "Blocks between a drive or file and GPU memory, by every route that works here.{models}"
        ),
        facts: facts(results, measured),
        sections: sections(results),
        method: METHOD.iter().map(|line| (*line).to_owned()).collect(),
    }
}

/// What is simulated, as a phrase.
fn simulated(results: &Results) -> Vec<&str> {
    results.simulated.iter().map(|part| if part == "gpu" { "GPU" } else { part }).collect()
}

const METHOD: [&str; 9] = [
    "A pass moves each block of the row once; a repeat is as many passes as take the row's time. The first passes warm up and do not count.",
    "A result is the median of the repeats; bars show the slowest and the fastest. Two rows differ where their difference is larger than both spreads.",
    "Before each repeat GPU memory is filled with something else (for writes: with bytes that were never written before). After it every byte of the last pass is compared with what the CPU reads from the drive or file by itself. A row with a wrong byte has no result.",
    "A block's latency is from its request until it is in GPU memory. Where the GPU issues the commands, the mean follows from the blocks in flight and the throughput; p50, p99 and p99.9 are those of one more repeat, by slower kernels that read the GPU's clock at each command: a star marks their samples. Elsewhere all are of the blocks of all repeats.",
    "A percentile is left out where fewer than ten samples lie beyond it: p99 needs 1000 samples, p99.9 needs 10 000.",
    "A limit cannot be exceeded: a row above it fails. A reference was measured beside the rows, which may exceed it.",
    "CPU time is that of the whole process, all threads, waiting by polling included; simulated drives and GPUs run in it.",
    "Routes that wait for each block (cuFile, cpu/memcpy, cpu/cached) have a thread for each block in flight.",
    "DataSetSize, IOSize (KiB), Throughput (GiB/s), Avg_Latency (us) and total_time (s) are named and counted as gdsio does; GB/s are 10^9 bytes.",
];

fn facts(results: &Results, measured: usize) -> Vec<(String, String)> {
    let pair = |name: &str, value: String| (name.to_owned(), value);
    let mut facts = vec![
        pair("Drive or file", results.target.clone()),
        pair("GPU", results.gpu.clone()),
        pair(
            "Simulated",
            if results.simulated.is_empty() { "nothing".into() } else { simulated(results).join(", ") },
        ),
    ];
    facts.extend(machine_facts(&results.machine));
    let lacking = results.rows.len() - measured;
    facts.push(pair("Rows", format!("{measured} measured, {lacking} not possible here")));
    facts.extend(results.limits.iter().map(|limit| {
        let name = if limit.hard { "Limit" } else { "Reference" };
        pair(name, format!("{:.1} GB/s: {}", limit.gbps, limit.what))
    }));
    facts
}

fn held_against(limit: &RateLimit) -> String {
    format!("{}, {:.1} GB/s: {}", limit.kind(), limit.gbps, limit.what)
}

/// How many blocks a row's percentiles are of; with a star where they are of a repeat of their own.
fn samples(m: &Measured) -> String {
    format!("{}{}", m.latency_samples, if m.latency_apart { "*" } else { "" })
}

fn sections(results: &Results) -> Vec<Section> {
    let mut sections = Vec::new();
    for io in [IoType::Read, IoType::RandRead, IoType::Write, IoType::RandWrite] {
        let rows: Vec<&SweepRow> =
            results.rows.iter().filter(|row| row.io == io && row.result.is_some()).collect();
        if !rows.is_empty() {
            sections.push(section(io, &rows));
        }
    }
    sections.push(Section { title: "All rows".into(), table: Some(table(results)), ..Section::default() });
    let lacking = lacking(results);
    if !lacking.rows.is_empty() {
        let title = "Routes that do not work here".to_owned();
        sections.push(Section { title, table: Some(lacking), ..Section::default() });
    }
    sections
}

fn in_flight(row: &SweepRow) -> u32 {
    row.depth.saturating_mul(row.threads)
}

fn section(io: IoType, rows: &[&SweepRow]) -> Section {
    let title = match io {
        IoType::Read => "Sequential read, into GPU memory",
        IoType::RandRead => "Random read, into GPU memory",
        IoType::Write => "Sequential write, out of GPU memory",
        IoType::RandWrite => "Random write, out of GPU memory",
    };
    let mut by_flight: BTreeMap<u32, Vec<&SweepRow>> = BTreeMap::new();
    for row in rows {
        by_flight.entry(in_flight(row)).or_default().push(row);
    }
    let mut charts = Vec::new();
    for (count, rows) in &by_flight {
        let title = format!("GB/s by block size, {}", flying(*count));
        charts.push(chart(&title, "GB/s", Scale::Linear, rows, |m| {
            let (low, high) = m.range();
            Some([m.gbps, low, high])
        }));
    }
    if let Some((count, rows)) = by_flight.first_key_value() {
        let title = format!("Mean latency, {}", flying(*count));
        charts.push(chart(&title, "µs", Scale::Log, rows, |m| Some([m.avg_latency_us; 3])));
    }
    if let Some((count, rows)) = by_flight.last_key_value() {
        if rows.iter().any(|row| row.result.as_ref().is_some_and(|m| m.p99_us.is_some())) {
            let title = format!("p99 latency, {}", flying(*count));
            charts.push(chart(&title, "µs", Scale::Log, rows, |m| m.p99_us.map(|p99| [p99; 3])));
        }
        let title = format!("CPU time per KiB, {}", flying(*count));
        charts.push(chart(&title, "ns of CPU", Scale::Log, rows, |m| Some([m.cpu_ns_per_byte * 1024.0; 3])));
    }
    Section { title: title.into(), charts, ..Section::default() }
}

fn flying(count: u32) -> String {
    if count == 1 { "one block in flight".into() } else { format!("{count} blocks in flight") }
}

/// Lines over block sizes; of several rows for one place the fastest.
fn chart(
    title: &str,
    unit: &str,
    scale: Scale,
    rows: &[&SweepRow],
    value: impl Fn(&Measured) -> Option<[f64; 3]>,
) -> Chart {
    let mut blocks: Vec<u64> = rows.iter().map(|row| row.block).collect();
    blocks.sort_unstable();
    blocks.dedup();
    let mut best: BTreeMap<(usize, &str, u64), (&SweepRow, &Measured)> = BTreeMap::new();
    for row in rows {
        let Some(measured) = &row.result else { continue };
        let kind = ROUTES.iter().position(|route| *route == row.route).unwrap_or(ROUTES.len());
        let kept = best.entry((kind, &row.route, row.block)).or_insert((row, measured));
        if measured.gbps > kept.1.gbps {
            *kept = (row, measured);
        }
    }
    let mut series: Vec<Series> = Vec::new();
    for ((kind, route, block), (row, measured)) in &best {
        let Some([y, low, high]) = value(measured) else { continue };
        let point = Point { x: *block as f64, y, low, high, tip: tip(row, measured) };
        match series.last_mut().filter(|series| series.name == *route) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name: (*route).to_owned(), kind: *kind, points: vec![point] }),
        }
    }
    let mut limits: Vec<ReferenceLine> = Vec::new();
    for limit in best.values().filter_map(|(_, m)| m.limit.as_ref()).filter(|_| unit == "GB/s") {
        let line = ReferenceLine { name: limit.what.clone(), y: limit.gbps };
        if !limits.contains(&line) {
            limits.push(line);
        }
    }
    Chart {
        title: title.into(),
        x: blocks.into_iter().map(|block| (block as f64, size(block))).collect(),
        x_label: "bytes of a block".into(),
        y_label: unit.into(),
        scale,
        series,
        limits,
    }
}

fn tip(row: &SweepRow, m: &Measured) -> String {
    let (low, high) = m.range();
    let mut tip = format!(
        "{} blocks, depth {} × {}\n{} GB/s ({} to {})\n{} blocks a second",
        size(row.block),
        row.depth,
        if row.threads == 1 { "1 thread".into() } else { format!("{} threads", row.threads) },
        short_number(m.gbps),
        short_number(low),
        short_number(high),
        short_number(m.iops)
    );
    tip.push_str(&format!("\nmean {} µs", short_number(m.avg_latency_us)));
    for (name, value) in [("p50", m.p50_us), ("p99", m.p99_us), ("p99.9", m.p999_us)] {
        if let Some(value) = value {
            tip.push_str(&format!(", {name} {}", short_number(value)));
        }
    }
    if m.p50_us.is_some() {
        tip.push_str(&format!(" (of {} blocks)", samples(m)));
    }
    tip.push_str(&format!("\nCPU time {} ns per KiB", short_number(m.cpu_ns_per_byte * 1024.0)));
    if let (Some(limit), Some(share)) = (&m.limit, m.of_limit) {
        tip.push_str(&format!("\n{:.0} % of {}", share * 100.0, limit.what));
    }
    tip
}

fn table(results: &Results) -> SortableTable {
    let columns = vec![
        Column::new("route", "the route that the bytes took"),
        Column::new("IoType", "the operation, as gdsio names it"),
        Column::minor("XferType", "gdsio's word for routes like this one"),
        Column::new("IOSize", "bytes of a block"),
        Column::new("depth", "blocks in flight for each thread"),
        Column::new("Threads", "threads, or queues that a warp owns each"),
        Column::new("GB/s", "10^9 bytes a second: the median of the repeats"),
        Column::minor("±", "half the difference between the slowest and the fastest repeat"),
        Column::new("reached", "share of the limit or reference"),
        Column::minor("Throughput", "GiB a second, as gdsio counts"),
        Column::new("IOPS", "blocks a second"),
        Column::minor("Avg_Latency", "mean latency of a block, µs"),
        Column::minor("p50", "median latency, µs"),
        Column::minor("p99", "p99 latency, µs; of 1000 samples or more"),
        Column::minor("p99.9", "p99.9 latency, µs; of 10 000 samples or more"),
        Column::minor("samples", "blocks that the percentiles are of; * of one more repeat"),
        Column::minor("CPU ns/KiB", "CPU time of the process per KiB"),
        Column::minor("beside", "the limit or reference"),
        Column::minor("note", "notes"),
    ];
    let measured = || results.rows.iter().filter_map(|row| Some((row, row.result.as_ref()?)));
    let limits: HashSet<String> =
        measured().filter_map(|(_, m)| Some(held_against(m.limit.as_ref()?))).collect();
    // What holds for all rows is among the facts above.
    let several = limits.len() > 1;
    let rows = measured().map(|(row, m)| cells(row, m, several)).collect();
    SortableTable { columns, rows }
}

fn cells(row: &SweepRow, m: &Measured, several: bool) -> Vec<Cell> {
    let share = m.of_limit.map_or_else(
        || Cell::maybe(None),
        |share| {
            let class = if m.is_impossible() { "bad" } else { "" };
            Cell { class, ..Cell::number(share, format!("{:.0} %", share * 100.0)) }
        },
    );
    let limit = m.limit.as_ref().filter(|_| several).map_or_else(String::new, held_against);
    let note = row.note.clone().unwrap_or_default();
    vec![
        Cell::text(&row.route),
        Cell::text(row.io.name()),
        Cell::text(&row.xfer_type),
        Cell::number(row.block as f64, size(row.block)),
        Cell::number(row.depth.into(), row.depth.to_string()),
        Cell::number(row.threads.into(), row.threads.to_string()),
        Cell::maybe(Some(m.gbps)),
        Cell::maybe(Some(m.spread())),
        share,
        Cell::maybe(Some(m.throughput_gib)),
        Cell::maybe(Some(m.iops)),
        Cell::maybe(Some(m.avg_latency_us)),
        Cell::maybe(m.p50_us),
        Cell::maybe(m.p99_us),
        Cell::maybe(m.p999_us),
        Cell::number(m.latency_samples as f64, samples(m)),
        Cell::maybe(Some(m.cpu_ns_per_byte * 1024.0)),
        Cell { class: "note dim", ..Cell::text(limit) },
        Cell { class: "note dim", ..Cell::text(note) },
    ]
}

/// Each reason once, with the routes that it holds for.
fn lacking(results: &Results) -> SortableTable {
    let mut reasons: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for row in results.rows.iter().filter(|row| row.result.is_none()) {
        *reasons.entry((&row.route, row.note.as_deref().unwrap_or_default())).or_default() += 1;
    }
    let columns = vec![
        Column::new("route", "the requested route"),
        Column::new("rows", "how many rows it would have had"),
        Column::new("why not", "what is missing"),
    ];
    let row = |((route, why), count): (&(&str, &str), &usize)| {
        vec![
            Cell::text(*route),
            Cell::number(*count as f64, count.to_string()),
            Cell { class: "note", ..Cell::text(*why) },
        ]
    };
    SortableTable { columns, rows: reasons.iter().map(row).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::sample;

    #[test]
    fn every_row_is_on_the_page() {
        let mut results = sample(&[&[1.0, 2.0, 3.0], &[9.0, 9.5, 11.0]]);
        results.rows.push(SweepRow {
            result: None,
            note: Some("no <such> thing".into()),
            ..results.rows[0].clone()
        });
        let html = sweep_page(&results).to_html();
        assert_eq!(html.matches("<td class=\"\">cpu/direct</td>").count(), 3);
        assert!(html.contains("no &lt;such&gt; thing") && html.contains("class=\"bad number\""));
        assert!(html.contains("Sequential read") && html.contains("p99 latency, 2 blocks in flight"));
        assert!(html.contains("CPU time per KiB") && html.contains("1234"));
        assert!(html.contains("say what the software costs") && html.contains("2 blocks in flight"));
        assert!(!html.contains("NaN"));
        results.rows.clear();
        assert!(sweep_page(&results).to_html().contains("0 measured"));
    }
}
