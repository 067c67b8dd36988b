"""``saccade judge``: test a kernel against the laws of attention."""

import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from saccade.cli.crash_watch import watched
from saccade.cli.exit_status import refuse, refuse_combination
from saccade.cli.output_files import all_or_none, folder_for, writing
from saccade.cli.progress import progress
from saccade.support.language import translated
from saccade.testing.judging import Declaration, Judgement, Source, check_interpreter
from saccade.testing.judging import judge as run
from saccade.testing.judging.counter_example import MARK
from saccade.testing.judging.declaration import DTYPES, read_claims
from saccade.testing.judging.html_page import html_page
from saccade.testing.judging.junit import junit_xml
from saccade.text import visible

_Kernel = Annotated[
    str, typer.Argument(metavar="KERNEL", help="file.py::name, library.so::name, or module:name.", show_default=False)
]
_Claims = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="What the kernel claims: a TOML file, or file.py::NAME of a dict. What is not claimed is tried with one "
        "small call, and left out if the call raises an error.",
    ),
]
_Claim = Annotated[
    list[str] | None,
    typer.Option("--claim", metavar="KEY=VALUE", help="One claim, written as in TOML; may be repeated."),
]
_Laws = Annotated[
    list[str] | None, typer.Option("--law", metavar="LAW", help="Check only this law; may be repeated. By default all.")
]
_Cases = Annotated[
    list[str] | None,
    typer.Option("--case", metavar="CASE", help="Check only this case; may be repeated. By default all."),
]
_Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="The dtype of the inputs; may be repeated. By default the claimed dtypes."
    ),
]
_Device = Annotated[str, typer.Option(help="The device of the inputs.")]
_Minutes = Annotated[float, typer.Option(min=0.01, help="Time limit in minutes, after which no trial begins.")]
_Seed = Annotated[int | None, typer.Option(min=0, help="Seed of all values; by default a new one.")]
_Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page to this file.")]
_Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML to this file.")]
_Scripts = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Write a script for each broken law into this folder, and remove those of an earlier run.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the judgement as JSON.")]
_Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with status 1 also if a law that is expected to fail holds.")
]


def judge(
    context: typer.Context,
    kernel: _Kernel,
    claims: _Claims = None,
    claim: _Claim = None,
    law: _Laws = None,
    case: _Cases = None,
    dtype: _Dtypes = None,
    device: _Device = "cpu",
    minutes: _Minutes = 1.0,
    seed: _Seed = None,
    html: _Html = None,
    junit: _Junit = None,
    scripts: _Scripts = None,
    as_json: _Json = False,
    strict: _Strict = False,
) -> None:
    """Test a kernel against the laws of attention, and show the smallest input that violates each law.

    The exit status is 1 if a law that is not expected to fail is violated, if the law oracle could not be tested, or if
    no law could be tested; with --strict, also if a law that is expected to fail holds. A law is not tested if it needs
    a feature that the kernel does not support. Laws on NaN and inf are listed separately; they count too, unless
    --claim non_finite=false leaves them out.
    """
    if as_json:
        refuse_combination(context, "--json", ("--scripts",), "contains the scripts")
    judgement = _run_judge(kernel, _declaration(claims, claim or ()), law, case, dtype, device, minutes, seed)
    typer.echo(json.dumps(judgement.to_json(), indent=2) if as_json else str(judgement))
    for option, path, text in (("--html", html, html_page), ("--junit", junit, junit_xml)):
        if path is not None:
            with writing("judge", option, path, "file"):
                path.write_text(text(judgement), encoding="utf-8")
    if scripts is not None:
        _write_scripts(judgement, scripts)
    if not judgement.ok or (strict and judgement.passing_xfail):
        raise typer.Exit(1)


def _run_judge(
    kernel: str,
    claims: Declaration,
    laws: Sequence[str] | None,
    cases: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    device: str,
    minutes: float,
    seed: int | None,
) -> Judgement:
    """Load a kernel and judge it; end the command if an argument is wrong."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        refuse("judge", f"--device must be one that torch can use; got {device} ({str(error).splitlines()[0]})")
    for name in dtypes or ():
        if name not in DTYPES:
            refuse("judge", f"--dtype must be among {', '.join(DTYPES)}; got {name}")
    sys.path.insert(0, "")  # modules in the current folder are found, as with python -m
    chosen_seed = secrets.randbelow(1 << 32) if seed is None else seed
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False)
    try:
        source = Source.parse(kernel)
        check_interpreter(source, device)
        is_called = source.is_library and torch.device(device).type == "cpu"  # and a forked process cannot use CUDA
        announce = watched("judge", visible(kernel)) if is_called else None
        loaded: Any = source.load()
        with progress(errors, "trials", None) as advance:

            def show(number: int, count: int, trial: str) -> None:
                advance(1, trial)
                if announce is not None:
                    announce(f"{trial}, seed {chosen_seed}")

            return run(
                loaded,
                claims,
                source=source,
                laws=laws,
                cases=cases,
                dtypes=None if dtypes is None else [DTYPES[name] for name in dtypes],
                device=device,
                minutes=minutes,
                seed=chosen_seed,
                progress=show,
            )
    except (ValueError, TypeError) as error:
        refuse("judge", str(error).partition(": ")[2] or str(error))


def _declaration(claims: str | None, overrides: Sequence[str]) -> Declaration:
    """Read the claims in a file, and let individual claims from the command line override them."""
    try:
        return read_claims(claims, overrides)
    except OSError as error:
        refuse("judge", f"--claims must be a file that can be read; got {claims} ({error.strerror})")
    except (ValueError, TypeError) as error:
        refuse("judge", str(error).partition(": ")[2] or str(error))


def _write_scripts(judgement: Judgement, folder: Path) -> None:
    with folder_for("judge", "--scripts", folder), all_or_none("judge", "--scripts", folder) as staging:
        for example in judgement.counter_examples:
            if example.script:
                (staging / f"{example.law}.py").write_text(example.script, encoding="utf-8")
        for path in folder.glob("*.py"):
            if MARK in path.read_text(encoding="utf-8", errors="replace").partition("\nfrom __future__")[0]:
                path.unlink()
    for example in judgement.counter_examples:
        if example.script:
            typer.echo(translated("wrote {path}", path=visible(str(folder / f"{example.law}.py"))))
        else:
            why = translated(example.no_script)
            typer.echo(translated("no script for {law}: {why}", law=example.law, why=why))
