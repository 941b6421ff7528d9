"""Tests marked gpu run on another machine, and their reports are replayed here. Nothing is imported before it is asked.

session.py            the run here: what stays, what goes away, what is replayed
interface.py          a job, and what a runner is: modal_runner.py, subprocess_runner.py, inline_runner.py
process.py            the run there: one pytest in a process of its own, an event a line
worker.py             the plugin in that pytest
events.py, ledger.py  what is said, and what may be believed
artefacts.py          files that come back
program.py            a program in place of tests
"""
