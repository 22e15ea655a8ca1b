//! The client context that `up` writes, so that commands work without being told anything.
//!
//! Under `sudo` the invoking user gets one too. It is written *as* that user: root must not follow a link that
//! somebody else may have put into their home.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use cloister_api::app::WhoAmIRequest;
use connectrpc::client::CallOptions;
use nix::unistd::User;

use crate::client::Client;
use crate::context::{CONFIG_ENV, Context, ContextFile, Target, config_path};
use crate::error::CliError;
use crate::supervisor::OWN_PROGRAM;
use crate::supervisor::account::Account;
use crate::supervisor::layout::Layout;

/// How long another coordinator may take to say that it is there.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// Writes the context for us and, under `sudo`, for the user who called it. Returns the files that were written.
///
/// # Errors
///
/// When our own cannot be written; the other user's is a warning through `warn`.
pub(crate) fn write(
    name: &str,
    target: &Target,
    mut warn: impl FnMut(String),
) -> Result<Vec<PathBuf>, CliError> {
    let path = config_path()?;
    let mut file = ContextFile::load(&path)?;
    let context = Context { endpoint: target.endpoint.clone(), token: target.token.clone() };
    file.contexts.insert(name.to_owned(), context);
    file.current = Some(name.to_owned());
    file.save(&path)?;
    let mut written = vec![path];
    // With a file of its own named, this is not about anybody's home.
    let user = std::env::var("SUDO_USER").ok().filter(|user| user != "root" && !user.is_empty());
    if let Some(user) = user.filter(|_| std::env::var_os(CONFIG_ENV).is_none()) {
        match write_as(&user, name, target) {
            Ok(path) => written.push(path),
            Err(error) => warn(format!("the context for user `{user}` was not written: {error}")),
        }
    }
    Ok(written)
}

/// Checks that the context of this name is not that of another coordinator that lives: its token would be lost.
///
/// # Errors
///
/// [`CliError::Refused`] naming the other one.
pub(crate) async fn must_not_be_anothers(name: &str, layout: &Layout) -> Result<(), CliError> {
    let file = ContextFile::load(&config_path()?)?;
    let Some(context) = file.contexts.get(name) else { return Ok(()) };
    let own = std::fs::read_to_string(layout.tokens().join("owner")).unwrap_or_default();
    if own.trim() == context.token {
        return Ok(());
    }
    let target = Target { context: None, endpoint: context.endpoint.clone(), token: context.token.clone() };
    let asked = async {
        let client = Client::connect_once(&target).await.ok()?;
        let options = CallOptions::default().with_timeout(ANSWER_TIMEOUT);
        client.api().tokens().who_am_i_with_options(WhoAmIRequest::default(), options).await.ok().map(drop)
    };
    if !matches!(tokio::time::timeout(ANSWER_TIMEOUT, asked).await, Ok(Some(()))) {
        return Ok(());
    }
    Err(CliError::refused(
        format!("the context `{name}` is that of another Cloister, which answers at `{}`", context.endpoint),
        "give `--context` another name for this one: commands then name it the same way, or `cloister context use` chooses",
    ))
}

fn write_as(user: &str, name: &str, target: &Target) -> Result<PathBuf, CliError> {
    let account = User::from_name(user)
        .map_err(|errno| CliError::io(format!("look up user `{user}`"))(errno.into()))?
        .ok_or_else(|| CliError::refused(format!("there is no user `{user}`"), ""))?;
    let run_as = Account { uid: account.uid, gid: account.gid }.to_string();
    let mut child = Command::new(OWN_PROGRAM)
        .args(["context", "add", name, "--url", &target.endpoint, "--token-file", "-", "--run-as", &run_as])
        .env_clear()
        .env("HOME", &account.dir)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(CliError::io(format!("run this program as `{user}`")))?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that ends without reading says why on standard error.
        let _ = std::io::Write::write_all(&mut stdin, target.token.as_bytes());
    }
    let output =
        child.wait_with_output().map_err(CliError::io(format!("wait for this program as `{user}`")))?;
    if output.status.success() {
        Ok(account.dir.join(".config/cloister/config.toml"))
    } else {
        Err(CliError::refused(crate::terminal::one_line(String::from_utf8_lossy(&output.stderr).trim()), ""))
    }
}
