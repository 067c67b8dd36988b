"""The encoder of signals: its definition, what a frame can see, padding, memory, matrices."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade import masks
from saccade.models import SignalEncoder
from saccade.testing.largest_tensor import largest_tensor

CASES: dict[str, dict[str, Any]] = {
    "both sides": {"mask": masks.Window(3, 2)},
    "causal": {"mask": masks.sliding_window(4)},
    "one stride": {"mask": masks.Window(2, 2), "strides": (3,), "kernel_size": 5},
    "three strides": {"mask": masks.sliding_window(3), "strides": (2, 1, 2), "kernel_size": 3},
    "wide": {"mask": masks.Window(1, 0) | masks.Global([0]), "strides": (4,), "kernel_size": 7},
}


def made(name: str) -> SignalEncoder:
    torch.manual_seed(0)
    encoder = SignalEncoder(3, 8, 2, 2, **CASES[name])
    for parameter in encoder.parameters():
        nn.init.normal_(parameter, std=0.4)
    return encoder.double().eval()


def turned(x: Tensor) -> Tensor:
    """Rotary positions of ``[len, width]``, halves paired."""
    a, b = x.chunk(2, -1)
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(a.shape[1]) * 2.0 / x.shape[1]).double()
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def by_hand(encoder: SignalEncoder, signal: Tensor) -> Tensor:
    """The same for one signal ``[len, channels]``, written out."""
    state, (kernel, mask) = (
        dict(encoder.named_parameters()),
        (encoder.kernel_size, encoder.stack.layers[0].attention.mask),
    )
    before = kernel - 1 if mask.is_causal else kernel // 2
    x = signal
    for index, stride in enumerate(encoder.strides):
        weight, bias = state[f"convolutions.{index}.weight"], state[f"convolutions.{index}.bias"]
        steps = []
        for start in range(0, len(x), stride):
            total = bias
            for tap in range(kernel):
                if 0 <= start + tap - before < len(x):
                    total = total + weight[:, :, tap] @ x[start + tap - before]
            steps.append(total)
        x = F.gelu(torch.stack(steps))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    allowed = mask.to_dense(len(x))[0, 0]
    for layer in range(2):
        here = f"stack.layers.{layer}"
        y = norm(x, f"{here}.attention_norm")
        q, k, v = (linear(y, f"{here}.attention.{name}_projection").split(4, -1) for name in ("query", "key", "value"))
        heads = [
            ((turned(a) @ turned(b).T) / 2).masked_fill(~allowed, -math.inf).softmax(-1) @ c
            for a, b, c in zip(q, k, v, strict=True)
        ]
        x = x + linear(torch.cat(heads, -1), f"{here}.attention.output_projection")
        y = norm(x, f"{here}.feed_forward_norm")
        x = x + linear(F.gelu(linear(y, f"{here}.feed_forward.expand")), f"{here}.feed_forward.contract")
    return norm(x, "stack.final_norm")


@pytest.mark.parametrize("length", [1, 2, 9, 30])
@pytest.mark.parametrize("name", CASES)
def test_the_definition(name: str, length: int) -> None:
    encoder, signal = made(name), torch.randn(2, length, 3, dtype=torch.float64)
    with torch.no_grad():
        out = encoder(signal)
        assert out.shape[1] == encoder.frames([length])[0] == math.ceil(length / math.prod(encoder.strides))
        for own, want in zip(out, signal, strict=True):
            torch.testing.assert_close(own, by_hand(encoder, want))


@pytest.mark.parametrize("name", CASES)
def test_padding_is_as_if_each_were_alone(name: str) -> None:
    encoder, lengths = made(name), [23, 8, 1, 16]
    signal = torch.randn(4, 23, 3, dtype=torch.float64)
    spoiled = signal.clone()
    for own, length in zip(spoiled, lengths, strict=True):
        own[length:] = torch.nan
    with torch.no_grad():
        for given in (lengths, torch.tensor(lengths)):
            out = encoder(spoiled, lengths=given)
            for b, (length, frames) in enumerate(zip(lengths, encoder.frames(given), strict=True)):
                torch.testing.assert_close(out[b, :frames], encoder(signal[b : b + 1, :length])[0])


@pytest.mark.parametrize("name", ["causal", "three strides"])
def test_a_causal_encoder_sees_nothing_later(name: str) -> None:
    encoder = made(name)
    signal = torch.randn(1, 21, 3, dtype=torch.float64, requires_grad=True)
    out, step = encoder(signal), math.prod(encoder.strides)
    for t in range(out.shape[1]):
        (gradient,) = torch.autograd.grad(out[0, t].square().sum(), signal, retain_graph=True)
        seen = gradient[0].abs().sum(-1) > 0
        assert seen[t * step]
        assert not seen[t * step + 1 :].any()
    for length in (1, 6, 20):  # so what has come so far may be encoded now
        frames = encoder.frames([length])[0]
        torch.testing.assert_close(encoder(signal[:, :length]), out[:, :frames])


def test_distant_frames_are_not_seen() -> None:
    encoder = SignalEncoder(1, 8, 2, 1, mask=masks.Window(2, 1)).double()
    signal = torch.randn(1, 80, 1, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(encoder(signal)[0, 10].square().sum(), signal)
    seen = gradient[0, :, 0].nonzero().flatten()
    # frames 8 to 11, each of them step 4 t and the three on either side
    assert (int(seen.min()), int(seen.max())) == (8 * 4 - 3, 11 * 4 + 3)


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_those_of_the_layers(name: str) -> None:
    encoder, lengths = made(name), [23, 8]
    signal = torch.randn(2, 23, 3, dtype=torch.float64)
    calls: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        matrices = encoder.matrices(signal, lengths=lengths)
        for layer in encoder.stack.layers:
            layer.attention.register_forward_hook(lambda _, given, out: calls.append((given[0], out)))
        encoder(signal, lengths=lengths)
        frames = encoder.frames(lengths)
        for matrix, layer, (x, out) in zip(matrices, encoder.stack.layers, calls, strict=True):
            weights, attention = matrix.to_dense(), layer.attention
            value = attention.value_projection(x).unflatten(-1, (2, 4))
            found = torch.einsum("bhij,bjhd->bihd", weights, value).flatten(2)
            torch.testing.assert_close(out, attention.output_projection(found))
            assert weights[..., ~attention.mask.to_dense(frames[0])[0, 0]].eq(0).all()
            assert weights[1, :, :, frames[1] :].eq(0).all()


def test_memory_is_linear_in_the_length() -> None:
    encoder = SignalEncoder(4, 16, 2, 2, mask=masks.Window(16, 16))

    def run(length: int) -> int:
        signal = torch.randn(1, length, 4)
        return largest_tensor(lambda: encoder(signal, lengths=[length - 3]).sum().backward())

    sizes = [run(length) for length in (4096, 8192, 16384)]
    for less, more in itertools.pairwise(sizes):
        assert more <= 2.2 * less


def build(**changes: Any) -> SignalEncoder:
    return SignalEncoder(
        **{"channels": 3, "embed_dim": 8, "num_heads": 2, "num_layers": 1, "mask": masks.Causal(), **changes}
    )


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: build(channels=0), "SignalEncoder: channels must be an int of at least 1; got 0."),
        (lambda: build(mask=None), "SignalEncoder: mask must be a saccade mask; got NoneType."),
        (lambda: build(strides=2), "SignalEncoder: strides must be a tuple of ints; got int."),
        (lambda: build(strides=()), "SignalEncoder: strides must contain at least one stride; got ()."),
        (lambda: build(strides=(2, 0)), "SignalEncoder: strides must be an int of at least 1; got 0."),
        (lambda: build(kernel_size=4), "SignalEncoder: kernel_size must be odd; got 4."),
        (lambda: build(strides=(4,)), "SignalEncoder: kernel_size must be an int of at least 4; got 3."),
        (lambda: build(num_layers=0), "SignalEncoder: num_layers must be an int of at least 1; got 0."),
        (lambda: build(num_heads=3), "SignalEncoder: num_heads must divide embed_dim 8; got 3."),
        (
            lambda: build()(torch.zeros(2, 3)),
            "SignalEncoder: signal must have shape [batch, len, channels] = [batch, len, 3]; got [2, 3].",
        ),
        (lambda: build()(torch.zeros(2, 0, 3)), "SignalEncoder: signal must have at least one step; got [2, 0, 3]."),
        (
            lambda: build()(torch.zeros(2, 5, 3).double()),
            "SignalEncoder: dtype must be float32, like the parameters; got float64.",
        ),
        (
            lambda: build()(torch.zeros(2, 5, 3), lengths=[5, 6]),
            "SignalEncoder: lengths must be one for each of the 2 signals, at most 5; got (5, 6).",
        ),
        (
            lambda: build()(torch.zeros(2, 5, 3), lengths=[5]),
            "SignalEncoder: lengths must be one for each of the 2 signals, at most 5; got (5,).",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()
