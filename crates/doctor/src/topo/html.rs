//! A self-contained page with the tree and the two paths of each pair.

use std::fmt::Write;

use super::explain::Explanation;
use super::svg::{STYLE, drawn, escape};
use crate::facts::Facts;

/// A page with the tree and each pair's two paths; without pairs, a note with the reason.
#[must_use]
pub fn page(
    facts: &Facts,
    all: bool,
    system: Option<&str>,
    ways: &[Explanation],
    note: Option<&str>,
) -> String {
    let mut body = String::new();
    let cpu = if facts.kernel.cpu.name.is_empty() { "this machine" } else { &facts.kernel.cpu.name };
    let _ = writeln!(body, "<h1>{}</h1>", escape(cpu));
    if let Some(system) = system {
        let _ = writeln!(body, "<p class=\"lead\">Recorded system: {}</p>", escape(system));
    }
    let (tree, wide) = drawn(facts, all);
    // Shown if the picture is wider than the window.
    let hint = format!("@media(max-width:{:.0}px){{.hint{{display:block}}}}", wide + AROUND);
    let _ = writeln!(
        body,
        "<h2>PCIe tree</h2>\n<p class=\"hint\">Scroll sideways to see the whole tree.</p>\n<div class=\"wide\" \
         tabindex=\"0\">{tree}</div>"
    );
    if let Some(note) = note {
        let _ = writeln!(body, "<p>{}</p>", escape(note));
    }
    for way in ways {
        let _ = writeln!(body, "{}", section(way));
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width,initial-scale=1\">\n<title>PCIe tree: {}</title>\n<style>{PAGE}{hint}</style>\n</head>\n<body>\n\
         {body}<footer>Made by onehop topo. Addresses are bus addresses.</footer>\n</body>\n</html>\n",
        escape(cpu)
    )
}

fn section(way: &Explanation) -> String {
    let limit =
        way.limit.as_ref().map_or_else(String::new, |limit| format!("<li>Limit: {}.</li>", escape(limit)));
    format!(
        "<h2>{} into {}</h2>\n<div class=\"ways\"><figure><figcaption>Traditionally: two copies</figcaption>{}</figure>\n\
         <figure><figcaption>Directly: one hop</figcaption>{}</figure></div>\n<ul><li>Peer-to-peer writes: {}</li>{limit}<li>\
         BAR0 holds only registers and doorbells: no data passes through it.</li><li>A completion in a queue, which the CPU or GPU polls, reports the end; GPUs get no interrupts.</li></ul>",
        escape(&format!("{} ({})", way.device, way.device_address)),
        escape(&format!("{} ({})", way.gpu, way.gpu_address)),
        two_copies(way),
        one_hop(way),
        escape(&way.passes)
    )
}

/// Characters that fit into a box.
const FITS: usize = 47;

fn two_copies(way: &Explanation) -> String {
    let mut drawing = Drawing::default();
    drawing.place("drive", &way.device, &[]);
    drawing.arrow("copy", &["1. its DMA engine writes to host memory"]);
    drawing.place("memory", "host memory", &["one more CPU copy", "if the page cache holds the file"]);
    drawing.arrow("copy", &["2. the GPU's copy engine reads it,", "over the bus again"]);
    drawing.place("gpu", "GPU memory", &[]);
    drawing.end()
}

fn one_hop(way: &Explanation) -> String {
    let mut drawing = Drawing::default();
    drawing.place("drive", &way.device, &[&format!("BAR0 {}", way.registers_words())]);
    let words = wrap(&format!("its DMA engine writes to {}; through {}", way.address_words, way.middle()));
    drawing.arrow("hop", &words.iter().map(String::as_str).collect::<Vec<_>>());
    let window = format!("BAR1 {}", way.window_words());
    drawing.place("gpu", &way.gpu, &[&window, "exposes GPU memory: no second copy"]);
    drawing.end()
}

/// Boxes and arrows, from top to bottom.
#[derive(Default)]
struct Drawing {
    body: String,
    y: usize,
}

impl Drawing {
    fn place(&mut self, class: &str, title: &str, notes: &[&str]) {
        let (y, high) = (self.y + 2, 32 + notes.len() * 17);
        let body = &mut self.body;
        let _ = write!(
            body,
            "<rect class=\"{class}\" x=\"2\" y=\"{y}\" width=\"376\" height=\"{high}\" rx=\"6\"/>"
        );
        let _ = write!(body, "<text class=\"head\" x=\"14\" y=\"{}\">{}</text>", y + 20, escape(&cut(title)));
        for (at, note) in notes.iter().enumerate() {
            let y = y + 38 + at * 17;
            let _ = write!(body, "<text class=\"note\" x=\"14\" y=\"{y}\">{}</text>", escape(&cut(note)));
        }
        self.y = y + high + 2;
    }

    fn arrow(&mut self, class: &str, words: &[&str]) {
        let (y, end) = (self.y + 4, self.y + words.len() * 16 + 34);
        let tip = if class == "hop" { "tip" } else { "copytip" };
        let _ = write!(self.body, "<path class=\"{class}\" d=\"M22 {y}V{}\"/>", end - 8);
        let _ = write!(self.body, "<path class=\"{tip}\" d=\"M15 {}h14l-7 9z\"/>", end - 9);
        for (at, row) in words.iter().enumerate() {
            let y = y + 20 + at * 16;
            let _ = write!(self.body, "<text x=\"40\" y=\"{y}\">{}</text>", escape(row));
        }
        self.y = end + 2;
    }

    fn end(self) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 380 {}\" role=\"img\"><style>{STYLE}</style>{}</svg>",
            self.y + 2,
            self.body
        )
    }
}

fn cut(text: &str) -> String {
    if text.chars().count() <= FITS {
        return text.to_owned();
    }
    text.chars().take(FITS - 1).chain(['…']).collect()
}

/// Lines next to an arrow, ten at most.
fn wrap(text: &str) -> Vec<String> {
    const WIDE: usize = 44;
    let mut rows: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match rows.last_mut().filter(|row| row.chars().count() + 1 + word.chars().count() <= WIDE) {
            Some(row) => {
                row.push(' ');
                row.push_str(word);
            }
            None => rows.push(word.to_owned()),
        }
    }
    if rows.len() > 10 {
        rows.truncate(9);
        rows.push("…".into());
    }
    rows
}

/// Margins of a page next to a picture, in pixels.
const AROUND: f64 = 46.0;
const PAGE: &str = "
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:1180px;margin:0 auto;padding:1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin:1.6rem 0 .6rem}
.lead{opacity:.8}.hint{display:none;opacity:.8;font-size:.85rem;margin:.2rem 0 .4rem}.wide{overflow-x:auto;border:1px solid #9aa8b566;border-radius:8px;padding:.4rem}
.wide svg{display:block}.ways{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:1rem}
figure{margin:0;border:1px solid #9aa8b566;border-radius:8px;padding:.7rem}figcaption{font-weight:600;margin-bottom:.5rem}
figure svg{width:100%;height:auto;display:block}footer{margin-top:2rem;opacity:.7;font-size:.85rem}
@media print{.hint{display:none!important}.wide{overflow:visible}.wide svg{max-width:100%;height:auto}}
";
