//! What a command has to say: a document for machines, text for people. Only this module writes to stdout.

use std::fmt::Display;
use std::io::{ErrorKind, Write};

use serde::Serialize;
use serde_json::{Value, json};

use crate::error::{CliError, Result};

/// Lines for people: a label, and what there is to say about it.
#[derive(Default)]
pub(crate) struct Text(String);

impl Text {
    /// A line with a label in front.
    pub(crate) fn row(&mut self, label: &str, what: impl Display) {
        self.0.push_str(&format!("{label:<11} {what}\n"));
    }

    /// All lines of another.
    pub(crate) fn append(&mut self, other: &Self) {
        self.0.push_str(&other.0);
    }

    /// A line as it is.
    pub(crate) fn line(&mut self, what: impl Display) {
        self.0.push_str(&format!("{what}\n"));
    }
}

/// What machines read.
enum Document {
    Whole(Value),
    Streamed(Box<dyn Streamed>),
}

/// What can be written without being made as a whole before.
trait Streamed {
    fn write(&self, out: &mut dyn Write) -> serde_json::Result<()>;
}

impl<T: Serialize> Streamed for T {
    fn write(&self, out: &mut dyn Write) -> serde_json::Result<()> {
        serde_json::to_writer_pretty(out, self)
    }
}

/// How a command came out.
pub(crate) struct Report {
    document: Document,
    text: Text,
    failure: Option<CliError>,
}

impl Report {
    /// A command that did what it was asked.
    pub(crate) fn new(document: impl Serialize, text: Text) -> Result<Self> {
        let document = serde_json::to_value(document)
            .map_err(|e| CliError::Failed(format!("the report cannot be written as JSON: {e}")))?;
        Ok(Self { document: Document::Whole(document), text, failure: None })
    }

    /// The same with a document that may be long: it is written as it is gone through. Nothing in it can have failed.
    pub(crate) fn streamed(document: impl Serialize + 'static, text: Text) -> Self {
        Self { document: Document::Streamed(Box::new(document)), text, failure: None }
    }

    /// There is a report, but what it tells is a failure.
    pub(crate) fn failed(mut self, failure: Option<CliError>) -> Self {
        if let (Some(failure), Document::Whole(Value::Object(fields))) = (&failure, &mut self.document) {
            fields.insert("error".into(), json!(failure.document()));
        }
        self.failure = failure;
        self
    }

    /// Prints it; gives the exit code.
    pub(crate) fn print(&self, json: bool) -> u8 {
        let lost = match &self.document {
            _ if !json => print_text(&visible(&self.text.0)),
            Document::Whole(document) => print_document(document),
            Document::Streamed(document) => print_streamed(&**document),
        };
        [self.failure.as_ref(), lost.err().as_ref()].into_iter().flatten().fold(0, |code, error| {
            complain(error);
            if code == 0 { error.code() } else { code }
        })
    }
}

/// Prints why there is no report; gives the exit code.
pub(crate) fn print_error(error: &CliError, json: bool) -> u8 {
    complain(error);
    if json {
        print_error_document(error);
    }
    error.code()
}

/// Prints the document of an error.
pub(crate) fn print_error_document(error: &CliError) {
    // It stands on stderr, too.
    let _ = print_document(&json!({ "error": error.document() }));
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
        // A reader that has seen enough closes the pipe; that is no failure of ours.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(CliError::Failed(format!(
            "what there is to say cannot be written to standard output: {error}"
        ))),
        _ => Ok(()),
    }
}

fn complain(error: &CliError) {
    let _ = writeln!(std::io::stderr(), "onehop: {}", shown(&error.to_string()));
}

/// Says on stderr what is no failure and should be known all the same.
pub(crate) fn warn(what: &str) {
    let _ = writeln!(std::io::stderr(), "onehop: warning: {}", shown(what));
}

/// Text with names of strangers in it, for a terminal: nothing that it would obey, and no name as long as a file.
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
