#!/usr/bin/env python3
"""Hostile code: tries one way out of a sandbox, or to take all there is, and prints what came of it.

Usage: attacks.py NAME [ARGUMENT...]

Arrives through standard input of an exec, like anything that an agent may be talked into running. Prints `ok` when the
attack got what it wanted, else the name of the error; whoever started it knows better, because he looks from outside.
"""

import ctypes
import errno
import os
import socket
import stat
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY_OFF_BIND_REMOUNT = 0x1000 | 0x20  # MS_BIND | MS_REMOUNT, without MS_RDONLY
MNT_DETACH = 2
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
PTRACE_SEIZE = 0x4206
MIB = 1 << 20


def call(name: str, *arguments: object) -> None:
    """Calls a function of the C library; an error is raised as the OSError it is."""
    if getattr(LIBC, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount(kind: str, target: str) -> None:
    call("mount", kind.encode(), target.encode(), kind.encode(), 0, None)


def make_writable(target: str) -> None:
    call("mount", b"none", target.encode(), None, MS_RDONLY_OFF_BIND_REMOUNT, None)


def unmount(target: str) -> None:
    call("umount2", target.encode(), MNT_DETACH)


def nest(_: str) -> None:
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    mount("tmpfs", "/mnt")


def trace(pid: str) -> None:
    call("ptrace", PTRACE_SEIZE, int(pid), None, None)


def kill(pid: str) -> None:
    os.kill(int(pid), 9)


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def make_device(path: str) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))


def connect_abstract(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(f"\0{name}")


def connect_tcp(address: str) -> None:
    host, port = address.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=5).close()


def fork_bomb(_: str) -> None:
    """Every process forks for as long as there is room, and none gives up."""
    while True:
        try:
            os.fork()
        except OSError:
            pass


def take_memory(_: str) -> None:
    held = []
    while True:
        # Not zeros, which need no page of their own.
        held.append(b"\x5a" * (4 * MIB))


def take_disk(path: str) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"\x5a" * MIB)


ATTACKS = {
    attack.__name__: attack
    for attack in (
        mount, make_writable, unmount, nest, trace, kill, write, make_device, connect_abstract, connect_tcp, fork_bomb,
        take_memory, take_disk,
    )
}

if __name__ == "__main__":
    try:
        ATTACKS[sys.argv[1]](*sys.argv[2:])
        print("ok")
    except OSError as error:
        print(errno.errorcode.get(error.errno or 0, str(error)))
        sys.exit(1)
