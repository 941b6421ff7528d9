"""The chain that this folder holds up: HuggingFace generate = one request = a batch = chunked = any order.

Each link is tier A (tokens, lengths, finish reasons, logits within 1e-3); `test_bitwise.py` adds equality of bits at
equal shapes, `test_planted_faults.py` shows that the judge convicts.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from weft.models.checkpoint.interface import Checkpoint
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.oracle import Oracle
from weft.tokenizer.hub import HubTokenizer


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where weft runs; the reference of tier A stays on the CPU."""
    name: str = request.param
    return name


class InMemory:
    """A checkpoint whose weights are read from disk once, for suites that build many engines of it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config, self.generation = checkpoint.config, checkpoint.generation
        self.stored_dtype, self.tokenizer = checkpoint.stored_dtype, checkpoint.tokenizer
        self.num_tensors = checkpoint.num_tensors
        self._tensors = list(checkpoint.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors)


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    return InMemory(open_checkpoint("smollm2-135m"))


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> HubTokenizer:
    location = open_checkpoint("smollm2-135m").tokenizer
    return HubTokenizer(location.folder, location.gguf_file)


@pytest.fixture(scope="session")
def smollm2_oracle() -> Oracle:
    return Oracle(open_checkpoint("smollm2-135m").tokenizer, dtype=torch.float32, device=torch.device("cpu"))
