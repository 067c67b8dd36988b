"""Scores: what the laws do not say of them."""

import math

import pytest
import torch
from torch import nn

import saccade as sc
from saccade import masks, scores
from saccade.scores import additive


def inputs(query_dim=8, key_dim=8, dtype=torch.float64):
    torch.manual_seed(0)
    sizes = [(2, 4, 9, query_dim), (2, 2, 12, key_dim), (2, 2, 12, 5)]
    return [torch.randn(*size, dtype=dtype).requires_grad_() for size in sizes]


class BahdanauInTensorFlowsWords(nn.Module):
    """Keras' and d2l's additive attention: dense layers for query, key and score."""

    def __init__(self, score):
        super().__init__()
        hidden, query_dim = score.query_weight.shape
        self.of_query = nn.Linear(query_dim, hidden, bias=False, dtype=torch.float64)
        self.of_key = nn.Linear(score.key_weight.shape[1], hidden, bias=False, dtype=torch.float64)
        self.of_score = nn.Linear(hidden, 1, bias=False, dtype=torch.float64)
        self.of_query.weight.data.copy_(score.query_weight)
        self.of_key.weight.data.copy_(score.key_weight)
        self.of_score.weight.data.copy_(score.output_weight[None])

    def forward(self, queries, keys, values, valid):
        """One head: ``[batch, len, dim]``, and how many keys count in each item."""
        features = torch.tanh(self.of_query(queries).unsqueeze(2) + self.of_key(keys).unsqueeze(1))
        energies = self.of_score(features).squeeze(-1)
        energies[torch.arange(keys.shape[1])[None, None] >= valid[:, None, None].expand_as(energies)] = -math.inf
        return torch.bmm(torch.softmax(energies, -1), values)


def test_additive_equals_the_layer_that_others_teach():
    score = scores.Additive(8, 6, 16).double()
    query, key, value = inputs(8, 6)
    theirs = BahdanauInTensorFlowsWords(score)(query[:, 0], key[:, 0], value[:, 0], torch.tensor([5, 12]))
    mine = [x[:, :1] for x in (query, key, value)]
    ours = sc.attention(*mine, masks.Padding((5, 12)), score=score)[:, 0]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("at_once", [1, 40, 700])
def test_additive_is_the_same_in_pieces_of_any_size(at_once, monkeypatch):
    score = scores.Additive(8, 6, 16).double()
    tensors = inputs(8, 6)
    leaves = [*tensors, *score.parameters()]
    grad = torch.randn(2, 4, 9, 5, dtype=torch.float64)
    whole = torch.autograd.grad(sc.attention(*tensors, masks.Causal(), score=score), leaves, grad)
    monkeypatch.setattr(additive, "_AT_ONCE", at_once)
    pieces = torch.autograd.grad(sc.attention(*tensors, masks.Causal(), score=score), leaves, grad)
    for got, expected in zip(pieces, whole, strict=True):
        torch.testing.assert_close(got, expected)


def test_additive_says_that_it_has_no_second_derivative():
    score = scores.Additive(8, 8, 4).double()
    query, key, value = inputs()
    out = sc.attention(query, key, value, score=score, impl="reference")
    (first,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(first.sum(), query)


@pytest.mark.parametrize("score", [scores.Bilinear(8, 8), scores.Cosine(), scores.Gaussian(trainable=True)], ids=repr)
def test_maps_have_second_derivatives(score):
    score = score.double()
    query, key, value = inputs()

    def answer(*tensors):
        return sc.attention(*tensors, masks.Causal(), score=score, impl="reference").sum()

    small = [x.detach()[:1, :2, :4, :3].clone().requires_grad_() for x in (query, key, value)]
    score = scores.Bilinear(3, 3).double() if isinstance(score, scores.Bilinear) else score
    assert torch.autograd.gradgradcheck(answer, small)


def test_a_row_of_zeros_has_cosine_0_with_everything_and_finite_gradients():
    query, key, value = inputs()
    with torch.no_grad():
        key[:, :, 3] = 0.0
    out = sc.attention(query, key, value, score=scores.Cosine())
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(out.sum(), [query, key, value]))


