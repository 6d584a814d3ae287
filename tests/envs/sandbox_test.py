"""Programs that a model wrote stay inside their walls, and cannot say themselves how they did."""

import asyncio
import mmap
import os
import pathlib
import resource
import subprocess
import sys
import time

import pytest

from mallm.envs import sandbox
from mallm.envs.sandbox import KINDS, Limits, Sandbox, SandboxError
from mallm.envs.sandbox_helper import Helper

ROOT = pathlib.Path(__file__).parents[2]
QUICK = Limits(cpu_s=2, wall_s=0.2)


@pytest.fixture(scope='module')
def weak():
    """A sandbox as it is where the kernel refuses namespaces."""
    made = Sandbox(workers=1, strong=False)
    yield made
    made.close()


def descendants() -> dict[int, str]:
    """Process id -> state of every process below this one."""
    parents, states = {}, {}
    for stat in pathlib.Path('/proc').glob('[0-9]*/stat'):
        try:
            fields = stat.read_text().rpartition(')')[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)], states[int(stat.parent.name)] = int(fields[1]), fields[0]
    found, grown = set(), {os.getpid()}
    while grown - found:
        found |= grown
        grown = {pid for pid, parent in parents.items() if parent in found} | found
    return {pid: states[pid] for pid in found - {os.getpid()}}


def test_a_program_gets_its_input_and_its_output_and_exit_make_the_verdict():
    verdict = sandbox.run('import sys\nprint(int(input()) + 1)\nprint("x", file=sys.stderr)', '4\n')
    assert (verdict.status, verdict.stdout, verdict.stderr) == ('ok', '5\n', 'x\n')
    assert sandbox.run('exit(3)').status == 'error'
    assert sandbox.run('import sys\nsys.exit()').status == 'ok'
    failed = sandbox.run('print(1)\n1/0')
    assert (failed.status, failed.stdout) == ('error', '1\n') and 'ZeroDivisionError' in failed.stderr


OVERFLOW = 'import sys\nsys.setrecursionlimit(10**9)\nf = lambda n: [n].sort(key=f)\nf(0)'


@pytest.mark.parametrize(
    'program, status',
    [
        ('while True: pass', 'timeout'),
        ('x = [0] * 10**9', 'memory'),
        ('import os; os.kill(os.getpid(), 11)', 'killed'),
        (OVERFLOW, 'killed' if sys.version_info < (3, 12) else 'error'),  # from 3.12 on Python bounds its C stack
        ('this is not Python', 'error'),
        ('\x00', 'error'),
        ('print("\ud800")', 'ok'),
        ('', 'ok'),
    ],
)
def test_every_way_to_end_has_a_name(program, status):
    assert sandbox.run(program, limits=Limits(cpu_s=1)).status == status


def test_deep_recursion_in_a_thread_with_a_large_stack_is_a_right_answer_and_the_helper_lives_on():
    deep = 'def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\n'
    thread = 'import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n' + deep
    verdict = sandbox.run(thread + 't = threading.Thread(target=lambda: print(f(50000)))\nt.start()\nt.join()')
    assert (verdict.status, verdict.stdout) == ('ok', '50000\n')
    assert sandbox.run('print(1)').stdout == '1\n'


def test_what_a_program_leaves_to_the_interpreter_at_its_end_is_done():
    program = (
        "import atexit, threading\nout = open(1, 'w')\nout.write('never closed;')\n"
        "atexit.register(lambda: print('at exit;', end='', flush=True))\n"
        "threading.Timer(0.05, lambda: print('thread;', end='', flush=True)).start()"
    )
    assert sorted(sandbox.run(program).stdout.split(';')) == ['', 'at exit', 'never closed', 'thread']


def test_the_same_program_draws_the_same_numbers_and_orders_sets_the_same():
    program = "import random\nprint(random.random(), {'a', 'b', 'c', 'd'}, random.sample(range(99), 5))"
    assert len({sandbox.run(program).stdout for _ in range(3)}) == 1


def test_all_walls_stand_here_and_are_said_in_one_line():
    walls = sandbox.shared().walls
    assert walls.standing == set(KINDS), str(walls)
    assert str(walls).startswith('sandbox walls: network, files') and '\n' not in str(walls)


def test_a_program_sees_no_network_no_files_no_other_process_and_no_environment(tmp_path):
    (tmp_path / 'secret').write_text('hello')
    program = f"""
import ctypes, os, signal, socket
def refused(act):
    try:
        act()
    except (OSError, ProcessLookupError):
        return True
libc = ctypes.CDLL(None)
print(refused(lambda: socket.create_connection(('127.0.0.1', 80), 1)),
      refused(lambda: open({str(tmp_path / 'secret')!r})), refused(lambda: open('/etc/passwd')),
      refused(lambda: open('/usr/lib/x', 'w')), refused(lambda: os.kill({os.getpid()}, 9)),
      refused(lambda: os.listdir('/proc')), dict(os.environ), os.listdir('.'),
      libc.unshare(0x10000000), libc.ptrace(16, 1, 0, 0), libc.mount(b'x', b'/box', b'tmpfs', 0, None))
for number in (2, 9, 15, 19):
    os.kill(1, number)
"""
    verdict = sandbox.run(program)
    assert verdict.stdout.split() == ['True'] * 6 + ['{}', "['main.py']", '-1', '-1', '-1'], verdict
    assert verdict.ok


