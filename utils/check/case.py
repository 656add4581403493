"""One run of a requirement: calls the answer on fresh inputs and compares values."""

import copy
import inspect
import io
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from utils.check.devices import Elsewhere, OnTheCPU
from utils.check.time_limit import TimeUp
from utils.probe import probe, probe_ids

# Rounding that any correct formula may show, in units of the dtype's epsilon.
ROUNDING = {
    torch.float64: 10_000,
    torch.float32: 64,
    torch.float16: 8,
    torch.bfloat16: 4,
}
# How many times the reference's own error another correct formula may show.
HEADROOM = 8
# How many times what rounding the inputs once changes.
SLACK = 4
# How many entries of a list a message shows.
LIST_SHOWN = 6


class Unmet(Exception):
    """A requirement is not met; the message says so with numbers."""


class Explained(Unmet):
    """Not met, and the message names the remedy: a hint would only distract."""


class LeftOut(Exception):
    """This machine cannot run the exercise; the message says so, and what to do."""


class LeftEarly(BaseException):
    """What follows was no longer of interest; `except Exception` lets it through."""


class NotWritten(Exception):
    """The answer still raises a bare NotImplementedError."""

    def __init__(self, error):
        super().__init__()
        self.error = error


class Crashed(Exception):
    """The answer raised an exception of its own."""

    def __init__(self, error, called):
        super().__init__()
        self.error, self.called = error, called


@dataclass(frozen=True)
class Raised:
    """Stands in a trace for a call that raised; another message, another mistake."""

    type: str
    message: str


