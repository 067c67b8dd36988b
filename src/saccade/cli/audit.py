"""``saccade audit``: check which tokens influence which outputs of a model."""

import json
from pathlib import Path
from typing import Annotated

import typer
from torch import nn

from saccade.auditing import Report, audit_setup
from saccade.auditing import audit as run
from saccade.auditing.budget import Budget
from saccade.auditing.claims import CLAIMS
from saccade.auditing.float64 import describe_error
from saccade.auditing.loading import model_of
from saccade.auditing.report import DRAWN
from saccade.auditing.training_setup import SETUP_CLAIMS
from saccade.cli.exit_status import fail, loaded, refuse, refuse_combination
from saccade.cli.loading import NAMED, load
from saccade.cli.output_files import save_figure
from saccade.cli.setup_file import call_model_function, call_setup_function, names_a_function
from saccade.masks import Mask, parse
from saccade.support.language import translated

_Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"A folder, a config.json (random weights), model.py:make (a function), or {', '.join(NAMED)}.",
    ),
]
_Rule = Annotated[
    str | None,
    typer.Option(
        metavar="RULE", help='The mask, as in "causal & window(127, 0)"; by default the one that the model declares.'
    ),
]
_Packed = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Lengths of texts, in tokens; packed together, each must give the same outputs as alone.",
    ),
]
_Padded = Annotated[
    bool, typer.Option("--padded", help="Check that padding on the left or on the right changes nothing.")
]
_Cache = Annotated[
    bool,
    typer.Option(
        "--cache", help="Check that a prompt and steps through a cache give the same outputs as the whole text."
    ),
]
_Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against", metavar="NAME", help="An attention implementation that must give the same outputs: eager, sdpa."
    ),
]
_Claim = Annotated[
    list[str] | None,
    typer.Option("--claim", metavar="NAME", help=f"An additional claim to check: {', '.join(CLAIMS)}, all."),
]
_Trainer = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:FUNCTION",
        help="A function that returns a model, a collator and a list of token ids; instead of MODEL.",
    ),
]
_Length = Annotated[
    int, typer.Option(min=2, help="Number of tokens of the two random texts; must exceed the rule's windows.")
]
_Tests = Annotated[int, typer.Option(min=1, help="Number of sets of rows to test.")]
_Seed = Annotated[int, typer.Option(min=0, help="Seed of random weights, texts and changes.")]
_Picture = Annotated[bool, typer.Option("--picture", help="Draw the declared and the measured rule side by side.")]
_Out = Annotated[Path | None, typer.Option(metavar="FILE", help="The file for a figure of both: .png, .svg or .pdf.")]
_Strict = Annotated[bool, typer.Option("--strict", help="Exit with status 1 also if a claim could not be checked.")]
_Script = Annotated[
    bool, typer.Option("--script", help="Print a script that shows a broken claim without this library.")
]
_Budget = Annotated[
    bool, typer.Option("--budget", help="Print what such an audit costs and what it can miss; run nothing.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def audit(
    context: typer.Context,
    model: _Model = None,
    rule: _Rule = None,
    packed: _Packed = None,
    padded: _Padded = False,
    cache: _Cache = False,
    against: _Against = None,
    claim: _Claim = None,
    length: _Length = 48,
    tests: _Tests = 12,
    seed: _Seed = 0,
    picture: _Picture = False,
    out: _Out = None,
    script: _Script = False,
    as_json: _Json = False,
    strict: _Strict = False,
    trainer: _Trainer = None,
    budget: _Budget = False,
) -> None:
    """Check a model against a rule that says which tokens may influence which outputs, as a whole and in each layer.

    The model runs unmodified; perturbed tokens and gradients show which outputs depend on which tokens. The exit status
    is 1 if a claim is violated or, with --strict, if a claim could not be checked.
    """
    if budget:
        typer.echo(Budget(tests, length))
        return
    if (model is None) == (trainer is None):
        refuse("audit", "MODEL must be given, or --trainer or --budget")
    if as_json:
        refuse_combination(context, "--json", ("--picture", "--out", "--script"), "prints everything as one object")
    if packed is not None:
        refuse_combination(context, "--packed", ("--length",), "sets the number of tokens")
    declared, lengths = _declared(rule), _parse_packed(packed)
    length = length if lengths is None else sum(lengths)
    if (picture or out) and length > DRAWN:
        refuse("audit", f"{'--picture' if picture else '--out'} must have at most {DRAWN} tokens; got {length}")
    if trainer is not None:
        others = ("--length", "--packed", "--padded", "--cache", "--against")
        refuse_combination(context, "--trainer", others, "takes the texts that the function returns")
    subject = None if model is None else _loaded(model, seed)
    try:
        if subject is None:
            names = SETUP_CLAIMS if claim is None else claim
            report = audit_setup(*call_setup_function(str(trainer)), declared, claims=names, tests=tests, seed=seed)
        else:
            report = run(
                subject,
                declared,
                length=length,
                packed=lengths,
                padded=padded,
                cache=cache,
                against=against or (),
                claims=claim or (),
                tests=tests,
                seed=seed,
            )
    except (TypeError, ValueError) as error:
        refuse("audit", str(error).removeprefix("audit: ").removeprefix("audit_setup: "))
    except (RuntimeError, NotImplementedError, IndexError) as error:
        fail("audit", f"the model must run on {length} tokens; it raised {describe_error(error)}")
    typer.echo(json.dumps(report.to_json(), indent=2, allow_nan=False) if as_json else str(report))
    _draw(report, picture, out)
    if script:
        typer.echo(
            "\n" + (report.script or translated("no script: nothing is broken, or a script cannot show it") + "\n"),
            nl=False,
        )
    if not report.ok or (strict and report.unanswered):
        raise typer.Exit(1)


def _draw(report: Report, picture: bool, out: Path | None) -> None:
    if (picture or out) and report.measured is None:
        fail("audit", "the model must have outputs with gradients to be drawn; got none")
    if picture:
        typer.echo("\n" + report.picture())
    if out is not None:
        save_figure("audit", report.figure(), out)


def _declared(rule: str | None) -> Mask | None:
    try:
        return None if rule is None else parse(rule)
    except (TypeError, ValueError) as error:
        refuse("audit", f"--rule: {error}")


def _parse_packed(packed: str | None) -> list[int] | None:
    """Return the text lengths in the option ``--packed``; None without it."""
    if packed is None:
        return None
    parts = [part.strip() for part in packed.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < len(part) < 7 for part in parts):
        refuse("audit", f"--packed must be text lengths, as in 20,28; got {packed}")
    return [int(part) for part in parts]


def _loaded(model: str, seed: int) -> nn.Module:
    if model in NAMED:
        return loaded("audit", load, model)
    if names_a_function(model):
        try:
            return call_model_function(model)
        except (TypeError, ValueError) as error:
            refuse("audit", str(error).removeprefix("audit: "))
    path = Path(model)
    if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".json"):
        refuse(
            "audit",
            f"MODEL must be {', '.join(NAMED)}, a folder with config.json, that file, or model.py:make; got {model}",
        )
    try:
        return model_of(path, seed=seed)
    except (ImportError, ValueError) as error:
        fail("audit", str(error).removeprefix("audit: "))
