"""`assert_reach`: a test assertion about which inputs a model's outputs depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saccade.auditing import Report, audit
from saccade.auditing.declared_rules import Declared
from saccade.support.language import in_language


def assert_reach(model: Callable[..., Any], rule: Declared | str | None = None, **kwargs: Any) -> Report:
    """Assert that a model's outputs depend on exactly the inputs that the rule allows.

    Args:
        model: a module or function that maps tokens or embeddings to output rows.
        rule: a mask, or a mask as text; if None, it is read from the model's configuration. See `saccade.audit`.
        kwargs: further arguments of `saccade.audit`.

    Returns:
        The report.

    Raises:
        AssertionError: a claim is broken, or the input is too short to test the rule, because it fits into the rule's
            window and a model without a window would pass too. The message is the report.

    Cost: the same as `saccade.audit`.

    Example:
        >>> from saccade import masks, models
        >>> assert_reach(models.small_decoder(), masks.Causal(), length=24)["reach"].verdict
        'held'
    """
    __tracebackhide__ = True  # make pytest show the line of the test
    report = audit(model, rule, **kwargs)
    with in_language("en"):  # like all errors
        if not report.ok:
            raise AssertionError(f"assert_reach: the model does not follow the rule\n{report}")
        if rule is not None and report.too_short:
            raise AssertionError(f"assert_reach: {report.too_short}\n{report}")
    return report
