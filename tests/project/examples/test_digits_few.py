"""Parts of the digits are parts, and accuracy is counted right; and a Vision Transformer learns."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "digits_few.py"


def test_a_part_has_of_each_digit_as_many_as_can_be_and_lies_in_a_larger_one(example):
    train, _ = example.scenes.load()
    parts = [example.some(train, percent, 0) for percent in (5, 20, 100)]
    assert [len(own.labels) for own in parts] == [65, 259, 1297]
    for few, more in itertools.pairwise(parts):
        counts = np.bincount(few.labels)
        assert counts.max() - counts.min() <= 1
        assert {own.tobytes() for own in few.images} <= {own.tobytes() for own in more.images}
    for part in parts:
        labels = dict(zip((own.tobytes() for own in train.images), train.labels, strict=True))
        assert [labels[own.tobytes()] for own in part.images] == part.labels.tolist()
    other = example.some(train, 5, 1)
    assert not np.array_equal(other.images, parts[0].images)


def test_networks_are_of_one_size(example):
    sizes = [sum(own.numel() for own in make(example.Settings()).parameters()) for _, make in example.MODELS.values()]
    assert max(sizes) < 1.03 * min(sizes)


def test_accuracy_is_the_share_that_is_right(example):
    _, test = example.scenes.load()
    said = torch.nn.functional.one_hot(torch.from_numpy(test.labels), 10)
    assert example.accuracy(lambda images: said, test) == 1.0
    said[:50] = 0
    wrong = (test.labels[:50] != 0).sum()
    assert example.accuracy(lambda images: said, test) == pytest.approx(1 - wrong / 500)


@pytest.mark.slow
def test_it_runs(example, tmp_path, capsys):
    rows = example.main(["--quick", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in told["figures"])
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
def test_a_vision_transformer_learns(example, tmp_path):
    train, test = example.scenes.load()
    settings = example.Settings(steps=400, save_every=400)
    run = example.run_of("vit", 100, 0, settings, train, tmp_path)
    run.train()
    assert example.accuracy(run.module, test) > 0.6
