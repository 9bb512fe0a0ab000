//! A chart of some rows: lines over a few values of x, with their spread and their limits.

use std::fmt::Write;

use super::axis::Axis;
pub use super::axis::Scale;
use super::{escape, short_number};

const WIDE: f64 = 460.0;
const HIGH: f64 = 300.0;
/// Where the lines are drawn: left, right, top, bottom.
const INNER: [f64; 4] = [52.0, WIDE - 14.0, 14.0, HIGH - 44.0];
/// How many kinds of lines the style distinguishes.
const KINDS: usize = 10;

/// A chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Its caption.
    pub title: String,
    /// The values of x with their labels, which may be empty; they are laid out evenly.
    pub x: Vec<(f64, String)>,
    /// What x is.
    pub x_label: String,
    /// What y is, with its unit.
    pub y_label: String,
    /// How y is laid out.
    pub scale: Scale,
    /// The lines.
    pub series: Vec<Series>,
    /// The lines drawn across.
    pub limits: Vec<ReferenceLine>,
}

/// A line of points.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// Which of the style's kinds of lines: the same name has the same kind in every chart.
    pub kind: usize,
    /// Its points, by x.
    pub points: Vec<Point>,
}

/// A point.
#[derive(Clone, Debug)]
pub struct Point {
    /// Its x, one of the chart's.
    pub x: f64,
    /// Its y, and how far it spreads.
    pub y: f64,
    /// The smallest.
    pub low: f64,
    /// The largest.
    pub high: f64,
    /// Its tooltip.
    pub tip: String,
}

/// A value that lines are compared with.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceLine {
    /// What it is.
    pub name: String,
    /// The value.
    pub y: f64,
}

impl Chart {
    /// The chart with its heading and the names of its lines.
    #[must_use]
    pub fn to_html(&self) -> String {
        let mut html = format!(
            "<figure class=\"chart\"><figcaption>{}</figcaption>\n{}",
            escape(&self.title),
            self.svg()
        );
        html.push_str("<ul class=\"legend\">");
        for series in &self.series {
            let (kind, name) = (series.kind % KINDS, escape(&series.name));
            let key = format!(
                "<svg class=\"key k{kind}\" viewBox=\"0 0 26 12\" aria-hidden=\"true\"><path class=\"line\" d=\"M1 6H25\"/>{}</svg>",
                mark(kind, 13.0, 6.0)
            );
            let _ = write!(html, "<li data-kind=\"{kind}\">{key}{name}</li>");
        }
        for limit in self.limits.iter().filter(|limit| !self.axis().shows(limit.y)) {
            let _ = write!(
                html,
                "<li class=\"beyond\">limit, beyond the picture: {} ({})</li>",
                short_number(limit.y),
                escape(&limit.name)
            );
        }
        html.push_str("</ul></figure>");
        html
    }

    /// The y axis. Limits are shown unless they would flatten the lines.
    fn axis(&self) -> Axis {
        let points = || self.series.iter().flat_map(|s| &s.points);
        let most = points().map(|p| p.high).fold(0.0, f64::max);
        let near = self.limits.iter().map(|limit| limit.y).filter(|y| *y <= most * 2.5);
        let values: Vec<f64> = points().flat_map(|p| [p.low, p.y, p.high]).chain(near).collect();
        Axis::new(self.scale, values.into_iter(), INNER[3], INNER[2])
    }

    fn x_at(&self, x: f64) -> f64 {
        let index = self.x.iter().position(|(value, _)| *value == x).unwrap_or(0) as f64;
        let step = (INNER[1] - INNER[0] - 28.0) / (self.x.len().max(2) - 1) as f64;
        INNER[0] + 14.0 + index * step
    }

    fn svg(&self) -> String {
        let axis = self.axis();
        let mut out = format!(
            "<svg viewBox=\"0 0 {WIDE:.0} {HIGH:.0}\" role=\"img\" aria-label=\"{}\">\n",
            escape(&self.title)
        );
        let [left, right, top, bottom] = INNER;
        for tick in axis.ticks() {
            let y = axis.at(tick);
            let _ = write!(
                out,
                "<path class=\"grid\" d=\"M{left} {y:.1}H{right}\"/><text class=\"tick y\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                left - 6.0,
                y + 4.0,
                escape(&trim(tick))
            );
        }
        let _ = write!(out, "<path class=\"frame\" d=\"M{left} {top}V{bottom}H{right}\"/>");
        for (value, text) in self.x.iter().filter(|(_, text)| !text.is_empty()) {
            let _ = write!(
                out,
                "<text class=\"tick x\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                self.x_at(*value),
                bottom + 16.0,
                escape(text)
            );
        }
        let _ = write!(
            out,
            "<text class=\"label\" x=\"{:.1}\" y=\"{:.1}\">{}</text><text class=\"label y\" transform=\"translate(12 {:.1}) \
             rotate(-90)\">{}</text>",
            (left + right) / 2.0,
            HIGH - 8.0,
            escape(&self.x_label),
            (top + bottom) / 2.0,
            escape(&self.y_label)
        );
        let shown: Vec<&ReferenceLine> = self.limits.iter().filter(|limit| axis.shows(limit.y)).collect();
        let places: Vec<f64> = shown.iter().map(|limit| axis.at(limit.y)).collect();
        for y in &places {
            let _ = write!(out, "<path class=\"limit\" d=\"M{left} {y:.1}H{right}\"/>");
        }
        for series in &self.series {
            self.draw(series, &axis, &mut out);
        }
        // Labels come last, so that no line covers them.
        for (limit, label) in shown.iter().zip(labels(&places)) {
            let _ = write!(
                out,
                "<text class=\"limit\" x=\"{:.1}\" y=\"{label:.1}\">{}: {}</text>",
                left + 6.0,
                escape(&short(&limit.name)),
                short_number(limit.y)
            );
        }
        out.push_str("</svg>\n");
        out
    }

