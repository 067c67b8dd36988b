"""Patches, counts and marks are what they are by hand; what is drawn through a cache is what is drawn without."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

PATH = Path(__file__).parents[3] / "examples" / "draw_scenes.py"


@pytest.fixture(scope="module")
def drawn(example):
    train, _ = example.scenes.load()
    return example.scenes.drawn(train, 40, np.random.default_rng(0))


@pytest.fixture(scope="module")
def patches(example, drawn):
    return example.Patches.of(drawn.images, example.QUICK.codes)


@pytest.fixture(scope="module")
def painter(example):
    torch.manual_seed(0)
    return example.Painter(example.QUICK, 8).double().eval()


def test_a_patch_is_the_nearest_of_the_codes(example, drawn, patches):
    assert patches.codes.shape == (16, 9)
    assert not patches.codes[0].any()
    tokens = patches.tokens(drawn.images)
    made = patches.images(tokens)
    for scene, place in [(0, 0), (1, 9), (2, 63), (3, 30), (4, 13)]:
        row, column = divmod(place, 8)
        own = drawn.images[scene, 0, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
        far = [float((own.flatten() - code).norm()) for code in patches.codes]
        assert int(tokens[scene, place]) == int(np.argmin(far))
        code = patches.codes[tokens[scene, place]].reshape(3, 3)
        assert torch.equal(made[scene, 0, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3], code)
    assert torch.equal(patches.tokens(made), tokens)


def test_counts_are_mixed_with_what_knows_less(example):
    tokens = np.array([[1, 0, 2, 2], [1, 0, 0, 2]])
    markov = example.Markov(tokens, side=2, codes=3, doubt=1.0)
    for row, place in [([1, 0, 2, 2], 3), ([0, 0, 0, 0], 0), ([1, 2, 0, 0], 2)]:
        assert markov.probabilities(row, place).sum() == pytest.approx(1)
    # The first patch: nothing on the left and nothing above was seen twice, and a 1 stood there each time.
    every = (np.array([3, 2, 3]) + 1 / 3) / 9  # of all patches
    edge = (np.array([1, 2, 1]) + every) / 5  # those with nothing on the left
    corner = (np.array([0, 2, 0]) + edge) / 3
    corner = (np.array([0, 2, 0]) + corner) / 3
    np.testing.assert_allclose(markov.probabilities([0, 0, 0, 0], 0), corner)
    wanted = [-math.log2(markov.probabilities(row, i)[row[i]]) for row in tokens.tolist() for i in range(4)]
    assert markov.bits(tokens) == pytest.approx(np.mean(wanted))
    assert markov.paint(3).shape == (3, 4)


@pytest.mark.parametrize("pieces", [(78,), (14,) + (1,) * 64, (20, 1, 57)])
def test_prefill_and_decode_equal_the_full_run(example, painter, pieces):
    tokens = torch.randint(0, example.WORDS + 16, (2, 78))
    with torch.no_grad():
        full, cache, first, parts = painter(tokens), painter.new_cache(), 0, []
        for size in pieces:
            parts.append(painter(tokens[:, first : first + size], cache=cache))
            first += size
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-12, rtol=0.0)


def test_each_layer_sees_its_part_of_the_picture(example, painter):
    tokens = torch.zeros(1, 78, dtype=torch.int64)
    matrices = painter.decoder.matrices(painter.embed(tokens, range(78)))
    seen = [matrix.to_dense()[0, 0] > 0 for matrix in matrices]
    row, column = 4, 3
    own = seen_from = example.TEXT + 8 * row + column
    for index, rule in enumerate(
        [
            lambda y, x: abs(y - row) <= 2 and abs(x - column) <= 2,
            lambda y, x: y == row,
            lambda y, x: x == column,
            lambda y, x: abs(y - row) <= 2 and abs(x - column) <= 2,
        ]
    ):
        wanted = [True] * example.TEXT + [rule(*divmod(place, 8)) for place in range(64)]
        wanted = [may and at <= own for at, may in enumerate(wanted)]
        assert seen[index][seen_from].tolist() == wanted


def test_bits_are_those_of_the_chain_rule(example, patches, drawn):
    few = drawn.first(2)
    torch.manual_seed(0)
    module = example.Painter(example.QUICK, 8).eval()
    wanted = patches.tokens(few.images) + example.WORDS
    said = example.texts(few.things, told=True)
    assert said.shape == (2, example.TEXT)
    total = 0.0
    with torch.no_grad():
        for scene in range(2):
            for place in range(64):
                before = torch.cat([said[scene], wanted[scene, :place]])[None]
                total -= float(module(before)[0, -1].log_softmax(-1)[wanted[scene, place]])
        assert example.bits(module, few, patches, told=True) == pytest.approx(total / 128 / math.log(2), rel=1e-4)
        blind = few._replace(things=few.things.flip(0))
        told = [example.bits(module, own, patches, told=False) for own in (few, blind)]
    assert told[0] == told[1]  # who is told nothing knows nothing of the things


def test_a_reader_reads_what_is_there(example, drawn):
    train, test = example.scenes.load()
    reader = example.Reader(train)
    real = example.scenes.drawn(test, 200, np.random.default_rng(1))
    found = reader.shares(real.images, real.things)
    assert 0.85 < found["read"] < found["inked"] == 1
    read = reader.things(real.images)
    wanted = real.things.numpy()
    assert ((read == 20) == (wanted == 20)).all()
    there = wanted != 20
    assert ((read >= 10) == (wanted >= 10))[there].all()
    nothing = reader.shares(torch.zeros_like(real.images), real.things)
    assert nothing["read"] == 0.0
    assert nothing["inked"] == (wanted == 20).mean()


@pytest.mark.slow
def test_it_runs(example, tmp_path, capsys):
    rows = example.main(["--quick", "--out", str(tmp_path)])
    told = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert told["rows"] == rows
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in told["figures"])
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
def test_a_painter_learns_what_comes_next(example, tmp_path):
    train, test = example.scenes.load()
    settings = example.Settings(steps=150, save_every=150)
    patches = example.Patches.of(example.scenes.drawn(train, 500, np.random.default_rng(0)).images, settings.codes)
    run = example.run_of("told", 0, settings, train, patches, tmp_path)
    run.train()
    drawn = example.scenes.drawn(test, 200, np.random.default_rng(1), held_out=True)
    shares = patches.tokens(drawn.images).flatten().bincount(minlength=settings.codes) / (64 * 200)
    by_frequency = -float((shares * shares.clamp(min=1e-9).log2()).sum())
    assert example.bits(run.module, drawn, patches, told=True) < 0.9 * by_frequency
