"""AttentionPool: one vector for a sequence."""

import pytest
import torch

from saccade import masks, mechanisms, nn, scores
from saccade.mechanisms import Softmax

SCORES = [scores.Dot(), scores.Bilinear(6, 6), scores.Additive(6, 6, 10), scores.Cosine(), scores.Gaussian()]


@pytest.mark.parametrize("score", SCORES, ids=repr)
def test_a_learned_query_averages_what_counts(score):
    torch.manual_seed(0)
    pool = nn.AttentionPool(6, mechanism=Softmax(score=score))
    x = torch.randn(3, 7, 6)
    mask = masks.Padding((4, 7, 1))
    pooled, weights = pool(x, mask=mask), pool.matrix(x, mask=mask).to_dense()
    torch.testing.assert_close(pooled, torch.einsum("bhqn,bnd->bd", weights, x))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 1))
    assert weights[0, 0, 0, 4:].count_nonzero() == 0
    torch.testing.assert_close(pooled[2], x[2, 0])
    pooled.sum().backward()
    assert pool.query.grad.abs().max() > 0


def test_the_formula_of_a_given_query():
    pool = nn.AttentionPool(6, query_dim=6)
    x, query = torch.randn(2, 5, 6), torch.randn(2, 6)
    weights = (torch.einsum("bd,bnd->bn", query, x) * 6**-0.5).softmax(-1)
    torch.testing.assert_close(pool(x, query), torch.einsum("bn,bnd->bd", weights, x))
    several = torch.stack([query, -query], 1)
    torch.testing.assert_close(pool(x, several)[:, 0], pool(x, query))
    assert pool.query is None


def test_with_heads_it_is_multi_head_attention():
    pool = nn.AttentionPool(8, 2, num_queries=3)
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(pool(x), pool.attention(pool.query.expand(2, -1, -1), x))
    assert pool.matrix(x).shape == (2, 2, 3, 5)


class LatentPool(torch.nn.Module):
    """Attention pooling with a latent query as timm's AttentionPoolLatent does it, its MLP aside."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.latent = torch.nn.Parameter(torch.randn(1, 1, dim))
        self.q, self.proj = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)
        self.kv = torch.nn.Linear(dim, 2 * dim)

    def forward(self, x):
        """``[batch, len, dim] -> [batch, dim]``."""
        batch, length, dim = x.shape
        width = dim // self.heads
        q = self.q(self.latent.expand(batch, -1, -1)).reshape(batch, 1, self.heads, width).transpose(1, 2)
        k, v = self.kv(x).reshape(batch, length, 2, self.heads, width).permute(2, 0, 3, 1, 4).unbind(0)
        pooled = (q * width**-0.5 @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(pooled.transpose(1, 2).reshape(batch, 1, dim))[:, 0]


def test_it_equals_a_latent_pool_on_converted_weights():
    torch.manual_seed(0)
    theirs, ours = LatentPool(12, 3), nn.AttentionPool(12, 3)
    state = theirs.state_dict()
    converted = {"query": state["latent"][0]}
    for part in ("weight", "bias"):
        key, value = state[f"kv.{part}"].chunk(2)
        converted |= {
            f"attention.query_projection.{part}": state[f"q.{part}"],
            f"attention.key_projection.{part}": key,
            f"attention.value_projection.{part}": value,
            f"attention.output_projection.{part}": state[f"proj.{part}"],
        }
    ours.load_state_dict(converted)
    x = torch.randn(2, 9, 12)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_one_query_has_no_axis_and_several_have_one():
    x = torch.randn(2, 5, 8)
    assert nn.AttentionPool(8)(x).shape == (2, 8)
    assert nn.AttentionPool(8, num_queries=1)(x).shape == (2, 1, 8)


def test_no_token_counts_gives_0():
    assert nn.AttentionPool(6)(torch.randn(1, 4, 6), mask=masks.Padding((0,))).count_nonzero() == 0


def test_dropout_in_training_only():
    pool = nn.AttentionPool(6, dropout_p=0.5)
    x = torch.randn(2, 50, 6)
    torch.manual_seed(0)
    first, second = pool(x), pool(x)
    assert not torch.equal(first, second)
    pool.eval()
    assert torch.equal(pool(x), pool(x))


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: nn.AttentionPool(0), ValueError, "embed_dim must be an int of at least 1; got 0"),
        (lambda: nn.AttentionPool(None), ValueError, "embed_dim must be an int of at least 1; got None"),
        (lambda: nn.AttentionPool(6, num_queries=2, query_dim=6), ValueError, "num_queries must be None"),
        (lambda: nn.AttentionPool(6, mechanism=scores.Cosine()), TypeError, r"pass a score as mechanisms.Softmax"),
        (
            lambda: nn.AttentionPool(6)(torch.zeros(2, 6)),
            ValueError,
            r"x must have shape \[batch, len, embed_dim\] = \[batch, len, 6\]; got",
        ),
        (lambda: nn.AttentionPool(6)(torch.zeros(2, 3, 6), torch.zeros(2, 6)), ValueError, "query must be None"),
        (lambda: nn.AttentionPool(6, query_dim=4)(torch.zeros(2, 3, 6)), ValueError, "query must be given"),
        (
            lambda: nn.AttentionPool(6, query_dim=4)(torch.zeros(2, 3, 6), torch.zeros(3, 4)),
            ValueError,
            r"query must have shape \[batch, query_dim\] = \[2, 4\]; got \[3, 4\]",
        ),
    ],
)
def test_wrong_shapes_are_refused(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()


def test_softmax_checks_its_arguments():
    with pytest.raises(TypeError, match=r"Softmax: score must be a saccade Score, .* or None; got str\."):
        mechanisms.Softmax(score="additive")
    with pytest.raises(TypeError, match=r"Softmax: bias must be a saccade Bias or None; got Tensor\."):
        mechanisms.Softmax(bias=torch.zeros(3))
    for wrong in (torch.tensor(1), torch.tensor([1, 2])):
        with pytest.raises(TypeError, match=r"sink_logit must be a float tensor \[num_heads\]; got int64"):
            Softmax(sink_logit=wrong)
    with pytest.raises(ValueError, match=r"sink_logit must have shape \[num_heads\]; got \[\]"):
        Softmax(sink_logit=torch.tensor(1.0))
    with pytest.raises(TypeError, match="sink_logit must be a tensor, a number of heads"):
        mechanisms.Softmax(sink_logit=0)


def test_heads_stand_side_by_side_without_an_output_projection():
    torch.manual_seed(0)
    pool = nn.AttentionPool(16, 4, output_projection=False)
    x = torch.randn(2, 5, 16)
    weights = pool.matrix(x).to_dense()
    value = pool.attention.value_projection(x).unflatten(2, (4, 4)).transpose(1, 2)
    torch.testing.assert_close(pool(x), (weights @ value).transpose(1, 2).flatten(2)[:, 0])
    assert "attention.output_projection.weight" not in pool.state_dict()
    with pytest.raises(ValueError, match="output_projection must be True when num_heads is None"):
        nn.AttentionPool(16, output_projection=False)
