//! The agent on the backends that it opens itself: the simulation, and namespaces where the machine has them.

use cloister_api::common::{Isolation, output_frame::Frame};
use cloister_api::host::command_result::Result as Answer;
use cloister_api::host::stream_request::Message;
use cloister_api::host::{
    CreateSandbox, GetExec, HostErrorKind, OpenStream, Registered, RemoveSandbox, StopSandbox,
};
use cloister_host::{BackendChoice, HostConfig};
use cloister_types::{BackendKind, ExecId, SandboxId, SessionId};

use crate::support::coordinator::{Coordinator, LinkPeer, StreamPeer};
use crate::support::{Host, config, create, start, until};

async fn open(
    coordinator: &mut Coordinator,
    link: &LinkPeer,
    session: &SessionId,
    open: OpenStream,
) -> StreamPeer {
    let id = ExecId::generate().to_string();
    link.open(OpenStream { stream_id: id.clone(), session_id: session.to_string(), ..open }).await;
    let mut stream = coordinator.stream(&id).await;
    let first = stream.next().await;
    assert!(matches!(first, Some(Message::Exec(_))), "{first:?}");
    stream
}

/// Reads until `enough` says so of the output, or the last frame; returns the output and the exit.
async fn read(
    stream: &mut StreamPeer,
    enough: impl Fn(&str) -> bool,
) -> (String, Option<cloister_api::common::ExecExit>) {
    let mut output = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&output).into_owned();
        if enough(&text) {
            return (text, None);
        }
        let message = stream.next().await.expect("a stream has a last message");
        let Message::Frame(frame) = message else { panic!("{message:?}") };
        match frame.frame.expect("never empty") {
            Frame::Data(data) => output.extend_from_slice(&data.data),
            Frame::Gap(gap) => panic!("{gap:?}"),
            Frame::Exit(exit) => return (text, Some(*exit)),
        }
    }
}

async fn echo(coordinator: &mut Coordinator, link: &LinkPeer, session: &SessionId) {
    let exec = ExecId::generate();
    let run = OpenStream { start: start(&exec, &["echo", "hello"], false).into(), ..Default::default() };
    let mut stream = open(coordinator, link, session, run).await;
    let (output, exit) = read(&mut stream, |_| false).await;
    assert_eq!((output.as_str(), exit.map(|exit| exit.code)), ("hello\n", Some(0)));
}

#[tokio::test]
async fn the_simulation_serves_a_whole_session_when_it_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let mut coordinator = Coordinator::start().await;
    let host = Host::start_real(config(&directory, &coordinator));
    let mut link = coordinator.link().await;
    let session = SessionId::generate();
    let Answer::Created(created) = link.ask(&session, 1, create(&SandboxId::generate())).await.unwrap()
    else {
        panic!("not created")
    };
    assert_eq!(created.isolation.as_known(), Some(Isolation::None));
    echo(&mut coordinator, &link, &session).await;
    link.ask(&session, 2, RemoveSandbox::default()).await.unwrap();
    host.stop_with(link).await.unwrap();
}

