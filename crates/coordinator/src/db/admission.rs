//! Which host gets a session: a pure rule over a snapshot of hosts and queue.
//!
//! The caller holds the connected hosts' rows, so that no two decisions share a snapshot; the session row that it
//! writes in the same transaction is the reservation. Among the hosts with room the fullest is taken (best fit), so
//! that large sessions find an empty one later.
//!
//! First in, first out holds per host: a session is not placed on a host that an earlier queued session could use.
//! One that is too large for every host waits for a *host* and not for room, and holds nobody up.

use std::fmt;

use cloister_types::session::Reason;
use cloister_types::{BackendKind, ByteCount, Capability, CpuMillis, HostId, Isolation, Limits};

use super::HostCapacity;

/// How much of a host's capacity may be promised to sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionPolicy {
    /// Promised memory as a percentage of the host's. A limit is a promise: 100 never lets the kernel choose a victim.
    pub memory_percent: u32,
    /// Promised CPU as a percentage of the host's, which says itself how many times over its CPUs may be promised.
    pub cpu_percent: u32,
    /// Promised disk as a percentage of the host's.
    pub disk_percent: u32,
}

impl Default for AdmissionPolicy {
    fn default() -> Self {
        Self { memory_percent: 100, cpu_percent: 100, disk_percent: 100 }
    }
}

impl AdmissionPolicy {
    /// Returns what of a host may be promised.
    pub(super) fn promisable(self, capacity: HostCapacity) -> HostCapacity {
        let bytes = |value: ByteCount, percent: u32| {
            let scaled = u128::from(value.0) * u128::from(percent) / 100;
            ByteCount(u64::try_from(scaled).unwrap_or(u64::MAX))
        };
        let cpus = u64::from(capacity.cpus.0) * u64::from(self.cpu_percent) / 100;
        HostCapacity {
            memory: bytes(capacity.memory, self.memory_percent),
            cpus: CpuMillis(u32::try_from(cpus).unwrap_or(u32::MAX)),
            disk: bytes(capacity.disk, self.disk_percent),
        }
    }
}

/// Why a session was not placed, with the hosts counted by what excludes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Refusal {
    /// Hosts that are not connected.
    pub disconnected: u32,
    /// Connected hosts that take no new sandboxes.
    pub cordoned: u32,
    /// Hosts without a backend that is strong enough, or without the one that was asked for.
    pub wrong_backend: u32,
    /// Hosts that are too small even when empty.
    pub too_small: u32,
    /// Hosts whose memory is promised to others.
    pub out_of_memory: u32,
    /// Hosts whose CPU is promised to others.
    pub out_of_cpu: u32,
    /// Hosts whose disk is promised to others.
    pub out_of_disk: u32,
    /// Hosts with room that earlier queued sessions wait for.
    pub behind_queue: u32,
}

impl Refusal {
    /// Returns `no_capacity` when room on a host would be enough, else `no_host`.
    pub fn reason(&self) -> Reason {
        if self.out_of_memory + self.out_of_cpu + self.out_of_disk + self.behind_queue > 0 {
            Reason::NoCapacity
        } else {
            Reason::NoHost
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [
            (self.out_of_memory, "out of memory"),
            (self.out_of_cpu, "out of CPU"),
            (self.out_of_disk, "out of disk"),
            (self.behind_queue, "wanted by earlier sessions"),
            (self.too_small, "too small"),
            (self.wrong_backend, "without a fitting backend"),
            (self.cordoned, "cordoned"),
            (self.disconnected, "not connected"),
        ];
        let mut first = true;
        for (count, what) in counts.into_iter().filter(|(count, _)| *count > 0) {
            let noun = if !first {
                ""
            } else if count == 1 {
                " host"
            } else {
                " hosts"
            };
            write!(f, "{}{count}{noun} {what}", if first { "" } else { ", " })?;
            first = false;
        }
        if first { f.write_str("no host is registered: start one with `cloister host`") } else { Ok(()) }
    }
}

/// What a session needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Demand {
    pub(super) backend: Option<BackendKind>,
    pub(super) floor: Isolation,
    pub(super) limits: Limits,
}

/// A host as the rule sees it.
#[derive(Debug, Clone)]
pub(super) struct HostView {
    pub(super) id: HostId,
    pub(super) connected: bool,
    pub(super) cordoned: bool,
    pub(super) backends: Vec<BackendKind>,
    /// What may be promised.
    pub(super) promisable: HostCapacity,
    /// What is promised.
    pub(super) allocated: HostCapacity,
}

