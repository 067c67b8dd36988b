"""Speed of recurrences beside the torch forms that transformers runs without kernels for a GPU.

``python -m benchmarks.recurrences`` prints the memory and CPU time of rules that transformers lacks, by length.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from benchmarks.checking import assert_agree
from benchmarks.measuring import Call, Referee, compare, in_turn, slope
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, duration, memory_row, ratio_row
from saccade.masks import Causal
from saccade.mechanisms import (
    RWKV7,
    SSD,
    Delta,
    DeltaProduct,
    Forgetting,
    GatedDelta2,
    GatedLinear,
    Mamba3,
    Mechanism,
    Mesa,
)
from saccade.mechanisms.forgetting import with_gates

N, SHORT, HEADS, DIM = 8192, 2048, 8, 64
TARGETS = {"gated delta": 2.5, "SSD": 5.0, "lightning": 1.8, "KDA": 15.0}
BACKWARD, MEMORY = 6.0, 4.0
SIZES, MOST_SLOPE = tuple(1 << power for power in range(12, 17)), 1.05
LENGTHS, FEW_HEADS = (8192, 65536), 1
"""Lengths between which time and memory must not grow too fast, for rules that transformers lacks, with few heads."""
TITLE = f"recurrences, n={N}, {HEADS} heads of {DIM}, float32, beside transformers' torch forms"
TITLE_ZH = f"递归，{N:,} 个词元，{HEADS} 个头，每头宽 {DIM}，float32，与 transformers 的 torch 写法相比"


class Sides(NamedTuple):
    """The same recurrence on both sides, as functions of the same tensors ``[1, len, heads, …]``."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]


def _ours(mechanism: Mechanism, *tensors: Tensor, **gates: Tensor) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in tensors)
    made = mechanism(query, key, mask=Causal(), **{name: x.transpose(1, 2) for name, x in gates.items()})
    return (made @ value).transpose(1, 2)


def _tokens(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, n, HEADS, DIM) for _ in range(3))
    return F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, torch.rand(1, n, HEADS)


