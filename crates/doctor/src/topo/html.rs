//! A self-contained page with the tree and the two paths of each pair.

use std::fmt::Write;

use super::explain::Explanation;
use super::svg::{STYLE, draw, escape};
use crate::facts::Facts;

/// A page with the tree and each pair's two paths, or a note that says why there are none.
#[must_use]
pub fn page(
    facts: &Facts,
    all: bool,
    system: Option<&str>,
    explanations: &[Explanation],
    note: Option<&str>,
) -> String {
    let mut body = String::new();
    let cpu = if facts.kernel.cpu.name.is_empty() { "this machine" } else { &facts.kernel.cpu.name };
    let _ = writeln!(body, "<h1>{}</h1>", escape(cpu));
    if let Some(system) = system {
        let _ = writeln!(body, "<p class=\"lead\">Recorded system: {}</p>", escape(system));
    }
    let (tree, width) = draw(facts, all);
    // Shown only if the tree is wider than the window.
    let hint = format!("@media(max-width:{:.0}px){{.hint{{display:block}}}}", width + PAGE_MARGIN);
    let _ = writeln!(
        body,
        "<h2>PCIe tree</h2>\n<p class=\"hint\">Scroll sideways to see the whole tree.</p>\n<div class=\"wide\" \
         tabindex=\"0\">{tree}</div>"
    );
    if let Some(note) = note {
        let _ = writeln!(body, "<p>{}</p>", escape(note));
    }
    for explanation in explanations {
        let _ = writeln!(body, "{}", section(explanation));
    }
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" \
         content=\"width=device-width,initial-scale=1\">\n<title>PCIe tree: {}</title>\n<style>{PAGE}{hint}</style>\n</head>\n<body>\n\
         {body}<footer>Made by onehop topo. Addresses are bus addresses.</footer>\n</body>\n</html>\n",
        escape(cpu)
    )
}

fn section(explanation: &Explanation) -> String {
    let limit = explanation
        .limit
        .as_ref()
        .map_or_else(String::new, |limit| format!("<li>Limit: {}.</li>", escape(limit)));
    format!(
        "<h2>{} into {}</h2>\n<div class=\"ways\"><figure><figcaption>Traditionally: two copies</figcaption>{}</figure>\n\
         <figure><figcaption>Directly: one hop</figcaption>{}</figure></div>\n<ul><li>Peer-to-peer writes: {}</li>{limit}<li>\
         BAR0 holds only registers and doorbells: no data passes through it.</li><li>A completion in a queue, which the CPU or GPU polls, reports the end; GPUs get no interrupts.</li></ul>",
        escape(&format!("{} ({})", explanation.device, explanation.device_address)),
        escape(&format!("{} ({})", explanation.gpu, explanation.gpu_address)),
        two_copies(explanation),
        one_hop(explanation),
        escape(&explanation.passes)
    )
}

/// Characters that fit in a box.
const BOX_CHARS: usize = 47;

fn two_copies(explanation: &Explanation) -> String {
    let mut drawing = Drawing::default();
    drawing.add_box("drive", &explanation.device, &[]);
    drawing.add_arrow("copy", &["1. its DMA engine writes to host memory"]);
    drawing.add_box("memory", "host memory", &["one more CPU copy", "if the page cache holds the file"]);
    drawing.add_arrow("copy", &["2. the GPU's copy engine reads it,", "over the bus again"]);
    drawing.add_box("gpu", "GPU memory", &[]);
    drawing.finish()
}

fn one_hop(explanation: &Explanation) -> String {
    let mut drawing = Drawing::default();
    drawing.add_box("drive", &explanation.device, &[&format!("BAR0 {}", explanation.registers_text())]);
    let words = wrap(&format!(
        "its DMA engine writes to {}; through {}",
        explanation.address_words,
        explanation.path_text()
    ));
    drawing.add_arrow("hop", &words.iter().map(String::as_str).collect::<Vec<_>>());
    let window = format!("BAR1 {}", explanation.window_text());
    drawing.add_box("gpu", &explanation.gpu, &[&window, "exposes GPU memory: no second copy"]);
    drawing.finish()
}

/// Boxes and arrows, from top to bottom.
#[derive(Default)]
struct Drawing {
    body: String,
    y: usize,
}

impl Drawing {
    fn add_box(&mut self, class: &str, title: &str, notes: &[&str]) {
        let (y, height) = (self.y + 2, 32 + notes.len() * 17);
        let body = &mut self.body;
        let _ = write!(
            body,
            "<rect class=\"{class}\" x=\"2\" y=\"{y}\" width=\"376\" height=\"{height}\" rx=\"6\"/>"
        );
        let _ = write!(
            body,
            "<text class=\"head\" x=\"14\" y=\"{}\">{}</text>",
            y + 20,
            escape(&truncate(title))
        );
        for (at, note) in notes.iter().enumerate() {
            let y = y + 38 + at * 17;
            let _ =
                write!(body, "<text class=\"note\" x=\"14\" y=\"{y}\">{}</text>", escape(&truncate(note)));
        }
        self.y = y + height + 2;
    }

    fn add_arrow(&mut self, class: &str, words: &[&str]) {
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

    fn finish(self) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 380 {}\" role=\"img\"><style>{STYLE}</style>{}</svg>",
            self.y + 2,
            self.body
        )
    }
}

fn truncate(text: &str) -> String {
    if text.chars().count() <= BOX_CHARS {
        return text.to_owned();
    }
    text.chars().take(BOX_CHARS - 1).chain(['…']).collect()
}

/// Wraps the text next to an arrow, to ten lines at most.
fn wrap(text: &str) -> Vec<String> {
    const ROW_CHARS: usize = 44;
    let mut rows: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match rows.last_mut().filter(|row| row.chars().count() + 1 + word.chars().count() <= ROW_CHARS) {
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

/// Horizontal page margins, in pixels.
const PAGE_MARGIN: f64 = 46.0;
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