/// Returns the backends whose probe passed, by the capabilities named `backend.<kind>`.
pub(super) fn backends_of(capabilities: &[Capability]) -> Vec<BackendKind> {
    let passed = capabilities.iter().filter(|capability| capability.is_ok());
    passed.filter_map(|capability| capability.name.strip_prefix("backend.")?.parse().ok()).collect()
}

/// What excludes a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exclusion {
    Disconnected,
    Cordoned,
    WrongBackend,
    TooSmall,
    OutOfMemory,
    OutOfCpu,
    OutOfDisk,
}

impl HostView {
    /// Returns the backend that the demand would get here. `auto` takes the strongest, and never one without any
    /// isolation: that one is for whoever names it.
    fn backend_for(&self, demand: &Demand) -> Option<BackendKind> {
        let fitting = self.backends.iter().copied().filter(|kind| kind.isolation().satisfies(demand.floor));
        match demand.backend {
            Some(wanted) => fitting.into_iter().find(|kind| *kind == wanted),
            None => {
                fitting.filter(|kind| kind.isolation() > Isolation::None).max_by_key(|kind| kind.isolation())
            }
        }
    }

    /// Returns whether the host could run it, were it empty: then the demand waits for this host.
    fn is_waited_for_by(&self, demand: &Demand) -> bool {
        self.connected
            && !self.cordoned
            && self.backend_for(demand).is_some()
            && first_lack(&HostCapacity::default(), &demand.limits, &self.promisable).is_none()
    }

    /// Returns the backend to use, or what excludes the host.
    pub(super) fn fits(&self, demand: &Demand) -> Result<BackendKind, Exclusion> {
        if !self.connected {
            return Err(Exclusion::Disconnected);
        }
        if self.cordoned {
            return Err(Exclusion::Cordoned);
        }
        let backend = self.backend_for(demand).ok_or(Exclusion::WrongBackend)?;
        if first_lack(&HostCapacity::default(), &demand.limits, &self.promisable).is_some() {
            return Err(Exclusion::TooSmall);
        }
        match first_lack(&self.allocated, &demand.limits, &self.promisable) {
            Some(lack) => Err(lack),
            None => Ok(backend),
        }
    }

    /// Notes a placement, for further decisions in the same transaction.
    pub(super) fn allocate(&mut self, limits: &Limits) {
        self.allocated = sum(&self.allocated, limits);
    }
}

fn sum(allocated: &HostCapacity, limits: &Limits) -> HostCapacity {
    HostCapacity {
        memory: ByteCount(allocated.memory.0.saturating_add(limits.memory.0)),
        cpus: CpuMillis(allocated.cpus.0.saturating_add(limits.cpus.0)),
        disk: ByteCount(allocated.disk.0.saturating_add(limits.disk.0)),
    }
}

fn first_lack(allocated: &HostCapacity, limits: &Limits, promisable: &HostCapacity) -> Option<Exclusion> {
    let after = sum(allocated, limits);
    if after.memory > promisable.memory {
        Some(Exclusion::OutOfMemory)
    } else if after.cpus > promisable.cpus {
        Some(Exclusion::OutOfCpu)
    } else if after.disk > promisable.disk {
        Some(Exclusion::OutOfDisk)
    } else {
        None
    }
}

/// What becomes of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    /// It goes to this host (index into the snapshot) with this backend.
    Place { host: usize, backend: BackendKind },
    /// It waits.
    Queue(Refusal),
}

/// Decides for one session. `waiting` are the demands of the sessions queued before it.
pub(super) fn decide(demand: &Demand, hosts: &[HostView], waiting: &[Demand]) -> Decision {
    let mut refusal = Refusal::default();
    let mut best: Option<(usize, BackendKind)> = None;
    for (index, host) in hosts.iter().enumerate() {
        let backend = match host.fits(demand) {
            Ok(backend) => backend,
            Err(exclusion) => {
                *match exclusion {
                    Exclusion::Disconnected => &mut refusal.disconnected,
                    Exclusion::Cordoned => &mut refusal.cordoned,
                    Exclusion::WrongBackend => &mut refusal.wrong_backend,
                    Exclusion::TooSmall => &mut refusal.too_small,
                    Exclusion::OutOfMemory => &mut refusal.out_of_memory,
                    Exclusion::OutOfCpu => &mut refusal.out_of_cpu,
                    Exclusion::OutOfDisk => &mut refusal.out_of_disk,
                } += 1;
                continue;
            }
        };
        if waiting.iter().any(|earlier| host.is_waited_for_by(earlier)) {
            refusal.behind_queue += 1;
            continue;
        }
        let free = |host: &HostView| host.promisable.memory.0.saturating_sub(host.allocated.memory.0);
        // Stronger isolation first, then the least free memory, then the order of the snapshot.
        let better = best.is_none_or(|(chosen, kind)| {
            (backend.isolation(), std::cmp::Reverse(free(host)))
                > (kind.isolation(), std::cmp::Reverse(free(&hosts[chosen])))
        });
        if better {
            best = Some((index, backend));
        }
    }
    match best {
        Some((host, backend)) => Decision::Place { host, backend },
        None => Decision::Queue(refusal),
    }
}