def test_a_gaussian_does_not_mind_where_the_origin_is():
    query, key, value = inputs()
    shift = torch.randn(8, dtype=torch.float64)
    near, far = (
        sc.attention(query + by, key + by, value, score=scores.Gaussian(1.5)) for by in (torch.zeros_like(shift), shift)
    )
    torch.testing.assert_close(near, far)


def test_the_lse_of_a_gaussian_is_that_of_the_kernel():
    query, key, value = inputs()
    _, lse = sc.attention_with_lse(query, key, value, score=scores.Gaussian(1.5))
    wide = key.repeat_interleave(2, 1)
    torch.testing.assert_close(lse, (-torch.cdist(query, wide).square() / (2 * 1.5**2)).logsumexp(-1))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: scores.Bilinear(0, 4), r"Bilinear: query_dim must be an int of at least 1; got 0\."),
        (lambda: scores.Additive(4, 4, 2.0), r"Additive: hidden_dim must be an int of at least 1; got 2\.0\."),
        (lambda: scores.Gaussian(-1.0), r"Gaussian: bandwidth must be a finite number above 0; got -1\.0\."),
        (lambda: scores.Gaussian(10**400), "Gaussian: bandwidth must be a finite number above 0; got 1000"),
        (lambda: scores.Gaussian(math.nan), r"Gaussian: bandwidth must be a finite number above 0; got nan\."),
    ],
)
def test_a_wrong_size_is_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_wrong_widths_are_a_sentence():
    query, key, value = inputs(8, 6)
    with pytest.raises(ValueError, match=r"attention: head_dim must be the same for query and key; got 8 and 6\."):
        sc.attention(query, key, value, score=scores.Cosine())
    with pytest.raises(ValueError, match=r"attention: width of key must be 5, like Bilinear's; got 6\."):
        sc.attention(query, key, value, score=scores.Bilinear(8, 5))
    with pytest.raises(TypeError, match=r"attention: score must be a saccade Score, .* or None; got str\."):
        sc.attention(query, key, value, score="dot")
    with pytest.raises(ValueError, match="key heads must divide query heads"):
        sc.attention(query[:, :3], key, value, score=scores.Bilinear(8, 6))
    with pytest.raises(ValueError, match=r"sink_logit must have shape \[4\], one for each head; got \[3\]\."):
        sc.attention(query, query[:, :2], query[:, :2], sink_logit=torch.zeros(3))
    with pytest.raises(TypeError, match="bias must be a tensor, a saccade positions"):
        sc.attention(query, query[:, :2], query[:, :2], bias=scores.Cosine())
    with pytest.raises(ValueError, match="bias must be made for 4 heads, or one; got ALiBi for 3 heads"):
        sc.attention(query, query[:, :2], query[:, :2], bias=sc.positions.ALiBi(3))


def test_a_sink_is_one_more_score_without_a_value():
    query, key, value = inputs()
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    out, lse = sc.attention_with_lse(query, key, value, masks.Window(2, 0), sink_logit=sink)
    raw = (query @ key.repeat_interleave(2, 1).mT) * 8**-0.5
    raw = raw.masked_fill(~masks.Window(2, 0).to_dense(9, 12), -math.inf)
    with_sink = torch.cat([raw, sink[None, :, None, None].expand(2, 4, 9, 1)], -1)
    want = with_sink.softmax(-1)[..., :-1] @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, with_sink.logsumexp(-1))
    for got, expected in zip(*(torch.autograd.grad(x.sin().sum(), [query, sink]) for x in (out, want)), strict=True):
        torch.testing.assert_close(got, expected)
    matrix = sc.AttentionMatrix(query, key, masks.Window(2, 0), sink_logit=sink)
    torch.testing.assert_close(matrix.to_dense(), with_sink.softmax(-1)[..., :-1])
    assert not matrix.is_stochastic


@pytest.mark.parametrize("make", [lambda: scores.Dot(scaled="no"), lambda: scores.Gaussian(trainable="no")])
def test_a_wrong_flag_is_refused(make):
    with pytest.raises(TypeError, match=r"(scaled|trainable) must be True or False; got 'no'"):
        make()
