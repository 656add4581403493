"""A limit on the time that a learner's code may run."""

import ctypes
import dis
import signal
import sys
import threading
from contextlib import contextmanager
from functools import cache


class TimeUp(BaseException):
    """Raised in code that outlived its limit; `except Exception` lets it through."""


@contextmanager
def time_limit(seconds: float):
    """Interrupt the body with `TimeUp` once it has run for `seconds`.

    On Linux and macOS, in the main thread, an alarm signal also ends sleeping and
    waiting, and loops around a bare `except:`. On Windows, and in other threads,
    Python's asynchronous exceptions end a loop in Python code, but neither a call that
    never returns nor a loop that catches everything.
    """
    alarm = (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    )
    with _alarm(seconds) if alarm else _asynchronous(seconds):
        yield


REPEAT = 0.01  # seconds; repeated, because a bare `except:` may swallow one TimeUp
SWALLOWED = 5  # so many TimeUps, and the next is raised where no handler stands


@contextmanager
def _alarm(seconds):
    n_raised = 0

    def ring(_signum, frame):
        nonlocal n_raised
        if frame is None or frame.f_code.co_filename == __file__:
            return
        n_raised += 1
        if n_raised > SWALLOWED:
            _raise_outside_handlers(frame)
        raise TimeUp

    previous, tracing = signal.signal(signal.SIGALRM, ring), sys.gettrace()
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if n_raised:
            sys.settrace(tracing)


def _raise_outside_handlers(frame):
    """Raise `TimeUp` once more, where a loop jumps back and no `try` covers the jump.

    A loop around a `try` with a bare `except:` has such a place.
    """

    def trace(frame, event, _argument):
        if event == "opcode" and frame.f_lasti in _open_jumps(frame.f_code):
            raise TimeUp
        frame.f_trace_opcodes = True
        return trace

    sys.settrace(trace)
    while frame is not None and frame.f_code.co_filename != __file__:
        frame.f_trace, frame.f_trace_opcodes = trace, True
        frame = frame.f_back


@cache
def _open_jumps(code) -> set[int]:
    """Where a loop of this code jumps back, outside of every `try`."""
    handled = dis.Bytecode(code).exception_entries
    return {
        each.offset
        for each in dis.get_instructions(code)
        if "JUMP_BACKWARD" in each.opname
        and not any(h.start <= each.offset < h.end for h in handled)
    }


@contextmanager
def _asynchronous(seconds):
    thread = ctypes.c_ulong(threading.get_ident())
    finished = threading.Event()
    lock = threading.Lock()

    def watch():
        wait = seconds
        while not finished.wait(wait):
            with lock:
                if not finished.is_set():
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        thread, ctypes.py_object(TimeUp)
                    )
            wait = 10 * REPEAT

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        with lock:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
        watcher.join()
