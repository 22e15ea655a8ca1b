//! What can go wrong in the store, as a caller can branch on it.

use cloister_types::Isolation;
use cloister_types::session::IllegalTransition;

/// Why an operation of the store did not happen. Nothing was changed, unless the variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Nothing of that kind has this id, prefix or name.
    #[error("no {kind} matches `{reference}`")]
    NotFound {
        /// `session`, `host` or `token`.
        kind: &'static str,
        /// What was asked for, cut to 64 characters.
        reference: String,
    },
    /// A prefix that more than one object has.
    #[error("`{reference}` matches more than one {kind}: {}", .candidates.join(", "))]
    Ambiguous {
        /// `session` or `host`.
        kind: &'static str,
        /// The prefix.
        reference: String,
        /// Some ids that match, at most five.
        candidates: Vec<String>,
    },
    /// The name belongs to another live object.
    #[error("the {kind} name `{name}` is taken by `{holder}`")]
    NameTaken {
        /// `session` or `token`.
        kind: &'static str,
        /// The name.
        name: String,
        /// The id of the object that has it.
        holder: String,
    },
    /// The request id was used before, for something else.
    #[error("request id `{request_id}` was used before with another payload")]
    IdempotencyMismatch {
        /// The request id.
        request_id: String,
    },
    /// The row moved on: another epoch, generation, lease or link. The caller is not the one who may act.
    #[error("{kind} `{id}` was changed by somebody else meanwhile")]
    Conflict {
        /// `session`, `op` or `host`.
        kind: &'static str,
        /// Its id.
        id: String,
    },
    /// The session's state does not allow it.
    #[error(transparent)]
    Illegal(#[from] IllegalTransition),
    /// Hosts are connected, but none offers isolation this strong (with the backend that was asked for).
    #[error("no connected host offers isolation `{floor}` or stronger{}; offered: {}", backend_text(.backend), if .offered.is_empty() { "nothing".to_owned() } else { .offered.join(", ") })]
    NotOffered {
        /// The least that the session accepts.
        floor: Isolation,
        /// The backend that was asked for by name.
        backend: Option<String>,
        /// Backends whose probe passed on some connected host.
        offered: Vec<String>,
    },
    /// Hosts are connected and none could hold the session even when empty.
    #[error("no host can hold {asked} of {resource}: the most is {most}")]
    TooLarge {
        /// `memory`, `CPU` or `disk`.
        resource: &'static str,
        /// What was asked for.
        asked: String,
        /// What the largest host could give.
        most: String,
    },
    /// A page token that this store did not make.
    #[error("the page token is not one of this server's")]
    PageToken,
    /// The database cannot be reached or asks to try later; trying again may help. Whether a commit that was under
    /// way took place is not known: repeat with the same request id.
    #[error("the database is not available to `{operation}`")]
    Unavailable {
        /// The operation.
        operation: &'static str,
        /// The cause.
        source: sqlx::Error,
    },
    /// The database refused a statement: a defect of this program.
    #[error("the database refused `{operation}`")]
    Database {
        /// The operation.
        operation: &'static str,
        /// The cause.
        source: sqlx::Error,
    },
    /// A row holds something that this version does not know, for example a word of a later release.
    #[error("{table} `{id}` has an unreadable {column}: {problem}")]
    Corrupt {
        /// Its table.
        table: &'static str,
        /// Its id.
        id: String,
        /// The column.
        column: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// No connection at the start.
    #[error("cannot connect to PostgreSQL at {server} (set by DATABASE_URL, or the private one)")]
    Connect {
        /// Host and port, or the socket.
        server: String,
        /// The cause.
        source: sqlx::Error,
    },
    /// The schema could not be brought to this version.
    #[error("cannot migrate the database")]
    Migrate(#[source] sqlx::migrate::MigrateError),
}

fn backend_text(backend: &Option<String>) -> String {
    backend.as_ref().map(|backend| format!(" with backend `{backend}`")).unwrap_or_default()
}

impl StoreError {
    /// Returns whether the same call may succeed a little later without anybody doing anything.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    /// Returns whether the database cannot write because its disk is full (SQLSTATE 53100).
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Unavailable { source: sqlx::Error::Database(error), .. } => {
                error.code().is_some_and(|code| code == "53100")
            }
            _ => false,
        }
    }

    pub(crate) fn not_found(kind: &'static str, reference: &str) -> Self {
        Self::NotFound { kind, reference: reference.chars().take(64).collect() }
    }

    /// Returns the error of a statement of `operation`.
    pub(crate) fn from_sqlx(operation: &'static str, source: sqlx::Error) -> Self {
        if is_unavailable(&source) {
            Self::Unavailable { operation, source }
        } else {
            Self::Database { operation, source }
        }
    }
}

/// SQLSTATEs that say "later": connection trouble (08), out of resources (53), shutting or starting (57P0x),
/// cancelled by our own timeout (57014), lock timeout (55P03), serialization and deadlock (40001, 40P01).
fn is_unavailable(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed
        | sqlx::Error::Protocol(_) => true,
        sqlx::Error::Database(error) => error.code().is_some_and(|code| {
            ["08", "53", "57P"].iter().any(|class| code.starts_with(class))
                || ["57014", "55P03", "40001", "40P01"].contains(&code.as_ref())
        }),
        _ => false,
    }
}
