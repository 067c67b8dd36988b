"""The example that trains over ranks has the same losses for any number of processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "train_over_ranks.py"


def losses(processes, *options):
    """Run the example and return the printed losses, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    found = subprocess.run(
        [*command, str(EXAMPLE), "--length", "256", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stdout.splitlines() if line.startswith("step ")]
    return {int(line.split()[1][:-1]): float(line.split()[2]) for line in lines}


@pytest.mark.slow
def test_losses_are_those_of_one_process_and_runs_go_on(tmp_path):
    whole = losses(1, "--steps", "16")
    assert whole[15] < whole[0] - 1
    options = ("--context", "2", "--folder", str(tmp_path))
    begun = losses(4, "--steps", "11", *options)
    assert begun == pytest.approx({step: whole[step] for step in (0, 5)} | {10: begun[10]}, abs=2e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]
    gone_on = losses(2, "--steps", "6", *options)
    assert gone_on == pytest.approx({step: whole[step] for step in (10, 15)}, abs=2e-4)
