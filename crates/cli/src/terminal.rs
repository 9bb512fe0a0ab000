//! The capabilities of a terminal (width, colours, redrawing), and wrapping text to its width.

use std::fmt::Write;
use std::io::IsTerminal;
use std::os::fd::AsFd;

/// The width of a terminal that reports none.
const DEFAULT_WIDTH: usize = 80;
/// Narrower terminals are treated as this wide, because text wrapped further would be unreadable.
const MIN_WIDTH: usize = 40;
/// A larger hanging indent leaves too little space for text.
const MAX_INDENT: usize = 36;

/// Whether this is a terminal that shows colours, and `NO_COLOR` is not set.
pub(crate) fn has_colour(out: &impl IsTerminal) -> bool {
    let is_refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    out.is_terminal() && !is_refused && !is_dumb()
}

/// Whether stderr is a terminal that can redraw a line, which a progress bar needs.
pub(crate) fn has_bars() -> bool {
    std::io::stderr().is_terminal() && !is_dumb()
}

fn is_dumb() -> bool {
    std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb")
}

/// The width of this terminal; `None` for a file or a pipe, whose lines are not wrapped.
pub(crate) fn width(out: impl AsFd + IsTerminal) -> Option<usize> {
    if !out.is_terminal() {
        return None;
    }
    let columns = rustix::termios::tcgetwinsize(out).map_or(0, |size| usize::from(size.ws_col));
    Some(if columns == 0 { DEFAULT_WIDTH } else { columns.max(MIN_WIDTH) })
}

/// Wraps a line at spaces. A word wider than `width` gets a row of its own. Continuation rows begin in column `indent`,
/// or below the text of the line.
pub(crate) fn wrap(line: &str, width: usize, indent: Option<usize>, out: &mut String) {
    if columns(line) <= width {
        out.push_str(line);
        out.push('\n');
        return;
    }
    let text = line.trim_start_matches(is_rail);
    let margin: String = line[..line.len() - text.len()].chars().map(continued_rail).collect();
    let hang = indent.unwrap_or_else(|| hanging(text, columns(&margin)));
    let continuation = format!("{margin:<hang$}");
    let begin = &line[..line.len() - text.len()];
    let (mut row, mut is_empty) = (begin.to_owned(), true);
    // Spaces between words are kept, because they may align the columns of a table.
    for word in text.split_inclusive(' ') {
        let bare = word.trim_end_matches(' ');
        if !is_empty && columns(&row) + columns(bare) > width {
            let _ = writeln!(out, "{}", row.trim_end());
            (row, is_empty) = (continuation.clone(), true);
            if bare.is_empty() {
                continue;
            }
        }
        row.push_str(word);
        is_empty &= bare.is_empty();
    }
    let _ = writeln!(out, "{}", row.trim_end());
}

/// The column of continuation rows: that of the last table column, or two more than the margin.
fn hanging(text: &str, margin: usize) -> usize {
    let mut at = margin;
    let (mut spaces, mut found) = (0, None);
    let mut is_code = false;
    for letter in text.chars() {
        match letter {
            '\x1b' => is_code = true,
            'm' if is_code => is_code = false,
            _ if is_code => {}
            ' ' => {
                spaces += 1;
                at += 1;
            }
            _ => {
                if spaces >= 2 && at <= MAX_INDENT {
                    found = Some(at);
                }
                spaces = 0;
                at += 1;
            }
        }
    }
    found.unwrap_or(margin + 2)
}

/// Whether this is part of the margin of a line: spaces, and the rails of a tree.
fn is_rail(letter: char) -> bool {
    matches!(letter, ' ' | '│' | '├' | '└' | '─')
}

/// How a margin character continues in the following rows.
fn continued_rail(letter: char) -> char {
    match letter {
        '│' | '├' => '│',
        _ => ' ',
    }
}

/// The width of a text in columns; colour codes have none.
fn columns(text: &str) -> usize {
    let mut is_code = false;
    let mut count = 0;
    for letter in text.chars() {
        match letter {
            '\x1b' => is_code = true,
            'm' if is_code => is_code = false,
            _ if is_code => {}
            _ => count += 1,
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(line: &str, width: usize) -> String {
        let mut out = String::new();
        wrap(line, width, None, &mut out);
        out
    }

    #[test]
    fn short_lines_are_unchanged() {
        assert_eq!(wrapped("  a  b ", 40), "  a  b \n");
        assert_eq!(wrapped("", 40), "\n");
    }

    #[test]
    fn continuation_rows_are_indented() {
        assert_eq!(wrapped("warm   one two three", 16), "warm   one two\n       three\n");
        assert_eq!(wrapped("one two three", 8), "one two\n  three\n");
        assert_eq!(wrapped("  ├─ one two three", 12), "  ├─ one two\n  │    three\n");
        assert_eq!(wrapped("  └─ one two three", 12), "  └─ one two\n       three\n");
        let mut out = String::new();
        wrap("label what there is", 12, Some(6), &mut out);
        assert_eq!(out, "label what\n      there\n      is\n");
    }

    #[test]
    fn long_words_and_colours_are_kept() {
        assert_eq!(wrapped("a /a/very/long/path b", 8), "a\n  /a/very/long/path\n  b\n");
        assert_eq!(wrapped("\x1b[32mpass\x1b[0m ok", 7), "\x1b[32mpass\x1b[0m ok\n");
        assert_eq!(wrapped("\x1b[32mpass\x1b[0m  a bb", 9), "\x1b[32mpass\x1b[0m  a\n      bb\n");
    }
}
