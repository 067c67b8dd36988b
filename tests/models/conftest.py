"""The trained model, loaded once by us and once by transformers."""

import pytest
from transformers import BertModel

from saccade.models.bundled import minilm, minilm_folder


@pytest.fixture(scope="session")
def encoder():
    return minilm()


@pytest.fixture(scope="session")
def bert():
    return BertModel.from_pretrained(minilm_folder(), attn_implementation="eager", local_files_only=True).eval()
