"""The tables of caches: the mechanisms they run with, what they refuse, what they equal, and what they hold."""

from __future__ import annotations

import math

import torch

from answers.caches import caches_run, sizes_of_caches
from answers.examples import CACHES, LONG, SHORT
from answers.markdown import all_but, code, joined, table
from answers.words import EQUALS, WORDS, in_language, parted
from saccade import caches
from saccade.testing import tolerance

_ROUNDED = 1e-2  # larger errors mean another matrix, unless the cache holds rounded keys


def _most_wrong(name: str) -> float:
    """Return the largest error of a cache that runs a mechanism."""
    return math.inf if "rounded" in getattr(caches, name).equivalent_run else _ROUNDED


def _caches_by_mechanism(language: str) -> str:
    head = {"en": ("cache", "supports"), "zh": ("缓存", "支持")}[language]
    rows = []
    for name, row in caches_run().items():
        runs = [one for one, said in row.items() if not isinstance(said, str) and said < _most_wrong(name)]
        told = all_but(runs, list(row), language)
        rows.append((code(CACHES[name]), told.replace("`TopK of index keys`", WORDS[language]["index"])))
    return table(head, *rows)


def _refusals_of_caches(language: str) -> str:
    """Each reason once: what it is about, and the caches that give it."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}  # subjects and caches, by the rest of a reason
    for name, row in caches_run().items():
        for said in row.values():
            if isinstance(said, str):
                subject, rest = parted(in_language(said, language))
                subjects, own = found.setdefault(rest, ({}, {}))
                subjects |= {subject: None} if subject else {}
                own[name] = None
    head = {"en": ("not supported", "reason", "caches"), "zh": ("不支持", "理由", "缓存")}[language]
    rows = []
    for rest, (subjects, own) in found.items():
        told = joined(list(subjects), language) if subjects else WORDS[language]["mechanism"]
        rows.append((told, rest, all_but(list(own), list(CACHES), language)))
    return table(head, *rows)


def _dense_runs(language: str) -> str:
    head = {"en": ("cache", "equals", "measured"), "zh": ("缓存", "等于", "实测")}[language]
    limit, words, rows = tolerance(torch.float64, "output"), WORDS[language], []
    for name, row in caches_run().items():
        errors, most = {one: said for one, said in row.items() if not isinstance(said, str)}, _most_wrong(name)
        worst = max(wrong for wrong in errors.values() if wrong < most)
        others = [one for one, wrong in errors.items() if wrong >= most]
        told = words["yes"] if worst <= limit else words["off"].format(f"{worst:.0e}")
        told += words["not with"].format(joined(others, language)) if others else ""
        equals = getattr(caches, name).equivalent_run
        rows.append((code(CACHES[name]), equals if language == "en" else EQUALS[equals], told))
    return table(head, *rows)


def _sizes_of_caches(language: str) -> str:
    head = {
        "en": ("cache", f"{SHORT} tokens", f"{LONG} tokens", "each further one", "read by a step"),
        "zh": ("缓存", f"{SHORT} 个词元", f"{LONG} 个词元", "每多一个", "一步读取"),
    }[language]
    rows = [
        (
            code(CACHES[name]),
            f"{one.short:,}",
            f"{one.long:,}",
            f"{(one.long - one.short) / (LONG - SHORT):g}",
            f"{one.read:,}",
        )
        for name, one in sizes_of_caches().items()
    ]
    return table(head, *rows)


TABLES = (_caches_by_mechanism, _refusals_of_caches, _dense_runs, _sizes_of_caches)
