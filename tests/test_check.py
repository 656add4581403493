"""The check engine: every way in which an answer can be wrong is said in words."""

import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from solutions.start import softmax as reference
from utils import syllabus
from utils.check import check, diagnosis, evaluate
from utils.check.case import Case
from utils.check.errors import Explained, Unmet
from utils.check.exercise import Exercise, IntegrationCheck, load_all
from utils.check.inputs import fresh
from utils.check.recording import alike
from utils.check.time_limit import TimeUp, time_limit
from utils.check.wording import counted, describe_call, sentence, two_numbers
from utils.errors import CheckFailed, CourseError
from utils.probe import probe, probe_ids, strided


def softmax(scores, dim=-1):
    """A right answer in a form of its own."""
    return (scores - torch.logsumexp(scores, dim, keepdim=True)).exp()


def status(answer, name="softmax"):
    report = evaluate(answer, name)
    assert report.name == name
    assert report.message.splitlines()[0].startswith(
        "✓✗○"[["passed", "failed", "todo"].index(report.status)]
    )
    return report.status


class TestRightAnswers:
    def test_another_form_passes(self):
        assert status(softmax) == "passed"

    def test_the_name_is_the_function_s_own(self):
        assert evaluate(softmax).status == "passed"

    def test_torchs_own_passes(self):
        assert status(partial(torch.softmax, dim=-1)) == "passed"

    def test_float64_inside_passes(self):
        def answer(scores, dim=-1):
            return torch.softmax(scores.double(), dim).to(scores.dtype)

        assert status(answer) == "passed"

    def test_lambda_and_partial_pass(self):
        assert status(lambda scores, dim=-1: softmax(scores, dim)) == "passed"
        assert status(partial(softmax, dim=-1)) == "passed"

    def test_what_was_verified_is_listed(self):
        report = evaluate(softmax)
        assert report.verified
        assert all(sentence in report.message for sentence in report.verified)


class TestNotWritten:
    def test_stub(self):
        def stub(scores, dim=-1):
            raise NotImplementedError

        report = evaluate(stub, "softmax")
        assert (report.status, report.fault) == ("todo", None)
        assert "not written yet" in report.message

    def test_stub_in_one_branch(self):
        def partly(scores, dim=-1):
            if dim == -1 and scores.abs().max() < 10:
                return torch.softmax(scores, dim)
            raise NotImplementedError()

        report = evaluate(partly, "softmax")
        assert report.status == "todo"
        assert "Already right" in report.message

    def test_an_error_of_torch_is_no_stub(self):
        def answer(scores, dim=-1):
            raise NotImplementedError("not for this dtype")

        assert status(answer) == "failed"

    def test_stub_in_one_method(self, two_step_exercise):
        class TwoSteps(nn.Module):
            def __init__(self):
                super().__init__()

            def forward(self, x):
                return x + 1

            def undo(self, x):
                raise NotImplementedError

        report = evaluate(TwoSteps, two_step_exercise)
        assert report.status == "todo"
        assert "`undo` still raises NotImplementedError" in report.message
        assert "partly" in report.message


@pytest.fixture
def two_step_exercise():
    exercise = Exercise("TwoSteps", lesson="nowhere")

    @exercise.requires("forward adds one")
    def _(answer, case):
        step = case.call(answer)
        case.agrees(step, lambda x: x + 1, probe(3))

    @exercise.requires("undo takes it back")
    def _(answer, case):
        step = case.call(answer)
        case.close(case.call(step.undo, probe(3)), probe(3) - 1)

    yield "TwoSteps"
    del Exercise.registry["TwoSteps"]


