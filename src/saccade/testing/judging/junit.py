"""Write a judgement as JUnit XML: a suite for each law, and a case for each trial."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from saccade.testing.judging.judgement import Judgement


def junit_xml(judgement: Judgement) -> str:
    """Return a judgement as JUnit XML for CI systems.

    An unexpectedly broken law is a failure. Trials that are not offered or fail as expected are skipped with the
    reason, and trials that are not applicable are omitted. If a law holds although a failure was expected, the trial
    passes, and the property ``xfail`` of the suite records it.
    """
    root = ET.Element("testsuites", name=f"saccade judge {judgement.kernel}")
    for law in judgement.report.laws:
        results = [result for result in judgement.of(law) if result.verdict != "not applicable"]
        suite = ET.SubElement(root, "testsuite", name=law.name)
        properties = ET.SubElement(suite, "properties")
        named = {"statement": law.statement, "seed": str(judgement.report.seed), "device": judgement.device}
        if judgement.verdict(law) == "unexpectedly kept":
            named["xfail"] = "expected to fail, but kept"
        for name, value in named.items():
            ET.SubElement(properties, "property", name=name, value=_printable(value))
        failures = skipped = 0
        for result in results:
            name = f"{result.case}-{str(result.dtype).removeprefix('torch.')}"
            case = ET.SubElement(suite, "testcase", classname=f"{judgement.kernel}.{law.name}", name=name)
            why = judgement.reason(result)
            if result.verdict == "broken" and why is None:
                failures += 1
                ET.SubElement(case, "failure", message=_printable(result.message)).text = law.statement
            elif result.verdict != "kept":
                skipped += 1
                message = result.message if why is None else f"expected to fail: {why}"
                ET.SubElement(case, "skipped", message=_printable(message))
        suite.attrib |= {"tests": str(len(results)), "failures": str(failures), "skipped": str(skipped), "errors": "0"}
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """Replace unprintable characters with spaces, because XML cannot contain control characters."""
    return "".join(character if character.isprintable() else " " for character in text)
