"""Every kernel once, forward and back, at shapes a few tiles large: what compute-sanitizer is run over.

    python -m tests.kernels.smallest [part of a name]

Where there is no GPU the same runs in Triton's interpreter (TRITON_INTERPRET=1), which keeps the list from going stale.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from tests.kernels.paged_step import Step, decode, make_step, own_reference, prefill
from weft.benchmark.kernels.contender import RIGHT, worst_error
from weft.benchmark.kernels.small_operations import Widths, small_operations
from weft.kernels import commit_step, embedding, gather_step, truncate
from weft.kernels.flash_attention import attention_reference, flash_attention
from weft.kernels.gather_step import StateTensors

_WIDTHS = Widths(name="smallest", hidden=96, inner=80, packed=112, vocab_size=70, loss_tokens=5)
_MOST_ROWS = 64
_SPLIT = 128  # a multiple of every tile of keys

Case = Callable[[torch.device, torch.dtype], float]


def cases() -> dict[str, Case]:
    """By name, each gives the error of its kernel as a part of the result."""
    found: dict[str, Case] = {
        "flash attention, dense": _flash(None),
        "flash attention, packed": _flash((0, 1, 1, 20, 37)),
        "gather_step and commit_step": _step_state,
        "paged decode, rotation and write": _decode(),
        "paged decode, merge_parts": _decode(split=_SPLIT, lend=False),
        "paged decode, shares of a long request": _decode(split=_SPLIT, lend=True),
        "paged prefill, rotation and write": _prefill,
        "embedding and its gradient": _embedding,
        "truncate": _truncate,
    }
    for operation in small_operations(_WIDTHS):
        if operation.inputs[0][0] <= _MOST_ROWS:
            found[operation.name] = _small(operation.name)
    return found


def run(part: str, device: torch.device, dtype: torch.dtype) -> int:
    """Run the cases whose name has this part, say how each went, and count those that are wrong."""
    wrong = 0
    for name, case in cases().items():
        if part in name:
            error = 100 * case(device, dtype)
            wrong += not RIGHT.met(error)
            print(f"{name}: error {error:.3f} %{'' if RIGHT.met(error) else ', WRONG'}", flush=True)
    return wrong


def _flash(starts: tuple[int, ...] | None) -> Case:
    def case(device: torch.device, dtype: torch.dtype) -> float:
        tokens = (2, 37) if starts is None else (37,)
        query, gradient = (torch.randn(*tokens, 4, 64, device=device, dtype=dtype) for _ in range(2))
        key, value = (torch.randn(*tokens, 2, 64, device=device, dtype=dtype) for _ in range(2))
        packed = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
        results = []
        for attend, wide in ((flash_attention, dtype), (attention_reference, torch.float64)):
            leaves = [tensor.detach().to(wide).requires_grad_() for tensor in (query, key, value)]
            output = attend(*leaves, causal=True, query_starts=packed)[0]
            results.append([output.detach(), *torch.autograd.grad(output, leaves, gradient.to(wide))])
        return worst_error(*results)

    return case


def _step(
    counts: tuple[int, ...], device: torch.device, dtype: torch.dtype, lengths: tuple[int, ...] = (1, 17, 33)
) -> Step:
    step = make_step(lengths, counts, heads=(4, 2), head_dim=64, dtype=dtype, device=device, norm=True)
    return replace(step, pool=step.pool.nan_to_num())


def _decode(**options: int | bool) -> Case:
    """options: of `paged_decode`; with a split of its own, one request is cut into two."""

    def case(device: torch.device, dtype: torch.dtype) -> float:
        step = _step((1, 1, 1), device, dtype, (1, 17, _SPLIT + 33 if options else 33))
        return worst_error([decode(step, step.pool.clone(), **options)], [own_reference(step.to(torch.float64))[0]])

    return case


def _prefill(device: torch.device, dtype: torch.dtype) -> float:
    step = _step((1, 3, 20), device, dtype)
    return worst_error([prefill(step, step.pool.clone())], [own_reference(step.to(torch.float64))[0]])


def _embedding(device: torch.device, dtype: torch.dtype) -> float:
    weight, gradient = (torch.randn(count, 96, device=device, dtype=dtype) for count in (9, 37))
    token_ids = torch.arange(37, device=device) * 5 % 9
    results = []
    for look_up, wide in ((embedding.embedding, dtype), (embedding.reference, torch.float64)):
        leaf = weight.detach().to(wide).requires_grad_()
        output = look_up(leaf, token_ids)
        results.append([output.detach(), *torch.autograd.grad(output, leaf, gradient.to(wide))])
    return worst_error(*results)


def _truncate(device: torch.device, dtype: torch.dtype) -> float:
    logits = torch.randn(3, truncate.BLOCK + 70, device=device, dtype=dtype)
    temperatures, top_k = torch.tensor([0, 1, 0.5], device=device), torch.tensor([0, 5, 0], device=device)
    given = logits, temperatures, top_k, torch.tensor([1, 0.9, 0.5], device=device), temperatures / 100
    return float((truncate.thresholds(*given) != truncate.reference(*given)).sum())


def _step_state(device: torch.device, dtype: torch.dtype) -> float:
    def state() -> StateTensors:
        return StateTensors(
            token_ids=torch.arange(60, device=device).view(3, 20),
            num_computed_tokens=torch.tensor([3, 7, 0], device=device),
            block_table=torch.arange(9, device=device).view(3, 3),
            temperatures=torch.ones(3, device=device),
            top_k=torch.arange(3, device=device),
            top_p=torch.ones(3, device=device),
            min_p=torch.zeros(3, device=device),
            seeds=torch.arange(3, device=device),
            num_steps=torch.zeros(1, dtype=torch.int64, device=device),
            block_size=8,
        )

    rows, starts = torch.tensor([1, 0, 2], device=device), torch.tensor([0, 1, 6, 6], device=device)
    keeps = torch.tensor([True, False, False], device=device)
    results = []
    for gather, commit in (
        (gather_step.gather_step, commit_step.commit_step),
        (gather_step.reference, commit_step.reference),
    ):
        kept, log = state(), torch.zeros(4, 3, dtype=torch.int64, device=device)
        step = gather(kept, rows, starts, 9)
        commit(kept, rows, step.sequence_lengths, rows + 50, keeps, log)
        results.append([kept.token_ids, kept.num_computed_tokens, step.token_ids, step.positions, step.slots, log])
    wrong = sum(int((found != expected).sum()) for found, expected in zip(*results, strict=True))
    return float(wrong)


def _small(name: str) -> Case:
    def case(device: torch.device, dtype: torch.dtype) -> float:
        (operation,) = [one for one in small_operations(_WIDTHS) if one.name == name]
        inputs = [torch.randn(shape, device=device, dtype=operation.dtype or dtype) for shape in operation.inputs]
        if operation.weight is not None:  # products as large as factors: a softmax of larger ones has no digits
            inputs[operation.weight] *= operation.inputs[operation.weight][-1] ** -0.5
        expected = operation.peer(*(tensor.double() for tensor in inputs))
        # Last: a kernel may read its weights before the one directly ahead, which may have made them, has ended.
        return worst_error(operation.weft(*inputs), expected)

    return case


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("a GPU is needed")
    torch.manual_seed(0)
    sys.exit(min(run(sys.argv[1] if len(sys.argv) > 1 else "", torch.device("cuda"), torch.bfloat16), 1))
