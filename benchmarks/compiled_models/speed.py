"""``python -m benchmarks.compiled_models.speed``: time a compiled Mistral layer beside the same layer run eagerly."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.measuring import seconds
from saccade.integrations.transformers import install

TOKENS, WINDOW, ROUNDS = 4096, 1024, 9
_SIZES = {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 2}


def ratio(run: Callable[[], Any], other: Callable[[], Any], rounds: int = ROUNDS) -> tuple[float, list[float]]:
    """Return the median of ``other``'s CPU time divided by ``run``'s, and the ratio of each round; they alternate."""
    ratios = []
    for _ in range(rounds):
        ours, theirs = (seconds(one, time.process_time) for one in (run, other))
        ratios.append(theirs / ours)
    return statistics.median(ratios), sorted(ratios)


def main(tokens: int = TOKENS, rounds: int = ROUNDS) -> int:
    """Print how many times as fast the compiled layer is, with one thread; return 1 if it is slower."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    install()
    config = transformers.MistralConfig(
        vocab_size=64, num_hidden_layers=1, head_dim=128, sliding_window=WINDOW, use_cache=False, **_SIZES
    )
    model = transformers.MistralModel(config).eval()
    model.set_attn_implementation("saccade")
    x = torch.randn(1, tokens, config.hidden_size)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        outs = [run(inputs_embeds=x).last_hidden_state for run in (compiled, model)]
        torch.testing.assert_close(*outs, atol=1e-4, rtol=1e-4)
        times, each = ratio(lambda: compiled(inputs_embeds=x), lambda: model(inputs_embeds=x), rounds)
    words = f"compiled layer, {tokens:,} tokens, window {WINDOW:,}: {times:.2f} times as fast as eager"
    sys.stdout.write(f"{words} ({each[0]:.2f} to {each[-1]:.2f})\n")
    return int(times < 1.0)


if __name__ == "__main__":
    sys.exit(main())
