"""Faults of batch invariance: what else a step holds, or how a sequence was cut, shows in the last bits."""

from functools import partial

from weft.testing.planted.fault import Fault

_ENGINES = "tests/equivalence/test_batch_invariance.py"
_CROWD = f"{_ENGINES}::test_a_request_says_among_others_what_it_says_alone"
_WAYS = f"{_ENGINES}::test_neither_chunks_nor_blocks_nor_a_cached_prefix_show"
_SCORES = f"{_ENGINES}::test_a_prompt_scores_as_its_tokens_did_when_they_were_said_and_as_in_training"
_OPERATIONS = "tests/unit/layers/test_fixed_order_operations.py"
_ATTENTION = "tests/unit/attention/test_fixed_order_attention.py"
_BACKENDS = "tests/unit/attention/test_paged_backends.py"
_CUT_ALIKE = f"{_BACKENDS}::test_in_fixed_order_all_launches_of_a_step_cut_alike"
_PACKING = "tests/unit/attention/test_packed.py"
_BUILDING = "tests/unit/inference/test_engine_building.py"
_OVERFLOW = f"{_ATTENTION}::test_an_overflow_in_one_sequence_changes_no_bit_of_what_does_not_see_it"
_operations = partial(Fault, file="weft/layers/fixed_order.py", tier="tests/unit")
_attention = partial(Fault, file="weft/attention/fixed_order.py", tier="tests/unit")
_backing = partial(Fault, file="weft/inference/backing.py", tier="tests/unit")
_choice = partial(Fault, file="weft/layers/kernel_choice.py", tier="tests/unit")
_kernels = partial(Fault, file="weft/attention/paged_triton.py", tier="tests/unit")
_packed = partial(Fault, file="weft/attention/packed.py", tier="tests/unit")
_fused = partial(Fault, file="weft/layers/fused.py", tier="tests/unit")
_TILES_ASKED = f"{_BACKENDS}::test_tiles_of_fixed_order_follow_from_the_layer_the_step_and_the_gpu"
_KERNELS_BACKED = f"{_BUILDING}::test_batch_invariance_reaches_the_products_and_the_attention_of_kernels"