@dataclass
class Trial:
    """Hands an answer its inputs, records what comes back, and compares.

    `reference_errors` are the errors of the reference in the same comparisons; a
    correct answer may be `HEADROOM` times as far from the float64 truth.
    """

    reference_errors: list = field(default_factory=list)
    trace: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    printed: io.StringIO = field(default_factory=io.StringIO)
    called: str = ""
    # Asked about the trace before each call: is the rest of no interest?
    enough: Callable[[list], bool] | None = None
    retold: bool = False

    # Calling ---------------------------------------------------------------

    def call(self, f, *args, **kwargs):
        """`f(*args, **kwargs)` on fresh copies, which must come back unchanged."""
        given, given_by_name = fresh(args), fresh(kwargs)
        result = self._run(f, given, given_by_name)
        names = argument_names(f, args, kwargs)
        for name, before, after in zip(
            names,
            [*args, *kwargs.values()],
            [*given, *given_by_name.values()],
            strict=True,
        ):
            if not unchanged(before, after):
                self.trace.append("input changed")
                raise Explained(
                    f"It changed its input `{name}` in place: work on a new tensor, "
                    "or the caller's data is gone."
                )
        return result

    def mutate(self, f, *args, **kwargs):
        """`f(*args, **kwargs)` on the arguments themselves, to be changed in place."""
        return self._run(f, args, kwargs)

    def _run(self, f, args, kwargs):
        if self.enough is not None and self.enough(self.trace):
            raise LeftEarly
        self.called = describe_call(f, args, kwargs)
        try:
            with redirect_stdout(self.printed), redirect_stderr(self.printed):
                result = f(*args, **kwargs)
        except (TimeUp, LeftEarly, KeyboardInterrupt, Unmet):
            raise
        except BaseException as error:
            if isinstance(error, NotImplementedError) and not error.args:
                raise NotWritten(error) from error
            self.trace.append(Raised(type(error).__name__, str(error)))
            raise Crashed(error, self.called) from error
        self.trace.append(snapshot(result))
        return result

    @contextmanager
    def unfinished(self):
        """Inside, the trace may still be taken back: nothing is concluded from it."""
        enough, self.enough = self.enough, None
        try:
            yield
        finally:
            self.enough = enough

    def retell(self, *entries):
        """Take back the whole trace: these entries alone tell the mistake."""
        self.trace[:], self.retold = entries, True

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
        self.trace.append(snapshot(tuple(actual.values())))
        truth = Trial()._gradients(oracle, names, in_float64(args), in_float64(kwargs))
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
        if not any(each.requires_grad for each in outputs):
            raise Explained(
                "No gradient flows through it: a `detach()`, `.data`, `.item()` or "
                "`torch.no_grad()` cuts the graph."
            )
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
        self.is_tensor(actual, what)
        expected = torch.as_tensor(expected).detach()
        if actual.shape != expected.shape:
            raise Unmet(
                f"{what} has shape {shape(actual)}, expected {shape(expected)}."
            )
        if like is not None and actual.dtype != like.dtype:
            raise Explained(
                f"{what} is {dtype(actual)} where the input is {dtype(like)}: return "
                "the dtype that came in."
            )
        if like is not None and actual.device != like.device:
            raise Unmet(
                f"{what} is on {actual.device} where the input is on {like.device}."
            )
        working = actual.dtype if is_float(actual) else torch.float64
        actual = actual.detach().cpu().double()
        expected = expected.cpu().double()
        self._finite(actual, expected, what)
        finite = ~expected.isinf()
        difference = torch.where(finite, (actual - expected).abs(), 0.0)
        magnitude = torch.where(finite, expected.abs(), 0.0)
        if relative:
            tiny = torch.finfo(working).tiny
            difference = difference / magnitude.clamp(min=tiny)
            magnitude = torch.ones_like(magnitude)
        error = difference.max().item() if difference.numel() else 0.0
        scale = magnitude.max().item() if magnitude.numel() else 0.0
        allowed = tolerance
        if allowed is None:
            k = len(self.errors)
            own = self.reference_errors[k] if k < len(self.reference_errors) else 0.0
            rounding = ROUNDING.get(working, 64) * torch.finfo(working).eps
            allowed = HEADROOM * own + rounding * (scale or 1.0)
            allowed += 0.0 if relative else SLACK * slack
        self.errors.append(error)
        if not error <= allowed:
            at = index_of(difference.argmax().item(), difference.shape)
            wrong = int((difference > allowed).sum())
            raise Unmet(
                f"{what}: largest difference {error:.3g}{' (relative)' * relative} at "
                f"{list(at)}, where yours is {actual[at].item():.6g} and "
                f"{expected[at].item():.6g} is expected; "
                f"{wrong} of {difference.numel()} values differ."
            )

    def _finite(self, actual, expected, what):
        for bad, word in ((actual.isnan(), "NaN"), (actual.isinf(), "infinite")):
            bad = bad & (actual != expected)
            if bad.any():
                at = index_of(int(bad.flatten().int().argmax()), bad.shape)
                raise Unmet(
                    f"{what}: {int(bad.sum())} of {bad.numel()} values "
                    f"{'are' if bad.sum() > 1 else 'is'} {word}, the first at "
                    f"{list(at)}, where {expected[at].item():.6g} is expected."
                )
        lost = expected.isinf() & (actual != expected)
        if lost.any():
            at = index_of(int(lost.flatten().int().argmax()), lost.shape)
            raise Unmet(
                f"{what} at {list(at)} is {actual[at].item():.6g}, where "
                f"{expected[at].item()} is expected."
            )

    def equal(self, actual, expected, what="the result"):
        """`actual` is exactly `expected`: for ids, masks, texts and counts."""
        if isinstance(expected, torch.Tensor):
            self.is_tensor(actual, what)
            if actual.shape != expected.shape:
                raise Unmet(
                    f"{what} has shape {shape(actual)}, expected {shape(expected)}."
                )
            if actual.dtype != expected.dtype:
                raise Unmet(f"{what} is {dtype(actual)}, expected {dtype(expected)}.")
            wrong = (actual != expected).cpu()
            if wrong.any():
                at = index_of(int(wrong.flatten().int().argmax()), wrong.shape)
                raise Unmet(
                    f"{what}: {int(wrong.sum())} of {wrong.numel()} values differ, "
                    f"the first at {list(at)}, where yours is {actual[at].item()} and "
                    f"{expected[at].item()} is expected."
                )
        elif not same_value(actual, expected):
            raise Unmet(f"{what} is {short(actual)}, expected {short(expected)}.")

    def true(self, condition, otherwise):
        """`condition` holds; `otherwise` is the sentence for the learner."""
        self.trace.append(bool(condition))
        if not condition:
            raise Unmet(otherwise)

    def is_tensor(self, value, what="the result"):
        if value is None:
            raise Explained(f"{what} is None: is a `return` missing?")
        if not isinstance(value, torch.Tensor):
            raise Explained(
                f"{what} is of type {type(value).__name__}, expected a tensor."
            )

    def is_tuple(self, value, length, what="the result"):
        """`value` is a tuple or list of `length` parts, such as `(h, c)`."""
        if value is None:
            raise Explained(f"{what} is None: is a `return` missing?")
        if not isinstance(value, (tuple, list)) or len(value) != length:
            found = (
                f"{len(value)} values"
                if isinstance(value, (tuple, list))
                else f"one {type(value).__name__}"
            )
            raise Explained(f"{what} is {found}, expected {length} values.")

    def raises(self, error_type, f, *args, mentions=(), because="", **kwargs):
        """`f(...)` raises `error_type` with a message that contains `mentions`."""
        wanted = f"{because}: expected {a(error_type.__name__)}"
        try:
            self._run(f, fresh(args), fresh(kwargs))
        except Crashed as crash:
            if not isinstance(crash.error, error_type):
                raise Unmet(
                    f"{wanted}, got {a(type(crash.error).__name__)} ({crash.error})."
                ) from crash
            missing = [str(m) for m in mentions if str(m) not in str(crash.error)]
            if missing:
                raise Unmet(
                    f"{because}: the {error_type.__name__} should name "
                    f"{' and '.join(missing)}; it says “{crash.error}”."
                ) from crash
            # In which words it refuses tells no mistake from another.
            self.trace[-1] = Raised(error_type.__name__, "as asked")
            return
        raise Unmet(f"{wanted}, but it returned a result.")

    def any_device(self, f, *args, **kwargs):
        """Everything that `f` creates lies on its inputs' device.

        Runs `f` twice. First on the `meta` device, which computes shapes alone and
        refuses to mix devices; an answer that reads values on the way cannot run there.
        Then here, with account kept of what would lie on the CPU (`Elsewhere`), which
        finds copies to the CPU too. A mistake shows without a GPU.
        """
        n_before = len(self.trace)
        try:
            with self.unfinished():
                self._on_meta(f, args, kwargs)
                self._elsewhere(f, args, kwargs)
        finally:
            del self.trace[n_before:]

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
                    "it there with `.to(x.device)`."
                ) from crash
            return
        except NotWritten as stub:
            if stub.error.__traceback__.tb_next is None:
                raise
            return
        if isinstance(result, torch.Tensor) and result.device.type != "meta":
            raise Explained(
                f"Its result is on {result.device} where the inputs are on another "
                "device: pass `device=x.device` where you create a tensor."
            )

    def _elsewhere(self, f, args, kwargs):
        f = copy.deepcopy(f) if isinstance(f, nn.Module) else f
        there = Elsewhere()

        def run(*args, **kwargs):
            with there:
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
        if any(there.on_the_cpu(each) for each in tree_leaves(result)):
            raise Explained(there.message)

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
                raise Unmet(
                    f"`{found}` has shape {shape(parameters[found])}, "
                    f"expected {shape(value)}."
                )
            with torch.no_grad():
                parameters[found].copy_(value)
        return module

    def parameter_count(self, module, expected):
        """The module's parameters hold exactly `expected` numbers."""
        actual = sum(p.numel() for p in module.parameters())
        self.trace.append(actual)
        if actual != expected:
            names = ", ".join(f"{n} {shape(p)}" for n, p in module.named_parameters())
            yours = (
                f"Yours: {names}." if names else "What is assigned to `self` counts."
            )
            raise Unmet(f"It has {actual:,} parameters, expected {expected:,}. {yours}")


