//! The tree as SVG: boxes below host bridges, one row each, with a rail for every bridge.

use std::fmt::Write;

use onehop_pci::Device;

use super::{bar_text, bars, lines, remarks, short_name};
use crate::facts::Facts;

const STEP: usize = 22;
const ROW: usize = 17;
const PAD: usize = 8;
/// Approximate width of a character of the requested font.
const CHAR_WIDTH: f64 = 7.3;

/// The tree as an SVG document.
#[must_use]
pub fn picture(facts: &Facts, all: bool) -> String {
    draw(facts, all).0
}

/// The document and its width.
pub(super) fn draw(facts: &Facts, all: bool) -> (String, f64) {
    let mut body = String::new();
    let (mut y, mut widest) = (PAD, 0.0_f64);
    for host in facts.tree.hosts() {
        let found = lines(&facts.tree, host, all);
        if found.is_empty() {
            continue;
        }
        let title = if host.is_empty() { "path to the root unknown" } else { host };
        let _ = writeln!(body, "<text class=\"host\" x=\"{PAD}\" y=\"{}\">{}</text>", y + 13, escape(title));
        y += ROW + PAD;
        // The lower edge of the host, and of each box above the current one.
        let mut rails = vec![y - PAD];
        for line in found {
            let x = PAD + STEP * (line.depth + 1);
            let rows = rows(facts, line.device);
            let height = rows.len() * ROW + PAD;
            rails.truncate(line.depth + 1);
            // From the parent down to this box.
            let from = rails.last().copied().unwrap_or(y - PAD);
            let (rail, middle) = (x - STEP / 2, y + height / 2);
            let _ = writeln!(body, "<path class=\"rail\" d=\"M{rail} {from}V{middle}H{x}\"/>");
            let letters = rows.iter().map(|row| row.chars().count()).max().unwrap_or(0);
            let width = letters as f64 * CHAR_WIDTH + 2.0 * PAD as f64;
            let kind = kind(line.device);
            let _ = writeln!(
                body,
                "<rect class=\"{kind}\" x=\"{x}\" y=\"{y}\" width=\"{width:.0}\" height=\"{height}\" rx=\"5\"/>"
            );
            for (at, row) in rows.iter().enumerate() {
                let class = if at == 0 { "name" } else { "note" };
                let (x, y) = (x + PAD, y + PAD / 2 + at * ROW + 13);
                let _ = writeln!(body, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>", escape(row));
            }
            widest = widest.max(x as f64 + width);
            rails.push(y + height);
            y += height + PAD;
        }
        y += PAD;
    }
    let width = widest + PAD as f64;
    let svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {y}\" width=\"{width:.0}\" height=\"{y}\" role=\"img\" \
         aria-label=\"PCIe tree\">\n<style>{STYLE}</style>\n{body}</svg>\n"
    );
    (svg, width)
}

/// The lines in a device's box.
fn rows(facts: &Facts, device: &Device) -> Vec<String> {
    let mut rows = vec![format!("{}  {}", device.address, short_name(facts, device))];
    let words = remarks(&facts.tree, device);
    if !words.is_empty() {
        rows.push(words.join(" · "));
    }
    rows.extend(bars(device).into_iter().map(bar_text));
    rows
}

fn kind(device: &Device) -> &'static str {
    match device.class.base() {
        0x03 | 0x12 => "gpu",
        0x01 => "drive",
        0x02 | 0x0d => "card",
        _ => "bridge",
    }
}

/// Escapes text for SVG and HTML: names of devices and files are not trusted.
pub(super) fn escape(text: &str) -> String {
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

/// Colours for light and dark backgrounds.
pub(super) const STYLE: &str = "
svg{--ink:#1d2733;--dim:#5b6b7b;--line:#9aa8b5;--ground:#fff;--gpu:#e3f4df;--drive:#e2edfb;--card:#fbeedb;--bridge:#f1f3f5;--warm:#c2410c;\
font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:12px}
@media(prefers-color-scheme:dark){svg{--ink:#e8edf2;--dim:#a3b1bf;--line:#5d6b78;--ground:#14191f;--gpu:#1f3a22;--drive:#1b2f4a;--card:#44331a;--bridge:#232a31;--warm:#fb923c}}
@media print{svg{--ink:#000;--dim:#333;--ground:#fff;--gpu:#e3f4df;--drive:#e2edfb;--card:#fbeedb;--bridge:#f1f3f5}}
text{fill:var(--ink)}.note{fill:var(--dim)}.host,.name,.head{font-weight:600}
rect{stroke:var(--line)}.gpu{fill:var(--gpu)}.drive{fill:var(--drive)}.card{fill:var(--card)}.bridge,.memory{fill:var(--bridge)}
.rail{fill:none;stroke:var(--line);stroke-width:1.5}.hop{fill:none;stroke:var(--warm);stroke-width:2.5}.tip{fill:var(--warm)}
.copy{fill:none;stroke:var(--dim);stroke-width:2.5}.copytip{fill:var(--dim)}
";

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_escaped() {
        assert_eq!(super::escape("<a&\"b\x1b>"), "&lt;a&amp;&quot;b\u{fffd}&gt;");
    }
}
