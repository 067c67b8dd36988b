"""growth(): what something costs against its length, as a figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from saccade import viz
from saccade.costs.cost import Cost
from saccade.support.argument_hints import answers
from saccade.support.errors import value_error
from saccade.support.validation import check_type, is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["What", "growth"]

What = Literal["memory", "flops", "moved", "seconds"]
_BYTES = [("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)]
_UNITS = {  # the largest first
    "memory": _BYTES,
    "flops": [("GFLOP", 1e9), ("MFLOP", 1e6)],
    "moved": [(f"{name} moved", size) for name, size in _BYTES],
    "seconds": [("seconds", 1.0), ("milliseconds", 1e-3)],
}


@answers({}, costs="what cost(...) says at two lengths or more")
def growth(
    costs: Iterable[Cost], what: What = "memory", *, memory: float | None = None, title: str | None = None
) -> Figure:
    """Draw what runs cost against their lengths; both axes are logarithmic.

    Args:
        costs: what `cost` says, of one subject at two lengths or more.
        what: "memory" (most bytes at any time, and the cache's), "flops", "moved" (bytes) or "seconds" (of this
            machine, which is measured where it has not been).
        memory: bytes of room: a line, and what lies above it does not fit; only for "memory".
        title: stands above the picture; what the costs are of when None.

    Returns:
        A figure that belongs to the caller: pyplot does not know it, nothing is shown. `viz.save` writes it.

    Raises:
        TypeError: not costs.
        ValueError: fewer than two lengths, costs of several subjects, or ``memory`` beside another question.
        UnsupportedError: no time is told of what is run.
        ImportError: matplotlib is not installed.

    Example:
        >>> from saccade import cost, masks
        >>> lengths = [1024, 4096, 16384]
        >>> figure = growth([cost(masks.sliding_window(256), n) for n in lengths], "flops")
    """
    if what not in get_args(What):
        raise value_error("what", f"be one of {', '.join(get_args(What))}", what)
    told = sorted((check_type("costs", x, Cost, "hold what saccade.cost says") for x in costs), key=_length)
    lengths = [x.seq_len for x in told]
    if len(set(lengths)) < max(2, len(lengths)):
        raise value_error("costs", "hold two lengths or more, each once", lengths)
    if len(kinds := {(x.subject, x.batch, x.dtype) for x in told}) > 1:
        raise value_error("costs", "be of one subject, batch and dtype", sorted(x[0] for x in kinds))
    if memory is not None and (what != "memory" or not is_number(memory) or memory <= 0):
        raise value_error("memory", 'be a positive number of bytes, beside what="memory"', memory)
    lines = _lines(told, what)
    if memory is not None:
        lines["room"] = [memory] * len(told)
    most = max(x for line in lines.values() for x in line)
    unit, size = next(scale for scale in _UNITS[what] if scale[1] <= most or scale is _UNITS[what][-1])
    first = told[0]
    shown = f"{first.subject}, batch {first.batch}, {str(first.dtype).removeprefix('torch.')}"
    return viz.profile(
        [[x / size for x in line] for line in lines.values()],
        x=lengths,
        names=list(lines),
        title=shown if title is None else title,
        x_name="tokens",
        y_name=unit,
        log=True,
    )


def _length(cost: Cost) -> int:
    return cost.seq_len


def _lines(told: list[Cost], what: What) -> dict[str, list[float]]:
    """For each run, its numbers at all lengths."""
    found: dict[str, list[float]] = {}
    seconds = [x.seconds() for x in told] if what == "seconds" else []
    for name in ("forward", "training", "decode"):
        if getattr(told[0], name) is None:
            continue
        if what == "seconds":
            found[name] = [getattr(x, name) for x in seconds]
        else:
            attribute = {"memory": "peak_bytes", "flops": "flops", "moved": "bytes_moved"}[what]
            found[name] = [getattr(getattr(x, name), attribute) for x in told]
    if what == "memory" and told[0].cache_bytes is not None:
        found["cache"] = [x.cache_bytes or 0 for x in told]
    return found
