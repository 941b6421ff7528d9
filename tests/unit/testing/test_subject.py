"""Subjects: weft's engine under test."""

import gc
import weakref
from pathlib import Path

from weft.config import EngineConfig
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.source import open_checkpoint
from weft.testing.subject import Subject
from weft.testing.tiny import save_tiny_model


def test_a_model_leaves_with_its_subject(tmp_path: Path) -> None:
    """Forty of them, one after another, once filled 23 GiB: each waited in a circle for the garbage collector."""
    folder = str(save_tiny_model(tmp_path, "llama"))
    subject = Subject(EngineConfig.of(model=folder, device="cpu", max_model_len=32), open_checkpoint(folder))
    subject.run([[1, 2, 3]], [SamplingParams(temperature=0, max_tokens=3)])
    model = weakref.ref(subject.engine.model)
    gc.disable()
    try:
        del subject
        assert model() is None
    finally:
        gc.enable()
