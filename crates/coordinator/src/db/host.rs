//! The machines that run sandboxes, and what of them is promised to sessions.

use chrono::{DateTime, Utc};
use cloister_types::{ByteCount, Capability, CpuMillis, HostId};

use sqlx::PgConnection;
use sqlx::types::Json;

use super::fault::commit;
use super::session::{parse_word, prefix_range};
use super::store::{Failure, storable, to_i64};
use super::{LeaseHolder, Store, StoreError};

/// A compile-checked query for hosts with what they have promised, ended by a clause over the relation `h`. Reads
/// `sessions_holding_capacity` once per host.
macro_rules! host_query {
    ($clause:literal $(, $argument:expr)* $(,)?) => {
        sqlx::query_as!(
            HostRow,
            r#"SELECT h.id, h.name, h.version, h.wire_version, h.boot_id,
                      h.capabilities AS "capabilities!: Json<Vec<Capability>>",
                      h.memory_bytes, h.cpu_millis, h.disk_bytes, h.connected, h.cordoned, h.link_epoch,
                      h.last_heartbeat_at, h.generation, h.link_holder, a.memory AS "allocated_memory!", a.cpus AS "allocated_cpus!",
                      a.disk AS "allocated_disk!", a.sandboxes AS "sandboxes!",
                      EXISTS (SELECT 1 FROM sessions q WHERE q.state = 'queued') AS "queue!"
               FROM hosts h CROSS JOIN LATERAL (
                   SELECT coalesce(sum(s.memory_bytes), 0)::bigint AS memory,
                          coalesce(sum(s.cpu_millis), 0)::bigint AS cpus,
                          coalesce(sum(s.disk_bytes), 0)::bigint AS disk, count(*) AS sandboxes
                   FROM sessions s WHERE s.host_id = h.id
                     AND s.state IN ('starting', 'active', 'pausing', 'resuming', 'host_lost')) a "#
                + $clause
            $(, $argument)*
        )
    };
}

/// An amount of what a host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostCapacity {
    /// Memory.
    pub memory: ByteCount,
    /// CPU.
    pub cpus: CpuMillis,
    /// Disk for writable layers.
    pub disk: ByteCount,
}

/// What a host says of itself when it connects.
#[derive(Debug, Clone)]
pub struct HostRegistration {
    /// Made by the host at its first start.
    pub id: HostId,
    /// Its name.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// The link protocol's version.
    pub wire_version: u32,
    /// Changes with each boot of the machine.
    pub boot_id: String,
    /// What it can do.
    pub capabilities: Vec<Capability>,
    /// What it has.
    pub capacity: HostCapacity,
}

/// The answer to [`Store::register_host`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegisteredHost {
    /// Number of this link: a later registration of the same host has a higher one and silences this one.
    pub link_epoch: u64,
    /// The machine was started again since the last registration.
    pub rebooted: bool,
}

/// One host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRecord {
    /// Its id.
    pub id: HostId,
    /// Its name.
    pub name: String,
    /// The program's version.
    pub version: String,
    /// The link protocol's version.
    pub wire_version: u32,
    /// Of its machine's current boot.
    pub boot_id: String,
    /// What it can do.
    pub capabilities: Vec<Capability>,
    /// What it has.
    pub capacity: HostCapacity,
    /// What of it is promised to sessions.
    pub allocated: HostCapacity,
    /// How many sessions count against it.
    pub sandboxes: u32,
    /// Whether it answers. In a list for people: a coordinator that lives holds its link. Where sessions are placed: it
    /// has not missed its heartbeats, so that a restarted coordinator does not refuse what the host will do in a moment.
    pub connected: bool,
    /// The coordinator that holds its link.
    pub link_holder: Option<LeaseHolder>,
    /// Whether new sandboxes are kept off it.
    pub cordoned: bool,
    /// Number of its current link.
    pub link_epoch: u64,
    /// When it was last heard.
    pub last_heartbeat_at: DateTime<Utc>,
    /// Grows with each change but heartbeats.
    pub generation: u64,
}

