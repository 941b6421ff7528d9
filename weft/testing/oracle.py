"""The reference: HuggingFace's own model, loaded by HuggingFace's own code, one prompt at a time, no padding.

Shares nothing with weft's loading, models or attention, so that a fault cannot hide in both.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from weft.models.checkpoint.interface import TokenizerLocation
from weft.testing.continuation import Continuation
from weft.testing.oracle_cache import OracleCache, weights_digest


class Oracle:
    """HuggingFace `generate`, greedy; and teacher-forced scores of given tokens, in one pass.

    cache: where results were kept and are found again, if a folder was named; None computes every one.
    """

    def __init__(
        self,
        location: TokenizerLocation,
        *,
        dtype: torch.dtype,
        device: torch.device,
        cache_folder: Path | str | None = None,
    ) -> None:
        """`location`: the folder (and GGUF file) of the checkpoint. Needs `accelerate` for a GGUF.

        cache_folder: keep results there, keyed by contents of the weights, versions of torch and transformers, dtype,
            device and prompt. The model is then loaded at the first result that is not there.
        Raises: ConfigError if the folder cannot be written.
        """
        self._location, self._dtype, self._device = location, dtype, device
        self.cache = None if cache_folder is None else OracleCache(cache_folder)
        if self.cache is None:
            _ = self.model  # a checkpoint that cannot be loaded says so here

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        location = self._location
        options = {} if location.gguf_file is None else {"gguf_file": location.gguf_file}
        model = AutoModelForCausalLM.from_pretrained(
            location.folder, dtype=self._dtype, local_files_only=True, **options
        )
        # Weights mapped from a file are aligned by chance, and alignment changes the last bit of a product.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model.eval().to(self._device)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self.model.generation_config.eos_token_id
        return frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        max_new_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
    ) -> Continuation:
        """Greedy continuation, with the raw logits of each step.

        stop_token_ids: end it beside the model's EOS.   seed: sample instead, at temperature 1, with torch's generator.
        """
        prompt = list(prompt_token_ids)
        call = {"max_new_tokens": max_new_tokens, "stop_token_ids": sorted(stop_token_ids), "seed": seed}
        found = self._cached(
            {"call": "generate", "prompt": prompt, **call},
            lambda: self._generate(prompt, max_new_tokens, stop_token_ids, seed),
        )
        return Continuation(
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(found["token_ids"].tolist()),
            logits=found["logits"],
            finish_reason="stop" if found["stopped"] else "length",
        )

    def score(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Float[Tensor, "T V"]:
        """Logits of each step when these tokens are forced, from one pass over prompt and tokens, without a cache."""
        prompt, tokens = list(prompt_token_ids), list(token_ids)
        key = {"call": "score", "prompt": prompt, "token_ids": tokens}
        return self._cached(key, lambda: self._score(prompt, tokens))["logits"]

    def _generate(
        self, prompt: list[int], max_new_tokens: int, stop_token_ids: Sequence[int], seed: int | None
    ) -> dict[str, Tensor]:
        from transformers import GenerationConfig

        sampling = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        token_ids = torch.tensor([prompt], device=self._device)
        ends = sorted(self.eos_token_ids | set(stop_token_ids)) or None
        config = GenerationConfig(
            **sampling,
            max_new_tokens=max_new_tokens,
            eos_token_id=ends,
            pad_token_id=ends[0] if ends else 0,
            repetition_penalty=1.0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.inference_mode(), torch.random.fork_rng(enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            result = self.model.generate(token_ids, attention_mask=torch.ones_like(token_ids), generation_config=config)
        tokens = result.sequences[0, len(prompt) :].cpu()
        return {
            "token_ids": tokens,
            "logits": torch.cat(result.logits).float().cpu(),
            "stopped": torch.tensor(int(tokens[-1]) in (ends or ())),
        }

    @torch.inference_mode()
    def _score(self, prompt: list[int], token_ids: list[int]) -> dict[str, Tensor]:
        sequence = torch.tensor([[*prompt, *token_ids]], device=self._device)
        logits: Tensor = self.model(input_ids=sequence, use_cache=False).logits[0]
        return {"logits": logits[len(prompt) - 1 : -1].float().cpu()}

    def _cached(self, call: Mapping[str, object], compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        return compute() if self.cache is None else self.cache.fetch({**self._conditions, **call}, compute)

    @cached_property
    def _conditions(self) -> dict[str, object]:
        """All that a result depends on beside the call; threads and instruction set move the last bits of a sum."""
        import transformers

        on_gpu = self._device.type == "cuda"
        processor = (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
        return {
            "weights": weights_digest(self._location.folder, self._location.gguf_file),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": str(self._dtype),
            "device": torch.cuda.get_device_name(self._device) if on_gpu else " ".join(map(str, processor)),
            "matmul": torch.get_float32_matmul_precision(),
        }
