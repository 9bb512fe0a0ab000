//! The page of a model's loads: each beside its reference.

use super::chart::Scale;
use super::{
    Cell, Chart, Column, Page, Point, ReferenceLine, Section, Series, SortableTable, machine_facts,
    short_number,
};
use crate::results::Machine;

/// One load.
#[derive(Clone, Debug)]
pub struct LoadRow {
    /// 10^9 bytes a second.
    pub gbps: f64,
    /// Seconds from the request until the last tensor was loaded.
    pub seconds: f64,
    /// Of these, the seconds until memory and ring were allocated.
    pub prepare_seconds: f64,
    /// The route that the bytes took.
    pub route: String,
    /// The reference, and its rate if known; a load may exceed it.
    pub reference: (String, Option<f64>),
}

/// The contents of a page of loads.
pub struct Loads<'a> {
    /// Where and when.
    pub machine: &'a Machine,
    /// The model and the GPU.
    pub facts: Vec<(String, String)>,
    /// Which parts were simulated; the numbers then say nothing about hardware.
    pub simulated: &'a [&'a str],
    /// The loads, in their order.
    pub rows: &'a [LoadRow],
}

const METHOD: [&str; 3] = [
    "The time of a load is from its request, with the files' headers read and the GPU up, until the last tensor is in GPU memory. Loads to one GPU reuse the ring of pinned memory that the first has allocated; several GPUs share one that each load allocates anew.",
    "The first load's bytes are compared with the files, every later one's with the first's. One wrong byte ends the command, and there is no page.",
    "A reference is measured after each load, by the same process; a load may exceed it. GB/s are 10^9 bytes.",
];
/// Names along the axis at most.
const NAMES: usize = 16;

/// The page of these loads.
#[must_use]
pub fn load_page(loads: &Loads<'_>) -> Page {
    let mut facts = loads.facts.clone();
    facts.extend(machine_facts(loads.machine));
    let models = match loads.simulated {
        [] => String::new(),
        parts => format!(
            " Simulated: {}. These numbers say what the software costs, and nothing about hardware.",
            parts.join(", ").replace("gpu", "GPU")
        ),
    };
    let mut limits: Vec<ReferenceLine> = Vec::new();
    for (what, gbps) in loads.rows.iter().map(|row| &row.reference) {
        // Of several measurements the highest.
        match (gbps, limits.iter_mut().find(|line| line.name == *what)) {
            (Some(gbps), Some(line)) => line.y = line.y.max(*gbps),
            (Some(gbps), None) => limits.push(ReferenceLine { name: what.clone(), y: *gbps }),
            (None, _) => {}
        }
    }
    let point = |(i, row): (usize, &LoadRow)| Point {
        x: i as f64,
        y: row.gbps,
        low: row.gbps,
        high: row.gbps,
        tip: format!("{} GB/s by {}\n{} s", short_number(row.gbps), row.route, short_number(row.seconds)),
    };
    let step = loads.rows.len().div_ceil(NAMES).max(1);
    let name = |i: usize| if i.is_multiple_of(step) { (i + 1).to_string() } else { String::new() };
    let points = loads.rows.iter().enumerate().map(point).collect();
    let chart = Chart {
        title: "GB/s, load after load".into(),
        x: (0..loads.rows.len()).map(|i| (i as f64, name(i))).collect(),
        x_label: "load".into(),
        y_label: "GB/s".into(),
        scale: Scale::Linear,
        series: vec![Series { name: "onehop".into(), kind: 0, points }],
        limits,
    };
    Page {
        title: "Loading a model into GPU memory".into(),
        lead: format!("Load after load of the same files, each checked, beside a reference.{models}"),
        facts,
        sections: vec![Section {
            title: "Loads".into(),
            charts: vec![chart],
            table: Some(table(loads.rows)),
            ..Section::default()
        }],
        method: METHOD.iter().map(|line| (*line).to_owned()).collect(),
    }
}

fn table(rows: &[LoadRow]) -> SortableTable {
    let columns = vec![
        Column::new("load", "in their order"),
        Column::new("GB/s", "10^9 bytes a second"),
        Column::new("seconds", "from the request for the load"),
        Column::minor("prepare", "seconds of these, until the memory and the ring were there"),
        Column::new("route", "the route that the bytes took"),
        Column::new("reached", "share of the reference"),
        Column::minor("reference", "what was measured beside it"),
    ];
    let cells = |(i, row): (usize, &LoadRow)| {
        let (what, gbps) = &row.reference;
        let of = |limit: f64| Cell::number(row.gbps / limit, format!("{:.0} %", row.gbps / limit * 100.0));
        let limit = gbps.map_or_else(|| what.clone(), |gbps| format!("{gbps:.2} GB/s: {what}"));
        vec![
            Cell::number(i as f64, (i + 1).to_string()),
            Cell::maybe(Some(row.gbps)),
            Cell::maybe(Some(row.seconds)),
            Cell::maybe(Some(row.prepare_seconds)),
            Cell::text(&row.route),
            gbps.filter(|limit| *limit > 0.0).map_or_else(|| Cell::maybe(None), of),
            Cell { class: "note dim", ..Cell::text(limit) },
        ]
    };
    SortableTable { columns, rows: rows.iter().enumerate().map(cells).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_load_is_a_point_beside_its_reference() {
        let row = |gbps: f64, limit| LoadRow {
            gbps,
            seconds: 1.0 / gbps,
            prepare_seconds: 0.01,
            route: "cpu/cached".into(),
            reference: ("the copy engine".into(), limit),
        };
        let rows: Vec<_> =
            (1..=40).map(|i| row(f64::from(i) / 10.0, Some(5.0))).chain([row(1.0, None)]).collect();
        let facts = vec![("Model".into(), "a & b".into())];
        let loads = Loads { machine: &Machine::default(), facts, simulated: &["gpu"], rows: &rows };
        let html = load_page(&loads).to_html();
        assert!(html.contains("from the request for the load") && !html.contains("of limit"));
        assert_eq!(html.matches("class=\"point\"").count(), 41);
        assert!(
            html.contains("the copy engine: 5.00") && html.contains("80 %") && html.contains("a &amp; b")
        );
        assert!(html.contains("nothing about hardware") && !html.contains("NaN"));
        let none = Loads { rows: &[], simulated: &[], facts: Vec::new(), ..loads };
        assert!(load_page(&none).to_html().contains("</html>"));
    }
}
