"""Speed of generation at a long context beside that of transformers, with the same weights and the same tokens."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.measuring import Pair, Referee, in_turn, median_ratio
from benchmarks.reporting import Row, ratio_row
from saccade.models import Decoder, stream

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
ROUNDS = 7
TITLE = f"generation, {NEW} tokens up to a context of {CONTEXT}, Llama of width 512, 8 layers, 8 and 2 heads, float32"
TITLE_ZH = f"生成 {NEW} 个词元，直到上下文 {CONTEXT:,}；Llama，宽 512，8 层，8 个和 2 个头，float32"


class Run(NamedTuple):
    """A generated text: its tokens, and the time at the start and after each of them."""

    tokens: list[int]
    times: list[float]

    @property
    def steps(self) -> list[float]:
        """Return the seconds of each token after the first."""
        return [after - before for before, after in itertools.pairwise(self.times[1:])]


class _Clock:
    """A streamer that transformers calls with every token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: there is nothing to close."""


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

    def ours(self) -> Run:
        """Generate tokens with saccade."""
        tokens, times = [], [time.perf_counter()]
        with torch.inference_mode():
            for step in stream(self.model, self.prompt, self.new):
                tokens.append(int(step.tokens))
                times.append(time.perf_counter())
        return Run(tokens, times)

    def theirs(self) -> Run:
        """Generate tokens with transformers, with SDPA and its growing cache."""
        from transformers import DynamicCache  # noqa: PLC0415  takes seconds to import

        options: Any = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        cache, clock = DynamicCache(config=self.peer.config), _Clock()
        times = [time.perf_counter()]
        out = self.peer.generate(self.prompt, max_new_tokens=self.new, past_key_values=cache, streamer=clock, **options)
        return Run(out[0, self.prompt.shape[1] :].tolist(), times + clock.times[1:])  # it is shown the prompt first


def check(its: Case) -> None:
    """Check that both sides generate the same tokens."""
    ours, theirs = its.ours(), its.theirs()
    if ours.tokens != theirs.tokens or len(set(ours.tokens)) < 2:
        got = f"{ours.tokens} and {theirs.tokens}"
        raise AssertionError(f"generation: tokens must agree, and not be one alone; got {got}")
    if not len(ours.times) == len(theirs.times) == its.new + 1:
        raise AssertionError("generation: every token must have its time")


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    its = Case()
    check(its)
    runs: dict[str, Run] = {}
    calls = [lambda: runs.update(ours=its.ours()), lambda: runs.update(theirs=its.theirs())]
    pairs, rates, quiet = [], [], []
    for _ in range(referee.rounds(ROUNDS)):
        one = in_turn(calls, rounds=1, referee=referee, warm_up=0)  # tried again where it was disturbed
        pairs.append((runs["ours"], runs["theirs"]))
        rates.append(one.rate)
        quiet.append(one.quiet)
    kinds: dict[str, tuple[Callable[[Run], float], float | None]] = {
        f"each of {NEW - 1} tokens after the first": (lambda run: statistics.median(run.steps), TARGET),
        "the prompt, and the first token": (lambda run: run.times[1] - run.times[0], None),
        "all": (lambda run: run.times[-1] - run.times[0], None),
    }
    for case, (of, target) in kinds.items():
        times = [[of(run) for run in pair] for pair in pairs]
        ours, theirs = (statistics.median(row[side] for row in times) for side in (0, 1))
        found = Pair(ours, theirs, median_ratio(times), min(rates), all(quiet))
        yield ratio_row(case, found, peer="transformers", target=target)
