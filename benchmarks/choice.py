"""Quality of the choices of ``impl="auto"``: its time beside the best kernel that can run, over many inputs."""

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import saccade as sc
from benchmarks.conditions import threads
from benchmarks.measuring import Call, Referee
from benchmarks.reporting import Row, duration
from saccade import masks, positions, scores
from saccade.engine.dispatch import KERNELS, Request, choose_kernel
from saccade.engine.kernels.native import is_on

HEADS, TARGET = 4, 1.5
TITLE = f"kernels chosen by auto, {HEADS} heads, one thread, processor time"
TITLE_ZH = f"自动选择的内核，{HEADS} 个头，单线程，处理器时间"
DECODED = 4096  # keys of a single query
SHORT, MANY = 16, 64  # tokens of short sequences, and how many of them are a batch
_SHORTEST, _ROUNDS, _AGAIN = 0.02, 3, 3  # seconds of a sample; samples; how often a slow choice is timed
_HOPELESS = 4.0  # times as slow as the fastest in the first call: not timed again
_WORST = 20

MASKS: dict[str, Callable[[int], object]] = {
    "full": lambda n: None,
    "causal": lambda n: masks.Causal(),
    "sliding": lambda n: masks.sliding_window(128),
    "window": lambda n: masks.Window(64, 64),
    "strided": lambda n: masks.Causal() & (masks.Window(127, 0) | masks.Strided(64)),
    "strided 8": lambda n: masks.Causal() & (masks.Window(7, 0) | masks.Strided(8)),
    "dilated": lambda n: masks.Window(256, 256) & masks.Strided(4),
    "strided prefix": lambda n: masks.Causal() & (masks.Window(127, 0) | masks.Strided(64) | masks.Prefix(4)),
    "longformer": lambda n: masks.longformer(64, [0, n // 2]),
    "bigbird": lambda n: masks.bigbird(32, random_blocks=2),
    "streaming": lambda n: masks.streaming(4, 128),
    "documents": lambda n: masks.Documents([n // 8, n - n // 8 - n // 4, n // 4], rule=masks.Causal()),
    "padding": lambda n: masks.Padding([n, n // 2] * (MANY // 2 if n == SHORT else 1)),
    "dense": lambda n: torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < 0.5,
    "dense blocks": lambda n: (
        torch.rand(n // 16, n // 16, generator=torch.Generator().manual_seed(0))
        .lt(0.1)
        .repeat_interleave(16, 0)
        .repeat_interleave(16, 1)
    ),
    "grid": lambda n: masks.Neighborhood(n // 32, 32, 7),
}
TERMS: dict[str, Callable[[int], dict[str, object]]] = {
    "plain": lambda n: {},
    "ALiBi": lambda n: {"bias": positions.ALiBi(HEADS)},
    "T5, trained": lambda n: {"bias": positions.T5(HEADS)},
    "bias": lambda n: {"bias": torch.randn(1, HEADS, n, n)},
    "bias, trained": lambda n: {"bias": torch.randn(1, HEADS, n, n, requires_grad=True)},
    "key bias, trained": lambda n: {"bias": torch.randn(1, HEADS, 1, n, requires_grad=True)},
    "softcap": lambda n: {"softcap": 30.0},
    "sink": lambda n: {"sink_logit": torch.zeros(HEADS)},
    "cosine": lambda n: {"score": scores.Cosine()},
}
LENGTHS = (1, SHORT, 64, 512, 4096)  # queries; a single one reads 4,096 keys
DTYPES = (torch.float32, torch.bfloat16)
WIDTHS, KV_HEADS = (16, 64), (HEADS, 1)
WAYS = {"forward": (False, 0.0), "gradient": (True, 0.0), "dropout": (True, 0.1), "dropout, forward": (False, 0.1)}


class Choice(NamedTuple):
    """One combination of mask, terms and sizes to attend with."""

    mask: str
    terms: str
    length: int
    dtype: torch.dtype
    way: str
    width: int
    kv_heads: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"n={self.length}, width {self.width}, {self.kv_heads} kv heads"
        return f"{self.mask}, {self.terms}, {sizes}, {dtype}, {self.way}"

    @property
    def is_sensible(self) -> bool:
        """Return whether the mask fits these lengths and the dense tensors are not too large."""
        written_out = self.terms in ("bias", "bias, trained") or self.mask == "dense"
        return not (self.length < 32 and self.mask == "grid") and not (written_out and self.length > 2048)

    def sides(self) -> "Sides":
        """Draw the inputs."""
        torch.manual_seed(0)
        kv_len = DECODED if self.length == 1 else self.length
        batch = MANY if self.length == SHORT else 2 if self.mask == "padding" else 1
        backward, dropout_p = WAYS[self.way]
        shapes = [(HEADS, self.length), (self.kv_heads, kv_len), (self.kv_heads, kv_len)]
        tensors = [torch.randn(batch, *shape, self.width).to(self.dtype).requires_grad_(backward) for shape in shapes]
        mask, options = MASKS[self.mask](kv_len), TERMS[self.terms](kv_len)
        if isinstance(mask, Tensor):
            mask = mask[-self.length :]
        bias, trained = options.get("bias"), []
        if isinstance(bias, Tensor):
            wants = bias.requires_grad and backward
            bias = bias.detach()[:, :, -self.length :].to(self.dtype).requires_grad_(wants)
            options["bias"], trained = bias, [bias] if wants else []
        elif isinstance(bias, torch.nn.Module) and backward:
            trained = list(bias.parameters())
        return Sides(tensors, mask, options, trained, dropout_p)


class Sides(NamedTuple):
    """The inputs that every kernel receives."""

    tensors: list[Tensor]
    mask: object
    options: dict[str, object]
    trained: list[Tensor]
    dropout_p: float

    @property
    def backward(self) -> bool:
        """True if gradients are computed, too."""
        return self.tensors[0].requires_grad

    def run(self, impl: str) -> object:
        """Run one call with a kernel."""
        with torch.set_grad_enabled(self.backward):
            out = sc.attention(*self.tensors, self.mask, **self.options, dropout_p=self.dropout_p, impl=impl)
        return torch.autograd.grad(out, [*self.tensors, *self.trained], out.detach()) if self.backward else out

    def kernels(self) -> tuple[str, list[str]]:
        """Return the kernel that "auto" runs, and all that can run."""
        with torch.set_grad_enabled(self.backward):
            given = sc.AttentionMatrix(*self.tensors[:2], self.mask, **self.options).inputs.current()
            needs_lse = given.sink_logit is not None
            able = [
                kernel.name
                for kernel in KERNELS
                if not kernel.verdict(given, Request(self.dropout_p, kernel.name, needs_lse=needs_lse)).cannot
                and kernel.name != "reference"  # the definition holds all pairs, and runs by name only
                and not (kernel.name == "native" and not is_on())
            ]
            return choose_kernel(given, Request(self.dropout_p)).name, able


class Verdict(NamedTuple):
    """The result of "auto" on one choice: seconds of processor time."""

    chosen: str
    best: str
    auto: float
    seconds: float

    @property
    def ratio(self) -> float:
        """The time of "auto" as a multiple of the best kernel's."""
        return self.auto / self.seconds

    def row(self, choice: Choice) -> Row:
        """Return the result as a row of the table."""
        text = f"{self.ratio:.2f}x of {self.best}: {self.chosen} {duration(self.auto)}, {duration(self.seconds)}"
        figures = {"ratio": self.ratio, "auto_s": self.auto, "best_s": self.seconds}
        return Row(str(choice), text, f"at most {TARGET:g}x", self.ratio <= TARGET, figures)


def judged(choice: Choice, clock: Callable[[], float] = time.process_time) -> Verdict:
    """Time all kernels in turn; repeat if "auto" seems slow, since a disturbance slows only one side."""
    sides = choice.sides()
    chosen, able = sides.kernels()
    first = {name: _seconds(partial(sides.run, name), clock) for name in ("auto", *able)}  # plans are made and kept
    fair = [name for name in able if first[name] <= _HOPELESS * min(first.values()) or first[name] < _SHORTEST]
    found = []
    while not found or (found[-1].ratio > TARGET and len(found) < _AGAIN):
        times = {name: float("inf") for name in ("auto", *fair)}
        for _, name in itertools.product(range(_ROUNDS), times):
            times[name] = min(times[name], _mean(partial(sides.run, name), clock))
        best = min(fair, key=times.__getitem__)
        found.append(Verdict(chosen, best, times["auto"], times[best]))
    return min(found, key=lambda verdict: verdict.ratio)


def _seconds(call: Call, clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start


def _mean(call: Call, clock: Callable[[], float]) -> float:
    """Return the mean time of a call, over as many calls as `_SHORTEST` allows."""
    start, count = clock(), 0
    while not count or clock() - start < _SHORTEST:
        call()
        count += 1
    return (clock() - start) / count


def choices(count: int, seed: int = 0) -> list[Choice]:
    """Return every mask with every kind of term once, and random combinations up to ``count``."""
    drawn = random.Random(seed)
    rest = list(itertools.product(LENGTHS, DTYPES, WAYS, WIDTHS, KV_HEADS))
    pairs = list(itertools.product(MASKS, TERMS))
    made = [Choice(*pairs[number % len(pairs)], *drawn.choice(rest)) for number in range(count)]
    return [choice for choice in dict.fromkeys(made) if choice.is_sensible]


def measure(referee: Referee, count: int = 300) -> Iterator[Row]:
    """Measure this question and return its rows; the worst are repeated last."""
    worst: list[tuple[float, Row]] = []
    with threads(1):
        for choice in [FAULT, *choices(referee.rounds(count))]:
            verdict = judged(choice)
            worst.append((verdict.ratio, verdict.row(choice)))
            yield worst[-1][1]
    for _, row in sorted(worst, key=lambda one: one[0])[-_WORST:]:
        yield row._replace(case=f"worst: {row.case}")


FAULT = Choice("strided prefix", "bias, trained", 4096, torch.float32, "gradient", 16, HEADS)
