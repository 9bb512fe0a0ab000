//! Whether a document follows the schema of its command, and has no other fields.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock};

use boon::{Compiler, Schemas};
use serde_json::{Value, json};

/// What a command line prints has to be what `onehop schema` says of its command.
pub fn check_output(args: &[&str], document: &Value) {
    check(&command_of(args, document), document);
}

/// A document has to be one of this command.
pub fn check(command: &str, document: &Value) {
    if let Err(why) = validate(command, document) {
        panic!("this is not a document of onehop {command}: {why}\n{document:#}");
    }
}

/// Whether it is.
pub fn is_valid(command: &str, document: &Value) -> bool {
    validate(command, document).is_ok()
}

/// The schema as it is printed.
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

/// Forbids fields that a schema does not list. Readers must accept more fields; our own schemas list every one.
fn close(schema: &mut Value) {
    // What is taken into others is closed by those.
    let mut taken = Vec::new();
    collect(schema, &mut taken);
    if let Some(defs) = schema["$defs"].as_object_mut() {
        for (name, def) in defs {
            close_one(def, !taken.contains(name));
        }
    }
    for variant in schema["anyOf"].as_array_mut().unwrap() {
        close_one(variant, true);
    }
}

fn collect(schema: &Value, taken: &mut Vec<String>) {
    match schema {
        Value::Object(fields) => {
            for part in fields.get("allOf").and_then(Value::as_array).into_iter().flatten() {
                taken.extend(part["$ref"].as_str().map(|to| to.rsplit('/').next().unwrap().to_owned()));
            }
            fields.values().for_each(|value| collect(value, taken));
        }
        Value::Array(list) => list.iter().for_each(|value| collect(value, taken)),
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

/// The command of a line: the first words that name one. A line without a command has an error for a document.
fn command_of(args: &[&str], document: &Value) -> String {
    let mut words = args.iter().filter(|arg| **arg != "--json");
    let first = *words.next().unwrap_or(&"");
    let two = format!("{first} {}", words.next().unwrap_or(&""));
    let groups = ["bench", "cufile", "drive", "sdr", "sim"];
    let name = if groups.contains(&first) { two } else { first.to_owned() };
    // What is refused before there is a command is refused alike everywhere.
    let known = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("schemas")
        .join(name.replace(' ', "-") + ".json");
    match known.exists() {
        true if name != "common" => name,
        _ => {
            assert!(document.get("error").is_some(), "{args:?} is of no command that is known");
            "demo".to_owned()
        }
    }
}