def no_parameter(module, path, parameters) -> str:
    """Why `module` has no parameter of this name."""
    if isinstance(getattr(module, path, None), torch.Tensor):
        return (
            f"`{path}` is a plain tensor, which no optimizer finds: wrap it in "
            "`nn.Parameter`."
        )
    return (
        f"There is no parameter `{path}`; yours are "
        f"{', '.join(parameters) or 'none at all'}. Later lessons load weights by "
        "name, and only what is assigned to `self` counts."
    )


# Inputs ------------------------------------------------------------------------


def fresh(value):
    """A copy of tensors and containers, with the same strides; modules as they are."""
    if isinstance(value, torch.Tensor):
        if value.grad_fn is not None:
            return value
        data = value.detach()
        storage = data.untyped_storage().clone()
        out = torch.empty(0, dtype=data.dtype, device=data.device).set_(
            storage, data.storage_offset(), data.size(), data.stride()
        )
        return out.requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        return tuple(fresh(v) for v in value)
    if isinstance(value, list):
        return [fresh(v) for v in value]
    if isinstance(value, dict):
        return {k: fresh(v) for k, v in value.items()}
    return value


def unchanged(before, after):
    if isinstance(before, torch.Tensor):
        if before.shape != after.shape or before.dtype != after.dtype:
            return False
        same = (before == after) | ((before != before) & (after != after))
        return bool(same.all())
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(unchanged, before, after))
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            unchanged(before[k], after[k]) for k in before
        )
    return before is after or same_value(before, after)


def convert(value, change):
    if isinstance(value, (torch.Tensor, nn.Module)):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(convert(v, change) for v in value)
    if isinstance(value, dict):
        return {k: convert(v, change) for k, v in value.items()}
    return value


def in_float64(value):
    return convert(value, lambda x: x.detach().double() if is_float(x) else x)


def rounded_once(value):
    """In float64, with every number moved by its dtype's epsilon, up or down."""

    def move(x):
        if not is_float(x):
            return x
        up_or_down = probe_ids(*x.shape, below=2, seed=77) * 2 - 1
        return x.detach().double() * (1 + torch.finfo(x.dtype).eps * up_or_down)

    return convert(value, move)


