"""A scene shows the content of its sentence, in its boxes, and nothing that training has seen."""

from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "scenes.py"
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def _heard(text):
    """Return the content of each cell by the words of a sentence: (ink, digit), or None."""
    cells = [None] * 4
    for part in text.split(", "):
        row, column, ink, digit = part.split()
        cells[2 * (row == "bottom") + (column == "right")] = (ink, digit)
    return cells


def test_a_sentence_says_what_stands_where_and_no_two_say_the_same(example):
    things = example.draw_things(3000, np.random.default_rng(0), held_out=False)
    texts = {}
    for own in things.tolist():
        tokens = example.sentence(own)
        assert (tokens[0], tokens[-1]) == (example.START, example.END)
        assert len(tokens) <= example.LONGEST + 1
        text = example.as_text(tokens)
        wanted = [None if own == 20 else (("light", "dark")[own // 10], NAMES[own % 10]) for own in own]
        assert _heard(text) == wanted
        assert texts.setdefault(text, own) == own
    counts = (things != example.NOTHING).sum(1)
    assert all(800 < (counts == size).sum() < 1200 for size in (2, 3, 4))
    assert 0.4 < (things[things != 20] >= 10).mean() < 0.6


@pytest.mark.parametrize(
    "things, text",
    [
        ([17, 3, 20, 2], "top left dark seven, top right light three, bottom right light two"),
        ([20, 20, 10, 9], "bottom left dark zero, bottom right light nine"),
    ],
)
def test_some_sentences_as_they_are_written(example, things, text):
    assert example.as_text(example.sentence(things)) == text


def test_nothing_of_a_test_scene_was_seen_in_training(example):
    train, test = example.load()
    assert (len(train.images), len(test.images)) == (1297, 500)
    assert not {own.tobytes() for own in train.images} & {own.tobytes() for own in test.images}
    rng = np.random.default_rng(0)
    learned, told = (example.draw_things(2000, rng, held_out=held_out) for held_out in (False, True))
    assert not {tuple(own) for own in learned.tolist()} & {tuple(own) for own in told.tolist()}
    every = rng.integers(0, 21, (20_000, 4))
    assert 0.09 < example.is_held_out(every).mean() < 0.11
    for layout in ([0, 1], [0, 3], [2, 3]):  # in every arrangement, not in some
        some = np.full((4000, 4), 20)
        some[:, layout] = rng.integers(0, 20, (4000, 2))
        assert 0.07 < example.is_held_out(some).mean() < 0.13


def test_a_scene_shows_its_things_in_their_cells_and_boxes_hold_their_ink(example):
    train, _ = example.load()
    drawn = example.drawn(train, 60, np.random.default_rng(1))
    whole = torch.zeros_like(drawn.images)
    for scene in range(60):
        for cell in range(4):
            thing = int(drawn.things[scene, cell])
            top, left = 12 * (cell // 2), 12 * (cell % 2)
            own = drawn.images[scene, 0, top : top + 12, left : left + 12]
            if thing == 20:
                assert not own.any()
                assert drawn.which[scene, cell] == -1
                continue
            index = int(drawn.which[scene, cell])
            assert train.labels[index] == thing % 10
            wanted = torch.from_numpy(train.images[index]) * (1 if thing >= 10 else 0.5)
            at = [(y, x) for y in range(5) for x in range(5) if torch.equal(own[y : y + 8, x : x + 8], wanted)]
            assert at
            x, y, width, height = (drawn.boxes[scene, cell] * 24).tolist()
            box = [y - height / 2, y + height / 2, x - width / 2, x + width / 2]
            first, last, start, stop = (round(side) for side in box)
            assert box == pytest.approx([first, last, start, stop], abs=1e-4)
            inside = drawn.images[scene, 0, first:last, start:stop]
            assert inside.sum() == pytest.approx(float(own.sum()), rel=1e-5)
            # No smaller box holds it.
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
            whole[scene, 0, first:last, start:stop] = inside
    assert torch.equal(whole, drawn.images)


def test_the_first_scenes_are_the_same_scenes(example):
    train, _ = example.load()
    drawn = example.drawn(train, 5, np.random.default_rng(1))
    again = example.drawn(train, 5, np.random.default_rng(1))
    for few, own, same in zip(drawn.first(2), drawn, again, strict=True):
        assert torch.equal(few, own[:2])
        assert torch.equal(own, same)
    assert example.padded([[1], [2, 3]]).tolist() == [[1, -1], [2, 3]]
