//! What a command reports: a document for machines, text for people. Only this module writes to stdout.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

use serde::Serialize;
use serde_json::{Value, json};

use crate::error::{CliError, Result};
use crate::terminal;

/// Lines for people, most with a label in front.
#[derive(Default)]
pub(crate) struct ReportText(Vec<Line>);

/// A line, or several, before they are wrapped.
#[derive(Clone)]
struct Line {
    text: String,
    /// The column in which its later rows begin, where it is too long for the terminal.
    indent: Option<usize>,
}

/// The column after a label.
const LABEL: usize = 12;

impl ReportText {
    /// A line with a label in front.
    pub(crate) fn row(&mut self, label: &str, what: impl Display) {
        self.0.push(Line { text: visible(&format!("{label:<11} {what}")), indent: Some(LABEL) });
    }

    /// All lines of another.
    pub(crate) fn append(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    /// A line as it is.
    pub(crate) fn line(&mut self, what: impl Display) {
        self.0.push(Line { text: visible(&what.to_string()), indent: None });
    }

    /// A line with colours. Its other control characters must have been escaped.
    pub(crate) fn coloured(&mut self, what: String) {
        self.0.push(Line { text: what, indent: None });
    }

    /// All lines, wrapped to a terminal's width if they go to one.
    fn shown(&self, width: Option<usize>) -> String {
        let mut out = String::new();
        for Line { text, indent } in &self.0 {
            for line in text.split('\n') {
                terminal::wrap(line, width.unwrap_or(usize::MAX), *indent, &mut out);
            }
        }
        out
    }
}

/// What machines read.
enum Document {
    Whole(Value),
    Streamed(Box<dyn Streamed>),
}

/// A document that can be written without being built as a whole first.
trait Streamed {
    fn write(&self, out: &mut dyn Write) -> serde_json::Result<()>;
}

impl<T: Serialize> Streamed for T {
    fn write(&self, out: &mut dyn Write) -> serde_json::Result<()> {
        serde_json::to_writer_pretty(out, &Versioned::new(self))
    }
}

/// The version of all documents: fields may be added to it, and none is removed or changed.
const SCHEMA: u32 = 1;

/// A document with its version.
#[derive(Serialize)]
pub(crate) struct Versioned<'a, T> {
    schema: u32,
    #[serde(flatten)]
    document: &'a T,
}

impl<'a, T: Serialize> Versioned<'a, T> {
    /// The document in today's version.
    pub(crate) fn new(document: &'a T) -> Self {
        Self { schema: SCHEMA, document }
    }

    /// The document as a value.
    pub(crate) fn to_value(&self) -> Result<Value> {
        serde_json::to_value(self).map_err(not_json)
    }
}

/// The result of a command.
pub(crate) struct Report {
    document: Document,
    text: ReportText,
    failure: Option<CliError>,
}

impl Report {
    /// A command that succeeded.
    pub(crate) fn new(document: impl Serialize, text: ReportText) -> Result<Self> {
        let document = Versioned::new(&document).to_value()?;
        Ok(Self { document: Document::Whole(document), text, failure: None })
    }

    /// The same with a document that may be long: it is written as it is generated. Nothing in it can have failed.
    pub(crate) fn streamed(document: impl Serialize + 'static, text: ReportText) -> Self {
        Self { document: Document::Streamed(Box::new(document)), text, failure: None }
    }

    /// There is a report, but it reports a failure.
    pub(crate) fn failed(mut self, failure: Option<CliError>) -> Self {
        if let (Some(failure), Document::Whole(Value::Object(fields))) = (&failure, &mut self.document) {
            fields.insert("error".into(), json!(failure.document()));
        }
        self.failure = failure;
        self
    }

    /// The document, the text for people, and the failure, if there is one.
    pub(crate) fn into_parts(self) -> Result<(Value, String, Option<CliError>)> {
        let document = match self.document {
            Document::Whole(document) => document,
            Document::Streamed(document) => {
                let mut bytes = Vec::new();
                document.write(&mut bytes).and_then(|()| serde_json::from_slice(&bytes)).map_err(not_json)?
            }
        };
        Ok((document, self.text.shown(None), self.failure))
    }

