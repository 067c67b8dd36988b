"""``saccade verify``: what is said about attention, checked by running it."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from saccade import viz
from saccade.cli.progress import progress
from saccade.cli.refusal import refuse, refuse_beside
from saccade.cli.writing import all_or_none, folder_for
from saccade.text import visible
from saccade.theory import CLAIMS, Claim, Finding, Verification
from saccade.theory import verify as run
from saccade.theory.claims import CONDITION, sections, table
from saccade.theory.pictures import PICTURES
from saccade.theory.pictures_in_chinese import PICTURES_IN_CHINESE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["verify"]

_STYLES = {"holds": "green", "holds if": "yellow", "refuted": "red"}


_Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME|TOPIC", help="Check this claim or topic; may be repeated."),
]
_Seed = Annotated[int, typer.Option(min=0, help="The first seed of the random numbers.")]
_Seeds = Annotated[int, typer.Option(min=1, help="How many seeds to run, one after the other.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the run as JSON.")]
_Pictures = Annotated[
    Path | None, typer.Option(help="Draw the pictures of the documents into this folder, and check nothing.")
]
_Language = Annotated[Literal["en", "zh"], typer.Option(help="The language of what is written in the pictures.")]
_Markdown = Annotated[
    bool, typer.Option("--markdown", help="Print claims and verdicts as Markdown, and check nothing.")
]


def verify(
    context: typer.Context,
    only: _Only = None,
    seed: _Seed = 0,
    seeds: _Seeds = 1,
    as_json: _Json = False,
    pictures: _Pictures = None,
    language: _Language = "en",
    as_markdown: _Markdown = False,
) -> None:
    """Check what is said about attention, theorem by theorem.

    Each claim comes with a verdict (it holds, it holds under conditions, it is refuted) and measurements that would
    contradict a wrong one. The exit status is 1 if a measurement contradicts its verdict.
    """
    if pictures is not None:
        others = ("--only", "--seed", "--seeds", "--json", "--markdown")
        refuse_beside(context, "--pictures", others, "draws the same pictures always and checks nothing")
    elif language != "en":
        refuse("verify", f"--language must be given beside --pictures, which it is for; got {language} alone")
    if as_markdown:
        refuse_beside(context, "--markdown", ("--seed", "--seeds", "--json"), "checks nothing")
    claims = _chosen(only or [])
    if as_markdown:
        typer.echo(f"{table(claims)}\n{sections(claims)}", nl=False)
        return
    if pictures is not None:
        _draw(pictures, {"en": PICTURES, "zh": PICTURES_IN_CHINESE}[language])
        return
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with progress(errors, "claims", len(claims) * seeds) as advance:

        def tell(finding: Finding) -> None:
            advance(1 if finding.is_random else seeds - (finding.seed - seed), finding.claim.topic)

        verification = run(claims, seed=seed, seeds=seeds, progress=tell)
    if as_json:
        typer.echo(json.dumps(verification.to_json(), indent=2, allow_nan=False))
    else:
        _print(verification, claims, seeds)
    if not verification.ok:
        raise typer.Exit(1)


def _draw(folder: Path, drawings: Mapping[str, Callable[[], "Figure"]]) -> None:
    with folder_for("verify", "--pictures", folder), all_or_none("verify", "--pictures", folder) as beside:
        for name, picture in drawings.items():
            viz.save(picture(), beside / f"{name}.png")
    for name in drawings:
        typer.echo(f"wrote {visible(str(folder / f'{name}.png'))}")


def _chosen(only: Sequence[str]) -> tuple[Claim, ...]:
    unknown = [name for name in only if all(name not in (claim.name, claim.topic) for claim in CLAIMS)]
    if unknown:
        topics = ", ".join(dict.fromkeys(claim.topic for claim in CLAIMS))
        refuse("verify", f"--only must be the name of a claim or one of {topics}; got {unknown[0]}")
    return tuple(claim for claim in CLAIMS if not only or claim.name in only or claim.topic in only)


def _print(verification: Verification, claims: Sequence[Claim], seeds: int) -> None:
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    topic = ""
    for claim in claims:
        own = [finding for finding in verification.findings if finding.claim is claim]
        if claim.topic != topic:
            topic = claim.topic
            console.print(Text(topic.upper(), "bold"))
        stands = all(finding.agrees for finding in own)
        mark = Text("  ok  ", "green") if stands else Text("  NO  ", "bold red")
        console.print(Text.assemble(mark, (claim.name, "bold"), "  ", (claim.verdict, _STYLES[claim.verdict])))
        console.print(Text(f"      {claim.statement}"))
        if claim.conditions:
            console.print(Text(f"      {CONDITION[claim.verdict]}: {claim.conditions}.", "dim"))
        for finding in own:
            if finding is own[0] or not finding.agrees:
                _print_finding(console, finding, seeds)
    console.print(_summary(verification, claims, seeds))


def _print_finding(console: Console, finding: Finding, seeds: int) -> None:
    where = f"seed {finding.seed}: " if seeds > 1 and finding.is_random else ""
    if finding.error:
        console.print(Text(f"        x {where}{visible(finding.error)}", "red"))
    for one in finding.measurements:
        sign, style = ("·", "cyan") if one.agrees else ("x", "red")
        console.print(Text(f"        {sign} {where}{one}", style))


def _summary(verification: Verification, claims: Sequence[Claim], seeds: int) -> str:
    told = {"holds": "holding", "holds if": "holding under conditions", "refuted": "refuted"}
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in told}
    verdicts = ", ".join(f"{count} {told[verdict]}" for verdict, count in counts.items() if count)
    measured = sum(len(finding.measurements) for finding in verification.findings)
    chance = f"; chance of a false alarm at most {verification.chance:.0e}" if verification.chance else ""
    names = list(dict.fromkeys(finding.claim.name for finding in verification.contradicted))
    return (
        f"{_count(len(claims), 'claim')}: {verdicts}.\n"
        f"{_count(measured, 'measurement')}, {_count(seeds, 'seed')}{chance}.\n"
        f"{'Contradicted: ' + ', '.join(names) if names else 'Every verdict stands'}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
