"""The default workload: prompts in one step or a few, then decode steps, of one engine that stays.

Only what every version of weft has is used: a commit of long ago is to run under it.
"""

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any


def build(options: Mapping[str, Any]) -> dict[str, Callable[[], object]]:
    """Parts of a turn by name, to be called in this order; each gives what it computed.

    options: model, device and dtype; batch requests of prompt_tokens, each answered with output_tokens; engine: more
        fields of weft's engine; threads: of torch on a CPU.
    """
    import torch

    from weft import LLM, SamplingParams

    torch.set_num_threads(options["threads"])
    batch, prompt_tokens, output_tokens = (options[name] for name in ("batch", "prompt_tokens", "output_tokens"))
    length = prompt_tokens + output_tokens + 1
    implied = {
        "max_model_len": length,
        "max_num_seqs": batch,
        "max_num_batched_tokens": max(2048, batch),
        "enable_prefix_caching": False,  # each turn is the same work
        "num_blocks": batch * (length // 16 + 1),
        "block_size": 16,
        "skip_tokenizer_init": True,
    }
    served = {name: options[name] for name in ("model", "device", "dtype")}
    engine = LLM(**served, **(implied | json.loads(options["engine"]))).engine
    random = Random(0)
    prompts = [[random.randrange(engine.vocab_size) for _ in range(prompt_tokens)] for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    tokens: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids

    def prefill() -> list[list[int]]:
        """Until every request has its first token."""
        tokens.clear()
        for place, prompt in enumerate(prompts):
            tokens[str(place)] = []
            engine.add_request(str(place), prompt, params)
        while not all(tokens.values()):
            step()
        return list(tokens.values())

    def decode() -> list[list[int]]:
        while engine.has_unfinished_requests():
            step()
        return list(tokens.values())

    return {"prefill": prefill, "decode": decode}
