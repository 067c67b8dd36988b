"""Tests of Performer: unbiased, with the variance that the paper gives, and softmax in the limit."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade.caches import KVCache, RecurrentCache
from saccade.masks import Causal, Documents, Full, Mask, Padding
from saccade.mechanisms import Linear, Mechanism, Performer
from saccade.mechanisms.features import feature_matrix
from saccade.mechanisms.features.random_features import KINDS, directions, random_features

F64 = torch.float64
D, M = 8, 8


def _estimates(x: Tensor, y: Tensor, kind: str, *, orthogonal: bool, draws: int, m: int = M) -> Tensor:
    """Return estimates of the kernel of two vectors by many draws of features."""
    generator = torch.Generator().manual_seed(3)
    sizes = [m] * draws if orthogonal else [m * draws]
    projection = torch.cat([directions(n, len(x), orthogonal=orthogonal, generator=generator) for n in sizes])
    out = []
    for part in projection.split(m):
        left, right = (random_features(z[None, None, None], part, kind) for z in (x, y))
        out.append((left.values * right.values).sum() * (left.logs + right.logs).exp().item())
    return torch.stack(out)


def _pair(angle: str, norm: float) -> tuple[Tensor, Tensor]:
    x, y = torch.zeros(2, D, dtype=F64)
    x[0] = norm
    y[{"same": 0, "across": 1, "opposite": 0}[angle]] = -norm if angle == "opposite" else norm
    if angle == "opposite":
        y[1] = 0.1
    return x, y


def _formula(x: Tensor, y: Tensor, kind: str, m: int = M) -> float:
    """Return the variance by lemma 2 of the paper, for independent directions."""
    kernel, plus, minus = math.exp(x @ y), ((x + y) ** 2).sum().item(), ((x - y) ** 2).sum().item()
    positive = math.exp(plus) * kernel**2 * (1 - math.exp(-plus)) / m
    return {
        "trigonometric": math.exp(plus) / kernel**2 * (1 - math.exp(-minus)) ** 2 / (2 * m),
        "positive": positive,
        "hyperbolic": (1 - math.exp(-plus)) * positive / 2,
    }[kind]


# Thousands of draws each: the vectors whose estimates scatter most stand for the others in every run.
QUICK = [("trigonometric", "opposite"), ("positive", "same"), ("hyperbolic", "same")]
PAIRS = [(kind, angle) for kind in KINDS for angle in ("same", "across", "opposite")]
ESTIMATES = [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in PAIRS]


@pytest.mark.ci
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("kind, angle", ESTIMATES)
def test_the_kernel_is_unbiased(kind: str, angle: str, orthogonal: bool) -> None:
    x, y = _pair(angle, 0.6)
    m = M + 3 if orthogonal else M  # more than one block
    estimates = _estimates(x, y, kind, orthogonal=orthogonal, draws=2000, m=m)
    deviation = estimates.std() / len(estimates) ** 0.5
    assert (estimates.mean() - math.exp(x @ y)).abs() <= 5 * deviation + 1e-12


@pytest.mark.ci
@pytest.mark.parametrize("kind, angle", ESTIMATES)
def test_the_variance_is_that_of_the_paper(kind: str, angle: str) -> None:
    x, y = _pair(angle, 0.6)
    squares = (_estimates(x, y, kind, orthogonal=False, draws=4000) - math.exp(x @ y)) ** 2
    deviation = squares.std() / len(squares) ** 0.5
    assert (squares.mean() - _formula(x, y, kind)).abs() <= 5 * deviation + 1e-12


@pytest.mark.parametrize("angle", ["same", pytest.param("across", marks=pytest.mark.slow)])
def test_orthogonal_directions_stay_below_their_bound(angle: str) -> None:
    x, y = _pair(angle, 0.6)
    kernel = math.exp(x @ y)
    gain = 2 * (M - 1) / (M * (D + 2)) * (kernel - math.exp(-(x @ x + y @ y) / 2)) ** 2
    bound = _formula(x, y, "positive") - gain
    squares = (_estimates(x, y, "positive", orthogonal=True, draws=4000) - kernel) ** 2
    deviation = squares.std() / len(squares) ** 0.5
    assert squares.mean() <= bound + 3 * deviation


def test_directions_are_perpendicular_and_as_long_as_normal_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([directions(12, 5, orthogonal=True, generator=generator) for _ in range(400)])
    unit = drawn / drawn.norm(dim=-1, keepdim=True)
    for start in (0, 5, 10):
        block = unit[:, start : start + 5]
        torch.testing.assert_close(block @ block.mT, torch.eye(block.shape[1], dtype=F64).expand(400, -1, -1))
    assert (unit[:, 0] * unit[:, 5]).sum(-1).abs().max() > 0.1  # another block is independent
    squares = drawn.square().sum(-1)  # chi-squared with 5 degrees of freedom
    assert abs(squares.mean() - 5) < 5 * (10 / squares.numel()) ** 0.5
    assert abs(squares.var() - 10) < 1.5
    assert drawn.mean((0, 1)).abs().max() < 5 / (400 * 12) ** 0.5  # no sign is preferred
    assert abs(drawn[:, 0, 0].mean()) < 5 / 20


def _softmax_kernel(data: Tensor, projection: Tensor, *, is_query: bool) -> Tensor:
    """Return the features of performer-pytorch with its eps at 0, from its formula."""
    data = data * data.shape[-1] ** -0.25
    dash = data @ projection.T
    diagonal = (data**2).sum(-1, keepdim=True) / 2
    peak = dash.amax(-1, keepdim=True) if is_query else dash.amax((-1, -2), keepdim=True)
    return projection.shape[0] ** -0.5 * torch.exp(dash - diagonal - peak)


@pytest.mark.parametrize("mask", [None, Causal()], ids=str)
def test_with_the_same_directions_it_is_performer_pytorch_without_its_eps(mask: Mask | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 40, 16) for _ in range(3))
    performer = Performer(64)
    projection = performer.projection(16).float()
    pairs = _softmax_kernel(q, projection, is_query=True) @ _softmax_kernel(k, projection, is_query=False).mT
    pairs = pairs * (Full() if mask is None else mask).to_dense(40)
    expected = pairs @ v / pairs.sum(-1, keepdim=True)
    torch.testing.assert_close(performer(q, k, mask=mask) @ v, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("mask", [None, Causal() & Padding([30, 17]), Documents([10, 20], rule=Causal())], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_falls_with_the_root_of_the_features(kind: str, mask: Mask | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 30, 8, dtype=F64) / 2 for _ in range(3))
    exact = sc.attention(q, k, v, mask)

    def error(num_features: int) -> float:
        runs = [Performer(num_features, kind=kind, seed=seed)(q, k, mask=mask) @ v - exact for seed in range(12)]
        return torch.stack(runs).norm().item()

    ratio = error(64) / error(64 * 16)
    assert 3.0 < ratio < 5.3  # 4 is the square root of 16


@pytest.mark.ci
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        Causal(),
        Padding([60, 70]),
        Documents([30, 40]),
        Documents([[30, 40], [5, 65]], rule=Causal()),
        Causal() & Padding([66, 70], side="left", padded_len=70),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_fast_products_are_those_of_the_blocks(kind: str, mask: Mask | None, groups: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, 70, 4, dtype=F64, requires_grad=True)
    k, v = (torch.randn(2, groups, 70, 4, dtype=F64, requires_grad=True) for _ in range(2))
    matrix = Performer(16, kind=kind)(q, k, mask=mask)
    projection = Performer(16).projection(4)
    left, right = (random_features(x * 4**-0.25, projection, kind) for x in (q, k))
    phi_q, phi_k = (x.values * x.logs.exp()[..., None] for x in (left, right))
    pairs = (
        phi_q
        @ phi_k.repeat_interleave(4 // groups, 1).mT
        * (Full() if mask is None else mask).to_dense(70, batch=2, heads=4)
    )
    total = pairs.sum(-1, keepdim=True)
    weights = pairs / torch.where(total == 0, 1.0, total)
    torch.testing.assert_close(matrix.to_dense(), weights)
    out, expected = matrix @ v, weights @ v.repeat_interleave(4 // groups, 1)
    torch.testing.assert_close(out, expected)
    x = torch.randn(2, 4, 70, 3, dtype=F64)
    torch.testing.assert_close(matrix.mT @ x, weights.mT @ x)
    grad = torch.randn_like(out)
    # The logarithms are constants of the product; that they change nothing is what the gradients show.
    alone = [random_features(x * 4**-0.25, projection, kind) for x in (q, k)]
    own = torch.autograd.grad(out, (q, k, v), grad)
    pairs = alone[0].values @ (alone[1].values * alone[1].logs.exp()[..., None]).repeat_interleave(4 // groups, 1).mT
    pairs = pairs * (Full() if mask is None else mask).to_dense(70, batch=2, heads=4)
    total = pairs.sum(-1, keepdim=True)
    other = (pairs / torch.where(total == 0, 1.0, total)) @ v.repeat_interleave(4 // groups, 1)
    torch.testing.assert_close(own, torch.autograd.grad(other, (q, k, v), grad))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Causal() & Padding([140, 150]),
        Documents([[60, 90], [5, 145]], rule=Causal()),
        Causal() & Padding([66, 150], side="left", padded_len=150),
    ],
    ids=str,
)
@pytest.mark.parametrize("mechanism", [*(Performer(16, kind=kind) for kind in KINDS), Linear()], ids=str)
def test_long_texts_are_summed_in_pieces(
    mechanism: Mechanism, mask: Mask, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.randn(2, 4, 150, 4, dtype=F64)
    k, v = (torch.randn(2, groups, 150, 4, dtype=F64) for _ in range(2))
    whole = mechanism(q, k, mask=mask) @ v
    pieces: list[int] = []
    chunked_sums = feature_matrix.chunked_sums
    monkeypatch.setattr(
        feature_matrix,
        "chunked_sums",
        lambda a, *rest, **more: (pieces.append(a.shape[2]), chunked_sums(a, *rest, **more))[1],
    )
    monkeypatch.setattr(feature_matrix, "_PIECE", 1)
    torch.testing.assert_close(mechanism(q, k, mask=mask) @ v, whole)
    assert pieces == [64, 64, 22]


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_features_themselves(kind: str) -> None:
    q, k, v = (torch.randn(1, 2, 6, 3, dtype=F64, requires_grad=True) for _ in range(3))
    performer = Performer(5, kind=kind)
    assert torch.autograd.gradcheck(lambda q, k, v: performer(q, k, mask=Causal()) @ v, (q, k, v))
    assert torch.autograd.gradcheck(lambda q, k, v: performer(q, k) @ v, (q, k, v))


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_changes_nothing_for_those_who_do_not_see_it(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 100, 8) for _ in range(3))
    out = Performer(32, kind=kind)(q, k, mask=Causal()) @ v
    factor = 300.0 if kind == "trigonometric" else 30.0  # whose logarithm is the square of the norm
    k[:, :, 71], v[:, :, 70:] = factor * k[:, :, 71], 1e6
    loud = Performer(32, kind=kind)(q, k, mask=Causal()) @ v
    torch.testing.assert_close(loud[:, :, :70], out[:, :, :70], rtol=0, atol=0)
    dense = Performer(32, kind=kind)(q, k, mask=Causal()).to_dense()[:, :, :70] @ v
    torch.testing.assert_close(dense, out[:, :, :70], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[30, 170], [70, 130]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_earlier_document_cannot_silence_a_later_one(kind: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 200, 8) for _ in range(3))
    performer, mask, later = Performer(32, kind=kind), Documents(lengths, rule=Causal()), slice(lengths[0], None)
    out = performer(q, k, mask=mask) @ v
    k[:, :, 1] *= 300.0
    torch.testing.assert_close((performer(q, k, mask=mask) @ v)[:, :, later], out[:, :, later], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [Causal(), Documents([3, 9, 30], rule=Causal())], ids=str)
def test_any_split_is_the_full_run(kind: str, mask: Mask) -> None:
    q, k, v = (2 * torch.randn(2, heads, 20, 4, dtype=F64) for heads in (4, 2, 2))
    performer = Performer(16, kind=kind)
    full = performer(q, k, mask=mask) @ v
    cache, other = performer.new_cache(), KVCache()
    assert isinstance(cache, RecurrentCache)
    for start, stop in ((0, 5), (5, 6), (6, 14), (14, 15), (15, 20)):
        part = [x[:, :, start:stop] for x in (q, k, v)]
        out = cache.attend(performer, *part, mask=mask)
        torch.testing.assert_close(out, full[:, :, start:stop])
        torch.testing.assert_close(other.attend(performer, *part, mask=mask), full[:, :, start:stop])


def test_a_state_belongs_to_one_draw() -> None:
    q, k, v = (torch.randn(1, 1, 4, 4) for _ in range(3))
    performer, cache = Performer(8), RecurrentCache()
    cache.attend(performer, q, k, v, mask=Causal())
    performer.draw()
    with pytest.raises(ValueError, match="features must be those of the memory"):
        cache.attend(performer, q, k, v, mask=Causal())


def test_draws_follow_from_the_seed_and_are_saved() -> None:
    first = Performer(8, seed=3)
    assert torch.equal(first.projection(4), Performer(8, seed=3).projection(4))
    assert not torch.equal(first.projection(4), Performer(8, seed=4).projection(4))
    assert not torch.equal(first.projection(4)[:, :3], first.projection(3))
    before = first.projection(4)
    first.draw()
    assert not torch.equal(first.projection(4), before)
    other = Performer(8, seed=3)
    other.load_state_dict(first.state_dict())
    assert torch.equal(other.projection(4), first.projection(4))
    assert torch.equal(copy.deepcopy(first).projection(4), first.projection(4))


def test_redraws_come_in_training_only() -> None:
    performer, x = Performer(8, redraw=2), torch.ones(1, 1, 2, 4)
    seen = []
    for _ in range(5):
        performer(x, x)
        seen.append(int(performer.draws))
    assert seen == [0, 0, 1, 1, 2]
    performer.eval()
    for _ in range(5):
        performer(x, x)
    assert int(performer.draws) == 2


@pytest.mark.parametrize("scale", [0.0, -0.7, 1.3])
def test_scale_is_that_of_the_dot_product(scale: float) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 12, 4, dtype=F64) / 4 for _ in range(2))
    exact = sc.AttentionMatrix(q, k, scale=scale).to_dense()
    own = Performer(1 << 14, scale=scale)(q, k).to_dense()
    torch.testing.assert_close(own, exact, atol=5e-3, rtol=0)


def test_distributions_or_not() -> None:
    x = torch.randn(1, 2, 9, 4)
    assert Performer(8)(x, x).is_stochastic
    assert Performer(8, kind="hyperbolic")(x, x).is_stochastic
    matrix = Performer(8, kind="trigonometric")(x, x)
    torch.testing.assert_close(matrix.to_dense().sum(-1), torch.ones(1, 2, 9))
    assert not matrix.is_stochastic
    with pytest.raises(sc.UnsupportedError, match="is_stochastic is False"):
        matrix.entropy()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_features": 0}, ValueError, "num_features must be an int of at least 1; got 0"),
        ({"num_features": True}, TypeError, "num_features must be an int of at least 1; got True"),
        ({"orthogonal": 1}, TypeError, "orthogonal must be True or False; got 1"),
        ({"kind": "softmax"}, ValueError, "kind must be one of 'positive', 'hyperbolic', 'trigonometric'"),
        ({"seed": 1.5}, TypeError, r"seed must be an int of at least 0; got 1\.5"),
        ({"seed": -1}, ValueError, "seed must be an int of at least 0; got -1"),
        ({"redraw": 0}, ValueError, "redraw must be an int of at least 1; got 0"),
        ({"scale": "1"}, TypeError, "scale must be a finite number; got '1'"),
        ({"scale": math.inf}, ValueError, "scale must be a finite number; got inf"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"Performer: {message}"):
        Performer(**options)


def test_an_unsupported_mask_is_refused() -> None:
    x = torch.ones(1, 1, 4, 2)
    with pytest.raises(sc.UnsupportedError, match="Window is none of"):
        Performer()(x, x, mask=sc.masks.Window(1, 1))


def _given_by_hand(query: Tensor, key: Tensor, omega: Tensor, scale: float) -> Tensor:
    """Return the product with positive features written out: exp(w x - |x|^2 / 2), one after another."""
    scaled = (query * scale, key * scale)
    left, right = (torch.stack([(x @ w - (x * x).sum(-1) / 2).exp() for w in omega], -1) for x in scaled)
    weights = left @ right.mT
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_given_directions_are_used_as_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    omega = torch.randn(12, D, dtype=dtype)
    performer = Performer(directions=omega)
    query, key = torch.randn(1, 2, 5, D, dtype=dtype), torch.randn(1, 2, 5, D, dtype=dtype)
    expected = _given_by_hand(query, key, omega, D**-0.25)
    omega.zero_()  # nothing is shared with the caller
    torch.testing.assert_close(performer(query, key).to_dense(), expected)
    assert performer.num_features == 12
    assert list(performer.state_dict()) == ["directions", "draws", "calls"]
    other = Performer(directions=torch.zeros(12, D))
    other.load_state_dict(performer.state_dict())
    torch.testing.assert_close(other(query, key).to_dense(), expected)
    drawn_once = Performer(12, seed=3)
    same = Performer(directions=drawn_once.projection(D))
    torch.testing.assert_close(same(query, key).to_dense(), drawn_once(query, key).to_dense(), atol=0, rtol=0)


def test_states_of_given_directions_go_on_with_equal_ones_only() -> None:
    x, omega = torch.randn(1, 2, 6, D), torch.randn(8, D)
    one, equal, another = (Performer(directions=own) for own in (omega, omega, torch.randn(8, D)))
    full = one(x, x, mask=Causal()) @ x
    cache = one.new_cache()
    first = cache.attend(one, x[:, :, :4], x[:, :, :4], x[:, :, :4], mask=Causal())
    with pytest.raises(ValueError, match="feature"):
        cache.fork().attend(another, x[:, :, 4:], x[:, :, 4:], x[:, :, 4:], mask=Causal())
    last = cache.attend(equal, x[:, :, 4:], x[:, :, 4:], x[:, :, 4:], mask=Causal())
    torch.testing.assert_close(torch.cat([first, last], 2), full)


def test_conflicting_sources_of_directions_are_refused() -> None:
    omega = torch.randn(8, D)
    with pytest.raises(ValueError, match="num_features must be 8, the number of directions, or None; got 256"):
        Performer(256, directions=omega)
    with pytest.raises(ValueError, match="Performer: redraw must be None when directions are given; got 3"):
        Performer(directions=omega, redraw=3)
    message = r"directions must be a float tensor of shape \[num_features, head_dim\]; got int64 \[2\]"
    with pytest.raises(ValueError, match=message):
        Performer(directions=torch.arange(2))
    with pytest.raises(NotImplementedError, match="they were passed by the caller and are not random"):
        Performer(directions=omega).draw()
    x = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"directions must have shape \[num_features, 4\].*; got \[8, 8\]"):
        Performer(directions=omega)(x, x)
