"""The process in which model-written programs are forked: started by exec, never imported by the trainer.

It walls itself in, becomes process 1 of its own PID namespace, and then forks one child for each program. The child
puts up the walls of that one program (own temp folder, limits, no capabilities), gives up every file descriptor but
its three streams, and runs the text. This process never reads a program, its input or its output, so a fork of it
holds nothing of earlier ones. When a program has ended, everything it started is killed and reaped.

  strong  user, mount, network, IPC and PID namespaces: no network, no view of the host's files, no way to outlive.
  weak    for kernels that refuse those: limits, an empty environment, an own folder, and a hunt for descendants. Under
          root each helper's programs run as a user of their own; where that cannot be, they may signal and trace
          themselves only, and not what they start.

Standard library only, and only Linux.
"""

import atexit
import builtins
import ctypes
import gc
import importlib.util
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import sys
import threading
import time
import types

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
SET_PDEATHSIG, SET_DUMPABLE, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 36, 38
PIVOT_ROOT = {'x86_64': 155, 'aarch64': 41}
NOBODY, INSIDE = 65534, 1000
"""The host's user that root becomes, and the user that a program is inside its namespace."""
SYS_ADMIN = 1 << 21

VISIBLE = ('/lib', '/lib64', '/usr/lib', '/usr/lib64', '/etc/ld.so.cache')
DEVICES = ('/dev/null', '/dev/zero', '/dev/random', '/dev/urandom')
WARM = (
    'array', 'bisect', 'collections', 'copy', 'datetime', 'decimal', 'fractions', 'functools', 'heapq', 'itertools',
    'math', 'operator', 're', 'random', 'statistics', 'string', 'threading', 'typing', '_sitebuiltins',
)  # fmt: skip
"""Modules that programs like; imported once here."""


def beside(name: str) -> types.ModuleType:
    """A module of this folder, which is not on the path: some there are named as the standard library's."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f'{name}.py'))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


users = beside('sandbox_users')


def main() -> None:
    """Arguments: the control socket's number, 'strong' or 'weak', an empty folder, folders with packages, `--`, modules
    to import once."""
    control = socket.socket(fileno=int(sys.argv[1]))
    strong, folder, last = sys.argv[2] == 'strong', sys.argv[3], sys.argv.index('--')
    packages, modules, user = sys.argv[4:last], sys.argv[last + 1 :], 0
    libc = ctypes.CDLL(None, use_errno=True)
    if strong:
        wall_in(libc, folder, packages)
        if init := os.fork():  # the first process of the new PID namespace is its init
            control.close()
            os.waitpid(init, 0)
            os._exit(0)
        checked(libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    else:
        checked(libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0))
        user = users.spare_user(folder, [path for path in (*sys.path, *packages) if os.path.isdir(path)])
    checked(libc.prctl(SET_DUMPABLE, 0, 0, 0, 0))  # no program may trace this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path += [f'/packages/{i}' for i in range(len(packages))] if strong else packages
    for name in (*WARM, *modules):
        importlib.import_module(name)
    gc.freeze()
    control.send(json.dumps({'ready': True, 'apart': strong or user > 0}).encode())
    limits, streams, ready = serve(control, folder if not strong else '', user)
    program = prepare(libc, limits, streams, ready)
    run(program)


def checked(result: int) -> int:
    """The result of a C call, or OSError with its errno."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


# The walls of the whole process.


def wall_in(libc: ctypes.CDLL, folder: str, packages: list[str]) -> None:
    """New user, mount, network, IPC, host-name and (for children) PID namespaces, and a root with little in it.

    Root first builds that root, where it can still read every path, and becomes nobody: the limit on processes binds
    no process of the host's root.
    """
    proc, knobs = os.open('/proc/self', os.O_RDONLY), os.open('/proc/sys/user', os.O_RDONLY)
    everything = NEWUSER | NEWNS | NEWNET | NEWIPC | NEWUTS | NEWPID
    if os.geteuid() == 0 and users.is_mapped(NOBODY) and users.capabilities() & SYS_ADMIN:
        checked(libc.unshare(NEWNS))
        build_root(libc, folder, packages)
        users.become_user(NOBODY)
        checked(libc.prctl(SET_DUMPABLE, 1, 0, 0, 0))  # or the files of /proc/self would stay root's
        checked(libc.unshare(everything))
        map_user(proc, knobs, NOBODY, NOBODY)
    else:
        user, group = os.geteuid(), os.getegid()
        checked(libc.unshare(everything))
        map_user(proc, knobs, user, group)
        build_root(libc, folder, packages)
    os.close(proc)
    os.close(knobs)


