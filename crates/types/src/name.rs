//! Names and labels that people choose.

use std::collections::BTreeMap;

/// Most characters of a name.
pub const NAME_MAX_LEN: usize = 63;
/// Most labels of one object.
pub const LABELS_MAX: usize = 64;
/// Most characters of a label's value.
pub const LABEL_VALUE_MAX_LEN: usize = 255;
/// Most characters of a client request id.
pub const REQUEST_ID_MAX_LEN: usize = 128;

/// A name, label or request id that is not accepted; the message says what is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A session, host or token name.
    #[error(
        "name `{0}` is not accepted: 1 to 63 of `a-z 0-9 -`, starting with a letter, not ending with `-`"
    )]
    Name(String),
    /// More labels than one object may have.
    #[error("{0} labels are too many: at most 64")]
    TooManyLabels(usize),
    /// A label's key.
    #[error(
        "label key `{0}` is not accepted: 1 to 63 of `A-Z a-z 0-9 . _ / -`, starting with a letter or digit"
    )]
    LabelKey(String),
    /// A label's value.
    #[error(
        "the value of label `{0}` is not accepted: at most 255 characters, none of them a control character"
    )]
    LabelValue(String),
    /// A client request id.
    #[error("request id `{0}` is not accepted: 1 to 128 printable ASCII characters without spaces")]
    RequestId(String),
}

fn shown(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Checks a name of a session, host or token.
///
/// # Errors
///
/// [`NameError::Name`]; the caller shows it.
pub fn validate_name(name: &str) -> Result<(), NameError> {
    let starts_well = name.bytes().next().is_some_and(|byte| byte.is_ascii_lowercase());
    let all_good =
        name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
    if name.len() <= NAME_MAX_LEN && starts_well && all_good && !name.ends_with('-') {
        Ok(())
    } else {
        Err(NameError::Name(shown(name)))
    }
}

/// Checks the labels of an object.
///
/// # Errors
///
/// The first label that is not accepted, or that there are too many.
pub fn validate_labels(labels: &BTreeMap<String, String>) -> Result<(), NameError> {
    if labels.len() > LABELS_MAX {
        return Err(NameError::TooManyLabels(labels.len()));
    }
    for (key, value) in labels {
        let starts_well = key.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
        let all_good = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte));
        if key.len() > NAME_MAX_LEN || !starts_well || !all_good {
            return Err(NameError::LabelKey(shown(key)));
        }
        if value.chars().count() > LABEL_VALUE_MAX_LEN || value.chars().any(char::is_control) {
            return Err(NameError::LabelValue(shown(key)));
        }
    }
    Ok(())
}

/// Checks a client request id.
///
/// # Errors
///
/// [`NameError::RequestId`], for an empty one too.
pub fn validate_request_id(request_id: &str) -> Result<(), NameError> {
    if (1..=REQUEST_ID_MAX_LEN).contains(&request_id.len())
        && request_id.bytes().all(|b| b.is_ascii_graphic())
    {
        Ok(())
    } else {
        Err(NameError::RequestId(shown(request_id)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels() {
        for good in ["a", "web-1", &"a".repeat(63)] {
            assert_eq!(validate_name(good), Ok(()));
        }
        for bad in ["", "1a", "-a", "a-", "A", "a_b", "a.b", "ä", &"a".repeat(64), "a\n"] {
            assert!(validate_name(bad).is_err(), "`{bad}` was accepted");
        }
    }

    #[test]
    fn labels_and_request_ids_are_bounded() {
        let one = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        assert_eq!(validate_labels(&one("team/name", "Ω ok")), Ok(()));
        assert!(validate_labels(&one("", "x")).is_err());
        assert!(validate_labels(&one("a", "line\nbreak")).is_err());
        assert!(validate_labels(&one("a", &"x".repeat(256))).is_err());
        let many = (0..65).map(|index| (format!("k{index}"), String::new())).collect();
        assert_eq!(validate_labels(&many), Err(NameError::TooManyLabels(65)));
        assert!(validate_request_id("").is_err());
        assert!(validate_request_id("a b").is_err());
        assert!(validate_request_id(&"x".repeat(129)).is_err());
        assert_eq!(validate_request_id("run-1/ü".trim_end_matches('ü')), Ok(()));
    }
}