/// What no connected host has enough of, with the most that one has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TooLarge {
    pub(super) resource: &'static str,
    pub(super) asked: String,
    pub(super) most: String,
}

/// Returns what a demand has too much of for every connected host that could run it, were that empty: then waiting would
/// not help, and the request is refused.
pub(super) fn too_large(demand: &Demand, hosts: &[HostView]) -> Option<TooLarge> {
    let able: Vec<&HostView> =
        hosts.iter().filter(|host| host.connected && host.backend_for(demand).is_some()).collect();
    let holds =
        |host: &&HostView| first_lack(&HostCapacity::default(), &demand.limits, &host.promisable).is_none();
    if able.is_empty() || able.iter().any(holds) {
        return None;
    }
    let most = |of: fn(&HostCapacity) -> u64| able.iter().map(|host| of(&host.promisable)).max().unwrap_or(0);
    let limits = &demand.limits;
    let (memory, cpus, disk) =
        (most(|host| host.memory.0), most(|host| u64::from(host.cpus.0)), most(|host| host.disk.0));
    let too_large = |resource, asked: String, most: String| Some(TooLarge { resource, asked, most });
    let bytes = |resource, asked: ByteCount, most: u64| match (asked.to_string(), ByteCount(most).to_string())
    {
        // What rounds to the same is told apart to the byte.
        (shown, same) if shown == same => {
            too_large(resource, format!("{} bytes", asked.0), format!("{most} bytes"))
        }
        (asked, most) => too_large(resource, asked, most),
    };
    if limits.disk.0 > disk && limits.memory.0 <= memory {
        bytes("disk", limits.disk, disk)
    } else if u64::from(limits.cpus.0) > cpus && limits.memory.0 <= memory {
        let most = CpuMillis(u32::try_from(cpus).unwrap_or(u32::MAX));
        too_large("CPU", limits.cpus.to_string(), most.to_string())
    } else {
        // Also where one host has the memory and another one the rest.
        bytes("memory", limits.memory, memory)
    }
}

