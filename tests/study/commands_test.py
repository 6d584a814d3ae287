"""The comparisons as a user starts them, tiny: what is left behind, and that nothing is run twice."""

import json
import os
import pathlib
import subprocess
import sys

from experiments import paper

ROOT = pathlib.Path(__file__).parents[2]


def ran(folder: pathlib.Path, *words: str) -> str:
    """What a command of `experiments` prints, started in an empty folder without a network for wandb."""
    env = os.environ | {'PYTHONPATH': str(ROOT), 'WANDB_MODE': 'offline'}
    command = [sys.executable, '-m', *words]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_wandb_agents_command_runs_its_cell_once_and_logs_it_to_wandb(tmp_path):
    words = ('experiments.sweep', 'k', '--smoke', '--cell', 'sampling.k=2', '--seed', '1')
    ran(tmp_path, *words)
    (folder,) = tmp_path.glob('runs/ablations_smoke/sokoban/k/*')
    config, summary = (json.loads((folder / name).read_text()) for name in ('config.json', 'summary.json'))
    assert folder.name == 'sampling.k=2-seed1' and config['sampling']['k'] == 2 and summary['faults'] == 0
    assert list(folder.glob('wandb/offline-run-*/*.wandb'))
    written = (folder / 'summary.json').stat().st_mtime_ns
    ran(tmp_path, *words)
    assert (folder / 'summary.json').stat().st_mtime_ns == written and list(folder.parent.iterdir()) == [folder]


def test_the_papers_table_stands_beside_ours_after_one_cell(tmp_path):
    told = ran(tmp_path, 'experiments.paper_table', '--smoke', '--tasks', 'sokoban', '--only', 'at_grpo')
    rows = {line.split(' | ')[0].strip('| '): line for line in told.splitlines() if line.startswith('| ')}
    assert 'paper, Qwen3-1.7B' in rows['method'] and rows['MAS, cloned'].split(' | ')[1] == '1'
    columns = (paper.SMALL['sokoban'], paper.LARGE['sokoban'])
    reported = ' | '.join(f'{column["MAS + AT-GRPO, shared"]:g} %' for column in columns)
    assert rows['AT-GRPO, shared'].endswith(f'| reference | {reported} |')
    assert told.strip().endswith((tmp_path / 'runs/paper_smoke/paper_table.md').read_text().strip())
