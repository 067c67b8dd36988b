"""Terms of the scores: what each gives for a distance, and how it converts, trains and refuses."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.swin.modeling_swin import SwinRelativePositionBias
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from saccade import UnsupportedError, positions
from saccade.positions import ALiBi, Bias, Clipped, GridTable, ShawKeys

BIASES = {
    "alibi": lambda: ALiBi(3),
    "clipped": lambda: Clipped(3, reach=4),
    "t5": lambda: positions.T5(3, num_buckets=8, max_distance=20),
    "t5-causal": lambda: positions.T5(3, num_buckets=8, max_distance=20, bidirectional=False),
    "shaw": lambda: ShawKeys(8, reach=4),
    "shaw-heads": lambda: ShawKeys(8, (4, 1), num_heads=3),
    "grid": lambda: GridTable(3, 3, 4),
}


def _filled(bias: Bias) -> Bias:
    for parameter in bias.parameters():
        nn.init.normal_(parameter)
    return bias


def _dense(bias: Bias, query: Tensor, kv_len: int, scale: float = 1.0) -> Tensor:
    """Read values pair by pair: ``[batch | 1, heads | 1, q_len, kv_len]``."""
    q_len = query.shape[2]
    apart = bias.address(torch.arange(q_len))[:, None] - bias.address(torch.arange(kv_len))[None, :]
    least, most = int(apart.min()), int(apart.max())
    values = bias.values(torch.arange(least, most + 1), query, scale)
    batch, heads = values.shape[:2]
    values = values.expand(batch, heads, q_len, values.shape[3])
    return values.gather(3, (apart - least).expand(batch, heads, q_len, kv_len))


# --- ALiBi


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_alibi_is_bloom_s_but_for_a_constant_of_the_row(num_heads: int) -> None:
    length = 9
    theirs = build_alibi_tensor(torch.ones(1, length), num_heads, torch.float32).reshape(num_heads, 1, length)
    ours = _dense(ALiBi(num_heads), torch.zeros(1, num_heads, length, 4), length)[0]
    at_self = theirs.mT  # key i, for query i: where ALiBi is 0
    past = torch.ones(length, length).tril() == 1
    torch.testing.assert_close(ours[:, past], (theirs - at_self)[:, past], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours, ours.mT, rtol=0, atol=0)


def test_alibi_slopes_are_the_paper_s() -> None:
    slopes = -ALiBi(8).table(torch.tensor([1]))[:, 0]
    assert slopes.tolist() == [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_alibi_keeps_far_distances_apart_in_any_dtype(dtype: torch.dtype) -> None:
    bias = ALiBi(12).to(dtype)
    assert list(bias.state_dict()) == []
    distances = torch.arange(100_000, 100_004)
    values = bias.values(distances, torch.zeros(1, 12, 1, 4, dtype=dtype), 1.0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert values.dtype == wide
    slopes = [2.0 ** (-8 * h / 8) for h in range(1, 9)] + [2.0 ** (-8 * h / 16) for h in (1, 3, 5, 7)]
    expected = -torch.tensor(slopes, dtype=torch.float64)[:, None] * distances
    precision = 1e-15 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(values[0, :, 0].double(), expected, rtol=precision, atol=0)


# --- Clipped, T5, the grid


def test_clipped_reads_its_number() -> None:
    bias = _filled(Clipped(2, reach=3))
    table = bias.table(torch.arange(-6, 7))
    for column, distance in enumerate(range(-6, 7)):
        torch.testing.assert_close(table[:, column], bias.weight[:, min(max(distance, -3), 3) + 3])


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000), (4, 3), (6, 100)])
def test_t5_is_transformers(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    config = T5Config(
        num_heads=4,
        is_decoder=not bidirectional,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).relative_attention_bias
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention.relative_attention_bias = theirs
    ours = positions.T5(4, num_buckets, max_distance, bidirectional)
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    length = max_distance + 10
    expected = attention.compute_bias(length, length)
    torch.testing.assert_close(_dense(ours, torch.zeros(1, 4, length, 4), length), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (64, 1000), (4, 3), (6, 100)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_reaches_exactly_as_far_as_values_change(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    bias = positions.T5(1, num_buckets, max_distance, bidirectional)
    with torch.no_grad():
        bias.weight.copy_(torch.arange(float(num_buckets))[:, None])
    last, before, beyond = bias.table(torch.tensor([bias.reach, bias.reach - 1, 10 * max_distance]))[0].tolist()
    assert last == beyond
    assert last != before


@pytest.mark.parametrize(("height", "width"), [(7, 7), (3, 5), (1, 4), (4, 1)])
def test_the_grid_is_swin_s(height: int, width: int) -> None:
    theirs = SwinRelativePositionBias(4, (height, width))
    nn.init.normal_(theirs.relative_position_bias_table)
    ours = GridTable(4, height, width)
    assert ours.weight.shape == theirs.relative_position_bias_table.shape
    ours.load_state_dict({"weight": theirs.relative_position_bias_table})
    tokens = height * width
    expected = theirs.relative_position_bias_table[theirs.relative_position_index].reshape(tokens, tokens, 4)
    dense = _dense(ours, torch.zeros(1, 4, tokens, 4), tokens)
    torch.testing.assert_close(dense[0], expected.permute(2, 0, 1), rtol=0, atol=0)


def test_the_grid_gives_each_displacement_one_number() -> None:
    bias = GridTable(1, 3, 4)
    bias.load_state_dict({"weight": torch.arange(35.0)[:, None]})
    dense = _dense(bias, torch.zeros(1, 1, 12, 4), 12)[0, 0]
    seen: dict[tuple[int, int], set[float]] = {}
    for i in range(12):
        for j in range(12):
            seen.setdefault((i // 4 - j // 4, i % 4 - j % 4), set()).add(dense[i, j].item())
    assert len(seen) == 35
    assert all(len(numbers) == 1 for numbers in seen.values())
    assert len(set.union(*seen.values())) == 35


def test_a_cell_outside_of_the_grid_is_refused_and_no_token_is_not() -> None:
    bias = GridTable(1, 3, 4)
    with pytest.raises(
        ValueError, match=r"GridTable.address: positions must be below 12; got a larger position\.[\s\S]*3 x 4 cells"
    ):
        bias.address(torch.tensor([0, 12]))
    assert 0 <= int(bias.address(torch.tensor([-1]))) <= bias.reach


# --- Shaw


def test_shaw_keys_are_vectors_added_to_the_keys() -> None:
    q_len, kv_len, reach, scale = 6, 7, 2, 0.3
    bias = _filled(ShawKeys(8, reach).double())
    query = torch.randn(2, 4, q_len, 8, dtype=torch.float64)
    key = torch.randn(2, 4, kv_len, 8, dtype=torch.float64)
    scores = torch.empty(2, 4, q_len, kv_len, dtype=torch.float64)
    for i in range(q_len):
        for j in range(kv_len):
            relative = bias.weight.detach()[min(max(j - i, -reach), reach) + reach]
            scores[:, :, i, j] = scale * (query[:, :, i] * (key[:, :, j] + relative)).sum(-1)
    own = scale * query @ key.mT + _dense(bias, query, kv_len, scale)
    torch.testing.assert_close(own.softmax(-1), scores.softmax(-1))


@pytest.mark.parametrize("autocast", [False, True])
def test_shaw_keys_are_float32_in_half_precision(autocast: bool) -> None:
    bias = _filled(ShawKeys(64, 3))
    query, distances = torch.randn(1, 2, 5, 64), torch.arange(-3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        values = bias.values(distances, query, 0.125)
    torch.testing.assert_close(values, 0.125 * query @ bias.weight.flip(0).T)
    half = bias.to(torch.bfloat16).values(distances, query.to(torch.bfloat16), 0.125)
    assert half.dtype == torch.float32


def test_a_query_of_another_width_and_a_table_without_a_query_are_refused() -> None:
    bias = ShawKeys(8, 2)
    with pytest.raises(ValueError, match=r"ShawKeys.values: query must have head_dim 8; got 4\."):
        bias.values(torch.arange(3), torch.zeros(1, 1, 2, 4), 1.0)
    with pytest.raises(ValueError, match=r"ShawKeys.values: query must have 3 heads; got 2\."):
        ShawKeys(8, 2, num_heads=3).values(torch.arange(3), torch.zeros(1, 2, 2, 8), 1.0)
    with pytest.raises(
        UnsupportedError, match=r"ShawKeys\.table.*\n.*depend on the query\nHint: call values\("
    ) as caught:
        bias.table(torch.arange(3))
    assert len(caught.value.reasons) == 1


# --- all of them


@pytest.mark.parametrize("name", BIASES)
def test_beyond_its_reach_nothing_changes(name: str) -> None:
    bias = _filled(BIASES[name]())
    if bias.reach is None:
        distances = torch.arange(1 << 20, (1 << 20) + 2)
        assert not torch.equal(*bias.table(distances).unbind(-1))
    else:
        query = torch.randn(1, 3, 2, 8)
        r = bias.reach
        far = bias.values(torch.arange(-r - 3, r + 4), query, 1.0)
        near = bias.values(torch.arange(-r, r + 1), query, 1.0)
        torch.testing.assert_close(far, nn.functional.pad(near, (3, 3, 0, 0), mode="replicate"))


@pytest.mark.parametrize("name", BIASES)
def test_values_have_their_shape_in_every_dtype(name: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        bias = _filled(BIASES[name]()).to(dtype)
        query = torch.randn(2, 3, 4, 8, dtype=dtype)
        values = bias.values(torch.arange(-5, 6), query, 1.0)
        expected = (2, 3, 4, 11) if name.startswith("shaw") else (1, 3, 1, 11)
        assert values.shape == expected
        assert values.isfinite().all()


@pytest.mark.parametrize("name", [name for name in BIASES if name != "alibi"])
def test_a_trainable_bias_starts_at_zero_and_learns(name: str) -> None:
    bias = BIASES[name]().double()
    query, distances = torch.randn(2, 3, 4, 8, dtype=torch.float64), torch.arange(-40, 41)
    values = bias.values(distances, query, 0.5)
    assert values.eq(0).all()
    (gradient,) = torch.autograd.grad((values * torch.randn_like(values)).sum(), bias.weight)
    buckets = 1 if name == "t5" else 0  # transformers' layout has a bucket for "later, at distance 0"
    assert int(gradient.abs().sum(-1 if name != "clipped" else 0).eq(0).sum()) == buckets
    _filled(bias).reset_parameters()
    assert bias.weight.eq(0).all()


def test_shaw_keys_pass_gradients_to_the_query() -> None:
    bias = _filled(ShawKeys(3, 2).double())
    query = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, w: bias.values(torch.arange(-3, 4), q, 0.7), (query, bias.weight))


@pytest.mark.parametrize("name", BIASES)
def test_copies_and_state_dicts_carry_all_there_is(name: str) -> None:
    bias, query = _filled(BIASES[name]()), torch.randn(1, 3, 2, 8)
    fresh = BIASES[name]()
    fresh.load_state_dict(bias.state_dict())
    with torch.device("meta"):
        placed = BIASES[name]()
    placed.to_empty(device="cpu").load_state_dict(bias.state_dict())
    expected = bias.values(torch.arange(-5, 6), query, 1.0)
    for other in (fresh, placed, copy.deepcopy(bias)):
        torch.testing.assert_close(other.values(torch.arange(-5, 6), query, 1.0), expected, rtol=0, atol=0)
        assert other.reach == bias.reach


@pytest.mark.parametrize("name", BIASES)
def test_a_compiler_can_read_it_in_one_piece(name: str) -> None:
    bias, query = _filled(BIASES[name]()), torch.randn(1, 3, 2, 8)

    def values(place: Tensor, query: Tensor) -> Tensor:
        apart = bias.address(place)
        return bias.values(apart[-1] - apart.flip(0), query, 0.5)

    place = torch.arange(7)
    compiled = torch.compile(values, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(place, query), values(place, query), rtol=0, atol=0)


@pytest.mark.parametrize("name", BIASES)
def test_distances_of_another_kind_are_refused(name: str) -> None:
    bias, query = BIASES[name](), torch.zeros(1, 3, 2, 8)
    with pytest.raises(TypeError, match=r": distances must be an int64 tensor; got float32\."):
        bias.values(torch.zeros(3), query, 1.0)
    with pytest.raises(TypeError, match=r": distances must be an int64 tensor; got int\."):
        bias.values(3, query, 1.0)
    with pytest.raises(ValueError, match=r": distances must have one axis; got \[2, 2\]\."):
        bias.values(torch.zeros(2, 2, dtype=torch.int64), query, 1.0)
    with pytest.raises(TypeError, match=r": positions must be a range, an int64 tensor or a list of ints; got f"):
        bias.address(torch.zeros(2))
    with pytest.raises(ValueError, match=r": positions must be at least -1; got a smaller position\."):
        bias.address(torch.tensor([0, -2]))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: ALiBi(0), "ALiBi: num_heads must be an int of at least 1; got 0."),
        (lambda: ALiBi(8.0), "ALiBi: num_heads must be an int of at least 1; got 8.0."),
        (lambda: ALiBi(True), "ALiBi: num_heads must be an int of at least 1; got True."),
        (lambda: Clipped(0, 3), "Clipped: num_heads must be an int of at least 1; got 0."),
        (lambda: Clipped(2, -1), "Clipped: reach must be an int of at least 0; got -1."),
        (lambda: Clipped(2, None), "Clipped: reach must be an int of at least 0; got None."),
        (lambda: positions.T5(0), "T5: num_heads must be an int of at least 1; got 0."),
        (lambda: positions.T5(2, 2), "T5: num_buckets must be an int of at least 4; got 2."),
        (lambda: positions.T5(2, 1, bidirectional=False), "T5: num_buckets must be an int of at least 2; got 1."),
        (lambda: positions.T5(2, 7), "T5: num_buckets must be even if bidirectional; got 7."),
        (lambda: positions.T5(2, 32, 8), "T5: max_distance must be an int of at least 9; got 8."),
        (lambda: positions.T5(2, 32, math.inf), "T5: max_distance must be an int of at least 9; got inf."),
        (lambda: ShawKeys(0, 2), "ShawKeys: head_dim must be an int of at least 1; got 0."),
        (lambda: ShawKeys(4, 2, 0), "ShawKeys: num_heads must be an int of at least 1; got 0."),
        (lambda: ShawKeys(4, 1.5), "ShawKeys: reach must be an int of at least 0; got 1.5."),
        (lambda: GridTable(0, 2, 2), "GridTable: num_heads must be an int of at least 1; got 0."),
        (lambda: GridTable(1, 0, 2), "GridTable: height must be an int of at least 1; got 0."),
        (lambda: GridTable(1, 2, "2"), "GridTable: width must be an int of at least 1; got '2'."),
    ],
)
def test_sizes_are_refused_in_sentences(make: object, sentence: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        make()
    assert str(caught.value).split("\n")[0] == sentence


def test_printing_tells_the_sizes() -> None:
    assert [str(make()) for make in BIASES.values()] == [
        "ALiBi(3)",
        "Clipped(3, reach=4)",
        "T5(3, num_buckets=8, max_distance=20, bidirectional=True)",
        "T5(3, num_buckets=8, max_distance=20, bidirectional=False)",
        "ShawKeys(8, reach=4)",
        "ShawKeys(8, reach=(4, 1), num_heads=3)",
        "GridTable(3, height=3, width=4)",
    ]


@pytest.mark.parametrize("flag", ["no", 1, None, []])
def test_a_wrong_flag_is_refused(flag: object) -> None:
    with pytest.raises(TypeError, match=r"T5: bidirectional must be True or False; got "):
        positions.T5(2, bidirectional=flag)