def map_user(proc: int, knobs: int, user: int, group: int) -> None:
    """Maps the host's user and group to the ones inside, and allows no further user namespaces where that can be."""
    for folder, name, text in (
        (proc, 'setgroups', 'deny'),
        (proc, 'uid_map', f'{INSIDE} {user} 1'),
        (proc, 'gid_map', f'{INSIDE} {group} 1'),
        (knobs, 'max_user_namespaces', '0'),
    ):
        try:
            with open(os.open(name, os.O_WRONLY, dir_fd=folder), 'w') as file:
                file.write(text)
        except PermissionError:
            if folder == proc:
                raise


def build_root(libc: ctypes.CDLL, folder: str, packages: list[str]) -> None:
    """Makes `folder` the root: the interpreter's and the system's libraries, read-only, a few devices, nothing else."""

    def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
        checked(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]))

    os.umask(0o022)
    mount(None, '/', None, REC | PRIVATE)
    mount('tmpfs', folder, 'tmpfs', NOSUID | NODEV, 'size=1m,mode=755')
    stdlib = os.path.dirname(os.path.realpath(os.__file__))
    shown = {path: path for path in (*VISIBLE, f'{sys.base_prefix}/lib', stdlib, *DEVICES)}
    for path, place in [*shown.items(), *((path, f'/packages/{i}') for i, path in enumerate(packages))]:
        target = folder + place
        if not os.path.exists(path) or os.path.lexists(target):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT, 0o644))
        mount(path, target, None, BIND | REC)
        if path not in DEVICES:
            kept = os.statvfs(path).f_flag & 15  # flags of the original must be kept
            mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | kept)
    os.mkdir(f'{folder}/box')
    for name in ('tmp', 'dev/shm'):
        if not os.path.lexists(f'{folder}/{name}'):
            os.symlink('/box', f'{folder}/{name}')
    os.chdir(folder)
    checked(libc.syscall(PIVOT_ROOT[platform.machine()], b'.', b'.'))
    checked(libc.umount2(b'.', DETACH))
    os.chdir('/')
    mount(None, '/', None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)


# One program after the other.


def serve(control: socket.socket, folder: str, user: int) -> tuple[dict[str, int], list[int], int]:
    """Forks a child for each request, waits for it, kills what it leaves behind, and answers. Returns in a child only.

    A request is a JSON object of limits with four descriptors: program, input, output, errors. `kill` is another.
    """
    shared = folder and not user
    others = 2048 + users.threads().get(os.geteuid(), 0) if shared else 0  # the limit counts all of a user's processes
    while True:
        request, streams, _, _ = socket.recv_fds(control, 4096, 4)
        if not request:
            os._exit(0)
        if len(streams) != 4:
            continue  # a `kill` that crossed with the answer
        limits = json.loads(request)
        own = f'{folder}/{limits["number"]}' if folder else ''
        if own:
            os.mkdir(own, 0o700)
            limits |= {'folder': own, 'user': user, 'processes': limits['processes'] + others}
            if user:
                os.chown(own, user, user)
        ready, told = os.pipe()
        child = os.fork()
        if not child:
            control.close()
            return limits, streams, told
        for fd in (*streams, told):
            os.close(fd)
        status, usage = wait_for(control, child)
        sweep()
        answer = {
            'status': status,
            'cpu_s': usage.ru_utime + usage.ru_stime,
            'ready': os.read(ready, 1) == b'1',
            'peak_kib': usage.ru_maxrss,
        }
        os.close(ready)
        if own:
            shutil.rmtree(own, ignore_errors=True)
        control.send(json.dumps(answer).encode())


