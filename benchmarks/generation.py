"""How fast is generation at a long context beside transformers' own, with the same weights and the same tokens?"""

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.measuring import Referee, in_turn, median_ratio
from benchmarks.reporting import Row, duration
from saccade.models import Decoder, generate

CONTEXT, NEW = 4096, 64
SIZES = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
TARGET = 1.3
TITLE = f"generation, {NEW} tokens up to a context of {CONTEXT}, Llama of width 512, 8 layers, 8 and 2 heads, float32"


class Case:
    """One set of random weights in both libraries, and a prompt.

    Args:
        context: tokens at the end.
        new: how many of these are generated.
        sizes: of the model, as transformers calls them.
    """

    def __init__(self, context: int = CONTEXT, new: int = NEW, sizes: dict[str, int] | None = None):
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  takes seconds to import

        torch.manual_seed(0)
        config = LlamaConfig(**(sizes or SIZES), tie_word_embeddings=False)
        self.peer = LlamaForCausalLM(config).eval()
        with torch.no_grad():  # as it starts, a model says much the same after every token
            self.peer.lm_head.weight.normal_()
        with tempfile.TemporaryDirectory() as folder:
            self.peer.save_pretrained(folder)
            self.model = Decoder.from_pretrained(folder)
        self.prompt = torch.randint(config.vocab_size, (1, context - new))
        self.new = new

    def ours(self, new: int | None = None) -> list[int]:
        """The tokens that we add."""
        with torch.inference_mode():
            return generate(self.model, self.prompt, new or self.new)[0]

    def theirs(self, new: int | None = None) -> list[int]:
        """The tokens that transformers adds, with its attention on SDPA and its growing cache."""
        from transformers import DynamicCache  # noqa: PLC0415  takes seconds to import

        options: Any = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        cache = DynamicCache(config=self.peer.config)
        out = self.peer.generate(self.prompt, max_new_tokens=new or self.new, past_key_values=cache, **options)
        tokens: list[int] = out[0, self.prompt.shape[1] :].tolist()
        return tokens


def check(its: Case) -> None:
    """Both sides choose the same tokens."""
    ours, theirs = its.ours(), its.theirs()
    if ours != theirs or len(set(ours)) < 2:
        raise AssertionError(f"generation: tokens must agree, and not be one alone; got {ours} and {theirs}")


def measure(referee: Referee) -> Iterator[Row]:
    """Rows of this question."""
    its = Case()
    check(its)
    calls = [its.ours, its.theirs, lambda: its.ours(1), lambda: its.theirs(1)]
    rounds = in_turn(calls, rounds=5, referee=referee)
    steps = [[row[0] - row[2], row[1] - row[3]] for row in rounds.times]
    kinds = {
        "prompt and all tokens": ([row[:2] for row in rounds.times], TARGET),
        "the prompt and one token": ([row[2:] for row in rounds.times], None),
        f"each of {NEW - 1} tokens after it": ([[x / (NEW - 1) for x in row] for row in steps], TARGET),
    }
    for case, (times, target) in kinds.items():
        ratio = median_ratio(times)
        ours, theirs = (sorted(row[side] for row in times)[len(times) // 2] for side in (0, 1))
        yield Row(
            case,
            f"{ratio:.1f}x: {duration(ours)}, transformers {duration(theirs)}",
            f"at least {target:g}x" if target else "",
            None if target is None else ratio >= target,
            {"ratio": ratio, "ours_s": ours, "theirs_s": theirs},
            rounds.rate,
            rounds.quiet,
        )
