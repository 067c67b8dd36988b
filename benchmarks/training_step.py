"""Parts of a decoder's training step, and its speed beside transformers, compiled and not."""

import functools
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checking import assert_agree
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, duration, ratio_row
from benchmarks.step_profile import ATTENTION, MATMUL, profiled
from saccade.engine.kernels import native
from saccade.models import Decoder, decoder
from saccade.nn import FeedForward
from saccade.nn.norms import RMSNorm
from saccade.positions import Rotary

N, WINDOW, P = 2048, 256, 0.1
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": N,
}
MOST = 0.15
ROUNDS, COMPILE_S = 3, 300.0
TITLE = f"training step of a decoder, 8 layers, width 512, 8,192 words, n={N:,}, window {WINDOW}, dropout {P}, float32"
TITLE_ZH = f"解码器训练一步，8 层，宽 512，8,192 个词，{N:,} 个词元，窗口 {WINDOW}，dropout {P}，float32"
SCOPES = (
    (RMSNorm, "forward", "norms"),
    (Rotary, "forward", "rotary"),
    (FeedForward, "forward", "gates"),
    (decoder, "mean_cross_entropy", "loss"),
)


class Case:
    """One set of random weights in both libraries, an optimizer for each, and a text.

    Args:
        n: tokens of the text.
        sizes: of the model, as transformers calls them; they replace those of `SIZES`.
    """

    def __init__(self, n: int = N, **sizes: int):
        from transformers import MistralConfig, MistralForCausalLM  # noqa: PLC0415  takes seconds to import

        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.manual_seed(0)
        options = {"sliding_window": WINDOW, "attention_dropout": P, "use_cache": False}
        config = MistralConfig(**options | SIZES | sizes, attn_implementation="sdpa")
        self.peer = MistralForCausalLM(config)
        with tempfile.TemporaryDirectory() as folder:
            self.peer.save_pretrained(folder)
            self.model = Decoder.from_pretrained(folder)
        self.tokens = torch.randint(config.vocab_size, (1, n))
        self.losses: dict[str, Callable[[], Tensor]] = {
            "ours": lambda: self.model.loss(self.tokens),
            "theirs": functools.partial(_peer_loss, self.peer, self.tokens),
        }
        models = {"ours": self.model, "theirs": self.peer}
        self.optimizers = {side: torch.optim.AdamW(its.parameters(), fused=True) for side, its in models.items()}
        for its in models.values():
            its.train()

    def add_compiled(self) -> None:
        """Add the side of the peer's model compiled by inductor."""
        self.losses["compiled"] = functools.partial(_peer_loss, torch.compile(self.peer), self.tokens)
        self.optimizers["compiled"] = self.optimizers["theirs"]

    def step(self, side: str) -> None:
        """Run forward, backward and optimizer of one side."""
        self.losses[side]().backward()
        self.optimizers[side].step()
        self.optimizers[side].zero_grad()


def _peer_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, labels=tokens).loss
    return loss


def check(its: Case) -> None:
    """Check that without dropout losses and the gradients of the embeddings agree."""
    tables = {"ours": its.model.embedding.weight, "theirs": its.peer.model.embed_tokens.weight}
    for model in (its.model, its.peer):
        model.eval()
    losses = {side: its.losses[side]() for side in tables}
    grads = {side: torch.autograd.grad(losses[side], table)[0] for side, table in tables.items()}
    assert_agree(losses["ours"], losses["theirs"])
    size = grads["theirs"].abs().max()
    assert_agree(grads["ours"] / size, grads["theirs"] / size)
    for model in (its.model, its.peer):
        model.train()


def parts_row(its: Case, rounds: int = 1) -> Row:
    """Measure which share of our step is neither a linear layer's product nor attention, in the fastest of a few."""
    its.step("ours")
    kernel = ("saccade_cpu::",) if native.is_on() else ("_Product", "_BackwardPass")
    runs = [profiled(functools.partial(its.step, "ours"), SCOPES, kernel) for _ in range(rounds)]
    parts = min(runs, key=lambda run: sum(run.values()))
    whole = sum(parts.values())
    shares = {name: parts[name] / whole for name in sorted(parts, key=parts.__getitem__, reverse=True)}
    others = {name: share for name, share in shares.items() if name not in (MATMUL, ATTENTION)}
    share = sum(others.values())
    told = ", ".join(f"{name} {part:.1%}" for name, part in others.items())
    measured = (
        f"{share:.1%} of {duration(whole)}: {told}; {MATMUL} {shares[MATMUL]:.0%}, {ATTENTION} {shares[ATTENTION]:.0%}"
    )
    figures = {"share": share, **{f"{name.replace(' ', '_')}_share": part for name, part in shares.items()}}
    return Row("everything but matmul and attention", measured, f"at most {MOST:.0%}", share <= MOST, figures)


def is_compiled(limit: float = COMPILE_S) -> bool:
    """Compile the peer's step in another process, which leaves its code in inductor's cache; False past the limit."""
    command = [sys.executable, "-m", "benchmarks.training_step"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    its = Case()
    check(its)
    yield parts_row(its, referee.rounds(ROUNDS))
    ours = functools.partial(its.step, "ours")
    pair = compare(ours, functools.partial(its.step, "theirs"), rounds=ROUNDS, warm_up=0, referee=referee)
    yield ratio_row("a step", pair, peer="transformers' sdpa")
    if not is_compiled():
        yield Row("a step", f"transformers was not compiled within {duration(COMPILE_S)}")
        return
    its.add_compiled()
    pair = compare(ours, functools.partial(its.step, "compiled"), rounds=ROUNDS, referee=referee)
    yield ratio_row("a step", pair, peer="transformers' sdpa, compiled")


if __name__ == "__main__":
    case = Case()
    case.add_compiled()
    case.step("compiled")
