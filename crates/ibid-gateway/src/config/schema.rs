//! The JSON schema of the configuration, for editors. Its types come from the same tables as the reader's.

use std::sync::LazyLock;

use serde_json::{Map, Value as Json, json};

use super::{
    raw::RawFile,
    toml_node::{FromToml, Scalar},
};

/// The schema of a whole file, without descriptions.
pub fn file_schema() -> Json {
    RawFile::schema()
}

/// Every text may refer to a variable or a file instead.
pub(super) fn choices(words: &[&str]) -> Json {
    json!({ "anyOf": [{ "enum": words }, { "type": "string", "pattern": "^(env|file):" }] })
}

pub(super) fn scalar<T: Scalar>() -> Json {
    let words = T::choices();
    let text = if words.is_empty() { json!({ "type": "string" }) } else { choices(&words) };
    let other = [
        T::from_number(1).map(|_| json!({ "type": "integer" })),
        T::from_bool(true).or(T::from_bool(false)).map(|_| json!({ "type": "boolean" })),
    ];
    let mut all: Vec<Json> = other.into_iter().flatten().collect();
    if all.is_empty() {
        return text;
    }
    all.push(text);
    json!({ "anyOf": all })
}

/// A list with one item needs no brackets, unless the item is a table.
pub(super) fn list(item: Json) -> Json {
    let list = json!({ "type": "array", "items": item });
    if item.get("properties").is_some() { list } else { json!({ "anyOf": [item, list] }) }
}

pub(super) fn table(members: Vec<(&'static str, Json)>) -> Json {
    let properties: Map<String, Json> = members.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect();
    json!({ "type": "object", "additionalProperties": false, "properties": properties })
}

/// Returns the tables that have this key, such as `admin`; the empty name is the top of the file.
pub(super) fn tables_with_key(key: &str) -> Vec<String> {
    static SCHEMA: LazyLock<Json> = LazyLock::new(file_schema);
    let mut found = Vec::new();
    find_tables(&SCHEMA, "", key, &mut found);
    found
}

fn find_tables(schema: &Json, path: &str, key: &str, found: &mut Vec<String>) {
    let schema = schema.get("items").unwrap_or(schema);
    let Some(members) = schema.get("properties").and_then(Json::as_object) else { return };
    if members.contains_key(key) {
        found.push(path.to_owned());
    }
    for (name, member) in members {
        let path = match path {
            "" if name == "route" => "[route]".to_owned(),
            "" => name.clone(),
            path => format!("{path}.{name}"),
        };
        find_tables(member, &path, key, found);
    }
}
