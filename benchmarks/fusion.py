"""Training steps of a layer in the style of minGPT or ViT, with its own and with replaced attention: time and memory.

Run `python -m benchmarks.fusion [rounds] [tokens of minGPT] [tokens of ViT]`. Each measurement is a process of its own,
and sides alternate; outputs and gradients of exact attention are compared first. The side "rest" has no attention. With
the speed of `torch.mm` it gives a bound: no exact attention in linear memory makes the step faster, because it has
seven products of queries and keys with vectors of a head, two in the forward and five in the backward pass.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import saccade as sc
from saccade.masks import Mask, Window

WIDTH, HEADS = 192, 6
TOKENS = {"minGPT": 4096, "ViT": 4097}
_CHECKED_TOKENS = 300


class Causal(nn.Module):
    """The attention of minGPT, which builds scores and weights."""

    def __init__(self, tokens: int):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(tokens, tokens)).view(1, 1, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class Patches(nn.Module):
    """The attention of vision transformers before SDPA, which builds scores and weights."""

    def __init__(self, tokens: int):
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj, self.attn_drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        attn = self.attn_drop((q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class NoAttention(nn.Module):
    """The projections of attention, without attention."""

    def __init__(self, tokens: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, 2)
        return self.proj(q + k + v)


class Block(nn.Module):
    """A pre-norm block of attention and a perceptron."""

    def __init__(self, attention: Callable[[int], nn.Module], tokens: int):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(WIDTH), attention(tokens), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


MODELS: dict[str, Callable[[int], nn.Module]] = {"minGPT": Causal, "ViT": Patches}
WINDOWS: dict[str, Mask] = {"minGPT": Window(256, 0), "ViT": Window(128, 128)}
SIDES = ("own", "exact", "window", "rest")
_PRODUCTS = 7  # of exact attention, in both passes


def model_of(kind: str, side: str, tokens: int) -> tuple[Block, Tensor]:
    """Return a block with random weights on one side, and its input."""
    torch.manual_seed(0)
    block, x = Block(NoAttention if side == "rest" else MODELS[kind], tokens), torch.randn(1, tokens, WIDTH)
    if side in ("exact", "window"):
        sc.replace_attention(block, mask=WINDOWS[kind] if side == "window" else None)
    return block, x


def step(block: Block, x: Tensor) -> Tensor:
    """Run the forward and backward pass of a training step; return the output."""
    out = block(x)
    out.square().mean().backward()
    return out.detach()


def check(kind: str) -> None:
    """Check that outputs and gradients of exact attention are those of the model's own."""
    (own, x), (exact, _) = (model_of(kind, side, _CHECKED_TOKENS) for side in ("own", "exact"))
    torch.testing.assert_close(step(exact, x), step(own, x), rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(exact.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def measure(kind: str, side: str, tokens: int) -> None:
    """Print the CPU seconds of the faster of two steps, and by how many MB they raised the peak."""
    torch.set_num_threads(1)
    block, x = model_of(kind, side, tokens)
    before, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(2):
        start = time.process_time()
        step(block, x)
        seconds.append(time.process_time() - start)
    print(min(seconds), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def matmul_flops(kind: str, tokens: int) -> int:
    """Return the floating-point operations of the matrix products in exact attention, forward and backward."""
    pairs = tokens * (tokens + 1) // 2 if kind == "minGPT" else tokens**2
    return 2 * _PRODUCTS * pairs * WIDTH


def matmul_speed() -> float:
    """Return the floating-point operations per CPU second of the fastest of some products of large matrices."""
    torch.set_num_threads(1)
    a, seconds = torch.randn(1024, 1024), []
    for _ in range(20):
        start = time.process_time()
        a @ a
        seconds.append(time.process_time() - start)
    return 2 * 1024**3 / min(seconds)


def main(rounds: int = 3, *tokens: int) -> None:
    """Print a table of the best of some rounds for each model."""
    for kind, n in TOKENS.items() if not tokens else zip(TOKENS, tokens, strict=True):
        check(kind)
        results: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side in SIDES:
                command = [sys.executable, "-m", "benchmarks.fusion", kind, side, str(n)]
                seconds, megabytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                results[side].append((float(seconds), float(megabytes)))
        best = {side: (min(s for s, _ in runs), min(m for _, m in runs)) for side, runs in results.items()}
        print(f"{kind}, {n:,} tokens: a training step of one block, {WIDTH} wide, {HEADS} heads")
        speed = matmul_speed()
        bound = best["own"][0] / (best["rest"][0] + matmul_flops(kind, n) / speed)
        for side, (seconds, megabytes) in best.items():
            ratios = f"{best['own'][0] / seconds:5.1f} times as fast, {megabytes / best['own'][1]:.2f} of the memory"
            print(f"{side:7} {seconds:8.3f} s CPU {megabytes:8.0f} MB {ratios}")
        print(f"bound   {bound:.1f} times, if exact attention ran at the {speed / 1e9:.0f} GFLOP/s of torch.mm")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in MODELS:
        measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main(*map(int, sys.argv[1:]))