def to_meta(value):
    """On the device that computes shapes alone; modules as copies."""

    def move(x):
        return (copy.deepcopy(x) if isinstance(x, nn.Module) else x).to("meta")

    return convert(value, move)


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def first_float(values):
    return next((v for v in values if is_float(v)), None)


# What came back ----------------------------------------------------------------


def snapshot(result):
    """What a call returned, in a form that can be compared later."""
    if isinstance(result, nn.Module):
        return tuple(sorted(tuple(p.shape) for p in result.parameters()))
    if isinstance(result, torch.Tensor):
        on_meta = result.device.type == "meta"
        return tuple(result.shape) if on_meta else result.detach().cpu().clone()
    if isinstance(result, (tuple, list)):
        return tuple(snapshot(r) for r in result)
    if isinstance(result, dict):
        return {k: snapshot(v) for k, v in result.items()}
    if isinstance(result, (int, float, str, bytes, bool, type(None))):
        return result
    return type(result).__name__


def same_value(one, other):
    try:
        return bool(one == other)
    except Exception:
        return False


def alike(one, other, truth=None) -> bool:
    """Two snapshots agree, closely enough to be the same mistake.

    `truth`, the reference's snapshot, sets the scale: what two wrong answers
    differ by must be small against what they are wrong by.
    """
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return _alike_tensors(one, other, truth)
    if isinstance(one, tuple) and isinstance(other, tuple):
        truths = truth if isinstance(truth, tuple) else ()
        truths = [*truths, *[None] * (len(one) - len(truths))]
        return len(one) == len(other) and all(map(alike, one, other, truths))
    if isinstance(one, dict) and isinstance(other, dict):
        truth = truth if isinstance(truth, dict) else {}
        return one.keys() == other.keys() and all(
            alike(one[k], other[k], truth.get(k)) for k in one
        )
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return type(one) is type(other) and one == other


def _alike_tensors(one, other, truth):
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not is_float(one):
        return bool((one == other).all())
    eps = torch.finfo(one.dtype).eps
    a_, b = one.double(), other.double()
    if not torch.equal(a_.isnan(), b.isnan()):
        return False
    infinite = a_.isinf() | b.isinf()
    if not torch.equal(a_[infinite], b[infinite]):
        return False
    finite = a_.isfinite()
    a_, b = a_[finite], b[finite]
    if a_.numel() == 0:
        return True
    scale = max(a_.abs().max().item(), b.abs().max().item())
    allowed = 256 * eps * scale
    if isinstance(truth, torch.Tensor) and truth.shape == one.shape:
        wrong_by = (a_ - truth.double()[finite]).nan_to_num(0.0).abs().max().item()
        if wrong_by > 8 * eps * scale:
            allowed = min(allowed, 0.1 * wrong_by)
    return (a_ - b).abs().max().item() <= allowed


# Words ---------------------------------------------------------------------------


def shape(x):
    return str(tuple(x.shape))


def dtype(x):
    return str(x.dtype).removeprefix("torch.")


def index_of(flat, size):
    at = []
    for n in reversed(size):
        at.append(flat % n)
        flat //= n
    return tuple(reversed(at))


def short(value, limit=160):
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def a(noun):
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def argument_names(f, args, kwargs):
    """The parameters' names for the arguments, or `argument 1` where unknown."""
    try:
        target = f.forward if isinstance(f, nn.Module) else f
        parameters = list(inspect.signature(target).parameters.values())
        names = [
            p.name
            for p in parameters
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (ValueError, TypeError):
        names = []
    positional = [
        names[i] if i < len(names) else f"argument {i + 1}" for i in range(len(args))
    ]
    return [*positional, *kwargs]


def describe(value):
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        kind = "" if value.dtype == torch.float32 else f" {dtype(value)}"
        return f"tensor({sizes}){kind}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Generator):
        return "a generator"  # its repr holds an address
    if isinstance(value, (tuple, list)) and any(
        isinstance(v, (torch.Tensor, tuple, list)) for v in value
    ):
        shown = [describe(v) for v in value[:LIST_SHOWN]]
        if len(value) > LIST_SHOWN:
            shown.append(f"… {len(value)} in all")
        inside = ", ".join(shown)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return short(value, 60)


def describe_call(f, args, kwargs):
    name = getattr(f, "__name__", None) or f"{type(f).__name__}(…)"
    names = argument_names(f, args, kwargs)
    parts = [
        describe(v) if n.startswith("argument ") else f"{n}={describe(v)}"
        for n, v in zip(names, [*args, *kwargs.values()], strict=True)
    ]
    return f"{name}({', '.join(parts)})"
