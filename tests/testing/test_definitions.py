"""Tests of the definitions of scores and relative biases, against loops over floats, torch and transformers."""

import math

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from saccade import positions, scores
from saccade.testing import definitions, oracle
from saccade.testing.case import seeded
from saccade.testing.problem import ReversedHeads

GENERATOR = torch.Generator().manual_seed(5)
QUERY, KEY = (torch.randn(2, 2, length, 3, generator=GENERATOR, dtype=torch.float64) for length in (4, 5))
PLACES = torch.arange(4, 8)[None], torch.arange(9)[None]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def norm(a):
    return math.sqrt(dot(a, a))


def rows_times(matrix, vector):
    return [dot(row, vector) for row in matrix.tolist()]


def by_hand(score, q, k):
    """Return a score of two lists of floats."""
    match score:
        case scores.Dot():
            return dot(q, k)
        case scores.Bilinear():
            return dot(q, rows_times(score.weight, k))
        case scores.Cosine():
            return dot(q, k) / (norm(q) * norm(k))
        case scores.Gaussian():
            sigma = math.exp(score.log_bandwidth.item())
            return -sum((x - y) ** 2 for x, y in zip(q, k, strict=True)) / (2 * sigma**2)
        case scores.Additive():
            pairs = zip(rows_times(score.query_weight, q), rows_times(score.key_weight, k), strict=True)
            return dot(score.output_weight.tolist(), [math.tanh(a + b) for a, b in pairs])


@pytest.mark.parametrize(
    "build",
    [
        scores.Dot,
        scores.Cosine,
        lambda: scores.Bilinear(3, 3),
        lambda: scores.Additive(3, 3, 4),
        lambda: scores.Gaussian(trainable=True),
    ],
)
def test_a_score_equals_loops_over_floats(build):
    score = seeded(build).double().requires_grad_(False)
    found = definitions.compare(score, QUERY, KEY)
    want = [[by_hand(score, q.tolist(), k.tolist()) for k in KEY[1, 1]] for q in QUERY[1, 1]]
    torch.testing.assert_close(found[1, 1], torch.tensor(want, dtype=torch.float64))


def test_a_vector_of_zeros_is_like_nothing():
    found = definitions.compare(scores.Cosine(), torch.zeros(1, 1, 1, 3), KEY[:1, :1])
    assert found.tolist() == [[[[0.0] * 5]]]


@pytest.mark.parametrize(
    ("score", "scale"),
    [(None, 0.5), (scores.Dot(), 0.5), (scores.Dot(scaled=False), 1.0), (scores.Cosine(), 1.0)],
)
def test_default_scale(score, scale):
    assert definitions.default_scale(score, 4) == scale


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12])
def test_slopes_are_those_of_transformers(heads):
    found = definitions.relative(positions.ALiBi(heads), torch.tensor([[8]]), torch.arange(9)[None], QUERY, 1.0)
    # There the number grows with the key's position, which in causal attention differs by a constant in each row.
    theirs = build_alibi_tensor(torch.ones(1, 9, dtype=torch.long), heads, torch.float32)[:, 0]
    torch.testing.assert_close(found[0, :, 0].float(), theirs - theirs[:, -1:])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 6), (6, 9), (16, 50)])
def test_buckets_are_those_of_transformers(num_buckets, max_distance, bidirectional):
    bias = seeded(lambda: positions.T5(2, num_buckets, max_distance, bidirectional))
    q, kv = torch.tensor([[200]]), torch.arange(400)[None]
    theirs = T5Attention._relative_position_bucket(kv - 200, bidirectional, num_buckets, max_distance)
    found = definitions.relative(bias, q, kv, QUERY, 1.0)
    torch.testing.assert_close(found[0, :, 0], bias.weight.detach()[theirs[0]].T.double(), rtol=0.0, atol=0.0)


def relative_by_hand(bias, q, kv, head, query, scale):
    """Return a relative bias from plain ints and lists of floats."""
    match bias:
        case positions.Clipped():
            return bias.weight[head].tolist()[max(-bias.reach, min(bias.reach, q - kv)) + bias.reach]
        case positions.ShawKeys():
            return scale * dot(query, bias.weight.tolist()[max(-bias.reach, min(bias.reach, kv - q)) + bias.reach])
        case positions.GridTable():
            (y, x), (row, column) = divmod(q, bias.width), divmod(kv, bias.width)
            place = (y - row + bias.height - 1) * (2 * bias.width - 1) + x - column + bias.width - 1
            return bias.weight[:, head].tolist()[place]


