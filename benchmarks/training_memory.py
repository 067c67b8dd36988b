"""Memory of training with a window, a relative bias and dropout beside torch's layers."""

import copy
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking
from benchmarks.measuring import Call, Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, memory_row, ratio_row
from saccade.masks import sliding_window
from saccade.mechanisms import Softmax
from saccade.nn import from_torch
from saccade.positions import Clipped

N, LAYERS, HEADS, DIM, WINDOW, P = 8192, 4, 2, 64, 256, 0.1
_SIZE = f"{LAYERS} layers, {HEADS} heads of {DIM}, n={N:,}"
TITLE = f"training a decoder of {_SIZE}, window {WINDOW}, relative bias, dropout {P}, float32"
TITLE_ZH = f"训练 {LAYERS} 层解码器，{HEADS} 个头，每头宽 {DIM}，{N:,} 个词元，窗口 {WINDOW}，相对偏置，dropout {P}"
TARGET = 6.0


class Models(nn.Module):
    """Torch's layers, each with a table of biases expanded to all pairs, and ours, with the same weights."""

    def __init__(self, n: int = N, window: int = WINDOW):
        super().__init__()
        torch.manual_seed(0)
        width, self.window = HEADS * DIM, window
        options = {"dim_feedforward": 4 * width, "dropout": P, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, HEADS, **options) for _ in range(LAYERS))
        self.biases = nn.ModuleList(Clipped(HEADS, window) for _ in range(LAYERS))
        for bias in self.biases:
            nn.init.normal_(bias.weight, std=0.5)
        self.own = nn.ModuleList(map(self._converted, self.layers, self.biases))
        self.input = torch.randn(1, n, width)
        at = torch.arange(n)
        distance = at[:, None] - at
        self.hidden = (distance < 0) | (distance >= window)
        self.entries = distance.clamp_(-window, window).add_(window)  # made once, so it does not count as theirs

    def _converted(self, layer: nn.TransformerEncoderLayer, bias: Clipped) -> nn.Module:
        ours = from_torch(layer)
        ours.attention.mask = sliding_window(self.window)
        ours.attention.mechanism = Softmax(bias=copy.deepcopy(bias))
        return ours

    def ours(self) -> Tensor:
        """Run the layers of this library."""
        x = self.input
        for layer in self.own:
            x = layer(x)
        return x

    def theirs(self) -> Tensor:
        """Run torch's layers: window and bias are one float mask, through which the table gets its gradient."""
        x = self.input
        for layer, bias in zip(self.layers, self.biases, strict=True):
            x = layer(x, src_mask=bias.weight[:, self.entries].masked_fill(self.hidden, -torch.inf))
        return x

    def step(self, side: str) -> list[Tensor]:
        """Run forward and backward; return the gradients of the tables."""
        self.zero_grad()
        getattr(self, side)().square().mean().backward()
        tables = self.biases if side == "theirs" else [layer.attention.mechanism.bias for layer in self.own]
        return [table.weight.grad for table in tables]


def check(models: Models) -> None:
    """Check that without dropout outputs and gradients of the tables agree."""
    models.eval()
    assert_agree(models.ours(), models.theirs())
    for own, other in zip(models.step("ours"), models.step("theirs"), strict=True):
        size = other.abs().max()
        assert_agree(own / size, other / size)
    models.train()


def memory_of(side: str, n: int = N) -> Call:
    """Return a training step of one side for `extra_bytes`, after a first run."""
    Models(n=300).step(side)
    return functools.partial(Models(n).step, side)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    check(Models(n=1024))
    ours, theirs = extra_bytes([Job("benchmarks.training_memory:memory_of", [side]) for side in ("ours", "theirs")])
    yield memory_row("a step: memory", ours, theirs, peer="torch's layers", target=TARGET, but=lacking())
    models = Models()
    steps = (functools.partial(models.step, side) for side in ("ours", "theirs"))
    pair = compare(*steps, rounds=1, warm_up=0, referee=referee)
    yield ratio_row("a step: time", pair, peer="torch's layers")
