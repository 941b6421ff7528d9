"""The offline face: prompts in, texts out, in the order given.

llm = weft.LLM("smollm2-135m")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
    print(output.outputs[0].text)
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any, cast

from tqdm import tqdm

from weft.config import EngineConfig
from weft.errors import (
    ConfigError,
    InvalidPromptsError,
    RequestError,
    SamplingParamsError,
    UnknownArgumentError,
    nearest,
)
from weft.inference.engine import Engine, as_token_ids
from weft.inference.sampling_params import SamplingParams
from weft.models.checkpoint.load import read_config
from weft.models.checkpoint.source import open_checkpoint
from weft.output_processor import OutputProcessor, RequestOutput
from weft.tokenizer.hub import HubTokenizer

# A text, token ids, or a mapping with one of the two under `prompt` or `prompt_token_ids`.
Prompt = str | Sequence[int] | Mapping[str, Any]

# Fields of a generation_config.json that say nothing about the tokens, or that weft reads elsewhere.
_INERT_DEFAULTS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("do_sample", "temperature", "max_new_tokens", "transformers_version", "_from_model_config"),
    *("use_cache", "cache_implementation", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
}
# Fields that change sampling only, and so nothing where `do_sample` is false.
_SAMPLING_DEFAULTS = {"top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
# Fields that do nothing at 1; all others do nothing at None, False, 0 or empty.
_NEUTRAL_AT_ONE = {
    *("top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty", "length_penalty"),
    *("num_beams", "num_beam_groups", "num_return_sequences", "guidance_scale"),
}


class LLM:
    """A model, ready to generate.

    LLM("smollm2-135m")                                          the model that comes with weft's default groups
    LLM("path/to/folder", dtype="bf16", device="cuda")           a local folder
    LLM("org/name", revision="main", max_num_seqs=32)            the hub, or its cache when offline

    Options are the fields of `weft.config`, by name. engine: for those who drive the loop themselves.
    """

    def __init__(self, model: str, **options: Any) -> None:
        """Raises: ConfigError (unknown or contradictory options), CheckpointError (the model cannot be loaded)."""
        config = EngineConfig.of(model=model, **options)
        checkpoint = open_checkpoint(
            config.model.model, revision=config.model.revision, load_format=config.model.load_format
        )
        read_config(checkpoint)  # before the tokenizer, which reads the same file with errors of its own
        location = checkpoint.tokenizer
        self.tokenizer = None if config.model.skip_tokenizer_init else HubTokenizer(location.folder, location.gguf_file)
        self.engine = Engine(config, checkpoint, show_progress=True)
        self._generation_options = checkpoint.generation.options
        self._ids = count()

    def default_sampling_params(self) -> SamplingParams:
        """What the model's authors set in `generation_config.json`.

        Raises: ConfigError if they set a field that weft does not have yet, since dropping it would change the output.
        """
        options = {name: value for name, value in self._generation_options.items() if value is not None}
        greedy = options.get("do_sample") is False
        for name, value in options.items():
            if name in _INERT_DEFAULTS or (greedy and name in _SAMPLING_DEFAULTS):
                continue
            if name == "max_length" and value >= self.engine.limits.max_model_len:
                continue
            if value and not (value == 1 and name in _NEUTRAL_AT_ONE):
                raise ConfigError(
                    f"the model's generation_config sets {name}={value!r}, which weft cannot do yet",
                    hint="pass SamplingParams, for instance SamplingParams(temperature=0)",
                )
        temperature = 0.0 if greedy else options.get("temperature", 1.0)
        return SamplingParams(temperature=temperature, max_tokens=options.get("max_new_tokens", 16))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **unknown: object,
    ) -> list[RequestOutput]:
        """One output for each prompt, in order. A list of integers is one prompt; no prompts give no outputs.

        sampling_params: one for all, or one for each; None takes the model's own defaults.
        Raises: RequestError and its kinds before any work is done: every prompt is checked first, one bad prompt
            raises its own error with its index, several raise InvalidPromptsError with all of them.
        """
        for name in unknown:
            raise UnknownArgumentError("LLM.generate", name, ("prompts", "sampling_params", "use_tqdm"))
        listed = cast("list[Prompt]", [prompts] if _is_one(prompts) else list(prompts))
        params = self._params_for(listed, sampling_params)
        encoded = self._encode_all(listed, params)
        if self.engine.has_unfinished_requests():
            raise RequestError(
                "the engine holds requests that were added by hand",
                hint="finish them with engine.step() before calling generate",
            )
        processor = OutputProcessor(self.tokenizer)
        request_ids = [str(next(self._ids)) for _ in listed]
        finished: dict[str, RequestOutput] = {}
        try:
            for request_id, (text, token_ids), param in zip(request_ids, encoded, params, strict=True):
                processor.add(request_id, text, token_ids)  # first, so that an interrupt between the two leaks nothing
                self.engine.add_request(request_id, token_ids, param)
            with tqdm(total=len(listed), desc="Generating", unit="request", disable=not use_tqdm) as bar:
                while self.engine.has_unfinished_requests():
                    for step in self.engine.step():
                        output = processor.process(step)
                        if output is not None:
                            finished[output.request_id] = output
                            bar.update()
        finally:  # interrupted or failed: the engine is left as it was found
            for request_id in processor.open_requests:
                self.engine.abort(request_id)
        return [finished[request_id] for request_id in request_ids]

    def _params_for(
        self, prompts: Sequence[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            return [self.default_sampling_params()] * len(prompts)
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if not isinstance(given, Sequence):
            raise SamplingParamsError(f"sampling_params must be SamplingParams or a list of them, got {given!r}")
        params = list(given)
        for place, param in enumerate(params):
            if not isinstance(param, SamplingParams):
                raise SamplingParamsError(f"sampling_params[{place}] must be SamplingParams, got {param!r}")
        if len(params) != len(prompts):
            raise SamplingParamsError(f"{len(prompts)} prompts but {len(params)} sampling_params")
        return params

    def _encode_all(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> list[tuple[str | None, list[int]]]:
        """Text and token ids of each prompt, all of them checked."""
        encoded, errors = [], {}
        for place, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                text, token_ids = self._encode(prompt)
                self.engine.validate(token_ids, param)
                encoded.append((text, token_ids))
            except RequestError as error:
                errors[place] = error.at(place)
        if len(errors) == 1:
            raise next(iter(errors.values()))
        if errors:
            raise InvalidPromptsError(errors)
        return encoded

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
                unknown = next((key for key in prompt if key not in ("prompt", "prompt_token_ids")), None)
                hint = nearest(str(unknown), ("prompt", "prompt_token_ids")) if unknown is not None else None
                raise RequestError(f"a prompt mapping has one key, prompt or prompt_token_ids: {prompt!r}", hint=hint)
            ((key, value),) = prompt.items()
            if isinstance(value, Mapping) or isinstance(value, str) != (key == "prompt"):
                raise RequestError(f"prompt holds a text, prompt_token_ids a list of token ids: {prompt!r}")
            return self._encode(value)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    f"a text prompt needs a tokenizer, got {prompt!r} with skip_tokenizer_init=True",
                    hint="give token ids",
                )
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a text, a list of token ids or a mapping, got {prompt!r}")
        return None, as_token_ids(prompt)


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a single prompt: a text, a mapping, or a list that begins with a token id."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and hasattr(prompts[0], "__index__")
