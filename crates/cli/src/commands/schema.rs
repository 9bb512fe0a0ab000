//! `onehop schema`: prints the JSON Schema of a command's `--json` output.

use serde_json::{Map, Value, json};

use crate::error::{CliError, Result};
use crate::report::{Report, ReportText};

/// Print the JSON Schema of a command's --json document; without a command, the names of all
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  onehop schema\n  onehop schema load > load.schema.json\n  onehop schema drive identify\n\nEvery \
                  document has schema: 1. Fields may be added to it; none is removed, and none changes its type."
)]
pub(crate) struct Args {
    /// The command, in one or two words
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

macro_rules! schemas {
    ($($name:literal in $file:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../schemas/", $file, ".json")))),*]
    };
}

/// Definitions that several schemas refer to.
const COMMON: &str = include_str!("../../schemas/common.json");
const ALL: &[(&str, &str)] = schemas!(
    "demo" in "demo",
    "load" in "load",
    "map" in "map",
    "read" in "read",
    "write" in "write",
    "drive list" in "drive-list",
    "drive identify" in "drive-identify",
    "drive smart" in "drive-smart",
    "drive errors" in "drive-errors",
    "drive dump-bar0" in "drive-dump-bar0",
    "drive reset" in "drive-reset",
    "drive bind" in "drive-bind",
    "drive unbind" in "drive-unbind",
    "drive recover" in "drive-recover",
    "drive check-p2p" in "drive-check-p2p",
    "doctor" in "doctor",
    "topo" in "topo",
    "report" in "report",
    "mount" in "mount",
    "target" in "target",
    "bench queue" in "bench-queue",
    "bench sweep" in "bench-sweep",
    "bench load" in "bench-load",
    "bench target" in "bench-target",
    "bench gather" in "bench-gather",
    "bench pages" in "bench-pages",
    "sim serve" in "sim-serve",
    "sdr info" in "sdr-info",
    "sdr rx" in "sdr-rx",
    "sdr tx" in "sdr-tx",
    "sdr selftest" in "sdr-selftest",
    "cufile env" in "cufile-env",
    "cufile run" in "cufile-run",
    "completions" in "completions",
    "man" in "man",
    "schema" in "schema",
);

pub(crate) fn run(args: &Args) -> Result<Report> {
    let name = args.command.join(" ");
    let names: Vec<_> = ALL.iter().map(|(name, _)| *name).collect();
    let mut text = ReportText::default();
    if name.is_empty() {
        names.iter().for_each(|name| text.line(name));
        return Report::new(json!({ "command_names": names }), text);
    }
    let Some((name, file)) = ALL.iter().find(|(known, _)| *known == name) else {
        let name = name.escape_debug();
        return Err(CliError::Usage(format!(
            "no command '{name}' prints a document; commands are {}",
            names.join(", ")
        )));
    };
    let schema = bundle(file)
        .map_err(|why| CliError::Failed(format!("the schema of {name} is not well-formed: {why}")))?;
    text.line(format_args!("{schema:#}"));
    Report::new(json!({ "command": name, "json_schema": schema }), text)
}

/// The schema of a command.
#[cfg(test)]
pub(super) fn of(command: &str) -> Value {
    let (_, file) = ALL.iter().find(|(known, _)| *known == command).unwrap();
    bundle(file).unwrap()
}

/// Makes a schema self-contained, by adding the definitions that it refers to.
fn bundle(file: &str) -> std::result::Result<Value, String> {
    let parse = |text| serde_json::from_str::<Value>(text).map_err(|e| e.to_string());
    let (mut schema, common) = (parse(file)?, parse(COMMON)?);
    let mut wanted = Vec::new();
    localize_refs(&mut schema, &mut wanted);
    let mut defs = schema["$defs"].as_object().cloned().unwrap_or_else(Map::new);
    while let Some(name) = wanted.pop() {
        if !defs.contains_key(&name) {
            let mut def =
                common["$defs"].get(&name).cloned().ok_or_else(|| format!("{name} is defined nowhere"))?;
            localize_refs(&mut def, &mut wanted);
            defs.insert(name, def);
        }
    }
    schema["$defs"] = Value::Object(defs);
    Ok(schema)
}

/// Makes references local to the schema, and collects their names.
fn localize_refs(schema: &mut Value, wanted: &mut Vec<String>) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(to) if name == "$ref" => {
                        let def = to.rsplit('/').next().unwrap_or_default().to_owned();
                        *to = format!("#/$defs/{def}");
                        wanted.push(def);
                    }
                    value => localize_refs(value, wanted),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| localize_refs(value, wanted)),
        _ => {}
    }
}
