"""Faults of the kernels, which no monkeypatch reaches: Triton reads their source."""

from functools import partial

from weft.testing.planted.fault import Fault

_DECODE = "tests/kernels/test_paged_decode.py"
_PREFILL = "tests/kernels/test_paged_prefill.py"
_WRITE = "tests/kernels/test_cache_write.py"
_SAMPLE = "tests/kernels/test_sample.py"
_TRUNCATE = "tests/kernels/test_truncate_reference.py"
_STATE = "tests/kernels/test_step_state.py"
_EDGES = f"{_DECODE}::test_every_length_at_the_edges_of_blocks_and_splits"
_CHUNKS = f"{_PREFILL}::test_chunks_and_prefixes_of_every_length[{{}}-torch.float32]"
_TURNED = f"{_WRITE}::test_every_head_is_turned_and_lies_in_its_slot"
_INVARIANCE = "tests/kernels/test_invariance.py"
_SAME_BITS = f"{_INVARIANCE}::test_a_prefill_has_the_bits_of_the_decode_of_each_position"
_EDGES_OF_SPLITS = f"{_SAME_BITS}[(1, 17, 32, 33, 96, 97, 98, 129)-{{}}]"
_READ_BACK = f"{_INVARIANCE}::test_a_key_that_is_written_and_read_back_has_the_bits_of_one_that_lay_there"
_GATHERED = f"{_STATE}::test_a_step_is_gathered_as_plain_torch_gathers_it[chunks, decodes and padding-8]"
_kernel = partial(Fault, tier="tests/kernels")
_pieces = partial(_kernel, file="weft/kernels/pieces.py")
_decode = partial(_kernel, file="weft/kernels/_paged_decode_kernel.py")
_prefill = partial(_kernel, file="weft/kernels/_paged_prefill_kernel.py")
_sample = partial(_kernel, file="weft/kernels/sample.py")
_cut = partial(_kernel, file="weft/kernels/_truncate_reference.py")
_gather = partial(_kernel, file="weft/kernels/gather_step.py")
_commit = partial(_kernel, file="weft/kernels/commit_step.py")

