//! Reports: an HTML page and the raw results. Also reads results of earlier runs.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use onehop_bench::page::Page;
use onehop_bench::results::{MOST_BYTES, Machine, Results, ResultsError};
use serde::Serialize;

use crate::error::{CliError, Result};
use crate::outputs;
use crate::report::{ReportText, Versioned};

/// The folders created for a report. Those still empty are removed on drop.
#[must_use]
pub(crate) struct ReportFolders(Vec<PathBuf>);

impl Drop for ReportFolders {
    fn drop(&mut self) {
        // The innermost first. Removing a folder that is not empty fails, which is intended.
        for folder in &self.0 {
            let _ = std::fs::remove_dir(folder);
        }
    }
}

/// Creates the folder of a report, and checks that it can be written, before anything is measured.
pub(crate) fn folder(folder: Option<&Path>) -> Result<ReportFolders> {
    let Some(folder) = folder else { return Ok(ReportFolders(Vec::new())) };
    let is_missing = |at: &&Path| !at.as_os_str().is_empty() && !at.exists();
    let created = ReportFolders(folder.ancestors().take_while(is_missing).map(Path::to_owned).collect());
    std::fs::create_dir_all(folder).map_err(|e| CliError::file("creating", folder, e))?;
    let probe = folder.join(".onehop-report");
    let written = std::fs::write(&probe, b"");
    let _ = std::fs::remove_file(&probe);
    written.map_err(|e| CliError::file("writing", folder, e))?;
    Ok(created)
}

/// Describes this machine.
pub(crate) fn machine() -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Machine {
        cpu: name.map_or("unknown", |(_, name)| name.trim()).to_owned(),
        cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        onehop: env!("ONEHOP_VERSION").to_owned(),
        unix_time: now.map_or(0, |time| time.as_secs()),
    }
}

/// Writes NAME.html and NAME.json into a folder, and adds their paths to the text.
pub(crate) fn write(
    folder: &Path,
    name: &str,
    page: &Page,
    document: &impl Serialize,
    text: &mut ReportText,
) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| CliError::file("creating", folder, e))?;
    let json = serde_json::to_vec_pretty(&Versioned::new(document))
        .map_err(|e| CliError::Failed(format!("the report cannot be written as JSON: {e}")))?;
    for (ending, bytes) in [("html", page.to_html().into_bytes()), ("json", json)] {
        let path = folder.join(format!("{name}.{ending}"));
        outputs::write(&path, bytes)?;
        text.row("report", path.display());
    }
    Ok(())
}

/// Reads the results of an earlier sweep, up to their maximum size.
pub(super) fn read(path: &Path) -> Result<Results> {
    let failed = |why: ResultsError| onehop_bench::Error::Results { path: path.display().to_string(), why };
    let file = File::open(path).map_err(|e| CliError::file("opening", path, e))?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(|e| CliError::file("reading", path, e))?;
    Ok(Results::parse(&bytes).map_err(failed)?)
}
