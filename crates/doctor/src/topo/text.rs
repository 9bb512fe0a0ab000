//! The tree as text for a terminal.

use std::fmt::Write;

use super::{TreeLine, bar_text, bars, lines, remarks, short_name};
use crate::facts::Facts;

/// The tree as text. `all` includes functions that no route uses.
#[must_use]
pub fn tree(facts: &Facts, all: bool) -> String {
    let mut text = String::new();
    let cpu = &facts.kernel.cpu.name;
    let _ = writeln!(text, "{}", if cpu.is_empty() { "CPU" } else { cpu });
    if facts.tree.devices.is_empty() {
        text.push_str("no PCI devices are visible\n");
    }
    let mut hidden = facts.tree.devices.len();
    for host in facts.tree.hosts() {
        let found = lines(&facts.tree, host, all);
        hidden -= found.len();
        if found.is_empty() {
            continue;
        }
        let _ = writeln!(text, "{}", if host.is_empty() { "path to the root unknown" } else { host });
        for line in &found {
            write_device(&mut text, facts, line);
        }
    }
    if hidden > 0 {
        let (functions, them) = if hidden == 1 { ("function", "it") } else { ("functions", "them") };
        let _ = writeln!(text, "not shown: {hidden} {functions} that no route uses (--all shows {them})");
    }
    text
}

fn write_device(text: &mut String, facts: &Facts, line: &TreeLine<'_>) {
    let device = line.device;
    let (last, before) = line.more.split_last().unwrap_or((&false, &[]));
    let stem: String = before.iter().map(|more| if *more { "│  " } else { "   " }).collect();
    let branch = if *last { "├─ " } else { "└─ " };
    let mut words = remarks(&facts.tree, device).join(", ");
    if !words.is_empty() {
        words.insert_str(0, "  ");
    }
    let _ = writeln!(text, "{stem}{branch}{} {}{words}", device.address, short_name(facts, device));
    let follows = facts.tree.children(&device.host, Some(device.address)).next().is_some();
    let down = if follows { "│  " } else { "   " };
    let side = if *last { "│  " } else { "   " };
    for bar in bars(device) {
        let _ = writeln!(text, "{stem}{side}{down}   {}", bar_text(bar));
    }
}
