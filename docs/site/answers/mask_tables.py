"""The tables of masks: what they cost, and what is known of them."""

from __future__ import annotations

import math

from answers.examples import MASKS
from answers.making import mask_named
from answers.markdown import code, table
from answers.masks import costs_of_masks
from answers.words import WORDS


def _costs_of_masks(language: str) -> str:
    head = {
        "en": ("mask", "allowed", "`fused`", "`native`", "tiles", "evaluated"),
        "zh": ("掩码", "允许", "`fused`", "`native`", "分块", "求值"),
    }[language]
    rows = [
        (
            code(MASKS[name]),
            _share(one.allowed),
            _share(one.fused),
            "–" if math.isnan(one.native) else _share(one.native),
            f"{one.tiles:,}",
            f"{one.asked:,}",
        )
        for name, one in costs_of_masks().items()
    ]
    return table(head, *rows)


def _share(part: float) -> str:
    return f"{100 * part:.3g} %"


def _known_of_masks(language: str) -> str:
    head = {
        "en": ("mask", "causal", "distances only", "hides keys only", "plan cached"),
        "zh": ("掩码", "因果", "只取决于距离", "只隐藏键", "计划可缓存"),
    }[language]
    words, rows = WORDS[language], []
    for name, shown in MASKS.items():
        mask = mask_named(name)
        known = (mask.is_causal, mask.is_relative, mask.hides_keys_only, mask.is_value)
        rows.append((code(shown), *(words["yes" if one else "no"] for one in known)))
    return table(head, *rows)


TABLES = (_costs_of_masks, _known_of_masks)
