//! A whole report as one page: charts, tables and their sources. It loads no other files, and works and prints without
//! its script.

mod axis;
mod chart;
mod load;
mod queue;
mod sweep;

use std::fmt::Write;

pub use chart::{Chart, Point, ReferenceLine, Series};
pub use load::{LoadRow, Loads, load_page};
pub use queue::{QueuePage, QueueRow, queue_page};
pub use sweep::sweep_page;

use crate::results::Machine;

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("script.js");

/// A page.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Its title.
    pub title: String,
    /// One sentence to read first.
    pub lead: String,
    /// Names and values: machine, drive, GPU.
    pub facts: Vec<(String, String)>,
    /// The results.
    pub sections: Vec<Section>,
    /// How it was measured.
    pub method: Vec<String>,
}

/// A part of a page.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Its heading.
    pub title: String,
    /// A sentence below it.
    pub text: String,
    /// Its charts.
    pub charts: Vec<Chart>,
    /// Its table.
    pub table: Option<SortableTable>,
}

/// A table, whose columns the page sorts by.
#[derive(Clone, Debug, Default)]
pub struct SortableTable {
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows: a cell for each column.
    pub rows: Vec<Vec<Cell>>,
}

/// A column.
#[derive(Clone, Debug, Default)]
pub struct Column {
    /// Its heading.
    pub name: String,
    /// Its explanation.
    pub about: String,
    /// Whether it is left out on narrow screens.
    pub minor: bool,
}

impl Column {
    /// A column that is always shown.
    #[must_use]
    pub fn new(name: &str, about: &str) -> Self {
        Self { name: name.into(), about: about.into(), minor: false }
    }

    /// A column for wide screens.
    #[must_use]
    pub fn minor(name: &str, about: &str) -> Self {
        Self { minor: true, ..Self::new(name, about) }
    }
}

/// A cell.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// The text.
    pub text: String,
    /// The sort key; without it, the text.
    pub value: Option<f64>,
    /// A class of the style: `good`, `bad`, `dim`.
    pub class: &'static str,
}

impl Cell {
    /// Words.
    #[must_use]
    pub fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// A number, formatted for people.
    #[must_use]
    pub fn number(value: f64, text: impl Into<String>) -> Self {
        Self { text: text.into(), value: Some(value), class: "" }
    }

    /// A number that may be missing.
    #[must_use]
    pub fn maybe(value: Option<f64>) -> Self {
        value.map_or_else(
            || Self { class: "dim", ..Self::text("–") },
            |value| Self::number(value, short_number(value)),
        )
    }
}

/// A number with about three digits.
#[must_use]
pub fn short_number(value: f64) -> String {
    let digits = match value.abs() {
        size if size == 0.0 || size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        size if size >= 0.1 => 3,
        size if size >= 0.001 => 4,
        _ => return format!("{value:.1e}"),
    };
    let text = format!("{value:.digits$}");
    if digits > 0 {
        return text;
    }
    // Groups of three.
    let (sign, number) = text.strip_prefix('-').map_or(("", text.as_str()), |rest| ("-", rest));
    let groups: Vec<_> =
        number.as_bytes().rchunks(3).rev().map(|part| String::from_utf8_lossy(part)).collect();
    format!("{sign}{}", groups.join("\u{202f}"))
}

/// A size of a block for people.
#[must_use]
pub fn size(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        bytes if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
        bytes => bytes.to_string(),
    }
}

/// Where and when something was measured.
fn machine_facts(machine: &Machine) -> Vec<(String, String)> {
    let pair = |name: &str, value: String| (name.to_owned(), value);
    vec![
        pair("CPUs", format!("{} × {}", machine.cpus, machine.cpu)),
        pair("Kernel", machine.kernel.clone()),
        pair("onehop", machine.onehop.clone()),
        pair("When", date(machine.unix_time)),
    ]
}

/// A time for people, in UTC.
fn date(unix: u64) -> String {
    let (days, seconds) = ((unix / 86_400) as i64, unix % 86_400);
    // Years begin in March here, so that the leap day comes last.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day = shifted.rem_euclid(146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year + era * 400 + next;
    format!("{year:04}-{month:02}-{of_month:02} {:02}:{:02} UTC", seconds / 3600, seconds % 3600 / 60)
}

