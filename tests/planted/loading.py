"""Faults of reading checkpoints: a model that loads without a word and answers garbage."""

from functools import partial

from weft.testing.planted.fault import Fault

_GGUF = "tests/unit/models/test_checkpoint_gguf.py"
_SAFETENSORS = "tests/unit/models/test_checkpoint_safetensors.py"
_WEIGHTS = "tests/unit/layers/test_weights.py"
_gguf = partial(Fault, file="weft/models/checkpoint/gguf.py", tier="tests/unit")
_safetensors = partial(Fault, file="weft/models/checkpoint/safetensors.py", tier="tests/unit")
_weights = partial(Fault, file="weft/layers/weights.py", tier="tests/unit")
_load = partial(Fault, file="weft/models/checkpoint/load.py", tier="tests/unit")

FAULTS = (
    _gguf(
        name="keys are unpermuted by the number of query heads",
        old='(".attn_k.", "num_key_value_heads")',
        new='(".attn_k.", "num_attention_heads")',
        why="transformers#31788: right where every query has its own key head.",
        killers=(f"{_GGUF}::test_a_converted_model_is_the_model",),
    ),
    _gguf(
        name="rows of heads stay as llama.cpp stores them",
        old="    return pairs.swapaxes(1, 2).reshape(weights.shape)\n",
        new="    return pairs.reshape(weights.shape)\n",
        why="Pairs are neighbours there, and halves here.",
        killers=(f"{_GGUF}::test_unpermute_undoes_permute",),
    ),
    _gguf(
        name="every GGUF is tied",
        old='"tie_word_embeddings": "output.weight" not in self._tensors,',
        new='"tie_word_embeddings": True,',
        why="A head of its own is refused, or taken for a copy.",
        killers=(f"{_GGUF}::test_a_converted_model_is_the_model",),
    ),
    _gguf(
        name="rope factors are not read",
        old="        if _FREQUENCY_FACTORS not in self._tensors:\n            return rope | scaling\n",
        new="        if True:\n            return rope | scaling\n",
        why="Llama 3 in a GGUF is right in short texts.",
        killers=(f"{_GGUF}::test_rope_factors_are_read_and_are_no_weight",),
    ),
    _safetensors(
        name="every file of the folder is read",
        old="files = [folder / name for name in sorted(set(weight_map.values()))]",
        new='files = sorted(folder.glob("*.safetensors"))',
        why="vllm#40765: a consolidated file beside the shards.",
        killers=(f"{_SAFETENSORS}::test_a_file_that_the_index_does_not_name_is_never_read",),
    ),
    _safetensors(
        name="a quantised config is taken for a plain one",
        old="    if scheme:\n",
        new="    if False:\n",
        why="sglang#28806: a healthy server that says the same garbage to everybody.",
        killers=(f"{_SAFETENSORS}::test_a_quantised_checkpoint_is_refused_by_scheme",),
    ),
    _weights(
        name="a missing tensor is not missed",
        old="        if missing:\n",
        new="        if False:\n",
        why="vllm#53019: a head keeps what memory held.",
        killers=(f"{_WEIGHTS}::test_a_missing_tensor_is_named",),
    ),
    _weights(
        name="a tensor that nobody takes is passed over",
        old="            if name not in self._views:\n                raise TensorError(",
        new="            if name not in self._views:\n                continue\n                raise TensorError(",
        why="vllm#3767: biases that the config leaves out.",
        killers=(f"{_WEIGHTS}::test_an_unexpected_tensor_is_named_with_its_shape",),
    ),
    _weights(
        name="a row is broadcast to a matrix",
        old="        if tensor.shape != view.shape:\n",
        new="        if tensor.numel() > view.numel():\n",
        why="copy_ asks for less than equality.",
        killers=(f"{_WEIGHTS}::test_a_tensor_of_another_shape_is_never_broadcast",),
    ),
    _weights(
        name="a tied head that differs is let through",
        old="if tensor.shape != original.shape or not torch.equal(tensor.to(original), original):",
        new="if tensor.shape != original.shape:",
        why="vllm#6758: a redundant head is fine, another one is not.",
        killers=(f"{_WEIGHTS}::test_a_tied_copy_that_differs_is_refused",),
    ),
    _weights(
        name="packed projections are filled in another order",
        old="zip(names, weights, strict=True)",
        new="zip(names, reversed(weights), strict=True)",
        why="q, k and v lie in one matrix.",
        killers=(f"{_WEIGHTS}::test_packed_parts_land_in_their_rows_in_order",),
    ),
    _load(
        name="parameters are not poisoned before they are filled",
        old="    poison(module)\n",
        new="",
        why="What no tensor sets passes for a weight.",
        killers=(f"{_SAFETENSORS}::test_parameters_are_poisoned_until_they_are_filled",),
    ),
    _load(
        name="dummy weights are the same in every layer",
        old="manual_seed(seed + index)",
        new="manual_seed(seed)",
        why="A speed that is measured on a model of one layer.",
        killers=("tests/unit/models/test_families.py::test_dummy_weights_are_finite_seeded_and_read_no_file",),
    ),
)
