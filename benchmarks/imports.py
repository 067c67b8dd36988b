"""Time of ``import saccade`` beyond that of ``import torch``, in fresh processes, in turns.

``python -m benchmarks.imports [ROUNDS]`` prints medians, in milliseconds of the clock and of the processor. Other
processes disturb the first more than the second. The end of the process, which collects garbage once more, is left out.
Both are read from compiled files, as an installed package is, also where the environment forbids to write them.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

CODES = {
    "import torch": "import torch",
    "import torch, saccade": "import torch, saccade",
    "the same, collecting no garbage": "import torch, gc; gc.disable(); import saccade",
}


def once(code: str, compiled: str) -> tuple[float, float]:
    """Return the milliseconds of one process, wall clock and processor; its compiled files are in a separate folder."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; import os; os._exit(0)"], env=variables | {"PYTHONPYCACHEPREFIX": compiled}
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {code}")
    return 1000 * (time.perf_counter() - start), 1000 * (used.ru_utime + used.ru_stime)


def main(rounds: int = 20) -> None:
    """Run the command: measure and print."""
    with tempfile.TemporaryDirectory() as compiled:
        for code in CODES.values():  # writes what Python compiles
            once(code, compiled)
        found = [{name: once(code, compiled) for name, code in CODES.items()} for _ in range(rounds)]
    for name in CODES:
        clock, processor = (statistics.median(each[name][place] for each in found) for place in (0, 1))
        more, much = (
            statistics.median(each[name][place] - each["import torch"][place] for each in found) for place in (0, 1)
        )
        print(f"{name:32} {clock:6.0f} ms, {processor:6.0f} of the processor; {more:+5.0f}, {much:+5.0f} beside torch")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
