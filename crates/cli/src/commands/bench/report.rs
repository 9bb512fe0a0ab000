//! Reports: a page and the raw figures beside it, and figures of earlier runs.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use onehop_bench::page::Page;
use onehop_bench::results::{MOST_BYTES, Results, ResultsError};
use serde::Serialize;

use crate::error::{CliError, Result};
use crate::report::Text;

/// Writes NAME.html and NAME.json into a folder, and says so.
pub(crate) fn write(
    folder: &Path,
    name: &str,
    page: &Page,
    document: &impl Serialize,
    text: &mut Text,
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| CliError::file("creating", folder, e))?;
    let json = serde_json::to_vec_pretty(document)
        .map_err(|e| CliError::Failed(format!("the report cannot be written as JSON: {e}")))?;
    for (ending, bytes) in [("html", page.to_html().into_bytes()), ("json", json)] {
        let path = folder.join(format!("{name}.{ending}"));
        std::fs::write(&path, bytes).map_err(|e| CliError::file("writing", &path, e))?;
        text.row("report", path.display());
    }
    Ok(())
}

/// Reads the figures of an earlier sweep, however long the file says that it is.
pub(super) fn read(path: &Path) -> Result<Results> {
    let failed = |why: ResultsError| onehop_bench::Error::Results { path: path.display().to_string(), why };
    let file = File::open(path).map_err(|e| CliError::file("opening", path, e))?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(|e| CliError::file("reading", path, e))?;
    Ok(Results::parse(&bytes).map_err(failed)?)
}