/// Returns the backends that connected hosts offer, when there are such hosts and none is strong enough (with the
/// backend that was asked for): then waiting would not help, and the request is refused.
pub(super) fn not_offered(demand: &Demand, hosts: &[HostView]) -> Option<Vec<String>> {
    let connected: Vec<&HostView> = hosts.iter().filter(|host| host.connected).collect();
    if connected.is_empty() || connected.iter().any(|host| host.backend_for(demand).is_some()) {
        return None;
    }
    let mut offered: Vec<BackendKind> =
        connected.iter().flat_map(|host| host.backends.iter().copied()).collect();
    offered.sort();
    offered.dedup();
    Some(offered.into_iter().map(|kind| kind.as_str().to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(memory_mib: u64, used_mib: u64) -> HostView {
        let capacity = |mib| HostCapacity {
            memory: ByteCount::mib(mib),
            cpus: CpuMillis(64_000),
            disk: ByteCount::gib(1000),
        };
        HostView {
            id: HostId::generate(),
            connected: true,
            cordoned: false,
            backends: vec![BackendKind::Sim, BackendKind::Namespace],
            promisable: capacity(memory_mib),
            allocated: HostCapacity { memory: ByteCount::mib(used_mib), ..HostCapacity::default() },
        }
    }

    fn demand(memory_mib: u64) -> Demand {
        let limits = Limits { memory: ByteCount::mib(memory_mib), ..Limits::DEFAULT };
        Demand { backend: None, floor: Isolation::Container, limits }
    }

    #[test]
    fn the_fullest_host_with_room_is_taken() {
        let hosts = [host(1000, 0), host(1000, 400), host(1000, 900)];
        let placed = Decision::Place { host: 1, backend: BackendKind::Namespace };
        assert_eq!(decide(&demand(512), &hosts, &[]), placed);
    }

    #[test]
    fn what_no_host_can_ever_hold_is_named_with_the_most_that_one_can() {
        // The second is full, which waiting helps; the first is too small, which it does not.
        let hosts = [host(1000, 0), host(2000, 2000)];
        assert_eq!(too_large(&demand(2000), &hosts), None);
        let too_much = |resource, asked: &str, most: &str| {
            Some(TooLarge { resource, asked: asked.to_owned(), most: most.to_owned() })
        };
        assert_eq!(
            too_large(&demand(2001), &hosts),
            too_much("memory", "2098200576 bytes", "2097152000 bytes")
        );
        assert_eq!(too_large(&demand(3000), &hosts), too_much("memory", "2.9 GiB", "1.9 GiB"));
        let limits = Limits { disk: ByteCount::gib(1001), ..demand(1).limits };
        let disk = Demand { limits, ..demand(1) };
        assert_eq!(too_large(&disk, &hosts), too_much("disk", "1001 GiB", "1000 GiB"));
        let limits = Limits { cpus: CpuMillis(65_000), ..demand(1).limits };
        assert_eq!(too_large(&Demand { limits, ..demand(1) }, &hosts), too_much("CPU", "65", "64"));
        // A larger host may come back, so that it is waited for.
        let away = HostView { connected: false, ..host(1000, 0) };
        assert_eq!(too_large(&demand(2000), &[away]), None);
    }

    #[test]
    fn every_exclusion_is_counted_and_shown() {
        let hosts = [
            HostView { connected: false, ..host(1000, 0) },
            HostView { cordoned: true, ..host(1000, 0) },
            HostView { backends: vec![BackendKind::Sim], ..host(1000, 0) },
            host(100, 0),
            host(1000, 900),
            host(1000, 901),
        ];
        let Decision::Queue(refusal) = decide(&demand(512), &hosts, &[]) else { panic!("it was placed") };
        assert_eq!(refusal.reason(), Reason::NoCapacity);
        assert_eq!(
            refusal.to_string(),
            "2 hosts out of memory, 1 too small, 1 without a fitting backend, 1 cordoned, 1 not connected"
        );
    }

    #[test]
    fn nobody_overtakes_on_a_host_that_an_earlier_session_waits_for() {
        let hosts = [host(1000, 600)];
        let small = demand(100);
        assert!(matches!(decide(&small, &hosts, &[]), Decision::Place { .. }));
        let Decision::Queue(refusal) = decide(&small, &hosts, &[demand(512)]) else { panic!("it overtook") };
        assert_eq!(refusal, Refusal { behind_queue: 1, ..Refusal::default() });
        assert_eq!(refusal.reason(), Reason::NoCapacity);
    }

    #[test]
    fn a_session_too_large_for_every_host_holds_nobody_up() {
        let hosts = [host(1000, 0)];
        let Decision::Queue(refusal) = decide(&demand(2000), &hosts, &[]) else { panic!("it was placed") };
        assert_eq!(refusal.reason(), Reason::NoHost);
        assert!(matches!(decide(&demand(100), &hosts, &[demand(2000)]), Decision::Place { .. }));
    }

    #[test]
    fn auto_never_takes_the_simulated_backend_and_a_floor_is_never_weakened() {
        let hosts = [HostView { backends: vec![BackendKind::Sim], ..host(1000, 0) }];
        let auto = Demand { floor: Isolation::None, ..demand(100) };
        assert!(matches!(decide(&auto, &hosts, &[]), Decision::Queue(_)));
        let named = Demand { backend: Some(BackendKind::Sim), ..auto.clone() };
        assert!(matches!(decide(&named, &hosts, &[]), Decision::Place { .. }));
        let floored = Demand { floor: Isolation::Container, ..named };
        assert_eq!(not_offered(&floored, &hosts), Some(vec!["sim".to_owned()]));
        assert_eq!(
            not_offered(&Demand { floor: Isolation::Microvm, ..demand(100) }, &[host(1000, 0)]),
            Some(vec!["sim".to_owned(), "namespace".to_owned()])
        );
        assert_eq!(not_offered(&floored, &[]), None);
    }

    #[test]
    fn the_policy_scales_each_quantity_without_overflow() {
        let policy = AdmissionPolicy { memory_percent: 150, cpu_percent: 3200, disk_percent: 50 };
        let all = HostCapacity { memory: ByteCount(u64::MAX), cpus: CpuMillis(u32::MAX), disk: ByteCount(9) };
        let promisable = policy.promisable(all);
        assert_eq!(promisable.memory.0, u64::MAX);
        assert_eq!(promisable.cpus.0, u32::MAX);
        assert_eq!(promisable.disk.0, 4);
    }
}
