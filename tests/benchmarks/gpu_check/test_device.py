"""The seam: what is asked of CUDA, with a stand-in for torch.cuda; and what the rehearsal puts in its place."""

import math
import types
from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import varlen

import saccade as sc
from benchmarks.gpu_check import device as seam
from benchmarks.gpu_check import rehearsal
from saccade import masks


class Event:
    """A CUDA event whose clock says 250 ms."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, other):
        return 250.0


@pytest.fixture
def cuda(monkeypatch):
    """The functions of torch.cuda that the seam calls; the names of the calls are kept."""
    calls = []

    def noted(name, answer=None):
        return lambda *args: calls.append(name) or answer

    about = types.SimpleNamespace(name="a card", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)
    for name in ("init", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, noted(name))
    monkeypatch.setattr(torch.cuda, "get_device_properties", noted("properties", about))
    monkeypatch.setattr(torch.cuda, "memory_allocated", noted("allocated", 1000))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", noted("most", 5000))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return calls


def test_what_is_asked_of_cuda(cuda, monkeypatch):
    monkeypatch.setattr(seam.shutil, "which", lambda name: None)
    device = seam.device_named("cuda")
    assert (device.name, device.compiler) == ("cuda", "inductor")
    device.prepare()
    facts = device.facts()
    assert (facts["card"], facts["capability"], facts["processors"]) == ("a card", "9.0", 132)
    assert device.seconds(lambda: cuda.append("called")) == 0.25
    assert cuda[-3:] == ["synchronize", "called", "synchronize"]
    assert device.peak_bytes(lambda: cuda.append("called")) == 4000
    assert cuda.index("reset_peak_memory_stats") < len(cuda) - 1 - cuda[::-1].index("called") < len(cuda) - 1
    device.synchronize()
    assert cuda[-1] == "synchronize"


def test_memory_is_poisoned_for_small_and_for_large_tensors(cuda, monkeypatch):
    sizes = []
    monkeypatch.setattr(torch, "full", lambda shape, value, device: sizes.append((shape[0], math.isnan(value), device)))
    seam.Cuda().poison()
    assert {size for size, *_ in sizes} == {1 << 17, 1 << 20, 1 << 24}
    assert {(is_nan, device) for _, is_nan, device in sizes} == {(True, "cuda")}


def test_kernels_that_took_longest_come_first(cuda, monkeypatch):
    times = {"gemm": 3.0, "cpu only": 0.0, "flash": 9.0}
    events = [types.SimpleNamespace(key=key, self_device_time_total=time) for key, time in times.items()]
    seen = types.SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(seam, "profile", lambda activities: nullcontext(seen))
    assert seam.Cuda().kernels(lambda: cuda.append("called")) == ["flash", "gemm"]
    assert cuda[-2:] == ["called", "synchronize"]


def test_backends_are_forced(monkeypatch):
    forced = []
    monkeypatch.setattr(seam, "sdpa_kernel", lambda backend: forced.append(backend) or nullcontext())
    monkeypatch.setattr(varlen, "varlen_attn", rehearsal.packed_attention)
    query = torch.randn(1, 2, 5, 8)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    out = seam.Cuda().cudnn(query, query, query, seen)
    assert [backend.name for backend in forced] == ["CUDNN_ATTENTION"]
    expected = sc.attention(query, query, query, masks.Causal(), impl="reference")
    torch.testing.assert_close(out, expected)
    flat = query[0].transpose(0, 1)
    packed = seam.Cuda().varlen(flat, flat, flat, torch.tensor([0, 5], dtype=torch.int32), 5)
    torch.testing.assert_close(packed.transpose(0, 1)[None], expected)


@pytest.mark.parametrize("printed, found", [("a card, 1, 2, 3, 4, 5, 6, 7", 8), ("no devices were found", 0)])
def test_what_nvidia_smi_says(printed, found, monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{printed}'\n", encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    facts = seam.Processor().facts()
    assert len(facts) == 1 or found
    if found:
        assert facts["clocks_sm"] == "3"
        assert facts["temperature_gpu"] == "7"


def test_a_processor_does_everything_that_a_gpu_does():
    device = seam.device_named("cpu")
    assert device.seconds(lambda: None) >= 0.0
    assert device.peak_bytes(lambda: torch.zeros(1000, 1000)) >= 4_000_000
    assert "aten::mm" in device.kernels(lambda: torch.ones(4, 4) @ torch.ones(4, 4))
    device.poison()
    device.synchronize()


def test_a_device_says_what_it_lacks():
    x = torch.zeros(1, 1, 1, 1)
    device = seam.Device()
    for ask in (
        device.facts,
        lambda: device.seconds(len),
        lambda: device.peak_bytes(len),
        lambda: device.kernels(len),
        lambda: device.cudnn(x, x, x, x),
        lambda: device.varlen(x, x, x, x, 1),
    ):
        with pytest.raises(NotImplementedError, match=r"^$"):
            ask()
    device.prepare()


def test_a_rehearsal_ends():
    x = torch.randn(1, 2, 20, 16, dtype=torch.bfloat16)
    with rehearsal.pretend():
        assert sc.attention(x, x, x, masks.Causal(), impl="varlen").shape == x.shape
    with pytest.raises(sc.UnsupportedError, match="it runs on cuda"):
        sc.attention(x, x, x, masks.Causal(), impl="varlen")