impl Store {
    /// Enters a host, or brings it up to date, and marks it connected.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn register_host(&self, host: &HostRegistration) -> Result<RegisteredHost, StoreError> {
        self.observe("register_host", async {
            let mut tx = self.pool.begin().await?;
            // Reads `hosts_pkey`.
            let earlier = sqlx::query_scalar!("SELECT boot_id FROM hosts WHERE id = $1 FOR UPDATE", host.id.as_str())
                .fetch_optional(&mut *tx)
                .await?;
            let link_epoch = sqlx::query_scalar!(
                r#"INSERT INTO hosts (id, name, version, wire_version, boot_id, capabilities, memory_bytes, cpu_millis,
                       disk_bytes, connected, link_holder)
                   VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, true, $10)
                   ON CONFLICT (id) DO UPDATE SET name = excluded.name, version = excluded.version,
                       wire_version = excluded.wire_version, boot_id = excluded.boot_id,
                       capabilities = excluded.capabilities, memory_bytes = excluded.memory_bytes,
                       cpu_millis = excluded.cpu_millis, disk_bytes = excluded.disk_bytes, connected = true,
                       link_holder = excluded.link_holder, link_epoch = hosts.link_epoch + 1, last_heartbeat_at = cloister_now(),
                       generation = hosts.generation + 1
                   RETURNING link_epoch"#,
                host.id.as_str(),
                storable(&host.name),
                storable(&host.version),
                i32::try_from(host.wire_version).unwrap_or(i32::MAX),
                storable(&host.boot_id),
                Json(storable_capabilities(&host.capabilities)) as _,
                to_i64(host.capacity.memory.0),
                i64::from(host.capacity.cpus.0),
                to_i64(host.capacity.disk.0),
                self.holder.0,
            )
            .fetch_one(&mut *tx)
            .await?;
            notify(&mut tx, host.id.as_str()).await?;
            commit(tx, "register_host").await?;
            let rebooted = earlier.is_some_and(|boot_id| boot_id != storable(&host.boot_id));
            Ok(RegisteredHost { link_epoch: link_epoch.unsigned_abs(), rebooted })
        })
        .await
    }

    /// Begins the last report of a host that is shut down; returns the number that makes it current. Later heartbeats of
    /// an earlier link are refused. Finish with [`Store::end_host_stop`].
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`] for a host that never registered, [`StoreError::Unavailable`].
    pub async fn begin_host_stop(&self, id: &HostId) -> Result<u64, StoreError> {
        self.observe("begin_host_stop", async {
            // Reads `hosts_pkey`. Connected, so that the report counts also when heartbeats were missed by now.
            let link_epoch = sqlx::query_scalar!(
                "UPDATE hosts SET link_epoch = link_epoch + 1, connected = true, link_holder = NULL,
                     last_heartbeat_at = cloister_now(), generation = generation + 1
                 WHERE id = $1 RETURNING link_epoch",
                id.as_str(),
            )
            .fetch_optional(&self.pool)
            .await?;
            let link_epoch = link_epoch.ok_or_else(|| StoreError::not_found("host", id.as_str()))?;
            Ok(link_epoch.unsigned_abs())
        })
        .await
    }

    /// Takes a host that was shut down for not connected, at once: nothing is placed on it until it registers.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn end_host_stop(&self, id: &HostId, link_epoch: u64) -> Result<(), StoreError> {
        self.observe("end_host_stop", async {
            // Reads `hosts_pkey`.
            sqlx::query!(
                "WITH h AS (
                     UPDATE hosts SET connected = false, generation = generation + 1
                     WHERE id = $1 AND link_epoch = $2 RETURNING id)
                 SELECT pg_notify('cloister_changes', id) FROM h",
                id.as_str(),
                to_i64(link_epoch),
            )
            .fetch_optional(&self.pool)
            .await?;
            Ok(())
        })
        .await
    }

    /// Notes that this coordinator no longer holds a link. The host is not lost yet: it has its heartbeats' time to come
    /// back.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn release_host_link(&self, id: &HostId, link_epoch: u64) -> Result<(), StoreError> {
        self.observe("release_host_link", async {
            // Reads `hosts_pkey`. A later link of the host is left alone.
            sqlx::query!(
                "UPDATE hosts SET link_holder = NULL, generation = generation + 1 WHERE id = $1 AND link_epoch = $2",
                id.as_str(),
                to_i64(link_epoch),
            )
            .execute(&self.pool)
            .await?;
            Ok(())
        })
        .await
    }

    /// Notes that a host was heard, with its capabilities when they changed. Not a synchronous commit.
    ///
    /// # Errors
    ///
    /// [`StoreError::Conflict`] when the host was declared lost or registered again: end this link, so that it
    /// registers anew. [`StoreError::Unavailable`].
    pub async fn heartbeat_host(
        &self,
        id: &HostId,
        link_epoch: u64,
        capabilities: Option<&[Capability]>,
    ) -> Result<(), StoreError> {
        self.observe("heartbeat_host", async {
            // Reads `hosts_pkey`. What a crash loses of this the next heartbeat brings: no wait for the disk.
            let heard = sqlx::query!(
                r#"WITH setting AS (SELECT set_config('synchronous_commit', 'off', true) AS value),
                   h AS (
                       UPDATE hosts SET last_heartbeat_at = cloister_now(),
                           capabilities = coalesce($3, capabilities),
                           generation = generation + ($3::jsonb IS NOT NULL)::int
                       FROM setting
                       WHERE id = $1 AND link_epoch = $2 AND connected AND setting.value = 'off'
                       RETURNING id)
                   SELECT id AS "id!", CASE WHEN $3::jsonb IS NOT NULL
                       THEN pg_notify('cloister_changes', id) END FROM h"#,
                id.as_str(),
                to_i64(link_epoch),
                capabilities.map(|all| Json(storable_capabilities(all))) as _,
            )
            .fetch_optional(&self.pool)
            .await?;
            heard.ok_or_else(|| StoreError::Conflict { kind: "host", id: id.to_string() })?;
            Ok(())
        })
        .await
    }

    /// Returns every host, by name.
    ///
    /// # Errors
    ///
    /// [`StoreError::Unavailable`].
    pub async fn list_hosts(&self) -> Result<Vec<HostRecord>, StoreError> {
        self.observe("list_hosts", async {
            let mut connection = self.pool.acquire().await?;
            let mut hosts = read_all(&mut connection).await?.0;
            show_connected(&mut connection, &mut hosts).await?;
            Ok(hosts)
        })
        .await
    }

    /// Returns the host that `reference` means: id, unique prefix of one, or name.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Ambiguous`], [`StoreError::Unavailable`].
    pub async fn resolve_host(&self, reference: &str) -> Result<HostRecord, StoreError> {
        self.observe("resolve_host", async {
            if reference.contains('\0') {
                return Err(StoreError::not_found("host", reference).into());
            }
            let (from, to) = prefix_range(HostId::PREFIX, reference).unwrap_or_default();
            // Few hosts, so that one look finds all three forms; an exact match goes first. Reads `hosts_pkey`.
            let mut rows = host_query!(
                "WHERE h.id = $1 OR h.name = $1 OR (h.id >= $2 AND h.id < $3)
                 ORDER BY (h.id = $1) DESC, (h.name = $1) DESC, h.id LIMIT 5",
                reference,
                from,
                to,
            )
            .fetch_all(&self.pool)
            .await?;
            let exact = rows.iter().filter(|row| row.id == reference || row.name == reference).count();
            if exact == 1 {
                rows.truncate(1);
            }
            if rows.len() > 1 {
                let candidates = rows.into_iter().map(|row| row.id).collect();
                let reference = reference.chars().take(64).collect();
                return Err(StoreError::Ambiguous { kind: "host", reference, candidates }.into());
            }
            let mut found = rows.into_iter().map(HostRecord::try_from).collect::<Result<Vec<_>, _>>()?;
            show_connected(&mut *self.pool.acquire().await?, &mut found).await?;
            Ok(found.pop().ok_or_else(|| StoreError::not_found("host", reference))?)
        })
        .await
    }

    /// Keeps new sandboxes off a host, or lets them on again.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotFound`], [`StoreError::Unavailable`].
    pub async fn cordon_host(&self, id: &HostId, cordoned: bool) -> Result<(), StoreError> {
        self.observe("cordon_host", async {
            let mut tx = self.pool.begin().await?;
            // Reads `hosts_pkey`.
            let changed = sqlx::query!(
                "UPDATE hosts SET cordoned = $2, generation = generation + 1 WHERE id = $1",
                id.as_str(),
                cordoned,
            )
            .execute(&mut *tx)
            .await?;
            if changed.rows_affected() == 0 {
                return Err(StoreError::not_found("host", id.as_str()).into());
            }
            notify(&mut tx, id.as_str()).await?;
            commit(tx, "cordon_host").await?;
            Ok(())
        })
        .await
    }
}

