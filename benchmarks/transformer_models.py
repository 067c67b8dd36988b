"""Time and memory of whole models of transformers with our attention beside theirs."""

import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
)

from benchmarks.checking import assert_agree
from benchmarks.conditions import lacking, no_wheel
from benchmarks.measuring import Call, Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, duration, memory_row, ratio_row
from saccade.integrations.transformers import install

WINDOW = 256
TITLE = f"models of transformers under install(), 4 layers, window {WINDOW}, random weights, float32"
TITLE_ZH = f"install() 之下的 transformers 模型，4 层，窗口 {WINDOW}，随机权重，float32"


class Kind(NamedTuple):
    """A model, its length, the implementation to compare with, and the promised ratio of time."""

    model: Any
    config: PreTrainedConfig
    n: int
    peer: str
    forward: float | None = None
    step: float | None = None


_SIZES = {"vocab_size": 1000, "num_hidden_layers": 4, "sliding_window": WINDOW, "head_dim": 64, "use_cache": False}
_WIDE = _SIZES | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
_NARROW = _SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
KINDS = {
    "Mistral": Kind(MistralForCausalLM, MistralConfig(**_WIDE), 8192, "sdpa", 7.0, 6.0),
    # Every second layer has the window, all cap their scores; transformers runs it by `eager` alone.
    "Gemma 2": Kind(Gemma2ForCausalLM, Gemma2Config(**_NARROW), 4096, "eager"),
    # Three layers of four have the window, and no scores are capped.
    "Gemma 3": Kind(Gemma3ForCausalLM, Gemma3TextConfig(**_WIDE, sliding_window_pattern=4), 8192, "sdpa"),
}


class Pair:
    """One model under two implementations, with the same weights.

    Args:
        name: of `KINDS`.
        n: tokens; as many as the kind has when None.
    """

    def __init__(self, name: str, n: int | None = None):
        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.manual_seed(0)
        kind = KINDS[name]
        self.models, self.optimizers = {}, {}
        for side, implementation in (("theirs", kind.peer), ("ours", install()), ("none", _no_attention())):
            config = copy.deepcopy(kind.config)
            config._attn_implementation = implementation
            model = kind.model(config)
            if self.models:
                model.load_state_dict(self.models["theirs"].state_dict())
            self.models[side], self.optimizers[side] = model, torch.optim.AdamW(model.parameters())
        self.tokens = torch.randint(_SIZES["vocab_size"], (1, n or kind.n))

    def forward(self, side: str) -> Tensor:
        """Return the logits."""
        with torch.no_grad():
            return self.models[side](self.tokens).logits

    def gradients(self, side: str) -> dict[str, Tensor]:
        """Return gradients of all weights by the loss of every next token."""
        model = self.models[side]
        model(self.tokens, labels=self.tokens).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    def step(self, side: str) -> None:
        """Run a training step."""
        self.gradients(side)
        self.optimizers[side].step()
        self.optimizers[side].zero_grad()


def _no_attention() -> str:
    """Replace attention by the sum of its three inputs, which is cheap and gives all weights gradients."""

    def added(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        shared = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
        return (query + shared).transpose(1, 2).contiguous(), None

    AttentionInterface.register("no-attention", added)
    AttentionMaskInterface.register("no-attention", lambda *_, **__: None)
    return "no-attention"


def check(its: Pair) -> None:
    """Check that logits and gradients agree."""
    assert_agree(its.forward("ours"), its.forward("theirs"))
    ours, theirs = its.gradients("ours"), its.gradients("theirs")
    for name, other in theirs.items():
        size = other.abs().max()
        assert_agree(ours[name] / size, other / size)
    for optimizer in its.optimizers.values():
        optimizer.zero_grad()


def memory_of(name: str, side: str, way: str) -> Call:
    """Return one call of one side for `extra_bytes`, after a first run."""
    getattr(Pair(name, 300), way)(side)
    return functools.partial(getattr(Pair(name), way), side)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for name, kind in KINDS.items():
        check(Pair(name, 4 * WINDOW))
        its, peer = Pair(name), f"transformers' {kind.peer}"
        for way, told, target in (("forward", "forward", kind.forward), ("step", "training step", kind.step)):
            case = f"{name}, n={kind.n:,}, {told}"
            ours, theirs = (functools.partial(getattr(its, way), side) for side in ("ours", "theirs"))
            pair, note = compare(ours, theirs, rounds=3, referee=referee), ""
            if target is not None:  # what no attention can be better than: projections and the rest take their time
                rest = compare(functools.partial(getattr(its, way), "none"), theirs, rounds=1, referee=referee)
                note = f"without any attention {duration(rest.ours)}, {rest.ratio:.1f}x"
            yield ratio_row(case, pair, peer=peer, target=target, note=note, but=lacking())
            with no_wheel():
                pair = compare(ours, theirs, rounds=1, referee=referee)
            yield ratio_row(f"{case}, without the wheel", pair, peer=peer)
            jobs = [Job(f"{__name__}:memory_of", [name, side, way]) for side in ("ours", "theirs")]
            yield memory_row(f"{case}: memory", *extra_bytes(jobs), peer=peer)
