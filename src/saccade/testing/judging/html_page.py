"""Write a judgement as a single HTML page that needs no scripts or other files."""

from __future__ import annotations

from collections import Counter
from html import escape

from saccade.testing.judging.judgement import Judgement

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1b1b; }
table { border-collapse: collapse; } td, th { padding: .25rem .6rem; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid #ddd; } td.number { text-align: right; } pre { overflow-x: auto; background: #f5f5f5;
padding: .6rem; } .broken { color: #a33b00; font-weight: 600; } .kept { color: #00603c; } .other { color: #666; }
""".strip()


def html_page(judgement: Judgement) -> str:
    """Return a judgement as an HTML page with verdicts, counter-examples, scripts and measured errors."""
    title = f"{judgement.kernel}: {judgement.summary}"
    facts = [
        f"device {judgement.device}",
        f"seed {judgement.report.seed}",
        f"{judgement.seconds:.0f} s",
        *(f"{name} {version}" for name, version in judgement.versions.items()),
    ]
    if judgement.inferred:
        facts.append(f"read from the signature: {judgement.inferred}")
    if judgement.skipped:
        facts.append(f"the time limit was reached, {judgement.skipped:,} trials were skipped")
    summaries = "<br>".join(map(escape, judgement.summaries))
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(judgement.kernel)}</h1><p><strong>{summaries}</strong></p>",
        f"<p>{escape(', '.join(facts))}</p>",
        *(f"<p>{escape(note)}</p>" for note in judgement.notes),
        *(
            f"<p>Expected to fail, but kept: {escape(pattern)} ({escape(judgement.xfail[pattern])})</p>"
            for pattern in judgement.passing_xfail
        ),
        "<h2>Laws</h2>",
        _laws(judgement),
        *(["<h2>Counter-examples</h2>"] if judgement.counter_examples else []),
        *_counter_examples(judgement),
        *(["<h2>Errors</h2>", _errors(judgement)] if judgement.errors else []),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _laws(judgement: Judgement) -> str:
    rows = ["<table><tr><th>law<th>verdict<th>kept<th>broken<th>not offered<th></tr>"]
    for law in judgement.report.laws:
        counts, verdict = Counter(result.verdict for result in judgement.of(law)), judgement.verdict(law)
        kind = verdict if verdict in ("kept", "broken") else "other"
        numbers = "".join(f'<td class="number">{counts[name] or ""}' for name in ("kept", "broken", "not offered"))
        name = f'<td title="{escape(law.statement)}">{escape(law.name)}'
        rows.append(f'<tr>{name}<td class="{kind}">{verdict}{numbers}<td>{escape(judgement.why(law))}</tr>')
    return "\n".join([*rows, "</table>"])


def _counter_examples(judgement: Judgement) -> list[str]:
    statements = {law.name: law.statement for law in judgement.report.laws}
    parts = []
    for example in judgement.counter_examples:
        parts.append(f"<h3>{escape(example.law)}</h3><p>{escape(statements[example.law])}</p>")
        parts.append(f"<p>{escape(example.message)}<br>{escape(example.inputs)}</p>")
        if example.script:
            shown = escape("\n".join(example.shows))
            parts.append(
                f"<pre>{shown}</pre><details><summary>script</summary><pre>{escape(example.script)}</pre></details>"
            )
        else:
            parts.append(f"<p>No script: {escape(example.no_script)}.</p>")
    return parts


def _errors(judgement: Judgement) -> str:
    rows = ["<table><tr><th>law<th>dtype<th>largest error, in units of rounding</tr>"]
    for (law, dtype), error in judgement.errors.items():
        rows.append(f'<tr><td>{escape(law)}<td>{dtype}<td class="number">{error:.3g}</tr>')
    return "\n".join([*rows, "</table>"])
