"""``python -m benchmarks.model_features``: count what the attention of transformers' language models uses."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.generated_part import with_generated
from benchmarks.model_features.features import features_of
from benchmarks.model_features.table import written
from benchmarks.survey.architectures import Architecture, architectures
from saccade.caches.files.tensor_files import write_whole

COMMAND = "python -m benchmarks.model_features"
RESULTS = Path(__file__).parents[2] / "docs" / "model-features.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Look at every causal language model of the installed transformers, and write the results and the pages."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=main.__doc__)
    parser.add_argument("--page", action="store_true", help="look at nothing: write the pages from stored results")
    options = parser.parse_args(arguments)
    if not options.page:
        write_whole(RESULTS, memoryview((json.dumps(counted(), indent=0) + "\n").encode()))
    results = json.loads(RESULTS.read_text("utf-8"))
    for language in ("en", "zh"):
        page = RESULTS.parent / language / "model-features.md"
        page.write_text(with_generated(page.read_text("utf-8"), COMMAND, written(results, language)), "utf-8")


def counted() -> dict[str, Any]:
    """Return the features of every causal language model, and the names of those that cannot be built."""
    import transformers  # noqa: PLC0415  # an extra

    transformers.logging.set_verbosity_error()
    models: dict[str, list[str]] = {}
    failed: list[str] = []
    for one in architectures():
        if one.kind != "causal":
            continue
        sys.stderr.write(f"\r{len(models) + len(failed)}  {one.key:40}")
        try:
            models[one.name] = looked_at(one)
        except Exception as error:  # whatever a model of others raises; its name is in the results
            sys.stderr.write(f"\n{one.name}: {type(error).__name__}: {error}\n")
            failed.append(one.name)
    return {"version": transformers.__version__, "models": models, "failed": failed}


def looked_at(architecture: Architecture) -> list[str]:
    """Return the features of an architecture: of its default configuration, and of a small model's modules."""
    import transformers  # noqa: PLC0415  # an extra

    config = getattr(transformers, architecture.model).config_class()
    return features_of(config.get_text_config(decoder=True).to_dict(), architecture.make("eager"))


if __name__ == "__main__":
    main()
