"""A page keeps to its size: which heads are shown closely, and how closely."""

import numpy as np
import pytest
import torch
from tests.viz.page.layer_kinds import attention, random_weights
from tests.viz.page.page_reader import Page, written

from saccade import masks
from saccade.viz import report


def close_of(page, side=0):
    """Heads that are shown closely, with how many weights of each token."""
    layers = page.side(side)["layers"]
    return {
        (place, int(head)): told["k"] for place, layer in enumerate(layers) for head, told in layer["close"].items()
    }


@pytest.fixture(scope="module")
def layers():
    return [attention(160, 160, masks.Causal()) for _ in range(3)]


@pytest.mark.ci
@pytest.mark.parametrize(
    "shape",
    [
        (60, 60, None),
        (160, 160, masks.Causal()),
        (300, 200, None),
        pytest.param((600, 1100, None), marks=pytest.mark.slow),
    ],
)
def test_a_page_keeps_within_its_size(tmp_path, shape):
    least = report(attention(*shape), tmp_path / "least.html", heads=[]).stat().st_size
    most = report(attention(*shape), tmp_path / "most.html", size=10**9).stat().st_size
    found = set()
    for size in np.geomspace(least, most, 5).astype(int):
        path = report(attention(*shape), tmp_path / "page.html", size=size)
        assert path.stat().st_size <= 1.01 * size
        found.add(path.stat().st_size)
    assert len(found) > 2


def test_small_maps_are_there_however_small_the_page(layers, tmp_path):
    page = written(tmp_path, layers, size=1)
    assert close_of(page) == {}
    assert page.small(2, 3)[0].shape == (128, 128)


@pytest.mark.ci
def test_all_weights_are_there_where_there_is_room(layers, tmp_path):
    every = [(layer, head) for layer in range(3) for head in range(4)]
    assert close_of(written(tmp_path, layers, size=100_000_000)) == dict.fromkeys(every, 160)
    whole = len(written(tmp_path, layers, size=100_000_000).text)
    counts = [close_of(written(tmp_path, layers, size=int(share * whole))) for share in (0.9, 0.7, 0.6)]
    for found in counts:
        assert list(found) == every
        assert len(set(found.values())) == 1
    ks = [found[0, 0] for found in counts]
    assert ks == sorted(ks, reverse=True)
    assert len(set(ks)) > 1
    assert set(ks) <= {64, 32, 16, 8}


def test_heads_that_are_named_are_there_however_small_the_page(layers, tmp_path):
    named = [(2, 1), (0, 3), (2, 1)]
    page = written(tmp_path, layers, heads=iter(named), size=1)
    assert close_of(page) == {(0, 3): 8, (2, 1): 8}
    assert page.index["start"] == {"layer": 2, "head": 1}
    page = written(tmp_path, layers, heads=np.array([[1, 2]]).tolist(), size=100_000_000)
    assert close_of(page) == {(1, 2): 160}
    assert close_of(written(tmp_path, layers, heads=())) == {}


def test_the_foremost_of_each_kind_come_first(tmp_path):
    """Heads of one kind each: their own token before, the first token, nearby, far away, everything."""
    n = 200
    eye, ones = torch.eye(n), torch.ones(n, n).tril()
    before = torch.roll(eye, 1, 1).tril()
    before[0, 0] = 1.0
    first = torch.zeros(n, n)
    first[:, 0] = 1.0
    kinds = {"before": before, "first": first, "even": ones / ones.sum(-1, keepdim=True), "own": eye}
    noise = torch.randn(n, n).softmax(-1)
    plain = torch.stack([0.05 * kinds["even"] + 0.95 * eye, 0.1 * noise + 0.9 * eye])
    layers = [torch.stack([plain[0], kinds["first"]])[None], torch.stack([kinds["before"], kinds["even"]])[None]]
    layers += [torch.stack([plain[1], plain[1]])[None]] * 3
    least = len(written(tmp_path, layers, heads=[]).text)
    one = len(written(tmp_path, layers, heads=[(2, 0)], size=1).text) - least  # one that is no kind
    found = close_of(written(tmp_path, layers, size=least + 3 * one))
    assert 2 <= len(found) < 10
    assert {(0, 1), (1, 0)} <= set(found)  # the first token, the token before


def test_two_sides_share_the_size(tmp_path):
    one, other = random_weights(1, 6, 150, 150), random_weights(1, 6, 150, 150)
    path = report(one, tmp_path / "page.html", other=other, size=900_000)
    assert path.stat().st_size <= 900_000
    page = Page(path)
    assert 0 < len(close_of(page, 0)) == len(close_of(page, 1))
    alone = close_of(written(tmp_path, one, size=900_000))
    assert (len(alone), max(alone.values())) > (len(close_of(page)), max(close_of(page).values()))
    both = close_of(written(tmp_path, one, other=other, heads=[(0, 5)], size=1), 1)
    assert both == {(0, 5): 8}
