"""Calls and nesting of the paths that users run most: a Python call costs as much as a small operation."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.kernels.native_levels import needs_native

import saccade as sc
from saccade import masks
from saccade.models import Decoder, DecoderConfig

ROOT = str(Path(sc.__file__).parent)
SMALL, X = torch.randn(1, 2, 8, 16), torch.randn(1, 4, 64, 32)
CAUSAL = masks.Causal()


def run_layer() -> Callable[[], object]:
    layer, tokens = sc.nn.MultiHeadAttention(128, 4, mask=CAUSAL).eval(), torch.randn(1, 64, 128)
    return lambda: layer(tokens)


def run_step() -> Callable[[], object]:
    layer = sc.nn.MultiHeadAttention(128, 4, mask=CAUSAL).eval()
    cache = layer.mechanism.new_cache()
    layer(torch.randn(1, 64, 128), cache=cache)
    token = torch.randn(1, 1, 128)
    return lambda: layer(token, cache=cache)


def run_decoder_step() -> Callable[[], object]:
    sizes = {"vocab_size": 50, "max_len": 128, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2}
    decoder = Decoder(DecoderConfig(num_layers=2, feed_forward_dim=96, **sizes)).eval()
    cache = decoder.new_cache()
    decoder(torch.zeros(1, 64, dtype=torch.int64), cache=cache)
    token = torch.zeros(1, 1, dtype=torch.int64)
    return lambda: decoder(token, cache=cache)


def run_gradient() -> Callable[[], object]:
    query = X.clone().requires_grad_()
    return lambda: sc.attention(query, X, X, CAUSAL)


PATHS: dict[str, Callable[[], Callable[[], object]]] = {
    "8 tokens": lambda: lambda: sc.attention(SMALL, SMALL, SMALL),
    "64 tokens": lambda: lambda: sc.attention(X, X, X),
    "causal": lambda: lambda: sc.attention(X, X, X, CAUSAL),
    "gradient": run_gradient,
    "layer": run_layer,
    "decode step": run_step,
    "decoder step": run_decoder_step,
}
LIMITS = {  # calls and depth: without the compiled kernel, and with it
    "8 tokens": ((5, 3), (5, 3)),
    "64 tokens": ((5, 3), (5, 3)),
    "causal": ((8, 5), (8, 5)),
    "gradient": ((9, 6), (9, 6)),
    "layer": ((47, 8), (49, 8)),
    "decode step": ((58, 9), (58, 9)),
    "decoder step": ((202, 16), (202, 16)),
}


def counted(run: Callable[[], object]) -> tuple[int, int]:
    """Return calls of saccade's own functions in one warm run, and how deep they are nested."""
    for _ in range(3):
        run()
    calls = depth = deepest = 0

    def watch(frame, event, _) -> None:
        nonlocal calls, depth, deepest
        if frame.f_code.co_filename.startswith(ROOT) and event in ("call", "return"):
            calls, depth = calls + (event == "call"), depth + (1 if event == "call" else -1)
            deepest = max(deepest, depth)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls, deepest


def check(name: str, limit: tuple[int, int]) -> None:
    with torch.set_grad_enabled(name == "gradient"):
        calls, depth = counted(PATHS[name]())
    assert calls <= limit[0]
    assert depth <= limit[1]


@pytest.mark.usefixtures("without_native")
@pytest.mark.parametrize("name", PATHS)
def test_calls_and_depth_without_the_compiled_kernel(name):
    check(name, LIMITS[name][0])


@needs_native
@pytest.mark.usefixtures("with_native")
@pytest.mark.parametrize("name", PATHS)
def test_calls_and_depth_with_the_compiled_kernel(name):
    check(name, LIMITS[name][1])
