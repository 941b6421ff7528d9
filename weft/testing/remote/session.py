"""The run here: tests that need no GPU run as ever, those marked gpu run elsewhere, and their reports are replayed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from weft.errors import RemoteError, WeftError
from weft.testing.remote.arguments import arguments_for
from weft.testing.remote.artefacts import artefact_folders, write_artefact
from weft.testing.remote.events import read_event, read_report
from weft.testing.remote.gpu_names import DEFAULT_GPU, checked_gpu
from weft.testing.remote.interface import Job, Runner
from weft.testing.remote.ledger import Ledger, Result

PLUGIN_NAME = "weft-remote"


def register(config: pytest.Config) -> None:
    """Take the place of pytest's own loop in this run. Raises: ConfigError for the name of a GPU."""
    gpu = DEFAULT_GPU if config.option.modal is None else checked_gpu(config.option.modal)
    config.pluginmanager.register(RemoteSession(config, config.option.weft_runner or "modal", gpu), PLUGIN_NAME)


class RemoteSession:
    """Hooks of one session."""

    def __init__(self, config: pytest.Config, runner_name: str, gpu: str) -> None:
        self._config, self._runner_name, self._gpu = config, runner_name, gpu
        self._ran = 0
        self._environments: dict[str, None] = {}
        self._written: list[str] = []
        self._problems: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        errors = session.testsfailed and not session.config.option.continue_on_collection_errors
        if errors or session.config.option.collectonly:
            return None  # pytest's own loop says so
        away = [item for item in session.items if item.get_closest_marker("gpu")]
        if not away:
            raise pytest.UsageError("tests marked gpu are to run elsewhere, and none is selected")
        with self._opened(away) as runner:
            self._run_here(session, [item for item in session.items if not item.get_closest_marker("gpu")])
            for items in _groups(away):
                self._run_there(session, runner, items)
        if not self._ran and not session.testsfailed:
            self._problems.append("no test marked gpu ran: all were skipped")
        if self._problems:
            session.shouldfail = "the run elsewhere cannot be believed: " + "; ".join(dict.fromkeys(self._problems))
            raise session.Failed(session.shouldfail)
        return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = [*self._environments, *(f"written: {path}" for path in self._written)]
        if lines:
            terminalreporter.section("tests that ran elsewhere")
            for line in lines:
                terminalreporter.line(line)

    @contextmanager
    def _opened(self, away: Sequence[pytest.Item]) -> Iterator[Runner]:
        runner = self._make_runner(away)
        try:
            runner.open()
        except WeftError as error:
            raise pytest.UsageError(str(error)) from error
        try:
            yield runner
        finally:
            runner.close()

    def _make_runner(self, away: Sequence[pytest.Item]) -> Runner:
        root = self._config.rootpath
        if self._runner_name == "subprocess":
            from weft.testing.remote.subprocess_runner import SubprocessRunner

            return SubprocessRunner(root, self._config.getini("weft_remote_command"))
        if self._runner_name == "inline":
            from weft.testing.remote.inline_runner import InlineRunner

            return InlineRunner(away)
        from weft.testing.remote.modal_runner import ModalRunner

        return ModalRunner(root, self._gpu, shows_output=self._config.option.capture == "no")

    def _run_here(self, session: pytest.Session, items: Sequence[pytest.Item]) -> None:
        for item, following in zip(items, [*items[1:], None][: len(items)], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            _stop_if_asked(session)

    def _run_there(self, session: pytest.Session, runner: Runner, items: Sequence[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        measured = {node_id for node_id, item in by_id.items() if item.get_closest_marker("perf")}
        job = Job(
            node_ids=tuple(by_id),
            arguments=arguments_for(self._config),
            artefact_folders=artefact_folders(node_id.partition("::")[0] for node_id in by_id),
        )
        ledger = Ledger(job.node_ids, measured)
        ending: tuple[str, ...] = ()
        stream = runner.run(job)
        try:
            for line in stream:
                for result in ledger.hear(read_event(line)):
                    item = by_id[result.node_id]
                    self._replay(item, self._read(item, result), runner.elsewhere)
                    _stop_if_asked(session)
        except (session.Failed, session.Interrupted):
            raise
        except Exception as error:  # of the runner, which may be anybody's: its tests must not vanish with it
            ending = (f"{type(error).__name__}: {error}",)
            self._problems.append(ending[0])
        finally:
            if hasattr(stream, "close"):
                stream.close()
        if ledger.environment:
            known = ", ".join(f"{name} {value}" for name, value in ledger.environment.items())
            self._environments[f"{runner.description}: {known}"] = None
        for node_id, reason in ledger.close(*ending).items():
            self._replay(by_id[node_id], [_lost(by_id[node_id], reason)], runner.elsewhere)
            _stop_if_asked(session)
        self._problems += ledger.problems
        self._write(ledger, job.artefact_folders)

    def _read(self, item: pytest.Item, result: Result) -> list[pytest.TestReport]:
        try:
            return [read_report(self._config, data) for data in result.reports]
        except RemoteError as error:
            return [_lost(item, str(error))]

    def _replay(self, item: pytest.Item, reports: Sequence[pytest.TestReport], elsewhere: bool) -> None:
        manager = self._config.pluginmanager
        # Syrupy takes a test that passed without a snapshot for the end of that snapshot, and may delete it; what ran
        # elsewhere it is to take for skipped.
        syrupy = manager.get_plugin("syrupy") if elsewhere else None
        blind = [] if syrupy is None else [syrupy]
        replay = manager.subset_hook_caller("pytest_runtest_logreport", remove_plugins=blind)
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            if report.when == "call" and report.outcome != "skipped":
                self._ran += 1
            replay(report=report)
            for plugin in blind:
                plugin.pytest_runtest_logreport(report=_report(item, "skipped", "ran elsewhere"))
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _write(self, ledger: Ledger, folders: Sequence[str]) -> None:
        for path, content in ledger.artefacts().items():
            try:
                if write_artefact(self._config.rootpath, folders, path, content):
                    self._written.append(path)
            except RemoteError as error:
                self._problems.append(str(error))


def _groups(items: Sequence[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests of one job each: what measures speed runs alone, on a machine that nothing has warmed or filled."""
    together = [item for item in items if not item.get_closest_marker("perf")]
    alone = [[item] for item in items if item.get_closest_marker("perf")]
    return [together, *alone] if together else alone


def _stop_if_asked(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _lost(item: pytest.Item, reason: str) -> pytest.TestReport:
    return _report(item, "failed", reason)


def _report(item: pytest.Item, outcome: Any, reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,
        longrepr=reason,
        when="call",
    )
