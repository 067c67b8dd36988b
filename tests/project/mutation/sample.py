"""A share of the mutants, always the same ones of a share, so that a larger share goes on from a smaller one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import mutmut.__main__ as mutmut

_CAUGHT_BY_TYPES = 37  # what mutmut takes for it


def install(percent: int) -> None:
    """Make mutmut run so many of a hundred mutants, besides those that are asked for by name; types catch all."""
    collect, check = mutmut.collect_source_file_mutation_data, mutmut.filter_mutants_with_type_checker
    caught: dict[str, Any] = {}

    def checked() -> dict[str, Any]:
        caught.update(check())
        return caught

    def sampled(*, mutant_names: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
        mutants, by_path = collect(mutant_names=mutant_names)
        if mutant_names:
            return mutants, by_path
        for data in by_path.values():
            own = [name for name in data.exit_code_by_key if name in caught]
            for name in own:
                data.exit_code_by_key[name] = _CAUGHT_BY_TYPES
                data.type_check_error_by_key[name] = caught[name].error.error_description
            if own:
                data.save()
        left = [each for each in mutants if each[0].exit_code_by_key[each[1]] is None]
        return [each for each in left if zlib.crc32(each[1].encode()) % 100 < percent], by_path

    mutmut.filter_mutants_with_type_checker = checked
    mutmut.collect_source_file_mutation_data = sampled