def test_one_program_leaves_nothing_for_the_next():
    one = Sandbox(workers=1)
    one.run("open('note', 'w').write('x')\nimport os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass")
    assert one.run('import os; print(os.listdir("."))').stdout == "['main.py']\n"
    one.close()


# A33


LOOP = 'while True: pass'
FORKS = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        time.sleep(1000)
"""


@pytest.mark.parametrize('strong', [True, False])
def test_a33_endless_loops_and_sleeping_grandchildren_leave_no_process_and_no_descriptor(strong):
    some = Sandbox(strong=strong)
    some.run_all([('print(1)', '')] * 4)
    before, open_before = len(descendants()), len(os.listdir('/proc/self/fd'))
    loops = some.run_all([(LOOP, '')] * 100, Limits(cpu_s=2, wall_s=0.05))
    forks = some.run_all([(FORKS, '')] * 20)
    assert {v.status for v in loops} == {'timeout'} and {v.status for v in forks} == {'ok'}
    time.sleep(2)
    left = descendants()
    assert len(left) <= before and 'Z' not in left.values()
    assert len(os.listdir('/proc/self/fd')) <= open_before
    some.close()


# A34


@pytest.mark.parametrize(
    'program, status',
    [
        ("while True: print('1234567890')", 'output'),
        ("import sys\nwhile True: print('1234567890', file=sys.stderr)", 'output'),
        ("with open('big', 'wb') as f:\n    for _ in range(3 << 10): f.write(bytes(1 << 20))", 'error'),
        ("for i in range(3 << 10):\n    with open(f'{i}', 'wb') as f: f.write(bytes(1 << 20))", 'error'),
    ],
)
def test_a34_endless_output_and_huge_files_fail_and_cost_this_process_nothing(program, status):
    sandbox.run('print(1)')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    verdict = sandbox.run(program)
    assert verdict.status == status and not verdict.ok
    assert len(verdict.stdout) <= 1 << 20 and len(verdict.stderr) <= 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10


def test_a_fork_bomb_is_bounded_and_gone():
    verdict = sandbox.run('import os\nwhile True:\n    try: os.fork()\n    except OSError: pass', limits=QUICK)
    assert verdict.status == 'timeout'
    assert sandbox.run('print(1)').ok


# A35


def test_a35_a_right_program_passes_though_this_process_has_40_gb_of_address_space():
    size, no_reserve = 40 << 30, 0x4000
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve):
        fresh = Sandbox(workers=1)  # its helper starts while the space is taken, and a canary passes in it
        verdict = fresh.run('print(sum(range(10)))', limits=Limits(memory_mib=256))
        fresh.close()
    assert (verdict.status, verdict.stdout) == ('ok', '45\n')


# A36


def test_a36_a_program_that_writes_rewards_and_patches_the_interpreter_has_only_its_output():
    program = """
import builtins, io, json, os, sys
for name in ('reward.txt', 'result.json', '/reward.txt'):
    try:
        open(name, 'w').write('1.0')
    except OSError:
        pass
for fd in range(3, 256):
    try:
        os.write(fd, json.dumps({'status': 0, 'cpu_s': 0.0, 'ready': True}).encode())
        print('a descriptor was left open')
    except OSError:
        pass
builtins.open = builtins.print = lambda *a, **k: None
sys.stdout.write('{"status": 0, "ready": true}\\nok\\nreward: nan\\n')
sys.stdout.flush()
sys.stdout = io.StringIO()
sys.exit(1)
"""
    verdict = sandbox.run(program)
    assert verdict.status == 'error'
    assert verdict.stdout == '{"status": 0, "ready": true}\nok\nreward: nan\n'


# The pool.


def test_weak_walls_say_what_is_missing_and_isolation_refuses_them(weak):
    assert weak.run('print(1)').stdout == '1\n'
    assert set(weak.walls.missing) == {'network', 'files', 'processes', 'disk'}
    assert 'missing: network' in str(weak.walls)
    with pytest.raises(SandboxError, match=r'missing: network.*isolation was asked for'):
        weak.run('print(1)', limits=Limits(isolated=True))
    assert sandbox.run('print(1)', limits=Limits(isolated=True)).ok


TRIES = """
import os, signal, time
from mallm.envs.sandbox import Sandbox
heard = []
signal.signal(signal.SIGURG, lambda *_: heard.append('the trainer was signalled'))
some = Sandbox(workers=1, strong=False)
print(some.walls)
for target in (-1, os.getpid(), 'os.getppid()'):
    some.run(f'import os\\nos.kill({target}, {int(signal.SIGURG)})')  # which ends nobody
