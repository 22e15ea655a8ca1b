//! Which JSON fields a request may have.
//!
//! The runtime ignores fields that it does not know, so that a misspelt limit would run without one. This module
//! finds the first such field in a request, from a table generated out of `proto/`.

use serde_json::Value;

include!("generated/json_fields.rs");

/// A message and its fields, sorted by JSON name.
#[derive(Debug)]
pub struct JsonMessage {
    /// Full name, for example `cloister.app.v1.CreateSessionRequest`.
    pub name: &'static str,
    /// Its fields.
    pub fields: &'static [JsonField],
}

/// A field as JSON names it; both names are accepted.
#[derive(Debug)]
pub struct JsonField {
    /// The name in lower camel case.
    pub json: &'static str,
    /// The name in the `.proto` file.
    pub proto: &'static str,
    /// What its value looks like.
    pub shape: JsonShape,
}

/// What the value of a field looks like.
#[derive(Debug)]
pub enum JsonShape {
    /// A value that its decoder checks.
    Scalar,
    /// An object with the fields of this message.
    Message(&'static str),
    /// A list of such objects.
    List(&'static str),
    /// An object whose keys are data and whose values are such objects.
    Map(&'static str),
}

/// A field that the message does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownField {
    /// Where it stands, for example `limits.memoryByte`.
    pub path: String,
    /// Its last part.
    pub name: String,
    /// The fields that may stand there.
    pub accepted: Vec<&'static str>,
}

/// Returns the first field of `value` that the message `name` does not have. A message that is not in the table,
/// and a value of the wrong shape, are left to the decoder.
pub fn unknown_field(name: &str, value: &Value) -> Option<UnknownField> {
    let message = message(name)?;
    for (key, inner) in value.as_object()? {
        let Some(field) = message.fields.iter().find(|field| field.json == key || field.proto == key) else {
            let shown: String = key.chars().take(64).collect();
            return Some(UnknownField {
                path: shown.clone(),
                name: shown,
                accepted: message.fields.iter().map(|field| field.json).collect(),
            });
        };
        let found = match field.shape {
            JsonShape::Scalar => None,
            JsonShape::Message(name) => unknown_field(name, inner),
            JsonShape::List(name) => {
                inner.as_array().into_iter().flatten().find_map(|item| unknown_field(name, item))
            }
            JsonShape::Map(name) => {
                inner.as_object().into_iter().flatten().find_map(|(_, item)| unknown_field(name, item))
            }
        };
        if let Some(mut unknown) = found {
            unknown.path = format!("{key}.{}", unknown.path);
            return Some(unknown);
        }
    }
    None
}

fn message(name: &str) -> Option<&'static JsonMessage> {
    JSON_MESSAGES.binary_search_by(|message| message.name.cmp(name)).ok().map(|index| &JSON_MESSAGES[index])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::access::RPC_ACCESS;

    #[test]
    fn every_request_is_in_the_table() {
        assert!(JSON_MESSAGES.is_sorted_by(|a, b| a.name < b.name));
        for rpc in RPC_ACCESS {
            assert!(message(rpc.request).is_some(), "`{}` is missing", rpc.request);
        }
    }

    #[test]
    fn unknown_fields_are_found_at_every_depth_and_map_keys_are_data() {
        let name = "cloister.app.v1.CreateSessionRequest";
        let good =
            json!({"requestId": "a", "wait_ms": "1", "labels": {"any": "x"}, "limits": {"memoryBytes": "1"}});
        assert_eq!(unknown_field(name, &good), None);
        let wrong = json!({"limits": {"memoryByte": "1"}});
        let unknown = unknown_field(name, &wrong).expect("it has no such field");
        assert_eq!(unknown.path, "limits.memoryByte");
        assert_eq!(unknown.accepted, ["cpuMillis", "diskBytes", "memoryBytes", "pids"]);
        assert!(unknown_field("cloister.app.v1.StartExecRequest", &json!({"spec": {"argvs": []}})).is_some());
    }
}
