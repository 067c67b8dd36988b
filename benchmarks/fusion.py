"""Training steps of a layer in minGPT's style, alone and with its attention fused: CPU time and peak memory.

Run `python -m benchmarks.fusion [tokens] [rounds]`. Each measurement is a process of its own, and sides alternate.
"""

from __future__ import annotations

import contextlib
import math
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import saccade as sc
from saccade.fusion import AttentionCall, FuseAttention
from saccade.masks import Causal, Window

WIDTH, HEADS = 192, 6


class Block(nn.Module):
    """A block of minGPT, whose attention builds scores and weights."""

    def __init__(self, tokens: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.register_buffer("bias", torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


def window(call: AttentionCall) -> Tensor:
    """Run an attention call with a causal window of 256 keys in place of its mask."""
    return sc.attention(call.query, call.key, call.value, Causal() & Window(256, 0), scale=call.scale)


SIDES = {"plain": contextlib.nullcontext, "fused": FuseAttention, "window": lambda: FuseAttention(window)}


def measure(side: str, tokens: int) -> None:
    """Print the CPU seconds of the faster of two steps, and by how many MB they raised the peak."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    block, x = Block(tokens), torch.randn(1, tokens, WIDTH)
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(2):
        start = time.process_time()
        with SIDES[side]():
            block(x).square().mean().backward()
        seconds.append(time.process_time() - start)
    print(min(seconds), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def main(tokens: int = 4096, rounds: int = 3) -> None:
    """Print a table of the best of some rounds."""
    results: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            command = [sys.executable, "-m", "benchmarks.fusion", side, str(tokens)]
            seconds, megabytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            results[side].append((float(seconds), float(megabytes)))
    best = {side: (min(s for s, _ in runs), min(m for _, m in runs)) for side, runs in results.items()}
    for side, (seconds, megabytes) in best.items():
        ratios = f"{best['plain'][0] / seconds:5.1f} times as fast, {megabytes / best['plain'][1]:.2f} of the memory"
        print(f"{side:7} {seconds:8.3f} s CPU {megabytes:8.0f} MB {ratios}")


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in SIDES:
        measure(sys.argv[1], int(sys.argv[2]))
    else:
        main(*map(int, sys.argv[1:]))
