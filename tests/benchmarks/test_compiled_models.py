"""The trials of compiled and exported models: every model in every form, and what a trial notices."""

import importlib.util

import pytest
import torch
from benchmarks.compiled_models.__main__ import main, written
from benchmarks.compiled_models.rows import ROWS
from benchmarks.compiled_models.trials import TRIALS, judge

pytestmark = pytest.mark.filterwarnings("ignore")
PACKAGES = {"ONNX": ("onnxscript", "onnxruntime")}


@pytest.mark.slow
@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("row", ROWS)
def test_every_model_runs_in_every_form_with_no_more_graphs_than_sdpa(row: str, trial: str) -> None:
    for package in PACKAGES.get(trial, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the exporter to ONNX and its check need {package}")
    verdict = judge(row, trial)
    if trial == "generation" and not ROWS[row].generates:
        assert verdict is None
    elif trial in ("forward", "training", "generation"):
        assert isinstance(verdict, list)
        assert 1 <= verdict[0] <= verdict[1]
    else:
        assert verdict == "equal"


@pytest.mark.ci
def test_a_trial_notices_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.compiled_models.trials.LENGTHS", (9,))
    assert judge("MultiHeadAttention", "forward") == [1, 1]
    monkeypatch.setattr(torch, "compile", lambda model, **_: lambda *x: model(*x) + 1e-4)
    with pytest.raises(AssertionError, match="not close"):
        judge("MultiHeadAttention", "forward")


@pytest.mark.parametrize("language, mark", [("en", "not tried"), ("zh", "未测试")])
def test_a_cell_that_was_not_tried_is_marked(language: str, mark: str) -> None:
    *others, row = written({"T5": {"forward": [2, 3], "export": "equal", "generation": None}}, language).split("\n")
    assert row == f"| T5 | 2 / 3 | {mark} | | {'yes' if language == 'en' else '是'} | {mark} | {mark} |"
    assert others[-1].count(mark) == len(TRIALS)


def test_the_command_refuses_unknown_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--rows", "another"])
    assert "invalid choice" in capsys.readouterr().err
