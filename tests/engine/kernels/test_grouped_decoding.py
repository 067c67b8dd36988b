"""Few rows of grouped heads, as decoding has them: folded into one product, the answers are the definition's."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.kernels.native_levels import needs_native

import saccade as sc
from saccade import masks
from saccade.engine.kernels import aten_flash
from saccade.positions import ALiBi
from saccade.testing import oracle


def _by_head(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (kv + h) % 3 != 0


MASKS = [
    None,
    masks.Causal(),
    masks.sliding_window(6),
    masks.streaming(2, 300),
    masks.streaming(300, 300),
    masks.Causal() & masks.Strided(3),
    masks.Causal() & masks.Predicate(_by_head),
    masks.Padding([900, 4]),
    masks.Window(0, 0) & ~masks.Window(0, 0),
]


@settings(deadline=None, max_examples=80)
@given(
    mask=st.sampled_from(MASKS),
    heads=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2), (36, 1)]),
    q_len=st.integers(1, 9),
    kv_len=st.sampled_from([9, 70, 900]),
    option=st.sampled_from(["plain", "alibi", "bias", "negative"]),
    seed=st.integers(0, 99),
)
def test_few_rows_are_the_definition(
    mask: masks.Mask | None, heads: tuple[int, int], q_len: int, kv_len: int, option: str, seed: int
) -> None:
    torch.manual_seed(seed)
    q = torch.randn(2, heads[0], q_len, 8, dtype=torch.float64)
    k, v = (torch.randn(2, heads[1], kv_len, 8, dtype=torch.float64) for _ in range(2))
    allowed = (masks.Full() if mask is None else mask).to_dense(q_len, kv_len, batch=2, heads=heads[0])
    ours: dict[str, object] = {}
    theirs: dict[str, object] = {}
    if option == "bias":
        ours["bias"] = theirs["bias"] = torch.randn(heads[0], q_len, kv_len, dtype=torch.float64)
    if option == "negative":
        ours["scale"] = theirs["scale"] = -0.4
    if option == "alibi":
        ours["bias"] = ALiBi(heads[0])
        distances = torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)
        theirs["bias"] = ALiBi(heads[0]).values(distances.flatten(), q, 8**-0.5)[0, :, 0].unflatten(-1, distances.shape)
    out, lse = sc.attention_with_lse(q, k, v, mask, impl="fused", **ours)
    expected, expected_lse = oracle.attention(q, k, v, allowed, **theirs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.usefixtures("without_native")
def test_rows_are_folded_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    original = aten_flash._forward

    def watched(q: torch.Tensor, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(tuple(q.shape))
        return original(q, *args, **kwargs)

    monkeypatch.setattr(aten_flash, "_forward", watched)
    k = torch.randn(1, 2, 100, 8)
    sc.attention(torch.randn(1, 8, 1, 8), k, k, masks.Causal())
    sc.attention(torch.randn(1, 8, 20, 8), k, k)
    assert shapes == [(1, 2, 4, 8), (1, 8, 20, 8)]


def test_gradients_of_a_single_row_are_the_definition_s() -> None:
    own = [torch.randn(2, heads, n, 8, dtype=torch.float64) for heads, n in ((4, 1), (2, 50), (2, 50))]
    ours, theirs = ([x.clone().requires_grad_() for x in own] for _ in range(2))
    mask = masks.streaming(2, 20)
    sc.attention(*ours, mask, impl="fused").pow(2).sum().backward()
    expected, _ = oracle.attention(*theirs, mask.to_dense(1, 50, batch=2, heads=4))
    expected.pow(2).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_key_out_of_sight_reaches_no_row(kv_heads: int) -> None:
    q = torch.randn(1, 4, 1, 8)
    k, v = (torch.randn(1, kv_heads, 40, 8) for _ in range(2))
    clean = sc.attention(q, k, v, masks.sliding_window(5))
    k[:, :, 3], v[:, :, 7] = math.nan, math.inf
    torch.testing.assert_close(sc.attention(q, k, v, masks.sliding_window(5)), clean)
    assert sc.attention(q, k, v, masks.Causal()).isnan().all()


@pytest.mark.parametrize("impl", ["tiled", "auto"])
@pytest.mark.parametrize("heads, kv_heads, q_len, kv_len", [(14, 2, 5, 40_000), (12, 4, 2, 70_000), (10, 2, 3, 60_000)])
def test_few_rows_of_many_keys_are_taken_in_whole_groups(heads, kv_heads, q_len, kv_len, impl):
    q = torch.randn(1, heads, q_len, 4)
    k, v = (torch.randn(1, kv_heads, kv_len, 4) for _ in range(2))
    scores = 3 * torch.tanh(q @ k.repeat_interleave(heads // kv_heads, 1).mT / 6)
    expected = scores.softmax(-1) @ v.repeat_interleave(heads // kv_heads, 1)
    torch.testing.assert_close(sc.attention(q, k, v, softcap=3.0, impl=impl), expected, atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("heads, kv_heads, q_len", [(2, 2, 1), (2, 2, 2), (4, 2, 1), (6, 2, 1), (4, 2, 2)])
@pytest.mark.parametrize("width, value_width", [(64, 128), (128, 256), (24, 40)])
def test_few_rows_are_the_definition_in_the_compiled_kernel(heads, kv_heads, q_len, width, value_width):
    for mask, kv_len in itertools.product([mask for mask in MASKS if "Predicate" not in str(mask)], [9, 70, 333, 900]):
        q = torch.randn(2, heads, q_len, width)
        k, v = torch.randn(2, kv_heads, kv_len, width), torch.randn(2, kv_heads, kv_len, value_width)
        allowed = (masks.Full() if mask is None else mask).to_dense(q_len, kv_len, batch=2, heads=heads)
        expected, expected_lse = oracle.attention(q.double(), k.double(), v.double(), allowed)
        out, lse = sc.attention_with_lse(q, k, v, mask, impl="native")
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "auto"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_mask_that_tells_heads_apart(impl: str, heads: int) -> None:
    q, k, v = (torch.randn(2, heads, 24, 8, dtype=torch.float64) for _ in range(3))
    layout = torch.rand(heads, 3, 3, generator=torch.Generator().manual_seed(5)) < 0.6
    mask = masks.Blocks(layout, 8) & masks.Window(5, 3)
    allowed = layout.repeat_interleave(8, 1).repeat_interleave(8, 2) & masks.Window(5, 3).to_dense(24)[0]
    expected, expected_lse = oracle.attention(q, k, v, allowed.expand(2, heads, 24, 24))
    out, lse = sc.attention_with_lse(q, k, v, mask, impl=impl)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
