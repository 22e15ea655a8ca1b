//! Which JSON fields a request may have, and which of them are objects and lists.
//!
//! The runtime ignores fields that it does not know, so that a misspelt limit would run without one, and takes a list for
//! a message, with its fields by position. This module finds the first such fault in a request, from a table generated
//! out of `proto/`.

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

/// What is wrong with the JSON of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonFault {
    /// Where, for example `limits.memoryByte`; empty for the request itself.
    pub path: String,
    /// What.
    pub kind: FaultKind,
}

/// Kinds of [`JsonFault`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FaultKind {
    /// The message has no such field.
    UnknownField {
        /// The last part of the path.
        name: String,
        /// The fields that may stand there.
        accepted: Vec<&'static str>,
    },
    /// A message that is no object.
    NoObject,
}

/// Returns the first fault of `value` as the message `name`. A message that is not in the table and a scalar are left to
/// the decoder, and so is `null`, which stands for a field that is not set.
pub fn fault(name: &str, value: &Value) -> Option<JsonFault> {
    let message = message(name)?;
    let fields = match value {
        Value::Object(fields) => fields,
        Value::Null => return None,
        _ => return Some(JsonFault { path: String::new(), kind: FaultKind::NoObject }),
    };
    for (key, inner) in fields {
        let shown = || key.chars().take(64).collect::<String>();
        let Some(field) = message.fields.iter().find(|field| field.json == key || field.proto == key) else {
            let accepted = message.fields.iter().map(|field| field.json).collect();
            let kind = FaultKind::UnknownField { name: shown(), accepted };
            return Some(JsonFault { path: shown(), kind });
        };
        let found = match field.shape {
            JsonShape::Scalar => None,
            JsonShape::Message(name) => fault(name, inner),
            JsonShape::List(name) => {
                inner.as_array().into_iter().flatten().find_map(|item| fault(name, item))
            }
            JsonShape::Map(name) => {
                inner.as_object().into_iter().flatten().find_map(|(_, item)| fault(name, item))
            }
        };
        if let Some(inner) = found {
            let path = if inner.path.is_empty() { shown() } else { format!("{key}.{}", inner.path) };
            return Some(JsonFault { path, ..inner });
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
        assert_eq!(fault(name, &good), None);
        let wrong = json!({"limits": {"memoryByte": "1"}});
        let found = fault(name, &wrong).expect("it has no such field");
        assert_eq!(found.path, "limits.memoryByte");
        let FaultKind::UnknownField { name: last, accepted } = found.kind else { panic!("{found:?}") };
        assert_eq!(last, "memoryByte");
        assert_eq!(accepted, ["cpuMillis", "diskBytes", "memoryBytes", "pids"]);
        assert!(fault("cloister.app.v1.StartExecRequest", &json!({"spec": {"argvs": []}})).is_some());
    }

    #[test]
    fn a_list_is_no_message_at_any_depth() {
        let name = "cloister.app.v1.CreateSessionRequest";
        for (request, path) in [
            (json!(["a", "b"]), ""),
            (json!([]), ""),
            (json!("a"), ""),
            (json!({"requestId": "a", "limits": [67_108_864]}), "limits"),
        ] {
            let found = fault(name, &request).expect("it is no object");
            assert_eq!((found.path.as_str(), found.kind), (path, FaultKind::NoObject));
        }
        assert_eq!(fault(name, &json!({"limits": null})), None);
    }
}
