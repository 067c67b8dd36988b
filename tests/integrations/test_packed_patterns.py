"""A pattern of a layer counts from the start of each text: packed and padded texts give what each gives alone."""

import pytest
import torch
from tests.integrations import model_zoo as zoo
from transformers import StaticCache

import saccade as sc
from saccade import masks
from saccade.integrations import transformers_call
from saccade.integrations.lazy_mask import Placed
from saccade.integrations.packed_patterns import with_pattern
from saccade.integrations.transformers import install
from saccade.testing.case import Case
from saccade.testing.cases import CASES

TEXTS = ((7, 3, 5), (4, 4, 7))
POSITIONS = torch.stack([torch.cat([torch.arange(size) for size in texts]) for texts in TEXTS])
OF_BATCH = (masks.Documents, masks.Padding, masks.PerItem)


def is_of_batch(mask):
    return isinstance(mask, OF_BATCH) or mask.shape[0] != 1 or any(map(is_of_batch, mask.made_of))


def is_near(b, h, q, kv):
    return (q * kv) % 3 < 2


# One case for each mask of the conformance suite that a layer can own: the others describe the rows of one batch.
CANDIDATES = [
    Case("function", masks.Predicate(is_near), is_near),
    *(case for case in CASES if case.mask is not None and case.rule is not None and not case.mask.calls_functions),
]
DISTINCT = {str(case.mask): case for case in reversed(CANDIDATES) if case.num_heads == 4 and not is_of_batch(case.mask)}
PATTERNS = {case.name: case for case in DISTINCT.values()}
FEW = [PATTERNS[name] for name in ("recipe-streaming", "blocks-per-head", "strided", "recipe-prefix-lm")]


def replaced(mask):
    network = zoo.model("llama")
    sc.replace_attention(network, mask=mask)
    return network


DOORS = {
    "replace_attention": replaced,
    "install": lambda mask: zoo.model("llama", install("saccade-pattern", mask=mask)),
    "install, by layer": lambda mask: zoo.model("llama", install("saccade-pattern", mask=lambda layer: mask)),
}


def ids():
    return torch.randint(3, zoo.WORDS, (2, 15), generator=torch.Generator().manual_seed(5))


def alone(network, tokens):
    """The logits of each text in a call of its own, put one behind the other."""
    rows = [
        [network(input_ids=text[None]).logits[0] for text in row.split(texts)]
        for row, texts in zip(tokens, map(list, TEXTS), strict=True)
    ]
    return torch.stack([torch.cat(row) for row in rows])


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def block_diagonal(number, value):
    """A mask of four dimensions that hides other texts and later tokens, as users write it."""
    allowed = (number[:, :, None] == number[:, None]) & torch.ones(15, 15, dtype=torch.bool).tril()
    return allowed[:, None] if value is bool else torch.zeros(2, 1, 15, 15).masked_fill(~allowed[:, None], value)


NUMBERS = (POSITIONS == 0).cumsum(1)
CALLS = {
    "without a cache": {"use_cache": False},
    "with a cache": {},
    "with a mask of ones": {"attention_mask": torch.ones(2, 15, dtype=torch.int64)},
    "with a bool mask": {"attention_mask": block_diagonal(NUMBERS, bool)},
    "with a float mask": {"attention_mask": block_diagonal(NUMBERS, torch.finfo(torch.float32).min)},
}


def check_packed(network, **how):
    """The law: texts that are packed give what each gives alone."""
    tokens = ids()
    with torch.no_grad():
        close(network(input_ids=tokens, position_ids=POSITIONS, **how).logits, alone(network, tokens))


@pytest.mark.parametrize("case", PATTERNS.values(), ids=str)
def test_packed_is_alone(case):
    check_packed(replaced(case.mask))


@pytest.mark.parametrize("case", [FEW[0], FEW[3]], ids=str)
def test_a_pattern_that_counts_on_the_whole_row_is_noticed(case, monkeypatch):
    monkeypatch.setattr(transformers_call, "with_pattern", lambda placed, pattern, ids: placed.rule & pattern)
    with pytest.raises(AssertionError, match="not close"):
        check_packed(replaced(case.mask))


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_through_every_door_however_texts_are_kept_apart(case, door, how):
    check_packed(DOORS[door](case.mask), **CALLS[how])


@pytest.mark.parametrize("case", FEW, ids=str)
def test_packed_in_a_static_cache_is_alone(case):
    network = replaced(case.mask)
    check_packed(network, past_key_values=StaticCache(config=network.config, max_cache_len=20))


def test_ends_of_texts_that_the_mask_keeps_apart():
    network, tokens = zoo.model("llama", install()), ids()[:1]
    ends = torch.tensor([0, *TEXTS[0]]).cumsum(0)
    words = {"position_ids": POSITIONS[:1], "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    words |= {"max_length_q": 7, "max_length_k": 7}
    with torch.no_grad():
        packed = network(input_ids=tokens, use_cache=False, **words).logits
        close(packed, network(input_ids=tokens, position_ids=POSITIONS[:1], use_cache=False).logits)
        for other in ({"use_cache": True}, {"use_cache": False, "cu_seq_lens_k": torch.tensor([0, 7, 15])}):
            with pytest.raises(sc.UnsupportedError, match="cu_seq_lens_k, but its mask does not separate these texts"):
                network(input_ids=tokens, **words | other)


@pytest.mark.parametrize("case", PATTERNS.values(), ids=str)
def test_the_matrix_is_that_of_the_pattern_in_each_text(case, monkeypatch):
    network, tokens, seen = DOORS["install"](case.mask), ids(), []
    with torch.no_grad():
        original = sc.AttentionMatrix.matmul
        monkeypatch.setattr(
            sc.AttentionMatrix, "matmul", lambda self, *a, **k: seen.append(self.mask) or original(self, *a, **k)
        )
        network(input_ids=tokens, position_ids=POSITIONS)
    place, number = POSITIONS.tolist(), NUMBERS.tolist()
    hidden = [
        [[[number[b][q] != number[b][k] or k > q or not case.rule(b, h, place[b][q], place[b][k]) for k in range(15)]
          for q in range(15)] for h in range(4)] for b in range(2)
    ]  # fmt: skip
    for mask in seen:
        assert torch.equal(mask.to_dense(15, batch=2, heads=4), ~torch.tensor(hidden))
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])  # GPT-OSS makes no packed masks
def test_packed_is_alone_without_a_pattern(name):
    check_packed(zoo.model(name, install()), use_cache=False)


