"""What is said of a process that died without a word: killed, or ended from inside a library.

A small child process, which imports nothing heavy. It reads on its standard input where its parent is. If that ends
without the word 'finished', the parent is dead: after a moment in which the other processes of the run would have given
signs of life, it writes on the standard error that they share where the parent was, and who gives no more signs.
"""

import contextlib
import json
import pathlib
import sys
import time

FINISHED = 'finished'
MOMENT_S = 3.0


def signs(folder: pathlib.Path, host: int) -> dict[int, dict]:
    """The newest sign of life of every process of this start of the run, by its index; older starts left theirs too."""
    found: dict[int, dict] = {}
    for path in sorted(folder.glob('*.json')):
        with contextlib.suppress(OSError, ValueError):  # replaced while it was read
            sign = json.loads(path.read_text())
            found[sign['host']] = sign
    return {i: sign for i, sign in found.items() if host in found and sign['attempt'] == found[host]['attempt']}


def place(sign: dict) -> str:
    return f'host {sign["host"]} ({sign["name"]}), step {sign["step"]}, stage {sign["stage"]!r}'


def main(folder: str, host: str) -> None:
    last = ''
    for line in sys.stdin:
        last = line.strip()
    if last == FINISHED:
        return
    before = signs(pathlib.Path(folder), int(host))
    time.sleep(MOMENT_S)
    after = signs(pathlib.Path(folder), int(host))
    faults = [f'{place(s)} gave up: {s["fault"]}' for s in after.values() if s['fault'] not in ('', FINISHED)]
    silent = [
        f'{place(sign)}: no sign of life since then'
        for index, sign in after.items()
        if index != int(host) and sign['fault'] != FINISHED and before.get(index, sign)['beat'] == sign['beat']
    ]
    cause = '; '.join(faults + silent) or 'the other processes live on'
    sys.stderr.write(f'The run ends: {last} died without a word; {cause}\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
