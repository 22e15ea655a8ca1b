//! The private PostgreSQL of `up`: where it is, which process it is, and stopping one that nobody supervises.

use std::ffi::OsString;

use cloister_coordinator::postgres::{PostgresConfig, PrivatePostgres};
use cloister_service::{CancellationToken, error_chain};

use crate::error::CliError;
use crate::supervisor::account;
use crate::supervisor::layout::Layout;
use crate::supervisor::record::start_ticks;

/// Stops a private PostgreSQL that nobody supervises.
///
/// # Errors
///
/// [`CliError::Refused`] when it does not stop.
pub(crate) async fn stop_leftover(layout: &Layout) -> Result<(), CliError> {
    if postmaster_pid(layout).is_none() {
        return Ok(());
    }
    let stopped = async {
        let postgres = PrivatePostgres::start(config(layout)).await?;
        let cancel = CancellationToken::new();
        cancel.cancel();
        postgres.supervise(cancel).await
    };
    stopped.await.map_err(|error| {
        CliError::refused(
            format!("PostgreSQL does not stop: {}", error_chain(&error)),
            format!(
                "its process is named in `{}`",
                layout.data_of("postgres").join("postmaster.pid").display()
            ),
        )
    })
}

/// Returns how the private PostgreSQL of these directories is run.
pub(crate) fn config(layout: &Layout) -> PostgresConfig {
    PostgresConfig {
        data_dir: layout.data_of("postgres"),
        run_dir: layout.run_of("postgres"),
        system_user: account::POSTGRES_USER.to_owned(),
        fast_and_unsafe: false,
    }
}

/// Returns the process of the private PostgreSQL, as its own pid file has it.
pub(crate) fn postmaster_pid(layout: &Layout) -> Option<i32> {
    let text = std::fs::read_to_string(layout.data_of("postgres").join("postmaster.pid")).ok()?;
    let pid = text.lines().next()?.trim().parse().ok()?;
    start_ticks(pid).map(|_| pid)
}

/// Returns how the coordinator connects to it.
pub(crate) fn url(layout: &Layout) -> OsString {
    let mut url = OsString::from("postgres:///cloister?user=cloister&host=");
    url.push(layout.run_of("postgres"));
    url
}
