"""Run `saccade audit`, write its report, and print one GitHub annotation for each claim that does not hold."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path


def escape(text: str) -> str:
    """Return a text as the data of a workflow command, which ends at a line break."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def annotations(report: dict, *, strict: bool) -> list[str]:
    """Return a workflow command for each claim: an error if it is broken, a warning if it was not answered."""
    lines = []
    for claim in report["claims"]:
        text = f"{report['model']}, {report['rule']}: {claim['finding'] or claim['why'] or claim['verdict']}"
        if claim["verdict"] == "broken":
            lines.append(f"::error title=saccade audit, {claim['name']}::{escape(text)}")
        elif claim["verdict"] != "held":
            kind = "error" if strict else "warning"
            lines.append(f"::{kind} title=saccade audit, {claim['name']}::{escape(text)}")
    return lines


def main() -> int:
    """Run the audit that the environment describes, and return its exit status."""
    arguments = shlex.split(os.environ.get("ARGUMENTS", ""))
    rule = ["--rule", os.environ["RULE"]] if os.environ.get("RULE") else []
    trainer = os.environ.get("TRAINER")
    subject = ["--trainer", trainer] if trainer else [os.environ["MODEL"]]
    command = ["saccade", "audit", *subject, "--json", *rule, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    path = Path(os.environ.get("RUNNER_TEMP", ".")) / "saccade-audit.json"
    path.write_text(done.stdout, "utf-8")
    if output := os.environ.get("GITHUB_OUTPUT"):
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(f"report={path}\n")
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:  # the command has said on stderr what it could not do
        print(f"::error title=saccade audit::ended with status {done.returncode} and without a report")
        return done.returncode or 1
    print("\n".join(annotations(report, strict="--strict" in arguments)))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