class TestWrongAnswers:
    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            (lambda scores, dim=-1: None, "None: is a `return` missing?"),
            (lambda scores, dim=-1: scores.tolist(), "of type list"),
            (lambda scores, dim=-1: softmax(scores, dim)[..., :2], "has shape"),
            (lambda scores, dim=-1: softmax(scores, dim).double(), "float64"),
            (lambda scores, dim=-1: softmax(scores, dim) * torch.nan, "NaN"),
            (lambda scores, dim=-1: softmax(scores, dim) * torch.inf, "infinite"),
            (lambda scores: softmax(scores), "TypeError"),
            (lambda scores, dim=-1: softmax(scores, dim).to("meta"), "meta"),
            (lambda scores, dim=-1: softmax(scores, dim).round(decimals=3), "differ"),
        ],
    )
    def test_says_what_is_wrong(self, answer, says):
        report = evaluate(answer, "softmax")
        assert report.status == "failed"
        assert says in report.message

    def test_an_exception_is_shown_as_the_learner_s(self):
        def answer(scores, dim=-1):
            return scores @ scores

        report = evaluate(answer, "softmax")
        assert "Your code raised a RuntimeError" in report.message
        assert "return scores @ scores" in report.message
        assert len(report.message.splitlines()) < 10

    def test_an_exception_inside_the_reference_does_not_show_it(self):
        def answer(scores, dim=-1):
            return reference(scores, "no dimension")

        report = evaluate(answer, "softmax")
        assert 'reference(scores, "no dimension")' in report.message
        assert "scores.max" not in report.message

    def test_input_changed_in_place(self):
        def answer(scores, dim=-1):
            scores -= scores.amax(dim, keepdim=True)
            return torch.softmax(scores, dim)

        report = evaluate(answer, "softmax")
        assert "changed its input `scores` in place" in report.message

    @pytest.mark.parametrize("leave", [sys.exit, exit, KeyError])
    def test_leaving_python_is_only_a_wrong_answer(self, leave):
        def answer(scores, dim=-1):
            raise SystemExit if leave in (sys.exit, exit) else leave("x")

        assert status(answer) == "failed"

    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            (type("softmax", (), {}), "the exercise asks for a function"),
            (torch.ones(3), "is a Tensor"),
            (None, "is a NoneType"),
        ],
    )
    def test_wrong_kind(self, answer, says):
        assert says in evaluate(answer, "softmax").message

    def test_what_the_answer_printed_is_shown_and_bounded(self, capfd):
        def answer(scores, dim=-1):
            for i in range(1000):
                print("step", i)
            print("error", file=sys.stderr)
            return scores

        report = evaluate(answer, "softmax")
        assert "step 999" in report.message
        assert "step 900" not in report.message
        assert capfd.readouterr() == ("", "")

    def test_is_deterministic(self):
        def answer(scores, dim=-1):
            return torch.softmax(scores, dim) + 0.1 * torch.rand(scores.shape)

        messages = {evaluate(answer, "softmax").message for _ in range(3)}
        assert len(messages) == 1

    def test_randomness_is_named(self):
        def answer(scores, dim=-1):
            return torch.nn.functional.dropout(torch.softmax(scores, dim), 0.5)

        report = evaluate(answer, "softmax")
        assert report.fault == "random"
        assert "dropout" in report.message

    def test_what_is_kept_between_calls_is_named(self):
        def answer(scores, dim=-1, seen=[0]):  # noqa: B006
            seen[0] += 1
            return torch.softmax(scores, dim) + seen[0] / 10

        report = evaluate(answer, "softmax")
        assert report.fault == "state"
        assert "default argument" in report.message

    def test_a_missing_name_gets_no_hint_on_something_else(self):
        def answer(scores, dim=-1):
            return F.softmax(scores, dim)  # noqa: F821

        report = evaluate(answer, "softmax")
        assert "name 'F' is not defined" in report.message
        assert "Hint:" not in report.message

    def test_a_class_without_its_base_is_told_the_name_it_can_write(self):
        load_all()
        class_exercise = next(
            each
            for each in Exercise.registry.values()
            if isinstance(each.reference, type)
            and issubclass(each.reference, torch.nn.Module)
        )
        report = evaluate(type(class_exercise.name, (), {}), class_exercise.name)
        assert "must inherit from `torch.nn.Module`" in report.message

    def test_names_keep_their_letters_at_the_start_of_asentence(self):
        assert sentence("k = 6 of 5 experts") == "k = 6 of 5 experts"
        assert sentence("d_model is 4") == "d_model is 4"
        assert sentence("a row is wrong") == "A row is wrong"

    def test_leaves_global_state_alone(self):
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        with torch.no_grad():
            assert evaluate(softmax).status == "passed"
            assert not torch.is_grad_enabled()
        assert torch.equal(torch.rand(4), expected)

    def test_unknown_exercise(self):
        with pytest.raises(CourseError, match="did you mean `softmax`"):
            evaluate(softmax, "sofmax")

    def test_no_report_quotes_the_reference(self):
        import inspect

        code = {
            line.strip()
            for line in inspect.getsource(reference).splitlines()
            if line.startswith("    ") and "=" in line
        }
        exercise = Exercise.registry["softmax"]
        for fault in exercise.faults:
            report = evaluate(diagnosis.answer_of(exercise, fault), "softmax")
            message = replace(report, frames=()).message  # the answer's own lines
            assert not any(line in message for line in code)


