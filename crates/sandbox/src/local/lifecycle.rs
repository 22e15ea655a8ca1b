//! Finding again what an earlier process left, and removing sessions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cloister_guest::client::ClientError;
use cloister_types::{SandboxId, SessionId};

use super::reap;
use super::sandbox::LocalSandbox;
use super::{LocalBackend, blocking, chain};
use crate::backend::{Gone, Sandbox, SandboxError};
use crate::fault::POINTS;
use crate::intent::{INTENT_FILE, Intent, read_record};
use crate::{disk, layout};

/// How long a shim that holds its lock may take to serve: it may be building its sandbox.
const SERVE_DEADLINE: Duration = Duration::from_secs(5);

/// What an intent on disk turned out to be.
enum Found {
    Running(Arc<LocalSandbox>),
    Ended(Gone),
    /// Never was, or cannot be understood.
    Nothing,
}

impl LocalBackend {
    pub(super) async fn adopt_all(&self) -> Result<(Vec<Arc<LocalSandbox>>, Vec<Gone>), SandboxError> {
        self.discard_left_warm().await?;
        let inner = Arc::clone(&self.inner);
        blocking("sweep", move || {
            reap::sweep(inner.paths(), |id| inner.plan_groups(id))
                .map_err(|error| SandboxError::failed("finish earlier removals", error))
        })
        .await?;
        let mut running = Vec::new();
        let mut gone = Vec::new();
        for sandbox_id in self.sandboxes_on_disk().await? {
            let Some(intent) = self.read_intent(&sandbox_id).await? else { continue };
            // A create or remove of this session may be under way here: what it leaves is looked at afterwards.
            let lock = self.inner.session_lock(&intent.session_id);
            let guard = lock.lock().await;
            let found = self.settle(&sandbox_id).await?;
            drop(guard);
            match found {
                Found::Running(sandbox) => {
                    running.push(sandbox);
                    POINTS.reach("sandbox_during_adoption");
                }
                Found::Ended(end) => gone.push(end),
                Found::Nothing => {}
            }
        }
        Ok((running, gone))
    }

    /// Finds a session's sandbox that an earlier process left and nobody adopted. The caller holds the session's lock.
    pub(super) async fn find_unadopted(
        &self,
        session_id: &SessionId,
    ) -> Result<Option<Arc<LocalSandbox>>, SandboxError> {
        let mut running = None;
        for sandbox_id in self.sandboxes_on_disk().await? {
            let intent = self.read_intent(&sandbox_id).await?;
            if intent.is_some_and(|intent| intent.session_id == *session_id)
                && let Found::Running(sandbox) = self.settle(&sandbox_id).await?
            {
                running = Some(sandbox);
            }
        }
        Ok(running)
    }

    /// Adopts the sandbox of an intent, or takes down what is left of it.
    async fn settle(&self, sandbox_id: &SandboxId) -> Result<Found, SandboxError> {
        // Read again under the lock: it may have been removed meanwhile.
        let Some(intent) = self.read_intent(sandbox_id).await? else { return Ok(Found::Nothing) };
        if let Some(known) = self.inner.sandbox_of(&intent.session_id)
            && known.spec().sandbox_id == *sandbox_id
        {
            return if known.is_alive() {
                Ok(Found::Running(known))
            } else {
                known.release().await.map(Found::Ended)
            };
        }
        let sandbox = Arc::new(LocalSandbox::new(Arc::clone(&self.inner), intent.clone()));
        if intent.boot_id == self.inner.boot_id && self.serves(&sandbox).await {
            // The limits come last in a create, which a crash may have cut.
            self.limit(&intent).await?;
            self.inner.keep(&sandbox);
            return Ok(Found::Running(sandbox));
        }
        let inner = Arc::clone(&self.inner);
        let gone =
            blocking("reap sandbox", move || reap::reap(inner.paths(), &intent, &inner.boot_id, false, None))
                .await?;
        Ok(Found::Ended(gone))
    }

    /// Returns whether a sandbox's shim lives and answers; one that is still building is waited for.
    async fn serves(&self, sandbox: &LocalSandbox) -> bool {
        let deadline = Instant::now() + SERVE_DEADLINE;
        while sandbox.is_alive() {
            match sandbox.answers().await {
                Ok(()) => return true,
                // It was warm, and a crash came before it was told whose it is.
                Err(ClientError::NotFound(_)) => return false,
                Err(error) if Instant::now() >= deadline => {
                    tracing::warn!(sandbox_id = %sandbox.spec().sandbox_id, error = %chain(&error), "a shim lives and does not answer");
                    return false;
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
        false
    }

    pub(super) async fn remove_session(&self, session_id: &SessionId) -> Result<(), SandboxError> {
        let lock = self.inner.session_lock(session_id);
        let _guard = lock.lock().await;
        let directory = self.inner.paths().session_dir(session_id);
        let running = match self.inner.sandbox_of(session_id) {
            Some(sandbox) => Some(sandbox),
            None if directory.exists() => self.find_unadopted(session_id).await?,
            None => None,
        };
        if let Some(sandbox) = running {
            sandbox.stop(Duration::ZERO).await?;
        }
        blocking("remove session", move || {
            let image = directory.join(disk::LAYER_IMAGE);
            disk::wait_detached(&image, Instant::now() + SERVE_DEADLINE)
                .map_err(|error| SandboxError::failed("detach the layer", error))?;
            layout::remove_dir(&directory)
                .map_err(|error| SandboxError::failed("remove the session's directory", error))?;
            POINTS.reach("sandbox_after_session_removed");
            Ok(())
        })
        .await
    }

    pub(super) async fn require_session(&self, session_id: &SessionId) -> Result<(), SandboxError> {
        if self.inner.paths().session_dir(session_id).is_dir() {
            Ok(())
        } else {
            Err(SandboxError::NotFound(format!("session `{session_id}`")))
        }
    }

    async fn sandboxes_on_disk(&self) -> Result<Vec<SandboxId>, SandboxError> {
        let directory = self.inner.paths().sandboxes_dir();
        blocking("list sandboxes", move || {
            layout::ids_in(&directory).map_err(|error| SandboxError::failed("list sandboxes", error))
        })
        .await
    }

    /// Reads an intent; one that cannot be understood, for example of a later version, is left alone.
    async fn read_intent(&self, sandbox_id: &SandboxId) -> Result<Option<Intent>, SandboxError> {
        let directory = self.inner.paths().sandbox_dir(sandbox_id);
        let sandbox_id = sandbox_id.clone();
        blocking("read intent", move || match read_record::<Intent>(&directory.join(INTENT_FILE)) {
            Ok(Some(intent)) if intent.sandbox_id == sandbox_id => Ok(Some(intent)),
            Ok(Some(_)) => {
                tracing::error!(%sandbox_id, "an intent names another sandbox; it is left alone");
                Ok(None)
            }
            Ok(None) => Ok(None),
            Err(error) => {
                tracing::error!(%sandbox_id, error = %chain(&error), "an intent cannot be read; it is left alone");
                Ok(None)
            }
        })
        .await
    }
}
