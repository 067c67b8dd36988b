"""``python -m benchmarks.recording_overhead``: CPU time that recording adds to that of the statistics."""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import saccade as sc
from benchmarks.measuring import seconds
from saccade.integrations.capture_all import capture_all
from saccade.statistics import Entropy

TOKENS, WIDTH, LAYERS, HEADS, ROUNDS = 1024, 512, 6, 8, 15
MOST = 1.05
STATISTIC = Entropy()


class Sizes(NamedTuple):
    """The sizes of a model and its input."""

    tokens: int = TOKENS
    width: int = WIDTH
    layers: int = LAYERS


def gpt2(sizes: Sizes) -> nn.Module:
    """Return GPT-2 of transformers on SDPA."""
    config = {"vocab_size": 100, "n_embd": sizes.width, "n_layer": sizes.layers, "n_head": HEADS}
    return GPT2Model(GPT2Config(**config, n_positions=sizes.tokens, use_cache=False, attn_implementation="sdpa"))


def llama(sizes: Sizes) -> nn.Module:
    """Return Llama of transformers on SDPA."""
    config = {"vocab_size": 100, "hidden_size": sizes.width, "num_hidden_layers": sizes.layers}
    config |= {"num_attention_heads": HEADS, "intermediate_size": sizes.width * 8 // 3, "use_cache": False}
    return LlamaModel(LlamaConfig(**config, attn_implementation="sdpa"))


class Block(nn.Module):
    """A causal block whose attention is written out, as in nanoGPT."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width = sizes.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("allowed", torch.ones(sizes.tokens, sizes.tokens).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        n, allowed = x.shape[1], self.get_buffer("allowed")
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]))
        weights = F.softmax(scores.masked_fill(allowed[:, :, :n, :n] == 0, -math.inf), dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).contiguous().flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def written(sizes: Sizes) -> nn.Module:
    """Return blocks whose attention is written out."""
    return nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))


def encoder(sizes: Sizes) -> nn.Module:
    """Return torch's encoder, which runs on its fast path."""
    layer = nn.TransformerEncoderLayer(sizes.width, HEADS, 4 * sizes.width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[Sizes], nn.Module], bool]] = {
    "GPT-2": (gpt2, True),
    "Llama": (llama, True),
    "written out": (written, False),
    "nn.TransformerEncoder": (encoder, False),
}
"""Models, and whether their input is token ids."""


class Case:
    """A model with random weights and its input."""

    def __init__(self, name: str, sizes: Sizes):
        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.manual_seed(0)
        make, reads_ids = MODELS[name]
        self.name, self.model = name, make(sizes).eval()
        tokens = torch.randint(0, 100, (1, sizes.tokens))
        self.x = tokens if reads_ids else torch.randn(1, sizes.tokens, sizes.width)
        self.makes: list[Callable[[], Any]] = []
        with capture_all(self.model, lambda _, captured: self.makes.append(captured.make)):
            self.plain()
        self.matrices = [make() for make in self.makes]

    def plain(self) -> Tensor:
        """Run the model alone."""
        with torch.no_grad():
            out = self.model(self.x)
        return out if isinstance(out, Tensor) else out[0]

    def calls(self) -> Tensor:
        """Run the model while its calls are recorded, without a statistic."""
        with sc.record(self.model, keep=(), callback=lambda name, matrix: None):
            return self.plain()

    def recorded(self) -> Tensor:
        """Run the model while a statistic is recorded."""
        with sc.record(self.model, keep=STATISTIC):
            return self.plain()

    def projected(self) -> None:
        """Project queries and keys a second time if the model does not show them, as torch's encoder."""
        if self.name == "nn.TransformerEncoder":
            with torch.no_grad():
                for make in self.makes:
                    make()

    def statistic(self) -> None:
        """Compute the statistic of every matrix of the model, outside of the model."""
        self.projected()
        for matrix in self.matrices:
            matrix.compute(STATISTIC)


def check(case: Case, sizes: Sizes) -> None:
    """Check that recording changes no bit of the output and that every layer was recorded."""
    assert len(case.matrices) == sizes.layers
    for run in (case.calls, case.recorded):
        if not torch.equal(run(), case.plain()):
            raise AssertionError(f"recording changes the output of {case.name}")


class Ratios(NamedTuple):
    """CPU times beside that of the model alone; medians over rounds in which the runs alternate.

    Attributes:
        plain: the model alone, in seconds.
        calls: recording without a statistic, less a second projection.
        recorded: recording a statistic, less the time that it takes alone.
        projected: a second projection of queries and keys.
    """

    plain: float
    calls: float
    recorded: float
    projected: float


def ratios(case: Case, rounds: int) -> Ratios:
    """Measure a model alone and recorded, in turn."""
    runs = (case.plain, case.calls, case.recorded, case.projected, case.statistic)
    times = [[seconds(run, time.process_time) for run in runs] for _ in range(rounds)]
    rows = [
        Ratios(plain, (calls - projected) / plain, (recorded - alone) / plain, projected / plain)
        for plain, calls, recorded, projected, alone in times
    ]
    return Ratios(*map(statistics.median, zip(*rows, strict=True)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what recording costs each model, in one thread; return 1 if it adds more than 5 % to one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording_overhead", description=main.__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds in which the runs alternate")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="length of the sequence")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"unknown models {unknown}")
    torch.set_num_threads(1)
    sizes, most = Sizes(options.tokens), 0.0
    for name in options.models:
        case = Case(name, sizes)
        check(case, sizes)
        found = ratios(case, options.rounds)
        figures = f"calls {found.calls:.3f}   {STATISTIC} {found.recorded:.3f}   projection {found.projected:.3f}"
        sys.stdout.write(f"{name:24}{found.plain * 1e3:8.0f} ms   {figures}\n")
        sys.stdout.flush()
        most = max(most, found.calls, found.recorded)
    return int(most > MOST)


if __name__ == "__main__":
    sys.exit(main())
