//! A diagnosis as text: checks by group, routes, and recommended fixes.

use std::fmt::Write;

use crate::check::{Check, Status};
use crate::diagnosis::Diagnosis;
use crate::near::nearest;
use crate::routes::{Advice, Direction, RouteRow, Verdict};

/// Display options.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    /// With colours.
    pub colour: bool,
    /// Shows every check with its reason and sources.
    pub all: bool,
}

/// A diagnosis as text.
#[must_use]
pub fn render(diagnosis: &Diagnosis, style: Style) -> String {
    let (mut diagnosis, hidden) = if style.all { (diagnosis.clone(), 0) } else { nearest(diagnosis) };
    // Before colours are added: names of devices and files may contain terminal escapes.
    replace_control_characters(&mut diagnosis);
    let diagnosis = &diagnosis;
    let mut text = String::new();
    if let Some(system) = &diagnosis.system {
        let _ = writeln!(text, "recorded system: {system}");
    }
    for group in diagnosis.checks.chunk_by(|a, b| a.group == b.group) {
        let _ = writeln!(text, "\n{}", style.strong(group[0].group.title()));
        for check in group {
            write_check(&mut text, check, style);
        }
    }
    write_routes(&mut text, diagnosis, style);
    if hidden > 0 {
        let (pairs, them) = if hidden == 1 { ("pair", "it") } else { ("pairs", "them") };
        let _ = writeln!(
            text,
            "  not shown: {hidden} {pairs} of a device and a GPU that is not the closest (--all shows {them}; \
             -g and -d select one)"
        );
    }
    write_fixes(&mut text, diagnosis, style);
    text.trim_start().to_owned()
}

/// Replaces control characters in everything that was read from the system.
fn replace_control_characters(diagnosis: &mut Diagnosis) {
    let Diagnosis { system, checks, routes, advice, names, .. } = diagnosis;
    let of_checks = checks.iter_mut().flat_map(|check| {
        let Check { about, found, fix, evidence, .. } = check;
        about.iter_mut().chain([found]).chain(fix).chain(evidence)
    });
    let of_routes = routes.iter_mut().flat_map(|row| [&mut row.reason].into_iter().chain(&mut row.fix));
    let of_advice = advice.iter_mut().filter_map(|advice| advice.change.as_mut());
    let of_names = names.iter_mut().map(|(_, name)| name);
    for text in system.iter_mut().chain(of_checks).chain(of_routes).chain(of_advice).chain(of_names) {
        if text.contains(char::is_control) {
            *text = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        }
    }
}

fn write_check(text: &mut String, check: &Check, style: Style) {
    let name = check.id.split_once('.').map_or(check.id, |(_, name)| name).replace('_', " ");
    let about = check.about.as_ref().map_or_else(String::new, |about| format!("{about}: "));
    let _ = writeln!(text, "  {} {name:<16} {about}{}", style.mark(check.status), check.found);
    if style.all {
        let _ = writeln!(text, "          why: {}", check.why);
        for from in &check.evidence {
            let _ = writeln!(text, "          source: {from}");
        }
    }
}

fn write_routes(text: &mut String, diagnosis: &Diagnosis, style: Style) {
    if diagnosis.routes.is_empty() {
        let gpu = diagnosis.checks.iter().any(|c| c.id == "gpu.present" && c.status == Status::Pass);
        let why = if gpu {
            "no drive or card for direct routes; the checks above show whether copies into GPU memory work"
        } else {
            "no NVIDIA GPU; the emulated GPU (-g emu) and simulated drives (-d sim:…) work on every machine"
        };
        let _ = writeln!(text, "\n{}\n  {why}", style.strong("Routes"));
        return;
    }
    let _ = writeln!(
        text,
        "\n{}   yes: tested   ?: untested, nothing known prevents it   no: not possible",
        style.strong("Routes")
    );
    let same = |a: &RouteRow, b: &RouteRow| (&a.gpu, &a.device) == (&b.gpu, &b.device);
    for pair in diagnosis.routes.chunk_by(same) {
        let (gpu, device) = (diagnosis.name(&pair[0].gpu), diagnosis.name(&pair[0].device));
        let _ = writeln!(text, "  {device}  <->  {gpu}");
        for direction in [Direction::ToGpu, Direction::FromGpu] {
            let rows: Vec<_> = pair.iter().filter(|row| row.direction == direction).collect();
            write_rows(text, direction, &rows, style);
        }
    }
}

/// The rows of one direction; neighbouring rows with the same reason share a line.
fn write_rows(text: &mut String, direction: Direction, rows: &[&RouteRow], style: Style) {
    let arrow = match direction {
        Direction::ToGpu => "into GPU memory",
        Direction::FromGpu => "from GPU memory",
    };
    let _ = writeln!(text, "    {arrow}");
    for alike in rows.chunk_by(|a, b| (a.verdict, &a.reason) == (b.verdict, &b.reason)) {
        let names: Vec<_> = alike.iter().map(|row| row.route).collect();
        let _ = writeln!(
            text,
            "      {} {:<24} {}",
            style.verdict(alike[0].verdict),
            route_names(&names),
            alike[0].reason
        );
    }
}

