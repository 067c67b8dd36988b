"""Scenes and sentences that are put elsewhere are others; what is counted is counted right; and both learn to match."""

import collections
import json
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "match_scenes.py"


def test_elsewhere_are_the_same_things_in_other_cells(example):
    rng = np.random.default_rng(0)
    things = np.array([[7, 20, 20, 20], [1, 1, 20, 1], [1, 2, 3, 4]] * 50)
    moved = example.elsewhere(things, rng)
    assert (np.sort(moved, 1) == np.sort(things, 1)).all()
    assert (moved != things).any(1).all()


def test_half_of_a_batch_differs_from_the_other_half_by_places_alone(example):
    things = example.pairs(64, np.random.default_rng(0))
    assert things.shape == (64, 4)
    assert len({tuple(own) for own in things.tolist()}) == 64
    assert not example.scenes.is_held_out(things).any()
    counts = collections.Counter(tuple(sorted(own)) for own in things.tolist())
    assert sum(count == 2 for count in counts.values()) > 28


def test_no_sentence_tells_of_two_scenes_of_the_test(example):
    _, test = example.scenes.load()
    drawn, others = example.held_out(test, 200, np.random.default_rng(0))
    things = drawn.things.numpy()
    assert len({tuple(own) for own in things.tolist()}) == len(things) == 200
    assert example.scenes.is_held_out(things).all()
    assert others.shape == (3, 200, 4)
    for index in range(200):
        each = {tuple(own) for own in [things[index], *others[:, index]]}
        assert len(each) == 4
        assert len({tuple(sorted(own)) for own in each}) == 1


class _Knows(torch.nn.Module):
    """Vectors of length 1 that say what is where, read from a scene of one pixel and from a sentence."""

    def __init__(self, drawn, scenes):
        super().__init__()
        self.texts = {tuple(scenes.sentence(own)): torch.from_numpy(vector) for own, vector in drawn}
        self.end = scenes.END

    def embed_images(self, images):
        return images.flatten(1)

    def embed_texts(self, tokens):
        return torch.stack([self.texts[tuple(own[: own.index(self.end) + 1])] for own in tokens.tolist()])


def test_marks_are_counted_right(example):
    _, test = example.scenes.load()
    drawn, others = example.held_out(test, 6, np.random.default_rng(0))
    eye = np.eye(6 + 18, dtype=np.float32)
    every = [(own, eye[index]) for index, own in enumerate(np.concatenate([drawn.things, *others]).tolist())]
    images = torch.from_numpy(eye[:6])[:, None, None]
    known = _Knows(every, example.scenes)
    assert example.marks(known, drawn._replace(images=images), others) == {"scene": 1, "sentence": 1, "place": 1}
    # The first scene looks like the second, and less like itself than one that puts its things elsewhere.
    images = images.clone()
    images[0] = 2 * images[1] - 0.1 * images[0] + 0.5 * torch.from_numpy(eye[6])
    found = example.marks(known, drawn._replace(images=images), others)
    assert found == pytest.approx({"scene": 4 / 6, "sentence": 5 / 6, "place": 5 / 6})


def test_peers_read_what_stands_before_the_end(example):
    torch.manual_seed(0)
    tokens = example.tokens_of(np.array([[7, 3, 20, 20], [7, 13, 4, 5]]))
    other = tokens.clone()
    other[0, (tokens[0] == example.scenes.END).int().argmax() + 1 :] = 5
    assert not torch.equal(tokens, other)
    for name, (_, make) in example.MODELS.items():
        module = make(example.QUICK).eval()
        with torch.no_grad():
            torch.testing.assert_close(module.embed_texts(tokens), module.embed_texts(other), atol=1e-6, rtol=0.0)
            swapped = module.embed_texts(example.tokens_of(np.array([[3, 7, 20, 20]])))
            differs = float((swapped - module.embed_texts(tokens)[0]).abs().max())
        assert (differs < 1e-6) == (name == "bags")  # who takes the mean of words knows no order
        lengths = module.embed_images(torch.rand(3, 1, 24, 24)).norm(dim=-1)
        torch.testing.assert_close(lengths, torch.ones(3))


@pytest.mark.slow
def test_it_runs(example, tmp_path, capsys):
    rows = example.main(["--quick", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    assert (tmp_path / "similarities.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
def test_sentences_learn_to_find_their_scenes(example, tmp_path):
    train, test = example.scenes.load()
    run = example.run_of("dual", 0, example.Settings(steps=150, save_every=150), train, tmp_path)
    run.train()
    drawn, others = example.held_out(test, 200, np.random.default_rng(0))
    marks = example.marks(run.module, drawn, others)
    assert marks["scene"] > 0.3  # one in 200 by chance
    assert marks["place"] > 0.7  # half by knowing which things there are, and not where
