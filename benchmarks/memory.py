"""Peak memory of a call, measured in a process that does nothing else (Linux)."""

import gc
import importlib
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class Job(NamedTuple):
    """A function of this package, ``module:name``, that makes its inputs and returns the call to be measured.

    What should not count, such as what a first call leaves behind, it does before it returns.
    """

    function: str
    args: Sequence[object] = ()


def extra_bytes(jobs: Sequence[Job]) -> list[int]:
    """Return the peak resident memory that each job's call adds to that of its inputs, results included."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory"],
        input=json.dumps(jobs),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    return json.loads(done.stdout)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", _STATUS.read_text(encoding="ascii"))
    assert found is not None
    return int(found.group(1)) * 1024


def measured(call: Callable[[], object]) -> int:
    """Return the peak memory that a call adds to this process."""
    gc.collect()
    _CLEAR.write_text("5", encoding="ascii")  # the high-water mark is now what is resident
    before = _status("VmRSS")
    result = call()
    after = _status("VmHWM")
    del result
    return after - before


def _in_child(job: Job, threads: int) -> int:
    """Fork, so that the imports are paid once and every job still starts alone (no thread has run yet)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(threads)
            module, _, name = job.function.partition(":")
            call = getattr(importlib.import_module(module), name)(*job.args)
            os.write(writing, str(measured(call)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # without the parent's clean-up, which is not this process's
    os.close(writing)
    with open(reading, encoding="ascii") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError(f"benchmarks: {job.function} failed in its process")
    return int(answer)


if __name__ == "__main__":
    wanted = [Job(*job) for job in json.load(sys.stdin)]
    allowed = torch.get_num_threads()
    torch.set_num_threads(1)  # a child would wait for threads that an import has started
    for job in wanted:
        importlib.import_module(job.function.partition(":")[0])
    print(json.dumps([_in_child(job, allowed) for job in wanted]))
