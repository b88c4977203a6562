"""A pool of daemon threads: what it runs, on how many threads, and that nothing waits for them. All threads' names."""

from __future__ import annotations

import ast
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest

from tfps.threads import DaemonPool, Flag

PACKAGE = Path(__file__).resolve().parent.parent / "tfps"


def named(tree: ast.AST) -> Iterator[ast.expr | None]:
    """What names the threads that a module starts; None: nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "Thread":
                yield next((keyword.value for keyword in node.keywords if keyword.arg == "name"), None)
            elif called == "DaemonPool":
                yield node.args[1]
        elif isinstance(node, ast.Assign) and any(
            isinstance(to, ast.Attribute) and to.attr == "name" for to in node.targets
        ):
            yield from [node.value] if "tfps-" in ast.unparse(node.value) else []  # of a Timer, which takes no name


def test_no_two_threads_are_called_alike() -> None:
    names = []
    for path in PACKAGE.rglob("*.py"):
        for name in named(ast.parse(path.read_text(encoding="utf-8"))):
            if path.name == "threads.py" and isinstance(name, ast.Name):
                continue  # of a pool, whose user names it
            assert name is not None, f"a thread in {path} has no name"
            names.append(ast.unparse(name).removeprefix("f").strip("'\""))
    assert len(names) > 12
    assert all(name.startswith("tfps-") for name in names)
    assert sorted(set(names)) == sorted(names)


def test_calls_return_what_they_return_and_raise_what_they_raise() -> None:
    pool = DaemonPool(2, "pool")
    assert pool.submit(divmod, 7, 2).result(jobs.DEADLINE_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result(jobs.DEADLINE_S)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(print)


def test_threads_are_daemons_used_again_and_no_more_than_the_limit() -> None:
    pool, go_on = DaemonPool(2, "pool"), threading.Event()
    first = pool.submit(threading.current_thread)
    assert first.result(jobs.DEADLINE_S).daemon
    names = {thread.name for thread in threading.enumerate()}
    assert "pool_0" in names
    waiting = [pool.submit(go_on.wait, jobs.DEADLINE_S) for _ in range(4)]
    jobs.poll(lambda: sum(future.running() for future in waiting) == 2)
    assert {thread.name for thread in threading.enumerate()} - names <= {"pool_1"}
    assert waiting[3].cancel()
    go_on.set()
    assert all(future.result(jobs.DEADLINE_S) for future in waiting[:3])
    pool.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pool_")]


def test_a_call_waits_for_a_thread_while_the_system_gives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, go_on = DaemonPool(2, "pool"), threading.Event()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(print)
    first = pool.submit(go_on.wait, jobs.DEADLINE_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = pool.submit(divmod, 7, 2)
    assert not second.done()
    go_on.set()
    assert first.result(jobs.DEADLINE_S) and second.result(jobs.DEADLINE_S) == (3, 1)
    pool.shutdown()


def test_a_process_ends_although_a_thread_waits_for_ever() -> None:
    program = (
        "import threading; from tfps.threads import DaemonPool, Flag\n"
        "DaemonPool(1, 'pool').submit(threading.Event().wait)\n"
        "raise SystemExit(3)"
    )
    with jobs.python("-c", program) as process:
        process.communicate(timeout=jobs.DEADLINE_S)
    assert process.returncode == 3


def test_a_flag_stays_set_and_wakes_who_waits() -> None:
    flag = Flag()
    assert not flag.wait(0)
    setter = threading.Timer(0.01, flag.set)
    setter.start()
    assert flag.wait(jobs.DEADLINE_S)
    assert flag.wait(0)
    assert flag.wait()


def test_a_flag_may_be_set_by_a_signal_at_any_place_of_wait() -> None:
    flags = [Flag()]
    before = signal.signal(signal.SIGALRM, lambda *_: flags[-1].set())
    signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
    try:
        for _ in range(500):
            flags.append(Flag())
            assert flags[-1].wait(jobs.DEADLINE_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


OTHER_THREAD = """
import signal, threading
from tfps.threads import Flag
flag, hold = Flag(), threading.Event()
signal.signal(signal.SIGTERM, lambda *_: flag.set())
other = threading.Thread(target=hold.wait, daemon=True)
other.start()
deliver = threading.Timer(0.2, lambda: signal.pthread_kill(other.ident, signal.SIGTERM))
deliver.start()
print(flag.wait())
"""


def test_a_signal_that_comes_to_another_thread_is_noticed() -> None:
    with jobs.python("-c", OTHER_THREAD) as process:
        assert process.communicate(timeout=jobs.DEADLINE_S) == ("True\n", "")
