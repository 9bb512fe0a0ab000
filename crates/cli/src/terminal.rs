//! What the terminal at the other end can show: its width, colours, bars; and text wrapped to fit it.

use std::fmt::Write;
use std::io::IsTerminal;
use std::os::fd::AsFd;

/// The width of a terminal that reports none.
const USUAL_WIDTH: usize = 80;
/// Below this nothing would be readable, so longer lines are left to the terminal.
const LEAST_WIDTH: usize = 40;
/// A hanging indent further to the right leaves too little room for text.
const MOST_INDENT: usize = 36;

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

/// How many columns this terminal has; none for a file or a pipe, whose lines stay as long as they are.
pub(crate) fn width(out: impl AsFd + IsTerminal) -> Option<usize> {
    if !out.is_terminal() {
        return None;
    }
    let columns = rustix::termios::tcgetwinsize(out).map_or(0, |size| usize::from(size.ws_col));
    Some(if columns == 0 { USUAL_WIDTH } else { columns.max(LEAST_WIDTH) })
}

/// A line cut at spaces so that no row is wider than this, but for words that are. Later rows begin in the column `indent`;
/// without one, below the line's own text.
pub(crate) fn wrap(line: &str, width: usize, indent: Option<usize>, out: &mut String) {
    if columns(line) <= width {
        out.push_str(line);
        out.push('\n');
        return;
    }
    let text = line.trim_start_matches(is_rail);
    let margin: String = line[..line.len() - text.len()].chars().map(continued).collect();
    let hang = indent.unwrap_or_else(|| hanging(text, columns(&margin)));
    let later = format!("{margin:<hang$}");
    let begin = &line[..line.len() - text.len()];
    let (mut row, mut is_empty) = (begin.to_owned(), true);
    // Spaces between words stay, as columns of a table have them.
    for word in text.split_inclusive(' ') {
        let bare = word.trim_end_matches(' ');
        if !is_empty && columns(&row) + columns(bare) > width {
            let _ = writeln!(out, "{}", row.trim_end());
            (row, is_empty) = (later.clone(), true);
            if bare.is_empty() {
                continue;
            }
        }
        row.push_str(word);
        is_empty &= bare.is_empty();
    }
    let _ = writeln!(out, "{}", row.trim_end());
}

/// Where later rows begin: below the last column of a table, or two columns further in than the line.
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
                if spaces >= 2 && at <= MOST_INDENT {
                    found = Some(at);
                }
                spaces = 0;
                at += 1;
            }
        }
    }
    found.unwrap_or(margin + 2)
}

/// What stands in front of a line: spaces, and the rails of a tree.
fn is_rail(letter: char) -> bool {
    matches!(letter, ' ' | '│' | '├' | '└' | '─')
}

/// The same in the rows that follow.
fn continued(letter: char) -> char {
    match letter {
        '│' | '├' => '│',
        _ => ' ',
    }
}

/// The columns that a text takes: colours take none.
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
    fn short_lines_stay() {
        assert_eq!(wrapped("  a  b ", 40), "  a  b \n");
        assert_eq!(wrapped("", 40), "\n");
    }

    #[test]
    fn later_rows_stand_below_the_text() {
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
