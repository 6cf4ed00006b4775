"""Work in a forked process: with bounds of time and memory, or to be killed on the way."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.fuzz.outcome import FuzzFailure


def bounded(work: Callable[[], Any], *, seconds: int, megabytes: int) -> Any:
    """What `work` returns, from a process that may take this long and so much more memory than there is now."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:  # in the child, which never returns
        os.close(reading)
        try:
            _limit(seconds, megabytes)
            answer: tuple[bool, Any] = (True, work())
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}")
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(number, 0)
    if not said:
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
        raise FuzzFailure(f"the process ended with {name} (limits: {seconds} s, {megabytes} MB)")
    fine, value = pickle.loads(said)  # of our own child
    if not fine:
        raise FuzzFailure(value)
    return value


def _limit(seconds: int, megabytes: int) -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)


def killed(work: Callable[[], Any], after: float) -> bool:
    """Kill `work` in a process of its own after some seconds; whether it was still running."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    end = time.monotonic() + after
    while time.monotonic() < end:
        if os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(min(0.001, max(0.0, end - time.monotonic())))
    os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise FuzzFailure("the work failed before it was killed")
    return os.WIFSIGNALED(status)