@pytest.mark.parametrize("case", PATTERNS.values(), ids=str)
def test_padded_on_the_left_is_alone(case):
    network, tokens = DOORS["install"](case.mask), ids()[:, :7]
    is_token = torch.ones(2, 7, dtype=torch.int64)
    is_token[0, :3] = 0
    with torch.no_grad():
        padded = network(input_ids=tokens, attention_mask=is_token).logits
        close(padded[0, 3:], network(input_ids=tokens[:1, 3:]).logits[0])
        close(padded[1:], network(input_ids=tokens[1:]).logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("case", [FEW[0], FEW[2], FEW[3]], ids=str)  # blocks say nothing of tokens behind them
def test_generation_of_padded_texts(case, cache):
    network, tokens = DOORS["replace_attention"](case.mask), ids()
    is_token = torch.ones_like(tokens)
    is_token[0, :6] = 0
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    how["cache_implementation"] = cache
    both = network.generate(tokens, attention_mask=is_token, **how)
    assert both[0, 15:].tolist() == network.generate(tokens[:1, 6:], **how)[0, 9:].tolist()
    assert both[1:].tolist() == network.generate(tokens[1:], **how).tolist()


def test_a_pattern_of_the_batch_counts_on_the_whole_row():
    texts = masks.Documents(TEXTS, masks.streaming(1, 2))
    network, tokens = DOORS["install"](texts), ids()
    single = DOORS["replace_attention"](masks.streaming(1, 2))
    with torch.no_grad():
        expected = alone(single, tokens)
        for how in ({}, {"use_cache": False}):
            close(network(input_ids=tokens, position_ids=POSITIONS, **how).logits, expected)
    padding = masks.Padding([5, 5], side="left", padded_len=15)
    rule = with_pattern(Placed(masks.Causal(), range(15), range(15), TEXTS), padding)
    assert torch.equal(rule.to_dense(15, batch=2), (padding & masks.Causal()).to_dense(15, batch=2))


@pytest.mark.parametrize(
    "position_ids",
    [
        [0, 1, 2, 3, 4],
        [2, 3, 4, 5, 6],  # an offset
        [0, 0, 0, 0, 0],  # a model without positions
        [0, 0, 1, 1, 2],  # several tokens at one position
        [0, 1, 1, 1, 2],  # a hole of padding
        [0, 1, 2, 7, 8],  # a step
    ],
)
def test_positions_that_are_not_those_of_packed_texts(position_ids):
    pattern, placed = masks.streaming(1, 2), Placed(masks.Causal(), range(5), range(5))
    rule = with_pattern(placed, pattern, torch.tensor([position_ids]))
    assert torch.equal(rule.to_dense(5), (pattern & masks.Causal()).to_dense(5))


def test_positions_of_patches_keep_no_texts_apart():
    placed = Placed(masks.Full(), range(6), range(6))
    rule = with_pattern(placed, masks.Window(2, 2), torch.tensor([[0, 1, 2, 0, 1, 2]]))
    assert rule == masks.Window(2, 2)


def test_texts_of_a_rule_that_is_no_document_itself():
    overlay = masks.Predicate(lambda b, h, q, kv: (q >= 2) & (kv >= 2) & (q < 4) & (kv < 4))
    rule = masks.Documents([2, 4], masks.Causal()) | overlay
    pattern = masks.Global([0], sees=False) | masks.Window(0, 0)
    joined = with_pattern(Placed(rule, range(6), range(6), ((2, 4),)), pattern)
    assert torch.equal(joined.to_dense(6), (rule & masks.Documents([2, 4], pattern)).to_dense(6))


def test_a_continued_text_whose_start_is_unknown_is_refused():
    tokens = ids()
    network = DOORS["install"](masks.streaming(1, 2))
    with torch.no_grad():
        past = network(input_ids=tokens, position_ids=POSITIONS, use_cache=True).past_key_values
        with pytest.raises(sc.UnsupportedError, match=r"position_ids start before 15(.|\n)*its own batch item"):
            network(input_ids=tokens[:, :1], position_ids=torch.tensor([[5], [7]]), past_key_values=past)
    near = DOORS["install"](masks.Window(2, 0))  # the same wherever a text starts
    with torch.no_grad():
        past = near(input_ids=tokens, use_cache=True).past_key_values
        near(input_ids=tokens[:, :1], position_ids=torch.tensor([[5], [7]]), past_key_values=past)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_layers_of_ours_mean_the_same(case):
    texts = masks.Documents(TEXTS, masks.Causal())
    ours = sc.nn.MultiHeadAttention(16, 4, mask=case.mask).matrix(torch.randn(2, 15, 16), mask=texts)
    rule = with_pattern(Placed(texts, range(15), range(15), TEXTS), case.mask)
    assert torch.equal(rule.to_dense(15, batch=2, heads=4), ours.mask.to_dense(15, batch=2, heads=4))