/// Most capabilities of one host that are kept.
const CAPABILITIES_MAX: usize = 256;

fn storable_capabilities(capabilities: &[Capability]) -> Vec<Capability> {
    let kept = capabilities.iter().take(CAPABILITIES_MAX).map(|capability| Capability {
        name: storable(&capability.name),
        status: capability.status,
        detail: storable(&capability.detail),
        remedy: storable(&capability.remedy),
    });
    kept.collect()
}

struct HostRow {
    id: String,
    name: String,
    version: String,
    wire_version: i32,
    boot_id: String,
    capabilities: Json<Vec<Capability>>,
    memory_bytes: i64,
    cpu_millis: i64,
    disk_bytes: i64,
    connected: bool,
    cordoned: bool,
    link_epoch: i64,
    last_heartbeat_at: DateTime<Utc>,
    generation: i64,
    link_holder: Option<String>,
    allocated_memory: i64,
    allocated_cpus: i64,
    allocated_disk: i64,
    sandboxes: i64,
    /// Whether any session is queued: the same in every row, read here to save a round trip.
    queue: bool,
}

impl TryFrom<HostRow> for HostRecord {
    type Error = StoreError;

    fn try_from(row: HostRow) -> Result<Self, StoreError> {
        let capacity = |memory: i64, cpus: i64, disk: i64| HostCapacity {
            memory: ByteCount(memory.unsigned_abs()),
            cpus: CpuMillis(u32::try_from(cpus).unwrap_or(u32::MAX)),
            disk: ByteCount(disk.unsigned_abs()),
        };
        Ok(Self {
            id: parse_word("hosts", &row.id, "id", &row.id)?,
            name: row.name,
            version: row.version,
            wire_version: row.wire_version.unsigned_abs(),
            boot_id: row.boot_id,
            capabilities: row.capabilities.0,
            capacity: capacity(row.memory_bytes, row.cpu_millis, row.disk_bytes),
            allocated: capacity(row.allocated_memory, row.allocated_cpus, row.allocated_disk),
            sandboxes: u32::try_from(row.sandboxes).unwrap_or(u32::MAX),
            connected: row.connected,
            cordoned: row.cordoned,
            link_epoch: row.link_epoch.unsigned_abs(),
            last_heartbeat_at: row.last_heartbeat_at,
            generation: row.generation.unsigned_abs(),
            link_holder: row.link_holder.map(LeaseHolder),
        })
    }
}

