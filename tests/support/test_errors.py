"""Bad input gets a sentence that names the function, the argument, the rule and what was received, before any work.

The table is generated: each way to spoil an ingredient is tried with every function that takes it.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import saccade as sc
from saccade import masks, nn
from saccade.mechanisms import Softmax
from saccade.support import errors

Call = Callable[[], object]


def _q(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*(shape or (2, 4, 5, 8)), **options)


def _good() -> dict[str, Any]:
    return {"query": _q(), "key": _q(2, 2, 6, 8), "value": _q(2, 2, 6, 3)}


# Wrong values of an ingredient, and the sentence after "function: ".
_SPOILED: list[tuple[dict[str, Any], str]] = [
    ({"query": [1.0]}, "query must be a tensor; got list."),
    ({"key": None}, "key must be a tensor; got NoneType."),
    ({"query": _q(4, 5, 8)}, "query must have four dimensions, [batch, heads, len, head_dim]; got [4, 5, 8]."),
    ({"key": _q(2, 6, 8)}, "key must have four dimensions, [batch, heads, len, head_dim]; got [2, 6, 8]."),
    ({"query": _q(dtype=torch.int64)}, "query must be float32, float64, bfloat16 or float16; got int64."),
    ({"query": _q(3, 4, 5, 8)}, "batch must be the same for query and key; got 3 and 2."),
    ({"query": _q(2, 4, 5, 7)}, "head_dim must be the same for query and key; got 7 and 8."),
    ({"query": _q(2, 3, 5, 8)}, "key heads must divide query heads; got 3 query heads and 2 key heads."),
    ({"key": _q(2, 0, 6, 8)}, "key heads must divide query heads; got 4 query heads and 0 key heads."),
    ({"key": _q(2, 2, 6, 8, dtype=torch.float64)}, "dtype must be the same for query, key; got float32 and float64."),
    ({"key": _q(2, 2, 6, 8, device="meta")}, "device must be the same for query, key; got cpu and meta."),
    ({"mask": torch.ones(5, 6).tril()}, "mask must be bool, True = may attend; got float32."),
    ({"mask": torch.ones(5, 6, dtype=torch.int64)}, "mask must be bool, True = may attend; got int64."),
    (
        {"mask": torch.ones(6, 5, dtype=torch.bool)},
        "mask must have shape [5, 6], [2, 5, 6] or broadcast to [2, 4, 5, 6]; got [6, 5].",
    ),
    (
        {"mask": torch.ones(3, 5, 6, dtype=torch.bool)},
        "mask must have shape [5, 6], [2, 5, 6] or broadcast to [2, 4, 5, 6]; got [3, 5, 6].",
    ),
    (
        {"mask": "causal"},
        "mask must be None, a saccade mask, a bool tensor or a function (b, h, q, kv) -> bool; got str.",
    ),
    ({"mask": masks.Padding([1, 2, 3])}, "mask must be for 1 or 2 batch items; got 3."),
    ({"bias": 1.0}, "bias must be a tensor, a saccade positions.Bias or None; got float."),
    ({"bias": torch.ones(5, 6, dtype=torch.bool)}, "bias must be a float tensor; got bool."),
    ({"bias": torch.ones(5, 6, dtype=torch.int64)}, "bias must be a float tensor; got int64."),
    ({"bias": _q(5, 7)}, "bias must broadcast to [2, 4, 5, 6]; got [5, 7]."),
    ({"bias": _q(1, 1, 1, 5, 6)}, "bias must broadcast to [2, 4, 5, 6]; got [1, 1, 1, 5, 6]."),
    ({"bias": _q(5, 6, device="meta")}, "device must be the same for query and bias; got cpu and meta."),
    ({"scale": float("nan")}, "scale must be a finite number; got nan."),
    ({"scale": float("inf")}, "scale must be a finite number; got inf."),
    ({"scale": "auto"}, "scale must be a finite number; got 'auto'."),
    ({"softcap": 0.0}, "softcap must be a finite number above 0; got 0.0."),
    ({"softcap": float("nan")}, "softcap must be a finite number above 0; got nan."),
    ({"softcap": True}, "softcap must be a finite number above 0; got True."),
    ({"q_positions": range(4)}, "q_positions must hold 5 positions; got 4."),
    ({"q_positions": range(-1, 4)}, "q_positions must start at 0 or later; got range(-1, 4)."),
    (
        {"q_positions": torch.arange(5).float()},
        "q_positions must be a range, an int64 tensor or a list of ints; got float32.",
    ),
    ({"q_positions": torch.arange(10).reshape(5, 2)}, "q_positions must have shape [5] or [2, 5]; got [5, 2]."),
    ({"q_positions": torch.tensor([0, 1, -2, 3, 4])}, "q_positions must be at least -1; got a smaller position."),
    ({"kv_positions": range(6)}, "q_positions must be given together with kv_positions; got None."),
    (
        {"q_positions": range(5), "kv_positions": torch.arange(7)},
        "kv_positions must have shape [6] or [2, 6]; got [7].",
    ),
    (
        {"mask": torch.ones(5, 6, dtype=torch.bool), "q_positions": torch.arange(5)},
        "mask must be a rule on positions (not a tensor) when positions are given; got a bool tensor.",
    ),
    (
        {"mask": torch.ones(5, 6, dtype=torch.bool), "q_positions": range(1, 6)},
        "mask must be a rule on positions (not a tensor) when positions are given; got a bool tensor.",
    ),
    (
        {"impl": "flash"},
        "impl must be one of 'auto', 'native', 'matmul', 'fused', 'sdpa', 'varlen', 'flex', 'tiled', 'reference'; "
        "got 'flash'.",
    ),
]
_SPOILED_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"value": 3}, "value must be a tensor; got int."),
    ({"value": _q(2, 4, 6, 3)}, "value must have shape [2, 2, 6, value_dim]; got [2, 4, 6, 3]."),
    ({"value": _q(2, 2, 6)}, "value must have shape [2, 2, 6, value_dim]; got [2, 2, 6]."),
    ({"value": _q(2, 2, 6, 3).half()}, "dtype must be the same for query, key, value; got float32 and float16."),
    ({"dropout_p": 1.0}, "dropout_p must be at least 0 and below 1; got 1.0."),
    ({"dropout_p": -0.1}, "dropout_p must be at least 0 and below 1; got -0.1."),
    ({"dropout_p": "0.1"}, "dropout_p must be a float; got str."),
]


def _product(**given: Any) -> object:
    value, dropout_p = given.pop("value"), given.pop("dropout_p", 0.0)
    return sc.AttentionMatrix(**given).matmul(value, dropout_p=dropout_p)


def _by_mechanism(**given: Any) -> object:
    value = given.pop("value")
    own = {name: given.pop(name) for name in ("scale", "softcap", "impl") if name in given}
    return Softmax(**own)(**given).matmul(value)


def _table() -> Iterator[tuple[str, Call]]:
    matmul = "AttentionMatrix.matmul"
    functions: list[tuple[str, str, Callable[..., object], set[str]]] = [
        ("attention", "attention", sc.attention, set()),
        ("attention_with_lse", "attention_with_lse", sc.attention_with_lse, set()),
        ("AttentionMatrix", matmul, _product, set()),
        ("Softmax", matmul, _by_mechanism, {"bias", "dropout_p", "impl"}),
    ]
    for maker, product, function, without in functions:
        sentences = [(maker, *row) for row in _SPOILED] + [(product, *row) for row in _SPOILED_VALUES]
        for name, spoiled, sentence in sentences:
            if not without & set(spoiled):
                yield f"{name}: {sentence}", lambda f=function, s=spoiled: f(**{**_good(), **s})
    yield from _OTHERS


_MATRIX = sc.AttentionMatrix(_q(), _q(2, 2, 6, 8))
_OTHERS: list[tuple[str, Call]] = [
    ("Window: left must be an int of at least 0; got -1.", lambda: masks.Window(-1, 0)),
    ("Window: right must be an int of at least 0; got 1.5.", lambda: masks.Window(0, 1.5)),
    ("Global: positions must be ints of at least 0; got [0, -1].", lambda: masks.Global([0, -1])),
    ("Global: sees or seen must be true; got neither.", lambda: masks.Global([0], sees=False, seen=False)),
    ("Strided: step must be an int of at least 1; got 0.", lambda: masks.Strided(0)),
    ("Prefix: length must be an int of at least 0; got -1.", lambda: masks.Prefix(-1)),
    ("Segments: segment must be an int of at least 1; got 0.", lambda: masks.Segments(0, 3)),
    ("Segments: memory must be an int of at least 0; got -1.", lambda: masks.Segments(4, -1)),
    ("Random: blocks_per_row must be an int of at least 1; got 0.", lambda: masks.Random(0, 8)),
    ("Random: block_size must be an int of at least 1; got 2.0.", lambda: masks.Random(1, 2.0)),
    ("Blocks: layout must be bool, True = may attend; got int64.", lambda: masks.Blocks([[1, 0], [1, 1]], 2)),
    ("Blocks: layout must have shape [blocks, blocks] or [heads, blocks, blocks]; got [2].",
     lambda: masks.Blocks([True, False], 2)),
    ("Blocks: block_size must be an int of at least 1; got 0.", lambda: masks.Blocks([[True]], 0)),
    ("Coarse: rule must be a mask; got function.", lambda: masks.Coarse(lambda b, h, q, kv: q >= kv, 2)),
    ("Coarse: block_size must be an int of at least 1; got -2.", lambda: masks.Coarse(masks.Causal(), -2)),
    ("sliding_window: window must be an int of at least 1; got 0.", lambda: masks.sliding_window(0)),
    ("longformer: each_side must be an int of at least 0; got -1.", lambda: masks.longformer(-1)),
    ("bigbird: window_blocks must be odd; got 4.", lambda: masks.bigbird(8, window_blocks=4)),
    ("bigbird: block_size must be an int of at least 1; got 0.", lambda: masks.bigbird(0)),
    ("streaming: window must be an int of at least 1; got 0.", lambda: masks.streaming(4, 0)),
    ("sparse_transformer: step must be an int of at least 1; got 1.5.", lambda: masks.sparse_transformer(1.5)),
    ("prefix_lm: length must be an int of at least 0; got True.", lambda: masks.prefix_lm(True)),
    ("image_rows: text_len must be an int of at least 0; got -1.", lambda: masks.image_rows(-1, 2, 3)),
    ("image_columns: text_len must be an int of at least 0; got 1.5.", lambda: masks.image_columns(1.5, 2, 3)),
    ("image_neighbors: radius must be an int of at least 0; got -1.", lambda: masks.image_neighbors(2, 2, 3, -1)),
    ("Padding: lengths must be ints of at least 0; got [3, -1].", lambda: masks.Padding([3, -1])),
    ("Padding: lengths must contain a length for each batch item; got none.", lambda: masks.Padding([])),
    ("Padding: side must be one of 'right', 'left'; got 'top'.", lambda: masks.Padding([3], "top")),
    (
        "Padding: padded_len must be at least the longest item for side='left'; got None with lengths (3,).",
        lambda: masks.Padding([3], "left"),
    ),
    ("Documents: lengths must be ints of at least 0; got [1, -2].", lambda: masks.Documents([1, -2])),
    ("Documents: rule must be a mask or None; got str.", lambda: masks.Documents([1], rule="causal")),
    ("Predicate: function must be callable as (b, h, q, kv) -> bool; got int.", lambda: masks.Predicate(3)),
    ("Dense: allowed must be a bool tensor, True = may attend; got float32.", lambda: masks.Dense(torch.ones(2, 2))),
    (
        "Dense: allowed must have at most 4 dimensions; got [1, 1, 1, 2, 2].",
        lambda: masks.Dense(torch.ones(1, 1, 1, 2, 2, dtype=torch.bool)),
    ),
    ("Causal: | must join two masks; got NoneType.", lambda: masks.Causal() | None),
    (
        "Padding: joined masks must have the same number of batch items (or 1); got [2, 3].",
        lambda: masks.Padding([1, 2]) & masks.Padding([1, 2, 3]),
    ),
    (
        "from_key_padding_mask: key_padding_mask must be a bool tensor; got torch.float32.",
        lambda: masks.from_key_padding_mask(torch.zeros(2, 3)),
    ),
    (
        "from_key_padding_mask: key_padding_mask must have shape [batch, kv_len]; got [3].",
        lambda: masks.from_key_padding_mask(torch.zeros(3, dtype=torch.bool)),
    ),
    (
        "Causal.picture: q_len and kv_len must be 0 to 128; got 200 and 200.",
        lambda: masks.Causal().picture(200),
    ),
    ("AttentionMatrix: index must consist of whole numbers, slices and ...; got list.", lambda: _MATRIX[[3]]),
    ("AttentionMatrix: edges of a slice must be whole numbers; got float.", lambda: _MATRIX[0, 1.5:]),
    ("AttentionMatrix.rmatmul: x must have shape [2, 4, 5, width]; got [2, 4, 6, 1].",
     lambda: _MATRIX.mT @ _q(2, 4, 6, 1)),
    ("AttentionMatrix.rmatmul: x must be torch.float32 on cpu, like the matrix; got torch.float64 on cpu.",
     lambda: _MATRIX.mT @ _q(2, 4, 5, 1).double()),
    ("AttentionMatrix.to_dense: size must be at most 7 weights; got 240 weights, [2, 4, 5, 6].",
     lambda: _MATRIX.to_dense(limit=7)),
    ("MultiHeadAttention: num_heads must divide embed_dim 10; got 4.", lambda: nn.MultiHeadAttention(10, 4)),
    ("MultiHeadAttention: num_kv_heads must divide num_heads 4; got 3.",
     lambda: nn.MultiHeadAttention(8, 4, num_kv_heads=3)),
    ("MultiHeadAttention: embed_dim must be an int of at least 1; got 0.", lambda: nn.MultiHeadAttention(0, 1)),
    ("MultiHeadAttention: dropout_p must be at least 0 and below 1; got 1.0.",
     lambda: nn.MultiHeadAttention(8, 4, dropout_p=1.0)),
    ("MultiHeadAttention: mask must be a saccade mask; got Tensor.",
     lambda: nn.MultiHeadAttention(8, 4, mask=torch.ones(2, 2, dtype=torch.bool))),
    ("MultiHeadAttention: mask must be bool, True = may attend; got float32.",
     lambda: nn.MultiHeadAttention(8, 4)(_q(1, 3, 8), mask=torch.ones(3, 3).tril())),
    ("MultiHeadAttention: query must have shape [batch, len, 8]; got [1, 3, 9].",
     lambda: nn.MultiHeadAttention(8, 4)(_q(1, 3, 9))),
    ("MultiHeadAttention: key must have shape [batch, len, 5]; got [1, 3, 8].",
     lambda: nn.MultiHeadAttention(8, 4, context_dim=5)(_q(1, 3, 8))),
    ("MultiHeadAttention: query must be a tensor; got NoneType.", lambda: nn.MultiHeadAttention(8, 4)(None)),
    ("MultiHeadAttention: dtype must be float32, like the parameters; got float64.",
     lambda: nn.MultiHeadAttention(8, 4)(_q(1, 3, 8).double())),
    ("MultiHeadAttention: key must be given together with value; got None.",
     lambda: nn.MultiHeadAttention(8, 4)(_q(1, 3, 8), value=_q(1, 3, 8))),
    ("MultiHeadAttention: batch must be the same for all inputs; got 1, 2 and 2.",
     lambda: nn.MultiHeadAttention(8, 4)(_q(1, 3, 8), _q(2, 3, 8))),
    ("MultiHeadAttention: key and value must be equally long; got 3 and 4.",
     lambda: nn.MultiHeadAttention(8, 4)(_q(1, 3, 8), _q(1, 3, 8), _q(1, 4, 8))),
]  # fmt: skip

_SENTENCE = re.compile(r"^[\w.]+: .+ must .+; got .+\.$")
TABLE = list(_table())


@pytest.mark.parametrize("sentence, call", TABLE, ids=[sentence for sentence, _ in TABLE])
def test_bad_input_gets_a_sentence(sentence: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def working(*args: object, **kwargs: object) -> None:
        pytest.fail("work began before the input was refused")

    monkeypatch.setattr("saccade.engine.kernels.aten_flash.forward", working)
    monkeypatch.setattr("saccade.engine.tiles.tile_scores.scores_of", working)
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)) as caught:
        call()
    first, *rest = str(caught.value).split("\n")
    assert first == sentence
    assert _SENTENCE.match(first)
    assert all(line.startswith(("    ", "Hint: ")) for line in rest)


def test_a_float_mask_gets_the_hint() -> None:
    with pytest.raises(TypeError, match=r"Hint: convert a 0/1 mask with mask\.bool\(\)"):
        sc.attention(**_good(), mask=torch.ones(5, 6).tril())


@pytest.mark.parametrize("index", [(2, 0, 0), (0, 4, 0), (0, 0, -6)])
def test_an_index_out_of_range(index: tuple[int, int, int]) -> None:
    with pytest.raises(IndexError, match=r"Matrix: (batch|head|query) index must be in \[-\d, \d\); got -?\d\."):
        _MATRIX[index]


def test_a_kernel_asked_for_by_name_lists_every_reason() -> None:
    bias = torch.zeros(5, 6, requires_grad=True)
    with pytest.raises(sc.UnsupportedError, match='impl="fused" cannot run') as caught:
        sc.attention(**_good(), impl="fused", softcap=2.0, dropout_p=0.1, bias=bias)
    assert caught.value.reasons == ("it has no dropout", "it has no softcap", "it has no gradient for bias")
    assert str(caught.value).splitlines()[0] == 'attention: impl="fused" cannot run these inputs:'
    assert str(caught.value).splitlines()[-1] == 'Hint: impl="auto" finds a kernel that can'


@pytest.mark.parametrize("make", [errors.value_error, errors.type_error])
def test_a_sentence_shows_text_from_outside_and_obeys_none_of_it(make: Callable[..., Exception]) -> None:
    name = "na\x1b[31mme\u202e\nHint: run this"
    error = make(name, f"be {name}", name, facts=[name], hint=name)
    shown = r"na\x1b[31mme\u202e\nHint: run this"
    assert str(error) == f"saccade: {shown} must be {shown}; got {shown}.\n    {shown}\nHint: {shown}"


def test_a_list_of_reasons_shows_text_from_outside_and_obeys_none_of_it() -> None:
    error = errors.unsupported("na\x1bme", ["it has \x07", "of\nparts"], hint="\x9b")
    lines = [r"saccade: na\x1bme cannot run these inputs:", r"    - it has \x07", "    - of", "parts", r"Hint: \x9b"]
    assert str(error).split("\n") == lines
    assert error.reasons == (r"it has \x07", "of\nparts")
