"""A process of its own for a learner's code: limits, and what the kernel can hide.

On Linux, as root or where user namespaces are allowed: no network, its own process
numbers, and a file system that holds Python and an empty folder and nothing of the
course. Elsewhere what can be had of it; `missing()` says what cannot.
"""

import ctypes
import hmac
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from utils.syllabus import ROOT

LINUX = sys.platform.startswith("linux")
# macOS has fork too, but what torch computes with there does not survive it.
CAN_FORK = LINUX and hasattr(os, "fork")

MEMORY = 2 << 30  # bytes that a process may take beyond what it starts with
FILE = 16 << 20  # bytes of one written file
FOLDER = 32 << 20  # bytes of all of them, where they lie in memory
PROCESSES = 4
OPEN_FILES = 64
SCRATCH = "/scratch"  # the folder that it may write in
ANSWER = 128 << 20  # bytes of what a process may send back

SENTENCES = {
    "memory": "memory is not limited",
    "processes": "the number of processes is not limited",
    "kill": "processes that an answer starts may outlive it",
    "network": "the network can be reached",
    "files": "files can be read and written as you can, the reference answers too",
    "user": "answers run as the user who grades",
}


@dataclass
class Ending:
    """How a process ended: `sent` is what its function returned, or None."""

    sent: bytes | None
    reason: str = ""


def run(function, seconds: float) -> Ending:
    """Call `function() -> bytes` in a confined fork of this process.

    What it returns is sent back under a key made for this call. A process that ends
    by itself, is stopped, or sends anything else has sent nothing.
    """
    key = os.urandom(32)
    reading, writing = os.pipe()
    root = tempfile.mkdtemp(prefix="grade-") if LINUX else None
    supervisor = os.fork()
    if supervisor == 0:
        code = 99
        try:
            os.close(reading)
            code = _watch(function, key, writing, seconds, root)
        finally:
            os._exit(code)
    os.close(writing)
    try:
        received, code = _receive(reading, supervisor, seconds + 10)
    finally:
        os.close(reading)
        if root:
            shutil.rmtree(root, ignore_errors=True)
    if code == STOPPED:
        return Ending(None, f"it was stopped after {seconds:g} seconds")
    if len(received) > ANSWER:
        return Ending(None, "it sent more than fits")
    return verified(key, received)


def verified(key: bytes, received: bytes) -> Ending:
    """What was sent under a key, and nothing else."""
    signature, sent = received[:32], received[32:]
    if hmac.compare_digest(signature, hmac.digest(key, sent, "sha256")):
        return Ending(sent)
    if received:
        return Ending(None, "it sent something that is no verdict")
    return Ending(None, "its process ended before there was a verdict")


STOPPED = 98