/// A configuration for namespaces, or why this machine cannot run them.
async fn namespaces(config: HostConfig, coordinator: &mut Coordinator) -> Result<(Host, LinkPeer), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("namespaces and control groups need root".to_owned());
    }
    let host =
        Host::start_real(HostConfig { backend: BackendChoice::Only(BackendKind::Namespace), ..config });
    let link = coordinator.link().await;
    match link.register.capabilities.iter().find(|capability| capability.name == "backend.namespace") {
        Some(capability) if capability.remedy.is_empty() => Ok((host, link)),
        other => {
            let reason = format!("{other:?}");
            host.stop_with(link).await.unwrap();
            Err(reason)
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_output_of_a_session_stays_within_the_bound_that_the_host_was_given() {
    const BOUND: u64 = 2 << 20;
    let directory = tempfile::tempdir().unwrap();
    let mut coordinator = Coordinator::start().await;
    let config = config(&directory, &coordinator);
    let spool = cloister_types::ByteCount(BOUND);
    let config = HostConfig { exec_spool: spool, session_spool: spool, ..config };
    let data_dir = config.paths.data_dir.clone();
    let (host, mut link) = match namespaces(config, &mut coordinator).await {
        Ok(up) => up,
        Err(reason) => {
            eprintln!("SKIP: no namespace backend here: {reason}");
            return;
        }
    };
    let session = SessionId::generate();
    link.ask(&session, 1, create(&SandboxId::generate())).await.unwrap();
    for _ in 0..3 {
        let exec = ExecId::generate();
        let print = start(&exec, &["head", "-c", "1500000", "/dev/zero"], false);
        let run = OpenStream { start: print.into(), ..Default::default() };
        let mut stream = open(&mut coordinator, &link, &session, run).await;
        let (output, exit) = read(&mut stream, |_| false).await;
        assert_eq!((output.len(), exit.map(|exit| exit.code)), (1_500_000, Some(0)));
    }
    let execs = data_dir.join("sessions").join(session.as_str()).join("execs");
    let kept: u64 = std::fs::read_dir(execs)
        .unwrap()
        .flat_map(|exec| std::fs::read_dir(exec.unwrap().path()).unwrap())
        .map(|file| file.unwrap())
        .filter(|file| file.path().extension().is_some_and(|extension| extension == "seg"))
        .map(|file| file.metadata().unwrap().len())
        .sum();
    assert!((1..=BOUND).contains(&kept), "{kept} bytes are kept");
    link.ask(&session, 2, RemoveSandbox::default()).await.unwrap();
    host.stop_with(link).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_runs_on_while_agents_are_killed_and_its_output_is_contiguous() {
    let directory = tempfile::tempdir().unwrap();
    let mut coordinator = Coordinator::start().await;
    let config = config(&directory, &coordinator);
    let (host, mut link) = match namespaces(config.clone(), &mut coordinator).await {
        Ok(up) => up,
        Err(reason) => {
            eprintln!("SKIP: no namespace backend here: {reason}");
            return;
        }
    };
    let (session, sandbox) = (SessionId::generate(), SandboxId::generate());
    let Answer::Created(created) = link.ask(&session, 1, create(&sandbox)).await.unwrap() else {
        panic!("not created")
    };
    assert_eq!(created.isolation.as_known(), Some(Isolation::Container));
    echo(&mut coordinator, &link, &session).await;

    let exec = ExecId::generate();
    let script = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done";
    let run = OpenStream { start: start(&exec, &["sh", "-c", script], false).into(), ..Default::default() };
    let mut stream = open(&mut coordinator, &link, &session, run).await;
    let (before, _) = read(&mut stream, |text| text.lines().count() >= 20).await;
    let get = GetExec { exec_id: exec.to_string(), ..Default::default() };
    let Answer::Exec(found) = link.ask(&session, 1, get.clone()).await.unwrap() else { panic!("no exec") };
    drop(stream);
    host.kill().await;
    drop(link);

    let namespace = HostConfig { backend: BackendChoice::Only(BackendKind::Namespace), ..config.clone() };
    let host = Host::start_real(namespace.clone());
    let mut link = coordinator.link().await;
    let report = &link.register.sandboxes[0];
    assert_eq!((report.sandbox_id.as_str(), report.running, report.epoch), (sandbox.as_str(), true, 1));
    let Answer::Exec(adopted) = link.ask(&session, 1, get).await.unwrap() else { panic!("no exec") };
    assert_eq!((adopted.pid, adopted.exit.is_set()), (found.pid, false), "another process, or an ended one");
    let again = OpenStream { exec_id: exec.to_string(), ..Default::default() };
    let mut stream = open(&mut coordinator, &link, &session, again).await;
    let (all, _) = read(&mut stream, |text| text.lines().count() >= before.lines().count() + 20).await;
    let whole = &all[..=all.rfind('\n').unwrap()];
    for (index, line) in whole.lines().enumerate() {
        assert_eq!(line, (index + 1).to_string(), "the counter started over or bytes are missing");
    }
    drop(stream);

    // A stopped sandbox leaves its output, a removed session nothing.
    link.ask(&session, 2, StopSandbox { grace_ms: 100, ..Default::default() }).await.unwrap();
    let ended = OpenStream { exec_id: exec.to_string(), ..Default::default() };
    let mut stream = open(&mut coordinator, &link, &session, ended).await;
    let (kept, exit) = read(&mut stream, |_| false).await;
    assert!(kept.starts_with(whole), "output was lost by the stop");
    assert!(exit.is_some());
    link.ask(&session, 3, RemoveSandbox::default()).await.unwrap();
    host.stop_with(link).await.unwrap();
    for kind in ["sessions", "sandboxes"] {
        let left: Vec<_> = std::fs::read_dir(directory.path().join("data").join(kind)).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
    let (stopped, ()) = tokio::join!(cloister_host::stop_all(namespace), coordinator.accept_once());
    assert_eq!(stopped.unwrap(), 0);
}

/// Kills the shim of a sandbox, as nothing of ours does.
fn kill_shim(sandbox: &SandboxId) {
    let killed = std::fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).into_owned();
        let is_shim = command.contains("shim.json") && command.contains(sandbox.as_str());
        let pid = entry.file_name().to_str().and_then(|pid| pid.parse().ok());
        is_shim
            && pid
                .and_then(rustix::process::Pid::from_raw)
                .is_some_and(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL).is_ok())
    });
    assert_eq!(killed.count(), 1, "the shim of {sandbox}");
}