def wait_for(control: socket.socket, child: int) -> tuple[int, resource.struct_rusage]:
    """Raw wait status and usage of a child, which is killed when the other side says so or is gone."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(control, select.POLLIN)
    if any(fd == control.fileno() for fd, _ in poll.poll()):
        gone = not control.recv(16)
        os.kill(child, signal.SIGKILL)
        if gone:
            sweep()
            os._exit(0)
    os.close(ended)
    _, status, usage = os.wait4(child, 0)
    return status, usage


def sweep() -> None:
    """Kills and reaps every process that is left: as init at one blow, else child by child until there is none."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)
        else:
            for child in children():
                os.kill(child, signal.SIGKILL)
        time.sleep(0.0005)


def children() -> list[int]:
    """Own children, orphans of the program among them; a process that others have as parent becomes one later."""
    found = []
    for name in os.listdir('/proc'):
        if name.isdigit():
            try:
                with open(f'/proc/{name}/stat', 'rb') as file:
                    parent = int(file.read().rpartition(b')')[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            found += [int(name)] * (parent == os.getpid())
    return found


# In the child.


def prepare(libc: ctypes.CDLL, limits: dict, streams: list[int], ready: int) -> str:
    """Puts up this program's own walls; returns its text. Whatever fails here is no verdict about the program."""
    os.setsid()
    with open(streams[0], 'rb') as file:
        file.seek(0)
        program = file.read().decode(errors='replace')
    for target, stream in enumerate(streams[1:]):
        os.dup2(stream, target)
    os.lseek(0, 0, os.SEEK_SET)
    os.dup2(ready, 3)
    os.closerange(4, 256)
    if 'folder' in limits:
        os.chdir(limits['folder'])
        if limits['user']:
            users.become_user(limits['user'])
        checked(libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    else:
        checked(libc.unshare(NEWNS | NEWIPC))
        size = f'size={limits["disk"]},nr_inodes=4096,mode=777'.encode()
        checked(libc.mount(b'tmpfs', b'/box', b'tmpfs', ctypes.c_ulong(NOSUID | NODEV), size))
        os.chdir('/box')
    with open('main.py', 'w', encoding='utf-8', errors='replace') as file:
        file.write(program)
    for kind, low, high in (
        (resource.RLIMIT_CPU, limits['cpu'], limits['cpu'] + 1),
        (resource.RLIMIT_AS, limits['memory'], limits['memory']),
        (resource.RLIMIT_FSIZE, limits['disk'], limits['disk']),
        (resource.RLIMIT_NOFILE, limits['files'], limits['files']),
        (resource.RLIMIT_STACK, limits['stack'], limits['stack']),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_NPROC, limits['processes'], limits['processes']),
    ):
        resource.setrlimit(kind, (low, high))
    checked(libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    drop_capabilities(libc)
    if 'folder' in limits and not limits['user']:
        users.keep_to_itself(libc)
    os.write(3, b'1')
    os.close(3)
    return program


def drop_capabilities(libc: ctypes.CDLL) -> None:
    version_3, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    checked(libc.capset(version_3, nothing))


def run(program: str) -> None:
    """Runs the text as a script: own `__main__`, fresh streams, a seeded generator, the builtins of `site`."""
    os.environ.clear()
    for number, name, mode, errors in (
        (0, 'stdin', 'r', 'strict'),
        (1, 'stdout', 'w', 'strict'),
        (2, 'stderr', 'w', 'backslashreplace'),
    ):
        stream = open(number, mode, encoding='utf-8', errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f'__{name}__', stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quitter = sys.modules['_sitebuiltins'].Quitter
    builtins.exit, builtins.quit = quitter('exit', ''), quitter('quit', '')
    sys.modules['random'].seed(0)
    sys.argv, sys.path = ['main.py'], [os.getcwd(), *sys.path[1:]]
    module = types.ModuleType('__main__')
    module.__dict__.update(__file__='main.py', __builtins__=builtins)
    sys.modules['__main__'] = module
    atexit.register(leave, 1)  # runs last, after what the program registers, where it ends with an exception
    code = 0
    try:
        exec(compile(program, 'main.py', 'exec', dont_inherit=True), module.__dict__)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit.unregister(leave)
    atexit._run_exitfuncs()
    module.__dict__.clear()  # a file that was never closed is written out
    leave(code)


def leave(code: int) -> None:
    """Ends at once: to free a whole interpreter takes longer than most programs."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 255)


if __name__ == '__main__':
    main()