class TestTimeLimit:
    @staticmethod
    def stopped(body, seconds=0.3):
        started = time.monotonic()
        with pytest.raises(TimeUp), time_limit(seconds):
            body()
        return time.monotonic() - started < 30  # the bodies run for ever, or 60 s

    def test_endless_loop(self):
        def loop():
            while True:
                pass

        assert self.stopped(loop)

    def test_sleep(self):
        assert self.stopped(lambda: time.sleep(60))

    def test_loop_that_swallows_everything(self):
        def in_torch():
            while True:
                try:  # noqa: SIM105
                    torch.ones(3) + 1
                except:  # noqa: E722
                    pass

        def in_a_loop():
            while True:
                try:
                    for _ in range(10**9):
                        pass
                except BaseException:
                    continue

        def asleep():
            while True:
                with suppress(BaseException):
                    time.sleep(60)

        for loop in (in_torch, in_a_loop, asleep):
            assert self.stopped(loop)

    def test_without_signals(self, monkeypatch):
        import signal

        monkeypatch.delattr(signal, "setitimer")

        def loop():
            while True:
                pass

        assert self.stopped(loop)
        with time_limit(0.2):
            pass
        time.sleep(0.5)  # nothing arrives late

    def test_nothing_happens_in_time(self):
        with time_limit(5):
            value = 1
        assert value == 1

    def test_the_report_says_so(self, monkeypatch):
        monkeypatch.setattr(Exercise.registry["softmax"], "seconds", 0.3)

        def softmax(scores, dim=-1):
            while True:
                pass

        report = evaluate(softmax)
        assert report.status == "failed"
        assert "more than 0.3 seconds" in report.message


class TestCheck:
    def test_right_returns_the_learner_s(self, capfd):
        assert check(softmax) is softmax
        output = capfd.readouterr()
        assert output.out.startswith("✓ softmax: right")
        assert output.err == ""

    def test_wrong_returns_the_reference(self, capfd):
        def softmax(scores, dim=-1):
            return scores

        assert check(softmax) is reference
        assert "use the reference" in capfd.readouterr().out

    def test_the_name_comes_from_the_builder(self, capfd):
        answer = lambda scores, dim=-1: scores  # noqa: E731
        assert check(answer, "softmax") is reference

    def test_run_twice_after_a_wrong_answer(self, capfd):
        def softmax(scores, dim=-1):
            return scores

        softmax = check(softmax)
        capfd.readouterr()
        softmax = check(softmax)
        assert softmax is reference
        assert "Run your exercise cell again" in capfd.readouterr().out

    def test_run_twice_after_a_right_answer(self, capfd):
        assert check(check(softmax)) is softmax

    @pytest.mark.parametrize("variable", ["COURSE_STRICT", "NBGRADER_EXECUTION"])
    def test_strict_raises(self, variable, monkeypatch, capfd):
        monkeypatch.setenv(variable, "1")
        with pytest.raises(CheckFailed, match="softmax: not right yet"):
            check(lambda scores, dim=-1: scores, "softmax")
        with pytest.raises(CheckFailed):
            check(reference)  # what stands in for a missing answer earns nothing
        assert check(softmax) is softmax

    def test_no_exercise(self):
        def something_else():
            pass

        with pytest.raises(CourseError, match="no exercise"):
            check(something_else)

    def test_without_solutions_the_answer_itself_goes_on(self, monkeypatch, capfd):
        monkeypatch.setattr("utils.reference.find_spec", lambda name: None)

        def wrong(scores, dim=-1):
            return scores

        assert check(wrong, "softmax") is wrong
        assert "holds no reference answers" in capfd.readouterr().out


