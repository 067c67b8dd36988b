"""Labels as users hand them over: a list of strings, one for each line."""

from collections.abc import Sequence

from saccade.errors import type_error, value_error

__all__ = ["check_labels"]


def check_labels(where: str, argument: str, labels: Sequence[str] | None, count: int, lines: str) -> None:
    """Raise unless there are no labels, or one for each of so many lines, such as "columns"."""
    if isinstance(labels, str):
        hint = "list(text) is one label per character."
        raise type_error(where, argument, "be a list of strings", "one string", hint=hint)
    if labels is not None and len(labels) != count:
        raise value_error(where, argument, f"have one label for each of the {count} {lines}", len(labels))
