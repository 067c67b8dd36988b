"""``saccade compare --train`` as a user runs it."""

import signal
import subprocess
import sys
import time

import pytest

from saccade.learning import MIXERS, QUESTIONS, Settings, planned, run_all, runs
from saccade.learning.training import Outcome

FEW = ["--only", "MQAR", "--only", "LSTM", "--only", "full", "--seeds", "2", "--steps", "2"]


def at_once(left, settings, workers):
    return [(run, Outcome(0.25 if run.mixer == "LSTM" else 1.0, settings.steps, 30.0, 10)) for run in left]


@pytest.fixture
def train(run, monkeypatch):
    monkeypatch.setattr(runs, "_train_all", at_once)
    return lambda *arguments: run("compare", "--train", *arguments)


# Two processes import everything anew, which takes seconds: those that are ended, below, stand for them in every run.
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_trains_and_prints_a_table_and_does_so_once(run, tmp_path, workers):
    given = ["compare", "--train", *FEW, "--workers", workers]
    result = run(*given)
    assert result.exit_code == 0, result.output
    lines = [line.split("  ")[0].strip() for line in result.stdout.splitlines()]
    assert lines[1:5] == ["full", "LSTM", "the most common answer", ""]
    assert "mean over 2 seeds" in result.stdout
    kept = {path.name: path.read_bytes() for path in (tmp_path / "saccade-runs").iterdir()}
    assert sorted(kept) == ["mqar-full-0.json", "mqar-full-1.json", "mqar-lstm-0.json", "mqar-lstm-1.json"]
    assert run(*given).stdout == result.stdout
    assert {path.name: path.read_bytes() for path in (tmp_path / "saccade-runs").iterdir()} == kept


@pytest.mark.ci
def test_everything_is_trained_unless_names_are_given(train, tmp_path):
    result = train("--markdown", "--runs", "all", "--out", "learned.png")
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in result.stdout.splitlines()]
    assert lines[0] == list(QUESTIONS)
    assert [line[0] for line in lines[2 : 2 + len(MIXERS)]] == list(MIXERS)
    assert lines[2] == ["full", *["learned, 600"] * 5]
    row = next(line for line in lines if line[0] == "Linformer")
    assert row == ["Linformer", "learned, 600", "-", "learned, 600", "learned, 600", "-"]
    assert len(list((tmp_path / "all").iterdir())) == 399 == len(planned(list(MIXERS), list(QUESTIONS), 3))
    assert "399 runs, 200 minutes of one core" in result.stdout
    assert result.stdout.endswith("wrote learned.png\n")
    assert (tmp_path / "learned.png").read_bytes().startswith(b"\x89PNG")


WRONG = {
    "a name": (["--only", "MQR"], "--only must be a task or a mixer; got MQR.\nTasks: MQAR; induction"),
    "no pair": (["--only", "Linformer", "--only", "passkey"], "--only must leave a mixer that the task can train; got"),
    "a text": (["some", "text"], "TEXT must be left out if --train is given, which reads no text."),
    "a layer": (["--layer", "1"], "--layer must be left out if --train is given"),
    "a file": (["--runs", "taken/here"], "--runs must be a folder that can be written; got taken/here"),
    "other settings": (["--runs", "others"], "--runs must contain runs with Settings(steps=600, batch_size=32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_training(train, tmp_path, monkeypatch, name):
    (tmp_path / "taken").write_text("a file")
    run_all(planned(["full"], ["MQAR"], 1), tmp_path / "others", Settings(steps=3))
    monkeypatch.setattr(runs, "_train_all", lambda left, *others: pytest.fail(f"trains {left}"))
    arguments, words = WRONG[name]
    result = train(*arguments)
    assert result.exit_code == 2, result.output
    assert result.output.startswith(f"saccade compare: {words}")


def test_options_of_training_do_nothing_beside_a_text(run):
    result = run("compare", "--seeds", "3", "some text")
    assert result.exit_code == 2
    assert result.output.strip() == (
        "saccade compare: --seeds must be left out if TEXT is given, which trains nothing; --train does."
    )


PROGRAM = """
import signal
from saccade.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever started the tests may have switched off
    main()
"""


_SLOW = [pytest.param(by, marks=pytest.mark.slow) for by in (signal.SIGTERM, signal.SIGKILL)]


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, *_SLOW])
def test_an_end_leaves_whole_files_and_no_process(tmp_path, by):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = ["compare", "--train", "--only", "MQAR", "--steps", "1", "--workers", "2"]
    with subprocess.Popen([sys.executable, str(program), *arguments], cwd=tmp_path, stderr=subprocess.PIPE) as process:
        while not list(tmp_path.glob("saccade-runs/*.json")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(by)
        _, errors = process.communicate(timeout=120)  # a child that lives on would hold the pipe open
    assert process.returncode == (-signal.SIGKILL if by == signal.SIGKILL else 130), errors
    assert {path.suffix for path in (tmp_path / "saccade-runs").iterdir()} == {".json"}
    read = run_all(planned(["full"], ["MQAR"], 1), tmp_path / "saccade-runs", Settings(steps=1))
    assert len(read) == 1
