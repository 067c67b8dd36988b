"""The steps of the GPU check where something is missing or wrong; that they run is shown by the rehearsal."""

import sys
import types
import zipfile

import pytest
import torch
from benchmarks.gpu_check.device import Processor
from benchmarks.gpu_check.finding import Finding, read
from benchmarks.gpu_check.steps import Context

import saccade as sc
from benchmarks.gpu_check import canaries, child, cpu_kernel, environment, laws, memory, models, peers, scenes, speed
from saccade import masks, testing
from saccade.engine import dispatch
from saccade.engine.kernels.sdpa import Sdpa

FOREVER = 1e12
CONTEXT = Context(Processor(), "quick", FOREVER)
LATE = CONTEXT._replace(ends=0.0)


def test_a_package_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert environment._imported("numpy").ok is False
    assert environment._imported("triton").ok is None  # only a GPU needs it, and torch.compile is tried
    assert environment._imported("torch").figures == {"version": torch.__version__}


def test_the_flash_backend_of_flex_is_looked_for(monkeypatch):
    assert environment._flash_backend_of_flex().ok is None
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.ModuleType("cute"))
    assert environment._flash_backend_of_flex().ok


def test_a_compiler_that_fails(monkeypatch):
    assert environment._compiles(LATE).text == "not tried: no time was left"

    def broken(*_, **__):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "compile", broken)
    assert environment._compiles(CONTEXT)[:3] == ("torch.compile", "RuntimeError: no C compiler", False)


def test_a_canary_that_raises_is_not_the_end(monkeypatch):
    def refuses(*_):
        raise ValueError("torch takes no such tensors any more")

    monkeypatch.setattr(Processor, "cudnn", refuses)
    monkeypatch.setattr(canaries, "_varlen_padding", lambda context: iter([Finding("next", "ran", True)]))
    monkeypatch.setattr(canaries, "_recompile_limit", lambda context: iter(()))
    first, second = canaries.measure(CONTEXT)
    assert first.ok is False
    assert "ValueError: torch takes no such tensors" in first.text
    assert second == Finding("next", "ran", True)


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("is_wrong", [True, False])
def test_what_is_wrong_must_be_flagged_and_nothing_else(shown, is_wrong):
    query, key, value = torch.randn(3, 1, 2, 20, 8)
    found = testing.first_use(lambda q, k, v, mask: is_wrong + sc.attention(q, k, v), query, key, value)
    assert canaries._flagged("a bug", shown, found).ok is (shown == is_wrong)


def test_a_bug_of_torch_that_is_gone_is_said_to_be_gone(monkeypatch):
    monkeypatch.setattr(Processor, "cudnn", lambda self, q, k, v, mask: sc.attention(q, k, v, masks.Causal()))
    alone, first_use, ours = canaries._cudnn_gradient(CONTEXT)
    assert (alone.text, first_use.text, first_use.ok, ours.ok) == ("not shown", "not flagged", True, True)


def test_a_law_that_is_broken_is_told_with_the_kernel(monkeypatch):
    (tiled,) = [kernel for kernel in dispatch.KERNELS if kernel.name == "tiled"]
    forward = type(tiled).forward
    monkeypatch.setattr(
        type(tiled), "forward", lambda self, *args: (0.0 * forward(self, *args)[0], forward(self, *args)[1])
    )
    oracle = [law for law in laws.LAWS if law.name == "oracle"]
    finding = laws._judged(CONTEXT, "tiled", oracle, laws.CASES[:1])
    assert (finding.name, finding.ok) == ("tiled: laws on causal", False)
    assert "1 broken: oracle[causal-float32] broken: the output" in finding.text
    refused = laws._judged(CONTEXT, "sdpa", oracle, [case for case in laws.CASES if case.name == "window"])
    assert (refused.text, refused.ok) == ("it refuses this case", None)


def test_files_with_tests_for_a_gpu_are_found():
    found = laws._marked()
    assert "tests/auditing/test_gpu.py" in found
    assert "tests/laws/test_laws.py" not in found


