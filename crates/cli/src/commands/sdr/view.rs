//! Spectra in a terminal.

/// Bars in steps of an eighth of a character.
const BARS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Size of a chart.
const COLUMNS: usize = 64;
const ROWS: usize = 12;

/// The largest bin of each column.
fn columns(spectrum: &[f64], count: usize) -> Vec<f64> {
    let count = count.min(spectrum.len()).max(1);
    let part = |i: usize| &spectrum[i * spectrum.len() / count..(i + 1) * spectrum.len() / count];
    (0..count).map(|i| part(i).iter().copied().fold(f64::NEG_INFINITY, f64::max)).collect()
}

/// The range of levels to show, in multiples of 10 dB.
fn bounds(columns: &[f64]) -> (f64, f64) {
    // Adding 0.0 turns -0 into 0.
    let top = (columns.iter().copied().fold(-100.0, f64::max) / 10.0).ceil() * 10.0 + 0.0;
    let low = columns.iter().copied().fold(top, f64::min);
    (((low / 10.0).floor() * 10.0).clamp(top - 120.0, top - 20.0), top)
}

/// A spectrum in one line, half as wide as a chart.
pub(super) fn line(spectrum: &[f64]) -> String {
    let columns = columns(spectrum, COLUMNS / 2);
    let (low, top) = bounds(&columns);
    let bar = |level: &f64| BARS[(((level - low) / (top - low)).clamp(0.0, 1.0) * 8.0).round() as usize];
    columns.iter().map(bar).collect()
}

/// A chart with levels on the left and frequencies below.
pub(super) fn chart(spectrum: &[f64], rate: f64) -> Vec<String> {
    let columns = columns(spectrum, COLUMNS);
    let (low, top) = bounds(&columns);
    let step = (top - low) / ROWS as f64;
    let mut lines: Vec<_> = (0..ROWS)
        .map(|row| {
            let (ceiling, floor) = (top - step * row as f64, top - step * (row + 1) as f64);
            let bar = |level: &f64| BARS[(((level - floor) / step).clamp(0.0, 1.0) * 8.0).round() as usize];
            format!("{ceiling:>6.0} |{}", columns.iter().map(bar).collect::<String>())
        })
        .collect();
    let half = rate / 2e6;
    lines.push(format!("  dBFS  {:<31}0{:>32}", format!("{:.3} MHz", -half), format!("+{half:.3} MHz")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tone_stands_out() {
        let mut spectrum = vec![-90.0; 1024];
        spectrum[768] = -6.0;
        let lines = chart(&spectrum, 2e6);
        assert_eq!(lines.len(), ROWS + 1);
        assert_eq!(lines[0].chars().nth(8 + 48), Some('▂'), "{lines:#?}");
        assert!(lines[ROWS].contains("-1.000 MHz") && lines[ROWS].contains("+1.000 MHz"));
        assert_eq!(line(&spectrum).chars().filter(|c| *c == '█' || *c == '▇').count(), 1);
        for unusual in [&[][..], &[f64::NEG_INFINITY; 3], &[-200.0]] {
            assert!(!chart(unusual, 1e6).is_empty() && line(unusual).chars().count() <= 3);
        }
    }
}
