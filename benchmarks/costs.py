"""Accuracy of `saccade.cost`, which runs nothing, beside measured time and memory."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.measuring import Call, Referee
from benchmarks.reporting import Row
from saccade import masks
from saccade.costs import FACTOR, Cost, Machine, cost
from saccade.masks import Mask
from saccade.mechanisms import Delta, GatedLinear, Linear, Mechanism, Nystrom, Performer, Softmax
from saccade.models import Decoder, DecoderConfig, Encoder, EncoderConfig
from saccade.nn import MultiHeadAttention
from saccade.scores import Additive, Cosine, Score

SHARE = 0.1  # of the memory that is measured
HEADS, DIM = 8, 64
TITLE = "saccade.cost: predicted over measured, memory of tensors and time"
TITLE_ZH = "saccade.cost：预测值与实测值之比，张量的内存与时间"


class Case(NamedTuple):
    """A computation whose cost is forecast and measured."""

    name: str
    length: int
    told: Cost
    held: int
    forward: Call
    training: Call


def _product(
    length: int,
    mask: Mask | None,
    subject: Mechanism | Score | None = None,
    dtype: torch.dtype = torch.float32,
    kv: int = HEADS,
) -> Case:
    shapes = [(1, heads, length, DIM) for heads in (HEADS, kv, kv)]
    query, key, value = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    mechanism = subject if isinstance(subject, Mechanism) else Softmax(score=subject)
    told = cost(subject, length, mask=mask, num_kv_heads=kv, dtype=dtype)

    def run() -> Tensor:
        return mechanism(query, key, mask=mask) @ value

    held = sum(x.nbytes for x in (query, key, value, *mechanism.parameters(), *mechanism.buffers()))
    name = (
        told.subject + ("" if dtype == torch.float32 else ", bfloat16") + ("" if kv == HEADS else f", {kv} key heads")
    )
    return Case(name, length, told, held, *_runs(mechanism, (query, key, value), run, lambda out: out.float().mean()))


def _module(module: nn.Module, length: int, inputs: Tensor, mask: Mask | None = None, name: str = "") -> Case:
    options = {} if mask is None else {"mask": mask}
    vocab = getattr(getattr(module, "config", None), "vocab_size", -1)

    def loss(out: Tensor) -> Tensor:
        if out.shape[-1] != vocab:
            return out.mean()
        return nn.functional.cross_entropy(out.flatten(0, -2), torch.zeros(out.shape[:-1], dtype=torch.long).flatten())

    # Adam's tensors are not measured here.
    told = cost(module, length, mask=mask, optimizer_tensors=0)
    held = inputs.nbytes + sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
    leaves = (*(x for x in (inputs,) if x.requires_grad),)
    runs = _runs(module, leaves, lambda: module(inputs, **options), loss)
    return Case(name or type(module).__name__, length, told, held, *runs)


def _runs(
    module: nn.Module, leaves: tuple[Tensor, ...], run: Callable[[], Tensor], loss: Callable[[Tensor], Tensor]
) -> tuple[Call, Call]:
    """Return a forward run and a training step."""

    def forward() -> object:
        module.eval()
        with torch.no_grad():
            return run()

    def training() -> object:
        module.train()
        loss(run()).backward()
        for x in (*leaves, *module.parameters()):
            x.grad = None  # here, so that a profile of the next step does not begin with memory that it has not seen
        return None

    return forward, training


def cases() -> Iterator[Case]:
    """Return the grid: lengths, masks, scores, mechanisms, layers and models."""
    torch.manual_seed(0)
    causal, window = masks.Causal(), masks.sliding_window(256)
    for length in (512, 2048, 8192):
        yield _product(length, causal)
        yield _product(length, window)
    yield _product(2048, None)
    yield _product(4096, masks.longformer(256, [0]))
    yield _product(4096, causal, kv=2)
    yield _product(4096, causal, dtype=torch.bfloat16)
    yield _product(1024, causal, Cosine())
    yield _product(512, causal, Additive(DIM, DIM, hidden_dim=32))
    for mechanism in (Linear(), Performer(128), Delta(), GatedLinear()):
        yield _product(2048, causal, mechanism)
    yield _product(2048, None, Nystrom(64))
    for length in (512, 2048):
        layer = MultiHeadAttention(512, HEADS)
        yield _module(layer, length, torch.randn(1, length, 512, requires_grad=True), causal)
    sizes = {"vocab_size": 8000, "embed_dim": 256, "num_heads": 4, "num_layers": 4, "feed_forward_dim": 688}
    for length in (256, 1024):
        decoder = Decoder(DecoderConfig(max_len=4096, **sizes))
        yield _module(decoder, length, torch.randint(8000, (1, length)))
    encoder = Encoder(EncoderConfig(max_len=1024, **sizes))
    yield _module(encoder, 512, torch.randint(8000, (1, 512)))


def measured_bytes(run: Call) -> int:
    """Return the peak memory of tensors beyond the start, by torch's allocator."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    del result
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def measured_seconds(run: Call, rounds: int, patience: float) -> float:
    """Return the minimum of several runs over some seconds: disturbances only add time, and may outlast a few runs."""
    run()
    times: list[float] = []
    end = time.perf_counter() + patience
    while len(times) < rounds or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    rounds, patience = (1, 0.0) if referee.most_rounds == 1 else (7, 2.0)
    machine = Machine()  # measured now, since what is kept may stem from a day on which others ran beside it
    for case in cases():
        try:
            predicted = case.told.seconds(machine)
        except NotImplementedError:  # of products whose score is no dot product
            predicted = None
        for name in ("forward", "training"):
            run: Call = getattr(case, name)
            memory = getattr(case.told, name).peak_bytes / (case.held + measured_bytes(run))
            close, told = abs(memory - 1) <= SHARE, f"memory {memory:.3f}"
            figures = {"memory_ratio": memory}
            if predicted is not None:
                seconds = measured_seconds(run, rounds, patience)
                ratio = getattr(predicted, name) / seconds
                close &= 1 / FACTOR <= ratio <= FACTOR
                told += f", time {ratio:.2f} of {1e3 * seconds:.3g} ms"
                figures |= {"time_ratio": ratio, "measured_s": seconds}
            yield Row(
                f"{case.name}, {case.length:,} tokens, {name}",
                told,
                f"memory within {SHARE:.0%}, time within a factor of {FACTOR:g}",
                close,
                figures,
            )
