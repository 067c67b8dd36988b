"""The benchmark of recording beside a model's own forward pass, at tiny sizes."""

import math

import pytest
import torch
from benchmarks.recording_overhead import MODELS, Case, Sizes, check, main, ratios

SIZES = Sizes(24, 32, 2)


@pytest.mark.parametrize("name", MODELS)
def test_recording_changes_no_output_and_finds_every_layer(name: str) -> None:
    case = Case(name, SIZES)
    check(case, SIZES)
    assert all(map(math.isfinite, ratios(case, 1)))


def test_an_output_that_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("written out", SIZES)
    monkeypatch.setattr(Case, "calls", lambda self: torch.zeros(1, 24, 32))
    with pytest.raises(AssertionError, match="recording changes the output of written out"):
        check(case, SIZES)


@pytest.mark.ci
def test_the_command_prints_a_line_for_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        main(["Llama", "--rounds", "1", "--tokens", "16"])
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.startswith("Llama ")
    with pytest.raises(SystemExit, match="2"):
        main(["Mamba"])
