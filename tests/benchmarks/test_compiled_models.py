"""The trials of compiled and exported models: every model in every form, and what a trial notices."""

import importlib.util
import json

import pytest
import torch
from benchmarks.compiled_models import speed
from benchmarks.compiled_models.__main__ import COMMAND, RESULTS, main, written
from benchmarks.compiled_models.rows import ROWS
from benchmarks.compiled_models.trials import TRIALS, judge
from benchmarks.generated_part import generated

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


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_shows_the_stored_results(language: str) -> None:
    results = json.loads(RESULTS.read_text("utf-8"))
    page = (RESULTS.parent / language / "compile-export.md").read_text("utf-8")
    assert generated(page, COMMAND) == written(results, language)
    assert all(set(results[row]) == set(TRIALS) for row in ROWS)
    counts = [verdict for row in ROWS for verdict in results[row].values() if isinstance(verdict, list)]
    assert all(ours <= theirs for ours, theirs in counts)


@pytest.mark.slow
def test_the_speed_of_a_compiled_layer_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    threads = torch.get_num_threads()
    try:
        speed.main(tokens=64, rounds=1)
    finally:
        torch.set_num_threads(threads)
    assert "64 tokens, window 1,024:" in capsys.readouterr().out


def test_the_command_refuses_unknown_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--rows", "another"])
    assert "invalid choice" in capsys.readouterr().err