    fn draw(&self, series: &Series, axis: &Axis, out: &mut String) {
        let kind = series.kind % KINDS;
        let _ = write!(out, "<g class=\"series k{kind}\" data-kind=\"{kind}\">");
        let places: Vec<(f64, f64)> = series.points.iter().map(|p| (self.x_at(p.x), axis.at(p.y))).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        let _ = write!(out, "<path class=\"line\" d=\"M{}\"/>", path.join("L"));
        for (point, (x, y)) in series.points.iter().zip(&places) {
            let (low, high) = (axis.at(point.low), axis.at(point.high));
            let tip = escape_lines(&format!("{}: {}", series.name, point.tip));
            let _ = write!(
                out,
                "<g class=\"point\" tabindex=\"0\" data-tip=\"{tip}\"><title>{tip}</title><circle class=\"reach\" cx=\"{x:.1}\" \
                 cy=\"{y:.1}\" r=\"11\"/>"
            );
            if low - high > 3.0 {
                let _ = write!(out, "<path class=\"spread\" d=\"M{x:.1} {low:.1}V{high:.1}\"/>");
            }
            let _ = write!(out, "{}</g>", mark(kind, *x, *y));
        }
        out.push_str("</g>\n");
    }
}

/// Where the labels of lines at these heights are: right above or below, or further off, so that none overlap.
fn labels(lines: &[f64]) -> Vec<f64> {
    const HIGH: f64 = 13.0;
    let [.., top, bottom] = INNER;
    let mut taken: Vec<f64> = Vec::new();
    for y in lines {
        let below = (0..20).map(|i| y + HIGH * f64::from(i + 1));
        let above = (0..20).map(|i| y - 4.0 - HIGH * f64::from(i));
        let free = |place: &f64| {
            (top + 10.0..bottom - 3.0).contains(place)
                && taken.iter().all(|other| (other - place).abs() >= HIGH)
        };
        let place = above.clone().take(1).chain(below).chain(above).find(free);
        taken.push(place.unwrap_or(y - 4.0));
    }
    taken
}

/// A shape for each kind of line: on paper, colours alone do not distinguish them.
fn mark(kind: usize, x: f64, y: f64) -> String {
    let path = |d: String| format!("<path class=\"mark\" d=\"{d}\"/>");
    match kind % 5 {
        0 => format!("<circle class=\"mark\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.4\"/>"),
        1 => path(format!("M{:.1} {:.1}h6v6h-6z", x - 3.0, y - 3.0)),
        2 => path(format!("M{x:.1} {:.1}l4 4l-4 4l-4 -4z", y - 4.0)),
        3 => path(format!("M{x:.1} {:.1}l4 7h-8z", y - 4.0)),
        _ => path(format!("M{x:.1} {:.1}l4 -7h-8z", y + 4.0)),
    }
}

/// A value of an axis.
fn trim(value: f64) -> String {
    match value {
        value if value >= 1e6 => format!("{}M", value / 1e6),
        value if value >= 1e4 => format!("{}k", value / 1e3),
        value => {
            let text = format!("{value:.4}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
    }
}

/// Text, cut to fit into a chart.
fn short(name: &str) -> String {
    const FITS: usize = 54;
    if name.chars().count() <= FITS {
        return name.into();
    }
    let kept: String = name.chars().take(FITS - 1).collect();
    format!("{kept}…")
}

/// Lines of a tooltip, as [`escape`] has each.
fn escape_lines(text: &str) -> String {
    text.split('\n').map(escape).collect::<Vec<_>>().join("&#10;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(limit: f64) -> Chart {
        let point = |x: f64, y: f64| Point { x, y, low: y * 0.8, high: y * 1.1, tip: "<&>\n2 µs".into() };
        Chart {
            title: "a \"b\"".into(),
            x: vec![(512.0, "512".into()), (4096.0, "4K".into())],
            x_label: "bytes".into(),
            y_label: "GB/s".into(),
            scale: Scale::Linear,
            series: vec![Series {
                name: "cpu/direct".into(),
                kind: 3,
                points: vec![point(512.0, 1.0), point(4096.0, 3.0)],
            }],
            limits: vec![ReferenceLine { name: "the link".into(), y: limit }],
        }
    }

    #[test]
    fn lines_limits_and_spreads_are_drawn() {
        let html = chart(4.0).to_html();
        assert_eq!(html.matches("class=\"point\"").count(), 2);
        assert_eq!(html.matches("class=\"spread\"").count(), 2);
        assert!(html.contains("the link: 4.00") && html.contains("&lt;&amp;&gt;") && !html.contains("<&"));
        assert!(html.contains("&lt;&amp;&gt;&#10;2 µs") && !html.contains('\u{fffd}'));
        let far = chart(400.0).to_html();
        assert!(far.contains("beyond the picture: 400 (the link)") && !far.contains("class=\"limit\""));
    }

    #[test]
    fn nothing_at_all_is_a_picture_too() {
        let empty = Chart { x: Vec::new(), series: Vec::new(), limits: Vec::new(), ..chart(1.0) };
        assert!(empty.to_html().contains("</svg>") && !empty.to_html().contains("NaN"));
    }
}
