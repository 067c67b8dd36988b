"""Speed of a window with one thread, with two, with all, and beside a busy process of two threads."""

from collections.abc import Iterator

import torch

from benchmarks.conditions import busy, lacking, thread_counts, threads
from benchmarks.measuring import Referee
from benchmarks.racing import Turns, sides
from benchmarks.reporting import Row, asked, duration
from benchmarks.window import DIM, HEADS, WIDTH, N, problem

TITLE = f"threads and a busy machine: window ±{WIDTH}, n={N:,}, {HEADS} heads of {DIM}, float32"
TITLE_ZH = f"线程数与繁忙的机器：窗口 ±{WIDTH}，{N:,} 个词元，{HEADS} 个头，每头宽 {DIM}，float32"
MOST_OF_QUIET = 3.0
OWN = {"ours": "", "no-wheel": ", without the wheel"}


def _beside(name: str, who: str, quiet: Turns, loud: Turns, *, is_asked: bool) -> Iterator[Row]:
    """Return the rows of one side beside a busy process."""
    but = lacking() if who == "ours" else ""
    times = loud.seconds(who) / quiet.seconds(who)
    told, met = asked(
        MOST_OF_QUIET / times, 1.0 if is_asked else None, but, f"at most {MOST_OF_QUIET:g}x its quiet time"
    )
    measured = f"{times:.1f}x its quiet time: {duration(loud.seconds(who))}, quiet {duration(quiet.seconds(who))}"
    yield Row(name, measured, told, met, {"of_quiet": times, "ours_s": loud.seconds(who)})
    for peer in ("flex", "no-wheel") if who == "ours" else ("flex",):
        row = loud.row(name, who, peer, 1.0 if is_asked else None, but)
        yield row._replace(rate=None, quiet=True)  # it is meant to be busy


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    counts = thread_counts()
    for count in counts:
        with threads(count):
            ready = sides(problem(torch.float32), [*OWN, "sdpa", "flex"])
            quiet = ready.race(referee, 5)
            with busy():
                loud = ready.race(referee.unruffled(), 5)
        name = f"{count} thread" + "s" * (count > 1)
        for who, said in OWN.items():
            yield quiet.share_row(name + said, who)
            yield quiet.row(name + said, who, "flex")
            yield from _beside(f"{name}{said}, beside a busy process", who, quiet, loud, is_asked=count == counts[-1])
