"""One run of a requirement: calls the answer on fresh inputs and compares values."""

import copy
import io
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from difflib import get_close_matches

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from utils.check import comparison
from utils.check.devices import FakeDevice, OnTheCPU
from utils.check.errors import Crashed, Explained, NotWritten, Unmet
from utils.check.inputs import (
    first_float,
    fresh,
    in_float64,
    is_float,
    rounded_once,
    to_meta,
    unchanged,
)
from utils.check.recording import Raised, raised, snapshot
from utils.check.time_limit import TimeUp
from utils.check.wording import (
    argument_names,
    describe_call,
    listed,
    shape,
    with_article,
)
from utils.probe import probe

# How many times the reference's own error another correct formula may show.
HEADROOM = 8
# How many times what rounding the inputs once changes.
SLACK = 4


@dataclass
class Case:
    """Hands an answer its inputs, records what comes back, and compares.

    reference_errors: the errors of the reference in the same comparisons; a correct
        answer may be `HEADROOM` times as far from the float64 truth.
    recording: what each call gave, and what was noted between calls.
    called, inputs: the last call in words, and its arguments by name.
    sizes: what the case calls the numbers of its probes, to describe differences by.
    """

    reference_errors: list = field(default_factory=list)
    recording: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    printed: io.StringIO = field(default_factory=io.StringIO)
    called: str = ""
    inputs: dict = field(default_factory=dict)
    sizes: dict = field(default_factory=dict)

    # Calling ---------------------------------------------------------------

    def call(self, f, *args, **kwargs):
        """`f(*args, **kwargs)` on fresh copies, which must come back unchanged."""
        given, given_by_name = fresh(args), fresh(kwargs)
        result = self._run(f, given, given_by_name)
        names = argument_names(f, args, kwargs)
        before = [*args, *kwargs.values()]
        after = [*given, *given_by_name.values()]
        for name, old, new in zip(names, before, after, strict=True):
            if not unchanged(old, new):
                self.note("input changed")
                raise Explained(
                    f"It changed its input `{name}` in place: work on a new tensor, "
                    "or the caller's data is gone."
                )
        return result

    def call_in_place(self, f, *args, **kwargs):
        """`f(*args, **kwargs)` on the arguments themselves, which it may change."""
        return self._run(f, args, kwargs)

    def _run(self, f, args, kwargs):
        self.called = describe_call(f, args, kwargs)
        names = argument_names(f, args, kwargs)
        values = [*args, *kwargs.values()]
        self.inputs = dict(zip(names, values, strict=True))
        try:
            with redirect_stdout(self.printed), redirect_stderr(self.printed):
                result = f(*args, **kwargs)
        except (TimeUp, KeyboardInterrupt, Unmet):
            raise
        except BaseException as error:
            if isinstance(error, NotImplementedError) and not error.args:
                raise NotWritten(error) from error
            self.note(raised(error))
            raise Crashed(error) from error
        self.note(result)
        return result

    def note(self, value):
        """Record what tells one mistake from another, beside the results of calls."""
        self.recording.append(snapshot(value))

    @contextmanager
    def unrecorded(self):
        """Inside, nothing is recorded: what is random, or tells nothing."""
        n_before = len(self.recording)
        try:
            yield
        finally:
            del self.recording[n_before:]

    # Requirements of values ------------------------------------------------

    def agrees(self, f, oracle, *args, what="the result", relative=False, **kwargs):
        """Call `f` and compare with `oracle` on the same inputs in float64.

        The result must have the dtype of the first floating-point input. As much as
        rounding the inputs once moves the oracle's result is allowed too.
        """
        actual = self.call(f, *args, **kwargs)
        expected = oracle(*in_float64(args), **in_float64(kwargs))
        slack = 0.0
        if is_float(expected) and expected.numel():
            moved = oracle(*rounded_once(args), **rounded_once(kwargs))
            slack = (moved - expected).nan_to_num(0, 0, 0).abs().max().item()
        like = first_float([*args, *kwargs.values()])
        self.close(actual, expected, what, like=like, relative=relative, slack=slack)
        return actual

    def gradients_agree(self, f, oracle, *args, **kwargs):
        """Compare the gradients with respect to every floating-point input."""
        names = argument_names(f, args, kwargs)
        actual = self._gradients(f, names, args, kwargs)
        self.note(tuple(actual.values()))
        truth = Case()._gradients(oracle, names, in_float64(args), in_float64(kwargs))
        for name, gradient in truth.items():
            self.close(actual[name], gradient, f"the gradient of `{name}`")

    def _gradients(self, f, names, args, kwargs):
        args, kwargs = fresh(args), fresh(kwargs)
        leaves = {
            name: value.requires_grad_()
            for name, value in zip(names, [*args, *kwargs.values()], strict=True)
            if is_float(value)
        }
        output = self._run(f, args, kwargs)
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        for each in outputs:
            self.is_tensor(each)
        self.has_graph(*outputs)
        total = sum(
            (each * probe(*each.shape, seed=91 + i, dtype=each.dtype)).sum()
            for i, each in enumerate(outputs)
            if each.requires_grad
        )
        gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)
        }

    def has_graph(self, *outputs):
        """Gradients flow back through at least one of the results."""
        if not any(each.requires_grad for each in outputs):
            raise Explained(
                "No gradient flows through it: a `detach()`, `.data`, `.item()`, "
                "`torch.no_grad()` or a function of `math` cuts the graph."
            )

    def close(
        self,
        actual,
        expected,
        what="the result",
        *,
        like=None,
        relative=False,
        tolerance=None,
        slack=0.0,
    ):
        """`actual` equals `expected` up to rounding.

        `like`: a tensor whose dtype and device the result must have. `relative`:
        every single value must be right in its own size, not only in the size of
        the largest. `tolerance`: a fixed one, in the units of the comparison.
        `slack`: what the rounding of the inputs alone may change.
        """
        comparison.require_tensor(actual, what)
        expected = torch.as_tensor(expected).detach()
        comparison.require_shape(actual, expected, what)
        if like is not None:
            comparison.require_like(actual, like, what)
        came = actual.detach().cpu()
        actual, expected = came.double(), expected.cpu().double()
        comparison.require_finite(actual, expected, what)
        working = comparison.working_dtype(came)
        difference, scale = comparison.distance(actual, expected, relative, working)
        if tolerance is None:
            n = len(self.errors)
            known = self.reference_errors
            own = known[n] if n < len(known) else 0.0
            tolerance = HEADROOM * own + comparison.rounding_of(working, scale)
            tolerance += 0.0 if relative else SLACK * slack
        self.errors.append(difference.max().item() if difference.numel() else 0.0)
        comparison.require_close(came, expected, difference, tolerance, what, relative)

    def equal(self, actual, expected, what="the result"):
        """`actual` is exactly `expected`: for ids, masks, texts and counts."""
        comparison.require_equal(actual, expected, what)

    def true(self, condition, otherwise):
        """`condition` holds; `otherwise` is the sentence for the learner."""
        self.note(bool(condition))
        if not condition:
            raise Unmet(otherwise)

    def is_tensor(self, value, what="the result"):
        comparison.require_tensor(value, what)

    def is_tuple(self, value, length, what="the result"):
        """`value` is a tuple or list of `length` parts, such as `(h, c)`."""
        comparison.require_tuple(value, length, what)

    def raises(self, error_type, f, *args, mentions=(), because="", **kwargs):
        """`f(...)` raises `error_type` with a message that contains `mentions`."""
        wanted = f"{because}: expected {with_article(error_type.__name__)}"
        try:
            self._run(f, fresh(args), fresh(kwargs))
        except Crashed as crash:
            kind = type(crash.error).__name__
            if not isinstance(crash.error, error_type):
                raise Explained(
                    f"{wanted}, got {with_article(kind)} ({crash.error})."
                ) from crash
            self.recording[-1] = Raised(error_type.__name__, "as asked")
            missing = [str(m) for m in mentions if str(m) not in str(crash.error)]
            if missing:
                self.note(tuple(missing))
                raise Explained(
                    f"{because}: the {error_type.__name__} should name "
                    f"{' and '.join(missing)}; it says “{crash.error}”."
                ) from crash
            return
        raise Explained(f"{wanted}, but it returned a result.")

    # Devices ---------------------------------------------------------------

    def any_device(self, f, *args, **kwargs):
        """Everything that `f` creates lies on its inputs' device.

        Runs `f` twice. First on the `meta` device, which computes shapes alone and
        refuses to mix devices; an answer that reads values on the way cannot run there.
        Then here, with account kept of what would lie on the CPU (`FakeDevice`), which
        finds copies to the CPU too. A mistake shows without a GPU.
        """
        with self.unrecorded():
            self._on_meta(f, args, kwargs)
            self._on_fake_device(f, args, kwargs)

    def _on_meta(self, f, args, kwargs):
        try:
            f = to_meta(f) if isinstance(f, nn.Module) else f
            result = self._run(f, to_meta(args), to_meta(kwargs))
        except Crashed as crash:
            text = str(crash.error)
            if "device" in text and "meta" in text and "cpu" in text:
                raise Explained(
                    "A tensor on the CPU meets inputs that are on another device: pass "
                    "`device=x.device` where you create it, x being an input, or move "
                    "it there with `.to(x.device)` (lesson 00, conventions)."
                ) from crash
            return
        except NotWritten as stub:
            if stub.error.__traceback__.tb_next is None:
                raise
            return
        if isinstance(result, torch.Tensor) and result.device.type != "meta":
            raise Explained(
                f"Its result is on {result.device} where the inputs are on another "
                "device: pass `device=x.device` where you create a tensor (lesson 00, "
                "conventions)."
            )

    def _on_fake_device(self, f, args, kwargs):
        f = copy.deepcopy(f) if isinstance(f, nn.Module) else f
        device = FakeDevice()

        def run(*args, **kwargs):
            with device:
                return f(*args, **kwargs)

        try:
            result = self._run(run, fresh(args), fresh(kwargs))
        except Crashed as crash:
            if isinstance(crash.error, OnTheCPU):
                raise Explained(str(crash.error)) from crash
            return  # not for its device; other requirements tell
        except NotWritten:
            return
        finally:
            self.called = describe_call(f, args, kwargs)
        if any(device.on_the_cpu(each) for each in tree_leaves(result)):
            raise Explained(device.message)

    # Modules ---------------------------------------------------------------

    def load(self, module, **weights):
        """Copy tensors into a module's parameters, `w_q=…` into `w_q.weight`.

        A dotted name is written with two underscores, `w_q__bias`.
        """
        parameters = dict(module.named_parameters())
        for name, value in weights.items():
            path = name.replace("__", ".")
            found = next((p for p in (f"{path}.weight", path) if p in parameters), None)
            if found is None:
                raise Explained(no_parameter(module, path, parameters))
            if parameters[found].shape != value.shape:
                raise Explained(wrong_size(found, parameters[found], value.shape))
            with torch.no_grad():
                parameters[found].copy_(value)
        return module

    def parameters(self, module, **shapes):
        """Its parameters are exactly these: `w_q=(4, 6)` for `w_q.weight`, or `w_q`.

        A dotted name is written with two underscores, `w_q__bias`.
        """
        parameters = dict(module.named_parameters())
        self.note({name: tuple(p.shape) for name, p in parameters.items()})
        left = dict(parameters)
        for name, size in shapes.items():
            path = name.replace("__", ".")
            found = next((p for p in (f"{path}.weight", path) if p in parameters), None)
            if found is None:
                raise Explained(no_parameter(module, path, parameters))
            if tuple(left.pop(found).shape) != tuple(size):
                raise Explained(wrong_size(found, parameters[found], size))
        if left:
            name, parameter = next(iter(left.items()))
            raise Explained(
                f"`{name}` of shape {shape(parameter)} is a parameter that nobody "
                "asked for"
                + (f", and so are {len(left) - 1} more." if len(left) > 1 else ".")
            )

    def parameter_count(self, module, expected):
        """The module's parameters hold exactly `expected` numbers."""
        actual = sum(p.numel() for p in module.parameters())
        self.note(actual)
        if actual != expected:
            names = [f"{n} {shape(p)}" for n, p in module.named_parameters()]
            yours = (
                f"Yours: {listed(names)}."
                if names
                else "What is assigned to `self` counts."
            )
            raise Unmet(
                f"It has {actual:,} parameters, expected {expected:,}. {yours}",
                (actual, expected),
            )


def no_parameter(module, path, parameters) -> str:
    """Why `module` has no parameter of this name."""
    if isinstance(getattr(module, path, None), torch.Tensor):
        return (
            f"`{path}` is a plain tensor, which no optimizer finds: wrap it in "
            "`nn.Parameter`."
        )
    near = get_close_matches(path, parameters, n=1)
    yours = f"the nearest is `{near[0]}`" if near else f"yours are {listed(parameters)}"
    if not parameters:
        yours = "there are none at all"
    return (
        f"There is no parameter `{path}`; {yours}. Later lessons load weights by "
        "name, and only what is assigned to `self` counts."
    )


def wrong_size(name, parameter, size) -> str:
    """How a parameter's shape is not the one that is asked for."""
    text = f"`{name}` has shape {shape(parameter)}, expected {tuple(size)}."
    exchanged = parameter.dim() == 2 and parameter.shape[::-1] == torch.Size(size)
    if exchanged and name.endswith(".weight"):
        text += (
            " `nn.Linear` takes the width that comes in, then the width that goes out, "
            "and stores `(out, in)`."
        )
    return text
