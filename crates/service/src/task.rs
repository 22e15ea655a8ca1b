//! The registry through which every task is spawned.
//!
//! A task belongs to a [`TaskKind`], declared as a constant where the task is written, which says what becomes of
//! it when the role stops and what becomes of the role when it fails:
//!
//! ```text
//!              on cancel                         on error (or panic)
//!  Wait   the task watches the token        Log      one ERROR line, the role lives on
//!         and ends by itself                Restart  the same, and it is made again after a growing pause
//!  Abort  it is dropped at its next await   Exit     the role stops: `TaskRegistry::failed` returns
//! ```
//!
//! Invariants: a task never outlives [`TaskRegistry::shutdown`]; a panic is a failure, never a silent end; the
//! registry holds no task that has ended.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::FutureExt as _;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Pause before a failed task is first made again; doubles up to [`RESTART_PAUSE_MAX`].
const RESTART_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause before a failed task is made again.
const RESTART_PAUSE_MAX: Duration = Duration::from_secs(10);

/// What becomes of a task when the role stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCancel {
    /// It watches the token and ends by itself; the shutdown waits.
    Wait,
    /// It is dropped at its next await.
    Abort,
}

/// What becomes of the role when a task fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    /// A log line, and the role lives on.
    Log,
    /// The task is made again; only for [`TaskRegistry::spawn_restarting`].
    Restart,
    /// The role cannot live without it.
    Exit,
}

/// A kind of task: declared once, as a constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaskKind {
    /// Name in log lines.
    pub name: &'static str,
    /// What a cancellation means.
    pub on_cancel: OnCancel,
    /// What a failure means.
    pub on_error: OnError,
}

impl TaskKind {
    /// Returns a kind of task.
    pub const fn new(name: &'static str, on_cancel: OnCancel, on_error: OnError) -> Self {
        Self { name, on_cancel, on_error }
    }
}

/// A task that the role cannot live without has failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("task `{task}` failed: {message}")]
pub struct TaskFailure {
    /// Its kind's name.
    pub task: &'static str,
    /// What it said.
    pub message: String,
}

/// Tasks that did not end within the grace of a shutdown; they were dropped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tasks still ran after {grace:?}: {}", .tasks.join(", "))]
pub struct ShutdownError {
    /// Their kinds' names.
    pub tasks: Vec<&'static str>,
    /// How long was waited.
    pub grace: Duration,
}

/// A cheap handle to the registry of a role.
#[derive(Clone)]
pub struct TaskRegistry {
    inner: Arc<Inner>,
}

struct Inner {
    token: CancellationToken,
    tracker: TaskTracker,
    running: Mutex<BTreeMap<u64, (TaskKind, AbortHandle)>>,
    next: AtomicU64,
    failure: watch::Sender<Option<TaskFailure>>,
}

impl Default for TaskRegistry {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for TaskRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaskRegistry").field("running", &self.running()).finish_non_exhaustive()
    }
}

/// Removes the entry of a task that has ended, however it ended.
struct EntryGuard {
    inner: Arc<Inner>,
    id: u64,
}

impl Drop for EntryGuard {
    fn drop(&mut self) {
        self.inner.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// A spawned task; dropping the handle lets it run on.
#[derive(Debug, Clone)]
pub struct TaskHandle {
    abort: AbortHandle,
}

impl TaskHandle {
    /// Drops the task at its next await. Does nothing to one that has ended.
    pub fn abort(&self) {
        self.abort.abort();
    }

    /// Returns whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.abort.is_finished()
    }

    /// Returns a guard that drops the task when it is dropped itself.
    pub fn abort_on_drop(self) -> AbortOnDrop {
        AbortOnDrop { handle: self }
    }
}

/// Drops a task together with what it works for.
#[derive(Debug)]
pub struct AbortOnDrop {
    handle: TaskHandle,
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

impl TaskRegistry {
    /// Returns an empty registry with a token of its own.
    pub fn new() -> Self {
        Self::with_token(CancellationToken::new())
    }

