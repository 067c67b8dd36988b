"""Questions to a matrix under ``vmap`` are answered as for each sample alone."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import saccade as sc
from saccade import masks, positions
from saccade.statistics import Statistic

SAMPLES = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
OTHERS = torch.randn(3, 2, 2, 6, 8, generator=torch.Generator().manual_seed(1))
MASKS = {
    "none": None,
    "causal": masks.Causal(),
    "documents": masks.Documents([2, 4], rule=masks.Causal()),
    "empty rows": masks.Causal() & ~masks.Global([0]),
}
TERMS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "ALiBi": {"bias": positions.ALiBi(4)},
    "bias": {"bias": torch.randn(1, 4, 6, 6, generator=torch.Generator().manual_seed(2))},
}
QUESTIONS = {
    "entropy": lambda A: A.entropy(),
    "received": lambda A: A.received(),
    "pooled": lambda A: A.pooled(3),
    "strongest": lambda A: A.topk(2).weights,
    "their places": lambda A: A.topk(2).indices,
    "weights": lambda A: A.to_dense(),
    "a row": lambda A: A[:, 1, 3],
    "lse": lambda A: A.lse,
    "scores": lambda A: A.scores.to_dense(),
    "transposed": lambda A: A.mT @ torch.ones(2, 4, 6, 1),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("mask", MASKS)
def test_answers_are_those_of_each_sample(mask, terms, question):
    def asked(query: Tensor, key: Tensor) -> Tensor:
        return QUESTIONS[question](sc.AttentionMatrix(query, key, MASKS[mask], **TERMS[terms]))

    expected = torch.stack([asked(*both) for both in zip(SAMPLES, OTHERS, strict=True)])
    torch.testing.assert_close(vmap(asked)(SAMPLES, OTHERS), expected)
    one_key = torch.stack([asked(query, OTHERS[0]) for query in SAMPLES])
    torch.testing.assert_close(vmap(asked, (0, None))(SAMPLES, OTHERS[0]), one_key)
    torch.testing.assert_close(vmap(vmap(asked))(SAMPLES[None], OTHERS[None])[0], expected)


@pytest.mark.parametrize("question", ["weights", "a row", "transposed", "scores"])
@pytest.mark.parametrize("mask", ["none", "causal", "documents"])
def test_gradients_are_those_of_each_sample(mask, question):
    bias = torch.randn(3, 1, 4, 6, 6, dtype=torch.float64)

    def asked(query: Tensor, bias: Tensor) -> Tensor:
        found = QUESTIONS[question](sc.AttentionMatrix(query, OTHERS[0].to(query), MASKS[mask], bias=bias))
        return found.masked_fill(found == -torch.inf, 0.0).square().sum()

    queries = SAMPLES.double() if question != "transposed" else SAMPLES
    bias = bias.to(queries)
    together = vmap(grad(asked, (0, 1)))(queries, bias)
    for number in range(3):
        for got, want in zip(together, grad(asked, (0, 1))(queries[number], bias[number]), strict=True):
            torch.testing.assert_close(got[number], want)
    torch.testing.assert_close(jacrev(asked)(queries[0], bias[0]), together[0][0])


def test_nan_stays_with_its_sample_and_where_it_may_be_seen():
    spoilt = SAMPLES.clone()
    spoilt[1, 0, :, 4] = torch.nan
    out = vmap(lambda x: sc.AttentionMatrix(x, x, masks.Causal()).entropy())(spoilt)
    assert out[0].isfinite().all()
    assert out[1, 0, :, :4].isfinite().all()
    assert out[1, 0, :, 4:].isnan().all()
    assert out[1, 1].isfinite().all()


@pytest.mark.parametrize("mask", MASKS)
def test_the_definition_runs_under_vmap(mask):
    def attended(x: Tensor, impl: str) -> Tensor:
        return sc.attention(x, x, x, MASKS[mask], impl=impl)

    got = vmap(lambda x: attended(x, "reference"))(SAMPLES)
    torch.testing.assert_close(got, vmap(lambda x: attended(x, "auto"))(SAMPLES))
    torch.testing.assert_close(got[1], attended(SAMPLES[1], "reference"))
    with pytest.raises(sc.UnsupportedError, match="so they would share one dropout mask"):
        vmap(lambda x: sc.attention(x, x, x, dropout_p=0.5, impl="reference"), randomness="same")(SAMPLES)


class Rows(Statistic[int, int]):
    """The number of rows, as an int and not a tensor."""

    def start(self, info):
        return 0

    def add(self, state, block):
        return state + len(block.rows)

    def merge(self, state, other):
        return state + other

    def finish(self, state):
        return state


def test_questions_that_vmap_cannot_map_are_refused():
    with pytest.raises(sc.UnsupportedError, match="not a tensor whose first axis is the batch"):
        vmap(lambda x: sc.AttentionMatrix(x, x).compute(Rows())[0])(SAMPLES)
    with pytest.raises(sc.UnsupportedError, match="the sink logits, which all batch items share"):
        vmap(lambda s: sc.AttentionMatrix(SAMPLES[0], SAMPLES[0], sink_logit=s).to_dense())(torch.zeros(3, 4))


def test_a_matrix_keeps_nothing_of_a_vmap():
    A, values = sc.AttentionMatrix(SAMPLES[0], OTHERS[0]), OTHERS
    assert vmap(lambda value: A @ value)(values).shape == (3, 2, 4, 6, 8)
    torch.testing.assert_close(A.lse, sc.attention_with_lse(SAMPLES[0], OTHERS[0], OTHERS[0])[1])