FAULTS = (
    _kernel(
        name="scratch for one long request too few",
        file="weft/kernels/_paged_decode_tiles.py",
        old="return min(batch, self.shares) if self.shares",
        new="return min(batch - 1, self.shares) if self.shares",
        why="The parts of the last one lie behind the end of the memory.",
        killers=(
            "tests/kernels/test_paged_decode_layout.py::"
            "test_programs_and_scratch_follow_from_shapes_and_from_what_is_forced[{'batch': 5}-6-32-5]",
        ),
    ),
    _kernel(
        name="heads get as many programs as can run",
        file="weft/kernels/_paged_decode_tiles.py",
        old="return 2 * heads if MANY_HEADS < heads < WHOLE_HEADS else WHOLE_HEADS",
        new="return PROGRAMS",
        why="256 heads by two programs and a merge each take 22 % longer than by one.",
        killers=(f"{_DECODE}::test_programs_follow_from_shapes",),
    ),
    _kernel(
        name="few heads take keys by other tiles",
        file="weft/kernels/_invariant_tiles.py",
        old="_FEW_ALONE = {(2, 64): _tiles(32, (4, 3)",
        new="_FEW_ALONE = {(2, 64): _tiles(64, (4, 3)",
        why="One request alone would have other bits than among seven.",
        killers=(
            f"{_INVARIANCE}::test_all_kernels_take_as_many_keys_of_which_a_split_is_a_multiple[1-90-torch.bfloat16-64-False]",
        ),
    ),
    _pieces(
        name="a lookup ahead does not stop where the request does",
        old="mask=(keys >= low) & (keys < high), other=0)",
        new="mask=keys >= low, other=0)",
        why="What lies behind the last row of a table is read: another tensor's memory, or none at all.",
        killers=(f"{_DECODE}::test_nothing_outside_tables_lengths_and_owned_slots_is_read_or_written[None-32-1]",),
    ),
    _pieces(
        name="a running softmax does not rescale its sum",
        old="total * factor + tl.sum(weights, 1)",
        new="total + tl.sum(weights, 1)",
        why="Right as long as the first tile holds the largest score.",
        killers=(_CHUNKS,),
    ),
    _pieces(
        name="in fixed order threads sum the weights of a row",
        old="total = tl.dot(weights.to(dtype), ones, acc=total * factor[:, None], input_precision=PRECISION)",
        new="total = total * factor[:, None] + tl.sum(weights, 1)[:, None]",
        why="Who has which columns differs between prefill and decode, and with it the last bit.",
        killers=("tests/kernels/test_compiles.py::test_in_fixed_order_no_row_is_summed_by_threads",),
    ),
    _decode(
        name="in fixed order the new key is not read back",
        old="        if not FIXED:\n            seen = length - 1",
        new="        if True:\n            seen = length - 1",
        why="The last key of a sequence would be seen by nobody.",
        killers=(f"{_READ_BACK}[{{}}-{{}}]",),
    ),
    _decode(
        name="a key is read back without a barrier",
        old="                tl.debug_barrier()  # a thread loads what others of its program have stored\n",
        new="                pass\n",
        why="A thread loads what another has not stored yet, and the interpreter has but one.",
        killers=("tests/kernels/test_compiles.py::test_a_key_is_read_back_behind_a_barrier",),
    ),
    _decode(
        name="a key is read back by programs that did not write it",
        old="if FIXED or head_tile == 0:",
        new="if head_tile == 0:",
        why="The tiles of heads beside the first may run before it.",
        killers=(f"{_INVARIANCE}::test_whoever_reads_a_key_back_has_written_it[{{'programs': 1}}]",),
    ),
    _decode(
        name="decode sums weights that are not rounded",
        old="total = weigh(total, weights, factor, dtype, FIXED, PRECISION)",
        new="total = weigh(total, weights, factor, tl.float32, FIXED, PRECISION)",
        why="Prefill sums those that meet the values; in float32 there is no difference.",
        killers=(f"{_SAME_BITS}[(33, 98)-{{'heads': (2, 1), 'dtype': torch.float16}}]",),
    ),
    _kernel(
        name="products of a rotation fuse with its sums where it writes",
        file="weft/kernels/cache_write.py",
        old="        enable_fp_fusion=False,  # as",
        new="        # as",
        why="Decode rotates too, and its compiler may fuse the other product.",
        killers=(f"{_INVARIANCE}::test_no_launch_lets_the_compiler_fuse_a_product_with_a_sum",),
    ),
    _kernel(
        name="in debug mode a key may be read back from elsewhere",
        file="weft/kernels/paged_decode.py",
        old="            check_read_back(paged, new)\n",
        new="            pass\n",
        why="A key of -1 lies nowhere, and what its slot held is attended to.",
        killers=(f"{_INVARIANCE}::test_a_key_that_would_be_read_from_elsewhere_is_refused_in_debug_mode[-1]",),
    ),
    _pieces(
        name="merging two empty parts gives NaN",
        old="    highest = tl.maximum(maximum, log_sum)\n"
        '    shift = tl.where(highest == float("-inf"), 0.0, highest)\n',
        new="    highest = tl.maximum(maximum, log_sum)\n    shift = highest\n",
        why="flashinfer#4051: minus infinity less itself.",
        killers=("tests/kernels/test_merge_parts.py::test_an_empty_part_is_the_identity_to_the_bit",),
    ),
    _pieces(
        name="the soft cap is a tanh and no more",
        old="scores = soft_cap * tanh(scores / soft_cap)",
        new="scores = tanh(scores / soft_cap)",
        why="Scores are squeezed to one and not to the cap.",
        killers=(f"{_EDGES}[{{'window': 21, 'soft_cap': 2.0}}-torch.float32]",),
    ),
    _pieces(
        name="decode's window is one too wide",
        old="oldest = tl.maximum(length - window, 0)",
        new="oldest = tl.maximum(length - window - 1, 0)",
        why="transformers#39408, in decode and in the merge of parts.",
        killers=(f"{_DECODE}::test_a_window_shows_exactly_its_keys",),
    ),
    _pieces(
        name="heads turn the other way",
        old="tl.where(column < half, -sine, sine)",
        new="tl.where(column < half, sine, -sine)",
        why="Queries and keys turn alike, so that scores of one kernel stay right among themselves.",
        killers=(f"{_TURNED}[{{}}-torch.float32]",),
    ),
    _pieces(
        name="the norm of heads has no epsilon",
        old="tl.sum(own * own, 1) / D + epsilon",
        new="tl.sum(own * own, 1) / D",
        why="Seen only where a head is nearly zero.",
        killers=(f"{_TURNED}[{{'norm': True}}-torch.float32]",),
    ),
    _decode(
        name="query heads are dealt out to key heads by turns in decode",
        old="    head = kv_head * group + in_group\n",
        new="    head = in_group * H_KV + kv_head\n",
        why="Head h reads key head h % H_kv.",
        killers=(f"{_EDGES}[{{'heads': (9, 3), 'norm': True}}-torch.float32]",),
    ),
    _decode(
        name="the new key counts twice",
        old="        if not FIXED:\n            seen = length - 1  # the last key is this launch's own\n",
        new="",
        why="It is in the pool by then, or not yet: that depends on which program was first.",
        killers=(f"{_EDGES}[{{}}-torch.float32]",),
    ),
    _decode(
        name="decode does not write its value",
        old="                tl.store(pool_values + place, value, mask=written)\n",
        new="",
        why="The next step reads what was there before.",
        killers=(f"{_EDGES}[{{}}-torch.float32]",),
    ),
    _decode(
        name="decode reads a window's first block from its start",
        old="low = tl.maximum(first * span, oldest)",
        new="low = first * span",
        why="Keys before the window are seen.",
        killers=(f"{_DECODE}::test_a_window_shows_exactly_its_keys",),
    ),
    _prefill(
        name="a row does not see its own key",
        old="shown = valid[None, :] & (keys[None, :] <= asking[:, None])",
        new="shown = valid[None, :] & (keys[None, :] < asking[:, None])",
        why="The causal mask is strict.",
        killers=(_CHUNKS,),
    ),
    _prefill(
        name="prefill's window is one too wide",
        old="shown &= keys[None, :] > asking[:, None] - window",
        new="shown &= keys[None, :] >= asking[:, None] - window",
        why="transformers#39408, in prefill.",
        killers=(f"{_PREFILL}::test_a_window_shows_exactly_its_keys",),
    ),
    _prefill(
        name="tiles that some rows may not see go without a mask",
        old="tl.maximum(earliest + 1, 0) // BLOCK_N * BLOCK_N",
        new="tl.maximum(earliest + tokens, 0) // BLOCK_N * BLOCK_N",
        why="The first row of a tile sees what only the last one may.",
        killers=(_CHUNKS,),
    ),
    _prefill(
        name="the tail of the last block is not masked",
        old="valid = (keys < length) & (keys >= oldest)",
        new="valid = keys >= oldest",
        why="Nothing weighs the values there, but nothing times NaN is NaN.",
        killers=(_CHUNKS,),
    ),
    _prefill(
        name="the rows of a tile are cut as the longest of them is",
        old="cut(asking + 1, window, WINDOW, SPLIT, MOST_SPLITS)",
        new="cut(asking * 0 + end, window, WINDOW, SPLIT, MOST_SPLITS)",
        why="A row's parts then follow from which rows its chunk holds.",
        killers=(_EDGES_OF_SPLITS,),
    ),
    _prefill(
        name="a part of a prefilled row is closed one key late",
        old="& (asking >= start + BLOCK_N)",
        new="& (asking > start + BLOCK_N)",
        why="The first key of a split counts in the part before, where decode opens a new one.",
        killers=(_EDGES_OF_SPLITS,),
    ),
    _prefill(
        name="a part begins with the maximum of the one before",
        old='                maximum = tl.where(closed, float("-inf"), maximum)\n',
        new="",
        why="The next part is weighed by the largest score of all before it: the same number, and other bits.",
        killers=(_EDGES_OF_SPLITS,),
    ),
    _kernel(
        name="queries are normed by the keys' weights",
        file="weft/kernels/cache_write.py",
        old="tl.where(is_query, query_norm, key_norm),",
        new="tl.where(is_query, key_norm, key_norm),",
        why="Qwen3 has a norm for each.",
        killers=(f"{_TURNED}[{{'norm': True}}-torch.float32]",),
    ),
    _sample(
        name="noise does not know the position",
        old="noise = _gumbel(token.to(tl.int64), tl.load(positions + row), tl.load(seeds + row), ROUNDS)",
        new="noise = _gumbel(token.to(tl.int64), tl.load(positions), tl.load(seeds + row), ROUNDS)",
        why="A request draws as its neighbour does.",
        killers=(f"{_SAMPLE}::test_noise_reaches_every_bit_of_seed_position_and_token",),
    ),
    _sample(
        name="a token at the threshold is not drawn",
        old="inside = inside & (values >= tl.load(thresholds + row))",
        new="inside = inside & (values > tl.load(thresholds + row))",
        why="With top_k 1 there is nothing left.",
        killers=(f"{_SAMPLE}::test_what_is_minus_infinite_or_below_the_threshold_is_never_drawn",),
    ),
    _sample(
        name="NaN is a logit like any other",
        old='tl.where(values < float("inf"), 0, 1)',
        new='tl.where(values != float("inf"), 0, 1)',
        why="A request whose logits are broken goes on.",
        killers=(f"{_SAMPLE}::test_equal_logits_give_the_lowest_id_and_broken_rows_minus_one",),
    ),
    _sample(
        name="one of ten rounds is left out",
        old="for _ in tl.static_range(ROUNDS):",
        new="for _ in tl.static_range(ROUNDS - 1):",
        why="Noise as good as any, and not the engine's own.",
        killers=(f"{_SAMPLE}::test_every_row_gets_the_token_that_plain_torch_gives_it[131]",),
    ),
    _cut(
        name="one token more than top_k",
        old="values.topk(int(top_k[row])).values",
        new="values.topk(int(top_k[row]) + 1).values",
        why="A count that is taken for a last index.",
        killers=(f"{_TRUNCATE}::test_each_alone_keeps_what_huggingface_keeps[2.5]",),
    ),
    _cut(
        name="min_p forgets the temperature",
        old="highest.double() + temperatures[row].double() * logarithm(min_p[row].double())",
        new="highest.double() + logarithm(min_p[row].double())",
        why="Right at temperature 1, where most tests are.",
        killers=(f"{_TRUNCATE}::test_each_alone_keeps_what_huggingface_keeps[2.5]",),
    ),
    _cut(
        name="top_p is taken of the whole",
        old="left = values[values >= found[row]]",
        new="left = values",
        why="After top_k it is a share of what top_k left.",
        killers=(f"{_TRUNCATE}::test_together_they_cut_as_a_sort_in_float64_does[131]",),
    ),
    _gather(
        name="padding is written to slot 0",
        old="tl.store(out_slots + token, piece.to(tl.int64) * 0 - 1, mask=mask)",
        new="tl.store(out_slots + token, piece.to(tl.int64) * 0, mask=mask)",
        why="vllm#43810: a padded step overwrites a live slot.",
        killers=(_GATHERED,),
    ),
    _gather(
        name="a block table ends a block early",
        old="used = tl.cdiv(before + count, P)",
        new="used = (before + count) // P",
        why="The last, unfilled block is not named.",
        killers=(_GATHERED,),
    ),
    _commit(
        name="a failed row keeps -1 as its token",
        old="tl.maximum(token, 0)",
        new="token",
        why="The next step looks up row -1 of the embedding.",
        killers=(f"{_STATE}::test_a_step_is_committed_as_plain_torch_commits_it",),
    ),
    _commit(
        name="a chunk that stops short leaves a token",
        old="mask=lives & (tl.load(keeps + request) != 0))",
        new="mask=lives)",
        why="The next token of the prompt is overwritten.",
        killers=(f"{_STATE}::test_a_step_is_committed_as_plain_torch_commits_it",),
    ),
    _kernel(
        name="the gradient of an embedding loses a token",
        file="weft/kernels/embedding.py",
        old="range(tl.load(starts + token), end, ROWS)",
        new="range(tl.load(starts + token) + 1, end, ROWS)",
        why="The first of each id's tokens does not count.",
        killers=(
            "tests/kernels/test_embedding.py::test_rows_and_ordered_sums_are_met_to_the_bit[20-repeated-torch.float32]",
        ),
    ),
    _kernel(
        name="training attention does not rescale its output",
        file="weft/kernels/_flash_forward.py",
        old="        output = output * keep[:, None]\n",
        new="",
        why="Right as long as the first block holds the largest score.",
        killers=("tests/kernels/test_flash_attention.py::test_huge_scores_neither_overflow_nor_lose_the_largest",),
    ),
    _kernel(
        name="training attention shows the next key",
        file="weft/kernels/_flash_forward.py",
        old="column[None, :] <= (row + (shift - first))[:, None]",
        new="column[None, :] <= (row + (shift - first) + 1)[:, None]",
        why="A model that is trained to look ahead.",
        killers=("tests/kernels/test_flash_attention.py::test_every_row_sees_just_the_keys_up_to_its_own",),
    ),
    _sample(
        name="equivalent: noise at temperature 0 is drawn and weighs nothing",
        old="drawn = temperature > 0\n",
        new="drawn = temperature >= 0\n",
        why="Nothing times a finite number is added.",
        killers=(
            f"{_SAMPLE}::test_every_row_gets_the_token_that_plain_torch_gives_it[131]",
            f"{_SAMPLE}::test_equal_logits_give_the_lowest_id_and_broken_rows_minus_one",
        ),
        expect="survives",
    ),
)