class TestCommandLine:
    @staticmethod
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "utils.check", *map(str, arguments)],
            cwd=syllabus.ROOT,
            capture_output=True,
            text=True,
        )

    def test_right_wrong_and_missing(self, tmp_path):
        file = tmp_path / "answers.py"
        file.write_text("from torch.nn.functional import softmax as softmax\n")
        assert self.run(file).returncode == 0
        file.write_text("def softmax(scores, dim=-1):\n    return scores\n")
        wrong = self.run(file, "softmax")
        assert (wrong.returncode, wrong.stderr) == (1, "")
        assert "✗ softmax" in wrong.stdout
        missing = self.run(file, "rnn_cell")
        assert (missing.returncode, missing.stdout) == (2, "")
        assert "does not define" in missing.stderr

    def test_a_damaged_file_is_onesentence(self, tmp_path):
        file = tmp_path / "answers.py"
        file.write_text("def softmax(:\n")
        result = self.run(file)
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1
        file.write_text("import sys\nsys.exit(0)\n")
        left = self.run(file)
        assert left.returncode == 2 and "SystemExit" in left.stderr
        package = self.run(syllabus.ROOT / "my_transformer" / "__init__.py")
        assert package.returncode == 2 and "defines no exercise" in package.stderr
        assert self.run(tmp_path / "none.py").returncode == 2


class Doubling(Exercise):
    reference = staticmethod(lambda x: 2 * x)


class TestNamingAMistake:
    """Doubling numbers, wrong from one of them on."""

    @pytest.fixture
    def doubling(self):
        exercise = Doubling("double", lesson="nowhere")

        @exercise.requires("twice the number")
        def _(answer, case):
            case.equal([case.call(answer, x) for x in (1, 2, 3)], [2, 4, 6])

        @exercise.requires("negative numbers too")
        def _(answer, case):
            case.equal(case.call(answer, -4), -8)

        exercise.fault("soon", "Wrong from 1.")(lambda x: 7)
        exercise.fault("late", "Wrong from 3.")(lambda x: 8 if x > 2 else 2 * x)
        exercise.fault("sign", "The sign is lost.")(
            lambda x: 8 if x > 2 else 2 * abs(x)
        )
        exercise.fault("refused", "Refused.")(refuses)
        exercise.fault("unfit", "A letter.")(lambda x: x + "a" if x > 0 else x)
        yield lambda answer: evaluate(answer, "double").fault
        del Exercise.registry["double"]

    def test_by_all_results_up_to_the_failure(self, doubling):
        assert doubling(lambda x: 7) == "soon"
        assert doubling(lambda x: 7 if x == 1 else 2 * x) is None

    def test_twins_are_told_apart_by_what_comes_later(self, doubling):
        assert doubling(lambda x: 8 if x == 3 else 2 * x) == "late"
        assert doubling(lambda x: 8 if x == 3 else abs(2 * x)) == "sign"

    def test_an_answer_s_own_words_of_refusal_do_not_matter(self, doubling):
        def refuses_otherwise(x):
            raise ValueError(f"{x} is not to my taste")

        assert doubling(refuses_otherwise) == "refused"

    def test_python_s_own_words_and_the_type_of_an_error_do(self, doubling):
        def unfit(x):
            return x + "b" if x > 0 else x

        assert doubling(unfit) == "unfit"
        assert doubling(lambda x: x[0]) is None

        def of_another_type(x):
            raise KeyError(x)

        assert doubling(of_another_type) is None


def refuses(x):
    raise ValueError("not this number")


class TestReport:
    def test_is_data(self):
        report = evaluate(lambda scores, dim=-1: scores.exp(), "softmax")
        assert report.unmet.startswith("the weights along the last dimension")
        assert "largest difference" in report.problem[0]
        assert report.call == "" and report.n_requirements > 3
        assert not report.explanation and report.difference

    def test_an_unlisted_mistake_is_described(self):
        report = evaluate(lambda s, dim=-1: 3 * torch.softmax(s, dim), "softmax")
        assert report.fault is None
        assert "3 times too large" in report.difference
        assert f"What differs: {report.difference}" in report.message

    @pytest.mark.parametrize(
        ("spoil", "says"),
        [
            (lambda w: w.mul_(1), "overwritten in place"),
            (lambda w: w if w > 0 else -w, "ask whether a whole tensor is true"),
            (lambda w: w + None, "Something is None"),
            (lambda w: w.t().view(-1) if w.dim() == 2 else w, "`reshape` copies"),
        ],
    )
    def test_common_errors_of_pytorch_are_explained(self, spoil, says):
        def answer(scores, dim=-1):
            return spoil(torch.softmax(scores, dim))

        report = evaluate(answer, "softmax")
        assert report.fault is None and says in report.explanation, report.message

    def test_torch_compile_is_no_endless_loop(self):
        assert evaluate(torch.compile(softmax), "softmax").status == "passed"

    def test_the_default_device_does_not_stay(self):
        def answer(scores, dim=-1):
            torch.set_default_device("meta")
            return torch.softmax(scores, dim)

        evaluate(answer, "softmax")
        assert torch.ones(1).device.type == "cpu"

    def test_words(self):
        assert two_numbers(0.9036612, 0.9036613) == ("0.9036612", "0.9036613")
        assert (counted(1, "token"), counted(1200, "token")) == (
            *("1 token", "1,200 tokens"),
        )
        assert describe_call(lambda x: x, (1,), {}) == ""
        assert describe_call(refuses, (probe(2, 3),), {}) == "refuses(x=tensor(2, 3))"


