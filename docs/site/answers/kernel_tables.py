"""The tables of kernels: which masks and inputs they run, and why not."""

from __future__ import annotations

from answers.examples import MASKS
from answers.inputs import inputs
from answers.kernels import kernels_of_inputs, kernels_of_masks
from answers.markdown import code, joined, table
from answers.words import WORDS, in_language
from saccade.engine.dispatch import KERNELS


def _merged(answers: dict[str, dict[str, tuple[str, ...]]]) -> list[list[str]]:
    """Kernels that answer alike, as one column."""
    alike: dict[tuple[bool, ...], list[str]] = {}
    for kernel in KERNELS:
        alike.setdefault(tuple(not row[kernel.name] for row in answers.values()), []).append(kernel.name)
    return list(alike.values())


def _yes_or_no(head: str, answers: dict[str, dict[str, tuple[str, ...]]], names: list[str], language: str) -> str:
    columns, words = _merged(answers), WORDS[language]
    rows = [(head, *(" ".join(code(one) for one in own) for own in columns))]
    for name, row in zip(names, answers.values(), strict=True):
        rows.append((name, *(words["no"] if row[own[0]] else words["yes"] for own in columns)))
    return table(*rows)


def _masks_by_kernel(language: str) -> str:
    names = [code(MASKS[name]) for name in kernels_of_masks()]
    return _yes_or_no({"en": "mask", "zh": "掩码"}[language], kernels_of_masks(), names, language)


def _inputs_by_kernel(language: str) -> str:
    names = [getattr(one, language) for one in inputs()]
    return _yes_or_no(
        {"en": "besides query and key", "zh": "查询和键之外"}[language], kernels_of_inputs(), names, language
    )


def _reasons_of_masks(language: str) -> str:
    return _reasons_by_kernel(kernels_of_masks(), language)


def _reasons_of_inputs(language: str) -> str:
    return _reasons_by_kernel(kernels_of_inputs(), language)


def _reasons_by_kernel(answers: dict[str, dict[str, tuple[str, ...]]], language: str) -> str:
    found: dict[str, dict[str, None]] = {}
    for row in answers.values():
        for name, reasons in row.items():
            for reason in reasons:
                found.setdefault(reason, {})[name] = None
    head = {"en": ("reason", "kernels"), "zh": ("理由", "内核")}[language]
    return table(head, *((in_language(one, language), joined(list(names), language)) for one, names in found.items()))


TABLES = (_masks_by_kernel, _reasons_of_masks, _inputs_by_kernel, _reasons_of_inputs)
