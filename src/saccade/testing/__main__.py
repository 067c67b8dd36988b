"""Conformance tests on the command line: ``python -m saccade.testing module:function``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch

from saccade.testing.cases import CASES, LARGE_CASES
from saccade.testing.conformance import check
from saccade.testing.laws import LAWS, SIZE_LAWS
from saccade.testing.subject import OPTIONS, Claims

__all__ = ["main"]

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: check an attention function against the laws and print the report.

    Returns:
        The exit status: 0 if all laws that could be tried hold, and 1 if a law is broken or none could be tried.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.sizes and (options.laws or (options.cases and options.sizes == "models")):
        parser.error("--sizes chooses the laws: leave out --laws, and --cases for models")
    report = check(
        options.function,
        call=options.call,
        with_lse=options.with_lse,
        reasons=options.reasons,
        offers=options.offers,
        gqa=not options.no_gqa,
        masks=options.masks,
        cases=options.cases or None,
        laws=options.laws or None,
        sizes=options.sizes,
        dtypes=[_DTYPES[name] for name in options.dtypes],
        claims=Claims(memory_exponent=options.memory_exponent),
        device=options.device,
        seed=options.seed,
    )
    print(report)
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m saccade.testing",
        description="Check an attention function against the laws; exit status 1 if one is broken.",
        epilog="Write a name as module:function; modules in the current folder are found, too.",
    )
    add = parser.add_argument
    add("function", type=_function, help="function(query, key, value, mask, **options) -> out")
    add("--call", type=_function, help="call(function, query, key, value, mask, **options), for another convention")
    add("--with-lse", type=_function, help="the same function returning (out, lse)")
    add("--reasons", type=_function, help="called like the function: why it will not run these inputs")
    add("--offers", nargs="*", choices=OPTIONS, metavar="OPTION", help=f"options that it takes: {', '.join(OPTIONS)}")
    add("--no-gqa", action="store_true", help="it takes no grouped heads")
    add("--masks", choices=("dense", "objects"), default="dense", help="masks as bool tensors or as rules")
    add("--memory-exponent", type=float, help="promise that memory grows as length to this power")
    add("--sizes", choices=("small", "models", "all"), help="of the cases; all, or small with --cases")
    names = [law.name for law in (*LAWS, *SIZE_LAWS)]
    add("--laws", nargs="+", choices=names, metavar="LAW", help="only these")
    names = [case.name for case in (*CASES, *LARGE_CASES)]
    add("--cases", nargs="+", choices=names, metavar="CASE", help="only these")
    add("--dtypes", nargs="+", choices=_DTYPES, default=["float64", "float32"], metavar="DTYPE", help="of the inputs")
    add("--seed", type=int, help="of all values, to repeat a run; drawn anew if left out")
    add("--device", type=_usable_device, default="cpu", help="where the inputs are put")
    return parser


def _function(name: str) -> Any:
    """Import the function that the command-line argument ``module:function`` names."""
    module, separator, path = name.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError(f"{name!r} must be written module:function")
    try:
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not callable(target):
        raise argparse.ArgumentTypeError(f"{name!r} must be callable; got {type(target).__name__}")
    return target


def _usable_device(name: str) -> str:
    """Check that torch can use the device that a command-line argument names, and return the name."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from None
    return name


if __name__ == "__main__":
    sys.exit(main())
