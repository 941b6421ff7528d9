"""Faults of what a model computes: rotation, norms, projections, and what a config says of them."""

from functools import partial

from weft.testing.planted.fault import Fault

_ROPE = "tests/unit/layers/test_rope.py"
_FAMILIES = "tests/unit/models/test_families.py"
_OPERATIONS = "tests/unit/layers/test_operations.py"
_HEADS = "tests/unit/layers/test_heads.py"
_TINY = "tests/equivalence/test_tiny_models.py::test_every_architecture_equals_huggingface_in_any_chunks"
_rope = partial(Fault, file="weft/layers/rope.py", tier="tests/unit")
_operations = partial(Fault, file="weft/layers/operations.py", tier="tests/unit")
_heads = partial(Fault, file="weft/layers/heads.py", tier="tests/unit")
_norm = partial(Fault, file="weft/layers/norm.py", tier="tests/unit")
_llama = partial(Fault, file="weft/models/llama.py", tier="tests/unit")

FAULTS = (
    _rope(
        name="the rotary table is built in the model's dtype",
        old="positions = torch.arange(max_positions, dtype=torch.float, device=device)",
        new="positions = torch.arange(max_positions, dtype=dtype, device=device)",
        why="transformers#25681: bfloat16 has no 257.",
        killers=(f"{_ROPE}::test_a_low_precision_table_errs_by_its_last_rounding_only",),
    ),
    _rope(
        name="llama3 scaling has two bands",
        old="return torch.where(between, blend, scaled)",
        new="return scaled",
        why="tiny-vllm#1: what lies between is not blended.",
        killers=(f"{_ROPE}::test_llama3_keeps_blends_and_divides_its_three_bands",),
    ),
    _rope(
        name="yarn does not scale cos and sin",
        old="+ 1.0 / base * keep, float(attention_factor)",
        new="+ 1.0 / base * keep, 1.0",
        why="The factor of section 3.4 is left out.",
        killers=(f"{_ROPE}::test_frequencies_equal_huggingface_bit_for_bit",),
    ),
    _rope(
        name="theta is a tenth too small",
        old='theta=float(either(options, config, "rope_theta", POSITIVE, 10000.0)),',
        new='theta=float(either(options, config, "rope_theta", POSITIVE, 10000.0)) * 0.9,',
        why="0.2 % of tokens change: nobody sees it in bfloat16.",
        killers=(f"{_ROPE}::test_frequencies_equal_huggingface_bit_for_bit",),
    ),
    _rope(
        name="pairs are neighbours",
        old="    first, second = x.chunk(2, dim=-1)\n",
        new="    first, second = x[..., ::2], x[..., 1::2]\n",
        why="lmdeploy#2639: there are two ways to pair, and a checkpoint is of one.",
        killers=(f"{_ROPE}::test_rotation_equals_huggingface_bit_for_bit",),
    ),
    _rope(
        name="a linear scaling multiplies",
        old='return plain / rope.options["factor"], 1.0',
        new='return plain * rope.options["factor"], 1.0',
        why="Positions are stretched instead of squeezed.",
        killers=(f"{_ROPE}::test_frequencies_equal_huggingface_bit_for_bit",),
    ),
    _norm(
        name="the cast comes after the weight",
        old="return norm.weight * (wide * torch.rsqrt(variance + norm.epsilon)).to(x.dtype)",
        new="return (norm.weight * (wide * torch.rsqrt(variance + norm.epsilon))).to(x.dtype)",
        why="In bfloat16 1.5 % of tokens change, in float32 none.",
        killers=("tests/unit/layers/test_norm.py::test_the_cast_comes_before_the_weight_and_that_shows",),
    ),
    _norm(
        name="an epsilon ten times too small",
        old="torch.rsqrt(variance + norm.epsilon)",
        new="torch.rsqrt(variance + norm.epsilon / 10)",
        why="No token of 438 changes, in float32 either: only logits show it.",
        killers=("tests/unit/layers/test_norm.py::test_norm_equals_huggingface_bit_for_bit",),
    ),
    _norm(
        name="squares are summed in half precision",
        old="    wide = x.float()\n",
        new="    wide = x\n",
        why="They overflow.",
        killers=("tests/unit/layers/test_norm.py::test_half_precision_rows_do_not_overflow_in_the_sum_of_squares",),
    ),
    _operations(
        name="gate and up change places in plain torch",
        old="gate, up = self.norm_linear(hidden, norm, mlp.gate_up).chunk(2, dim=-1)",
        new="up, gate = self.norm_linear(hidden, norm, mlp.gate_up).chunk(2, dim=-1)",
        why="Two halves of one matrix.",
        killers=(f"{_OPERATIONS}::test_norm_mlp_add_equals_huggingface",),
    ),
    _operations(
        name="the residual is left out",
        old="        return hidden + linear(x)\n",
        new="        return linear(x)\n",
        why="A layer forgets what came before it.",
        killers=(f"{_OPERATIONS}::test_linear_add_equals_huggingface",),
    ),
    _operations(
        name="logits are those of the last rows",
        old="return head(rms_norm(hidden[rows], norm)).float()",
        new="return head(rms_norm(hidden[-len(rows) :], norm)).float()",
        why="Right for one request alone.",
        killers=(f"{_OPERATIONS}::test_logits_are_those_of_the_rows_asked_for_in_their_order",),
    ),
    _heads(
        name="values are rotated too",
        old="rotate(key, positions, self.rotary), value",
        new="rotate(key, positions, self.rotary), rotate(value, positions, self.rotary)",
        why="A model that says nearly what it should.",
        killers=(f"{_HEADS}::test_values_are_neither_normed_nor_rotated",),
    ),
    _heads(
        name="keys are not normed",
        old="        if self.key_norm is not None:\n            key = rms_norm(key, self.key_norm)\n",
        new="",
        why="Qwen3 has norms on its heads.",
        killers=(f"{_HEADS}::test_heads_equal_huggingface_bit_for_bit",),
    ),
    _llama(
        name="scores are scaled by the width of the model",
        old="scale=config.head_dim**-0.5,",
        new="scale=(config.hidden_size // config.num_attention_heads) ** -0.5,",
        why="The same, until a family has heads of another size.",
        killers=(f"{_FAMILIES}::test_logits_equal_huggingface_bit_for_bit",),
    ),
    _llama(
        name="biases of the projections are dropped",
        old='switches = ("tie_word_embeddings", "attention_bias", "mlp_bias")\n',
        new='switches = ("tie_word_embeddings", "mlp_bias")\n        config = dict(config)\n'
        '        config["attention_bias"] = False\n        switches += ("attention_bias",)\n',
        why="vllm#3767: noise in another language, from some families alone.",
        killers=(f"{_FAMILIES}::test_logits_equal_huggingface_bit_for_bit",),
    ),
    _llama(
        name="the declared length is multiplied by the scaling factor",
        old="        return self.rope.max_position_embeddings\n",
        new='        return int(self.rope.max_position_embeddings * self.rope.options.get("factor", 1))\n',
        why="vllm#56446: requests are let in that are longer than the table.",
        killers=(f"{_FAMILIES}::test_the_declared_length_is_never_multiplied_by_a_scaling_factor",),
    ),
    Fault(
        name="windows are taken whether they are used or not",
        file="weft/models/qwen3.py",
        tier="tests/unit",
        old='window = declared if read_field(config, "use_sliding_window", BOOLEAN, False) else None',
        new="window = declared",
        why="A config may declare a window and switch it off.",
        killers=(f"{_FAMILIES}::test_qwen3_windows_without_layer_types_are_huggingfaces",),
    ),
    Fault(
        name="a windowed layer without a window sees all",
        file="weft/models/qwen3.py",
        tier="tests/unit",
        old="        if window is None and _SLIDING in types:",
        new="        if False:",
        why="A config that contradicts itself is served in the one of its two senses that HuggingFace cannot run.",
        killers=("tests/unit/models/test_config_values.py::test_a_windowed_layer_without_a_window_is_refused",),
    ),
    Fault(
        name="a missing window of Mistral's is none",
        file="weft/models/mistral.py",
        tier="tests/unit",
        old='config = {"sliding_window": 4096} | dict(config)',
        new="config = dict(config)",
        why="HuggingFace's default is 4096.",
        killers=(f"{_FAMILIES}::test_a_window_that_a_config_leaves_out_is_huggingfaces_default",),
    ),
    Fault(
        name="positions start a step later after the prompt",
        file="weft/inference/device_state.py",
        tier="tests/equivalence",
        old="            positions=positions,\n            sequence_lengths=lengths,\n",
        new="            positions=positions + (counts[owner] == 1).long(),\n            sequence_lengths=lengths,\n",
        why="1.6 % of tokens change, with margins that bfloat16 noise has too.",
        killers=(f"{_TINY}[llama-cpu-contiguous-static-None]",),
    ),
    _rope(
        name="equivalent: positions all shifted by seven",
        tier="tests/equivalence",
        old="positions = torch.arange(max_positions, dtype=torch.float, device=device)",
        new="positions = torch.arange(7, max_positions + 7, dtype=torch.float, device=device)",
        why="Scores depend on the distance of two positions alone.",
        killers=(f"{_TINY}[llama-cpu-contiguous-static-None]", f"{_TINY}[qwen3-cpu-paged_gather-fcfs-9]"),
        expect="survives",
    ),
)
