"""growth(): a plot of costs against sequence lengths."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, get_args

from saccade import viz
from saccade.costs.cost import Cost
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.support.language import translated
from saccade.support.validation import check_type, is_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

What = Literal["memory", "flops", "moved", "seconds"]
_BYTES = [("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)]
_UNITS = {  # largest first
    "memory": _BYTES,
    "flops": [("GFLOP", 1e9), ("MFLOP", 1e6)],
    "moved": [("GiB moved", 2.0**30), ("MiB moved", 2.0**20), ("KiB moved", 2.0**10)],
    "seconds": [("seconds", 1.0), ("milliseconds", 1e-3)],
}


@argument_hints({}, costs="results of cost(...) at two or more lengths")
def growth(
    costs: Iterable[Cost], what: What = "memory", *, memory: float | None = None, title: str | None = None
) -> Figure:
    """Plot costs against sequence lengths on logarithmic axes.

    Args:
        costs: results of `cost` for the same subject at two or more lengths.
        what: "memory" (peak memory and cache, in bytes), "flops", "moved" (bytes) or "seconds" (on this machine, which
            is measured if necessary).
        memory: bytes of memory, drawn as a line; only for "memory".
        title: title of the figure; by default, the name of the subject.

    Returns:
        A figure that is not registered with pyplot and not shown. `viz.save` writes it to a file.

    Raises:
        TypeError: ``costs`` contains a value that is not a `Cost`.
        ValueError: there are fewer than two lengths, or several subjects, or ``memory`` is given although ``what`` is
            not "memory".
        UnsupportedError: ``what`` is "seconds", but the time of the subject cannot be estimated.
        ImportError: matplotlib is not installed.

    Example:
        >>> from saccade import cost, masks
        >>> lengths = [1024, 4096, 16384]
        >>> figure = growth([cost(masks.sliding_window(256), n) for n in lengths], "flops")
    """
    if what not in get_args(What):
        raise value_error("what", f"be one of {', '.join(get_args(What))}", what)
    checked = (check_type("costs", x, Cost, "contain results of saccade.cost") for x in costs)
    ordered = sorted(checked, key=attrgetter("seq_len"))
    lengths = [x.seq_len for x in ordered]
    if len(set(lengths)) < max(2, len(lengths)):
        raise value_error("costs", "contain at least two lengths, each once", lengths)
    if len(kinds := {(x.subject, x.batch, x.dtype) for x in ordered}) > 1:
        raise value_error("costs", "have the same subject, batch and dtype", sorted(x[0] for x in kinds))
    if memory is not None and (what != "memory" or not is_number(memory) or memory <= 0):
        raise value_error("memory", 'be a positive number of bytes, used with what="memory"', memory)
    lines = _lines(ordered, what)
    if memory is not None:
        lines["available"] = [memory] * len(ordered)
    most = max(x for line in lines.values() for x in line)
    unit, size = next(scale for scale in _UNITS[what] if scale[1] <= most or scale is _UNITS[what][-1])
    first = ordered[0]
    values = {"subject": first.subject, "batch": first.batch, "dtype": str(first.dtype).removeprefix("torch.")}
    return viz.profile(
        [[x / size for x in line] for line in lines.values()],
        x=lengths,
        names=[translated(name) for name in lines],
        title=translated("{subject}, batch {batch}, {dtype}", **values) if title is None else title,
        x_name=translated("tokens"),
        y_name=translated(unit),
        log=True,
    )


def _lines(costs: list[Cost], what: What) -> dict[str, list[float]]:
    """Return the curves of the plot: the costs of each kind of run at all sequence lengths."""
    lines: dict[str, list[float]] = {}
    seconds = [x.seconds() for x in costs] if what == "seconds" else []
    for name in ("forward", "training", "decode"):
        if getattr(costs[0], name) is None:
            continue
        if what == "seconds":
            lines[name] = [getattr(x, name) for x in seconds]
        else:
            attribute = {"memory": "peak_bytes", "flops": "flops", "moved": "bytes_moved"}[what]
            lines[name] = [getattr(getattr(x, name), attribute) for x in costs]
    if what == "memory" and costs[0].cache_bytes is not None:
        lines["cache"] = [x.cache_bytes or 0 for x in costs]
    return lines