    /// Returns an empty registry whose tasks are cancelled with `token`.
    pub fn with_token(token: CancellationToken) -> Self {
        let (failure, _) = watch::channel(None);
        Self {
            inner: Arc::new(Inner {
                token,
                tracker: TaskTracker::new(),
                running: Mutex::new(BTreeMap::new()),
                next: AtomicU64::new(0),
                failure,
            }),
        }
    }

    /// Returns the token that is cancelled when the role stops.
    pub fn token(&self) -> CancellationToken {
        self.inner.token.clone()
    }

    /// Returns the names of the tasks that run now, each as often as it runs.
    pub fn running(&self) -> Vec<&'static str> {
        let running = self.inner.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.values().map(|(kind, _)| kind.name).collect()
    }

    /// Runs `task` until it ends. A task spawned after the token was cancelled starts all the same, since ending
    /// can need tasks; a shutdown waits for it or drops it like the others.
    pub fn spawn<F, E>(&self, kind: TaskKind, task: F) -> TaskHandle
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        let inner = Arc::clone(&self.inner);
        self.register(kind, async move {
            if let Err(message) = outcome(task).await {
                inner.report(kind, message);
            }
        })
    }

    /// Runs what `make` returns, and again whenever that fails, until the token is cancelled or it ends well.
    pub fn spawn_restarting<M, F, E>(&self, kind: TaskKind, mut make: M) -> TaskHandle
    where
        M: FnMut() -> F + Send + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: fmt::Display + Send + 'static,
    {
        let inner = Arc::clone(&self.inner);
        self.register(kind, async move {
            let mut pause = RESTART_PAUSE;
            loop {
                let started = tokio::time::Instant::now();
                let Err(message) = outcome(make()).await else { return };
                if inner.token.is_cancelled() {
                    return;
                }
                inner.report(kind, message);
                if started.elapsed() > RESTART_PAUSE_MAX {
                    pause = RESTART_PAUSE;
                }
                tokio::select! {
                    () = inner.token.cancelled() => return,
                    () = tokio::time::sleep(pause) => {}
                }
                pause = (pause * 2).min(RESTART_PAUSE_MAX);
            }
        })
    }

    #[expect(clippy::disallowed_methods, reason = "this is the one place that spawns")]
    fn register(&self, kind: TaskKind, task: impl Future<Output = ()> + Send + 'static) -> TaskHandle {
        let id = self.inner.next.fetch_add(1, Ordering::Relaxed);
        let guard = EntryGuard { inner: Arc::clone(&self.inner), id };
        // The entry is made under the lock that the guard takes, so that a task that ends at once still finds it.
        let mut running = self.inner.running.lock().unwrap_or_else(PoisonError::into_inner);
        let join = tokio::spawn(self.inner.tracker.track_future(async move {
            let _guard = guard;
            task.await;
        }));
        let abort = join.abort_handle();
        running.insert(id, (kind, abort.clone()));
        TaskHandle { abort }
    }

    /// Waits until a task of an [`OnError::Exit`] kind has failed; never returns otherwise.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again: a failure is kept.
    pub async fn failed(&self) -> TaskFailure {
        let mut failure = self.inner.failure.subscribe();
        let found = failure.wait_for(Option::is_some).await.ok().and_then(|found| found.clone());
        match found {
            Some(failure) => failure,
            // The sender lives in the registry, which the caller holds.
            None => std::future::pending().await,
        }
    }

