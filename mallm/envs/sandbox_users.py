"""Users, capabilities and system calls of model-written programs where namespaces are not to be had.

Loaded by `sandbox_child.py` in the helper, from its file. Standard library only, and only Linux.
"""

import contextlib
import ctypes
import os
import platform
import struct

SET_SECCOMP, FILTER = 22, 2
SPARE_USERS = range(61184, 65520)
"""Numbers that systems give to no account."""
CHANGE_USER = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 5 | 1 << 6 | 1 << 7
"""Capabilities to hand a folder to another user, to become that user, and to kill and clear away what it leaves."""
CALLS = {
    'x86_64': (0xC000003E, (62, 200, 234, 129, 297, 302), (101, 311, 424)),
    'aarch64': (0xC00000B7, (129, 130, 131, 138, 240, 261), (117, 271, 424)),
}
"""An architecture's number, its system calls whose first argument is the process that they act on (kill, tkill, tgkill,
rt_sigqueueinfo, rt_tgsigqueueinfo, prlimit64), and ptrace, process_vm_writev, pidfd_send_signal."""


def is_mapped(user: int) -> bool:
    """Whether a user exists in this process's own user namespace; in many containers only root does."""
    with open('/proc/self/uid_map') as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= user < first + count for first, _, count in ranges)


def spare_user(folder: str, shown: list[str]) -> int:
    """A user for programs, who has no process, may pass through `folder` and can read all that is `shown`; else 0."""
    if os.geteuid() or capabilities() & CHANGE_USER != CHANGE_USER:
        return 0
    taken, first = threads(), os.getpid() % len(SPARE_USERS)
    for user in (*SPARE_USERS[first:], *SPARE_USERS[:first]):
        if user not in taken and is_mapped(user):
            break
    else:
        return 0
    os.chmod(folder, 0o711)
    reader = os.fork()
    if not reader:
        with contextlib.suppress(OSError):
            become_user(user)
            os._exit(not all(os.access(path, os.X_OK) for path in (folder, *shown)))
        os._exit(1)
    return user if os.waitpid(reader, 0)[1] == 0 else 0


def become_user(user: int) -> None:
    """From root, for good, with no capability left."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def capabilities() -> int:
    """The effective ones, as bits."""
    with open('/proc/self/status') as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith('CapEff:'))


def threads() -> dict[int, int]:
    """Threads by the user of their process."""
    found: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            user = os.stat(f'/proc/{name}').st_uid
            found[user] = found.get(user, 0) + len(os.listdir(f'/proc/{name}/task'))
    return found


def keep_to_itself(libc: ctypes.CDLL) -> None:
    """Has the kernel refuse to signal, limit or trace any process but this one and its group.

    Where the kernel or the machine does not know how, nothing is done; the test program of `Walls` finds it out.
    """
    if platform.machine() not in CALLS:
        return
    (arch, aimed, refused), own = CALLS[platform.machine()], os.getpid()
    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06  # BPF
    allow, refuse = (leave, 0, 0, 0x7FFF0000), (leave, 0, 0, 0x00050001)
    rules = [(load, 0, 0, 4), (equal, 1, 0, arch), refuse, (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), refuse]
    for call in refused:
        rules += [(equal, 0, 1, call), refuse]
    for call in aimed:
        targets = [(equal, 3, 0, 0), (equal, 2, 0, own), (equal, 1, 0, 2**32 - own)]
        rules += [(equal, 0, 6, call), (load, 0, 0, 16), *targets, refuse, allow]
    code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *rule) for rule in (*rules, allow)))
    libc.prctl(SET_SECCOMP, FILTER, struct.pack('HP', len(rules) + 1, ctypes.addressof(code)), 0, 0)
