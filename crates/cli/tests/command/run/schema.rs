//! Checks that a document matches the schema of its command, and has no other fields.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use boon::{Compiler, Schemas};
use serde_json::{Value, json};

/// Checks the output of a command line against the schema of its command.
pub fn check_output(args: &[&str], document: &Value) {
    check(&command_of(args, document), document);
}

/// Checks a document against the schema of a command.
pub fn check(command: &str, document: &Value) {
    if let Err(why) = validate(command, document) {
        panic!("not a document of onehop {command}: {why}\n{document:#}");
    }
}

/// Whether a document matches the schema of a command.
pub fn is_valid(command: &str, document: &Value) -> bool {
    validate(command, document).is_ok()
}

/// The schema that `onehop schema` prints.
pub fn of(command: &str) -> Value {
    static KNOWN: OnceLock<Mutex<HashMap<String, Value>>> = OnceLock::new();
    let known = KNOWN.get_or_init(Mutex::default);
    if let Some(schema) = known.lock().unwrap().get(command) {
        return schema.clone();
    }
    let words: Vec<_> = ["schema"].into_iter().chain(command.split(' ')).collect();
    let output = super::onehop(&words);
    let schema: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{command}: {e}"));
    known.lock().unwrap().insert(command.to_owned(), schema.clone());
    schema
}

fn validate(command: &str, document: &Value) -> Result<(), String> {
    let mut schema = of(command);
    close(&mut schema);
    let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
    compiler.add_resource("schema.json", schema).map_err(|e| e.to_string())?;
    let index = compiler.compile("schema.json", &mut schemas).map_err(|e| format!("{e:#}"))?;
    schemas.validate(document, index).map_err(|e| format!("{e:#}"))
}

/// Makes a schema reject unlisted fields. Readers must accept more fields, but the schemas list all current ones.
fn close(schema: &mut Value) {
    // Definitions that others include by allOf are closed there.
    let mut included = Vec::new();
    collect(schema, &mut included);
    if let Some(defs) = schema["$defs"].as_object_mut() {
        for (name, def) in defs {
            close_one(def, !included.contains(name));
        }
    }
    for variant in schema["anyOf"].as_array_mut().unwrap() {
        close_one(variant, true);
    }
}

fn collect(schema: &Value, included: &mut Vec<String>) {
    match schema {
        Value::Object(fields) => {
            for part in fields.get("allOf").and_then(Value::as_array).into_iter().flatten() {
                included.extend(part["$ref"].as_str().map(|to| to.rsplit('/').next().unwrap().to_owned()));
            }
            fields.values().for_each(|value| collect(value, included));
        }
        Value::Array(list) => list.iter().for_each(|value| collect(value, included)),
        _ => {}
    }
}

fn close_one(schema: &mut Value, may_close: bool) {
    let Some(fields) = schema.as_object_mut() else { return };
    for (name, value) in fields.iter_mut() {
        match name.as_str() {
            "properties" => {
                value.as_object_mut().unwrap().values_mut().for_each(|field| close_one(field, true))
            }
            "items" | "additionalProperties" => close_one(value, true),
            "anyOf" => value.as_array_mut().unwrap().iter_mut().for_each(|one| close_one(one, true)),
            _ => {}
        }
    }
    let is_open = fields.contains_key("additionalProperties");
    if may_close && !is_open && (fields.contains_key("properties") || fields.contains_key("allOf")) {
        fields.insert("unevaluatedProperties".into(), json!(false));
    }
}

/// The command of a command line. A line without a command prints an error document.
fn command_of(args: &[&str], document: &Value) -> String {
    let mut words = args.iter().filter(|arg| **arg != "--json");
    let first = *words.next().unwrap_or(&"");
    let two = format!("{first} {}", words.next().unwrap_or(&""));
    let groups = ["bench", "cufile", "drive", "sdr", "sim"];
    let name = if groups.contains(&first) { two } else { first.to_owned() };
    // Errors before a command is known have the same schema everywhere.
    let known = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("schemas")
        .join(name.replace(' ', "-") + ".json");
    match known.exists() {
        true if name != "common" => name,
        _ => {
            assert!(document.get("error").is_some(), "{args:?} names no known command");
            "demo".to_owned()
        }
    }
}