#[tokio::test(flavor = "multi_thread")]
async fn how_a_sandbox_ended_is_reported_although_the_agent_that_saw_it_was_killed() {
    let directory = tempfile::tempdir().unwrap();
    let mut coordinator = Coordinator::start().await;
    let config = config(&directory, &coordinator);
    let (host, mut link) = match namespaces(config.clone(), &mut coordinator).await {
        Ok(up) => up,
        Err(reason) => {
            eprintln!("SKIP: no namespace backend here: {reason}");
            return;
        }
    };
    let namespace = HostConfig { backend: BackendChoice::Only(BackendKind::Namespace), ..config };
    let (session, sandbox) = (SessionId::generate(), SandboxId::generate());
    link.ask(&session, 1, create(&sandbox)).await.unwrap();
    // Nobody is told: the link is cut before, and the agent is killed after it has reaped what is left.
    coordinator.cut();
    let unanswered = coordinator.dialled().await;
    kill_shim(&sandbox);
    let left = directory.path().join("data/sandboxes").join(sandbox.as_str());
    until("the sandbox is reaped", || !left.exists()).await;
    host.kill().await;
    drop(unanswered);

    let host = Host::start_real(namespace.clone());
    let mut link = coordinator.link().await;
    let report = link.register.sandboxes[0].clone();
    assert_eq!((report.sandbox_id.as_str(), report.running), (sandbox.as_str(), false));
    assert_eq!(report.ended_reason, "sandbox_gone");
    assert!(report.ended_message.contains("killed"), "{}", report.ended_message);

    // The session goes on on its layer; without the layer it does not, and nothing is made in its place.
    let resume = CreateSandbox { resumes: true, ..create(&SandboxId::generate()) };
    link.ask(&session, 2, resume).await.unwrap();
    link.ask(&session, 3, StopSandbox { grace_ms: 100, ..Default::default() }).await.unwrap();
    let kept = directory.path().join("data/sessions").join(session.as_str());
    let layer = kept.join("layer.img");
    assert!(layer.exists(), "this test is about the layer's image: {:?}", std::fs::read_dir(&kept));
    for gone in [layer, kept.clone()] {
        if gone.is_dir() { std::fs::remove_dir_all(&gone) } else { std::fs::remove_file(&gone) }.unwrap();
        let resume = CreateSandbox { resumes: true, ..create(&SandboxId::generate()) };
        let error = link.ask(&session, 4, resume).await.unwrap_err();
        assert_eq!(error.kind.as_known(), Some(HostErrorKind::LayerMissing), "{error:?}");
        assert!(error.message.contains("delete the session"), "{}", error.message);
        assert!(!gone.exists());
    }
    link.ask(&session, 5, RemoveSandbox::default()).await.unwrap();
    host.stop_with(link).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shut_down_host_says_so_with_what_is_left() {
    let directory = tempfile::tempdir().unwrap();
    let mut coordinator = Coordinator::start().await;
    let config = config(&directory, &coordinator);
    let (host, mut link) = match namespaces(config.clone(), &mut coordinator).await {
        Ok(up) => up,
        Err(reason) => {
            eprintln!("SKIP: no namespace backend here: {reason}");
            return;
        }
    };
    let namespace = HostConfig { backend: BackendChoice::Only(BackendKind::Namespace), ..config };
    let (session, sandbox) = (SessionId::generate(), SandboxId::generate());
    link.ask(&session, 7, create(&sandbox)).await.unwrap();
    host.stop_with(link).await.unwrap();
    let (stopped, register) = tokio::join!(cloister_host::stop_all(namespace.clone()), async {
        let link = coordinator.dialled().await;
        link.accept(Registered::default()).await;
        link.register.clone()
    });
    assert_eq!(stopped.unwrap(), 1);
    assert!(register.stopping);
    let report = &register.sandboxes[0];
    assert_eq!((report.sandbox_id.as_str(), report.running, report.epoch), (sandbox.as_str(), false, 7));
    assert_eq!(report.ended_reason, "requested");
    // The next agent reports the same, for a coordinator that could not be told.
    let host = Host::start_real(namespace);
    let mut link = coordinator.link().await;
    assert_eq!((link.register.stopping, &link.register.sandboxes[0]), (false, report));
    link.ask(&session, 8, RemoveSandbox::default()).await.unwrap();
    host.stop_with(link).await.unwrap();
}
