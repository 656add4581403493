"""Warm processes that answer requests, each by one confined fork of themselves.

The grader talks to two kinds. An `Engine` holds torch and the checks; a `Blind` holds
torch alone. Neither ever runs a learner's code itself, and a dead one is replaced.
"""

import hmac
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress

from utils import syllabus
from utils.grade import sandbox
from utils.grade.sandbox import Ending

MODULE = "utils.grade.server"
REPLAY_SECONDS = 40


class Gone(Exception):
    """The server has ended or did not answer in time."""


# The grader's side --------------------------------------------------------------------


class Client:
    """Talks to one server of a kind, and starts another if it is gone.

    folder: for the server's temporary files.
    """

    def __init__(self, kind: str, folder: str | None = None):
        self.kind = kind
        self.folder = folder
        self.process = None
        self.stopped = False

    def ask(self, what: str, *args, seconds: float = 300):
        if self.stopped:
            raise Gone("the grader was stopped")
        if self.process is None:
            self._start()
        process = self.process
        watch = threading.Timer(seconds, process.kill)
        watch.start()
        try:
            write(process.stdin, (what, args))
            return read(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.close()
            raise Gone(f"the {self.kind} process ended") from error
        finally:
            watch.cancel()

    def _start(self):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("COURSE_")}
        one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        no_gpu = {
            "MPLBACKEND": "agg",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
        }
        place = {name: self.folder for name in ("TMPDIR", "TEMP") if self.folder}
        new_group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)  # on Windows
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, self.kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=syllabus.ROOT,
            env={**kept, **one_thread, **no_gpu, **place},
            start_new_session=os.name == "posix",  # Ctrl-C is for the grader alone
            creationflags=new_group,
        )

    def stop(self):
        """Close, and start no other."""
        self.stopped = True
        self.close()

    def close(self):
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):
                    stream.close()


def write(stream, value):
    data = pickle.dumps(value)
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


def read(stream):
    size = stream.read(8)
    if len(size) < 8:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(size, "big")))


# The servers' side --------------------------------------------------------------------


def confined(function, seconds, request) -> Ending:
    """What `function() -> bytes`, which the request leads to, sends from elsewhere.

    From a confined fork of this process; without fork from a new Python, which goes
    through the same request up to here and sends instead of returning.
    """
    if ALONE:
        sent = function()
        key, replies = ALONE
        replies.write(hmac.digest(key, sent, "sha256") + sent)
        replies.flush()
        os._exit(0)
    if sandbox.CAN_FORK:
        return sandbox.run(lambda lacks: function(), seconds)
    key = os.urandom(32)
    with tempfile.TemporaryFile() as replies:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "alone"],
            stdin=subprocess.PIPE,
            stdout=replies,
        )
        try:
            process.communicate(pickle.dumps((key, *request)), seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return Ending(None, f"it was stopped after {seconds:g} seconds")
        replies.seek(0)
        return sandbox.verified(key, replies.read(sandbox.ANSWER))


ALONE: tuple = ()
START_SECONDS = 60


def preload(answer):
    """Import here, once, what the instructor's import lines need in every fork."""
    for line in answer.imports:
        if line not in PRELOADED and "my_transformer" not in line:
            PRELOADED.add(line)
            try:
                exec(line, NAMES)
            except (ImportError, NameError):
                continue


PRELOADED: set[str] = set()
NAMES: dict = {}


class Engine:
    """Holds the checks."""

    def __init__(self):
        from utils.check.exercise import load_all

        load_all()
        syllabus.lessons()  # read now: a confined process does not see the file
        self.scripts = {}
        self.before = None

    def examine(self, answer) -> dict:
        from utils.check.exercise import Exercise
        from utils.check.fault import faulty_answer
        from utils.grade import examine

        exercise = Exercise.registry[answer.name]
        preload(answer)
        examine.warm(exercise)
        self.before = examine.fingerprint()
        n_wrong = min(examine.KNOWN_WRONG, len(exercise.faults))
        wrong = [
            faulty_answer(fault, exercise)
            for fault in random.sample(exercise.faults, n_wrong)
        ]
        ending = confined(
            lambda: examine.examine(answer, self.before, wrong),
            examine.seconds_for(exercise),
            ("engine", "examine", (answer,)),
        )
        if ending.sent is None:
            return {"status": "error", "fault": "no_verdict", "lines": [ending.reason]}
        return json.loads(ending.sent)

    def script(self, name) -> tuple[bytes, bytes]:
        """The calls that the checks of an exercise make, with their results and
        without."""
        from utils.check.exercise import Exercise
        from utils.grade import record

        script = record.script_of(Exercise.registry[name])
        return pickle.dumps(script), pickle.dumps(record.without_results(script))

    def calibrate(self, script: bytes, runs: list[bytes]) -> tuple[bytes, int]:
        """Keep the steps that the reference gives again; returns how many results."""
        from utils.grade import record, replay

        found = record.calibrate(
            pickle.loads(script), [replay.load_results(each) for each in runs]
        )
        return pickle.dumps(found), record.results(found)

    def unmet(self, name, script: bytes, sent: bytes) -> list[str] | None:
        """The requirements that the results of a blind run do not meet."""
        from utils.check.exercise import Exercise
        from utils.grade import record, replay

        if name not in self.scripts:
            self.scripts[name] = pickle.loads(script)

        def judge():
            found = replay.load_results(sent)
            left = record.unmet(Exercise.registry[name], self.scripts[name], found)
            return json.dumps(left).encode()

        ending = (
            sandbox.run(lambda lacks: judge(), REPLAY_SECONDS)
            if sandbox.CAN_FORK
            else Ending(judge())
        )
        return None if ending.sent is None else json.loads(ending.sent)


class Blind:
    """Holds torch, and neither checks nor answers."""

    def __init__(self):
        from utils.grade import namespace, replay  # noqa: F401

    def replay(self, answer, script: bytes, seed=0) -> Ending:
        from utils.grade import namespace, replay

        preload(answer)

        def go():
            _leave_the_course()
            found, _ = namespace.load(answer)
            made = found.get(answer.name)
            return replay.dump_results(replay.run(pickle.loads(script), made, seed))

        request = ("blind", "replay", (answer, script, seed))
        return confined(go, REPLAY_SECONDS, request)

    def missing(self) -> list[str]:
        return sandbox.missing()


def _leave_the_course():
    """Where the file system shows the course, at least `import` does not find it."""
    sys.path[:] = [each for each in sys.path if each and each != str(syllabus.ROOT)]
    sys.modules["utils"].__path__ = []


def streams():
    """Standard input and output for this module alone; prints lead nowhere."""
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    return requests, replies


def server_of(kind: str):
    import torch

    torch.set_num_threads(1)
    return {"engine": Engine, "blind": Blind}[kind]()


def serve(kind: str):
    requests, replies = streams()
    server = server_of(kind)
    sandbox.measure()
    while True:
        try:
            what, args = read(requests)
        except EOFError:
            return
        write(replies, getattr(server, what)(*args))


def alone():
    """One request, in a Python of its own, where there is no fork."""
    global ALONE
    requests, replies = streams()
    key, kind, what, args = pickle.load(requests)
    ALONE = (key, replies)
    server = server_of(kind)
    sandbox.measure()
    sandbox.limit(REPLAY_SECONDS + START_SECONDS, among_others=True)
    getattr(server, what)(*args)


if __name__ == "__main__":
    alone() if sys.argv[1] == "alone" else serve(sys.argv[1])