    /// Prints it; returns the exit code.
    pub(crate) fn print(&self, json: bool) -> u8 {
        let lost = match &self.document {
            _ if !json => print_text(&self.text.shown(terminal::width(std::io::stdout()))),
            Document::Whole(document) => print_document(document),
            Document::Streamed(document) => print_streamed(&**document),
        };
        [self.failure.as_ref(), lost.err().as_ref()].into_iter().flatten().fold(0, |code, error| {
            complain(error);
            if code == 0 { error.code() } else { code }
        })
    }
}

/// Prints why there is no report; returns the exit code.
pub(crate) fn print_error(error: &CliError, json: bool) -> u8 {
    complain(error);
    if json {
        print_error_document(error);
    }
    error.code()
}

/// Prints the document of an error.
pub(crate) fn print_error_document(error: &CliError) {
    // It is on stderr, too.
    let _ = print_document(&json!(Versioned::new(&json!({ "error": error.document() }))));
}

fn not_json(error: serde_json::Error) -> CliError {
    CliError::Failed(format!("the report cannot be written as JSON: {error}"))
}

fn print_document(document: &Value) -> Result<()> {
    print_text(&format!("{document:#}\n"))
}

fn print_streamed(document: &dyn Streamed) -> Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let written = document.write(&mut out).map_err(std::io::Error::from);
    printed(written.and_then(|()| writeln!(out)).and_then(|()| out.flush()))
}

fn print_text(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    printed(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

fn printed(written: std::io::Result<()>) -> Result<()> {
    match written {
        // A reader that has seen enough closes the pipe; that is not a failure.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::Failed(format!("the result cannot be written to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn complain(error: &CliError) {
    note(&error.to_string());
}

/// Prints a warning on stderr.
pub(crate) fn warn(what: &str) {
    note(&format!("warning: {what}"));
}

/// Prints clap's output: help as it is, because clap wraps it; errors wrapped here, because clap does not.
pub(crate) fn print_usage(error: &clap::Error) -> Result<()> {
    let err = std::io::stderr();
    let written = match terminal::width(std::io::stderr()).filter(|_| error.use_stderr()) {
        Some(width) => {
            let said = error.render();
            let said = if terminal::has_colour(&err) { said.ansi().to_string() } else { said.to_string() };
            let mut text = ReportText::default();
            text.coloured(said.trim_end().to_owned());
            err.lock().write_all(text.shown(Some(width)).as_bytes())
        }
        None => error.print(),
    };
    printed(written)
}

/// Prints a line on stderr; a closed stderr is no reason to stop.
pub(crate) fn note(what: &str) {
    let mut text = ReportText::default();
    text.line(format_args!("onehop: {}", shown(what)));
    let _ = std::io::stderr().write_all(text.shown(terminal::width(std::io::stderr())).as_bytes());
}

/// Text with foreign names in it, for a terminal: control characters escaped, and the middle of a very long text left out.
pub(crate) fn shown(text: &str) -> String {
    const EACH: usize = 2000;
    let text = visible(text);
    let length = text.chars().count();
    let left_out = length.saturating_sub(2 * EACH);
    if left_out == 0 {
        return text;
    }
    let end = text.chars().skip(length - EACH);
    text.chars().take(EACH).chain(format!(" … ({left_out} characters) … ").chars()).chain(end).collect()
}

/// The same without control characters, but for the ends of lines.
fn visible(text: &str) -> String {
    let each = |c: char| if c.is_control() && c != '\n' { c.escape_default().to_string() } else { c.into() };
    text.chars().map(each).collect()
}

/// A number that may be too large for a JSON reader: as text then.
pub(crate) fn number(value: u128) -> Value {
    u64::try_from(value).map_or_else(|_| json!(value.to_string()), |small| json!(small))
}
