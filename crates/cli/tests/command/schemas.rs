//! The schemas of all documents: completeness, references, and consistent types.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::run::{code, leaf_commands, onehop, refuse, schema, stdout, succeed};

fn names() -> Vec<String> {
    let list = succeed(&["schema"]);
    list["command_names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_command_has_a_schema() {
    let mut all: Vec<_> = leaf_commands().iter().map(|words| words.join(" ")).collect();
    let mut known = names();
    all.sort();
    known.sort();
    assert_eq!(all, known);
}

#[test]
fn every_schema_is_self_contained() {
    for name in names() {
        let words: Vec<_> = name.split(' ').collect();
        let output = onehop(&[&["schema"], &words[..]].concat());
        assert_eq!(code(&output), 0, "{name}");
        let printed: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(printed, succeed(&[&["schema"], &words[..]].concat())["json_schema"], "{name}");
        let text = printed.to_string();
        assert!(!text.contains("common.json"), "{name} refers to a file");
        // Both fail if a reference is broken.
        schema::check(
            &name,
            &json!({ "schema": 1, "error": { "kind": "failed", "exit_code": 1, "message": "no" } }),
        );
        assert!(!schema::is_valid(&name, &json!({})), "{name} accepts anything");
        assert!(!schema::is_valid(&name, &json!({ "schema": 2 })), "{name} accepts any version");
    }
    refuse(&["schema", "teapot"], 2, "no command 'teapot'");
    refuse(&["schema", "drive"], 2, "drive identify");
}

/// Scripts that read several commands rely on this.
#[test]
fn a_field_has_one_type_in_all_documents() {
    fn types(schema: &Value, defs: &Value) -> Vec<String> {
        match schema["$ref"].as_str().and_then(|to| to.rsplit('/').next()) {
            // An integer that may exceed 64 bits counts as a type of its own.
            Some("big") => return vec!["big".into()],
            Some(name) => return types(&defs[name], defs),
            None => {}
        }
        if let Some(any) = schema["anyOf"].as_array() {
            return any.iter().flat_map(|one| types(one, defs)).collect();
        }
        let of_value = |value: &Value| match value {
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Bool(_) => "boolean",
            other => panic!("{other}"),
        };
        let list = match (&schema["type"], &schema["const"]) {
            (Value::String(one), _) => vec![one.clone()],
            (Value::Array(list), _) => list.iter().map(|one| one.as_str().unwrap().to_owned()).collect(),
            (_, value) => vec![of_value(value).to_owned()],
        };
        let list = list.into_iter().filter(|one| one != "null");
        list.map(|one| if one == "integer" { "number".to_owned() } else { one }).collect()
    }
    fn fields(schema: &Value, defs: &Value, found: &mut BTreeMap<String, Vec<String>>) {
        if let Some(to) = schema["$ref"].as_str() {
            return fields(&defs[to.rsplit('/').next().unwrap()], defs, found);
        }
        for part in ["anyOf", "allOf"].iter().flat_map(|name| schema[*name].as_array()).flatten() {
            fields(part, defs, found);
        }
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            found.entry(name.clone()).or_default().extend(types(field, defs));
        }
    }
    let mut of_all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names() {
        let schema = schema::of(&name);
        fields(&schema, &schema["$defs"], &mut of_all);
    }
    assert!(of_all.len() > 150, "{} fields", of_all.len());
    for (name, mut types) in of_all {
        types.sort();
        types.dedup();
        assert_eq!(types.len(), 1, "{name} is {types:?}");
    }
}

/// The names of all fields of a schema, at any depth.
fn field_names(schema: &Value, found: &mut BTreeSet<String>) {
    match schema {
        Value::Object(parts) => {
            if let Some(fields) = parts.get("properties").and_then(Value::as_object) {
                found.extend(fields.keys().cloned());
            }
            parts.values().for_each(|part| field_names(part, found));
        }
        Value::Array(list) => list.iter().for_each(|part| field_names(part, found)),
        _ => {}
    }
}

#[test]
fn the_documentation_has_every_field() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/json.md")).unwrap();
    // Text between backticks.
    let code: Vec<_> = page.split('`').skip(1).step_by(2).collect();
    let words: BTreeSet<_> =
        code.iter().flat_map(|code| code.split(|c: char| c != '_' && !c.is_alphanumeric())).collect();
    for name in names() {
        let mut fields = BTreeSet::new();
        field_names(&schema::of(&name), &mut fields);
        let missing: Vec<_> = fields.iter().filter(|field| !words.contains(field.as_str())).collect();
        assert!(missing.is_empty(), "docs/json.md lacks these fields of {name}: {missing:?}");
    }
}