@pytest.mark.parametrize(
    "build",
    [lambda: positions.Clipped(2, 2), lambda: positions.ShawKeys(3, 2), lambda: positions.GridTable(2, 3, 4)],
)
def test_a_relative_bias_equals_loops_over_floats(build):
    bias = seeded(build).double().requires_grad_(False)
    found = definitions.relative(bias, *PLACES, QUERY, 0.7).expand(2, -1, -1, -1)
    for head in range(2):
        for i, q in enumerate(PLACES[0][0].tolist()):
            want = [relative_by_hand(bias, q, kv, head, QUERY[1, head, i].tolist(), 0.7) for kv in range(9)]
            assert found[1, head, i].tolist() == pytest.approx(want, abs=1e-14)


def test_heads_are_reversed_in_what_is_added_and_in_what_is_read():
    for build in (lambda: positions.Clipped(2, 2), lambda: positions.ShawKeys(3, 2)):
        bias = seeded(build).double().requires_grad_(False)
        plain = definitions.relative(bias, *PLACES, QUERY, 1.0)
        turned = definitions.relative(ReversedHeads(bias), *PLACES, QUERY.flip(1), 1.0)
        assert torch.equal(turned, plain.flip(1))
        distances = torch.arange(-3, 4)
        values = ReversedHeads(bias).values(distances, QUERY.flip(1), 1.0)
        assert torch.equal(values, bias.values(distances, QUERY, 1.0).flip(1))


def test_parts_without_a_definition_are_refused():
    class Mine(scores.Score):
        def prepare(self, query, key):
            raise NotImplementedError

    with pytest.raises(TypeError, match=r"score must be one of Dot, Bilinear, .*; got Mine"):
        definitions.compare(Mine(), QUERY, KEY)
    with pytest.raises(TypeError, match=r"bias must be one of ALiBi, .*; got Bias"):
        definitions.relative(positions.Bias(), *PLACES, QUERY, 1.0)


def test_a_sink_is_one_more_key_with_a_value_of_zero():
    logit = torch.tensor([0.3, -1.2], dtype=torch.float64)
    value = torch.randn(2, 2, 5, 2, generator=GENERATOR, dtype=torch.float64)
    allowed = torch.rand(2, 2, 4, 5, generator=GENERATOR) < 0.5
    allowed[0, 0, 1] = False
    some = allowed.any(-1, keepdim=True)
    # A key of zeros has score 0, to which a bias adds the logit.
    bias = torch.cat([torch.zeros(2, 2, 4, 5), logit[None, :, None, None].expand(2, 2, 4, 1)], 3)
    more = torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 2)
    want = oracle.attention(
        QUERY, torch.cat([KEY, more[0]], 2), torch.cat([value, more[1]], 2), torch.cat([allowed, some], 3), bias=bias
    )
    found = oracle.attention(QUERY, KEY, value, allowed, sink_logit=logit)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)
    assert found[1][0, 0, 1] == -math.inf
    _, lse = oracle.attention(QUERY, KEY, value, allowed)
    total = oracle.attention(QUERY, KEY, torch.ones_like(value), allowed, sink_logit=logit)[0]
    torch.testing.assert_close(total[..., 0], torch.sigmoid(lse - logit[:, None]))


def test_a_comparison_replaces_the_product():
    value = torch.randn(2, 1, 5, 2, generator=GENERATOR, dtype=torch.float64)
    allowed = torch.ones(2, 2, 4, 5, dtype=torch.bool)

    def alike(query, key):
        assert key.shape == (2, 2, 5, 3)  # a copy for each head
        return (query[:, :, :, None] * key[:, :, None]).sum(-1)

    found = oracle.attention(QUERY, KEY[:, :1], value, allowed, compare=alike, scale=0.3)
    want = oracle.attention(QUERY, KEY[:, :1], value, allowed, scale=0.3)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)