/// Returns every host, and whether any session is queued. Under the locks of [`lock_connected`] the sums cannot change.
pub(super) async fn read_all(connection: &mut PgConnection) -> Result<(Vec<HostRecord>, bool), Failure> {
    let rows = host_query!("ORDER BY h.name, h.id").fetch_all(connection).await?;
    let queue = rows.iter().any(|row| row.queue);
    Ok((rows.into_iter().map(HostRecord::try_from).collect::<Result<Vec<_>, _>>()?, queue))
}

/// Leaves only those hosts connected whose link a living coordinator holds. A coordinator lives as long as it has a
/// connection to the database: all of its own carry its name, and the server ends them with the process, so that a
/// killed coordinator's hosts are not shown as connected until their heartbeats are missed. The server shows the names
/// to sessions of the same role, which all coordinators of one database share.
async fn show_connected(connection: &mut PgConnection, hosts: &mut [HostRecord]) -> Result<(), Failure> {
    let alive: Vec<String> = sqlx::query_scalar!(
        r#"SELECT DISTINCT application_name AS "name!" FROM pg_stat_activity
           WHERE datname = current_database() AND application_name <> ''"#,
    )
    .fetch_all(connection)
    .await?;
    for host in hosts {
        let is_held = host.link_holder.as_ref().is_some_and(|holder| alive.contains(&holder.0));
        host.connected = host.connected && is_held;
    }
    Ok(())
}

/// Locks the connected hosts: admission decides one at a time. The sums must be read by a *later* statement, since one
/// that waited here still sees what was there before. The lock leaves foreign keys to hosts alone.
pub(super) async fn lock_connected(connection: &mut PgConnection) -> Result<(), Failure> {
    sqlx::query!("SELECT id FROM hosts WHERE connected ORDER BY id FOR NO KEY UPDATE")
        .fetch_all(connection)
        .await?;
    Ok(())
}

/// Tells subscribers that something with this id changed, when the transaction commits.
pub(super) async fn notify(connection: &mut PgConnection, id: &str) -> Result<(), Failure> {
    sqlx::query!("SELECT pg_notify('cloister_changes', $1)", id).execute(connection).await?;
    Ok(())
}