FAULTS = (
    _attention(
        name="values of narrow heads end within a vector",
        old="(values, -values.shape[-1] % VECTOR)",
        new="(values, 0)",
        why="MKL sums odd rows of 6 or 10 columns in another order than even ones.",
        killers=(f"{_ATTENTION}::test_no_product_with_values_ends_within_a_vector_whatever_the_width_of_heads[10]",),
    ),
    _operations(
        name="the last block is as short as the batch",
        old="filled = functional.pad(x, (0, 0, 0, sum(blocks) - count))",
        new="filled, blocks = x, [count]",
        why="One row is multiplied by another kernel of the library than eight.",
        tier="tests/equivalence",
        killers=(f"{_CROWD}[cpu-float32-plain-contiguous-mistral-2]",),
    ),
    _operations(
        name="a block has one tail of silu for all its rows",
        old="torch.stack([functional.silu(row) for row in gate])",
        new="functional.silu(gate.contiguous())",
        why="torch's vectorised exp and its scalar tail differ in the last bit.",
        killers=(f"{_OPERATIONS}::test_of_silu_not_even_the_last_columns_depend_on_the_rows_place",),
    ),
    _operations(
        name="the head multiplies as many rows as there are",
        old="return self.norm_linear(hidden[rows], norm, head).float()",
        new="return head(rms_norm(hidden[rows], norm)).float()",
        why="A batch shows in the logits alone.",
        killers=(f"{_OPERATIONS}::test_every_product_sees_eight_rows_and_a_rows_place_shows_nowhere[33-logits]",),
    ),
    _operations(
        name="a product in which a row's place shows is let through",
        old="if not torch.equal(equal, equal[:1].expand_as(equal)):",
        new="if not torch.allclose(equal, equal[:1].expand_as(equal)):",
        why="What the mode promises would hang on the machine.",
        killers=(f"{_OPERATIONS}::test_a_product_in_which_a_rows_place_shows_is_refused_before_anyone_is_served",),
    ),
    _operations(
        name="sizes of blocks that give other bits are taken",
        old="sizes = tuple(size for size in sizes if torch.equal(by_blocks(module, rows, (size,)), expected))",
        new="assert expected is not None",
        why="How many requests a step holds would show in the last bit, on some machines only.",
        killers=(f"{_OPERATIONS}::test_a_size_in_which_a_row_has_other_bits_is_left_out",),
    ),
    _operations(
        name="norms are not looked at",
        old="elif isinstance(module, RMSNorm):",
        new="elif False:",
        why="A norm sums a row as well as a product does.",
        killers=(f"{_OPERATIONS}::test_a_size_in_which_a_norm_has_other_bits_is_left_out",),
    ),
    _attention(
        name="tiles of keys begin where a window does",
        old="self.front, self.back = first_key % TILE, ",
        new="self.front, self.back = 0, ",
        why="SGLang's and vLLM's rule: tiles lie at absolute positions, or chunks show.",
        killers=(f"{_ATTENTION}::test_a_querys_bits_are_those_of_its_sequence_however_it_is_cut[2-2-50]",),
    ),
    _attention(
        name="queries come as many as a chunk has",
        old="blocks = functional.pad(query.float(), (0, 0, 0, 0, 0, -count % ROWS)).split(ROWS)",
        new="blocks = functional.pad(query.float(), (0, 0, 0, 0, 0, -count % 2)).split(ROWS)",
        why="A decode's product is of another shape than a prompt's.",
        killers=(f"{_ATTENTION}::test_a_querys_bits_are_those_of_its_sequence_however_it_is_cut[2-2-None]",),
    ),
    _attention(
        name="a window hides nothing",
        old="return hidden if self._window is None else hidden | (places <= asking - self._window)",
        new="return hidden",
        why="The zeros that fill a tile, and keys that a later chunk no longer has, take part of the softmax.",
        killers=(f"{_ATTENTION}::test_a_querys_bits_are_those_of_its_sequence_however_it_is_cut[2-2-50]",),
    ),
    _attention(
        name="a value that is not finite spoils its tile",
        old="        if not attended.isfinite().all():\n",
        new="        if False:\n",
        why="Infinity times a weight of 0 is nan: how a prompt was cut said whether its request failed.",
        killers=(
            f"{_ATTENTION}::test_an_overflow_in_one_sequence_changes_no_bit_of_what_does_not_see_it[[30, 20]-inf]",
        ),
    ),
    _attention(
        name="layers of another window share a mask",
        old="kind = spec.window, spec",
        new="kind = None, spec",
        why="Whoever comes first would say what all layers hide.",
        killers=(f"{_OVERFLOW}[[12, 8, 7]-inf]",),
    ),
    _attention(
        name="a value that is not finite counts as nothing where it is seen",
        old=".masked_fill(sees, torch.nan)",
        new="",
        why="A request that overflowed would go on with other numbers, and nobody would know.",
        killers=(f"{_ATTENTION}::test_what_overflowed_shows_where_it_is_seen_and_nowhere_else[values-inf-4]",),
    ),
    _attention(
        name="a machine on which attention depends on places is let through",
        old="torch.equal(weights, among) and ",
        new="",
        why="What the mode promises would hang on the machine.",
        killers=(f"{_ATTENTION}::test_a_machine_on_which_a_rows_place_shows_is_refused",),
    ),
    _backing(
        name="attention keeps the order it had",
        old="                return backend.in_fixed_order()\n",
        new="                return backend\n",
        why="The switch reaches the products alone.",
        tier="tests/equivalence",
        killers=(f"{_WAYS}[cpu-float32-biases-{{'max_chunk_tokens': 63}}]",),
    ),
    _backing(
        name="products keep the order they had",
        old="return partial(FixedOrderOperations, sizes=block_sizes(model, placement.dtype, placement.device))",
        new="return PlainOperations",
        why="The switch reaches attention alone.",
        tier="tests/equivalence",
        killers=(f"{_CROWD}[cpu-float32-plain-contiguous-mistral-2]",),
    ),
    _backing(
        name="places are never looked at",
        old="            fit=_in_blocks,\n",
        new="",
        why="A machine that cannot keep the promise would serve.",
        killers=(f"{_BUILDING}::test_a_machine_that_cannot_keep_batch_invariance_says_so_at_start",),
    ),
    _backing(
        name="widths are never looked at",
        old="            check_shapes=_check_widths,\n",
        new="",
        why="A kernel refuses the model at its first step, or reads past the end of rows.",
        killers=(f"{_BUILDING}::test_a_matrix_that_the_one_kernel_cannot_read_is_refused_before_weights_are_read",),
    ),
    Fault(
        name="a machine's attention is never looked at",
        file="weft/attention/paged_gather.py",
        old="            check_places(specs, device)\n",
        new="            pass\n",
        why="A machine that cannot keep the promise would serve.",
        tier="tests/unit",
        killers=(f"{_BUILDING}::test_attention_is_looked_at_before_anyone_is_served[paged_gather]",),
    ),
    _backing(
        name="products of kernels keep the order they had",
        old="operations=partial(FusedOperations, choose=batch_invariant),",
        new="operations=partial(FusedOperations),",
        why="On a GPU the switch reaches attention alone.",
        killers=(_KERNELS_BACKED,),
    ),
    _backing(
        name="attention of kernels keeps the order it had",
        old="            is_plain=False,\n            batch_invariant=True,\n",
        new="            is_plain=False,\n",
        why="On a GPU the switch reaches the products alone.",
        killers=(_KERNELS_BACKED,),
    ),
    _fused(
        name="each part of a sum gets the bias",
        old="splits=choice.planes, summed=choice.summed)",
        new="splits=choice.planes)",
        why="Only matrices of more than a thousand columns have parts, and few of those a bias.",
        killers=(
            "tests/unit/layers/test_fused.py::test_a_sum_in_parts_has_one_bias_and_planes_for_few_rows_alone[2-True-1]",
        ),
    ),
    _fused(
        name="a gate of few rows forgets its biases",
        old='        elif choice.product == "few_rows" and mlp.gate_up.bias is not None:\n',
        new="        elif False:\n",
        why="The same in any company: only the plain order shows it.",
        killers=(
            "tests/unit/layers/test_fused.py::test_every_kernel_computes_the_plain_block[batch-invariant-[0]-True]",
        ),
    ),
    _choice(
        name="a sum is cut by the batch",
        old="summed=few.planes is not None and (shape.rows >= MANY_ROWS or shape.has_bias))",
        new="planes=1 if shape.rows >= MANY_ROWS else few.planes)",
        why="gpu.md 4e: the factor of a split must not follow the rows.",
        killers=("tests/unit/layers/test_kernel_choice.py::test_a_batch_invariant_sum_is_cut_by_the_matrix_alone",),
    ),
    _kernels(
        name="prefill takes its own tiles",
        old="skip_single=True, tile=tiles.prefill, split=tiles.split",
        new="skip_single=True, split=tiles.split",
        why="As many keys a tile as decode takes, on some GPUs and in some dtypes only.",
        killers=(f"{_CUT_ALIKE}[False-[3, 1]]",),
    ),
    _kernels(
        name="tiles are those of a crowd for one request too",
        old="            heads=head_tiles,\n",
        new="",
        why="One warp a head does not fill a GPU: 6.5 µs a layer where four take 5.4.",
        killers=(f"{_TILES_ASKED}[None]",),
    ),
    _kernels(
        name="decode is cut as it usually is",
        old="            split=tiles.split,\n",
        new="",
        why="Splits of 256 keys and of 128 are one until a sequence has more.",
        killers=(f"{_CUT_ALIKE}[False-[1, 1]]",),
    ),
    _kernels(
        name="decode norms the heads that prefill norms elsewhere",
        old="if self._one_each and new.rotation.query_norm is None:",
        new="if self._one_each:",
        why="The kernel refuses: every decode of such a model would fail.",
        killers=(f"{_CUT_ALIKE}[True-[1, 1]]",),
    ),
    Fault(
        name="in fixed order a sum of weights is not rescaled",
        file="weft/kernels/pieces.py",
        old="acc=total * factor[:, None], input_precision=PRECISION)\n    else:",
        new="acc=total, input_precision=PRECISION)\n    else:",
        why="Both kernels agree on it to the bit.",
        tier="tests/kernels",
        killers=("tests/kernels/test_invariance.py::test_both_kernels_attend[{}-torch.float32]",),
    ),
    _packed(
        name="scoring on a backend writes every sequence to the first one's blocks",
        old="slots = tables[rows, positions // size] * size",
        new="slots = tables[0, positions // size] * size",
        why="A score would be of another sequence's keys.",
        tier="tests/equivalence",
        killers=(f"{_SCORES}[cpu-float32-llama]",),
    ),
    _packed(
        name="scoring on a backend takes what it refuses",
        old="(reason := backend.supports(spec, dtype, device)) is not None",
        new="(reason := None) is not None",
        why="A cap on scores would be left out, and nobody would know.",
        killers=(f"{_PACKING}::test_what_a_backend_cannot_do_is_refused_and_not_left_out",),
    ),
    _packed(
        name="a soft cap is left out of plain attention",
        old="if spec.soft_cap is not None:",
        new="if False:",
        why="Scores would be those of another model.",
        killers=(f"{_PACKING}::test_what_a_backend_cannot_do_is_refused_and_not_left_out",),
    ),
    _packed(
        name="sequences without a token are packed",
        old='        positive("packed", hint, lengths=length)\n',
        new="        pass\n",
        why="As many tokens as sequences are a step of decodes to the kernels, of other tokens.",
        killers=(f"{_PACKING}::test_a_sequence_without_a_token_is_refused[[2, 0, 1]]",),
    ),
    _packed(
        name="scores on a backend pass for a constant in training",
        old="if torch.is_grad_enabled() and qkv.requires_grad:",
        new="if False:",
        why="Kernels leave attention out of every gradient.",
        killers=(f"{_PACKING}::test_a_gradient_that_would_be_left_out_is_refused[paged_gather]",),
    ),
    _packed(
        name="packed attention takes any number of rows",
        old="        if len(key) != self._spans[-1].last:\n",
        new="        if False:\n",
        why="Rows beyond the sequences would be left out, and nobody told.",
        killers=("tests/unit/attention/test_packed.py::test_rows_that_the_lengths_do_not_name_are_refused",),
    ),
    _packed(
        name="a sequence is named by its end",
        old="key, value = (part[span.first : span.last].transpose(0, 1)[None] for part in self._written[1:])",
        new="key, value = (part[: span.last].transpose(0, 1)[None][:, :, -span.end :] for part in self._written[1:])",
        why="Two names of one slice: the last `end` of the first `last` keys are those from `first` on.",
        killers=(f"{_ATTENTION}::test_gradients_through_packed_sequences_are_those_of_plain_attention",),
        expect="survives",
    ),
)
