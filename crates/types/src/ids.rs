//! Ids: a prefix that says what it names, and a body that sorts by the time it was made.
//!
//! The text form is `<prefix>_<26 characters>`, the body a UUIDv7 in Crockford's base 32, lower case. The same
//! text is stored, sent and shown. Parsing is strict: another prefix, length or character is an error.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
/// Characters of a body: 128 bits, five at a time.
const BODY_LEN: usize = 26;

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not an id of the form `{prefix}_` and 26 characters of `0-9 a-z` without `i l o u`")]
pub struct IdError {
    /// What was given, cut to 64 characters.
    pub text: String,
    /// The prefix that was expected.
    pub prefix: &'static str,
}

fn encode(value: u128) -> String {
    let mut body = [b'0'; BODY_LEN];
    let mut rest = value;
    for place in body.iter_mut().rev() {
        let index = usize::try_from(rest & 31).expect("five bits fit");
        *place = ALPHABET[index];
        rest >>= 5;
    }
    body.iter().map(|byte| char::from(*byte)).collect()
}

fn is_body(text: &str) -> bool {
    text.len() == BODY_LEN
        && text.bytes().all(|byte| ALPHABET.contains(&byte))
        // 26 characters carry 130 bits: the first may only use three.
        && text.as_bytes()[0] <= b'7'
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident = $prefix:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The prefix of the text form, without the underscore.
            pub const PREFIX: &'static str = $prefix;

            /// Returns a new id that sorts after every id made earlier on this machine.
            pub fn generate() -> Self {
                Self::from_u128(uuid::Uuid::now_v7().as_u128())
            }

            /// Returns the id with this body; used where ids must be the same in every run.
            pub fn from_u128(value: u128) -> Self {
                Self(format!("{}_{}", $prefix, encode(value)))
            }

            /// Returns the text form.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                match text.strip_prefix(concat!($prefix, "_")) {
                    Some(body) if is_body(body) => Ok(Self(text.to_owned())),
                    _ => Err(IdError { text: text.chars().take(64).collect(), prefix: $prefix }),
                }
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;

            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

ids! {
    /// An organization: every other object belongs to one.
    OrganizationId = "org";
    /// A person or service account.
    UserId = "usr";
    /// An API token.
    TokenId = "tok";
    /// A session.
    SessionId = "ses";
    /// One running instance of a session.
    SandboxId = "sbx";
    /// A registered machine.
    HostId = "hst";
    /// A program run in a session.
    ExecId = "exe";
    /// A multi-step operation on a session.
    OpId = "op";
}

/// Position in a session's event log, from 1, without holes; 0 stands before the first.
pub type EventCursor = u64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips_and_sorts_by_time() {
        let first = SessionId::generate();
        let second = SessionId::generate();
        assert!(first < second);
        assert_eq!(first.as_str().parse::<SessionId>(), Ok(first.clone()));
        assert_eq!(SessionId::from_u128(u128::MAX).as_str(), "ses_7zzzzzzzzzzzzzzzzzzzzzzzzz");
        assert_eq!(SessionId::from_u128(0).as_str(), "ses_00000000000000000000000000");
    }

    #[test]
    fn anything_but_the_exact_form_is_refused() {
        let good = SessionId::generate().as_str().to_owned();
        for bad in [
            String::new(),
            "ses_".to_owned(),
            good.to_uppercase(),
            good.replace("ses_", "sbx_"),
            good[..good.len() - 1].to_owned(),
            format!("{good}0"),
            format!("ses_8{}", "0".repeat(25)),
            format!("ses_{}u", "0".repeat(25)),
        ] {
            assert!(bad.parse::<SessionId>().is_err(), "`{bad}` was accepted");
        }
    }
}
