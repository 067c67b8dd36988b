"""FlexAttention as a kernel: uncompiled it is the same arithmetic, and runs wherever torch does."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import saccade as sc
from saccade import masks, positions, scores
from saccade.integrations.flex import block_mask

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

N = 50
PLACES = {"q_positions": torch.arange(N).roll(7) - 3, "kv_positions": torch.arange(N).flip(0) - 2}
CASES = {
    "all": (None, {}),
    "causal": (masks.Causal(), {}),
    "union": (masks.longformer(5, [0, 31]), {}),
    "documents": (masks.Documents([[20, 12, 18], [50]], rule=masks.Causal()), {}),
    "negative scale": (masks.Causal(), {"scale": -0.4}),
    "softcap": (masks.Causal(), {"softcap": 2.0}),
    "alibi": (masks.Causal(), {"bias": positions.ALiBi(4)}),
    "t5": (None, {"bias": positions.T5(4)}),
    "shaw": (None, {"bias": positions.ShawKeys(16, 5)}),
    "bias": (masks.Causal(), {"bias": torch.linspace(-2, 3, 4 * N * N).sin().view(1, 4, N, N)}),
    "bias of keys": (None, {"bias": torch.linspace(-2, 3, 2 * N).view(2, 1, 1, N)}),
    "positions": (masks.Causal(), {key: x.clamp(min=-1) for key, x in PLACES.items()}),
    "positions and alibi": (
        masks.Causal(),
        {"bias": positions.ALiBi(4)} | {k: x.clamp(min=-1) for k, x in PLACES.items()},
    ),
    "sink": (masks.Causal(), {"sink_logit": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "cosine": (masks.Causal(), {"score": scores.Cosine(), "scale": 4.0}),
    "grid": (masks.Neighborhood(5, 10, 1), {}),
}


@pytest.mark.ci
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("hide", [False, True], ids=["clean", "with-nan"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_definition(name: str, hide: bool) -> None:
    mask, options = CASES[name]
    q, k, v = (torch.randn(2, heads, N, 16) for heads in (4, 2, 2))
    if hide:
        k[0, 0, 30, 3], v[1, 1, 12, 5] = torch.nan, torch.inf
    with torch.no_grad():
        out, lse = sc.attention_with_lse(q, k, v, mask, impl="flex", **options)
        expected, expected_lse = sc.attention_with_lse(q, k, v, mask, impl="reference", **options)
    torch.testing.assert_close(out, expected, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, equal_nan=True)


@pytest.mark.usefixtures("flex_on_cpu")
def test_it_says_what_it_lacks() -> None:
    x = torch.randn(1, 2, 20, 8, dtype=torch.float64)
    with pytest.raises(sc.UnsupportedError, match="cannot run these inputs") as caught:
        sc.attention(x, x, x, lambda b, h, q, kv: q >= kv, score=scores.Additive(8, 8, 4).double(), impl="flex")
    assert caught.value.reasons == (
        "it has no float64",
        "it supports only dot products, and maps that end in one",
        "it compiles masks, and a user's function may not compile",
    )


def test_it_is_for_gpus() -> None:
    x = torch.randn(1, 2, 20, 16)
    with pytest.raises(sc.UnsupportedError, match="it runs on cuda, not on cpu"):
        sc.attention(x, x, x, impl="flex")
    with pytest.raises(sc.UnsupportedError, match="it has no dropout"):
        sc.AttentionMatrix(x, x, impl="flex").matmul(x, dropout_p=0.5)


COMPILED = {
    "causal": masks.Causal(),
    "window and sink": masks.streaming(2, 20),
    "longformer": masks.longformer(9, [0, 50]),
    "bigbird": masks.bigbird(8, random_blocks=1),
    "documents": masks.Documents([[40, 30, 26], [96]], rule=masks.Causal()),
    "padding": masks.Causal() & masks.Padding([96, 50]),
    "blocks": masks.Causal() & masks.Blocks(torch.eye(4, dtype=torch.bool).expand(2, 4, 4), 24),
    "dense": masks.Dense(torch.arange(96)[:, None] % 5 >= torch.arange(96) % 3),
    "sparse transformer": masks.sparse_transformer(7),
    "neighbourhood": masks.Neighborhood(8, 11, 2).after(8),
    "axial": masks.Axial(8, 12),
    "shifted windows": masks.ShiftedWindows(8, 12, 4, shift=2),
    "prefix": masks.Causal() | masks.Prefix(20),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPILED)
def test_every_mask_compiles_in_flex_attention(name: str) -> None:
    """Written out by a compiler, a mask allows what it allows here: not every operation survives that."""
    torch.compiler.reset()
    q, k, v = (torch.randn(2, 2, 96, 16) for _ in range(3))
    compiled = torch.compile(flex_attention)
    with torch.no_grad():
        out = compiled(q, k, v, block_mask=block_mask(COMPILED[name], 96, block_size=32))
    torch.testing.assert_close(out, sc.attention(q, k, v, COMPILED[name]), atol=1e-5, rtol=1e-5)
