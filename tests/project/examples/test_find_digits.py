"""Tests of the search for digits: results are checked by hand, and queries learn to find."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from saccade.models import Detections, Targets

PATH = Path(__file__).parents[3] / "examples" / "find_digits.py"


def _objects(*each):
    return Targets(torch.tensor([own[0] for own in each]), torch.tensor([own[1] for own in each]).reshape(-1, 4))


def test_overlap_of_boxes_is_counted_in_pixels(example):
    rng = np.random.default_rng(0)
    for _ in range(50):
        corners = rng.integers(0, 12, (2, 2)), rng.integers(1, 12, (2, 2))
        boxes, planes = [], []
        for first, size in zip(*corners, strict=True):
            boxes.append([*((first + size / 2) / 24), *(size / 24)])
            plane = np.zeros((24, 24), bool)
            plane[first[1] : first[1] + size[1], first[0] : first[0] + size[0]] = True
            planes.append(plane)
        wanted = (planes[0] & planes[1]).sum() / (planes[0] | planes[1]).sum()
        assert float(example.shared(*torch.tensor(boxes))) == pytest.approx(wanted, abs=1e-9)


def test_a_digit_is_hit_by_its_class_in_its_place(example):
    here, near, far = [0.25, 0.25, 0.2, 0.3], [0.27, 0.25, 0.2, 0.3], [0.75, 0.25, 0.2, 0.3]
    shown = _objects((7, here), (3, far))
    assert example.hits(_objects((7, near), (3, far)), shown) == 2
    assert example.hits(_objects((3, near), (3, far)), shown) == 1
    assert example.hits(_objects((7, near), (7, near)), shown) == 1  # found twice is found once
    assert example.hits(_objects((7, far)), shown) == 0


def test_the_likelier_of_two_overlapping_boxes_is_kept(example):
    here, near, far = [0.25, 0.25, 0.2, 0.3], [0.27, 0.25, 0.2, 0.3], [0.75, 0.25, 0.2, 0.3]
    logits = torch.full((1, 4, 11), -9.0)
    logits[0, [0, 1, 2], [4, 5, 6]] = torch.tensor([1.0, 2.0, 1.5])
    logits[0, :, 10] = torch.tensor([-2.0, -2.0, -2.0, 5.0])
    (kept,) = example.once(Detections(logits, torch.tensor([[here, near, far, far]])))
    assert kept.classes.tolist() == [5, 6]
    assert torch.equal(kept.boxes, torch.tensor([near, far]))


def test_a_module_that_knows_all_is_right_and_one_that_finds_too_much_is_not(example):
    train, _ = example.scenes.load()
    drawn = example.scenes.drawn(train, 6, np.random.default_rng(0))
    shown = example.shown_in(drawn)
    logits, boxes = torch.full((6, 5, 11), -9.0), torch.full((6, 5, 4), 0.5)
    logits[:, :, 10] = 0
    for scene, own in enumerate(shown):
        count = len(own.classes)
        logits[scene, range(count), own.classes] = 9.0
        boxes[scene, :count] = own.boxes
    assert example.marks(lambda images: Detections(logits, boxes), drawn) == (1.0, 1.0)
    logits[0, 4, 2] = 9.0
    boxes[0, 4] = torch.tensor([0.5, 0.5, 0.9, 0.9])
    share, digits = example.marks(lambda images: Detections(logits, boxes), drawn)
    assert share == pytest.approx(5 / 6)
    assert digits == 1.0


def test_the_cell_of_its_middle_answers_for_a_digit(example):
    grid = example.Grid(example.QUICK)
    shown = [_objects((7, [0.3, 0.9, 0.2, 0.1]))]
    logits, boxes = torch.zeros(1, 36, 11), torch.full((1, 36, 4), 0.01)
    logits[..., 10] = 9.0
    empty = float(grid.loss(Detections(logits, boxes), shown))
    logits[0, 31, 7], logits[0, 31, 10] = 18.0, 0.0  # row 5, column 1
    boxes[0, 31] = shown[0].boxes[0]
    assert float(grid.loss(Detections(logits, boxes), shown)) < 0.01 < empty
    found = grid(torch.rand(2, 1, 24, 24))
    cell = (found.boxes[..., :2] * 6).floor()
    assert torch.equal(cell[..., 1] * 6 + cell[..., 0], torch.arange(36.0).expand(2, 36))


@pytest.mark.slow
def test_it_runs(example, tmp_path, capsys):
    rows = example.main(["--quick", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    assert (tmp_path / "looks.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
def test_queries_learn_to_find(example, tmp_path):
    settings = example.Settings(steps=500, batch_size=16, save_every=500)
    train, test = example.scenes.load()
    run = example.run_of("queries", 0, settings, train, tmp_path)
    run.train()
    drawn = example.scenes.drawn(test, 200, np.random.default_rng(0), held_out=True)
    assert example.marks(run.module, drawn)[1] > 0.3
