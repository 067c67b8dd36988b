"""Runs are kept, are not made twice, and come out the same on any number of processes."""

import json

import pytest

from saccade.learning import Run, Settings, planned, run_all, runs
from saccade.learning.runs import legend, rows
from saccade.learning.training import Outcome

SHORT = Settings(steps=2, texts=64, fresh=16, batch_size=4, ask_every=2)
PLAN = planned(["full", "LSTM"], ["MQAR"], 2)
OUTCOME = Outcome(0.5, 2, 1.0, 10)


def outcomes(folder, workers=1, plan=PLAN, settings=SHORT):
    told = []
    found = run_all(plan, folder, settings, workers=workers, progress=told.append)
    assert sorted(told) == sorted(plan)
    return {run: outcome._replace(seconds=0.0) for run, outcome in found.items()}


# Processes import everything anew; one that trains is begun in every run by tests/cli/test_compare_train.py.
@pytest.mark.slow
def test_processes_make_no_difference_and_nothing_runs_twice(tmp_path, monkeypatch):
    one = outcomes(tmp_path / "one")
    assert list(one) == PLAN
    assert outcomes(tmp_path / "two", workers=2) == one
    monkeypatch.setattr(runs, "_train_all", lambda left, *others: [] if not left else pytest.fail(f"trains {left}"))
    assert outcomes(tmp_path / "one") == one
    assert len(list((tmp_path / "one").iterdir())) == len(PLAN)


def test_finished_trainings_are_kept_after_an_interrupt(tmp_path, monkeypatch):
    def interrupted(left, *others):
        yield left[0], OUTCOME
        raise KeyboardInterrupt("now")

    monkeypatch.setattr(runs, "_train_all", interrupted)
    with pytest.raises(KeyboardInterrupt, match="now"):
        run_all(PLAN, tmp_path, SHORT)
    assert [path.name for path in tmp_path.iterdir()] == [PLAN[0].file_name]
    monkeypatch.setattr(runs, "_train_all", at_once)
    assert run_all(PLAN, tmp_path, SHORT) == dict.fromkeys(PLAN, OUTCOME)


def at_once(left, *others):
    return [(run, OUTCOME) for run in left]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder of runs that took no time."""
    monkeypatch.setattr(runs, "_train_all", at_once)
    run_all(PLAN, tmp_path, SHORT)
    return tmp_path


def broken(path):
    path.write_text(path.read_text()[:20])


def of_others(path):
    path.write_text(path.read_text().replace('"accuracy"', '"share"'))


def changed(path):
    path.write_text(path.read_text().replace('"accuracy": ', '"accuracy": 0.'))


def better(path):
    path.write_text(path.read_text().replace('"steps": 2,', '"steps": 1,', 1))


@pytest.mark.parametrize("spoil", [broken, of_others, changed, better])
def test_a_file_that_is_no_outcome_is_refused(kept, spoil):
    path = kept / PLAN[2].file_name
    spoil(path)
    with pytest.raises(ValueError, match=f"contain outcomes of runs; got .*{path.name}.*\nHint: remove {path.name}"):
        run_all(PLAN, kept, SHORT)


def test_runs_of_other_settings_are_refused(kept):
    with pytest.raises(
        ValueError, match=r"folder must contain runs with Settings\(steps=3, " r".* with other settings\.\nHint"
    ):
        run_all(PLAN, kept, SHORT._replace(steps=3))


def test_mixers_that_see_later_tokens_are_not_asked_what_stands_there():
    plan = planned(["full", "Linformer"], ["induction", "MQAR"], 2)
    assert {run.question for run in plan if run.mixer == "Linformer"} == {"MQAR"}
    assert len({run.file_name for run in plan}) == len(plan) == 6


def test_a_table_says_what_was_learned():
    found = {Run("full", "MQAR", seed): Outcome(0.995, 100 * (seed + 1), 60.0, 1) for seed in range(3)}
    found |= {Run("LSTM", "MQAR", seed): Outcome(0.1 * seed, 600, 60.0, 1) for seed in range(3)}
    found |= {Run("LSTM", "ListOps", seed): Outcome(0.5, 600, 60.0, 1) for seed in range(3)}
    head, *lines, last = rows(found)
    assert head == ["", "MQAR", "ListOps"]
    assert lines == [["full", "learned, 200", "-"], ["LSTM", "0.10 (0.00 to 0.20)", "0.50 (0.50 to 0.50)"]]
    assert last[0] == "the most common answer"
    assert 1 / 64 < float(last[1]) < 0.03
    assert 0.1 < float(last[2]) < 0.4
    assert "mean over 3 seeds" in legend(found)
    assert "9 runs, 9 minutes" in legend(found)
    assert json.dumps(rows(found))
