//! The report of a command: a JSON document and a text. Only this module writes to stdout.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

use serde::Serialize;
use serde_json::{Value, json};

use crate::error::{CliError, Result};
use crate::terminal;

/// The text of a report: lines, most of them with a label.
#[derive(Default)]
pub(crate) struct ReportText(Vec<Line>);

/// One or more lines before wrapping.
#[derive(Clone)]
struct Line {
    text: String,
    /// The column in which continuation rows begin.
    indent: Option<usize>,
}

/// The column after the label.
const LABEL: usize = 12;

impl ReportText {
    /// Adds a line with a label.
    pub(crate) fn row(&mut self, label: &str, what: impl Display) {
        self.0.push(Line { text: escape_control(&format!("{label:<11} {what}")), indent: Some(LABEL) });
    }

    /// Adds all lines of another text.
    pub(crate) fn append(&mut self, other: &Self) {
        self.0.extend_from_slice(&other.0);
    }

    /// Adds a line without a label.
    pub(crate) fn line(&mut self, what: impl Display) {
        self.0.push(Line { text: escape_control(&what.to_string()), indent: None });
    }

    /// Adds a line with colours. Other control characters must already be escaped.
    pub(crate) fn coloured(&mut self, what: String) {
        self.0.push(Line { text: what, indent: None });
    }

    /// All lines, wrapped if a width is given.
    fn wrapped(&self, width: Option<usize>) -> String {
        let mut out = String::new();
        for Line { text, indent } in &self.0 {
            for line in text.split('\n') {
                terminal::wrap(line, width.unwrap_or(usize::MAX), *indent, &mut out);
            }
        }
        out
    }
}

/// The JSON document of a report.
enum Document {
    Value(Value),
    Streamed(Box<dyn Streamed>),
}

/// A document that is serialized while it is written.
trait Streamed {
    fn write(&self, out: &mut dyn Write) -> serde_json::Result<()>;
}

impl<T: Serialize> Streamed for T {
    fn write(&self, out: &mut dyn Write) -> serde_json::Result<()> {
        serde_json::to_writer_pretty(out, &Versioned::new(self))
    }
}

/// The version of all documents. Fields may be added to a version; none is removed or changed.
const SCHEMA: u32 = 1;

/// A document with its version.
#[derive(Serialize)]
pub(crate) struct Versioned<'a, T> {
    schema: u32,
    #[serde(flatten)]
    document: &'a T,
}

impl<'a, T: Serialize> Versioned<'a, T> {
    /// Adds the current version.
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
    /// The report of a command that succeeded.
    pub(crate) fn new(document: impl Serialize, text: ReportText) -> Result<Self> {
        let document = Versioned::new(&document).to_value()?;
        Ok(Self { document: Document::Value(document), text, failure: None })
    }

    /// Like [`Self::new`], for a long document, which is serialized while it is written. Such a report cannot have a
    /// failure.
    pub(crate) fn streamed(document: impl Serialize + 'static, text: ReportText) -> Self {
        Self { document: Document::Streamed(Box::new(document)), text, failure: None }
    }

    /// Adds a failure, if there is one.
    pub(crate) fn failed(mut self, failure: Option<CliError>) -> Self {
        if let (Some(failure), Document::Value(Value::Object(fields))) = (&failure, &mut self.document) {
            fields.insert("error".into(), json!(failure.document()));
        }
        self.failure = failure;
        self
    }

    /// The document, the text and the failure.
    pub(crate) fn into_parts(self) -> Result<(Value, String, Option<CliError>)> {
        let document = match self.document {
            Document::Value(document) => document,
            Document::Streamed(document) => {
                let mut bytes = Vec::new();
                document.write(&mut bytes).and_then(|()| serde_json::from_slice(&bytes)).map_err(not_json)?
            }
        };
        Ok((document, self.text.wrapped(None), self.failure))
    }

    /// Prints the report; returns the exit code.
    pub(crate) fn print(&self, json: bool) -> u8 {
        let written = match &self.document {
            _ if !json => print_text(&self.text.wrapped(terminal::width(std::io::stdout()))),
            Document::Value(document) => print_document(document),
            Document::Streamed(document) => print_streamed(&**document),
        };
        [self.failure.as_ref(), written.err().as_ref()].into_iter().flatten().fold(0, |code, error| {
            note_error(error);
            if code == 0 { error.code() } else { code }
        })
    }
}

/// Prints the error of a command without a report; returns the exit code.
pub(crate) fn print_error(error: &CliError, json: bool) -> u8 {
    note_error(error);
    if json {
        print_error_document(error);
    }
    error.code()
}

/// Prints an error as JSON.
pub(crate) fn print_error_document(error: &CliError) {
    // The error is on stderr, too.
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
    check_written(written.and_then(|()| writeln!(out)).and_then(|()| out.flush()))
}

fn print_text(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    check_written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

fn check_written(written: std::io::Result<()>) -> Result<()> {
    match written {
        // A reader may close the pipe early; that is not a failure.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(CliError::Failed(format!("the result cannot be written to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

fn note_error(error: &CliError) {
    note(&error.to_string());
}

/// Prints a warning on stderr.
pub(crate) fn warn(what: &str) {
    note(&format!("warning: {what}"));
}

/// Prints clap's output. Clap wraps help, but not errors; those are wrapped here.
pub(crate) fn print_usage(error: &clap::Error) -> Result<()> {
    let err = std::io::stderr();
    let written = match terminal::width(std::io::stderr()).filter(|_| error.use_stderr()) {
        Some(width) => {
            let styled = error.render();
            let message =
                if terminal::has_colour(&err) { styled.ansi().to_string() } else { styled.to_string() };
            let mut text = ReportText::default();
            text.coloured(message.trim_end().to_owned());
            err.lock().write_all(text.wrapped(Some(width)).as_bytes())
        }
        None => error.print(),
    };
    check_written(written)
}

/// Prints a line on stderr. A closed stderr is ignored.
pub(crate) fn note(what: &str) {
    let mut text = ReportText::default();
    text.line(format_args!("onehop: {}", sanitized(what)));
    let _ = std::io::stderr().write_all(text.wrapped(terminal::width(std::io::stderr())).as_bytes());
}

/// Makes text with untrusted names printable: escapes control characters, and removes the middle of very long text.
pub(crate) fn sanitized(text: &str) -> String {
    const END_CHARS: usize = 2000;
    let text = escape_control(text);
    let length = text.chars().count();
    let left_out = length.saturating_sub(2 * END_CHARS);
    if left_out == 0 {
        return text;
    }
    let end = text.chars().skip(length - END_CHARS);
    text.chars().take(END_CHARS).chain(format!(" … ({left_out} characters) … ").chars()).chain(end).collect()
}

/// Escapes control characters other than newlines.
fn escape_control(text: &str) -> String {
    let each = |c: char| if c.is_control() && c != '\n' { c.escape_default().to_string() } else { c.into() };
    text.chars().map(each).collect()
}

/// A number as JSON; as a string if it exceeds 64 bits.
pub(crate) fn number(value: u128) -> Value {
    u64::try_from(value).map_or_else(|_| json!(value.to_string()), |small| json!(small))
}
