//! Proves the claims of `docs/reference/session-states.md`: the state machine is the one that was designed, a
//! deletion is accepted in every state and arrives, and nothing waits without a deadline.
//!
//! The table below was written by hand from the design, not from the code: a row per state, a column per event.
//! What comes *with* a change (operations, capacity) is held against rules about states, by playing the part of the
//! store over random sequences of events.

use cloister_types::session::{Action, SessionEvent, SessionState, transition};

/// The first line has the events; `.` in a cell is a refusal.
const TABLE: &str = "
-         place    enqueue started start_failed pause   pause_done resume   sandbox_gone host_lost host_found deadline_passed delete   removed
pending   starting queued  .       .            .       .          .        .            .         .          queued          deleting .
queued    starting .       .       .            .       .          .        .            .         .          .               deleting .
starting  .        .       active  failed       .       .          .        .            .         .          failed          deleting .
active    .        .       .       .            pausing .          .        paused       host_lost .          .               deleting .
pausing   .        .       .       .            .       paused     .        paused       host_lost .          pausing         deleting .
paused    .        .       .       .            .       .          resuming .            .         .          .               deleting .
resuming  .        .       active  paused       .       .          .        .            .         .          paused          deleting .
host_lost .        .       .       .            .       .          .        paused       .         active     .               deleting .
failed    .        .       .       .            .       .          .        .            .         .          .               deleting .
deleting  .        .       .       .            .       .          .        .            .         .          deleting        deleting deleted
deleted   .        .       .       .            .       .          .        .            .         .          .               deleted  .
";

/// The table as rows of words: the heads first.
fn table() -> Vec<Vec<&'static str>> {
    TABLE.trim().lines().map(|line| line.split_whitespace().collect()).collect()
}

/// What the table expects of each pair, in the order of the two `ALL` lists; `None` for a refusal.
struct Expected(Vec<Vec<Option<SessionState>>>);

impl Expected {
    fn read() -> Self {
        let table = table();
        let cell = |state: SessionState, event: SessionEvent| {
            let column = table[0].iter().position(|head| *head == event.as_str());
            let column = column.unwrap_or_else(|| panic!("`{event}` is no column of the table"));
            let row = table.iter().find(|row| row[0] == state.as_str());
            let word = row.unwrap_or_else(|| panic!("`{state}` is no row of the table"))[column];
            (word != ".").then(|| word.parse().expect("a cell holds the word of a state"))
        };
        let row = |state: &SessionState| SessionEvent::ALL.iter().map(|event| cell(*state, *event)).collect();
        Self(SessionState::ALL.iter().map(row).collect())
    }

    fn after(&self, state: SessionState, event: SessionEvent) -> Option<SessionState> {
        let row = SessionState::ALL.iter().position(|known| *known == state).expect("ALL has every state");
        let column = SessionEvent::ALL.iter().position(|known| *known == event).expect("ALL has every event");
        self.0[row][column]
    }
}

#[test]
fn every_pair_of_state_and_event_is_as_the_table_says() {
    let table = table();
    assert_eq!(table.len(), SessionState::ALL.len() + 1);
    assert!(table.iter().all(|row| row.len() == SessionEvent::ALL.len() + 1));
    let expected = Expected::read();
    for &state in SessionState::ALL {
        for &event in SessionEvent::ALL {
            let found = transition(state, event).map(|next| next.state).ok();
            assert_eq!(found, expected.after(state, event), "`{state}` on `{event}`");
        }
    }
}

#[test]
fn a_refusal_names_what_was_refused() {
    let refused =
        transition(SessionState::Deleted, SessionEvent::Resume).expect_err("nothing leaves `deleted`");
    assert_eq!((refused.state, refused.event), (SessionState::Deleted, SessionEvent::Resume));
    assert_eq!(refused.to_string(), "a session that is `deleted` cannot take `resume`");
}

#[test]
fn delete_reaches_deleted_from_every_state() {
    for &state in SessionState::ALL {
        let deleting = transition(state, SessionEvent::Delete).expect("delete is accepted in every state");
        let end = match deleting.state {
            SessionState::Deleted => SessionState::Deleted,
            other => transition(other, SessionEvent::Removed).expect("a removal ends a deletion").state,
        };
        assert_eq!(end, SessionState::Deleted, "from `{state}`");
    }
}

#[test]
fn exactly_the_transitional_states_have_a_deadline_and_each_deadline_leads_somewhere() {
    for &state in SessionState::ALL {
        let is_transitional = SessionState::TRANSITIONAL.contains(&state);
        assert_eq!(state.deadline().is_some(), is_transitional, "`{state}`");
        let passed = transition(state, SessionEvent::DeadlinePassed);
        assert_eq!(passed.is_ok(), is_transitional, "`{state}` when its deadline passes");
        if let Ok(next) = passed {
            let starts_over = next.state == state
                && next.actions.iter().any(|action| matches!(action, Action::DeleteOp | Action::PauseOp));
            assert!(next.state != state || starts_over, "`{state}` waits on without doing anything");
        }
    }
}

#[test]
fn nothing_waits_for_ever_when_nobody_answers() {
    // Only deadlines happen, and the loss of the host. All but a deletion, which never gives up, come to a state that may
    // last.
    for &start in SessionState::ALL.iter().filter(|state| **state != SessionState::Deleting) {
        let mut state = start;
        for _ in SessionState::ALL {
            if state.deadline().is_some() {
                state = transition(state, SessionEvent::HostLost)
                    .or_else(|_| transition(state, SessionEvent::DeadlinePassed))
                    .expect("the deadline is an edge")
                    .state;
            }
        }
        assert!(state.deadline().is_none(), "from `{start}` deadlines lead in circles through `{state}`");
    }
}

