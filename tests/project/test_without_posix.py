"""Python as on Windows, which lacks forks, locks of files and some signals: saccade needs none of them."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import importlib, mmap, os, pkgutil, signal, sys
import torch, numpy, matplotlib, tokenizers, safetensors.torch, typer, rich  # which bring a Windows of their own

for module in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix"):
    sys.modules[module] = None
LACKING = {
    os: "fork register_at_fork sched_getaffinity sched_setaffinity getuid geteuid getgid kill killpg setsid nice "
    "mkfifo wait4 waitpid uname getloadavg sysconf pread pwrite O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_CLOEXEC",
    signal: "SIGKILL SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGCHLD alarm setitimer pthread_sigmask",
    mmap: "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED PROT_READ PROT_WRITE MADV_HUGEPAGE",
}
for module, names in LACKING.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

import saccade as sc
names = [one.name for one in pkgutil.walk_packages(sc.__path__, "saccade.") if not one.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)

x = torch.randn(1, 2, 40, 8)
expected = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
torch.testing.assert_close(sc.attention(x, x, x, sc.masks.Causal()), expected)
big = torch.randn(1, 8, 2000, 64)  # buffers of this size ask for huge pages elsewhere
cache = sc.caches.KVCache()
torch.testing.assert_close(
    cache.attend(sc.mechanisms.Softmax(), big, big, big, mask=sc.masks.Causal()),
    torch.nn.functional.scaled_dot_product_attention(big, big, big, is_causal=True),
    rtol=0, atol=1e-5,
)
layer = sc.nn.MultiHeadAttention(16, 2)
with sc.record(layer, keep="qk") as recording:
    layer(torch.randn(1, 5, 16))
assert recording.runs(0)[0].matrix.to_dense().shape == (1, 2, 5, 5)

from saccade.cli import main
sys.argv = ["saccade", "look", "The cat sat.", "--out", sys.argv[1]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(len(names), "modules")
"""


@pytest.mark.ci
def test_imports_products_caches_recordings_and_figures_run(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", CODE, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    count, _, unit = run.stdout.splitlines()[-1].partition(" ")
    assert (int(count) > 300, unit) == (True, "modules")
    assert (tmp_path / "heatmap.png").exists()