    /// Cancels the token, drops the tasks that need no ending, and waits for the others.
    ///
    /// # Errors
    ///
    /// [`ShutdownError`] names what still ran after `grace`; it was dropped.
    pub async fn shutdown(&self, grace: Duration) -> Result<(), ShutdownError> {
        self.inner.token.cancel();
        self.abort(|kind| kind.on_cancel == OnCancel::Abort);
        self.inner.tracker.close();
        if tokio::time::timeout(grace, self.inner.tracker.wait()).await.is_ok() {
            return Ok(());
        }
        let tasks = self.abort(|_| true);
        self.inner.tracker.wait().await;
        if tasks.is_empty() { Ok(()) } else { Err(ShutdownError { tasks, grace }) }
    }

    fn abort(&self, chosen: impl Fn(&TaskKind) -> bool) -> Vec<&'static str> {
        let running = self.inner.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names = Vec::new();
        for (kind, abort) in running.values() {
            if chosen(kind) {
                abort.abort();
                names.push(kind.name);
            }
        }
        names
    }
}

impl Inner {
    fn report(&self, kind: TaskKind, message: String) {
        tracing::error!(task = kind.name, error = %message, "task failed");
        if kind.on_error == OnError::Exit {
            self.failure.send_if_modified(|failure| {
                let first = failure.is_none();
                if first {
                    *failure = Some(TaskFailure { task: kind.name, message });
                }
                first
            });
        }
    }
}

/// Runs a task; a panic is an error like any other.
async fn outcome<E: fmt::Display>(task: impl Future<Output = Result<(), E>>) -> Result<(), String> {
    match AssertUnwindSafe(task).catch_unwind().await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(panic) => {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "a panic without a message".to_owned());
            Err(format!("panicked: {text}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: TaskKind = TaskKind::new("wait", OnCancel::Wait, OnError::Log);
    const ABORT: TaskKind = TaskKind::new("abort", OnCancel::Abort, OnError::Log);
    const EXIT: TaskKind = TaskKind::new("exit", OnCancel::Abort, OnError::Exit);

    #[tokio::test]
    async fn shutdown_waits_for_what_ends_by_itself_and_drops_the_rest() {
        let tasks = TaskRegistry::new();
        let (ended, mut seen) = watch::channel(false);
        let token = tasks.token();
        tasks.spawn(WAIT, async move {
            token.cancelled().await;
            ended.send_replace(true);
            Ok::<(), String>(())
        });
        tasks.spawn(ABORT, std::future::pending::<Result<(), String>>());
        assert_eq!(tasks.running().len(), 2);
        tasks.shutdown(Duration::from_secs(10)).await.expect("all ended");
        assert!(*seen.borrow_and_update());
        assert!(tasks.running().is_empty());
    }

    #[tokio::test]
    async fn a_task_that_ignores_the_token_is_named_and_dropped() {
        let tasks = TaskRegistry::new();
        tasks.spawn(WAIT, std::future::pending::<Result<(), String>>());
        let error = tasks.shutdown(Duration::from_millis(50)).await.expect_err("it never ends");
        assert_eq!(error.tasks, ["wait"]);
        assert!(tasks.running().is_empty());
    }

    #[tokio::test]
    async fn a_panic_is_a_failure_and_an_exit_kind_ends_the_role() {
        let tasks = TaskRegistry::new();
        tasks.spawn(EXIT, async {
            if true {
                panic!("broken");
            }
            Ok::<(), String>(())
        });
        let failure = tasks.failed().await;
        assert_eq!(failure.to_string(), "task `exit` failed: panicked: broken");
    }

    #[tokio::test]
    async fn a_restarting_task_is_made_again_until_it_ends_well() {
        let tasks = TaskRegistry::new();
        let (count, mut seen) = watch::channel(0);
        let kind = TaskKind::new("again", OnCancel::Abort, OnError::Restart);
        tasks.spawn_restarting(kind, move || {
            count.send_modify(|count| *count += 1);
            let attempt = *count.borrow();
            async move { if attempt < 3 { Err("not yet") } else { Ok(()) } }
        });
        seen.wait_for(|count| *count == 3).await.expect("made three times");
        tasks.shutdown(Duration::from_secs(1)).await.expect("ended");
    }
}
