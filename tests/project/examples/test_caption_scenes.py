"""Beams and caches write what a search by hand writes, and a decoder learns to look."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "caption_scenes.py"


def _log_prob(given, tokens, example):
    """Return the log-probability of a whole sentence under the first picture, by the chain rule."""
    full = torch.tensor([[example.scenes.START, *tokens]])
    return float(given(full)[0, :-1].log_softmax(-1)[range(len(tokens)), tokens].sum())


@pytest.mark.parametrize("name", ["look", "gru"])
def test_beams_find_the_likeliest_sentence(example, name, monkeypatch):
    torch.manual_seed(0)
    module = example.MODELS[name][1](example.QUICK).double().eval()
    images = torch.rand(2, 1, 24, 24, dtype=torch.float64)
    monkeypatch.setattr(example.scenes, "LONGEST", 2)
    words = len(example.scenes.TOKENS)
    with torch.no_grad():
        module.tell.weight.mul_(5)
        for image, written in zip(images, example.write(module, images, words), strict=True):
            given, end = module.given(image[None]), example.scenes.END
            every = [[end], *([a, b] for a, b in itertools.product(range(words), repeat=2) if a != end)]
            best = max(every, key=lambda own: _log_prob(given, own, example))
            assert written == [token for token in best if token != end]


@pytest.mark.parametrize("name", ["look", "gru"])
def test_greedy_is_the_likeliest_word_each_time(example, name):
    torch.manual_seed(0)
    module = example.MODELS[name][1](example.QUICK).double().eval()
    images = torch.rand(3, 1, 24, 24, dtype=torch.float64)
    with torch.no_grad():
        for image, written in zip(images, example.write(module, images, 1), strict=True):
            tokens = [example.scenes.START]
            while len(tokens) <= example.scenes.LONGEST:
                best = int(module.given(image[None])(torch.tensor([tokens]))[0, -1].argmax())
                if best == example.scenes.END:
                    break
                tokens.append(best)
            assert written == tokens[1:]


def test_a_sentence_is_right_to_the_last_word_or_wrong(example):
    train, test = example.scenes.load()
    drawn = example.scenes.drawn(test, 3, np.random.default_rng(0), held_out=True)
    written = [own[1:-1] for own in drawn.sentences()]
    assert example.are_right(written, drawn).all()
    written[1] = written[1][:-1]
    written[2] = [*written[2][:-1], example.scenes.START]
    assert example.are_right(written, drawn).tolist() == [True, False, False]
    right = np.array([True, False, True])
    row = example.summarise("who", {"0": right, "1": ~right}, drawn)
    assert (row["mean"], row["lowest"]) == (0.5, pytest.approx(1 / 3))
    # A neighbour knows what it has learned, and most of what it has not.
    drawn = example.scenes.drawn(test, 300, np.random.default_rng(0))
    assert 0.8 < example.told_where(train, test, drawn).mean() < 1
    assert example.told_where(test, test, drawn).all()


def test_a_scene_that_is_not_there_is_refused(example, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        example.main(["--quick", "--out", str(tmp_path), "--scene", "8"])
    assert "--scene must be at least 0 and below 8; got 8." in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs(example, tmp_path, capsys):
    rows = example.main(["--quick", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    assert (tmp_path / "looks.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
def test_a_decoder_learns_to_look(example, tmp_path):
    train, test = example.scenes.load()
    run = example.run_of("look", 0, example.Settings(steps=500, save_every=500), train, tmp_path)
    run.train()
    drawn = example.scenes.drawn(test, 200, np.random.default_rng(0), held_out=True)
    # Guessing one of ten digits twice or more often succeeds in at most one scene in a hundred.
    assert example.are_right(example.write(run.module, drawn.images, 1), drawn).mean() > 0.03