/// `gpu/tier3 posted tier2`: consecutive routes of one initiator share its prefix.
fn route_names(names: &[&str]) -> String {
    let mut words = String::new();
    let mut previous = "";
    for name in names {
        let (front, back) = name.split_once('/').unwrap_or(("", name));
        let word = if !front.is_empty() && front == previous { back } else { name };
        let _ = write!(words, "{}{word}", if words.is_empty() { "" } else { " " });
        previous = front;
    }
    words
}

fn write_fixes(text: &mut String, diagnosis: &Diagnosis, style: Style) {
    let needs_fix = |check: &&Check| matches!(check.status, Status::Fail | Status::Warn | Status::Unknown);
    let mut list: Vec<(Status, Vec<String>, &str)> = Vec::new();
    for check in diagnosis.checks.iter().filter(needs_fix) {
        let Some(fix) = &check.fix else { continue };
        let name = check.about.as_ref().map_or(check.id.to_owned(), |about| format!("{} {about}", check.id));
        match list.iter_mut().find(|known| known.2 == fix) {
            Some(known) => known.1.push(name),
            None => list.push((check.status, vec![name], fix)),
        }
    }
    list.sort_by_key(|(status, ..)| std::cmp::Reverse(*status));
    if !list.is_empty() {
        let _ = writeln!(text, "\n{}", style.strong("Recommended fixes"));
    }
    for (status, names, fix) in list {
        let more = if names.len() > 2 { format!(" and {} more", names.len() - 2) } else { String::new() };
        let names = names[..names.len().min(2)].join(", ");
        let _ = writeln!(text, "  {}  {fix} [{names}{more}]", style.mark(status));
    }
    let useful: Vec<_> = diagnosis.advice.iter().filter(|advice| advice.change.is_some()).collect();
    if !useful.is_empty() {
        let _ = writeln!(text, "\n{}", style.strong("Most useful change"));
    }
    for advice in useful {
        write_advice(text, diagnosis, advice);
    }
}

fn write_advice(text: &mut String, diagnosis: &Diagnosis, advice: &Advice) {
    let pair = match advice.direction {
        Direction::ToGpu => format!("{} -> {}", diagnosis.name(&advice.device), diagnosis.name(&advice.gpu)),
        Direction::FromGpu => {
            format!("{} -> {}", diagnosis.name(&advice.gpu), diagnosis.name(&advice.device))
        }
    };
    let now = advice.now.unwrap_or("no tested route");
    let (next, change) = (advice.next.unwrap_or_default(), advice.change.as_deref().unwrap_or_default());
    let _ = writeln!(text, "  {pair}\n    works now: {now}\n    for {next}: {change}");
}

impl Diagnosis {
    fn name<'a>(&'a self, address: &'a str) -> &'a str {
        self.names.iter().find(|(at, _)| at == address).map_or(address, |(_, name)| name)
    }
}

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn strong(self, text: &str) -> String {
        self.paint("1", text)
    }

    fn mark(self, status: Status) -> String {
        let code = match status {
            Status::Pass => "32",
            Status::Info => "36",
            Status::Unknown => "35",
            Status::Warn => "33",
            Status::Fail => "31",
        };
        self.paint(code, &format!("{:<7}", status.name()))
    }

    fn verdict(self, verdict: Verdict) -> String {
        match verdict {
            Verdict::Yes => self.paint("32", "yes"),
            Verdict::No => self.paint("31", "no "),
            Verdict::Untested => self.paint("35", "?  "),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_in_names_are_replaced() {
        let check = Check::new("gpu.x", crate::CheckGroup::Gpu, Status::Pass, "a\x1b[2Jb\nc", "why");
        let mut diagnosis = Diagnosis {
            system: Some("\x07".into()),
            checks: vec![check.about("\x1b").fix("\r").by("\x08")],
            routes: Vec::new(),
            advice: Vec::new(),
            names: Vec::new(),
            distant: Vec::new(),
        };
        diagnosis.names.push(("x".into(), "\x1b".into()));
        let text = render(&diagnosis, Style { colour: false, all: true });
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert!(text.contains("a\u{fffd}[2Jb\u{fffd}c"), "{text}");
        let coloured = render(&diagnosis, Style { colour: true, all: true });
        assert!(coloured.contains("\x1b[1mGPUs\x1b[0m") && !coloured.contains("\x1b[2J"), "{coloured:?}");
    }

    #[test]
    fn routes_of_one_initiator_share_its_prefix() {
        assert_eq!(route_names(&["gpu/tier3", "gpu/posted", "cpu/direct"]), "gpu/tier3 posted cpu/direct");
        assert_eq!(route_names(&["cufile", "cufile"]), "cufile cufile");
    }
}
