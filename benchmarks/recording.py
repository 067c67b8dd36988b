"""Cost of recording a transformers model, beside running it, and beside the weights of eager attention."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

import saccade as sc
from benchmarks.measuring import Referee, compare
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, duration

TOKENS, WIDTH, LAYERS, HEADS, KV_HEADS = 4096, 512, 6, 8, 2
MOST_TIME = {"statistics": 5.0, "qk": 1.3}
LEAST_MEMORY = 20.0
TITLE = f"recording, a Llama of {LAYERS} layers, {WIDTH} wide, {HEADS}/{KV_HEADS} heads, {TOKENS} tokens"
TITLE_ZH = f"记录一个 Llama：{LAYERS} 层，宽 {WIDTH}，{HEADS}/{KV_HEADS} 个头，{TOKENS:,} 个词元"


class Case(NamedTuple):
    """A model with random weights and a random text."""

    model: LlamaModel
    ids: Tensor

    def plain(self) -> Tensor:
        """Run the model alone."""
        with torch.no_grad():
            return self.model(self.ids, use_cache=False).last_hidden_state

    def recorded(self, keep: str) -> tuple[Tensor, sc.Recording]:
        """Run the model while it is recorded."""
        with torch.no_grad(), sc.record(self.model, keep=keep) as recording:
            out = self.model(self.ids, use_cache=False).last_hidden_state
        return out, recording


def case(tokens: int = TOKENS, width: int = WIDTH, layers: int = LAYERS, implementation: str = "sdpa") -> Case:
    """Return a model with its initial weights, and a text."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=width * 8 // 3,
        attn_implementation=implementation,
    )
    return Case(LlamaModel(config).eval(), torch.randint(0, 1000, (1, tokens)))


def check(its: Case) -> None:
    """Check that recording changes no bit of the output and that every layer was recorded."""
    expected = its.plain()
    for keep in MOST_TIME:
        out, recording = its.recorded(keep)
        if not torch.equal(out, expected):
            raise AssertionError(f"recording {keep} changes what the model says")
        assert len(recording) == its.model.config.num_hidden_layers


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    its = case()
    check(its)
    for keep, most in MOST_TIME.items():
        pair = compare(its.plain, lambda keep=keep: its.recorded(keep), rounds=5, referee=referee)
        figures = {"ratio": pair.ratio, "plain_s": pair.ours, "recorded_s": pair.theirs}
        measured = f"{pair.ratio:.2f}x: {duration(pair.theirs)}, not recorded {duration(pair.ours)}"
        yield Row(f"time, {keep}", measured, f"at most {most:g}x", pair.ratio <= most, figures, pair.rate, pair.quiet)
    plain, eager, *recorded = extra_bytes(
        [
            Job(f"{__name__}:{name}", args)
            for name, args in (("_plain", ()), ("_eager", ()), *(("_recorded", (keep,)) for keep in MOST_TIME))
        ]
    )
    for keep, used in zip(MOST_TIME, recorded, strict=True):
        more = max(used - plain, 1)
        ratio = (eager - plain) / more
        figures = {"plain_bytes": plain, "eager_bytes": eager, "recorded_bytes": used}
        eager_used = f"output_attentions=True {(eager - plain) / 1e6:.0f} MB"
        measured = f"{more / 1e6:.0f} MB more than not recorded; {eager_used}, {ratio:.0f}x"
        yield Row(f"memory, {keep}", measured, f"at least {LEAST_MEMORY:g}x less", ratio >= LEAST_MEMORY, figures)


def _ready(implementation: str = "sdpa") -> Case:
    """Return the inputs after a first call."""
    its = case(implementation=implementation)
    with torch.no_grad(), sc.record(its.model) as _:
        its.model(its.ids[:, :64], use_cache=False)
    return its


def _plain() -> object:
    return _ready().plain


def _eager() -> object:
    its = _ready("eager")

    def call() -> object:
        with torch.no_grad():
            return its.model(its.ids, use_cache=False, output_attentions=True)

    return call


def _recorded(keep: str) -> object:
    its = _ready()
    return lambda: its.recorded(keep)
