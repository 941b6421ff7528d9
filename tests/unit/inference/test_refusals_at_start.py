"""Who cannot be served is told so in a sentence, and by options alone before a checkpoint is looked for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft import LLM
from weft.attention import PREFERRED, find_backend
from weft.attention.interface import AttentionBackend
from weft.errors import ConfigError
from weft.inference.engine import Engine

Build = Callable[..., Engine]


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"policy": "fcf"}, "unknown policy='fcf'", "did you mean 'fcfs'?"),
        ({"max_prefills_per_round": 2}, "max_prefills_per_round=2 says nothing to policy='fcfs'", "prefill_first"),
        ({"attention_backend": "paged_trito"}, "unknown attention_backend='paged_trito'", "'paged_triton'"),
        ({"device": "tpu"}, "unknown device='tpu'", "cpu"),
        ({"device": "cuda:99"}, "device='cuda:99' but torch sees", "cpu"),
    ],
)
def test_what_no_model_could_make_right_is_refused_before_a_checkpoint_is_looked_for(
    options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("./there-is-no-such-folder", **options)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


def test_a_backend_that_is_asked_for_and_cannot_is_named_with_the_reason(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError) as caught:
        build(attention_backend="paged_triton")
    assert caught.value.message == (
        "attention_backend='paged_triton' cannot run this model on cpu in float32: Triton kernels run on CUDA, not on "
        "cpu, except in their interpreter (TRITON_INTERPRET=1)"
    )
    assert caught.value.hint == "attention_backend='auto' takes the first that can"


class Unable:
    """A backend that gives a reason."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def supports(self, spec: object, dtype: torch.dtype, device: torch.device) -> str:
        return f"{self._backend.name} will not"


def test_where_no_backend_can_each_gives_its_reason(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.inference.backing.find_backend", lambda name: Unable(find_backend(name)))
    with pytest.raises(ConfigError) as caught:
        build()
    reasons = "; ".join(f"{name}: {name} will not" for name in PREFERRED)
    assert caught.value.message == f"no attention backend can run this model on cpu in float32: {reasons}"
    assert caught.value.hint == "a backend of your own can: docs/conformance.md"
