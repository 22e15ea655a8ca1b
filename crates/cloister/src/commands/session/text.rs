//! What `cloister session` prints of sessions and their events.

use std::time::SystemTime;

use cloister_api::app::{Session, SessionEvent};

use crate::terminal::{Table, Terminal, Tone, age, date, one_line, word};

/// Returns an event as one line, whatever it says.
pub(super) fn event_line(event: &SessionEvent) -> String {
    let detail = [&event.reason, &event.message].map(|text| one_line(text)).join(" ");
    let line = format!(
        "{:>4}  {}  {:<24} {}",
        event.cursor,
        date(event.at.as_option()),
        one_line(&event.kind),
        detail.trim()
    );
    line.trim_end().to_owned()
}

/// Returns a list with what a person asks first.
pub(super) fn table(sessions: &[Session], now: SystemTime) -> String {
    let mut table = Table::new(["SESSION", "NAME", "STATE", "REASON", "BACKEND", "ISOLATION", "AGE"]);
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    for session in sessions {
        table.row([
            session.id.clone(),
            or_dash(&session.name),
            word(&session.state, "SESSION_STATE_"),
            or_dash(&session.reason),
            or_dash(&session.backend),
            word(&session.isolation, "ISOLATION_"),
            age(session.created_at.as_option(), now),
        ]);
    }
    table.render()
}

/// Returns everything of one session.
pub(super) fn describe(session: &Session, terminal: Terminal) -> String {
    let limits = &session.limits;
    let memory = cloister_types::ByteCount(limits.memory_bytes);
    let disk = cloister_types::ByteCount(limits.disk_bytes);
    let cpus = cloister_types::CpuMillis(limits.cpu_millis);
    let mut labels: Vec<String> =
        session.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    labels.sort();
    let rows = [
        ("session", session.id.clone()),
        ("name", session.name.clone()),
        ("labels", labels.join(", ")),
        ("state", word(&session.state, "SESSION_STATE_")),
        ("reason", session.reason.clone()),
        ("message", session.message.clone()),
        ("image", session.image.clone()),
        ("backend", session.backend.clone()),
        ("isolation", word(&session.isolation, "ISOLATION_")),
        ("isolation floor", word(&session.isolation_floor, "ISOLATION_")),
        ("network", if session.network { "yes" } else { "none" }.to_owned()),
        ("limits", format!("{memory} memory, {cpus} cpus, {} pids, {disk} disk", limits.pids)),
        ("host", session.host_id.clone()),
        ("sandbox", session.sandbox_id.clone()),
        ("created", date(session.created_at.as_option())),
        ("updated", date(session.updated_at.as_option())),
        ("expires", date(session.expires_at.as_option())),
    ];
    let mut lines: Vec<String> = rows
        .iter()
        .filter(|(_, value)| !value.is_empty() && value != "-")
        .map(|(name, value)| format!("{name:<16} {}", one_line(value)))
        .collect();
    if !session.facts.is_empty() {
        lines.push(terminal.paint("facts, read after all hardening", Tone::Strong));
        let width = session.facts.iter().map(|fact| fact.name.chars().count()).max().unwrap_or_default();
        for fact in &session.facts {
            lines.push(format!("  {:<width$}  {}", one_line(&fact.name), one_line(&fact.value)));
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use cloister_api::app::SessionState;

    use super::*;

    #[test]
    fn list_shows_what_a_person_asks_first() {
        let session = Session {
            id: "ses_1".into(),
            state: SessionState::Queued.into(),
            reason: "no_capacity".into(),
            ..Default::default()
        };
        assert_eq!(
            table(&[session], UNIX_EPOCH),
            "SESSION  NAME  STATE   REASON       BACKEND  ISOLATION  AGE\n\
             ses_1    -     queued  no_capacity  -        -          -"
        );
    }

    #[test]
    fn events_are_one_line_whatever_they_say() {
        let event = SessionEvent {
            cursor: 3,
            kind: "session.failed".into(),
            reason: "start_failed".into(),
            message: "two\nlines".into(),
            ..Default::default()
        };
        assert_eq!(event_line(&event), "   3  -  session.failed           start_failed two lines");
    }
}