def gated_delta(n: int = N) -> Sides:
    """Return both sides of Qwen3-Next's gated delta rule."""
    query, key, value, beta = _tokens(n)
    decay = -F.softplus(torch.randn(1, n, HEADS))

    def ours(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return _ours(Delta(), query, key, value, beta=beta, decay=decay)

    def theirs(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return torch_chunk_gated_delta_rule(query, key, value, g=decay, beta=beta)[0]

    return Sides(ours, theirs, (query, key, value, beta, decay))


def kda(n: int = SHORT) -> Sides:
    """Return both sides of Kimi's rule, with a decay for each channel."""
    query, key, value, beta = _tokens(n)
    decay = -F.softplus(torch.randn(1, n, HEADS, DIM))

    def ours(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return _ours(Delta(), query, key, value, beta=beta, decay=decay)

    def theirs(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        return chunk_kimi_delta_attention(query, key, value, g=decay, beta=beta)[0]

    return Sides(ours, theirs, (query, key, value, beta, decay))


class Half(nn.Module):
    """A module in place of a gate that halves its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return 0, whose sigmoid is a half."""
        return x.new_zeros(())


def ssd(n: int = N) -> Sides:
    """Return both sides of Mamba-2's rule, in chunks of 256 as in its configuration."""
    query, key, value, step = _tokens(n)
    rule = SSD(HEADS).requires_grad_(False)

    def ours(query: Tensor, key: Tensor, value: Tensor, step: Tensor) -> Tensor:
        return _ours(rule, query, key, value, step=step)

    def theirs(query: Tensor, key: Tensor, value: Tensor, step: Tensor) -> Tensor:
        scanned = mamba2_chunk_scan(value, step, -rule.log_rate.exp(), key, query, chunk_size=256)
        return scanned[0] if isinstance(scanned, tuple) else scanned

    return Sides(ours, theirs, (query, key, value, step))


def lightning(n: int = N) -> Sides:
    """Return both sides of MiniMax's rule without projections, norm and gate, from queries, keys and values."""
    torch.manual_seed(0)
    config = MiniMaxConfig(hidden_size=HEADS * DIM, num_attention_heads=HEADS, head_dim=DIM, num_hidden_layers=4)
    layer, rule = MiniMaxLightningAttention(config, 0).eval(), GatedLinear.lightning(HEADS, 0, 4)
    for name in ("qkv_proj", "act_fn", "norm", "out_proj"):
        setattr(layer, name, nn.Identity())
    layer.output_gate = Half()

    def ours(x: Tensor) -> Tensor:
        query, key, value = x.unflatten(2, (HEADS, 3 * DIM)).transpose(1, 2).chunk(3, -1)
        out = (rule(query, key, mask=Causal()) @ value).transpose(1, 2).flatten(2)
        return torch.sigmoid(layer.output_gate(x)) * out

    def theirs(x: Tensor) -> Tensor:
        return layer(x, position_embeddings=None, attention_mask=None)[0]

    return Sides(ours, theirs, (torch.randn(1, n, 3 * HEADS * DIM),))


SIDES = {"gated delta": gated_delta, "SSD": ssd, "lightning": lightning, "KDA": kda}


def forgetting(n: int) -> Call:
    """Return softmax attention with forget gates, whose memory grows with n and its time with n squared."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, FEW_HEADS, n, DIM).unbind()
    keys = with_gates(key, torch.randn(1, FEW_HEADS, n) + 4.0)
    return call(lambda *x: Forgetting(DIM)(x[0], x[1], mask=Causal()) @ x[2], (query, keys, value))


def delta_product(n: int) -> Call:
    """Return DeltaProduct of two steps."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, FEW_HEADS, n, DIM), *torch.randn(2, 1, FEW_HEADS, n, 2, DIM).unbind()
    keys, beta = F.normalize(key, dim=-1).flatten(3), torch.rand(1, FEW_HEADS, n, 2)
    rule = DeltaProduct(2)
    return call(lambda *x: rule(x[0], x[1], beta=beta, mask=Causal()).total(x[2]), (query, keys, value.flatten(3)))


def rwkv7(n: int) -> Call:
    """Return RWKV-7's rule."""
    torch.manual_seed(0)
    query, key, value, removal, rate, fade = torch.randn(6, 1, FEW_HEADS, n, DIM).unbind()
    gates = {"removal": F.normalize(removal, dim=-1), "rate": rate.sigmoid(), "decay": -0.6 * fade.sigmoid()}
    return call(lambda *x: RWKV7()(x[0], x[1], mask=Causal(), **gates) @ x[2], (query, key, value))


def mesa(n: int) -> Call:
    """Return the mesa layer."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, FEW_HEADS, n, DIM).unbind()
    gates = {"decay": -F.softplus(torch.randn(1, FEW_HEADS, n) - 3.0), "beta": torch.rand(1, FEW_HEADS, n)}
    keys = F.normalize(key, dim=-1)
    return call(lambda *x: Mesa()(x[0], x[1], mask=Causal(), **gates) @ x[2], (query, keys, value))


def gated_delta2(n: int) -> Call:
    """Return the rule of Gated DeltaNet-2, with gates for each channel."""
    torch.manual_seed(0)
    query, key, value, fade = torch.randn(4, 1, FEW_HEADS, n, DIM).unbind()
    gates = {"decay": -F.softplus(fade - 3.0), "erase": torch.rand(1, FEW_HEADS, n, DIM)}
    keys = F.normalize(key, dim=-1)
    return call(lambda *x: GatedDelta2()(x[0], x[1], mask=Causal(), **gates) @ x[2], (query, keys, value))


def mamba3(n: int) -> Call:
    """Return Mamba-3's rule."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, FEW_HEADS, n, DIM).unbind()
    step, blend, fade = torch.rand(3, 1, FEW_HEADS, n).unbind()
    gates = {"step": step, "blend": blend, "decay": -step * fade, "angle": torch.randn(1, FEW_HEADS, n, DIM // 2)}
    return call(lambda *x: Mamba3()(x[0], x[1], mask=Causal(), **gates) @ x[2], (query, key, value))


GROWTH = {
    "forgetting": (forgetting, 2.1),
    "DeltaProduct, 2 steps": (delta_product, 1.1),
    "RWKV-7": (rwkv7, 1.1),
    "mesa": (mesa, 1.1),
    "Gated DeltaNet-2": (gated_delta2, 1.1),
    "Mamba-3": (mamba3, 1.1),
}
"""Each rule whose growth is measured, and the largest slope of its time; the slope of its memory is at most 1.1."""


def grown(name: str, n: int) -> Call:
    """Return a rule of `GROWTH` at a length, after a short call, for `extra_bytes`."""
    make, _ = GROWTH[name]
    make(256)()
    return make(n)


def _growth(referee: Referee) -> Iterator[Row]:
    for name, (make, most) in GROWTH.items():
        rounds = in_turn([make(n) for n in LENGTHS], rounds=1 if name == "forgetting" else 3, referee=referee)
        times = [rounds.median(i) for i in range(len(LENGTHS))]
        held = extra_bytes([Job("benchmarks.recurrences:grown", (name, n)) for n in LENGTHS])
        steeper, wider = slope(LENGTHS, times), slope(LENGTHS, held)
        yield Row(
            f"{name}, {FEW_HEADS} head, slopes of time and memory, {LENGTHS[0]} to {LENGTHS[1]} tokens",
            f"{steeper:.2f} and {wider:.2f}: {duration(times[0])} to {duration(times[1])}, {held[1] / 2**20:.0f} MiB",
            f"at most {most} and 1.1",
            steeper <= most and wider <= 1.1,
            {"slope": steeper, "slope of memory": wider},
            rounds.rate,
            rounds.quiet,
        )


def call(function: Callable[..., Tensor], tensors: tuple[Tensor, ...], *, backward: bool = False) -> Call:
    """Run forward without a graph, or forward and backward."""

    def forward() -> Tensor:
        with torch.no_grad():
            return function(*tensors)

    def both() -> tuple[Tensor, ...]:
        leaves = tuple(x.detach().requires_grad_() for x in tensors)
        return torch.autograd.grad(function(*leaves).sum(), leaves)

    return both if backward else forward


def ours(n: int = N) -> Call:
    """Return the gated delta rule, forward and backward, for `extra_bytes`."""
    its = gated_delta(n)
    call(its.ours, gated_delta(64).tensors, backward=True)()
    return call(its.ours, its.tensors, backward=True)


def theirs(n: int = N) -> Call:
    """Run the recurrence of transformers."""
    its = gated_delta(n)
    call(its.theirs, gated_delta(64).tensors, backward=True)()
    return call(its.theirs, its.tensors, backward=True)


def check() -> None:
    """Check that both sides agree."""
    for make in SIDES.values():
        its = make(192)
        assert_agree(its.ours(*its.tensors), its.theirs(*its.tensors))


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    check()
    for name, make in SIDES.items():
        its = make()
        sides = [call(function, its.tensors) for function in (its.ours, its.theirs)]
        pair = compare(*sides, rounds=3 if name == "KDA" else 7, referee=referee)
        case = f"{name}, n={SHORT}" if name == "KDA" else name
        yield ratio_row(case, pair, peer="transformers", target=TARGETS[name])
    its = gated_delta()
    sides = [call(function, its.tensors, backward=True) for function in (its.ours, its.theirs)]
    pair = compare(*sides, rounds=5, referee=referee)
    yield ratio_row("gated delta, forward + backward", pair, peer="transformers", target=BACKWARD)
    mine, other = extra_bytes([Job("benchmarks.recurrences:ours"), Job("benchmarks.recurrences:theirs")])
    yield memory_row("gated delta, forward + backward", mine, other, peer="transformers", target=MEMORY)
    calls = [call(its.ours, gated_delta(n).tensors) for n in SIZES]
    rounds = in_turn(calls, rounds=3, referee=referee)
    times = [rounds.median(i) for i in range(len(SIZES))]
    grown = slope(SIZES, times)
    yield Row(
        f"gated delta, slope of time, {SIZES[0]} to {SIZES[-1]} tokens",
        f"{grown:.2f}: {duration(times[0])} to {duration(times[-1])}",
        f"at most {MOST_SLOPE}",
        grown <= MOST_SLOPE,
        {"slope": grown},
        rounds.rate,
        rounds.quiet,
    )
    yield from _growth(referee)


def timed(name: str, n: int) -> tuple[float, float]:
    """Return the CPU seconds of a call of a rule of `GROWTH`, and the MiB that it adds at its peak."""
    run = grown(name, n)
    begin = time.process_time()
    run()
    seconds = time.process_time() - begin
    return seconds, extra_bytes([Job("benchmarks.recurrences:grown", (name, n))])[0] / 2**20


def main() -> None:
    """Measure every rule at every length, each in a process of its own, and print a table in Markdown."""
    lengths = [LENGTHS[0] << power for power in range(4)]
    print(f"| | {' | '.join(f'{n:,}' for n in lengths)} |\n|{'---|' * (len(lengths) + 1)}")
    for name in GROWTH:
        cells = []
        for n in lengths:
            code = f"import json; from benchmarks.recurrences import timed; print(json.dumps(timed({name!r}, {n})))"
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[1])
            seconds, mib = json.loads(done.stdout)
            cells.append(f"{duration(seconds)}, {mib:.0f} MiB")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
