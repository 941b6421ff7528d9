"""The catalogue of weft's planted faults: `pytest --planted` plants a sample of them, `--planted=all` every one."""

from tests.planted import (
    allocator,
    attention,
    gates,
    harness,
    history,
    invariance,
    judges,
    kernels,
    loading,
    model,
    prefix_cache,
    products,
    remote,
    sampling,
    scheduler,
    startup,
    steps,
    text,
)
from weft.testing.planted.fault import Catalogue

CATALOGUE = Catalogue(
    parts={
        "attention": attention.FAULTS,
        "kernels": kernels.FAULTS,
        "products": products.FAULTS,
        "model": model.FAULTS,
        "allocator": allocator.FAULTS,
        "prefix cache": prefix_cache.FAULTS,
        "scheduler": scheduler.FAULTS,
        "sampling": sampling.FAULTS,
        "stops": text.STOPS,
        "detokenising": text.DETOKENISING,
        "loading": loading.FAULTS,
        "graphs": steps.GRAPHS,
        "overlap": steps.OVERLAP,
        "invariance": invariance.FAULTS,
        "startup": startup.FAULTS,
        "harness": harness.FAULTS,
        "laws": judges.LAWS,
        "oracle": judges.ORACLE,
        "speed gates": gates.GATES,
        "history": history.FAULTS,
        "collection": gates.COLLECTION,
        "remote": remote.FAULTS,
    },
    sources=("weft", "tests", "conftest.py", "main.py", "pytest_weft.py", "pyproject.toml"),
    preload=(
        *("pytest", "hypothesis.stateful", "beartype.claw", "jaxtyping", "safetensors.torch", "gguf", "tqdm"),
        *("torch", "torch._inductor.config", "transformers", "transformers.models.llama.modeling_llama"),
        *("triton", "triton.runtime.interpreter"),
    ),
    # On the CPU, so that a fault is judged alike everywhere and a GPU is left to those who need it.
    environment={"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "HYPOTHESIS_PROFILE": "planted"},
)
