"""The `Judgement` of a kernel: a verdict for each law, counter-examples, errors, and expected failures."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from saccade.support.columns import display_width, left_aligned, right_aligned
from saccade.support.language import Message, joined, translated
from saccade.testing.judging.counter_example import CounterExample
from saccade.testing.laws import Law
from saccade.testing.report import Report, Result

SCHEMA = "saccade.judge/1"
"""Name and version of the format that `Judgement.to_json` returns."""
CORE_LAWS = ("oracle", "gradients_of_inputs", "causality")
"""Names of the laws that are tried first. If the first of them was not tried, the judgement is incomplete."""
LawVerdict = Literal["kept", "broken", "expected", "unexpectedly kept", "not tried"]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The judgement of a kernel. ``print(judgement)`` shows a table of laws and the smallest counter-examples.

    Attributes:
        kernel: the name of the kernel.
        report: the results of all trials.
        counter_examples: one for each law that is unexpectedly broken.
        xfail: the reasons for expected failures, by pattern.
        errors: the largest error that was measured, by law and dtype, as the norm of the error divided by the norm of
            the reference, in units of the dtype's eps.
        planned: number of trials of each law, by name; fewer may have run because the time was up.
        refused: number of trials of each law, by name, that the claims or the form exclude; their results come first.
        seconds: total time.
        device: the device on which the kernel ran.
        versions: versions of packages.
        inferred: the settings that were read from the kernel's signature, in TOML syntax; empty if none were.
        notes: sentences on what was read from the signature, and on capabilities that failed when they were tried.
    """

    kernel: str
    report: Report
    counter_examples: tuple[CounterExample, ...]
    xfail: Mapping[str, str]
    errors: Mapping[tuple[str, str], float]
    planned: Mapping[str, int]
    refused: Mapping[str, int]
    seconds: float
    device: str
    versions: Mapping[str, str]
    inferred: str = ""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a law held in at least one trial, no law is unexpectedly broken, and the judgement is complete."""
        return bool(self.report.kept) and not self.unexpected and not self.incomplete

    @property
    def skipped(self) -> int:
        """Number of trials that did not run because the time was up."""
        return sum(self.planned.values()) - len(self.report.results)

    @property
    def incomplete(self) -> str:
        """The reason why the law `oracle`, although requested, was not tried; empty if the judgement is complete."""
        law = next((law for law in self.report.laws if law.name == CORE_LAWS[0]), None)
        return self.why(law) if law is not None and self.verdict(law) == "not tried" else ""

    @property
    def unexpected(self) -> tuple[Result, ...]:
        """The results of trials that unexpectedly broke a law."""
        return tuple(result for result in self.report.broken if self.reason(result) is None)

    @property
    def passing_xfail(self) -> tuple[str, ...]:
        """The patterns of ``xfail`` that match at least one trial that ran, but no trial that broke a law."""
        tried = {*self.report.kept, *self.report.broken}
        broken = self.report.broken
        return tuple(
            pattern
            for pattern in self.xfail
            if any(matches(pattern, result) for result in tried)
            and not any(matches(pattern, result) for result in broken)
        )

    def reason(self, result: Result) -> str | None:
        """Return the reason why a failure is expected, or None if it is unexpected."""
        return next((why for pattern, why in self.xfail.items() if matches(pattern, result)), None)

    def verdict(self, law: Law) -> LawVerdict:
        """Return the verdict on a law over all its trials, such as "broken" or "not tried"."""
        results = self.of(law)
        if any(result.law == law.name for result in self.unexpected):
            return "broken"
        if any(result.verdict == "broken" for result in results):
            return "expected"
        kept = [result for result in results if result.verdict == "kept"]
        if any(matches(pattern, result) for pattern in self.passing_xfail for result in kept):
            return "unexpectedly kept"
        return "kept" if kept else "not tried"

    def of(self, law: Law) -> list[Result]:
        """Return the results of all trials of one law."""
        return [result for result in self.report.results if result.law == law.name]

    def why(self, law: Law) -> str:
        """Return a law's counter-example, why its failure is expected, or why not all trials ran; "" if all is well."""
        for example in self.counter_examples:
            if example.law == law.name:
                return example.message
        for result in self.of(law):
            if result.verdict == "broken":
                return self.reason(result) or result.message
        if self.verdict(law) == "not tried":
            return self._why_not_tried(law)
        kept = len([result for result in self.of(law) if result.verdict == "kept"])
        missing = self.planned.get(law.name, 0) - len(self.of(law))
        words = "kept on {kept:,} of {all:,} trials"
        return Message(words, kept=kept, all=kept + missing) if missing > 0 else ""

    def _why_not_tried(self, law: Law) -> str:
        """Return why a law was not tried: time ran out, the kernel refused every trial, or no case applies."""
        results = self.of(law)
        ran = results[self.refused.get(law.name, 0) :]
        reasons = Counter(result.message for result in ran or results if result.message)
        reason = reasons.most_common(1)[0][0] if reasons else ""
        planned = self.planned.get(law.name, len(results))
        if len(results) < planned:
            words = "not reached in the time ({ran:,} of {planned:,} trials ran)"
            if results:
                words = "not reached in the time ({ran:,} of {planned:,} trials ran, none that the kernel takes: {why})"
            return Message(words, ran=len(results), planned=planned, why=reason)
        if any(result.verdict == "not offered" for result in results):
            return Message("not offered by the kernel: {why}", why=reason)
        return Message("no case applies: {why}" if reason else "no case applies", why=reason)

    def __str__(self) -> str:
        heads = ("law", "verdict", "kept", "broken", "not offered", "")
        rows: list[tuple[str, ...]] = [tuple(map(translated, heads))]
        for law in self.report.laws:
            counts = Counter(result.verdict for result in self.of(law))
            cells = [str(counts[verdict] or ".") for verdict in ("kept", "broken", "not offered")]
            verdict = self.verdict(law)
            why = self.why(law)
            why = translated(why) if isinstance(why, Message) else why  # texts of the kernel's author stay unchanged
            shown = "BROKEN" if verdict == "broken" else verdict
            rows.append((law.name, translated(shown), *cells, why))
        widths = [max(display_width(row[column]) for row in rows) for column in range(5)]
        table = [
            "  ".join([*map(left_aligned, row[:2], widths), *map(right_aligned, row[2:5], widths[2:]), row[5]]).rstrip()
            for row in rows
        ]
        values = {"kernel": self.kernel, "device": self.device, "seed": self.report.seed, "seconds": self.seconds}
        lines = [translated("{kernel} on {device}, seed {seed}, {seconds:.0f} s", **values)]
        if self.inferred:
            lines.append(translated("read from the signature: settings = {{ {settings} }}", settings=self.inferred))
        lines += map(translated, self.notes)
        lines += ["", *table, ""]
        lines += [
            translated("{names}: {why}", names=example.law, why=translated(example.inputs))
            for example in self.counter_examples
        ]
        if self.common_error:
            lines.append(translated(self.common_error))
        if self.skipped:
            skipped = "The time limit was reached; {skipped:,} trials were skipped."
            lines.append(translated(skipped, skipped=self.skipped))
        for pattern in self.passing_xfail:
            values = {"pattern": pattern, "why": self.xfail[pattern]}
            lines.append(translated("Expected to fail, but kept: {pattern} ({why})", **values))
        return "\n".join([*lines, *map(translated, self.summaries)])

    __repr__ = __str__

    @property
    def common_error(self) -> str:
        """The most frequent error in broken trials, with a hint on how to exclude such inputs; empty if it is rare.

        The error must have been raised in at least three broken trials and in at least half of them.
        """
        raised = Counter(result.message for result in self.unexpected if result.message.startswith("raised "))
        message, count = raised.most_common(1)[0] if raised else ("", 0)
        if count < max(3, len(self.unexpected) / 2):
            return ""
        words = (
            "{count:,} of {broken:,} broken trials {message}. If the kernel takes no such inputs, declare what it "
            "takes with --claim: groups, decoding, masks, full, dtypes, widths, value_widths, lengths, gradients, "
            "empty."
        )
        return Message(words, count=count, broken=len(self.unexpected), message=message)

    @property
    def summaries(self) -> tuple[str, ...]:
        """The judgement as a sentence on finite inputs and one on NaN and inf; one sentence if one kind was tried.

        If both kinds were tried and a law on NaN and inf is broken, a last sentence says how to leave such laws out.
        """
        tried = {kind: [law for law in self._tried if law.non_finite is kind] for kind in (False, True)}
        if not all(tried.values()):
            return (self._sentence(self._tried),)
        broken = any(self.verdict(law) == "broken" for law in tried[True])
        hint = "If the kernel promises nothing about NaN and inf, leave these laws out with --claim non_finite=false."
        return (
            Message("Finite inputs: {sentence}", sentence=self._sentence(tried[False])),
            Message("NaN and inf: {sentence}", sentence=self._sentence(tried[True])),
            *([Message(hint)] if broken else []),
        )

    @property
    def summary(self) -> str:
        """The sentences of `summaries`, joined into one line."""
        return joined(self.summaries, "{first} {others}")

    @property
    def _tried(self) -> list[Law]:
        """The laws that held or were broken in at least one trial."""
        return [law for law in self.report.laws if self.verdict(law) != "not tried"]

    def _sentence(self, laws: Sequence[Law]) -> str:
        """Return one or two sentences that judge some of the laws that were tried."""
        verdicts = Counter(self.verdict(law) for law in laws)
        if not laws:
            return Message("No law could be tried.")
        broken = [law.name for law in laws if self.verdict(law) == "broken"]
        if broken:
            words = "{broken} of {tried} laws are broken: {names}."
            sentence = Message(words, broken=len(broken), tried=len(laws), names=", ".join(broken))
        elif self.incomplete and not all(law.non_finite for law in laws):
            words = "Incomplete: the law {law} was not tried, {why}."
            sentence = Message(words, law=CORE_LAWS[0], why=self.incomplete)
        else:
            holding = len(laws) - verdicts["expected"]
            one = Message("The law that could be tried holds.")
            sentence = one if holding == 1 else Message("All {holding} laws that could be tried hold.", holding=holding)
        if not verdicts["expected"]:
            return sentence
        expected = "{sentence} {expected} are broken as expected."
        return Message(expected, sentence=sentence, expected=verdicts["expected"])

    def to_json(self) -> dict[str, Any]:
        """Return the judgement as plain values for JSON, in the format that `SCHEMA` names."""
        return {
            "schema": SCHEMA,
            "kernel": self.kernel,
            "ok": self.ok,
            "device": self.device,
            "seed": self.report.seed,
            "seconds": round(self.seconds, 1),
            "skipped": self.skipped,
            "inferred": self.inferred,
            "notes": list(self.notes),
            "summaries": list(self.summaries),
            "incomplete": self.incomplete,
            "versions": dict(self.versions),
            "laws": [
                {
                    "name": law.name,
                    "statement": law.statement,
                    "verdict": self.verdict(law),
                    "counts": dict(Counter(result.verdict for result in self.of(law))),
                    "why": self.why(law),
                    "non_finite": law.non_finite,
                }
                for law in self.report.laws
            ],
            "counter_examples": [dataclasses.asdict(example) for example in self.counter_examples],
            "expected_but_kept": list(self.passing_xfail),
            "errors": [{"law": law, "dtype": dtype, "roundings": x} for (law, dtype), x in self.errors.items()],
        }


def matches(pattern: str, result: Result) -> bool:
    """Return whether a result matches a pattern of expected failures: ``law``, ``law[case]`` or ``law[case-dtype]``."""
    dtype = str(result.dtype).removeprefix("torch.")
    names = (result.law, f"{result.law}[{result.case}]", f"{result.law}[{result.case}-{dtype}]")
    quoted = pattern.replace("[", "[[]")
    return any(fnmatchcase(name, quoted) for name in names)
