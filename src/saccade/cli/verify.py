"""``saccade verify``: check claims about attention by running them."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from saccade import viz
from saccade.cli.exit_status import refuse, refuse_combination
from saccade.cli.output_files import all_or_none, folder_for
from saccade.cli.progress import progress
from saccade.support.columns import display_width, left_aligned
from saccade.support.language import current_language, translated
from saccade.text import visible
from saccade.theory import CLAIMS, Claim, Finding, Verification
from saccade.theory import verify as run
from saccade.theory.claims import CONDITION, sections, table
from saccade.theory.documents import DOCUMENTS, Document, listed, tables
from saccade.theory.pictures import PICTURES
from saccade.theory.pictures_in_chinese import PICTURES_IN_CHINESE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = {"holds": "green", "holds if": "yellow", "refuted": "red"}


_Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="NAME|TOPIC", help="Check only this claim or topic; may be repeated. By default all."
    ),
]
_Seed = Annotated[int, typer.Option(min=0, help="The first seed of the random numbers.")]
_Seeds = Annotated[int, typer.Option(min=1, help="Number of seeds to run, one after the other.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the run as JSON.")]
_Pictures = Annotated[
    Path | None, typer.Option(help="Draw the figures of the documents into this folder; check nothing.")
]
_Markdown = Annotated[bool, typer.Option("--markdown", help="Print claims and verdicts as Markdown; check nothing.")]
_List = Annotated[bool, typer.Option("--list", help="List claims and verdicts; check nothing.")]
_By = Annotated[
    Literal["topic", "document"],
    typer.Option(help="The order of --list; document lists every statement of five tutorials with its claim."),
]


def verify(
    context: typer.Context,
    only: _Only = None,
    seed: _Seed = 0,
    seeds: _Seeds = 1,
    as_json: _Json = False,
    pictures: _Pictures = None,
    as_markdown: _Markdown = False,
    as_list: _List = False,
    by: _By = "topic",
) -> None:
    """Check claims about attention, theorem by theorem.

    Each claim comes with a verdict (it holds, it holds under conditions, it is refuted) and measurements that would
    contradict a wrong verdict. The exit status is 1 if a measurement contradicts its verdict.
    """
    by_document = as_list and by == "document"
    if pictures is not None:
        others = ("--only", "--seed", "--seeds", "--json", "--markdown", "--list", "--by")
        refuse_combination(context, "--pictures", others, "always draws the same figures and checks nothing")
    for name, is_given in (("--list", as_list), ("--markdown", as_markdown)):
        if is_given:
            refuse_combination(context, name, ("--seed", "--seeds", "--json"), "checks nothing")
    if by != "topic" and not as_list:
        refuse("verify", f"--by must be used with --list; got --by {by} alone")
    claims = _chosen(only or [])
    if as_list or as_markdown:
        typer.echo(_listed(claims, by_document, as_markdown), nl=False)
        return
    if pictures is not None:
        _draw(pictures, {"en": PICTURES, "zh": PICTURES_IN_CHINESE}[current_language()])
        return
    errors = Console(stderr=True, highlight=False, markup=False, emoji=False)
    with progress(errors, "claims", len(claims) * seeds) as advance:

        def show_progress(finding: Finding) -> None:
            advance(1 if finding.is_random else seeds - (finding.seed - seed), finding.claim.topic)

        verification = run(claims, seed=seed, seeds=seeds, progress=show_progress)
    if as_json:
        typer.echo(json.dumps(verification.to_json(), indent=2, allow_nan=False))
    else:
        _print(verification, claims, seeds)
    if not verification.ok:
        raise typer.Exit(1)


def _draw(folder: Path, drawings: Mapping[str, Callable[[], "Figure"]]) -> None:
    with folder_for("verify", "--pictures", folder), all_or_none("verify", "--pictures", folder) as staging:
        for name, picture in drawings.items():
            viz.save(picture(), staging / f"{name}.png")
    for name in drawings:
        typer.echo(translated("wrote {path}", path=visible(str(folder / f"{name}.png"))))


def _chosen(only: Sequence[str]) -> tuple[Claim, ...]:
    unknown = [name for name in only if all(name not in (claim.name, claim.topic) for claim in CLAIMS)]
    if unknown:
        topics = ", ".join(dict.fromkeys(claim.topic for claim in CLAIMS))
        refuse("verify", f"--only must be the name of a claim or one of {topics}; got {unknown[0]}")
    return tuple(claim for claim in CLAIMS if not only or claim.name in only or claim.topic in only)


def _listed(claims: Sequence[Claim], by_document: bool, as_markdown: bool) -> str:
    if by_document:
        documents = _documents(claims)
        return tables(documents, chinese=current_language() == "zh") if as_markdown else listed(documents)
    if as_markdown:
        return f"{table(claims)}\n{sections(claims)}"
    lines = []
    width = max(display_width(translated(verdict)) for verdict in _STYLES)
    for topic in dict.fromkeys(claim.topic for claim in claims):
        lines.append(_heading(topic))
        for claim in claims:
            if claim.topic == topic:
                statement = translated("{name}: {statement}", name=claim.name, statement=translated(claim.statement))
                lines.append(f"  {left_aligned(translated(claim.verdict), width)}  {statement}")
    return "\n".join(lines) + "\n"


def _heading(topic: str) -> str:
    return translated(topic).replace("-", " ").upper()


def _documents(claims: Sequence[Claim]) -> list[Document]:
    """Return the tutorial documents, reduced to the statements that the given claims check.

    If all claims are given, statements that no claim checks are kept as well. Documents without statements are omitted.
    """
    names = {claim.name for claim in claims} | ({""} if len(claims) == len(CLAIMS) else set())
    documents = (
        one._replace(says=tuple(statement for statement in one.says if statement.claim in names)) for one in DOCUMENTS
    )
    return [one for one in documents if one.says]


def _print(verification: Verification, claims: Sequence[Claim], seeds: int) -> None:
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    topic = ""
    for claim in claims:
        own = [finding for finding in verification.findings if finding.claim is claim]
        if claim.topic != topic:
            topic = claim.topic
            console.print(Text(_heading(topic), "bold"))
        if any(finding.missing for finding in own):
            mark = Text("  --  ", "yellow")
        else:
            mark = Text("  ok  ", "green") if all(finding.agrees for finding in own) else Text("  NO  ", "bold red")
        verdict = Text(translated(claim.verdict), _STYLES[claim.verdict])
        console.print(Text.assemble(mark, (claim.name, "bold"), "  ", verdict))
        console.print(Text(f"      {translated(claim.statement)}"))
        if claim.conditions:
            words = {"word": translated(CONDITION[claim.verdict]), "conditions": translated(claim.conditions)}
            console.print(Text(f"      {translated('{word}: {conditions}.', **words)}", "dim"))
        for finding in own:
            if finding is own[0] or not finding.agrees:
                _print_finding(console, finding, seeds)
    console.print(_summary(verification, claims, seeds))


def _print_finding(console: Console, finding: Finding, seeds: int) -> None:
    where = translated("seed {seed}: ", seed=finding.seed) if seeds > 1 and finding.is_random else ""
    if finding.missing:
        missing = translated("not checked: {why}", why=visible(finding.missing))
        console.print(Text(f"        {missing}", "yellow"))
    if finding.error:
        console.print(Text(f"        x {where}{visible(finding.error)}", "red"))
    for one in finding.measurements:
        sign, style = ("·", "cyan") if one.agrees else ("x", "red")
        console.print(Text(f"        {sign} {where}{one}", style))


def _summary(verification: Verification, claims: Sequence[Claim], seeds: int) -> str:
    phrases = {"holds": "{count} holding", "holds if": "{count} holding under conditions", "refuted": "{count} refuted"}
    counts = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in phrases}
    verdicts = translated(", ").join(
        translated(phrases[verdict], count=count) for verdict, count in counts.items() if count
    )
    measured = sum(len(finding.measurements) for finding in verification.findings)
    chance = ""
    if verification.chance:
        chance = translated("; chance of a false alarm at most {chance:.0e}", chance=verification.chance)
    wrong, left = (
        ", ".join(dict.fromkeys(finding.claim.name for finding in findings))
        for findings in (verification.contradicted, verification.unchecked)
    )
    ending = "Every verdict is confirmed." if verification.ok else "Nothing was checked."
    lines = [
        translated(
            "{claims}: {verdicts}.",
            claims=_count(len(claims), "{number:,} claim", "{number:,} claims"),
            verdicts=verdicts,
        ),
        translated(
            "{measurements}, {seeds}{chance}.",
            measurements=_count(measured, "{number:,} measurement", "{number:,} measurements"),
            seeds=_count(seeds, "{number:,} seed", "{number:,} seeds"),
            chance=chance,
        ),
        *([translated("Not checked, because a package is not installed: {names}.", names=left)] if left else []),
        translated("Contradicted: {names}.", names=wrong) if wrong else translated(ending),
    ]
    return "\n".join(lines)


def _count(number: int, one: str, several: str) -> str:
    return translated(one if number == 1 else several, number=number)
