"""Masks made from what other libraries hand over, against what those libraries make of it."""

import re

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import BertConfig, LlamaConfig, MistralConfig
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask, create_sliding_window_causal_mask

from saccade import masks
from saccade.masks import Causal, Documents, Full, Padding, Window

N = 7
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]])
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 0, 0]])


def theirs(make, config, attention_mask, **options):
    """The bool tensor that a model of transformers would use, True = may attend."""
    embeds = torch.zeros(len(attention_mask), N, 8)
    config._attn_implementation = "sdpa"
    made = make(config=config, inputs_embeds=embeds, attention_mask=attention_mask, **options)
    return torch.ones(len(attention_mask), 1, N, N, dtype=torch.bool) if made is None else made.expand(-1, 1, N, N)


@pytest.mark.parametrize("given", [RIGHT, RIGHT.flip(1), HOLES], ids=["right", "left", "holes"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32, torch.float16, torch.uint8])
def test_attention_masks_say_what_transformers_makes_of_them(given, dtype):
    mask = masks.from_attention_mask(given.to(dtype))
    expected = theirs(create_bidirectional_mask, BertConfig(), given)
    assert torch.equal(mask.to_dense(N, batch=3), expected)
    assert isinstance(mask, masks.Dense if given is HOLES else Padding)
    past = {"past_key_values": None}
    expected = theirs(create_causal_mask, LlamaConfig(), given, **past)
    got = (Causal() & mask).to_dense(N, batch=3)
    is_token = given.bool()[:, None, :, None]  # of rows that are padding, theirs may see anything
    assert torch.equal(got & is_token, expected & is_token)


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_padded_side_is_recognised(side):
    given = RIGHT if side == "right" else RIGHT.flip(1)
    mask = masks.from_attention_mask(given)
    assert mask == (Padding([5, 7, 1]) if side == "right" else Padding([5, 7, 1], side="left", padded_len=N))