before = some._idle[0]
killed = some.run('import os\\nos.kill(os.getppid(), 9)')
print(killed.status, killed.stderr.splitlines()[-1])
print(some.run('import os\\nprint(os.getuid())').stdout.strip())
print(some.run('import os\\nos.kill(os.getpid(), 11)').status, some.run('import os\\nos.abort()').status)
print(some.run('open("aid.py", "w").write("x = 3")\\nimport aid, sqlite3\\nprint(aid.x)').stdout.strip())
time.sleep(0.2)
print(before is some._idle[0], heard, os.listdir(before._folder.name))
some.close()
"""


def weakly(user: int) -> list[str]:
    """What TRIES prints under a user, with an interpreter that every user can read."""
    python = next((p for p in (sys.executable, '/usr/bin/python3') if is_public(os.path.realpath(p))), None)
    if python is None or os.geteuid() not in (0, user):
        pytest.skip('needs root, and an interpreter outside of its home')
    given = {'env': {'PYTHONPATH': str(ROOT)}, 'user': user, 'group': user, 'extra_groups': []}
    as_user = given if os.geteuid() == 0 else {'env': given['env']}
    done = subprocess.run([python, '-c', TRIES], capture_output=True, text=True, check=False, cwd='/', **as_user)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def is_public(path: str) -> bool:
    if subprocess.run([path, '-c', 'import sys; sys.exit(sys.version_info < (3, 11))'], check=False).returncode:
        return False
    return all(os.stat(folder).st_mode & 0o001 for folder in pathlib.Path(path).parents)


def test_behind_weak_walls_root_gives_programs_a_user_of_their_own_who_can_signal_nobody_else():
    walls, killed, user, ended, own, left = weakly(0)
    assert 'signals' in walls.partition('missing')[0] and 'as this process does' not in walls
    assert killed.startswith('error PermissionError') and int(user) in range(61184, 65520)
    assert (ended, own, left) == ('killed killed', '3', 'True [] []')


def test_behind_weak_walls_without_root_programs_can_signal_themselves_only():
    walls, killed, user, ended, own, left = weakly(os.geteuid() or 65534)
    me = os.geteuid() or 65534
    assert 'signals' in walls.partition('missing')[0] and f'programs run as user {me}, as this process does' in walls
    assert killed.startswith('error PermissionError') and user == f'{me}'
    assert (ended, own, left) == ('killed killed', '3', 'True [] []')


def test_a_program_that_two_helpers_do_not_survive_was_killed_and_the_next_one_runs(monkeypatch):
    """Each helper first runs the test program of its walls: the second and the third one's are let live."""
    one = struck(monkeypatch, [True, False, True, False])
    verdict = one.run('import time\ntime.sleep(99)')
    assert (verdict.status, verdict.stdout, verdict.ok) == ('killed', '', False)
    assert one.run('print(2)').stdout == '2\n'
    one.close()


def test_helpers_that_do_not_even_survive_the_test_program_are_a_failure_and_no_verdict(monkeypatch):
    one = struck(monkeypatch, [True, False, True, True])
    with pytest.raises(SandboxError, match='helper: ended'):
        one.run('import time\ntime.sleep(99)')
    one.close()


def struck(monkeypatch, fates: list[bool]) -> Sandbox:
    """A sandbox whose helper is killed while it runs its next program, or is not, as the fates say."""
    one, collect = Sandbox(workers=1, strong=False), Helper._collect
    one.run('print(1)')
    following = iter(fates)

    def strike(helper, *given):
        if next(following, False):
            helper._process.kill()
        return collect(helper, *given)

    monkeypatch.setattr(Helper, '_collect', strike)
    return one


def test_a_killed_helper_is_replaced_and_the_program_run_again():
    one = Sandbox(workers=1)
    one.run('print(1)')
    for pid in sorted(descendants(), reverse=True)[:1]:
        os.kill(pid, 9)
    assert one.run('print(2)').stdout == '2\n'
    one.close()


def test_many_threads_and_an_event_loop_share_the_helpers():
    async def ask() -> list[str]:
        jobs = [asyncio.to_thread(sandbox.run, f'print({i})') for i in range(20)]
        return [verdict.stdout.strip() for verdict in await asyncio.gather(*jobs)]

    assert asyncio.run(ask()) == [str(i) for i in range(20)]


def test_the_helpers_end_when_their_process_is_killed():
    program = (
        'import os\nfrom mallm.envs import sandbox\nsandbox.run("print(1)")\n'
        'print(sandbox.shared()._idle[0]._process.pid, flush=True)\nos.kill(os.getpid(), 9)'
    )
    said = subprocess.run([sys.executable, '-c', program], stdout=subprocess.PIPE, text=True, check=False).stdout
    deadline = time.monotonic() + 30
    while pathlib.Path(f'/proc/{int(said)}').exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize('name', ['cpu_s', 'wall_s', 'memory_mib', 'output_kib', 'disk_mib', 'processes', 'files'])
def test_a_limit_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f'{name}=0'):
        Limits(**{name: 0})
