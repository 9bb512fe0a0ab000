//! `onehop bench sweep --compare`: compares two earlier runs.

use std::path::Path;

use onehop_bench::compare::{ChangeVerdict, Comparison, RowChange, compare};
use onehop_bench::page::{Cell, Column, Page, Section, SortableTable, size};
use serde_json::json;

use super::report;
use crate::error::Result;
use crate::report::{Report, ReportText};

/// Compares two earlier runs.
pub(super) fn side_by_side(before: &Path, after: &Path, folder: Option<&Path>) -> Result<Report> {
    let (one, two) = (report::read(before)?, report::read(after)?);
    let found = compare(&one, &two);
    let mut text = ReportText::default();
    text.row("before", before.display());
    text.row("after", after.display());
    for what in &found.differ {
        text.row("differ in", what);
    }
    text.line("");
    let count = |verdict| found.changes.iter().filter(|change| change.verdict == verdict).count();
    for change in found.changes.iter().filter(|change| change.verdict != ChangeVerdict::Same) {
        let rate = |rate: Option<f64>| rate.map_or_else(|| "-".into(), |rate| format!("{rate:.3}"));
        let percent =
            |share: Option<f64>| share.map_or_else(String::new, |share| format!("{:+.1} %", share * 100.0));
        text.line(format!(
            "{:<7} {:<10} {:<9} {:>6} depth {:>4} × {:<3} {:>8} to {:>8} GB/s  {}{}",
            change.verdict.name(),
            change.route,
            change.io.name(),
            size(change.block),
            change.depth,
            change.threads,
            rate(change.before),
            rate(change.after),
            percent(change.change),
            change.noise.map_or_else(String::new, |noise| format!(" (noise {:.1} %)", noise * 100.0)),
        ));
    }
    let words = [
        ChangeVerdict::Faster,
        ChangeVerdict::Slower,
        ChangeVerdict::Same,
        ChangeVerdict::Unsure,
        ChangeVerdict::Gone,
        ChangeVerdict::New,
    ]
    .map(|verdict| format!("{} {}", count(verdict), verdict.name()));
    text.row("rows", words.join(", "));
    if let Some(folder) = folder {
        report::write(folder, "compare", &comparison_page(&found, before, after), &found, &mut text)?;
    }
    Report::new(json!(found), text)
}

fn comparison_page(found: &Comparison, before: &Path, after: &Path) -> Page {
    let columns = vec![
        Column::new("verdict", "whether the difference is larger than the noise of both runs"),
        Column::new("route", "the route of the transfer"),
        Column::new("IoType", "the operation, as gdsio names it"),
        Column::new("IOSize", "bytes of a block"),
        Column::minor("depth", "blocks in flight for each thread"),
        Column::minor("Threads", "threads"),
        Column::new("before", "GB/s of the first run"),
        Column::new("after", "GB/s of the second run"),
        Column::new("change", "of the first run"),
        Column::minor("noise", "the change that is needed to be significant"),
    ];
    let percent = |share: Option<f64>| match share {
        Some(share) => Cell::number(share, format!("{:+.1} %", share * 100.0)),
        None => Cell::maybe(None),
    };
    let row = |change: &RowChange| {
        let class = match change.verdict {
            ChangeVerdict::Faster => "good",
            ChangeVerdict::Slower => "bad",
            _ => "dim",
        };
        vec![
            Cell { class, ..Cell::text(change.verdict.name()) },
            Cell::text(&change.route),
            Cell::text(change.io.name()),
            Cell::number(change.block as f64, size(change.block)),
            Cell::number(change.depth.into(), change.depth.to_string()),
            Cell::number(change.threads.into(), change.threads.to_string()),
            Cell::maybe(change.before),
            Cell::maybe(change.after),
            percent(change.change),
            percent(change.noise),
        ]
    };
    let table = SortableTable { columns, rows: found.changes.iter().map(row).collect() };
    Page {
        title: "Two sweeps side by side".into(),
        lead: "A difference is significant if it exceeds 2 % and half the sum of both runs' spreads.".into(),
        facts: vec![
            ("Before".into(), before.display().to_string()),
            ("After".into(), after.display().to_string()),
            (
                "They differ in".into(),
                if found.differ.is_empty() { "nothing else".into() } else { found.differ.join("; ") },
            ),
        ],
        sections: vec![Section { title: "Rows".into(), table: Some(table), ..Section::default() }],
        method: Vec::new(),
    }
}