def test_an_attention_mask_of_four_dimensions_is_the_pairs():
    allowed = torch.rand(2, 1, N, N) < 0.5
    for given in (
        allowed,
        torch.zeros(2, 1, N, N).masked_fill(~allowed, torch.finfo(torch.float32).min),
        torch.zeros(2, 1, N, N, dtype=torch.bfloat16).masked_fill(~allowed, -torch.inf),
    ):
        assert torch.equal(masks.from_attention_mask(given).to_dense(N, batch=2), allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_half_the_lowest_number_hides_in_an_additive_mask(dtype):
    """Models add such masks up, and round."""
    given = torch.zeros(1, 1, 2, 2, dtype=dtype)
    given[0, 0, 0, 1] = torch.finfo(dtype).min / 2
    assert masks.from_attention_mask(given).to_dense(2)[0, 0].tolist() == [[True, False], [True, True]]
    with pytest.raises(ValueError, match="be 0 for visible pairs and the lowest number for hidden pairs"):
        masks.from_attention_mask(given * 0.8)


def test_a_text_may_hold_nothing():
    assert masks.from_cu_seqlens(torch.tensor([0, 3, 3, 5])) == Documents([3, 0, 2])


@pytest.mark.parametrize("rule", [None, Causal(), Window(1, 0)])
def test_cumulative_lengths_and_position_ids_are_documents(rule):
    lengths = [3, 1, 4, 2]
    ends = torch.tensor([0, 3, 4, 8, 10], dtype=torch.int32)
    ids = torch.cat([torch.arange(n) for n in lengths])
    expected = Documents(lengths, rule)
    assert masks.from_cu_seqlens(ends, rule) == masks.from_cu_seqlens(ends.tolist(), rule) == expected
    assert masks.from_position_ids(ids, rule) == masks.from_position_ids(ids[None], rule) == expected
    two = torch.stack([ids, torch.arange(10)])
    assert masks.from_position_ids(two, rule) == Documents([lengths, [10]], rule)


def test_position_ids_say_what_transformers_makes_of_them():
    ids = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    options = {"past_key_values": None, "position_ids": ids}
    embeds, config = torch.zeros(1, N, 8), LlamaConfig()
    config._attn_implementation = "sdpa"
    expected = create_causal_mask(config=config, inputs_embeds=embeds, attention_mask=None, **options)
    assert torch.equal(masks.from_position_ids(ids, Causal()).to_dense(N), expected)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_a_sliding_window_counts_as_transformers_counts(window):
    config = MistralConfig(sliding_window=window)
    expected = theirs(create_sliding_window_causal_mask, config, torch.ones(1, N), past_key_values=None)
    assert torch.equal(masks.from_sliding_window(window).to_dense(N), expected)
    assert masks.from_sliding_window(None) == Causal()


@pytest.mark.parametrize("left", [-1, 0, 2])
@pytest.mark.parametrize("right", [-1, 0, 3])
def test_a_pair_counts_as_flash_attention_counts(left, right):
    """The documentation says: i sees j if i + kv_len - q_len - left <= j <= i + kv_len - q_len + right."""
    q_len, kv_len = 5, 8
    i, j = torch.arange(q_len)[:, None] + kv_len - q_len, torch.arange(kv_len)
    expected = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    mask = masks.from_sliding_window((left, right))
    assert torch.equal(mask.to_dense(q_len, kv_len)[0, 0], expected)
    assert isinstance(mask, Full if left == right == -1 else Window)


def _rule(b, h, q, kv):
    return (q >= kv) & (q - kv < 70) | (kv < 3 + b + h)


@pytest.mark.parametrize("batch, q_len, kv_len", [(1, 256, 256), (1, 300, 300), (2, 256, 256), (1, 100, 300)])
def test_block_masks_are_the_rule_they_were_made_of(batch, q_len, kv_len):
    theirs = create_block_mask(_rule, batch, None, q_len, kv_len, device="cpu", BLOCK_SIZE=64)
    mask = masks.from_block_mask(theirs)
    index = (torch.arange(n) for n in (batch, 1, q_len, kv_len))
    b, h, q, kv = torch.meshgrid(*index, indexing="ij")
    assert torch.equal(mask.to_dense(q_len, kv_len, batch=batch), _rule(b, h, q, kv))


def test_blocks_that_a_block_mask_leaves_out_are_not_asked():
    mask = masks.from_block_mask(
        create_block_mask(lambda b, h, q, kv: (q - kv).abs() < 9, 1, 1, 512, 512, device="cpu")
    )
    assert mask.density(512) < 0.05
    assert "Blocks" in str(mask)


REFUSED = {
    "a list of lists": (lambda: masks.from_attention_mask([[1, 0]]), "attention_mask must be a tensor; got list"),
    "three dimensions": (lambda: masks.from_attention_mask(torch.ones(1, 2, 3)), "have shape [batch, kv_len] or"),
    "other numbers": (lambda: masks.from_attention_mask(torch.tensor([[1, 2]])), "1 at tokens and 0 at padding; got 2"),
    "terms": (lambda: masks.from_attention_mask(torch.full((1, 1, 2, 2), -2.0)), "as bias="),
    "whole numbers of pairs": (lambda: masks.from_attention_mask(torch.ones(1, 1, 2, 2).long()), "mask.bool()"),
    "lengths from 1": (lambda: masks.from_cu_seqlens(torch.tensor([1, 3])), "begin with 0 and never decrease"),
    "lengths that fall": (lambda: masks.from_cu_seqlens([0, 3, 2]), "begin with 0 and never decrease"),
    "lengths with a point": (lambda: masks.from_cu_seqlens(torch.tensor([0.0, 3.0])), "whole numbers; got torch.float"),
    "ids of a step": (lambda: masks.from_position_ids(torch.tensor([5])), "count 0, 1, 2, … from the start"),
    "ids that jump": (lambda: masks.from_position_ids(torch.tensor([0, 2])), "count 0, 1, 2, … from the start"),
    "ids in a cube": (lambda: masks.from_position_ids(torch.zeros(1, 1, 1).long()), "[len] or [batch, len]"),
    "no window": (lambda: masks.from_sliding_window(0), "sliding_window must be an int of at least 1; got 0"),
    "three sides": (lambda: masks.from_sliding_window((1, 2, 3)), "be a number, or a pair (left, right)"),
    "a function": (lambda: masks.from_block_mask(_rule), "a function (b, h, q, kv) -> bool is already a mask"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_no_mask_is_refused_with_the_rule(name):
    make, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        make()


@pytest.mark.parametrize("shape", [(3, 4, 9, 9), (1, 4, 9, 9), (2, 3, 9, 9)], ids=str)
def test_a_mask_for_other_items_or_heads_is_refused(shape: tuple[int, int, int, int]) -> None:
    heads = masks.Blocks(torch.ones(4, 5, 5, dtype=torch.bool), 2)
    mask = masks.Padding([3, 4]) & heads
    assert masks.as_mask(mask, (2, 4, 9, 9)) is mask
    with pytest.raises(ValueError, match=r"as_mask: mask must be for 1( or 3)? (batch items|heads)"):
        masks.as_mask(mask, shape)
    with pytest.raises(ValueError, match=r"as_mask: mask must be for 1 or 3 batch items"):
        masks.as_mask(masks.Padding([3, 4]), (3, *shape[1:]))


def test_two_heads_are_not_three() -> None:
    mask = masks.Blocks(torch.ones(2, 5, 5, dtype=torch.bool), 2)
    with pytest.raises(ValueError, match=r"as_mask: mask must be for 1 or 3 heads; got 2\."):
        masks.as_mask(mask, (1, 3, 9, 9))


def test_a_function_and_a_column_for_each_head_are_masks() -> None:
    found = masks.as_mask(lambda b, h, q, kv: q >= kv, (1, 1, 5, 5))
    assert torch.equal(found.to_dense(5), Causal().to_dense(5))
    column = torch.rand(2, 3, 5, 1, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(masks.as_mask(column, (2, 3, 5, 4)).to_dense(5, 4), column.expand(2, 3, 5, 4))


def test_blocks_of_one_item_are_not_those_of_all() -> None:
    def rule(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (q // 128 == kv // 128) ^ (b == 1)

    given = create_block_mask(rule, 2, None, 256, 256, device="cpu", BLOCK_SIZE=128)
    at = [
        torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate((2, 1, 256, 256))
    ]
    assert torch.equal(masks.from_block_mask(given).to_dense(256, batch=2), rule(*at))
