"""Sequences longer than every internal block: product = matrix, and parts = whole, for each mechanism with a state."""

import pytest
import torch
from tests.mechanisms.recurrence_definitions import RULES, STEPS
from tests.mechanisms.test_laws import MAKERS
from tests.sampled import sampled

from saccade import masks
from saccade.caches import RecurrentCache
from saccade.mechanisms import state_spaces

HEADS, LENGTH, WIDTH = 2, 700, 4
STATEFUL = [name for name in MAKERS if name not in ("linformer", "nystrom", "differential", "top keys", "top blocks")]
RECURRENT = ("linear", "squared relu", "performer", "s4d", *RULES, *STEPS)
MASKS = {
    "causal": masks.Causal(),
    "packed": masks.Documents([[290, 410], [699, 1]], masks.Causal()),
    "padded": masks.Causal() & masks.Padding([700, 520]),
}
PAIRS = [(name, mask) for name in STATEFUL for mask in MASKS if not MAKERS[name](LENGTH).reasons(MASKS[mask])]


def drawn(length: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(2, HEADS, length, WIDTH, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize(("name", "mask"), sampled([pytest.param(*pair) for pair in PAIRS], 3))
def test_a_product_is_that_of_the_matrix(name, mask):
    query, key, value = drawn(LENGTH)
    matrix = MAKERS[name](LENGTH).double()(query, key, mask=MASKS[mask])
    value = value.repeat_interleave(matrix.kv_heads // HEADS, 1)  # a step of DeltaProduct has a head of its own
    torch.testing.assert_close(matrix @ value, matrix.to_dense() @ value, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("split", [(300, 1, 399), (5, 695)], ids=str)
@pytest.mark.parametrize(("name", "mask"), sampled([pytest.param(*pair) for pair in PAIRS], 4))
def test_parts_are_the_whole(name, split, mask):
    query, key, value = drawn(LENGTH)
    mechanism, rule = MAKERS[name](LENGTH).double(), MASKS[mask]
    matrix = mechanism(query, key, mask=rule)
    steps = matrix.kv_heads // HEADS
    value = value.repeat(1, 1, 1, steps)
    whole = matrix @ value if steps == 1 else matrix.total(value)
    cache = RecurrentCache() if name in RECURRENT else mechanism.new_cache()
    parts = [
        cache.attend(mechanism, *part, mask=rule)
        for part in zip(*(x.split(split, 2) for x in (query, key, value)), strict=True)
    ]
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("piece", [512, 256, 100])
def test_convolutions_go_on_in_pieces(piece, monkeypatch):
    monkeypatch.setattr(state_spaces, "_PIECE", piece)
    query, key, value = drawn(LENGTH)
    matrix = MAKERS["s4d"](LENGTH).double()(query, key, mask=masks.Causal())
    torch.testing.assert_close(matrix @ value, matrix.to_dense() @ value, atol=1e-8, rtol=1e-8)


def test_convolutions_of_many_thousand_tokens():
    length = 2 * state_spaces._PIECE + 300
    value = torch.randn(1, 1, length, 1, dtype=torch.float64)
    matrix = MAKERS["s4d"](length).double()(value, value, mask=masks.Causal())
    ends = [0, 255, 256, 4095, 4096, 4352, 8191, 8192, length - 1]
    expected = torch.stack([matrix[0, 0, row] @ value[0, 0] for row in ends])
    torch.testing.assert_close((matrix @ value)[0, 0, ends], expected, atol=1e-8, rtol=1e-8)
