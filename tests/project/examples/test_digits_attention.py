"""The example runs in seconds, goes on where it was stopped, and ends as if it had never stopped."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "digits_attention.py"


@pytest.fixture
def trained(example, monkeypatch):
    """Names and epochs trained, as they are trained."""
    seen = []
    original = example.Run._learn

    def counting(run):
        seen.append((run.name, run.seed, run.step))
        return original(run)

    monkeypatch.setattr(example.Run, "_learn", counting)
    return seen


def _without_time(rows):
    return [{key: value for key, value in row.items() if key not in ("seconds", "time")} for row in rows]


# Every module is trained twice; what this example shares with read_numbers.py is stopped in every run there.
@pytest.mark.slow
def test_a_stopped_run_goes_on_and_ends_the_same(example, trained, monkeypatch, tmp_path, capsys):
    whole = example.main(["--quick", "--out", str(tmp_path / "whole")])
    every = [(name, 0, epoch) for name in example.MODULES for epoch in range(example.QUICK.steps)]
    assert trained == every
    trained.clear()

    save = example.Run._save

    def stop(run):
        save(run)
        if (run.name, run.step) == ("CBAM", 1):
            raise KeyboardInterrupt("after an epoch")

    with monkeypatch.context() as patch:
        patch.setattr(example.Run, "_save", stop)
        with pytest.raises(KeyboardInterrupt, match="after an epoch"):
            example.main(["--quick", "--out", str(tmp_path / "stopped")])
    assert trained == every[: every.index(("CBAM", 0, 0)) + 1]
    resumed = example.main(["--quick", "--out", str(tmp_path / "stopped")])
    assert trained == every
    assert _without_time(resumed) == _without_time(whole)
    digits = example.load(example.QUICK)
    for name in example.MODULES:
        one, other = (example.Run(name, 0, example.QUICK, digits, tmp_path / folder) for folder in ("whole", "stopped"))
        assert one.step == other.step == example.QUICK.steps
        for key, own in one.module.state_dict().items():
            assert torch.equal(own, other.module.state_dict()[key])

    # Nothing is left to train, and nothing half-written is left behind.
    trained.clear()
    assert _without_time(example.main(["--quick", "--out", str(tmp_path / "stopped")])) == _without_time(whole)
    assert trained == []
    assert not list(tmp_path.rglob("*.part"))
    assert "wrote" in capsys.readouterr().out


@pytest.mark.ci
def test_written_results_equal_returned_results(example, tmp_path, capsys):
    rows = example.main(["--quick", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    assert told["settings"]["steps"] == example.QUICK.steps
    assert told["title"].startswith(f"{1797 - example.QUICK.train_size:,} test pictures")
    assert (tmp_path / "looks.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for row in rows:
        assert f"{row['mean']:.2%}" in printed
        assert re.search(rf"{row['who']}\W", printed)


@pytest.mark.ci
def test_a_checkpoint_of_other_settings_is_not_used(example, tmp_path):
    example.main(["--quick", "--out", str(tmp_path)])
    digits = example.load(example.QUICK)
    assert example.Run("SE", 0, example.QUICK, digits, tmp_path).step == example.QUICK.steps
    other = example.Run("SE", 0, dataclasses.replace(example.QUICK, learning_rate=1e-3), digits, tmp_path)
    assert other.step == 0
    assert other.starts_over


def test_training_learns_and_modules_are_of_one_size(example, tmp_path):
    settings = example.Settings(channels=16, steps=6, train_size=300, seeds=(0,))
    torch.set_num_threads(1)
    digits = example.load(settings)
    run = example.Run("SE", 0, settings, digits, tmp_path)
    before = run.accuracy(digits)
    run.train()
    assert run.accuracy(digits) > max(0.5, before)
    channels = example.Settings().channels
    sizes = {
        name: sum(p.numel() for p in example.Network(make(channels), channels).parameters())
        for name, make in example.MODULES.items()
    }
    assert max(sizes.values()) < 1.02 * min(sizes.values())


def test_a_map_of_ink_has_all_its_weight_on_ink(example, tmp_path, monkeypatch):
    settings = dataclasses.replace(example.QUICK, steps=0)
    digits = example.load(settings)
    runs = {name: example.Run(name, 0, settings, digits, tmp_path) for name in example.MODULES}
    assert example.ink_over_paper(runs["plain"], digits) is example.ink_over_paper(runs["SE"], digits) is None
    cbam = runs["CBAM"]
    ink = 1.0 + 3.0 * (digits.test > 0.5)
    monkeypatch.setattr(cbam.module.module, "weights", lambda features: example.vision.Gates(features, ink))
    assert example.ink_over_paper(cbam, digits) == pytest.approx(4.0)
    # Every row of a matrix sums to 1, so all weight together is the number of positions.
    module = runs["non-local"].module.module
    uniform = torch.zeros(len(digits.test), 1, 64, 1)
    monkeypatch.setattr(
        module, "matrix", lambda features: example.vision.NonLocal(1).matrix(uniform.reshape(-1, 1, 8, 8))
    )
    assert example.ink_over_paper(runs["non-local"], digits) == pytest.approx(1.0)


def test_the_same_pictures_are_tested_for_every_seed(example):
    first, second = (example.load(example.Settings(seeds=seeds)) for seeds in ((0,), (1, 2)))
    assert torch.equal(first.test, second.test)
    assert len(first.train) + len(first.test) == 1797


def test_a_picture_that_is_not_there_is_refused(example, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--quick", "--out", str(tmp_path), "--picture", "5000"])
    assert "--picture must be at least 0 and below 1697; got 5000." in capsys.readouterr().err
