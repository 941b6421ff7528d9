"""Tiny random models whose tokens can be compared.

A raw random model is the worst case: its two best tokens lie closer than rounding, and one scaled up at its head alone
repeats one token for ever. Wide weights everywhere give margins clear of float32 noise and texts that vary.
"""

from pathlib import Path
from typing import Any

import torch

# Small enough for a test, odd enough to catch a mixed-up dimension: no two of these are equal.
SHAPE = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}

# At 0.3, 18 architectures x 6 prompts x 24 tokens had no margin under 3.9e-3, and the median text 20 different tokens.
WEIGHT_DEVIATION = 0.3


def save_tiny_model(folder: Path, model_type: str, *, seed: int = 0, **config: Any) -> Path:
    """Save a random HuggingFace model of this family and return its folder. No tokenizer: prompts are token ids.

    config: fields of its `config.json`, over those of SHAPE.
    Biases and norms are random too, since HuggingFace starts them at values that hide a missing one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {"initializer_range": WEIGHT_DEVIATION, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SHAPE | fields | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder
