"""The laws of engines (`weft.testing.laws`) as a suite: on a tiny random model, unless another is given."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from weft.models.checkpoint.source import open_checkpoint
from weft.testing.conformance.suite import ConformanceReport, concluded, require
from weft.testing.engines import open_engine
from weft.testing.engines.interface import EngineFactory, ModelUnderTest, checked
from weft.testing.laws import LAWS, judge
from weft.testing.oracle import Oracle
from weft.testing.reference import Reference, Remembered
from weft.testing.tiny import save_tiny_model
from weft.testing.trial import Trial

# As in the suite of weft's own engines: some of its answers end by an EOS id and some by length.
_TINY = {"num_hidden_layers": 2, "max_position_embeddings": 512, "eos_token_id": [3, 57, 90]}
_MAX_MODEL_LEN = 400
_LENGTHS = (1, 5, 12, 31)


def run_engine_conformance(
    engine: EngineFactory | str,
    *,
    model: ModelUnderTest | None = None,
    prompts: Sequence[tuple[int, ...]] | None = None,
    max_new_tokens: int = 12,
    reference: Reference | None = None,
) -> ConformanceReport:
    """Judge an engine: what `weft verify` does, as one line of a test.

    engine: called with the model and None; or a name (`weft`, `hf-cb`, `./my_engine.py`). See `docs/verify.md`.
    model: None is a tiny random Llama in float32 on the CPU, which has no tokenizer: an engine that takes text alone
    needs one of its own.   prompts: token ids; None draws a few.   reference: None is HuggingFace on that model.
    Returns: every law with its outcome, what the engine lacks being a reason not to judge. Raises: ConformanceError, an
    AssertionError that names each broken law, the prompt and the step; ConfigError if there is no such engine.
    """
    require(engine, callable(engine) or isinstance(engine, str), "a factory of engines, or the name of one")
    name = engine if isinstance(engine, str) else getattr(engine, "__name__", repr(engine))
    with tempfile.TemporaryDirectory() as folder:
        model = _tiny_model(Path(folder)) if model is None else model
        if prompts is None:
            random = Random(0)
            size = int(model.checkpoint.config["vocab_size"])
            prompts = [tuple(random.randrange(size) for _ in range(length)) for length in _LENGTHS]
        if reference is None:
            reference = Oracle(model.checkpoint.tokenizer, dtype=model.dtype, device=model.device)
        opened = open_engine(engine, model) if isinstance(engine, str) else checked(engine(model, None))
        try:
            trial = Trial(
                engine=opened,
                reference=Remembered(reference),
                model=model,
                prompts=prompts,
                max_new_tokens=max_new_tokens,
            )
            findings = [judge(law, trial) for law in LAWS]
        finally:
            opened.close()
    return concluded("engine", name, findings)


def _tiny_model(folder: Path) -> ModelUnderTest:
    path = str(save_tiny_model(folder, "llama", seed=3, **_TINY))
    return ModelUnderTest(
        name=path,
        checkpoint=open_checkpoint(path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=_MAX_MODEL_LEN,
    )