class TestCase:
    def test_copies_keep_their_strides(self):
        for x in (strided(probe(3, 5)), probe(3, 5).T, probe(1, 5).expand(4, 5)):
            copy = fresh(x)
            assert copy.stride() == x.stride()
            assert torch.equal(copy, x)
            assert copy.data_ptr() != x.data_ptr()

    def test_probes_are_the_same_everywhere(self):
        assert probe_ids(5, below=100).tolist() == PROBE_IDS
        assert probe(4000).mean().abs() < 0.05
        assert abs(probe(4000).std() - 1) < 0.05

    def test_a_change_inside_a_container_is_noticed(self):
        def grow(numbers, names):
            numbers[1] = 0
            return numbers

        with pytest.raises(Unmet, match="its input `numbers` in place"):
            Case().call(grow, [1, 2], {"a": (3, "b")})
        assert Case().call(lambda numbers: 1, [1, {"a": b"c"}, None]) == 1

    def test_parameters_are_named(self):
        module, case = nn.Linear(3, 5), Case()
        case.parameters(module, weight=(5, 3), bias=(5,))
        with pytest.raises(Explained, match="`bias` of shape \\(5,\\)"):
            case.parameters(module, weight=(5, 3))
        with pytest.raises(Explained, match="no parameter `gain`"):
            case.parameters(module, weight=(5, 3), bias=(5,), gain=(5,))
        with pytest.raises(Explained, match=r"stores `\(out, in\)`"):
            case.parameters(nn.Sequential(module), **{"0": (3, 5), "0__bias": (5,)})

    def test_nan_is_never_close(self):
        nan = torch.tensor([torch.nan])
        for expected in (torch.tensor([0.0]), torch.tensor([torch.inf])):
            with pytest.raises(Unmet, match="NaN"):
                Case().close(nan, expected)
        with pytest.raises(Unmet):
            Case().close(torch.tensor([1.0]), nan)

    def test_infinity_must_be_where_it_is_due(self):
        Case().close(torch.tensor([-torch.inf, 1]), torch.tensor([-torch.inf, 1]))
        with pytest.raises(Unmet):
            Case().close(torch.tensor([5.0]), torch.tensor([-torch.inf]))

    def test_faults_are_told_apart_by_what_they_are_wrong_by(self):
        truth, wrong = torch.tensor([1.0]), torch.tensor([1.0001])
        assert alike(wrong, wrong.clone(), truth)
        assert not alike(wrong, torch.tensor([1.00005]), truth)
        assert not alike(wrong, wrong.double(), truth)
        infinite = torch.tensor([torch.inf, 1.0])
        assert alike(infinite, infinite.clone())
        assert not alike(infinite, -infinite)
        assert not alike(infinite, torch.ones(2))


PROBE_IDS = [48, 58, 96, 14, 8]


class TestIntegrationCheck:
    @pytest.fixture(autouse=True)
    def joined(self):
        check = IntegrationCheck("sums_to_one", "start", {"softmax": "start"})

        @check.requires("the weights of the last dimension sum to 1")
        def _(parts, case):
            weights = case.call(parts["softmax"], probe(3, 5))
            case.close(weights.sum(-1), torch.ones(3))

        check.fault(
            "no_division",
            "The exponentials come back as they are.",
            (" / exponentials.sum(dim=dim, keepdim=True)", ""),
            edited="softmax",
        )
        yield
        del Exercise.registry["sums_to_one"]

    def test_fits_or_is_named(self):
        assert evaluate({"softmax": softmax}, "sums_to_one").status == "passed"
        report = evaluate({"softmax": undivided}, "sums_to_one")
        assert (report.status, report.fault) == ("failed", "no_division")

    def test_missing_part(self):
        with pytest.raises(CourseError, match="needs softmax"):
            evaluate({}, "sums_to_one")


def undivided(scores):
    return (scores - scores.amax(-1, keepdim=True)).exp()
