"""Threads that share the calls of the fused kernel, beside what a program and torch do with threads and processes."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.kernels.shared_threads import MASK, Seen, alone, assert_same, inputs, results, sharing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import saccade as sc
from saccade import masks


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    with sharing(monkeypatch) as found:
        yield found


def test_functions_are_asked_where_they_are_given(seen: Seen) -> None:
    asked = set()

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        asked.add(threading.get_ident())
        return (q - kv).abs() < 30

    results(inputs(), masks.Predicate(rule))
    assert asked == {threading.get_ident()}


class Listening(TorchDispatchMode):
    """Hears every operation of its own thread."""

    heard = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard += "flash" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_every_operation(seen: Seen) -> None:
    its = inputs()
    with Listening() as mode:
        results(its)
    assert mode.heard >= 8
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        results(its)
    assert sum("flash" in event.name for event in profiled.events()) >= 8
    with torch.device("cpu"), torch.no_grad():
        sc.attention(*its, MASK, impl="fused")
    assert not seen.others


def test_modes_of_a_thread_reach_the_others(seen: Seen) -> None:
    its = inputs(dtype=torch.bfloat16)
    expected = alone(its)[0]
    for context in (torch.inference_mode(), torch.no_grad(), torch.enable_grad(), torch.autocast("cpu")):
        with context:
            out = sc.attention(*its, MASK, impl="fused")
            assert torch.equal(out, expected)
            assert out.is_inference() == torch.is_inference_mode_enabled()
            assert out.requires_grad == torch.is_grad_enabled()
    assert seen.others


def test_backward_on_another_thread(seen: Seen) -> None:
    its = inputs()
    expected, found = alone(its), []
    thread = threading.Thread(target=lambda: found.append(results(its)))
    thread.start()
    thread.join()
    assert_same(found[0], expected)
    assert len(seen.others) > 1


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_and_transforms(seen: Seen) -> None:
    torch.compiler.reset()
    its = [x.detach() for x in inputs()]

    def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sc.attention(q, k, v, MASK, impl="fused")

    torch.set_num_threads(1)
    expected, grad = answer(*its), torch.func.grad(lambda q: answer(q, *its[1:]).sin().sum())(its[0])
    torch.set_num_threads(2)
    assert torch.equal(torch.compile(answer, backend="aot_eager", fullgraph=True)(*its), expected)
    assert torch.equal(torch.func.grad(lambda q: answer(q, *its[1:]).sin().sum())(its[0]), grad)
    assert torch.equal(torch.func.vmap(answer)(*(x[:, None] for x in its))[:, 0], expected)


ELSEWHERE = """
import atexit, multiprocessing, os, sys, threading, time, warnings
import torch
import saccade as sc
from saccade import masks
from saccade.engine.kernels import fused_threads

fused_threads._SMALLEST_CALL = fused_threads._SMALLEST_SHARE = 0
fused_threads._PreemptionMonitor.is_frequent = lambda watch, threads: True
torch.set_num_threads(2)
x = torch.linspace(-1.0, 1.0, 2 * 960 * 16).reshape(1, 2, 960, 16).sin()  # so small that torch itself starts no thread

def run():
    return sc.attention(x, x, x, masks.Window(70, 30), impl="fused")

def check():
    assert torch.equal(run(), expected) and fused_threads._pool is not None

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, item):
        return run()[0, 0, item]
"""

PROGRAMS = {
    "fork": """
        expected = run()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            check()
            assert len(threading.enumerate()) == 3
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        check()
    """,
    "fork while threads are at work": """
        expected = run()
        over = threading.Event()
        def work():
            while not over.is_set():
                check()
        thread = threading.Thread(target=work)
        thread.start()
        for _ in range(10):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                child = os.fork()
            if not child:
                check()
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        over.set()
        thread.join()
    """,
    "workers of a loader": """
        if __name__ == "__main__":
            expected = run()
            for kind in ("fork", "spawn"):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    loader = torch.utils.data.DataLoader(Items(), num_workers=2, multiprocessing_context=kind)
                    rows = torch.cat(list(loader))
                assert torch.equal(rows, expected[0, 0, :4])
    """,
    "the end of a program": """
        expected = run()
        atexit.register(check)
        def work(times):
            for _ in range(times):
                check()
        threading.Thread(target=work, args=(20,)).start()
    """,
    "a first call at the end": """
        def first():
            global expected
            expected = run()
            torch.set_num_threads(1)
            assert torch.equal(run(), expected)
        atexit.register(first)
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.skipif(sys.platform == "win32", reason="programs fork")
def test_programs(name: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(ELSEWHERE + textwrap.dedent(PROGRAMS[name]))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
