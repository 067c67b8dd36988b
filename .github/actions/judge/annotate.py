"""Run `saccade judge`, write its reports, and print one GitHub annotation for each law that is broken."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path


def escape(text: str) -> str:
    """Return a text as the data of a workflow command, which ends at a line break."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def annotations(report: dict) -> list[str]:
    """Return a workflow command for each note and law: an error if it is broken, a warning if it was expected to be."""
    lines = [f"::notice title=saccade judge::{escape(note)}" for note in report["notes"]]
    for law in report["laws"]:
        title = f"title=saccade judge, {law['name']}"
        if law["verdict"] == "broken":
            lines.append(f"::error {title}::{escape(law['why'])}")
        elif law["verdict"] == "unexpectedly kept":
            lines.append(f"::warning {title}::expected to fail, but kept")
    return lines


def main() -> int:
    """Judge the kernel that the environment describes, and return the exit status of the command."""
    folder = Path(os.environ.get("RUNNER_TEMP", "."))
    report, page = folder / "saccade-judge.xml", folder / "saccade-judge.html"
    claims = ["--claims", os.environ["CLAIMS"]] if os.environ.get("CLAIMS") else []
    arguments = [*claims, *shlex.split(os.environ.get("ARGUMENTS", ""))]
    command = ["saccade", "judge", os.environ["KERNEL"], "--json", "--junit", str(report), "--html", str(page)]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if output := os.environ.get("GITHUB_OUTPUT"):
        with Path(output).open("a", encoding="utf-8") as file:
            file.write(f"report={report}\npage={page}\n")
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:  # the command has said on stderr what it could not do
        print(f"::error title=saccade judge::ended with status {done.returncode} and without a report")
        return done.returncode or 1
    print("\n".join(annotations(found)))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
