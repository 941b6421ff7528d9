"""The reference: HuggingFace's own model, loaded by HuggingFace's own code, one prompt at a time, no padding.

Shares nothing with weft's loading, models or attention, so that a fault cannot hide in both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from weft.models.checkpoint.interface import TokenizerLocation
from weft.testing.continuation import Continuation


class Oracle:
    """HuggingFace `generate`, greedy; and teacher-forced scores of given tokens, in one pass."""

    def __init__(self, location: TokenizerLocation, *, dtype: torch.dtype, device: torch.device) -> None:
        """`location`: the folder (and GGUF file) of the checkpoint. Needs `accelerate` for a GGUF."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        options = {} if location.gguf_file is None else {"gguf_file": location.gguf_file}
        model = AutoModelForCausalLM.from_pretrained(location.folder, dtype=dtype, local_files_only=True, **options)
        # Weights mapped from a file are aligned by chance, and alignment changes the last bit of a product.
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        self.model: Any = model.eval().to(device)
        self._device = device
        eos = self.model.generation_config.eos_token_id
        self.eos_token_ids = frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)

    def generate(self, prompt_token_ids: Sequence[int], max_new_tokens: int) -> Continuation:
        """Greedy continuation, with the raw logits of each step."""
        from transformers import GenerationConfig

        prompt = torch.tensor([list(prompt_token_ids)], device=self._device)
        ends = sorted(self.eos_token_ids) or None
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=ends,
            pad_token_id=ends[0] if ends else 0,
            repetition_penalty=1.0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.inference_mode():
            result = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        token_ids = tuple(result.sequences[0, prompt.shape[1] :].tolist())
        return Continuation(
            prompt_token_ids=tuple(prompt_token_ids),
            token_ids=token_ids,
            logits=torch.cat(result.logits).float().cpu(),
            finish_reason="stop" if token_ids[-1] in self.eos_token_ids else "length",
        )

    @torch.inference_mode()
    def score(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Float[Tensor, "T V"]:
        """Logits of each step when these tokens are forced, from one pass over prompt and tokens, without a cache."""
        sequence = torch.tensor([[*prompt_token_ids, *token_ids]], device=self._device)
        logits: Tensor = self.model(input_ids=sequence, use_cache=False).logits[0]
        return logits[len(prompt_token_ids) - 1 : -1].float().cpu()
