"""Speed of this library beside packages with attention of their own that compute the same."""

from collections.abc import Iterator

from benchmarks.measuring import Referee
from benchmarks.problem import Problem
from benchmarks.racing import sides
from benchmarks.reporting import Row
from saccade.masks import Causal, Coarse, Window

TITLE = "local-attention and x-transformers, 8 heads of 64, float32"
TITLE_ZH = "local-attention 与 x-transformers，8 个头，每头宽 64，float32"
_NEAR = Window(256, 256)
CASES = {
    "window ±256, n=8,192, forward": (Problem(_NEAR), ("local-attention", "x-transformers")),
    "window ±256, n=8,192, forward + backward": (Problem(_NEAR, backward=True), ("local-attention",)),
    "window of 256 before, n=8,192, forward": (Problem(Window(256, 0)), ("local-attention", "x-transformers")),
    "blocks of 256 and those beside, n=8,192, forward": (Problem(Coarse(Window(1, 1), 256)), ("local-attention",)),
    "causal, n=4,096, forward": (Problem(Causal(), n=4096), ("x-transformers",)),
    "window ±256, dropout 0.1, n=4,096, forward + backward": (
        Problem(_NEAR, n=4096, dropout_p=0.1, backward=True),
        ("local-attention", "x-transformers"),
    ),
}


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for case, (its, peers) in CASES.items():
        turns = sides(its, ["ours", *peers]).race(referee, 5)
        for peer in peers:
            yield turns.row(case, "ours", peer)
