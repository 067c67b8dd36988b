"""Cost of a plan for a million tokens."""

import functools
import gc
import statistics
import tracemalloc
from collections.abc import Callable, Iterator

import torch

from benchmarks.measuring import Referee, in_turn, seconds
from benchmarks.reporting import Row, duration
from saccade import masks
from saccade.masks import Mask
from saccade.masks import plan_cache as kept_plans
from saccade.plan import Plan

N = 1 << 20
TITLE = f"plans for {N:,} tokens, nothing kept from before"
TITLE_ZH = f"{N:,} 个词元的计划，此前什么都没有保留"
MOST_SECONDS, MOST_BYTES = 0.020, 8e6

MAKERS: dict[str, Callable[[int], Mask]] = {
    "window ±256": lambda n: masks.Window(256, 256),
    "longformer ±256, token 0": lambda n: masks.longformer(256, [0]),
    "bigbird, blocks of 64": lambda n: masks.bigbird(64),
    "streaming, 4 + 1024": lambda n: masks.streaming(4, 1024),
    "causal, steps of 64 and ±127": lambda n: masks.Causal() & (masks.Window(127, 0) | masks.Strided(64)),
    "neighbours within 7 on a square": lambda n: masks.Neighborhood(_side(n), _side(n), 7),
    "block diffusion, blocks of 1,024": lambda n: masks.BlockDiffusion(1024, length=n // 2),
    "a tree: prompts with 4 answers of 4 ends": lambda n: masks.Tree(_answers(n)),
    "causal documents of 512": lambda n: masks.Documents([512] * (n // 512), rule=masks.Causal()),
}


@functools.cache
def _answers(n: int) -> tuple[int, ...]:
    """Return parents of ``n`` tokens: prompts of 1,024, each with 4 answers of 512 that have 4 ends of 256."""
    parents: list[int] = []
    while len(parents) < n:
        prompt = len(parents) + 1023
        parents += [-1, *range(prompt - 1023, prompt)]
        for _ in range(4):
            answer = len(parents) + 511
            parents += [prompt, *range(answer - 511, answer)]
            for _ in range(4):
                parents += [answer, *range(len(parents), len(parents) + 255)]
    return tuple(parents[:n])


def _side(n: int) -> int:
    return int(n**0.5)


def cold(make: Callable[[int], Mask], n: int) -> Plan:
    """Make a plan with a new mask, so that nothing is cached."""
    return forgetful_plan(make(n), n)


def forgetful_plan(mask: Mask, n: int) -> Plan:
    """Make a plan and compute its row groups, after clearing all cached plans."""
    kept_plans._cached_plan.cache_clear()  # there is no public way
    plan = mask.plan(n)
    plan.pairs, plan.count  # noqa: B018  # a plan computes nothing before it is read
    return plan


def check(n: int = 1024) -> None:
    """Check that the tiles of each plan hold every allowed pair."""
    for name, make in MAKERS.items():
        mask = make(n)
        covered = torch.zeros(n, n, dtype=torch.bool)
        for tile in cold(make, n).tiles:
            for strip in tile.columns:
                rows, keys = (slice(x.start, x.stop, x.step) for x in (tile.rows, strip.keys))
                covered[rows, keys] = True
        missing = mask.to_dense(n)[0, 0] & ~covered
        assert not missing.any(), f"{name}: {int(missing.sum())} pairs are in no tile"


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that numpy and Python hold at once during a call."""
    gc.collect()
    tracemalloc.start()
    result = call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return peak


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    check()
    for name, make in MAKERS.items():
        plan = functools.partial(cold, make, N)
        taken = in_turn([plan], rounds=9, referee=referee)
        size = peak_bytes(functools.partial(forgetful_plan, make(N), N))
        own = peak_bytes(functools.partial(make, N))
        made = statistics.median(seconds(functools.partial(make, N)) for _ in range(3))
        tiles = statistics.median(_tile_seconds(plan()) for _ in range(3))
        time = taken.median(0)
        yield Row(
            name,
            f"{duration(time)}, {size / 1e6:.1f} MB"
            + (f" (the mask itself {duration(made)}, {own / 1e6:.1f} MB)" if own > MOST_BYTES / 100 else "")
            + f"; its {len(plan())} tiles {duration(tiles)}",
            f"at most {MOST_SECONDS * 1e3:.0f} ms, {MOST_BYTES / 1e6:.0f} MB",
            time <= MOST_SECONDS and size <= MOST_BYTES,
            {"plan_s": time, "plan_bytes": size, "mask_bytes": own, "mask_s": made, "tiles_s": tiles},
            taken.rate,
            taken.quiet,
        )


def _tile_seconds(plan: Plan) -> float:
    return seconds(lambda: sum(1 for _ in plan.tiles))
