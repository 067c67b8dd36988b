"""Running a function on several ranks: processes over gloo, with a time after which a rank that waits has failed."""

from __future__ import annotations

import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 60  # after which a rank that waits for another is an error
# Ranks are forks of a process that has imported torch and nothing else that lives in threads, which takes seconds.
_PROCESSES = mp.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["saccade.distributed", "saccade.integrations.transformers"])


def on_ranks(number, function, *arguments, seconds=SECONDS, may_die=False):
    """Run ``function(rank, *arguments)`` on so many ranks; what each returned, or the text of what it raised."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _PROCESSES.Process(target=_run, args=(rank, number, folder, function, arguments, seconds))
            for rank in range(number)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert may_die or all(process.exitcode == 0 for process in processes)
        files = [Path(folder) / f"{rank}.pt" for rank in range(number)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def _run(rank, number, folder, function, arguments, seconds):
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), number)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=number, timeout=timedelta(seconds=seconds))
    try:
        found = function(rank, *arguments)
    except Exception:
        found = traceback.format_exc()
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    os._exit(0)  # whatever the others wait for: what there was to tell is told
