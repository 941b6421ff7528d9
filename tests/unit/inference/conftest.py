"""Engines on a tiny random Llama."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft import EngineConfig
from weft.inference.engine import Engine
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.tiny import save_tiny_model

Build = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """97 tokens, 64 positions, EOS 1 and 5; weights large enough that each prompt has a text of its own."""
    return save_tiny_model(
        tmp_path_factory.mktemp("tiny"),
        "llama",
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=[1, 5],
        initializer_range=0.5,
    )


@pytest.fixture(scope="session")
def build(tiny_llama: Path) -> Build:
    """An engine of the tiny model with these options."""

    def build(
        sampler: Any = None, observe: Any = None, clock: Callable[[], float] = time.monotonic, **options: Any
    ) -> Engine:
        config = EngineConfig.of(**{"model": str(tiny_llama), "device": "cpu"} | options)
        return Engine(config, open_checkpoint(str(tiny_llama)), sampler=sampler, observe=observe, clock=clock)

    return build
