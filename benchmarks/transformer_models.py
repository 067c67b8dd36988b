"""How much faster, and in how much less memory, are whole models of transformers on our attention than on theirs?"""

import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedConfig

from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking, no_wheel
from benchmarks.measuring import Call, Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, memory_row, ratio_row
from saccade.integrations.transformers import install

WINDOW = 256
TITLE = f"models of transformers under install(), 4 layers, window {WINDOW}, random weights, float32"
TITLE_ZH = f"install() 之下的 transformers 模型，4 层，窗口 {WINDOW}，随机权重，float32"


class Kind(NamedTuple):
    """A model, the length it is run at, whom it is compared with, and what is promised of time."""

    model: Any
    config: PreTrainedConfig
    n: int
    peers: dict[str, str]
    """Of each implementation: what it leaves out of the model."""
    forward: float | None = None
    step: float | None = None


_SIZES = {"vocab_size": 1000, "num_hidden_layers": 4, "sliding_window": WINDOW, "head_dim": 64, "use_cache": False}
KINDS = {
    "Mistral": Kind(
        MistralForCausalLM,
        MistralConfig(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=2, **_SIZES),
        8192,
        {"sdpa": ""},
        7.0,
        6.0,
    ),
    # Every second layer sees all tokens before it; scores are capped, which SDPA cannot do and leaves out.
    "Gemma 2": Kind(
        Gemma2ForCausalLM,
        Gemma2Config(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, **_SIZES),
        4096,
        {"eager": "", "sdpa": "without the softcap"},
    ),
}


class Pair:
    """One model under two implementations, with the same weights.

    Args:
        name: of `KINDS`.
        peer: the implementation of transformers.
        n: tokens; as many as the kind has when None.
    """

    def __init__(self, name: str, peer: str, n: int | None = None):
        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.manual_seed(0)
        kind = KINDS[name]
        self.models, self.optimizers = {}, {}
        for side, implementation in (("theirs", peer), ("ours", install())):
            config = copy.deepcopy(kind.config)
            config._attn_implementation = implementation
            model = kind.model(config)
            if self.models:
                model.load_state_dict(self.models["theirs"].state_dict())
            self.models[side], self.optimizers[side] = model, torch.optim.AdamW(model.parameters())
        self.tokens = torch.randint(_SIZES["vocab_size"], (1, n or kind.n))

    def forward(self, side: str) -> Tensor:
        """Logits."""
        with torch.no_grad():
            return self.models[side](self.tokens).logits

    def gradients(self, side: str) -> dict[str, Tensor]:
        """Of all weights, of the loss of every next token."""
        model = self.models[side]
        model(self.tokens, labels=self.tokens).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    def step(self, side: str) -> None:
        """A step of training."""
        self.gradients(side)
        self.optimizers[side].step()
        self.optimizers[side].zero_grad()


def check(its: Pair) -> None:
    """Logits and gradients agree."""
    assert_agree(its.forward("ours"), its.forward("theirs"))
    ours, theirs = its.gradients("ours"), its.gradients("theirs")
    for name, other in theirs.items():
        size = other.abs().max()
        assert_agree(ours[name] / size, other / size)
    for optimizer in its.optimizers.values():
        optimizer.zero_grad()


def memory_of(name: str, peer: str, side: str, way: str) -> Call:
    """For `extra_bytes`: one call of one side, its code once run."""
    getattr(Pair(name, peer, 300), way)(side)
    return functools.partial(getattr(Pair(name, peer), way), side)


def _rows(name: str, peer: str, its: Pair, referee: Referee) -> Iterator[Row]:
    kind = KINDS[name]
    note, told = kind.peers[peer], f"transformers' {peer}"
    targets = {"forward": kind.forward, "step": kind.step} if not note else dict.fromkeys(("forward", "step"))
    for way, target in targets.items():
        case = f"{name}, n={kind.n:,}, {'forward' if way == 'forward' else 'training step'}"
        ours, theirs = (functools.partial(getattr(its, way), side) for side in ("ours", "theirs"))
        pair = compare(ours, theirs, rounds=3, referee=referee)
        yield ratio_row(case, pair, peer=told, target=target, note=note, but=lacking())
        with no_wheel():
            pair = compare(ours, theirs, rounds=1, referee=referee)
        yield ratio_row(f"{case}, without the wheel", pair, peer=told, note=note)
        jobs = [Job(f"{__name__}:memory_of", [name, peer, side, way]) for side in ("ours", "theirs")]
        yield memory_row(f"{case}: memory", *extra_bytes(jobs), peer=told)


def measure(referee: Referee) -> Iterator[Row]:
    """Rows of this question."""
    for name, kind in KINDS.items():
        for peer, left_out in kind.peers.items():
            if not left_out:
                check(Pair(name, peer, 4 * WINDOW))
            yield from _rows(name, peer, Pair(name, peer), referee)
