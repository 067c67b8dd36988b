"""A comparison of one problem from the command line with any peers."""

from collections.abc import Iterator, Sequence

from benchmarks.conditions import busy
from benchmarks.measuring import Referee
from benchmarks.problem import Problem
from benchmarks.racing import sides
from benchmarks.reporting import Row

_OWN = ("ours", "no-wheel", "native", "fused", "tiled", "reference")


def title(its: Problem) -> str:
    """Describe the problem."""
    shape = f"[{its.batch}, {its.heads}, {its.n}, {its.dim}]"
    shared = f" on {its.kv_heads} heads of keys" if its.is_grouped else ""
    dropped = f", dropout {its.dropout_p:g}" if its.dropout_p else ""
    way = "forward + backward" if its.backward else "forward"
    mask = "no mask" if its.mask is None else its.mask
    return f"{mask}, {shape}{shared}, {str(its.dtype).removeprefix('torch.')}{dropped}, {way}"


def rows(its: Problem, peers: Sequence[str], referee: Referee, rounds: int, *, is_busy: bool = False) -> Iterator[Row]:
    """Return rows: each of our kernels by its rates, each peer against `ours`; optionally on a busy machine, too."""
    ready = sides(its, ["ours", *peers])
    races = {"": ready.race(referee, rounds)}
    if is_busy:
        with busy():
            races[", beside a busy process"] = ready.race(referee.unruffled(), rounds)
    for said, turns in races.items():
        found = [turns.share_row(name + said, name) for name in ready.calls if name in _OWN]
        found += [turns.row(f"against {peer}{said}", "ours", peer) for peer in peers]
        yield from (row._replace(rate=None, quiet=True) if said else row for row in found)
