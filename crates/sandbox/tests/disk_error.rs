//! Proves that a host disk which does not take a layer's data is told, that the layer is checked before it is used
//! again, and that it then works.
#![cfg(debug_assertions)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cloister_sandbox::backend::{Sandbox, SandboxSpec};
use cloister_sandbox::conformance::clean_up;
use cloister_sandbox::local::{LocalBackend, LocalConfig};
use cloister_sandbox::{Backend, HostPaths};
use cloister_types::session::Reason;
use cloister_types::{
    BackendKind, ByteCount, CpuMillis, ExecId, ExecSpec, Exit, ExitReason, Limits, SandboxId, SessionId,
};

/// A small filesystem at a path, gone with this.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: PathBuf, mib: u64) -> Self {
        std::fs::create_dir_all(&path).expect("make the mount point");
        let options = format!("size={mib}m");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "small"]).arg(&path).status();
        assert!(mounted.expect("start mount").success(), "mount a small filesystem");
        Self(path)
    }

    fn grow(&self, mib: u64) {
        let options = format!("remount,size={mib}m");
        let mounted = Command::new("mount").args(["-o", &options]).arg(&self.0).status();
        assert!(mounted.expect("start mount").success(), "give the filesystem more room");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

struct CleanUp(HostPaths);

impl Drop for CleanUp {
    fn drop(&mut self) {
        clean_up(&self.0);
    }
}

fn spec(session_id: &SessionId) -> SandboxSpec {
    SandboxSpec {
        session_id: session_id.clone(),
        sandbox_id: SandboxId::generate(),
        backend: BackendKind::Namespace,
        image: "host".to_owned(),
        limits: Limits {
            memory: ByteCount::mib(256),
            cpus: CpuMillis(2000),
            disk: ByteCount::mib(256),
            ..Limits::DEFAULT
        },
        hostname: "test".to_owned(),
    }
}

async fn sh(sandbox: &dyn Sandbox, script: &str) -> Exit {
    let exec_id = ExecId::generate();
    let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    let spec = ExecSpec { argv, ..ExecSpec::default() };
    sandbox.start_exec(&exec_id, exec_id.as_str(), &spec).await.expect("start an exec");
    let record = sandbox.wait_exec(&exec_id, Duration::from_secs(60)).await.expect("wait for it");
    record.exit.expect("it has ended")
}

fn backend(directory: &Path) -> (LocalBackend, HostPaths) {
    let paths = HostPaths { data_dir: directory.join("data"), run_dir: directory.join("run") };
    let backend = LocalBackend::open(LocalConfig::new(paths.clone())).expect("open the backend");
    (backend, paths)
}

#[tokio::test]
async fn a_layer_that_the_hosts_disk_did_not_take_is_told_and_checked_before_it_goes_on() {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: the namespace backend needs root");
        return;
    }
    let directory = tempfile::tempdir().expect("make a temporary directory");
    let disk = SmallDisk::mount(directory.path().join("data"), 48);
    let (backend, paths) = backend(directory.path());
    let _clean_up = CleanUp(paths);
    let session_id = SessionId::generate();

    // The twin: what fits is written, and nobody speaks of an error.
    let sandbox = backend.create(&spec(&session_id)).await.expect("create").sandbox;
    let exit = sh(sandbox.as_ref(), "echo kept >/workspace/kept && sync").await;
    assert_eq!((exit.reason, exit.code, exit.disk_error), (ExitReason::Exited, 0, false), "{exit:?}");
    sandbox.stop(Duration::from_secs(5)).await.expect("stop");
    assert_eq!(sandbox.wait_gone().await.reason, Reason::Requested);

    // More than the host has, less than the layer may have.
    let sandbox = backend.create(&spec(&session_id)).await.expect("create again").sandbox;
    let exit = sh(sandbox.as_ref(), "head -c 100000000 /dev/urandom >/workspace/large; sync; exit 3").await;
    assert_eq!(exit.code, 3, "{exit:?}");
    assert!(exit.disk_error, "{exit:?}");
    sandbox.stop(Duration::from_secs(5)).await.expect("stop");
    let gone = sandbox.wait_gone().await;
    assert_eq!(gone.reason, Reason::DiskError, "{gone:?}");
    assert!(gone.message.contains("make room"), "{gone:?}");
    let kept = backend.kept_session(&session_id).await.expect("look").expect("it is kept");
    assert_eq!(kept.last_end.map(|end| end.reason), Some(Reason::DiskError));
    // The disk had no room for the second exec's record either, until the sandbox's own files were gone.
    let execs = backend.ended_execs(&session_id).await.expect("list the execs");
    assert!(execs.len() == 2 && execs.iter().all(|exec| exec.exit.is_some()), "{execs:#?}");

    // With room again the layer is brought in order and goes on with what it had before.
    disk.grow(600);
    let sandbox = backend.create(&spec(&session_id)).await.expect("create on the mended layer").sandbox;
    let exit = sh(
        sandbox.as_ref(),
        "rm -f /workspace/large && grep -q kept /workspace/kept && echo more >/workspace/more && sync",
    )
    .await;
    assert_eq!((exit.code, exit.disk_error), (0, false), "{exit:?}");
    sandbox.stop(Duration::from_secs(5)).await.expect("stop");
    assert_eq!(sandbox.wait_gone().await.reason, Reason::Requested);
    backend.remove(&session_id).await.expect("remove");
}
