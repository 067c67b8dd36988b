"""The function `audit_setup`: audit a whole training set-up, a model together with the collator that builds batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from saccade import masks
from saccade.auditing.audit import assumed_rule, audit
from saccade.auditing.collated_batch import Collator, SetupBatch, ids_of
from saccade.auditing.declared_rules import Declared
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.model_under_test import can_cache, rows_of
from saccade.auditing.report import Report
from saccade.auditing.rounding_noise import FACTOR, jitter, restoring_state, row_differences
from saccade.auditing.sufficient_length import Part, check_length
from saccade.masks import Mask, parse
from saccade.support.language import Message
from saccade.support.validation import check_int, check_type

SETUP_CLAIMS = ("states", "batch", "loss")
"""The claims that `audit_setup` checks by default, in addition to those that every audit checks."""


def audit_setup(
    model: nn.Module,
    collator: Collator,
    texts: Sequence[Any],
    rule: Declared | str | None = None,
    *,
    claims: Sequence[str] = SETUP_CLAIMS,
    tests: int = 12,
    seed: int = 0,
) -> Report:
    """Audit a training set-up: the batch that the collator builds from texts, and the model's outputs for that batch.

    The following claims are checked:

    - The collator does not cut or change any text, marks padding, counts positions from the start of each text, and
      gives no labels to padding or to the first token of a text.
    - On that batch, the model follows its rule within each text (see `audit`), and each text gives the same rows as it
      does alone.
    - The loss reads the labels that it should read.

    Args:
        model: a language model that takes ``input_ids``, and ``labels`` to compute a loss. It runs in eval mode.
        collator: the function with which the trainer or data loader turns a list of texts into a batch.
        texts: the token ids of each text, as a mapping with ``input_ids``, a list or a tensor.
        rule: the rule within each text, as for `audit`; when None, it is read from ``model.config``.
        claims: names of further claims to check, as for `audit`.
        tests: number of sets of rows to test.
        seed: seed for all random changes.

    Returns:
        A `Report` that begins with the claims about the collator.

    Raises:
        TypeError, ValueError: the texts are not token ids, the collator does not return a batch that contains them, or
            `audit` raises the error.

    Cost: one `audit` of the batch, one run per text, and three runs to measure noise.

    Example:
        >>> import torch, saccade as sc
        >>> model = sc.models.small_decoder()
        >>> texts = [torch.arange(3, 20), torch.arange(5, 22)]
        >>> audit_setup(model, torch.stack, texts, claims=()).ok
        True
    """
    check_type("model", model, nn.Module, "be a torch.nn.Module")
    check_int("tests", tests, 1)
    given = list(texts)
    ids = ids_of(given)
    batch = SetupBatch(collator(given), ids)
    with restoring_state(model):
        model.eval()
        within = parse(rule) if isinstance(rule, str) else assumed_rule(model) if rule is None else rule
        inputs = _device(batch.inputs, model)
        whole = inputs if set(inputs) != {"input_ids"} else inputs["input_ids"]
        report = audit(
            model,
            _in_texts(within, batch.lengths),
            inputs=whole,
            padding=batch.documents >= 0,
            claims=claims,
            tests=tests,
            seed=seed,
        )
        alone = _compare_with_alone(model, batch, inputs)
    rules = [rule for one in _listed(within) for rule in ([one] if isinstance(one, Mask) else one)]
    longest = max(length for item in batch.lengths for length in item)
    part = Part("", rules, longest, lambda count: Message("texts of {count} tokens", count=count))
    found = (*batch.claims(), *report.claims, *check_length([part]), alone)
    words = Message("assumed from the configuration: {rule}", rule=report.rule) if rule is None else report.rule
    return dataclasses.replace(
        report, model=Message("{model}, as trained", model=report.model), rule=words, claims=found
    )


def _device(inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    device = next((own.device for own in model.parameters()), torch.device("cpu"))
    return {name: one.to(device) if isinstance(one, Tensor) else one for name, one in inputs.items()}


def _listed(rule: Declared) -> Sequence[Mask | Sequence[Mask]]:
    """Return the masks of a rule as one list, whose items may be lists of masks if the rule is a mapping."""
    return [rule] if isinstance(rule, Mask) else list(rule.values()) if isinstance(rule, Mapping) else rule


def _in_texts(rule: Declared, lengths: Sequence[Sequence[int]]) -> Declared:
    """Restrict a rule to pairs within one text, whether it is one mask, a list by layer or a mapping by module name."""
    if isinstance(rule, Mask):
        return masks.Documents(lengths, rule=rule)
    if isinstance(rule, Mapping):
        return {name: _in_texts(one, lengths) for name, one in rule.items()}  # type: ignore[misc]  # masks or lists
    return [masks.Documents(lengths, rule=one) for one in rule]


def _compare_with_alone(model: nn.Module, batch: SetupBatch, inputs: Mapping[str, Any]) -> ClaimResult:
    """Check that each text gives the same rows in the batch as it does alone."""
    name, more = "texts in the batch = alone", {"use_cache": False} if can_cache(model) else {}

    def run(**given: Any) -> Tensor:
        return rows_of(model(given.pop("input_ids"), **given | more))

    with torch.no_grad():
        rows = run(**inputs)
        allowed = FACTOR * max(jitter(model, lambda: run(**inputs), base=rows), torch.finfo(rows.dtype).eps)
        largest, found = 0.0, None
        for location in filter(None, batch.locations):
            own = rows[location.item, location.tokens][None]
            apart = row_differences(own, run(input_ids=inputs["input_ids"][location.item, location.tokens][None]))[0]
            largest = max(largest, float(apart.max()))
            if found is None and bool((apart > allowed).any()):
                first = int((apart > allowed).nonzero()[0]) + location.tokens.start
                found = CounterExample("differs", (location.item, first), None, float(apart.max()), "", name)
    return ClaimResult(name, "broken" if found else "held", largest, allowed, found)
