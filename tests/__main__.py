"""Everything that must hold before a change lands: `python -m tests`. Arguments go to pytest, e.g. `-k checkpoint`."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
WORKERS = min(os.cpu_count() or 1, 8)
"""pytest processes: one a core, as each test is mostly XLA compiling on one thread; a worker takes about 1 GB."""

CHECKS = {
    'ruff check': ['ruff', 'check', '.'],
    'ruff format': ['ruff', 'format', '--check', '.'],
    'mypy': ['mypy'],
    'pytest': ['pytest', '-q', '-n', str(WORKERS), '--dist', 'loadfile'],
}


def main() -> int:
    """Runs every check, pytest last, and returns 0 if all of them pass."""
    failed = []
    for name, command in CHECKS.items():
        print(f'== {name}', flush=True)
        extra = sys.argv[1:] if name == 'pytest' else []
        if subprocess.run([sys.executable, '-m', *command, *extra], cwd=ROOT, check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f'failed: {", ".join(failed)}', file=sys.stderr)
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