#[test]
fn what_is_deleted_stays_deleted() {
    for &event in SessionEvent::ALL {
        if let Ok(next) = transition(SessionState::Deleted, event) {
            assert_eq!(next.state, SessionState::Deleted);
            assert!(next.actions.is_empty(), "`{event}` does something to a deleted session");
        }
    }
}

/// The operation a store has running for a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Start,
    Pause,
    Delete,
}

/// Plays the store: does what the actions say, and fails where they contradict what it holds.
#[derive(Debug)]
struct Store {
    state: SessionState,
    operation: Option<Operation>,
    holds_capacity: bool,
}

impl Store {
    fn new() -> Self {
        Self { state: SessionState::Pending, operation: None, holds_capacity: false }
    }

    /// Applies one event; a refused one changes nothing.
    fn apply(&mut self, event: SessionEvent, expected: Option<SessionState>) -> Result<(), String> {
        let next = match (transition(self.state, event), expected) {
            (Err(_), None) => return Ok(()),
            (Ok(next), Some(state)) if next.state == state => next,
            (found, expected) => {
                return Err(format!("`{}` on `{event}`: {found:?}, expected {expected:?}", self.state));
            }
        };
        // Placing and resuming take capacity before anything else can happen.
        if matches!(event, SessionEvent::Place | SessionEvent::Resume)
            && std::mem::replace(&mut self.holds_capacity, true)
        {
            return Err(format!("`{event}` takes capacity twice"));
        }
        for action in next.actions {
            match action {
                Action::FinishOp => {
                    self.operation
                        .take()
                        .ok_or_else(|| format!("`{event}` ends an operation that is not there"))?;
                }
                Action::ReleaseCapacity => {
                    if !std::mem::take(&mut self.holds_capacity) {
                        return Err(format!("`{event}` gives back capacity that was not held"));
                    }
                }
                Action::StartOp => self.begin(Operation::Start)?,
                // Started over it supersedes itself.
                Action::PauseOp if self.operation == Some(Operation::Pause) => {}
                Action::PauseOp => self.begin(Operation::Pause)?,
                // Supersedes whatever runs.
                Action::DeleteOp => self.operation = Some(Operation::Delete),
            }
        }
        self.state = next.state;
        self.check()
    }

    fn begin(&mut self, operation: Operation) -> Result<(), String> {
        match self.operation.replace(operation) {
            None => Ok(()),
            Some(running) => Err(format!("{operation:?} begins while {running:?} runs")),
        }
    }

    /// What holds between any two events.
    fn check(&self) -> Result<(), String> {
        let needed = match self.state {
            SessionState::Starting | SessionState::Resuming => Some(Operation::Start),
            SessionState::Pausing => Some(Operation::Pause),
            SessionState::Deleting => Some(Operation::Delete),
            SessionState::Pending
            | SessionState::Queued
            | SessionState::Active
            | SessionState::Paused
            | SessionState::HostLost
            | SessionState::Failed
            | SessionState::Deleted => None,
        };
        if self.operation != needed {
            return Err(format!("`{}` has operation {:?}, expected {needed:?}", self.state, self.operation));
        }
        if self.holds_capacity != self.state.holds_host_capacity() {
            return Err(format!("`{}` while capacity held is {}", self.state, self.holds_capacity));
        }
        Ok(())
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): small, and the same on every machine, so that a seed names a sequence.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).expect("a length fits in 64 bits");
        usize::try_from(self.next() % bound).expect("it is below a length")
    }
}

#[test]
fn a_hundred_thousand_random_sequences_keep_the_books_of_a_store() {
    const SEQUENCES: u64 = 100_000;
    const EVENTS_MAX: usize = 24;
    let expected = Expected::read();
    let mut visits = vec![0_u64; SessionState::ALL.len()];
    for seed in 0..SEQUENCES {
        let mut random = Random(seed);
        let mut store = Store::new();
        let mut history = Vec::new();
        let mut step = |store: &mut Store, event| {
            history.push(event);
            if let Err(problem) = store.apply(event, expected.after(store.state, event)) {
                panic!("sequence {seed} {history:?}: {problem}");
            }
        };
        for _ in 0..=random.below(EVENTS_MAX) {
            // Half of the events are such that the state accepts: blind ones would mostly be refused, and the
            // sequences would not get far. Deletion is left to chance, so that it does not end most of them early.
            let legal: Vec<SessionEvent> = SessionEvent::ALL
                .iter()
                .copied()
                .filter(|event| {
                    *event != SessionEvent::Delete && expected.after(store.state, *event).is_some()
                })
                .collect();
            let pool = if random.below(2) == 0 && !legal.is_empty() { &legal[..] } else { SessionEvent::ALL };
            step(&mut store, pool[random.below(pool.len())]);
            let at = SessionState::ALL
                .iter()
                .position(|state| *state == store.state)
                .expect("ALL has every state");
            visits[at] += 1;
        }
        step(&mut store, SessionEvent::Delete);
        step(&mut store, SessionEvent::Removed);
        assert_eq!(store.state, SessionState::Deleted, "sequence {seed} cannot be deleted");
        assert!(!store.holds_capacity && store.operation.is_none(), "sequence {seed} leaves {store:?}");
    }
    for (state, count) in SessionState::ALL.iter().zip(visits) {
        assert!(
            count > 1000,
            "`{state}` was visited {count} times only: the sequences prove little about it"
        );
    }
}
