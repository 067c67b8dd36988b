"""Arguments of an attention function of transformers are read as the ingredients of a matrix."""

import pytest
import torch

import saccade as sc
from saccade.integrations.tensor_masks import mask_of_tensor
from saccade.integrations.transformers_call import AttentionCall

LOWEST = torch.finfo(torch.float32).min


class Layer(torch.nn.Module):
    """A stand-in for an attention layer, with the only attribute that is read."""

    def __init__(self, is_causal=True):
        super().__init__()
        self.is_causal = is_causal


def weights(attention_mask=None, q_len=5, kv_len=5, *, own=True, **facts):
    """Return the matrix of random queries and keys, and the scores whose softmax it should be."""
    query, key = torch.randn(2, 2, q_len, 8), torch.randn(2, 2, kv_len, 8)
    call = AttentionCall.of(Layer(own), query, key, attention_mask, facts)
    return call.matrix().to_dense(), query @ key.mT * 8**-0.5


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_row_that_floats_hide_altogether_is_empty():
    mask = torch.zeros(2, 1, 5, 5)
    mask[0, :, 2] = LOWEST
    mask[1, :, 2] = -torch.inf
    mask[:, :, 3, :2] = 2 * LOWEST / 3
    got, scores = weights(mask)
    assert (got[:, :, 2] == 0).all()
    assert (got[:, :, 3, :2] == 0).all()
    close(got[:, :, [0, 1, 4]], scores.softmax(-1)[:, :, [0, 1, 4]])
    allowed, added = mask_of_tensor(mask)
    assert torch.equal(allowed, mask == 0)
    assert added is None


def test_floats_that_are_added():
    bias, terms = torch.randn(1, 2, 5, 5), torch.randn(2, 1, 5, 5)
    got, scores = weights(terms, position_bias=bias)
    close(got, (scores + bias + terms).softmax(-1))
    got, scores = weights(terms)
    close(got, (scores + terms).softmax(-1))


def test_a_bias_for_a_cache_with_room_is_cut():
    bias = torch.randn(1, 2, 5, 9)
    got, scores = weights(torch.ones(2, 1, 5, 9, dtype=torch.bool), position_bias=bias)
    close(got, (scores + bias[..., :5]).softmax(-1))


@pytest.mark.parametrize("q_len, kv_len", [(5, 5), (3, 5), (1, 5)])
@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("own", [True, False])
def test_without_a_mask_the_flag_decides(q_len, kv_len, flag, own):
    got, scores = weights(None, q_len, kv_len, own=own, **({} if flag is None else {"is_causal": flag}))
    is_causal = (own if flag is None else flag) and q_len > 1
    hidden = torch.ones(q_len, kv_len, dtype=torch.bool).triu(1) if is_causal else torch.zeros(1, 1, dtype=torch.bool)
    close(got, scores.masked_fill(hidden, -torch.inf).softmax(-1))


def test_learned_queries_are_those_of_all_items():
    query, key = torch.randn(1, 2, 3, 8), torch.randn(4, 2, 5, 8)
    call = AttentionCall.of(Layer(False), query, key, None, {})
    close(call.matrix().to_dense(), (query @ key.mT * 8**-0.5).softmax(-1))


@pytest.mark.parametrize(
    "facts, reason",
    [
        ({"output_attentions": True}, r"saccade: Layer cannot run(.|\n)*passes output_attentions(.|\n)*saccade.record"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 5])}, r"passes cu_seq_lens_q, but its mask does not(.|\n)*position_ids"),
        ({"block_table": torch.tensor([0]), "sinks": 1}, r"passes block_table, which(.|\n)*passes sinks, which"),
        (
            {"block_indices": torch.tensor([0])},
            r"an indexer cannot run(.|\n)*have shape \[1\], not \[batch, key heads, 5, selected\]",
        ),
        (
            {"indices": torch.tensor([0])},
            r"an indexer cannot run(.|\n)*have shape \[1\], not \[batch, 5, selected\]",
        ),
        ({"cache": object()}, r"passes cache(.|\n)*paged"),
    ],
)
def test_unknown_arguments_are_refused(facts, reason):
    with pytest.raises(sc.UnsupportedError, match=reason):
        weights(**facts)


@pytest.mark.parametrize("mask", [torch.ones(2, 5, dtype=torch.bool), {"full": None}, torch.ones(5)])
def test_masks_of_other_forms_are_refused(mask):
    with pytest.raises(sc.UnsupportedError, match=r"saccade: a mask cannot run(.|\n)*it is a (Tensor of shape|dict)"):
        weights(mask)


def test_arguments_without_effect_on_the_matrix_are_accepted():
    got, scores = weights(None, use_cache=True, position_ids=torch.arange(5), sliding_window=3, is_causal=False)
    close(got, scores.softmax(-1))
