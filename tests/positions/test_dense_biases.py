"""Biases and scores written out equal what the attention reads of them."""

import pytest
import torch

import saccade as sc
from saccade import positions, scores

HEADS, Q, K, D = 4, 5, 8, 6
BIASES = {
    "alibi": lambda: positions.ALiBi(HEADS),
    "t5": lambda: positions.T5(HEADS, num_buckets=8, max_distance=6),
    "clipped": lambda: positions.Clipped(HEADS, 3),
    "shaw": lambda: positions.ShawKeys(D, 3),
    "shaw, two reaches": lambda: positions.ShawKeys(D, (4, 1)),
    "shaw, each head": lambda: positions.ShawKeys(D, (4, 1), HEADS),
    "grid": lambda: positions.GridTable(HEADS, 2, 4),
}
SCORES = {
    "dot": scores.Dot,
    "cosine": scores.Cosine,
    "gaussian": lambda: scores.Gaussian(1.5),
    "bilinear": lambda: scores.Bilinear(D, D),
    "additive": lambda: scores.Additive(D, D, 7),
    "modified": lambda: scores.Modified(lambda s, b, h, q, kv: s * (1 + h) - (q - kv).abs()),
}


def inputs():
    return torch.randn(2, HEADS, Q, D, dtype=torch.float64), torch.randn(2, 2, K, D, dtype=torch.float64)


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("places", [None, (torch.tensor([1, 5, 2, 7, 7]), torch.tensor([0, 1, 3, 4, 5, 6, 7, 2]))])
def test_a_bias_is_what_is_added_to_scores(name, places):
    bias = BIASES[name]().double()
    for parameter in bias.parameters():
        torch.nn.init.normal_(parameter)
    query, key = inputs()
    where = {} if places is None else dict(zip(("q_positions", "kv_positions"), places, strict=True))
    plain = sc.AttentionMatrix(query, key, scale=0.3, **where).scores.to_dense()
    with_bias = sc.AttentionMatrix(query, key, scale=0.3, bias=bias, **where).scores.to_dense()
    written = bias.to_dense(Q, K, query=query, scale=0.3, **where)
    torch.testing.assert_close(with_bias - plain, written.double().expand(2, HEADS, Q, K))


@pytest.mark.parametrize("name", [name for name in BIASES if name != "grid"])
def test_a_bias_of_more_queries_than_keys(name):
    bias = BIASES[name]()
    query, key = torch.randn(2, HEADS, 9, D), torch.randn(2, HEADS, 4, D)
    plain, with_bias = (sc.AttentionMatrix(query, key, scale=0.3, bias=own).scores.to_dense() for own in (None, bias))
    written = bias.to_dense(9, 4, query=query, scale=0.3)
    torch.testing.assert_close(with_bias - plain, written.expand(2, HEADS, 9, 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_what_the_softmax_is_taken_of(name):
    score = SCORES[name]().double()
    query, key = inputs()
    scale = None if name == "modified" else 1.0  # what is changed has been scaled
    found = sc.AttentionMatrix(query, key, score=score, scale=scale).scores.to_dense()
    torch.testing.assert_close(score.to_dense(query, key), found)