def test_tests_that_fail_or_find_no_time(monkeypatch, tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text("def test_a(): pass\ndef test_b(): assert 1 == 2\n", encoding="ascii")
    monkeypatch.setitem(laws._TESTS, "quick", [str(path), "-c", "/dev/null"])
    one, other, all_of_them = laws._tests(CONTEXT)
    assert [one.ok, other.ok, all_of_them.ok] == [True, False, False]
    assert "assert 1 == 2" in all_of_them.text
    monkeypatch.setattr(laws, "_SHORTEST", 0.1)
    (ended,) = laws._tests(LATE)
    assert (ended.ok, ended.text[:57]) == (None, "pytest ended with exit status 124 (124: no time was left)")


def test_laws_end_when_no_time_is_left(monkeypatch):
    assert list(laws.measure(LATE)) == []
    monkeypatch.setattr(laws, "KERNELS", ("flex",))
    monkeypatch.setattr(laws, "_tests", lambda context: iter(()))
    assert list(laws.measure(LATE)) == []


def test_a_ratio_is_judged_on_a_gpu_alone():
    gpu = CONTEXT._replace(level="cuda")
    assert speed._fast_enough(gpu, {"FLASH": 0.9, "CUDNN": 2.0}) is True
    assert speed._fast_enough(gpu, {"FLASH": 0.8, "CUDNN": 2.0}) is False
    assert speed._fast_enough(gpu, {}) is None
    assert speed._fast_enough(CONTEXT, {"FLASH": 0.1}) is None


def test_speed_of_what_raises_and_of_backends_that_differ(monkeypatch):
    scene = scenes.Scene("causal", 32, (2, 2), 16)
    monkeypatch.setitem(peers.PEERS, "FLASH", lambda scene, device: lambda q, k, v: 0.0 * q)
    found = {each.name: each for each in speed._scene(CONTEXT, scene, ["FLASH"])}
    assert found["causal 32: same outputs"].ok is False
    assert "FLASH differs from saccade by" in found["causal 32: same outputs"].text

    def raises(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(sc, "attention", raises)
    (finding,) = speed._scene(CONTEXT, scene, ["FLASH"])
    assert (finding.ok, finding.text) == (False, "raised OutOfMemoryError: out of memory")


def test_speed_without_time():
    texts = [each.text for each in speed.measure(LATE)]
    assert texts[0] == "not timed beside FLASH, CUDNN, EFFICIENT, varlen: no time was left"
    assert texts[-1] == "0 graphs over 0 lengths"


@pytest.mark.parametrize("level", ["quick", "cpu"])
def test_scenes_count_their_pairs(level):
    for scene in scenes.scenes(level):
        mask = masks.Full() if scene.mask is None else scene.mask
        assert int(mask.to_dense(scene.q_len, scene.length).sum()) == scene.pairs
        assert scene.flops(backward=False) == 4 * scene.heads[0] * scene.pairs * scene.width
        if scene.kind == "documents":
            assert sum(scene.documents) == scene.length
            assert min(scene.documents) > 0


def test_scenes_on_a_gpu_are_those_that_were_asked_for():
    named = [str(scene) for scene in scenes.scenes("cuda")]
    assert named[:6] == [
        *("causal 2,048", "full 2,048", "window 16,384", "longformer 16,384", "documents 32,768", "decode 32,768")
    ]
    assert named[6:] == ["causal 8,192", "full 8,192", "window 65,536", "longformer 65,536"]
    (documents,) = [scene for scene in scenes.scenes("cuda") if scene.kind == "documents"]
    assert (len(documents.documents), sum(documents.documents)) == (32, 32_768)


def test_backends_say_what_they_do_not_take(monkeypatch):
    window = scenes.Scene("window", 70_000, (2, 2), 16, 100)
    for name, reason in (("FLASH", "it takes no mask"), ("CUDNN", "its mask would take 5 GiB")):
        with pytest.raises(peers.RefusedError, match=reason):
            peers.peer(name, window, CONTEXT.device)
    monkeypatch.delattr(peers.flex, "FlexKernelOptions")
    with pytest.raises(peers.RefusedError, match="no such option"):
        peers.peer("Flex FLASH", window, CONTEXT.device)


def test_the_flash_backend_is_asked_for_by_name(monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *x, **options: seen.append(options) or x[0])
    device = types.SimpleNamespace(name="cuda", compiler="inductor")
    monkeypatch.setattr(peers, "block_mask", lambda *args, block_size, device: (block_size, device))
    x = torch.zeros(1, 2, 8, 16)
    assert peers.peer("Flex FLASH", scenes.Scene("causal", 8, (2, 2), 16), device)(x, x, x) is x
    assert seen == [{"enable_gqa": False, "block_mask": ((256, 128), "cuda"), "kernel_options": {"BACKEND": "FLASH"}}]


def test_memory_of_what_raises_is_a_failure(monkeypatch):
    def raises(*_, **__):
        raise torch.OutOfMemoryError("80 GiB are not enough")

    monkeypatch.setattr(sc, "attention", raises)
    finding = memory._growth(CONTEXT, "causal, auto", masks.Causal(), "auto")
    assert finding.ok is False
    assert "length 256 raised OutOfMemoryError: 80 GiB" in finding.text


def test_memory_without_time(monkeypatch):
    monkeypatch.setattr(memory, "_growth", lambda *_: Finding("growth", ""))
    assert len(list(memory.measure(LATE))) == 3


def test_models_that_raise_and_models_without_time(monkeypatch):
    assert list(models.measure(LATE)) == []

    def raises(model, tokens, its):
        raise RuntimeError("a device-side assert")

    monkeypatch.setattr(models, "MODELS", {"Qwen3": models.MODELS["Qwen3"]})
    for name in ("_audit", "_record", "_training_step", "_generate"):
        monkeypatch.setattr(models, name, raises)
    found = list(models.measure(CONTEXT))
    assert [each.name for each in found] == [
        f"Qwen3: {name}" for name in ("audit", "record", "training step", "generate")
    ]
    assert {(each.text, each.ok) for each in found} == {("raised RuntimeError: a device-side assert", False)}


def test_a_recurrence_whose_attention_was_replaced_would_be_a_failure(monkeypatch):
    monkeypatch.setattr(sc, "replace_attention", lambda model: ())
    model = torch.nn.Linear(2, 2)
    said = models._training_step(model, torch.zeros(1, 2), models.MODELS["Mamba-2"])
    assert said == ("replace_attention took a model without attention", False)


@pytest.fixture
def _not_installed(monkeypatch):
    monkeypatch.setattr(cpu_kernel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_not_installed")
def test_the_cpu_kernel_is_compiled_where_there_is_a_compiler(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-dumpmachine*) echo x86_64-linux-gnu; exit 0;; *--version*) echo g++; exit 0;; esac\n'
        'while [ $# -gt 0 ] && [ "$1" != -o ]; do shift; done\n'
        '[ $# -lt 2 ] || : > "$2"\n',
        encoding="ascii",
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    folder = tmp_path / "made"
    folder.mkdir()
    assert cpu_kernel._installed(CONTEXT, folder).startswith("compiled here in")
    assert {path.name for path in (folder / "saccade_cpu").iterdir()} == {"saccade_cpu.so", "__init__.py"}
    assert sys.path[0] == str(folder)


@pytest.mark.usefixtures("_not_installed")
@pytest.mark.parametrize("compiler", ["false", "a-compiler-that-is-not-here"])
def test_the_cpu_kernel_comes_from_a_wheel_where_there_is_no_compiler(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(cpu_kernel, "_WHEELS", tmp_path / ".whl")
    said = cpu_kernel._installed(CONTEXT, tmp_path)
    assert "no wheel was carried; `pip wheel ./native" in said
    why = (
        "there is no C++ compiler"
        if compiler != "false"
        else "the compiler failed: saccade-cpu: no working C++ compiler false"
    )
    assert why in said
    wheel = tmp_path / "saccade_cpu-0.1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("saccade_cpu/__init__.py", "")
    folder = tmp_path / "made"
    assert cpu_kernel._installed(CONTEXT._replace(wheel=wheel), folder).startswith(f"from {wheel.name}, since {why}")
    assert (folder / "saccade_cpu" / "__init__.py").exists()
    assert sys.path[0] == str(folder)


@pytest.mark.parametrize(
    ("origin", "ok"), [("not measured: there is no C++ compiler, ...", None), ("the compiler failed: ...", False)]
)
def test_a_machine_on_which_the_cpu_kernel_cannot_be_had(origin, ok, monkeypatch):
    monkeypatch.setattr(cpu_kernel, "_installed", lambda context, folder: origin)
    monkeypatch.setattr(cpu_kernel.native.abilities, "__wrapped__", lambda: None, raising=False)
    monkeypatch.setitem(sys.modules, "saccade_cpu", None)
    try:
        (finding,) = cpu_kernel.measure(CONTEXT)
    finally:
        cpu_kernel.native.abilities.cache_clear()
        cpu_kernel.native.is_on.cache_clear()
    assert finding[:3] == ("saccade-cpu", origin, ok)


def test_a_cpu_kernel_that_is_wrong_is_not_timed(monkeypatch):
    attention = sc.attention
    monkeypatch.setattr(sc, "attention", lambda *tensors, impl: 1.0 + attention(*tensors, impl="tiled"))
    (finding,) = cpu_kernel._case(CONTEXT, "window", torch.float32, [1])
    assert finding.ok is False
    assert finding.text.startswith("wrong: ")


def test_the_cpu_kernel_without_time(monkeypatch):
    attention = sc.attention
    monkeypatch.setattr(sc, "attention", lambda *tensors, impl: attention(*tensors, impl="tiled"))
    assert list(cpu_kernel._case(LATE, "full", torch.float32, [1])) == []


def test_a_call_is_timed_as_often_as_there_is_time(monkeypatch):
    calls = []
    monkeypatch.setattr(cpu_kernel, "seconds", lambda call: calls.append(call) or 0.25)
    assert cpu_kernel._median(CONTEXT._replace(level="cuda"), len) == 0.25
    assert len(calls) == 4


def test_a_child_writes_each_finding_before_the_next_and_what_first_use_says(monkeypatch, tmp_path):
    path, seen = tmp_path / "findings", []

    def measure(context):
        for name in "ab":
            seen.append([each.name for each in read(path)])
            yield Finding(name, "a text")
            query = torch.randn(1, 1, 8, 8)

            class Wrong(Sdpa):
                def forward(self, given, value, dropped):
                    out, lse = super().forward(given, value, dropped)
                    return 2.0 * out, lse

            with (
                pytest.warns(UserWarning, match="differed from the definition"),
                pytest.raises(sc.UnsupportedError, match="sdpa"),
            ):
                sc.attention(query, query, query, impl=Wrong())

    step = types.ModuleType("benchmarks.gpu_check.environment")
    step.measure = measure
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_check.environment", step)
    monkeypatch.setattr("saccade.engine.first_use_check.registry._RECORDS", {})
    monkeypatch.setattr(child, "device_named", lambda name: types.SimpleNamespace(prepare=lambda: None))
    child.main(["environment", "--findings", str(path), "--device", "cpu", "--seconds", "5", "--quick"])
    assert seen == [[], ["a"]]
    assert [each.name for each in read(path)][:3] == ["a", "b", "sdpa: first use"]


def test_a_step_that_needs_no_attention_has_nothing_said_by_first_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "saccade.engine.first_use_check.registry")
    assert child._accused(set()) == []