def _receive(reading, supervisor, seconds):
    """Everything that comes through the pipe until the supervisor has ended."""
    os.set_blocking(reading, False)
    end = time.monotonic() + seconds
    received, code, wait = bytearray(), None, 0.002
    while True:
        ready, _, _ = select.select([reading], [], [], wait)
        block = os.read(reading, 1 << 20) if ready else None
        if block and len(received) <= ANSWER:
            received += block
        if code is None:
            done, status = os.waitpid(supervisor, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
        elif not block:
            return bytes(received), code
        if time.monotonic() > end:
            if code is None:
                os.kill(supervisor, signal.SIGKILL)
                os.waitpid(supervisor, 0)
            return bytes(received), STOPPED
        if block == b"":  # closed, and the supervisor is still at work
            time.sleep(wait)
        wait = min(2 * wait, 0.02)


# The supervisor: starts the learner's process, ends it, and all that it started -------


def _watch(function, key, writing, seconds, root) -> int:
    os.setsid()
    if LINUX:  # it must not outlive a grader that is stopped
        _libc().prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    _silence(writing)
    lacks = _separate()
    user = 2_000_000 + os.getpid() % 100_000  # for this process alone
    inner = os.fork()
    if inner == 0:
        try:
            lacks = _confine(root, seconds, user, lacks)
            sent = function(frozenset(lacks))
            _send(writing, hmac.digest(key, sent, "sha256") + sent)
        finally:
            os._exit(1)
    os.close(writing)
    end, wait, stopped = time.monotonic() + seconds, 0.001, False
    while os.waitpid(inner, os.WNOHANG) == (0, 0):
        if time.monotonic() > end and not stopped:
            os.kill(inner, signal.SIGKILL)
            stopped = True
        time.sleep(wait)
        wait = min(2 * wait, 0.02)
    if "own processes" in lacks:
        _sweep()
    return STOPPED if stopped else 0


def _send(writing, data):
    view = memoryview(data)
    while view:
        view = view[os.write(writing, view) :]


def _silence(keep):
    """Standard streams lead nowhere, and nothing else of the parent's is open."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    last = max(keep, nowhere)
    for number in range(3, last):
        if number != keep:
            with suppress(OSError):
                os.close(number)
    os.closerange(last + (last == keep), 4096)


def _sweep():
    """End every process that has been left behind, without namespaces."""
    if not LINUX:
        return
    for _ in range(200):
        children = _children(os.getpid())
        if not children:
            return
        for child in children:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _children(pid) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            if int(stat.rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
    return found


# What Linux can do --------------------------------------------------------------------

NOBODY = 65534
NEW_MOUNTS, NEW_USERS, NEW_IPC = 0x20000, 0x10000000, 0x8000000
NEW_PROCESSES, NEW_NETWORK = 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT = 1, 2, 4, 32
BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
DEATH_SIGNAL, SUBREAPER, NO_NEW_PRIVILEGES = 1, 36, 38


def _libc():
    return ctypes.CDLL(None, use_errno=True)


def _checked(result):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _unshare(flags):
    _checked(_libc().unshare(flags))


def _mount(source, target, kind, flags, data=None):
    encoded = [x and os.fsencode(x) for x in (source, target, kind, data)]
    _checked(_libc().mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def _separate() -> set[str]:
    """Leave the namespaces of the machine; returns what was not allowed."""
    if not LINUX:
        return {"own processes", "network", "own files"}
    _libc().prctl(SUBREAPER, 1, 0, 0, 0)
    lacks = _leave_namespaces()
    if lacks and _own_users():
        lacks = _leave_namespaces()
    return lacks


def _leave_namespaces() -> set[str]:
    lacks = set()
    for flag, what in (
        (NEW_NETWORK, "network"),
        (NEW_PROCESSES, "own processes"),
        (NEW_MOUNTS | NEW_IPC, "own files"),
    ):
        try:
            _unshare(flag)
        except OSError:
            lacks.add(what)
    return lacks


def _own_users() -> bool:
    """A user namespace, in which a user without privileges may do the rest."""
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(NEW_USERS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user or NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group or NOBODY} {group} 1")
    except OSError:
        return False
    return True


def _confine(root, seconds, user, lacks) -> set[str]:
    """In the learner's process itself: files, limits, and another user."""
    lacks = set(lacks)
    if "own files" not in lacks:
        try:
            _new_root(root)
        except OSError:
            lacks.add("own files")
    if "own files" in lacks:
        os.chdir(root or tempfile.gettempdir())
    os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd(), USER="learner")
    tempfile.tempdir = None
    lacks |= limit(seconds, "own processes" in lacks)
    if LINUX:
        lacks |= _lose_privileges(user)
        _libc().prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    return {_NAMES[each] for each in lacks}


_NAMES = {
    "own processes": "kill",
    "own files": "files",
    "network": "network",
    "memory": "memory",
    "processes": "processes",
    "user": "user",
}


def _new_root(root):
    """A file system of Python and an empty folder, and change into it."""
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    size = f"size={FOLDER},nr_inodes=2000,mode=755"
    _mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, size)
    for path in _visible():
        _show(root, path)
    hidden = Path(root + str(ROOT))
    if hidden.is_dir() and any(hidden.iterdir()) and not _is_parent_of_python(ROOT):
        _mount("tmpfs", str(hidden), "tmpfs", READ_ONLY, "size=4k")
    os.makedirs(f"{root}/dev", exist_ok=True)
    for device in ("null", "zero", "urandom", "random"):
        Path(root, "dev", device).touch()
        _mount(f"/dev/{device}", f"{root}/dev/{device}", None, BIND)
    os.mkdir(f"{root}{SCRATCH}")
    os.chmod(f"{root}{SCRATCH}", 0o1777)
    os.chroot(root)
    os.chdir(SCRATCH)


