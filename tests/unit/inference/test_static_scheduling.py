"""Static batching against a fake executor: what every plan promises, whatever arrives, leaves and fails."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.unit.inference.test_scheduler import NOT_FINITE, PLAIN, STOP, request_of, scheduler_of
from weft.inference.plan import StepPlan
from weft.inference.request import FinishReason
from weft.inference.step_output import StepOutput


class Job:
    """What the test knows of one request: the tokens it will sample, and what it has been given so far."""

    def __init__(self, request_id: str, prompt: int, sampled: list[int]) -> None:
        self.request_id, self.prompt, self.sampled = request_id, prompt, sampled
        self.computed = self.produced = 0
        self.row: int | None = None
        self.block: int | None = None

    @property
    def known(self) -> int:
        return self.prompt + self.produced

    @property
    def reason(self) -> FinishReason:
        return {STOP: "stop", NOT_FINITE: "error", PLAIN: "length"}[self.sampled[-1]]  # type: ignore[return-value]


class StaticScheduling(RuleBasedStateMachine):
    @initialize(num_seqs=st.integers(1, 4), spare=st.integers(0, 12), chunk=st.none() | st.integers(1, 6))
    def start(self, num_seqs: int, spare: int, chunk: int | None) -> None:
        self.num_seqs, self.budget, self.chunk = num_seqs, num_seqs + spare, chunk
        self.scheduler = scheduler_of(num_seqs, self.budget, chunk)
        self.alive: list[Job] = []  # in order of arrival
        self.batch: list[Job] = []

    @rule(name=st.sampled_from("abcdefgh"), prompt=st.integers(1, 12), output=st.integers(1, 6), end=st.data())
    def arrive(self, name: str, prompt: int, output: int, end: st.DataObject) -> None:
        assert (name in self.scheduler) == any(job.request_id == name for job in self.alive)
        if name in self.scheduler:
            return
        last = end.draw(st.sampled_from([PLAIN, STOP, NOT_FINITE]))
        self.alive.append(Job(name, prompt, [PLAIN] * (output - 1) + [last]))
        # A job that ends by itself would have had room for more.
        self.scheduler.add(request_of(name, prompt, output + (last != PLAIN)))

    @rule()
    def step(self) -> None:
        self.finish_while_a_step_is_under_way(set())

    @rule(names=st.sets(st.sampled_from("abcdefgh"), max_size=3))
    def finish(self, names: set[str]) -> None:
        for name in [*names, *names]:
            self.scheduler.finish(name, "abort")
            assert name not in self.scheduler
        self.alive = [job for job in self.alive if job.request_id not in names]

    @rule(names=st.sets(st.sampled_from("abcdefgh"), max_size=3))
    def finish_while_a_step_is_under_way(self, names: set[str]) -> None:
        if not self.scheduler.has_requests:
            assert not self.alive
            return
        plan = self.scheduler.schedule()
        jobs = self.check(plan)
        self.finish(names)
        sampled = [
            job.sampled[job.produced : job.produced + rows] for job, rows in zip(jobs, plan.num_logit_rows, strict=True)
        ]
        outputs = {output.request_id: output for output in self.scheduler.update(plan, sampled)}
        expected = [
            (job, new[0]) for job, new in zip(jobs, sampled, strict=True) if new and job.request_id not in names
        ]
        assert outputs.keys() == {job.request_id for job, _ in expected}
        for job, new in expected:
            self.take(job, new, outputs[job.request_id])

    def take(self, job: Job, new: int, output: StepOutput) -> None:
        job.produced += 1
        ended = job.produced == len(job.sampled)
        assert output == StepOutput(
            request_id=job.request_id,
            new_token_ids=() if new == NOT_FINITE else (new,),
            finished=ended,
            finish_reason=job.reason if ended else None,
            stop_reason=STOP if new == STOP else None,
            error="the logits hold NaN or infinity" if new == NOT_FINITE else None,
        )
        if ended:
            self.alive.remove(job)

    def check(self, plan: StepPlan) -> list[Job]:
        """Every promise of one plan; what it computes is counted."""
        if not any(job in self.alive for job in self.batch):
            self.batch = self.alive[: self.num_seqs]
        by_id = {job.request_id: job for job in self.alive}
        jobs = [by_id[request_id] for request_id in plan.request_ids]
        assert jobs, "no progress"
        assert all(job in self.batch for job in jobs), "a later batch began before the earlier one ended"
        assert sum(plan.num_new_tokens) <= self.budget
        assert all(1 <= new <= (self.chunk or self.budget) for new in plan.num_new_tokens)
        admitted = {admission.row: admission for admission in plan.admissions}
        grown = {new.row: new for new in plan.new_blocks[0]}
        assert len(admitted) == len(plan.admissions)
        for job, row, new, rows in zip(jobs, plan.rows, plan.num_new_tokens, plan.num_logit_rows, strict=True):
            assert (job.row is None) == (row in admitted)
            if job.row is None:
                assert admitted[row].token_ids == (PLAIN,) * job.prompt
                (job.block,) = grown[row].blocks
                job.row = row
            assert row == job.row
            job.computed += new
            assert job.computed <= job.known
            assert rows == (job.computed == job.known), "logits exactly where the known tokens end"
        running = [job for job in self.alive if job.row is not None]
        assert len({job.row for job in running}) == len({job.block for job in running}) == len(running)
        return jobs

    def teardown(self) -> None:
        """Drained, every row and block is free again: a full batch finds all of them."""
        bound = sum(job.prompt + len(job.sampled) for job in self.alive)
        for _ in range(bound):
            self.step()
        assert not self.scheduler.has_requests
        for name in range(self.num_seqs):
            self.scheduler.add(request_of(str(name)))
        plan = self.scheduler.schedule()
        assert sorted(plan.rows) == list(range(self.num_seqs))
        assert sorted(block for new in plan.new_blocks[0] for block in new.blocks) == list(range(self.num_seqs))


TestStaticScheduling = StaticScheduling.TestCase
