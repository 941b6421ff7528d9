"""What a step leaves in the device's state: its tokens count as computed, and each sampled token takes its place.

So the next step finds its token on the device. The host reads tokens later, from the entry of `log` that the counter of
steps points at; entries are used again after as many steps as there are, and the memory may be the host's own.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from weft.errors import KernelError
from weft.kernels._arguments import check_device, check_range, debugging
from weft.kernels._jit import early_launch, jit, tl
from weft.kernels.gather_step import StateTensors, check_state
from weft.kernels.specialisation import Specialisation


def reference(
    state: StateTensors,
    rows: Int[Tensor, "B"],
    sequence_lengths: Int[Tensor, "B"],
    sampled: Int[Tensor, "B"],
    keeps: Bool[Tensor, "B"],
    log: Int[Tensor, "entries most"],
) -> None:
    """The same in plain torch."""
    scratch = len(state.num_computed_tokens) - 1
    entry = log[int(state.num_steps) % len(log)]
    for request, row in enumerate(rows.tolist()):
        entry[request] = sampled[request].to(log.device)
        if row == scratch:
            continue
        state.num_computed_tokens[row] = sequence_lengths[request]
        if keeps[request]:
            place = min(int(sequence_lengths[request]), state.token_ids.shape[1] - 1)
            state.token_ids[row, place] = sampled[request].clamp(min=0)


@jit
def _commit_step_kernel(
    state_tokens,
    token_stride,
    most_tokens,
    computed,
    num_steps,
    scratch,
    rows,
    lengths,
    sampled,
    keeps,
    log,
    most,
    entries,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    token = tl.load(sampled + request)
    entry = tl.load(num_steps) % entries
    tl.store(log + entry * most + request, token)
    row = tl.load(rows + request)
    length = tl.load(lengths + request)
    lives = row != scratch
    tl.store(computed + row, length, mask=lives)
    place = row * token_stride + tl.minimum(length, most_tokens - 1)
    tl.store(state_tokens + place, tl.maximum(token, 0), mask=lives & (tl.load(keeps + request) != 0))


def commit_step(
    state: StateTensors,
    rows: Int[Tensor, "B"],
    sequence_lengths: Int[Tensor, "B"],
    sampled: Int[Tensor, "B"],
    keeps: Bool[Tensor, "B"],
    log: Int[Tensor, "entries most"],
) -> None:
    """Write to the state of every row but the last, which is scratch, and to the log.

    sampled: -1 is logged as it is, and 0 kept in its place: a valid id until the host ends the request.
    keeps: whether a request's token is one; False for a chunk that stops short of its end.
    log: on the device, or pinned memory of the host.
    Raises: KernelError for shapes, dtypes and devices that do not fit; with WEFT_DEBUG=1 also for rows and lengths that
    do not exist.
    """
    check_state(state)
    batch = rows.numel()
    for name, tensor, dtype in (
        ("rows", rows, torch.int64),
        ("sequence_lengths", sequence_lengths, torch.int64),
        ("sampled", sampled, torch.int64),
        ("keeps", keeps, torch.bool),
    ):
        if tensor.shape != (batch,) or tensor.dtype != dtype or not tensor.is_contiguous():
            raise KernelError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not a contiguous {dtype} [{batch}]")
    if log.ndim != 2 or log.dtype != torch.int64 or not log.is_contiguous() or log.shape[1] < batch or not len(log):
        raise KernelError(f"log is {log.dtype} {tuple(log.shape)}, not contiguous int64 with room for {batch} tokens")
    beside = {"rows": rows, "sequence_lengths": sequence_lengths, "sampled": sampled, "keeps": keeps}
    check_device("token_ids", state.token_ids, others=beside)
    if log.device != rows.device and not (log.device.type == "cpu" and log.is_pinned()):
        raise KernelError(f"log lies on {log.device} and rows on {rows.device}", hint="the same, or pinned memory")
    if debugging():
        check_range("rows", rows, 0, len(state.token_ids) - 1)
        check_range("sequence_lengths", sequence_lengths, 0, state.token_ids.shape[1])
    if batch:
        _commit_step_kernel[(batch,)](
            state.token_ids,
            state.token_ids.stride(0),
            state.token_ids.shape[1],
            state.num_computed_tokens,
            state.num_steps,
            len(state.num_computed_tokens) - 1,
            rows,
            sequence_lengths,
            sampled,
            keeps,
            log,
            log.shape[1],
            len(log),
            num_warps=1,
            **early_launch(rows.device),
        )


_INTEGERS = ("state_tokens", "computed", "num_steps", "rows", "lengths", "sampled", "log")
SPECIALISATIONS = tuple(
    Specialisation(
        name="early" if early else "plain",
        kernel=_commit_step_kernel,
        signature={
            **dict.fromkeys(_INTEGERS, "*i64"),
            **dict.fromkeys(("token_stride", "most_tokens", "scratch", "most", "entries"), "i32"),
            "keeps": "*i1",
        },
        constants={"EARLY": early},
        num_warps=1,
        num_stages=3,
        aligned=frozenset({*_INTEGERS, "token_stride", "most_tokens"}),
        capabilities=(90, 100) if early else (80, 89),
        waits=early,
    )
    for early in (True, False)
)
