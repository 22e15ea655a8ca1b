//! Checks of fields that several messages have.

use std::collections::BTreeMap;
use std::time::Duration;

use cloister_types::ExecId;
use cloister_types::name::{validate_labels, validate_name, validate_request_id};

use crate::error::AppError;

/// Longest reference: the longest name and every id fit many times over.
const REFERENCE_MAX_LEN: usize = 128;
/// Longest page token.
const PAGE_TOKEN_MAX_LEN: usize = 512;
/// Longest time to live: ten years.
const TTL_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
const PAGE_SIZE_DEFAULT: u32 = 100;
const PAGE_SIZE_MAX: u32 = 500;

/// Checks a client request id.
pub(super) fn request_id(text: &str) -> Result<(), AppError> {
    validate_request_id(text).map_err(|error| AppError::field("request_id", error))
}

/// Checks a reference to a session, host or token.
pub(super) fn reference<'a>(field: &str, text: &'a str) -> Result<&'a str, AppError> {
    if text.is_empty() {
        return Err(AppError::field(field, "it is empty: give an id, a unique prefix of one, or a name"));
    }
    if text.len() > REFERENCE_MAX_LEN || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        let shown: String = text.chars().filter(|c| !c.is_control()).take(64).collect();
        return Err(AppError::field(
            field,
            format!(
                "`{shown}` is neither an id nor a name: at most {REFERENCE_MAX_LEN} printable ASCII characters"
            ),
        ));
    }
    Ok(text)
}

/// Checks an exec id.
pub(super) fn exec_id(text: &str) -> Result<ExecId, AppError> {
    text.parse().map_err(|error| AppError::field("exec_id", error))
}

/// Checks a name that may be empty.
pub(super) fn optional_name(text: &str) -> Result<Option<String>, AppError> {
    if text.is_empty() {
        return Ok(None);
    }
    validate_name(text).map_err(|error| AppError::field("name", error))?;
    Ok(Some(text.to_owned()))
}

/// Checks labels.
pub(super) fn labels<'a>(
    labels: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<BTreeMap<String, String>, AppError> {
    let labels = labels.into_iter().map(|(key, value)| (key.clone(), value.clone())).collect();
    validate_labels(&labels).map_err(|error| AppError::field("labels", error))?;
    Ok(labels)
}

/// Checks the size of a page.
pub(super) fn page_size(size: u32) -> Result<u32, AppError> {
    match size {
        0 => Ok(PAGE_SIZE_DEFAULT),
        1..=PAGE_SIZE_MAX => Ok(size),
        _ => Err(AppError::field(
            "page_size",
            format!("`{size}` is too many: accepted is 1 to {PAGE_SIZE_MAX}"),
        )),
    }
}

/// Checks the form of a page token; the store knows whether it is one of its own.
pub(super) fn page_token(text: &str) -> Result<Option<&str>, AppError> {
    if text.len() > PAGE_TOKEN_MAX_LEN || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(AppError::new(&crate::error::PAGE_TOKEN, "the page token is not one of this server's"));
    }
    Ok((!text.is_empty()).then_some(text))
}

/// Checks a time to live; zero is none.
pub(super) fn ttl(milliseconds: u64) -> Result<Option<Duration>, AppError> {
    let ttl = Duration::from_millis(milliseconds);
    if ttl > TTL_MAX {
        return Err(AppError::field("ttl_ms", format!("`{milliseconds}` is longer than ten years")));
    }
    Ok((milliseconds > 0).then_some(ttl))
}

/// Returns a wait, capped.
pub(super) fn wait(milliseconds: u64, most: Duration) -> Duration {
    Duration::from_millis(milliseconds).min(most)
}