def _is_parent_of_python(folder) -> bool:
    return any(Path(p).is_relative_to(folder) for p in (sys.prefix, sys.base_prefix))


def _visible() -> list[str]:
    """The folders that Python and the packages lie in, the outer ones first."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"]
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix]
    packages = [
        path
        for path in sys.path
        if path and Path(path).is_dir() and not ROOT.is_relative_to(path)
        if not Path(path).is_relative_to(ROOT) or path.startswith(sys.prefix)
    ]
    found: list[str] = []
    for path in sorted({*system, *python, *packages}, key=lambda p: (p.count("/"), p)):
        if path != "/" and not any(Path(path).is_relative_to(each) for each in found):
            found.append(path)
    return found


def _show(root, path):
    inside = root + path
    if os.path.islink(path) and path.count("/") == 1:
        os.symlink(os.readlink(path), inside)
    elif os.path.isdir(path):
        os.makedirs(inside, exist_ok=True)
        _mount(path, inside, None, BIND | RECURSIVE)
        flags = BIND | REMOUNT | READ_ONLY | NO_SUID
        try:
            _mount(None, inside, None, flags | NO_DEVICES)
        except OSError:  # flags that the outer mount has are locked for a user
            flags |= os.statvfs(path).f_flag & 0x1C0F
            _mount(None, inside, None, flags)


def limit(seconds, among_others) -> set[str]:
    """Limit this process; returns what could not be limited."""
    try:
        import resource
    except ImportError:
        return {"memory", "processes"}

    def at_most(what, value):
        try:
            _, most = resource.getrlimit(what)
            if most != resource.RLIM_INFINITY:
                value = min(value, most)
            resource.setrlimit(what, (value, value))
            return True
        except (ValueError, OSError):
            return False

    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, FILE)
    at_most(resource.RLIMIT_NOFILE, OPEN_FILES)
    at_most(resource.RLIMIT_CPU, int(seconds) + 5)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    lacks = set()
    if not LINUX or not at_most(resource.RLIMIT_AS, _size() + MEMORY):
        lacks.add("memory")
    # Without a namespace all that the user runs counts.
    allowed = PROCESSES + (_THREADS[0] if among_others else 0)
    if not LINUX or not at_most(resource.RLIMIT_NPROC, allowed):
        lacks.add("processes")
    return lacks


def _size() -> int:
    """The address space of this process, which the libraries' mappings fill."""
    return int(_MAPPED_PAGES[0]) * os.sysconf("SC_PAGE_SIZE")


_MAPPED_PAGES = [0]
_THREADS = [0]


def measure():
    """Before the forks: what this process takes already, where /proc is still seen."""
    if LINUX:
        _MAPPED_PAGES[0] = int(Path("/proc/self/statm").read_text().split()[0])
        _THREADS[0] = sum(
            len(os.listdir(task))
            for task in Path("/proc").glob("[0-9]*/task")
            if _owned(task)
        )


def _owned(path) -> bool:
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _lose_privileges(user) -> set[str]:
    lacks = set()
    if os.geteuid() == 0:
        lacks.add("user")
        for each in (user, NOBODY):
            try:
                os.setgroups([])
                os.setresgid(each, each, each)
                os.setresuid(each, each, each)
                lacks.clear()
                break
            except OSError:
                continue
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _libc().capset(header, (ctypes.c_uint32 * 6)())
    _libc().prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return lacks


def missing() -> list[str]:
    """What this machine does not protect against, as sentences."""
    if not CAN_FORK:
        return list(SENTENCES.values())
    measure()
    ending = run(lambda lacks: ",".join(sorted(lacks)).encode(), 20)
    if ending.sent is None:
        return [f"no process can be confined here: {ending.reason}"]
    return [SENTENCES[each] for each in ending.sent.decode().split(",") if each]
