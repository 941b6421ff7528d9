import pytest
import torch

from weft.errors import KernelError
from weft.inference import noise
from weft.kernels import sample as kernel
from weft.kernels.sample import reference, sample


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,))
    return seeds, torch.randint(0, 2**31, (count,))


def test_the_plain_version_draws_the_engines_noise_to_the_bit() -> None:
    seeds, positions = rows(3)
    tokens = torch.arange(1000)[None].expand(3, -1)
    uniform = kernel.uniform_reference(tokens, positions[:, None], seeds[:, None])
    assert torch.equal(-torch.log(-torch.log(uniform)).float(), noise.gumbel(seeds, positions, 1000))


@pytest.mark.parametrize("vocab_size", [1, 131, 1024, 1025, 9000])
def test_every_row_gets_the_token_that_plain_torch_gives_it(vocab_size: int, device: torch.device) -> None:
    seeds, positions = rows(6)
    logits = torch.randn(6, vocab_size + 5)[:, :vocab_size] * 3
    temperatures = torch.tensor([0.0, 0.7, 1.0, 0.0, 5.0, 1e-30])
    arguments = (logits, temperatures, seeds, positions)
    found = sample(*(tensor.to(device) for tensor in arguments)).cpu()
    assert torch.equal(found, reference(*arguments))
    alone = sample(*(tensor[2:3].to(device) for tensor in arguments)).cpu()
    assert torch.equal(alone, found[2:3])


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_narrow_logits_are_taken_as_they_are(dtype: torch.dtype, device: torch.device) -> None:
    """Noise is added in float32, so that equal logits, of which there are many, are told apart."""
    seeds, positions = rows(4)
    logits, temperatures = (torch.randn(4, 9000) * 3).to(dtype), torch.tensor([0.0, 0.7, 1.0, 5.0])
    logits[0, [7, 8000]] = 60.0
    found = sample(*(tensor.to(device) for tensor in (logits, temperatures, seeds, positions))).cpu()
    assert torch.equal(found, reference(logits.float(), temperatures, seeds, positions))
    assert torch.equal(found, reference(logits, temperatures, seeds, positions))
    assert found[0] == 7


def test_noise_reaches_every_bit_of_seed_position_and_token(device: torch.device) -> None:
    """Equal logits: the token is the noise's own argmax, which another seed, position or order would move."""
    logits, one = torch.zeros(4, 5000), torch.ones(4)
    seeds, positions = torch.tensor([1, 1 + 2**40, 1, -1]), torch.tensor([3, 3, 4, 3])
    found = sample(*(tensor.to(device) for tensor in (logits, one, seeds, positions))).cpu()
    assert torch.equal(found, noise.gumbel(seeds, positions, 5000).argmax(-1))
    assert len(set(found.tolist())) == 4


def test_equal_logits_give_the_lowest_id_and_broken_rows_minus_one(device: torch.device) -> None:
    logits = torch.zeros(6, 9000)
    logits[1, 8000] = 1.0
    logits[2, 8999] = torch.nan
    logits[3, 5] = torch.inf
    logits[4] = -torch.inf
    logits[5, 5], logits[5, 6] = torch.inf, torch.nan
    zero = torch.zeros(6, dtype=torch.int64)
    for temperature in (0.0, 1.0):
        arguments = (logits, torch.full((6,), temperature), zero, zero)
        found = sample(*(tensor.to(device) for tensor in arguments)).cpu()
        assert found[2:].tolist() == [-1, -1, -1, -1]
        assert torch.equal(found, reference(*arguments))
    assert sample(*(tensor[:2].to(device) for tensor in (logits, torch.zeros(6), zero, zero))).tolist() == [0, 8000]


def test_what_is_minus_infinite_or_below_the_threshold_is_never_drawn(device: torch.device) -> None:
    """Ids that may be drawn lie in few chunks, at the edges of the row and where a chunk ends."""
    allowed = torch.tensor([0, 1023, 2048, 3099])
    seeds, positions = rows(16)
    mask = torch.zeros(3100, dtype=torch.bool)
    mask[allowed] = True
    logits = torch.randn(16, 3100)
    excluded, low = logits.masked_fill(~mask, -torch.inf), torch.where(mask, logits.clamp(min=0.0), logits - 10)
    for temperature in (0.0, 1.0, 30.0):
        warm = torch.full((16,), temperature)
        for given, thresholds in ((excluded, None), (low, torch.zeros(16)), (excluded, torch.full((16,), -1e30))):
            arguments = [given, warm, seeds, positions] + ([] if thresholds is None else [thresholds])
            found = sample(*(tensor.to(device) for tensor in arguments)).cpu()
            assert torch.equal(found, reference(*arguments))
            assert torch.isin(found, allowed).all()
    assert len(found.unique()) == 4


def test_a_threshold_leaves_the_noise_of_those_that_remain(device: torch.device) -> None:
    """-inf changes nothing; the highest logit as a threshold is greedy; one that nothing reaches fails the row."""
    seeds, positions = rows(4)
    logits, warm = torch.randn(4, 5000) * 3, torch.tensor([0.5, 1.0, 2.0, 0.0])
    arguments = [tensor.to(device) for tensor in (logits, warm, seeds, positions)]
    free = torch.full((4,), -torch.inf, device=device)
    assert torch.equal(sample(*arguments, free), sample(*arguments))
    assert torch.equal(sample(*arguments, logits.amax(-1).to(device)).cpu(), logits.argmax(-1))
    free[1], free[2] = 1e30, torch.nan
    assert sample(*arguments, free).tolist()[1:3] == [-1, -1]
    assert reference(logits, warm, seeds, positions, free.cpu()).tolist()[1:3] == [-1, -1]


def test_bad_input_is_refused_by_name(device: torch.device) -> None:
    logits, one = torch.zeros(2, 9, device=device), torch.ones(2, device=device)
    whole = torch.zeros(2, dtype=torch.int64, device=device)
    for message, arguments in {
        "logits must be": (logits.T, one, whole, whole),
        "torch.int64 of shape": (logits.long(), one, whole, whole),
        "temperatures is torch.float64": (logits, one.double(), whole, whole),
        "seeds is torch.int32": (logits, one, whole.int(), whole),
        r"positions is torch.int64 \(1,\)": (logits, one, whole, whole[:1]),
        "thresholds is torch.float64": (logits, one, whole, whole, one.double()),
        r"thresholds is torch.float32 \(1,\)": (logits, one, whole, whole, one[:1]),
    }.items():
        with pytest.raises(KernelError, match=message):
            sample(*arguments)
