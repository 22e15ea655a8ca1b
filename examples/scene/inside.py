#!/usr/bin/env python3
"""The program that ./run starts inside a sandbox: it looks around, then tries to take more than it was given.

Each verb is one act of the scene; `scene.sh` starts them one after the other. Everything is read or tried from inside,
by an ordinary program: nothing here knows that it is in a sandbox.
"""

import errno
import os
import signal
import socket
import sys
import time

MIB = 1024 * 1024


def say(label: str, value: object) -> None:
    print(f"  {label:<18} {value}", flush=True)


def read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def status_fields() -> dict[str, str]:
    pairs = (line.split(":", 1) for line in read("/proc/self/status").splitlines() if ":" in line)
    return {name: value.strip() for name, value in pairs}


def mounts() -> list[str]:
    """One line a mount; read-only ones below another mount are only counted."""
    lines, below = {}, {}
    for line in read("/proc/self/mountinfo").splitlines():
        fields, kind = line.split(" - ", 1)
        point, options = fields.split()[4:6]
        access = options.split(",")[0]
        parent = "/" + point.split("/")[1]
        if access == "ro" and parent != point and parent in lines:
            below[parent] = below.get(parent, 0) + 1
        else:
            lines[point] = f"{access}  {kind.split()[0]:<10} {point}"
    return [line + (f"  ({below[point]} read-only mounts below)" if point in below else "") for point, line in lines.items()]


def look() -> None:
    """Prints what a program can find out about where it is."""
    kernel = os.uname()
    say("kernel", f"{kernel.sysname} {kernel.release} ({kernel.machine})")
    say("hostname", kernel.nodename)
    say("user", f"uid {os.getuid()}, gid {os.getgid()}")
    # Where pid 1 finds its own files there; the gVisor of 2024 does not name itself.
    is_gvisor = os.path.isdir("/.cloister")
    if is_gvisor:
        say("namespaces", "the kernel in here is gVisor's; what it is in on the host is below")
    else:
        inside, outside, count = read("/proc/self/uid_map").split()[:3]
        say("user namespace", f"{count} uids: {inside} in here is {outside} outside")
    status = status_fields()
    seccomp = {"0": "off", "1": "strict", "2": "filter"}[status["Seccomp"]]
    say("capabilities", f"effective {status['CapEff']}, bounding {status['CapBnd']}")
    say("no new privileges", {"1": "yes", "0": "NO"}.get(status.get("NoNewPrivs", ""), "not told by this kernel"))
    say("seccomp", seccomp)
    here = {name: os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))}
    outer = dict(pair.split("=", 1) for pair in os.environ.get("OUTER_NAMESPACES", "").split() if "=" in pair)
    for name, inode in here.items():
        if name in outer and not is_gvisor:
            say(f"{name} namespace", f"{inode}, outside {outer[name]}: " + ("SHARED" if inode == outer[name] else "its own"))
    print("  processes, all that can be seen:")
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit())):
        try:
            command = read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or read(f"/proc/{pid}/comm").strip()
        except OSError as error:
            command = f"({errno.errorcode[error.errno or 0]})"
        print(f"    {pid:>4}  {command[:88]}")
    print("  mounts:")
    for line in mounts():
        print(f"    {line}")
    disk = os.statvfs("/workspace")
    say("/workspace", f"{disk.f_bavail * disk.f_frsize // MIB} MiB free of {disk.f_blocks * disk.f_frsize // MIB} MiB")


def memory() -> None:
    """Takes memory and touches it until something stops it."""
    held = []
    while True:
        held.append(bytearray(8 * MIB))
        for offset in range(0, 8 * MIB, 4096):
            held[-1][offset] = 1
        if len(held) % 2 == 0:
            say("holding", f"{len(held) * 8} MiB")


def pids() -> None:
    """Starts processes until the kernel refuses one."""
    children = []
    try:
        while True:
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            children.append(child)
    except OSError as error:
        say("refused", f"fork number {len(children) + 1}: {errno.errorcode[error.errno or 0]} ({error.strerror})")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
    say("afterwards", "all of them are gone, and this program still runs")


def disk() -> None:
    """Writes into the workspace until it is full, and fails as a program does that wanted to write more."""
    written = 0
    block = os.urandom(MIB)
    with open("/workspace/big", "wb", buffering=0) as file:
        while len(block) >= 1024:
            try:
                written += file.write(block)
            except OSError as error:
                if len(block) == MIB:
                    reason = f"{errno.errorcode[error.errno or 0]} ({error.strerror})"
                    say("refused", f"after {written // MIB} MiB: {reason}")
                # What is left is filled by ever smaller pieces.
                block = block[: len(block) // 2]
    say("written in all", f"{written} bytes")
    sys.exit(1)


def network() -> None:
    """Tries to get out: by address and by name."""
    interfaces = [line.split(":")[0].strip() for line in read("/proc/net/dev").splitlines() if ":" in line]
    say("interfaces", ", ".join(interfaces))
    begin = time.monotonic()
    try:
        # An address for documentation (RFC 5737): nobody is there, and nothing is sent.
        socket.create_connection(("192.0.2.1", 443), timeout=5).close()
        say("TCP 192.0.2.1:443", "CONNECTED")
        sys.exit(1)
    except OSError as error:
        took = (time.monotonic() - begin) * 1000
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        say("TCP 192.0.2.1:443", f"refused in {took:.1f} ms: {name} ({error.strerror or error})")
    begin = time.monotonic()
    try:
        say("name example.com", f"RESOLVED to {socket.gethostbyname('example.com')}")
        sys.exit(1)
    except OSError as error:
        say("name example.com", f"refused in {(time.monotonic() - begin) * 1000:.1f} ms: {error.strerror or error}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
        say("loopback", "works, for programs in here to talk to each other")


ACTS = {"look": look, "memory": memory, "pids": pids, "disk": disk, "network": network}

if __name__ == "__main__":
    ACTS[sys.argv[1]]()
