//! What a page has to be before a browser sees it: well formed, with nothing to load, and no words on top of each other in its
//! pictures. bench/report-check asks a browser for the rest.

/// Elements of HTML that have no end.
const VOID: [&str; 5] = ["meta", "br", "hr", "img", "input"];

/// A tag: its name, its attributes, and whether it is an end, or both.
struct Tag {
    name: String,
    attributes: Vec<(String, String)>,
    is_end: bool,
    is_both: bool,
}

impl Tag {
    fn get(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    fn number(&self, name: &str) -> f64 {
        self.get(name)
            .and_then(|value| value.parse().ok())
            .unwrap_or_else(|| panic!("{}: no {name}", self.name))
    }
}

/// Where words are.
#[derive(Debug)]
struct Words {
    text: String,
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

/// Panics if a page is not as it should be. `letter` is the width of a letter in pictures, about.
pub fn check(page: &str, letter: f64) {
    assert!(page.starts_with("<!doctype html>") && page.trim_end().ends_with("</html>"));
    let bare = page.replace("http://www.w3.org/2000/svg", "");
    for loads in ["http:", "https:", "url(", "@import", " src=", " href="] {
        assert!(!bare.contains(loads), "it names something to load: {loads}");
    }
    let mut rest = &page["<!doctype html>".len()..];
    let mut open: Vec<String> = Vec::new();
    let (mut frame, mut words) = ([0.0; 4], Vec::new());
    while let Some(at) = rest.find('<') {
        let (before, after) = rest.split_at(at);
        let end = after.find('>').expect("a tag that does not end");
        let tag = tag(&after[1..end]);
        rest = &after[end + 1..];
        if tag.is_end {
            assert_eq!(open.pop().as_deref(), Some(tag.name.as_str()), "ends before {before:?}");
            if tag.name == "svg" {
                apart(&frame, &words);
                words.clear();
            }
            continue;
        }
        if tag.name == "svg" {
            let view = tag.get("viewBox").expect("a picture without a frame");
            let view: Vec<f64> = view.split(' ').map(|number| number.parse().unwrap()).collect();
            frame = view.try_into().unwrap();
        }
        if tag.name == "text" && tag.get("transform").is_none() {
            let text = &rest[..rest.find('<').unwrap_or(0)];
            words.push(place(&tag, text, letter));
        }
        if tag.is_both || VOID.contains(&tag.name.as_str()) {
            continue;
        }
        if matches!(tag.name.as_str(), "style" | "script") {
            // Nothing in there is a tag.
            let end = format!("</{}>", tag.name);
            rest = &rest[rest.find(&end).expect("a style or script that does not end") + end.len()..];
            continue;
        }
        open.push(tag.name);
    }
    assert_eq!(open, Vec::<String>::new(), "what was opened is closed");
}

fn tag(inside: &str) -> Tag {
    let is_end = inside.starts_with('/');
    let is_both = inside.ends_with('/');
    let inside = inside.trim_matches('/').trim();
    let (name, mut rest) = inside.split_once(char::is_whitespace).unwrap_or((inside, ""));
    assert!(!name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric()), "a tag called {name:?}");
    let mut attributes: Vec<(String, String)> = Vec::new();
    rest = rest.trim();
    while !rest.is_empty() {
        let stop = rest.find(|c: char| c == '=' || c.is_whitespace()).unwrap_or(rest.len());
        let (key, after) = rest.split_at(stop);
        assert!(attributes.iter().all(|(known, _)| known != key), "{key} twice in {inside}");
        let mut value = "";
        rest = after.trim_start();
        if let Some(quoted) = after.strip_prefix("=\"") {
            let end = quoted.find('"').unwrap_or_else(|| panic!("no end of {key} in {inside}"));
            value = &quoted[..end];
            rest = quoted[end + 1..].trim_start();
        } else {
            assert!(!after.starts_with('='), "{key} without quotes in {inside}");
        }
        attributes.push((key.to_owned(), value.to_owned()));
    }
    Tag { name: name.to_owned(), attributes, is_end, is_both }
}

fn place(tag: &Tag, text: &str, letter: f64) -> Words {
    let (x, y) = (tag.number("x"), tag.number("y"));
    let mut shown = text.to_owned();
    for (mark, letter) in [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&amp;", "&")] {
        shown = shown.replace(mark, letter);
    }
    let wide = shown.chars().count() as f64 * letter;
    let class = tag.get("class").unwrap_or_default();
    // As the style anchors them.
    let left = match class {
        "tick y" => x - wide,
        "tick x" | "label" => x - wide / 2.0,
        _ => x,
    };
    Words { text: shown, left, right: left + wide, top: y - 10.0, bottom: y + 2.0 }
}

/// Words lie within their picture, and do not overlap.
fn apart(frame: &[f64; 4], words: &[Words]) {
    let [x, y, wide, high] = *frame;
    for (i, a) in words.iter().enumerate() {
        let within =
            a.left >= x - 1.0 && a.right <= x + wide + 1.0 && a.top >= y - 1.0 && a.bottom <= y + high + 1.0;
        assert!(within, "{:?} goes beyond the picture {frame:?}: {a:?}", a.text);
        for b in &words[i + 1..] {
            let clear = a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top;
            assert!(clear, "{:?} lies on {:?}: {a:?} {b:?}", a.text, b.text);
        }
    }
}

#[test]
fn errors_are_noticed() {
    let page = |body: &str| format!("<!doctype html>\n<html lang=\"en\"><body>{body}</body></html>\n");
    let svg = |words: &str| page(&format!("<svg viewBox=\"0 0 100 50\">{words}</svg>"));
    let text = |x: u32, y: u32, text: &str| format!("<text x=\"{x}\" y=\"{y}\">{text}</text>");
    check(&svg(&[text(0, 12, "abc"), text(30, 12, "abc"), text(0, 30, "abc")].concat()), 6.0);
    for bad in [
        page("<p>"),
        page("<b><i></b></i>"),
        page("<p a=b></p>"),
        page("<p a=\"1\" a=\"2\"></p>"),
        page("<img src=\"x\">"),
        svg(&[text(0, 12, "abc"), text(10, 12, "abc")].concat()),
        svg(&text(90, 12, "abc")),
        svg(&text(0, 60, "abc")),
    ] {
        assert!(std::panic::catch_unwind(|| check(&bad, 6.0)).is_err(), "{bad}");
    }
}
