"""The tables of mechanisms: their matrices, the masks they take, what can be asked, and what they cost."""

from __future__ import annotations

from answers.examples import MASKS, MECHANISMS
from answers.markdown import all_but, code, joined, table
from answers.mechanisms import costs_of_mechanisms, mechanisms_told, questions
from answers.words import WORDS, in_language, parted


def _mechanisms(language: str) -> str:
    head = {
        "en": ("mechanism", "its matrix", "softmax of all keys", "rows sum to 1", "lse, `explain()`", "decodes with"),
        "zh": ("机制", "矩阵", "对全部键的 softmax", "每行之和为 1", "lse、`explain()`", "解码用"),
    }[language]
    words, rows = WORDS[language], []
    for name, one in mechanisms_told().items():
        known = (one.is_softmax, one.is_stochastic, one.has_lse and one.explains)
        cells = [words["yes" if x else "no"] for x in known]
        cells.append(code(one.cache) if "Causal" in one.taken else words["no"])
        rows.append((code(MECHANISMS[name]), code(one.matrix), *cells))
    return table(head, *rows)


def _masks_of_mechanisms(language: str) -> str:
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, one in mechanisms_told().items():
        alike.setdefault((one.taken, one.reason), []).append(name.partition(" ")[0])
    head = {
        "en": ("mechanism", "accepts", "does not accept, for example"),
        "zh": ("机制", "接受", "不接受的，例如"),
    }[language]
    rows = []
    for (taken, reason), names in alike.items():
        subject, rest = parted(in_language(reason, language))
        told = f"{code(subject)} {rest}" if reason else "–"
        own = all_but(list(taken), list(MASKS), language)
        rows.append((joined(list(dict.fromkeys(names)), language), own, told))
    return table(head, *rows)


def _statistics(language: str) -> str:
    head = {"en": ("matrix", "statistics"), "zh": ("矩阵", "统计量")}[language]
    kinds = {"en": ("every matrix", "rows that sum to 1"), "zh": ("任何矩阵", "每行之和为 1 的矩阵")}[language]
    rows = [(kind, joined(questions()[needs], language)) for kind, needs in zip(kinds, (False, True), strict=True)]
    return table(head, *rows)


def _costs_of_mechanisms(language: str) -> str:
    head = {
        "en": ("mechanism", "forward", "grows by", "training", "a step"),
        "zh": ("机制", "前向", "增长到几倍", "训练", "一步"),
    }[language]
    rows = []
    for name, one in costs_of_mechanisms().items():
        if one is None:
            rows.append((code(MECHANISMS[name]), *"––––"))
            continue
        step = "–" if one.decode is None else f"{one.decode / 1e3:.3g}"
        forward, training = (f"{flops / 1e6:.3g}" for flops in (one.long, one.training))
        rows.append((code(MECHANISMS[name]), forward, f"{one.long / one.short:.2g}", training, step))
    return table(head, *rows)


TABLES = (_mechanisms, _masks_of_mechanisms, _statistics, _costs_of_mechanisms)
