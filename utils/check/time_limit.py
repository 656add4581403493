"""A limit on the time that a learner's code may run."""

import ctypes
import signal
import threading
from contextlib import contextmanager


class TimeUp(BaseException):
    """Raised in code that outlived its limit; `except Exception` lets it through."""


@contextmanager
def time_limit(seconds: float):
    """Interrupt the body with `TimeUp` once it has run for `seconds`.

    On Linux and macOS, in the main thread, an alarm signal also ends sleeping and
    waiting. On Windows, and in other threads, Python's asynchronous exceptions
    end a loop in Python code, but not one call that never returns.
    """
    alarm = (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    )
    with _alarm(seconds) if alarm else _asynchronous(seconds):
        yield


REPEAT = 0.01  # seconds; repeated, because a bare `except:` may swallow one TimeUp


@contextmanager
def _alarm(seconds):
    def ring(_signum, frame):
        if frame is None or frame.f_code.co_filename != __file__:
            raise TimeUp

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


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