impl Page {
    /// The page as HTML.
    #[must_use]
    pub fn to_html(&self) -> String {
        let mut body = String::new();
        let _ =
            writeln!(body, "<h1>{}</h1>\n<p class=\"lead\">{}</p>", escape(&self.title), escape(&self.lead));
        let _ = writeln!(body, "<dl class=\"facts\">");
        for (name, value) in &self.facts {
            let _ = writeln!(body, "<div><dt>{}</dt><dd>{}</dd></div>", escape(name), escape(value));
        }
        let _ = writeln!(body, "</dl>");
        for section in &self.sections {
            section.write(&mut body);
        }
        if !self.method.is_empty() {
            let _ = writeln!(body, "<section><h2>How it was measured</h2><ul class=\"method\">");
            for line in &self.method {
                let _ = writeln!(body, "<li>{}</li>", escape(line));
            }
            let _ = writeln!(body, "</ul></section>");
        }
        format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
             content=\"width=device-width,initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n\
             <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}<footer>Made by onehop bench. This page loads nothing; \
             the numbers are beside it as JSON.</footer>\n</main>\n<div id=\"tip\" hidden></div>\n<script>\n{SCRIPT}</script>\n</body>\n\
             </html>\n",
            escape(&self.title)
        )
    }
}

impl Section {
    fn write(&self, body: &mut String) {
        let _ = writeln!(body, "<section>\n<h2>{}</h2>", escape(&self.title));
        if !self.text.is_empty() {
            let _ = writeln!(body, "<p>{}</p>", escape(&self.text));
        }
        if !self.charts.is_empty() {
            let _ = writeln!(body, "<div class=\"charts\">");
            for chart in &self.charts {
                let _ = writeln!(body, "{}", chart.to_html());
            }
            let _ = writeln!(body, "</div>");
        }
        if let Some(table) = &self.table {
            table.write(body);
        }
        let _ = writeln!(body, "</section>");
    }
}

impl SortableTable {
    fn write(&self, body: &mut String) {
        let _ = write!(body, "<div class=\"wide\" tabindex=\"0\"><table>\n<thead><tr>");
        // A column without text takes room from the others.
        let said =
            |at: &usize| self.rows.iter().any(|row| row.get(*at).is_some_and(|cell| !cell.text.is_empty()));
        let columns: Vec<usize> = (0..self.columns.len()).filter(said).collect();
        for at in &columns {
            let column = &self.columns[*at];
            let (name, about) = (escape(&column.name), escape(&column.about));
            let minor = if column.minor { "minor" } else { "" };
            let of_numbers =
                self.rows.iter().any(|row| row.get(*at).is_some_and(|cell| cell.value.is_some()));
            let number = if of_numbers { "number" } else { "" };
            let _ = write!(body, "<th class=\"{minor} {number}\" title=\"{about}\">{name}</th>");
        }
        let _ = writeln!(body, "</tr></thead>\n<tbody>");
        for row in &self.rows {
            let _ = write!(body, "<tr>");
            let cells = columns.iter().filter_map(|at| Some((&self.columns[*at], row.get(*at)?)));
            for (column, cell) in cells {
                let minor = if column.minor { " minor" } else { "" };
                let number = if cell.value.is_some() { " number" } else { "" };
                let value = cell.value.map_or_else(String::new, |value| format!(" data-value=\"{value}\""));
                let classes = format!("{}{minor}{number}", cell.class);
                let _ = write!(body, "<td class=\"{}\"{value}>{}</td>", classes.trim(), escape(&cell.text));
            }
            let _ = writeln!(body, "</tr>");
        }
        let _ = writeln!(body, "</tbody></table></div>");
    }
}

/// Text in HTML and SVG, escaped: names of drives and files are not trusted.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            letter if letter.is_control() => out.push('\u{fffd}'),
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (unix, text) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (1_795_305_600, "2026-11-22 00:00 UTC"),
            (4_107_542_340, "2100-02-28 23:59 UTC"),
        ] {
            assert_eq!(date(unix), text);
        }
    }

    #[test]
    fn numbers_for_people() {
        for (value, text) in [
            (0.0, "0"),
            (0.000_02, "2.0e-5"),
            (0.0123, "0.0123"),
            (1.234, "1.23"),
            (54.32, "54.3"),
            (1_234_567.0, "1\u{202f}234\u{202f}567"),
            (-2345.0, "-2\u{202f}345"),
        ] {
            assert_eq!(short_number(value), text);
        }
        assert_eq!([size(512), size(4096), size(16 << 20), size(1500)], ["512", "4K", "16M", "1500"]);
    }

    #[test]
    fn untrusted_names_stay_text() {
        let mut page = Page { title: "<script>alert(1)</script>".into(), ..Page::default() };
        page.facts.push(("drive".into(), "\" onload=\"x\" \u{7}".into()));
        page.sections.push(Section {
            title: "<b>".into(),
            table: Some(SortableTable {
                columns: vec![Column::new("a<b", "\"")],
                rows: vec![vec![Cell::text("<i>")], vec![Cell::number(1.5, "1.5")]],
            }),
            ..Section::default()
        });
        let html = page.to_html();
        assert_eq!(html.matches("<script").count(), 1);
        assert!(!html.contains("<b>") && !html.contains("<i>") && !html.contains("onload=\"x"));
        assert!(html.contains("data-value=\"1.5\""));
        for loads in ["http:", "https:", "url(", "@import", " src="] {
            assert!(!html.contains(loads), "{loads}");
        }
    }
}
