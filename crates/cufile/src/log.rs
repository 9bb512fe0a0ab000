//! The library's log, controlled by the variables of the original.

use std::fs::File;
use std::io::Write;

/// The log level, by `CUFILE_LOGGING_LEVEL` or the configuration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Level {
    /// Failures that are not reported elsewhere.
    Error,
    /// Deviations from what was requested.
    Warning,
    /// Everything else.
    Info,
}

/// The level of this name.
pub fn level_of(name: &str) -> Option<Level> {
    match name.to_ascii_uppercase().as_str() {
        "FATAL" | "CRITICAL" | "ERROR" => Some(Level::Error),
        "WARN" | "WARNING" | "NOTICE" => Some(Level::Warning),
        "INFO" | "DEBUG" | "TRACE" => Some(Level::Info),
        _ => None,
    }
}

/// Writes a message to `CUFILE_LOGFILE_PATH` or stderr.
pub fn say(level: Level, what: &str) {
    let most = std::env::var("CUFILE_LOGGING_LEVEL").ok().and_then(|name| level_of(&name));
    if level > most.unwrap_or(Level::Error) {
        return;
    }
    let word = match level {
        Level::Error => "ERROR",
        Level::Warning => "WARN",
        Level::Info => "INFO",
    };
    let line = format!("onehop cufile[{}] {word}: {what}\n", std::process::id());
    let path = std::env::var_os("CUFILE_LOGFILE_PATH").filter(|path| !path.is_empty());
    let file = path.and_then(|path| File::options().append(true).create(true).open(path).ok());
    // Not eprintln: it would panic if stderr is closed.
    let _ = match file {
        Some(mut file) => file.write_all(line.as_bytes()),
        None => onehop_os::write_to_stderr(line.as_bytes()),
    };
}
