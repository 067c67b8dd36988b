"""The rehearsal of the GPU check: the same command, run on a CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu_check.steps import ROOT, STEPS
from benchmarks.gpu_check.summary import MOST_LINES

FAULT = """
from saccade.engine.kernels.sdpa import Sdpa
forward = Sdpa.forward
Sdpa.forward = lambda self, *given: (0.0 * forward(self, *given)[0], None)
"""


def rehearse(out, *options, path=""):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--quick", "--out", str(out), *options]
    environment = {**os.environ, "PYTHONPATH": path} if path else None
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_step_of_the_gpu_check_runs_on_a_processor(tmp_path):
    done = rehearse(tmp_path, "--minutes", "60")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    wrong = [
        (step["name"], step["note"], each)
        for step in report["steps"]
        for each in step["findings"]
        if each["ok"] is False
    ]
    assert wrong == []
    assert [(step["name"], step["status"]) for step in report["steps"]] == [(step.name, "ok") for step in STEPS]
    assert (done.returncode, report["done"], report["ok"]) == (0, True, True), done.stdout + done.stderr
    assert done.stdout.endswith("every step passed\n")
    lines = done.stdout.splitlines()
    assert len(lines) - 2 * len(STEPS) <= MOST_LINES  # two lines of progress for each step come before the summary
    named = {each["name"] for step in report["steps"] for each in step["findings"]}
    for kernel in ("sdpa", "varlen", "tiled", "flex"):
        assert f"{kernel}: causal, width 64, bfloat16" in named
    for model in ("Qwen3", "Mistral", "Mamba-2"):
        assert {f"{model}: {check}" for check in ("audit", "record", "training step", "generate")} <= named
    for canary in ("cuDNN gradient (#196678)", "varlen_attn padding (#176793)", "Flex past its recompile limit"):
        assert {f"{canary}: torch alone", f"{canary}: first_use", f"{canary}: saccade.attention"} <= named


@pytest.mark.slow
def test_a_fault_in_a_kernel_is_in_the_summary_of_the_command(tmp_path):
    """A fault injected by sitecustomize, which Python imports before all other modules, is reported as a failure."""
    (tmp_path / "sitecustomize.py").write_text(FAULT, encoding="ascii")
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    done = rehearse(tmp_path / "out", "--minutes", "60", "--only", "numbers", path=path)
    assert done.returncode == 1
    assert "FAILED sdpa: causal, width 64, bfloat16: length 64: " in done.stdout
    assert "FAILED tiled" not in done.stdout
    assert done.stdout.endswith("NOT OK: numbers\n")


@pytest.mark.ci
def test_one_step_as_the_command_runs_it(tmp_path):
    """The shortest step runs in its own process, writes a report, and the summary comes last."""
    done = rehearse(tmp_path, "--minutes", "30", "--only", "memory")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    ((status, findings),) = [(step["status"], step["findings"]) for step in report["steps"]]
    assert (status, done.returncode) == ("ok", 0), done.stdout + (tmp_path / "steps" / "memory.log").read_text()
    assert "entropy by the definition, causal" in {each["name"] for each in findings}
    assert done.stdout.endswith("every step passed\n")


def test_a_command_that_is_ended_ends_its_step(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--out", str(tmp_path)]
    with subprocess.Popen([*command, "--only", "numbers"], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        own = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        children = []
        while not children and process.poll() is None:
            time.sleep(0.05)
            children = own.read_text(encoding="ascii").split()
        process.terminate()
        assert process.wait(60) == 143
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert [step["status"] for step in report["steps"]] == ["running"]
    assert len(children) == 1
    assert has_ended(children[0])


def has_ended(pid):
    """Return whether a process ends within a minute; a zombie counts as ended."""
    status = Path(f"/proc/{pid}/stat")
    for _ in range(1200):
        try:
            state = status.read_text(encoding="ascii").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
