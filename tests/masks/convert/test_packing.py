"""Packed texts equal texts one by one: in attention, in layers that own a pattern, with gradients."""

import re

import pytest
import torch

import saccade as sc
from saccade import masks, mechanisms, nn

LENGTHS = (5, 1, 9, 3)
PATTERNS = [None, masks.Causal(), masks.Window(2, 1), masks.streaming(1, 2), masks.Causal() | masks.Prefix(2)]


def texts(width=16):
    torch.manual_seed(0)
    return [torch.randn(n, width, dtype=torch.float64).requires_grad_() for n in LENGTHS]


@pytest.mark.parametrize(
    "mechanism, pattern",
    [(mechanisms.Softmax, pattern) for pattern in PATTERNS]
    + [(mechanisms.Linear, pattern) for pattern in (None, masks.Causal())],
    ids=str,
)
def test_a_layer_reads_each_text_as_if_it_were_alone(mechanism, pattern):
    layer = nn.MultiHeadAttention(16, 4, num_kv_heads=2, mask=pattern, mechanism=mechanism()).double()
    each = texts()
    alone = [layer(text[None])[0] for text in each]
    packed = sc.pack(each)
    got = packed.unpack(layer(packed.tokens, mask=packed.mask()))
    by_ends = packed.unpack(layer(packed.tokens, mask=masks.from_cu_seqlens(packed.cu_seqlens)))
    grads = [torch.randn_like(text) for text in each]
    for own, other, their in zip(got, by_ends, alone, strict=True):
        torch.testing.assert_close(own, their)
        torch.testing.assert_close(other, their)
    first = torch.autograd.grad(got, each, grads)
    for own, their in zip(first, torch.autograd.grad(alone, each, grads), strict=True):
        torch.testing.assert_close(own, their)


@pytest.mark.parametrize("pattern", PATTERNS[1:], ids=str)
def test_a_mask_of_the_call_applies_within_sequences_like_that_of_the_layer(pattern):
    layer, rule = nn.MultiHeadAttention(16, 4, mask=pattern).double(), masks.Window(4, 4)
    packed = sc.pack(texts())
    got = packed.unpack(layer(packed.tokens, mask=packed.mask(rule)))
    beside = packed.unpack(layer(packed.tokens, mask=rule & packed.mask()))  # a window is the same on the line
    for own, other, text in zip(got, beside, texts(), strict=True):
        expected = layer(text[None], mask=rule)[0]
        torch.testing.assert_close(own, expected)
        torch.testing.assert_close(other, expected)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_attention_over_packed_heads(pattern):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, sum(LENGTHS), 8, dtype=torch.float64) for _ in range(3))
    packed = sc.Packed(query.transpose(1, 2), LENGTHS)
    got = packed.unpack(sc.attention(query, key, value, packed.mask(pattern)), dim=2)
    for own, *parts in zip(got, *(packed.unpack(x, dim=2) for x in (query, key, value)), strict=True):
        expected = sc.attention(*(part[None] for part in parts), pattern)[0]
        torch.testing.assert_close(own, expected)


def test_targets_are_the_next_tokens_of_each_text():
    ids = [torch.randint(50, (n,), dtype=torch.int32) for n in (5, 0, 1, 9, 0)]
    packed = sc.pack(ids)
    expected = [[*text[1:].tolist(), -100] for text in ids if len(text)]
    assert packed.targets().tolist() == [[token for text in expected for token in text]]
    assert packed.targets().dtype == torch.int64
    logits = torch.randn(1, 15, 50, requires_grad=True)
    torch.nn.functional.cross_entropy(logits[0], packed.targets()[0]).backward()
    assert logits.grad.abs().sum(-1).eq(0)[0].nonzero()[:, 0].tolist() == [4, 5, 14]


def test_shifted_labels_are_the_targets():
    packed = sc.pack([torch.randint(50, (n,), dtype=torch.int32) for n in (5, 0, 1, 9, 0)])
    labels = packed.labels()
    assert labels.dtype == torch.int64
    assert labels[0, 0] == -100
    assert torch.equal(labels[:, 1:], packed.targets()[:, :-1])  # what a model that shifts its labels compares


@pytest.mark.parametrize("method", [sc.Packed.targets, sc.Packed.labels])
def test_targets_of_vectors_are_refused(method):
    with pytest.raises(TypeError, match=r"packed must contain token ids, ints \[1, total\]; got \[1, 18, 16\] torch"):
        method(sc.pack(texts()))


def test_properties_of_a_pack():
    packed = sc.pack([x.detach() for x in texts()])
    assert packed.cu_seqlens.tolist() == [0, 5, 6, 15, 18]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.position_ids.tolist() == [[*range(5), 0, *range(9), *range(3)]]
    assert masks.from_position_ids(packed.position_ids) == packed.mask()
    for text, original in zip(packed.unpack(packed.tokens), texts(), strict=True):
        assert torch.equal(text, original)
    empty = sc.pack([torch.zeros(0, 3), torch.ones(2, 3)])
    assert [len(text) for text in empty.unpack(empty.tokens)] == [0, 2]


REFUSED = {
    "a batch": (lambda: sc.pack(torch.zeros(2, 3, 4)), "be a list of tensors [length, ...]; got Tensor"),
    "nothing": (lambda: sc.pack([]), "contain at least one tensor"),
    "widths": (lambda: sc.pack([torch.zeros(2, 3), torch.zeros(2, 4)]), "differ only in length"),
    "dtypes": (lambda: sc.pack([torch.zeros(2, 3), torch.zeros(2, 3).double()]), "differ only in length"),
    "numbers": (lambda: sc.pack([torch.tensor(1.0)]), "differ only in length"),
    "lists": (lambda: sc.pack([[1, 2]]), "texts must contain tensors; got list"),
    "another length": (lambda: sc.pack([torch.zeros(2, 3)]).unpack(torch.zeros(1, 3, 3)), "[1, 2, …]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unpackable_inputs_are_refused(name):
    wrong, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        wrong()
