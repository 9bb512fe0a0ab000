//! `onehop cufile`: runs programs written for cuFile with onehop's library instead of NVIDIA's.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Subcommand;

use serde_json::Value;

use crate::error::{CliError, Result};
use crate::report::{Report, ReportText};

/// The names by which programs load the library; the first is the usual one.
const NAMES: [&str; 2] = ["libcufile.so.0", "libcufile.so"];
/// The name of the library that cargo builds.
const BUILT: &str = "libonehop_cufile.so";
/// The folder in packages, relative to that of the command.
const INSTALLED: &str = "../lib/onehop/cufile";
const PRELOAD: &str = "LD_PRELOAD";
const LIBRARIES: &str = "LD_LIBRARY_PATH";
const AUDIT: &str = "LD_AUDIT";

#[derive(Subcommand)]
pub(crate) enum CuFileCommand {
    Run(RunArgs),
    Env(EnvArgs),
}

/// Run a program with onehop's libcufile, otherwise in the same environment
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop cufile run -- python3 train.py\n  ONEHOP_CUFILE_REPORT=stderr onehop cufile run -- ./program"
)]
pub(crate) struct RunArgs {
    /// The folder that has libcufile.so.0 [default: ../lib/onehop/cufile relative to the command, or the folder of the
    /// command]
    #[arg(long, value_name = "DIR")]
    library: Option<PathBuf>,
    /// Leave libraries alone that the program opens by their path, as torch does: LD_AUDIT is not set
    #[arg(long)]
    no_audit: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Print the environment variables with which programs load onehop's libcufile
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  onehop cufile env\n  eval \"$(onehop cufile env)\"")]
pub(crate) struct EnvArgs {
    /// The folder that has libcufile.so.0 [default: ../lib/onehop/cufile relative to the command, or the folder of the
    /// command]
    #[arg(long, value_name = "DIR")]
    library: Option<PathBuf>,
    /// Leave libraries alone that programs open by their path, as torch does: LD_AUDIT is not set
    #[arg(long)]
    no_audit: bool,
}

pub(crate) fn run(command: &CuFileCommand) -> Result<Report> {
    match command {
        CuFileCommand::Run(args) => run_program(args),
        CuFileCommand::Env(args) => print_variables(args),
    }
}

fn run_program(args: &RunArgs) -> Result<Report> {
    let folder = folder(args.library.as_deref())?;
    let Some((program, rest)) = args.program.split_first() else {
        return Err(CliError::Usage("a program to run is missing".into()));
    };
    let mut command = Command::new(program);
    command.args(rest).envs(variables(&folder, !args.no_audit, |name| std::env::var_os(name)));
    // Returns only if the program could not be started.
    let source = command.exec();
    Err(CliError::File { call: "cannot run", path: program.to_string_lossy().into_owned(), source })
}

fn print_variables(args: &EnvArgs) -> Result<Report> {
    let folder = folder(args.library.as_deref())?;
    let mut text = ReportText::default();
    let mut document = serde_json::Map::new();
    for (name, value) in variables(&folder, !args.no_audit, |name| std::env::var_os(name)) {
        let value = value.to_string_lossy().into_owned();
        text.line(format_args!("export {name}='{}'", value.replace('\'', r"'\''")));
        document.insert(name.into(), value.into());
    }
    Report::new(Value::Object(document), text)
}

/// The variables: LD_PRELOAD loads the library before any other of its name, regardless of the program's search path.
/// LD_LIBRARY_PATH is for programs that load it by the name without a version. With LD_AUDIT the library itself tells the
/// dynamic linker to load it in place of others of its name, wherever they are.
fn variables(
    folder: &Path,
    audits: bool,
    current: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let prepend = |path: &Path, name| {
        let mut value = path.as_os_str().to_owned();
        if let Some(rest) = current(name).filter(|rest| !rest.is_empty()) {
            value.push(":");
            value.push(rest);
        }
        (name, value)
    };
    let library = folder.join(NAMES[0]);
    let mut all = vec![prepend(&library, PRELOAD), prepend(folder, LIBRARIES)];
    all.extend(audits.then(|| prepend(&library, AUDIT)));
    all
}

/// The folder that contains the library under both names.
fn folder(named: Option<&Path>) -> Result<PathBuf> {
    let has_all = |folder: &Path| NAMES.iter().all(|name| folder.join(name).exists());
    let missing = |places: &str| CliError::NotPossible {
        what: "running a program with onehop's libcufile".into(),
        reason: format!("{} is not in {places}", NAMES.join(" or ")),
        fix: "Build it with `cargo build --release -p onehop-cufile`, or name its folder with --library"
            .into(),
    };
    let absolute = |folder: &Path| folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    if let Some(folder) = named {
        return if has_all(folder) {
            Ok(absolute(folder))
        } else {
            Err(missing(&folder.display().to_string()))
        };
    }
    let command = std::env::current_exe().map_err(|source| CliError::File {
        call: "cannot find",
        path: "the onehop command".into(),
        source,
    })?;
    let command_folder = command.parent().unwrap_or(Path::new("."));
    let installed = command_folder.join(INSTALLED);
    if has_all(&installed) {
        return Ok(absolute(&installed));
    }
    let built = command_folder.join(BUILT);
    if !built.is_file() {
        return Err(missing(&format!("{} and {}", absolute(&installed).display(), command_folder.display())));
    }
    let linked = command_folder.join("cufile");
    link(&built, &linked).map_err(|source| CliError::File {
        call: "cannot create",
        path: linked.display().to_string(),
        source,
    })?;
    Ok(linked)
}

/// Links the library that cargo built under both names, in a folder of its own.
fn link(built: &Path, folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for name in NAMES {
        match symlink(built, folder.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_keep_their_values() {
        let values = |audits, libraries: Option<&str>| {
            let all = variables(Path::new("/lib/x"), audits, |name| {
                libraries.filter(|_| name == LIBRARIES).map(OsString::from)
            });
            all.into_iter().map(|(_, value)| value.into_string().unwrap()).collect::<Vec<_>>()
        };
        let library = "/lib/x/libcufile.so.0";
        assert_eq!(values(false, None), [library, "/lib/x"]);
        assert_eq!(values(true, Some("/a:/b")), [library, "/lib/x:/a:/b", library]);
    }
}
