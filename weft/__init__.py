"""weft: a small LLM serving engine that proves itself.

Names are imported on first use, so that `import weft` costs neither torch nor triton.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from weft.config import EngineConfig as EngineConfig
    from weft.inference.sampling_params import SamplingParams as SamplingParams
    from weft.llm import LLM as LLM
    from weft.outputs import CompletionOutput as CompletionOutput
    from weft.outputs import Logprob as Logprob
    from weft.outputs import RequestOutput as RequestOutput

_HOMES = {
    "LLM": "weft.llm",
    "SamplingParams": "weft.inference.sampling_params",
    "RequestOutput": "weft.outputs",
    "CompletionOutput": "weft.outputs",
    "Logprob": "weft.outputs",
    "EngineConfig": "weft.config",
}

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "Logprob", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
