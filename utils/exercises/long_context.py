"""Lesson 14: masks for long texts, attention in blocks, and linear attention."""

import math

import torch
import torch.nn.functional as F

from utils.check.case import Explained, Unmet
from utils.check.exercise import Exercise, Joint
from utils.cost import work
from utils.probe import probe, strided

window_mask = Exercise("sliding_window_mask", lesson="long_context")
sinks = Exercise("sink_mask", lesson="long_context")
stride_mask = Exercise("strided_mask", lesson="long_context")
chunked = Exercise("chunked_attention", lesson="long_context")
features = Exercise("feature_map", lesson="long_context")
linear = Exercise("linear_attention", lesson="long_context")
step = Exercise("linear_attention_step", lesson="long_context")

SIZES = ((5, 5), (2, 7), (4, 6), (1, 8), (9, 11), (3, 3), (1, 1))


# What is right, computed slowly -------------------------------------------------------


def table(t_q, t_k, may_look):
    """A mask cell by cell; the queries are the last of the positions."""
    return torch.tensor(
        [[j <= i and may_look(i, j) for j in range(t_k)] for i in range(t_k - t_q, t_k)]
    ).reshape(t_q, t_k)


def slow_window(t_q, t_k, window):
    return table(t_q, t_k, lambda i, j: i - j < window)


def slow_sinks(t_q, t_k, window, n_sinks):
    return table(t_q, t_k, lambda i, j: i - j < window or j < n_sinks)


def slow_strided(t_q, t_k, stride):
    return table(t_q, t_k, lambda i, j: i - j < stride or (i - j) % stride == 0)


def slow_chunked(q, k, v, window, block=None):
    """One query at a time: softmax over the keys of its window."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    rows = []
    for i in range(t_q):
        end = i + t_k - t_q + 1
        near = slice(max(0, end - window), end)
        scores = (k[..., near, :] * q[..., i, None, :]).sum(-1) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores, dim=-1)
        rows.append((weights[..., None] * v[..., near, :]).sum(-2))
    return torch.stack(rows, dim=-2)


def slow_features(x):
    return F.elu(x) + 1  # exact enough in float64, down to −30


def slow_linear(q, k, v, causal):
    """Every weight by itself, as φ(q)·φ(k), and the average of the values by it."""
    t_q, t_k = q.shape[-2], k.shape[-2]
    rows = []
    for i in range(t_q):
        seen = i + t_k - t_q + 1 if causal else t_k
        weights = [
            (slow_features(q[..., i, :]) * slow_features(k[..., j, :])).sum(-1)
            for j in range(seen)
        ]
        total = sum(weights)
        rows.append(sum(w[..., None] * v[..., j, :] for j, w in enumerate(weights)))
        rows[-1] = rows[-1] / total[..., None]
    return torch.stack(rows, dim=-2)


# Masks --------------------------------------------------------------------------------


def same_masks(answer, t, oracle, sizes, *settings):
    for t_q, t_k in sizes:
        for more in settings:
            actual = t.call(answer, t_q, t_k, *more)
            what = f"the mask for {(t_q, t_k, *more)}"
            t.equal(actual, oracle(t_q, t_k, *more), what)


def refuses(answer, t, *args, mentions, because):
    t.raises(ValueError, answer, *args, mentions=mentions, because=because)


def too_many_queries(answer, t, *settings):
    for t_q, t_k in ((7, 5), (6, 5)):
        because = f"{t_q} queries and {t_k} keys"
        refuses(answer, t, t_q, t_k, *settings, mentions=(t_q, t_k), because=because)


@window_mask.requires(
    "a query sees its own position and the nearest before it, `window` in all",
    "Draw it for five queries and five keys with a window of 2. How many cells of the "
    "last row are True, and which?",
)
def _(answer, t):
    same_masks(answer, t, slow_window, ((5, 5), (6, 6)), (2,), (3,))


@window_mask.requires(
    "a window of 1 is each position alone, and one as long as the text is the causal mask",
)
def _(answer, t):
    same_masks(answer, t, slow_window, ((5, 5), (4, 4)), (1,), (5,), (9,))


@window_mask.requires(
    "with fewer queries than keys, the queries are the last positions",
    "As in lesson 02: query 0 stands at position t_k − t_q.",
)
def _(answer, t):
    same_masks(answer, t, slow_window, SIZES, (1,), (2,), (4,), (20,))


@window_mask.requires(
    "thousands of positions work too",
    "Positions are whole numbers, kept as int64: torch's own `arange`. No length is built in.",
)
def _(answer, t):
    same_masks(answer, t, slow_window, ((3, 2300), (1, 131)), (5,), (300,))


@window_mask.requires(
    "a window below 1, and more queries than keys, are a ValueError that names them",
    "Say what is wrong before you compute anything.",
)
def _(answer, t):
    for window in (0, -3, -1):
        because = f"A window of {window}"
        for sizes in ((4, 6), (5, 5), (1, 1)):
            refuses(answer, t, *sizes, window, mentions=(window,), because=because)
    too_many_queries(answer, t, 2)


@sinks.requires(
    "besides its window a query sees the first `n_sinks` positions",
    "Two conditions, joined by “or”: near enough, or early enough.",
)
def _(answer, t):
    same_masks(answer, t, slow_sinks, ((7, 7), (8, 8)), (2, 1), (2, 3), (3, 2))


@sinks.requires(
    "no query looks ahead, at a sink neither",
    "With four sinks, what may query 0 see? There may be more sinks than positions.",
)
def _(answer, t):
    same_masks(answer, t, slow_sinks, ((5, 5), (3, 3)), (1, 4), (2, 3), (2, 9))


@sinks.requires(
    "without sinks it is the sliding window, and with all it is the causal mask"
)
def _(answer, t):
    same_masks(answer, t, slow_sinks, ((6, 6), (4, 4)), (2, 0), (3, 6), (9, 2))


@sinks.requires(
    "with fewer queries than keys, the queries are the last positions, and the sinks the "
    "first of all",
    "The sinks are the first columns, whoever asks.",
)
def _(answer, t):
    same_masks(answer, t, slow_sinks, SIZES, (2, 1), (1, 3), (3, 0), (4, 20))


@sinks.requires(
    "thousands of positions work too",
    "Positions are whole numbers, kept as int64: torch's own `arange`. No length is built in.",
)
def _(answer, t):
    same_masks(answer, t, slow_sinks, ((3, 2300), (1, 131)), (5, 3), (300, 70))


@sinks.requires(
    "a window below 1, negative sinks, and more queries than keys are a ValueError that "
    "names them",
    "0 sinks are allowed, a window of 0 is not.",
)
def _(answer, t):
    for window in (0, -3, -1):
        because = f"A window of {window}"
        for more in ((4, 6, window, 2), (5, 5, window, 0), (1, 1, window, 1)):
            refuses(answer, t, *more, mentions=(window,), because=because)
    for n_sinks in (-2, -1):
        because = f"{n_sinks} sinks"
        for more in ((4, 6, 3), (5, 5, 9), (1, 1, 1)):
            refuses(answer, t, *more, n_sinks, mentions=(n_sinks,), because=because)
    too_many_queries(answer, t, 2, 1)


@stride_mask.requires(
    "a query sees the nearest `stride` positions, and all that are a whole number of "
    "strides back",
    "Write down how far back each key is, for one query. Which of these numbers are "
    "below the stride, which are divisible by it?",
)
def _(answer, t):
    same_masks(answer, t, slow_strided, ((9, 9), (11, 11)), (3,), (4,))


@stride_mask.requires(
    "a stride of 1 or 2 hides nothing but the future, and so does one as long as the text",
)
def _(answer, t):
    same_masks(answer, t, slow_strided, ((6, 6), (7, 7)), (1,), (2,), (7,), (20,))


@stride_mask.requires(
    "with fewer queries than keys, the queries are the last positions",
    "The stride is counted back from the query, wherever it stands.",
)
def _(answer, t):
    sizes = (*SIZES, (4, 13), (2, 12))
    same_masks(answer, t, slow_strided, sizes, (1,), (3,), (4,), (5,))


@stride_mask.requires(
    "thousands of positions work too",
    "Positions are whole numbers, kept as int64: torch's own `arange`. No length is built in.",
)
def _(answer, t):
    same_masks(answer, t, slow_strided, ((3, 2300), (1, 131)), (7,), (60,))


@stride_mask.requires(
    "a stride below 1, and more queries than keys, are a ValueError that names them",
    "A remainder modulo 0 is an error of another kind: look first.",
)
def _(answer, t):
    for stride in (0, -2, -1):
        because = f"A stride of {stride}"
        for sizes in ((4, 6), (5, 5), (1, 1)):
            refuses(answer, t, *sizes, stride, mentions=(stride,), because=because)
    too_many_queries(answer, t, 2)


def back(t_q, t_k, offset=None):
    """How many steps each key lies behind each query."""
    offset = t_k - t_q if offset is None else offset
    return offset + torch.arange(t_q)[:, None] - torch.arange(t_k)


def near(t_q, t_k, window):
    steps = back(t_q, t_k)
    return (steps >= 0) & (steps < window)


def with_sinks(t_q, t_k, window, n_sinks):
    steps, first = back(t_q, t_k), torch.arange(t_k) < n_sinks
    return (steps >= 0) & ((steps < window) | first)


def sparse(t_q, t_k, stride):
    steps = back(t_q, t_k)
    return (steps >= 0) & ((steps < stride) | (steps % stride == 0))


def guarded(mask, least=(1,)):
    """`mask(t_q, t_k, …)` with the errors that are asked for."""

    def answer(t_q, t_k, *settings):
        if t_q > t_k:
            raise ValueError(f"{t_q} queries, {t_k} keys")
        for value, allowed in zip(settings, least, strict=True):
            if value < allowed:
                raise ValueError(f"{value} is too small")
        return mask(t_q, t_k, *settings)

    return answer


def common_mask_faults(exercise, right, least, top_left, smallest):
    """Mistakes that any of the three masks can make."""
    safe = guarded(right, least)

    def fault(name, sentence, mask, guard=True):
        exercise.fault(name, sentence, guarded(mask, least) if guard else mask)

    fault(
        "inverted",
        "True stands where a query may not look. In this course True means “may look”.",
        lambda *a: ~right(*a),
    )
    fault(
        "zeros_and_ones",
        "The mask holds the numbers 0 and 1. It should be boolean.",
        lambda *a: right(*a).float(),
    )
    fault(
        "additive",
        "These are numbers to be added to the scores, 0 and −inf. This course's masks "
        "are boolean, True = may look.",
        lambda *a: torch.zeros(a[:2]).masked_fill(~right(*a), -torch.inf),
    )
    fault(
        "batch_and_heads_in_front",
        "The mask has more than two dimensions. `(t_q, t_k)` broadcasts by itself.",
        lambda *a: right(*a)[None, None],
    )
    fault(
        "rows_are_keys",
        "Rows and columns are exchanged, or a difference of positions is taken the wrong "
        "way round: a row is a query, a column a key.",
        lambda *a: right(*a).mT.contiguous(),
    )
    fault(
        "aligned_top_left",
        "The queries are taken for the first positions. They are the last `t_q` of the "
        "`t_k`, so query 0 stands at position t_k − t_q.",
        top_left,
    )
    fault(
        "square",
        "The mask has a row for every key. There are `t_q` queries, the last ones.",
        lambda t_q, t_k, *more: right(t_k, t_k, *more),
    )
    fault(
        "keys_forgotten",
        "`t_k` is not used: the mask has as many columns as queries.",
        lambda t_q, t_k, *more: right(t_q, t_q, *more),
    )
    exercise.fault(
        "more_queries_than_keys",
        "More queries than keys pass without a word, although they cannot be the last "
        "of fewer positions.",
        lambda t_q, t_k, *more: (
            safe(t_q, t_k, *more) if t_q <= t_k else right(t_q, t_k, *more)
        ),
    )
    exercise.fault("too_small_is_accepted", smallest, _without_limit(right, least))
    exercise.fault(
        "assertion",
        "An `assert` raises AssertionError, and vanishes when Python runs with -O. Raise "
        "a ValueError that names the numbers.",
        _asserting(right, least),
    )
    exercise.fault(
        "silent_error",
        "The ValueError says nothing. Name the numbers: who reads it has not read your "
        "code.",
        _silent(safe),
    )


def _without_limit(right, least):
    def answer(t_q, t_k, *settings):
        if t_q > t_k:
            raise ValueError(f"{t_q} queries, {t_k} keys")
        try:
            return right(t_q, t_k, *settings)
        except RuntimeError as error:  # modulo 0
            raise ZeroDivisionError("modulo 0") from error

    return answer


def _asserting(right, least):
    def answer(t_q, t_k, *settings):
        assert t_q <= t_k
        assert all(v >= low for v, low in zip(settings, least, strict=True))
        return right(t_q, t_k, *settings)

    return answer


def _silent(safe):
    def answer(*args):
        try:
            return safe(*args)
        except ValueError:
            raise ValueError("bad size") from None

    return answer


common_mask_faults(
    window_mask,
    near,
    (1,),
    lambda t_q, t_k, window: (back(t_q, t_k, 0) >= 0) & (back(t_q, t_k, 0) < window),
    "A window of 0 is accepted: every query would see nothing. Refuse it.",
)
common_mask_faults(
    sinks,
    with_sinks,
    (1, 0),
    lambda t_q, t_k, window, n_sinks: (
        (back(t_q, t_k, 0) >= 0)
        & ((back(t_q, t_k, 0) < window) | (torch.arange(t_k) < n_sinks))
    ),
    "A window of 0 is accepted: most queries would see nothing but the sinks, not even "
    "themselves. Refuse it.",
)
common_mask_faults(
    stride_mask,
    sparse,
    (1,),
    lambda t_q, t_k, stride: (
        (back(t_q, t_k, 0) >= 0)
        & ((back(t_q, t_k, 0) < stride) | (back(t_q, t_k, 0) % stride == 0))
    ),
    "A stride of 0 is divided by. Refuse it first, with a ValueError.",
)


def window_fault(name, sentence, mask):
    window_mask.fault(name, sentence, guarded(mask))


window_fault(
    "itself_not_counted",
    "A query sees itself and `window` positions before: one too many. Its own position "
    "counts.",
    lambda t_q, t_k, w: near(t_q, t_k, w + 1),
)
window_fault(
    "itself_hidden",
    "A query sees the positions before it and not itself.",
    lambda t_q, t_k, w: (back(t_q, t_k) > 0) & (back(t_q, t_k) <= w),
)
window_fault(
    "one_too_few",
    "The window is one position too short.",
    lambda t_q, t_k, w: near(t_q, t_k, w - 1),
)
window_fault(
    "both_sides",
    "The window reaches ahead as far as back. An encoder's may; here nobody sees what "
    "comes later.",
    lambda t_q, t_k, w: back(t_q, t_k).abs() < w,
)
window_fault(
    "half_on_each_side",
    "The window lies around the query, half before and half after it. It ends at the "
    "query.",
    lambda t_q, t_k, w: back(t_q, t_k).abs() <= w // 2,
)
window_fault(
    "future_visible",
    "What is too far back is hidden, but what comes later is not. Two conditions must "
    "hold.",
    lambda t_q, t_k, w: back(t_q, t_k) < w,
)
window_fault(
    "outside_of_the_window",
    "It shows what lies before the window and hides the window itself.",
    lambda t_q, t_k, w: back(t_q, t_k) >= w,
)
window_fault(
    "window_ignored",
    "This is the causal mask: the window is not used.",
    lambda t_q, t_k, w: back(t_q, t_k) >= 0,
)
window_fault(
    "blocks_instead_of_a_window",
    "The text is cut into blocks, and a query sees its own block alone. The first query "
    "of a block sees just itself; a sliding window moves along with every query.",
    lambda t_q, t_k, w: (
        (back(t_q, t_k) >= 0)
        & (torch.arange(t_k - t_q, t_k)[:, None] // w == torch.arange(t_k) // w)
    ),
)
window_fault(
    "same_keys_for_all",
    "Every query sees the last `window` keys of the text. The window moves with the "
    "query.",
    lambda t_q, t_k, w: (back(t_q, t_k) >= 0) & (torch.arange(t_k) >= t_k - w),
)


def sink_fault(name, sentence, mask):
    sinks.fault(name, sentence, guarded(mask, (1, 0)))


def early(t_k, n):
    return torch.arange(t_k) < n


sink_fault(
    "sinks_ahead",
    "The first queries see sinks that come after them. A sink is hidden from those "
    "before it, like any position.",
    lambda t_q, t_k, w, n: near(t_q, t_k, w) | early(t_k, n),
)
sink_fault(
    "sinks_counted_in_the_window",
    "The window is shorter by the number of sinks. Here they come on top of it.",
    lambda t_q, t_k, w, n: near(t_q, t_k, w - n) | with_sinks(t_q, t_k, 1, n),
)
sink_fault(
    "no_sinks",
    "This is the sliding window: the sinks are missing.",
    lambda t_q, t_k, w, n: near(t_q, t_k, w),
)
sink_fault(
    "sinks_alone",
    "A query sees sinks in its window and nothing else: “or” became “and”.",
    lambda t_q, t_k, w, n: near(t_q, t_k, w) & early(t_k, n),
)
sink_fault(
    "window_missing",
    "A query sees the sinks alone; its window is missing.",
    lambda t_q, t_k, w, n: (back(t_q, t_k) >= 0) & early(t_k, n),
)
sink_fault(
    "one_sink_always",
    "There is one sink whatever `n_sinks` says.",
    lambda t_q, t_k, w, n: with_sinks(t_q, t_k, w, 1),
)
sink_fault(
    "one_sink_too_many",
    "There is one sink more than asked for: positions count from 0.",
    lambda t_q, t_k, w, n: with_sinks(t_q, t_k, w, n + 1),
)
sink_fault(
    "one_sink_too_few",
    "There is one sink fewer than asked for: position 0 counts.",
    lambda t_q, t_k, w, n: with_sinks(t_q, t_k, w, n - 1),
)
sink_fault(
    "first_sink_alone",
    "Column n_sinks − 1 is open, and those before it are not: a position was picked "
    "where a range is meant.",
    lambda t_q, t_k, w, n: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) < w) | (torch.arange(t_k) == n - 1))
    ),
)
sink_fault(
    "sinks_at_the_end",
    "The last positions are taken for sinks.",
    lambda t_q, t_k, w, n: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) < w) | (torch.arange(t_k) >= t_k - n))
    ),
)
sink_fault(
    "rows_opened",
    "The first *queries* see everything before them. It is the first keys that stay "
    "visible.",
    lambda t_q, t_k, w, n: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) < w) | early(t_q, n)[:, None])
    ),
)
sink_fault(
    "sinks_before_the_queries",
    "The sinks are counted from the first query's position. They are the first of all "
    "`t_k` positions.",
    lambda t_q, t_k, w, n: (
        (back(t_q, t_k) >= 0)
        & (
            (back(t_q, t_k) < w)
            | (torch.arange(t_k) - (t_k - t_q) < n) & (torch.arange(t_k) >= t_k - t_q)
        )
    ),
)
sink_fault(
    "window_one_too_long",
    "The window is one too long: a query's own position counts.",
    lambda t_q, t_k, w, n: with_sinks(t_q, t_k, w + 1, n),
)
sink_fault(
    "window_longer_by_the_sinks",
    "The window is longer by the number of sinks. They are the first positions of the "
    "text, wherever the window stands.",
    lambda t_q, t_k, w, n: with_sinks(t_q, t_k, w + n, n),
)
sink_fault(
    "itself_hidden",
    "A query does not see its own position. It is the first of its window.",
    lambda t_q, t_k, w, n: with_sinks(t_q, t_k, w, n) & (back(t_q, t_k) > 0),
)
sink_fault(
    "future_visible",
    "What comes later is not hidden.",
    lambda t_q, t_k, w, n: (back(t_q, t_k) < w) | early(t_k, n),
)


@sinks.fault(
    "negative_sinks",
    "A negative number of sinks is accepted. Refuse it, with a ValueError that names it.",
)
def _(t_q, t_k, window, n_sinks):
    return guarded(lambda a, b, w: with_sinks(a, b, w, n_sinks))(t_q, t_k, window)


@sinks.fault(
    "zero_sinks_refused",
    "No sinks at all are refused. 0 is allowed, and gives the sliding window.",
)
def _(t_q, t_k, window, n_sinks):
    return guarded(with_sinks, (1, 1))(t_q, t_k, window, n_sinks)


def stride_fault(name, sentence, mask):
    stride_mask.fault(name, sentence, guarded(mask))


stride_fault(
    "nearest_missing",
    "Only every stride-th position is visible; the nearest ones are missing.",
    lambda t_q, t_k, s: (back(t_q, t_k) >= 0) & (back(t_q, t_k) % s == 0),
)
stride_fault(
    "far_missing",
    "Only the nearest positions are visible: this is a sliding window.",
    near,
)
stride_fault(
    "both_conditions",
    "“Or” became “and”: a query sees just itself.",
    lambda t_q, t_k, s: near(t_q, t_k, s) & (back(t_q, t_k) % s == 0),
)
stride_fault(
    "fixed_columns",
    "The far positions are the multiples of the stride, the same columns for every "
    "query. That is the paper's “fixed” pattern; here the stride is counted back from "
    "the query.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) < s) | (torch.arange(t_k) % s == 0))
    ),
)
stride_fault(
    "fixed_columns_at_the_end",
    "The far positions are the last of each run of `stride` positions, the same columns "
    "for every query. That is the paper's “fixed” pattern; here the stride is counted "
    "back from the query.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k) >= 0)
        & ((back(t_q, t_k) < s) | (torch.arange(t_k) % s == s - 1))
    ),
)
stride_fault(
    "one_too_few_near",
    "The nearest part is one position too short: a query's own position counts, and "
    "`stride` are visible.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) < s - 1) | (back(t_q, t_k) % s == 0))
    ),
)
stride_fault(
    "one_too_many_near",
    "The nearest part is one position too long.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) <= s + 1) | (back(t_q, t_k) % s == 0))
    ),
)
stride_fault(
    "remainder_of_one",
    "The far positions lie one beside where they should: a whole number of strides back "
    "leaves the remainder 0.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) < s) | (back(t_q, t_k) % s == 1))
    ),
)
stride_fault(
    "remainder_of_stride_minus_one",
    "The far positions are counted with the query's own as the first, so they lie one "
    "too near: a whole number of strides back leaves the remainder 0.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) < s) | (back(t_q, t_k) % s == s - 1))
    ),
)
stride_fault(
    "blocks_instead_of_the_nearest",
    "The text is cut into blocks of `stride`, and a query sees its own block in place of "
    "the nearest positions. The first query of a block then sees no neighbour.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k) >= 0)
        & (
            (torch.arange(t_k - t_q, t_k)[:, None] // s == torch.arange(t_k) // s)
            | (back(t_q, t_k) % s == 0)
        )
    ),
)
stride_fault(
    "nearest_future_visible",
    "Positions that come later are visible where they are near: a difference below the "
    "stride may be negative.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k).abs() < s) | (back(t_q, t_k) >= 0) & (back(t_q, t_k) % s == 0)
    ),
)
stride_fault(
    "future_visible",
    "What comes later is not hidden.",
    lambda t_q, t_k, s: (back(t_q, t_k) < s) | (back(t_q, t_k) % s == 0),
)
stride_fault(
    "far_future_visible",
    "Positions a whole number of strides *ahead* are visible too.",
    lambda t_q, t_k, s: near(t_q, t_k, s) | (back(t_q, t_k) % s == 0),
)
stride_fault(
    "counted_from_the_first_query",
    "The stride is counted among the queries; with fewer queries than keys the far "
    "positions are the wrong ones.",
    lambda t_q, t_k, s: (
        (back(t_q, t_k) >= 0) & ((back(t_q, t_k) < s) | (back(t_q, t_k, 0) % s == 0))
    ),
)
stride_fault(
    "stride_ignored",
    "This is the causal mask: the stride is not used.",
    lambda t_q, t_k, s: back(t_q, t_k) >= 0,
)


# Attention in blocks ------------------------------------------------------------------


def heads(*lead, t_q, t_k, d=6, d_v=5, seed=0, dtype=torch.float32):
    return (
        probe(*lead, t_q, d, seed=seed, dtype=dtype),
        probe(*lead, t_k, d, seed=seed + 1, dtype=dtype),
        probe(*lead, t_k, d_v, seed=seed + 2, dtype=dtype),
    )


def grows_linearly(t, f, *args, what, asking=(1,)):
    """Four times the length is about four times the work, and not sixteen.

    asking: one in so many positions has a query, the last ones. Work that grows too
    fast over short texts is counted over long ones: pieces of 128, each a small table,
    are all of a short text.
    """

    def growth(one_in, n):
        short_, long_ = (
            work(f, *heads(t_q=t_k // one_in, t_k=t_k, seed=3), *args)
            for t_k in (n, 4 * n)
        )
        return long_ / short_

    for one_in in asking:
        for n in (96 // one_in, 512):
            grown = growth(one_in, n)
            if grown < 5:
                break
        queries = f", the last {n // one_in} and {4 * n // one_in} of them asking,"
        t.true(
            grown < 5,
            f"From {n} to {4 * n} positions{queries if one_in > 1 else ''} the work grows "
            f"{grown:.1f}-fold, not 4-fold (numbers written and operations in matrix "
            f"products, counted). {what}",
        )


@chunked.requires(
    "each query gets attention over its window, whatever the block size",
    "Take one block of queries. Which is the first key that its first query sees, "
    "which is the last key that its last query sees? Between them, who sees what is "
    "your sliding window again. For the first block: a slice that begins at a negative "
    "number counts from the end.",
)
def _(answer, t):
    x = heads(t_q=8, t_k=8)
    for window, block in ((3, 4), (4, 2), (2, 8), (3, 1)):
        t.agrees(answer, slow_chunked, *x, window, block)


@chunked.requires(
    "the window may be longer than a block, or than the text, and a block too",
    "Beyond the start of the text there are no keys: a slice that begins at a negative "
    "number counts from the end. At the end of the text a block can be shorter, and so "
    "is its mask.",
)
def _(answer, t):
    x = heads(t_q=9, t_k=9, seed=3)
    sizes = ((7, 3), (8, 2), (20, 4), (3, 20), (20, 20), (1, 3), (1000, 5), (2, 1000))
    for window, block in sizes:
        t.agrees(answer, slow_chunked, *x, window, block)


@chunked.requires(
    "a text that is no multiple of the block keeps its last queries",
    "The last block may be smaller.",
)
def _(answer, t):
    for length in (7, 10, 11, 1):
        x = heads(t_q=length, t_k=length, seed=length)
        t.agrees(answer, slow_chunked, *x, 3, 4)


@chunked.requires(
    "batches and heads in front are each treated by themselves",
    "Count dimensions from the end.",
)
def _(answer, t):
    t.agrees(answer, slow_chunked, *heads(3, t_q=7, t_k=7, seed=5), 3, 2)
    x = heads(2, 3, t_q=9, t_k=9, seed=6)
    t.agrees(answer, slow_chunked, *x, window=4, block=3)


@chunked.requires(
    "with fewer queries than keys, the queries are the last positions",
    "Query 0 stands at position T_k − T_q.",
)
def _(answer, t):
    for t_q, t_k in ((3, 8), (1, 6), (5, 7)):
        x = heads(2, t_q=t_q, t_k=t_k, seed=t_q)
        for window, block in ((3, 2), (1, 4), (12, 2)):
            t.agrees(answer, slow_chunked, *x, window, block)
    t.agrees(answer, slow_chunked, *heads(2, 3, t_q=4, t_k=9, seed=4), 3, 2)


@chunked.requires(
    "hundreds of positions, a longer window and wider heads work too",
    "No size is built in, and positions are whole numbers, kept as int64.",
)
def _(answer, t):
    x = heads(t_q=290, t_k=301, d=20, d_v=17, seed=12)
    t.agrees(answer, slow_chunked, *x, 70, 33)


@chunked.requires("gradients reach queries, keys and values")
def _(answer, t):
    x = heads(2, t_q=5, t_k=7, seed=7)
    t.gradients_agree(answer, slow_chunked, *x, 3, 2)


@chunked.requires(
    "scores of ±1,000, other dtypes, and memory that is not contiguous work too"
)
def _(answer, t):
    q, k, v = heads(2, t_q=7, t_k=7, seed=8)
    t.agrees(answer, slow_chunked, 30 * q, 30 * k, v, 3, 2)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        x = heads(2, t_q=7, t_k=7, seed=9, dtype=dtype)
        t.agrees(answer, slow_chunked, *x, 3, 2)
    t.agrees(answer, slow_chunked, strided(q), strided(k), strided(v), 3, 2)


@chunked.requires(
    "scores far below 0 are still larger than what is hidden",
    "A hidden score is −inf, not some number that seems small.",
)
def _(answer, t):
    q = probe(7, 6, seed=13, shift=100)
    k, v = probe(7, 6, seed=14, shift=-100), probe(7, 5, seed=15)
    t.agrees(answer, slow_chunked, q, k, v, 3, 2)


@chunked.requires(
    "time and memory grow in step with the length",
    "Which keys does a block hand to attention? Neither all of them nor all before it.",
)
def _(answer, t):
    grows_linearly(
        t,
        answer,
        8,
        16,
        asking=(1, 2),
        what="A window of 8 should cost as much for every query: compute, and mask, only "
        "keys that some query of the block may see.",
    )


@chunked.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, *heads(2, t_q=5, t_k=7), 3, 2)


@chunked.requires(
    "a window or block below 1, and more queries than keys, are a ValueError that names "
    "them",
)
def _(answer, t):
    x = heads(t_q=5, t_k=7)
    for y in (x, heads(t_q=1, t_k=1)):
        for window in (0, -2, -1, -9):
            because = f"A window of {window}"
            refuses(answer, t, *y, window, 4, mentions=(window,), because=because)
        for block in (0, -4, -1):
            because = f"A block of {block}"
            refuses(answer, t, *y, 3, block, mentions=(block,), because=because)
    for t_q, t_k in ((7, 5), (6, 5)):
        x, because = heads(t_q=t_q, t_k=t_k), f"{t_q} queries and {t_k} keys"
        refuses(answer, t, *x, 3, 4, mentions=(t_q, t_k), because=because)


def softmax_attention(q, k, v, mask, divisor=None):
    divisor = math.sqrt(q.shape[-1]) if divisor is None else divisor
    scores = (q @ k.mT / divisor).masked_fill(~mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(~mask, 0)
    return weights @ v


def blocked(
    first_key=None,
    last_key=None,
    mask=None,
    attend=softmax_attention,
    offset=None,
    blocks=None,
    checks=True,
):
    """A right answer, with its parts open to change.

    first_key, last_key: of `(start, end, window, block, t_k)`, `start` and `end` being
    the positions of the block's first query and one past its last.
    mask: of `(i, j, window)`, positions of queries and keys.
    """
    first_key = first_key or (lambda start, end, w, b, t_k: max(0, start - w + 1))
    last_key = last_key or (lambda start, end, w, b, t_k: end)
    mask = mask or (lambda i, j, w: (j <= i) & (i - j < w))

    def answer(q, k, v, window, block):
        t_q, t_k = q.shape[-2], k.shape[-2]
        if checks:
            refuse(t_q, t_k, window, block)
        shift = t_k - t_q if offset is None else offset
        outputs = []
        for start in range(0, t_q, block) if blocks is None else blocks(t_q, block):
            i = torch.arange(start, min(start + block, t_q), device=q.device) + shift
            ends = (int(start) + shift, min(start + block, t_q) + shift)
            near_ = slice(
                first_key(*ends, window, block, t_k),
                last_key(*ends, window, block, t_k),
            )
            j = torch.arange(t_k, device=q.device)[near_]
            allowed = mask(i[:, None], j, window)
            part = q[..., start : start + block, :]
            outputs.append(attend(part, k[..., near_, :], v[..., near_, :], allowed))
        return torch.cat(outputs, dim=-2)

    return answer


def slice_rows(i):
    """The block's queries, counted from 0."""
    return torch.arange(len(i), device=i.device)[:, None]


def refuse(t_q, t_k, window, block):
    if t_q > t_k:
        raise ValueError(f"{t_q} queries, {t_k} keys")
    if window < 1 or block < 1:
        raise ValueError(f"window {window}, block {block}")


chunked.fault(
    "own_block_alone",
    "A block sees its own keys and no others, so the first query of a block sees just "
    "itself. Its window reaches into the blocks before.",
    blocked(first_key=lambda start, end, w, b, t_k: start),
)
chunked.fault(
    "one_block_back",
    "A block sees itself and the block before it. A window longer than a block reaches "
    "further.",
    blocked(first_key=lambda start, end, w, b, t_k: max(0, start - b)),
)
chunked.fault(
    "one_key_missing",
    "The first query of a block misses the farthest key of its window: it stands "
    "window − 1 positions back.",
    blocked(first_key=lambda start, end, w, b, t_k: min(start, max(0, start - w + 2))),
)
chunked.fault(
    "negative_start",
    "A slice begins at a negative number, which counts from the end of the text: the "
    "first blocks see other keys, or none. Take 0 where the window begins before the "
    "text.",
    blocked(first_key=lambda start, end, w, b, t_k: start - w + 1),
)
chunked.fault(
    "no_mask_in_the_block",
    "All queries of a block see all keys of the slice. Each has its own window in it.",
    blocked(mask=lambda i, j, w: (i - j < 10**6) & (j < 10**6)),
)
chunked.fault(
    "future_in_the_block",
    "Queries see what comes later in their block.",
    blocked(mask=lambda i, j, w: i - j < w),
)
chunked.fault(
    "window_ignored_in_the_block",
    "Within the slice only the future is hidden, so that later queries of a block see "
    "more than their window.",
    blocked(mask=lambda i, j, w: j <= i),
)
chunked.fault(
    "window_one_too_long",
    "The window is one too long: a query's own position counts.",
    blocked(
        first_key=lambda start, end, w, b, t_k: max(0, start - w),
        mask=lambda i, j, w: (j <= i) & (i - j <= w),
    ),
)
chunked.fault(
    "window_rounded_to_blocks",
    "The window is rounded up to a whole number of blocks. The block size should change "
    "nothing but the work.",
    lambda q, k, v, window, block: blocked()(
        q, k, v, -(-window // block) * block if window > 0 < block else window, block
    ),
)
chunked.fault(
    "causal_from_the_top_left",
    "Within a slice the mask takes the block's queries for the *first* positions, as "
    "`tril()` and `is_causal=True` do. They are the last of the slice, and each has a "
    "window.",
    blocked(mask=lambda i, j, w: slice_rows(i) >= j - j[0]),
)
chunked.fault(
    "window_from_the_top_left",
    "Within a slice the mask takes the block's queries for the *first* positions. They "
    "are the last of the slice.",
    blocked(
        mask=lambda i, j, w: (
            (slice_rows(i) >= j - j[0]) & (slice_rows(i) - (j - j[0]) < w)
        )
    ),
)
chunked.fault(
    "window_counted_in_blocks",
    "The window is counted in blocks. It is a number of positions.",
    lambda q, k, v, window, block: blocked()(
        q, k, v, window * block if window > 0 < block else window, block
    ),
)
chunked.fault(
    "window_on_both_sides",
    "The window reaches ahead too.",
    blocked(
        last_key=lambda start, end, w, b, t_k: end + w,
        mask=lambda i, j, w: (i - j).abs() < w,
    ),
)
chunked.fault(
    "block_taken_for_window",
    "The block size decides how far a query sees. It should change nothing but the "
    "work.",
    lambda q, k, v, window, block: blocked()(
        q, k, v, block if window > 0 else window, block
    ),
)
chunked.fault(
    "last_queries_lost",
    "The last queries are missing where the text is no multiple of the block.",
    blocked(blocks=lambda t_q, block: range(0, t_q - block + 1, block) or [0]),
)
chunked.fault(
    "aligned_top_left",
    "The queries are taken for the first positions. They are the last `T_q` of the "
    "`T_k`.",
    blocked(offset=0),
)
chunked.fault(
    "no_scaling",
    "The scores are not divided by the root of d_head.",
    blocked(attend=lambda q, k, v, m: softmax_attention(q, k, v, m, 1.0)),
)
chunked.fault(
    "scaled_by_the_width_of_the_values",
    "The scores are divided by the root of d_v. They are sums of d_head products: it is "
    "the root of d_head.",
    blocked(
        attend=lambda q, k, v, m: softmax_attention(q, k, v, m, math.sqrt(v.shape[-1]))
    ),
)
chunked.fault(
    "masked_after_softmax",
    "The mask comes after the softmax, so hidden keys take their share away from the "
    "others.",
    blocked(
        attend=lambda q, k, v, m: (
            torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1).masked_fill(~m, 0) @ v
        )
    ),
)
chunked.fault(
    "hidden_by_a_number",
    "A hidden score is −10,000, and real ones can be lower still: then a query looks at "
    "what it must not see. −inf is below them all.",
    blocked(
        attend=lambda q, k, v, m: (
            (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~m, -1e4).softmax(-1) @ v
        )
    ),
)
chunked.fault(
    "out_of_order",
    "The blocks are put together in the wrong order.",
    blocked(blocks=lambda t_q, block: list(range(0, t_q, block))[::-1]),
)


@chunked.fault(
    "last_queries_left_at_0",
    "The last queries get zeros where the text is no multiple of the block. The last "
    "block may be smaller: count the blocks upwards.",
)
def _(q, k, v, window, block):
    refuse(q.shape[-2], k.shape[-2], window, block)
    whole = blocked()(q, k, v, window, block)
    done = torch.arange(q.shape[-2], device=q.device) < q.shape[-2] // block * block
    return whole * done[:, None]


@chunked.fault(
    "quadratic_of_few_queries",
    "With as many queries as keys the work is right. With fewer it is that of full "
    "attention: a slice begins where the first query's window would if it stood at "
    "position 0. Shift both ends by T_k − T_q.",
)
def _(q, k, v, window, block):
    shift = k.shape[-2] - q.shape[-2]

    def first_key(start, end, w, b, t_k):
        return max(0, start - shift - w + 1)

    return blocked(first_key=first_key)(q, k, v, window, block)


@chunked.fault(
    "quadratic_work",
    "The result is right, but the work is that of full attention: scores, or cells of a "
    "mask, are made for all T_q × T_k pairs, for all keys before a block, or for blocks "
    "that are not `block` long, and most of them thrown away.",
)
def _(q, k, v, window, block):
    t_q, t_k = q.shape[-2], k.shape[-2]
    refuse(t_q, t_k, window, block)
    return softmax_attention(q, k, v, near(t_q, t_k, window).to(q.device))


@chunked.fault(
    "padded_with_zeros",
    "Zeros stand in front of the keys, and the first queries look at them: a key of "
    "zeros has the score 0, not −inf. Hide them.",
)
def _(q, k, v, window, block):
    refuse(q.shape[-2], k.shape[-2], window, block)
    k, v = (F.pad(x, (0, 0, window, 0)) for x in (k, v))
    return blocked()(q, k, v, window, block)


@chunked.fault(
    "blocks_normalised_apart",
    "The part of the window that lies before the block and the part inside it get a "
    "softmax each, and the results are averaged. One softmax runs over the whole "
    "window.",
)
def _(q, k, v, window, block):
    t_q, t_k = q.shape[-2], k.shape[-2]
    refuse(t_q, t_k, window, block)
    i = torch.arange(t_k - t_q, t_k, device=q.device)[:, None]
    j = torch.arange(t_k, device=q.device)
    inside = (j <= i) & (i - j < window)
    start = (i - (t_k - t_q)) // block * block + (t_k - t_q)
    parts = [inside & (j >= start), inside & (j < start)]
    some = parts[1].any(-1, keepdim=True)
    a, b = (softmax_attention(q, k, v, part) for part in parts)
    return torch.where(some, (a + b) / 2, a)


@chunked.fault(
    "joined_along_the_first_dimension",
    "The blocks are joined along the first dimension. Time is the last but one, counted "
    "from the end.",
)
def _(q, k, v, window, block):
    refuse(q.shape[-2], k.shape[-2], window, block)
    whole = blocked()(q, k, v, window, block)
    return torch.cat(whole.split(block, dim=-2), dim=0)


@chunked.fault(
    "joined_along_dimension_one",
    "The blocks are joined along dimension 1, which is time only where one dimension "
    "stands in front. Count from the end.",
)
def _(q, k, v, window, block):
    refuse(q.shape[-2], k.shape[-2], window, block)
    whole = blocked()(q, k, v, window, block)
    return torch.cat(whole.split(block, dim=-2), dim=1)


@chunked.fault(
    "sizes_unchecked",
    "A window or block below 1, or more queries than keys, meet no ValueError of yours.",
)
def _(q, k, v, window, block):
    return blocked(checks=False)(q, k, v, window, block)


@chunked.fault(
    "more_queries_than_keys",
    "More queries than keys pass without a word.",
)
def _(q, k, v, window, block):
    refuse(0, 0, window, block)
    return blocked(checks=False)(q, k, v, window, block)


# Features -----------------------------------------------------------------------------


@features.requires(
    "it is x + 1 above 0 and e^x below",
    "Two formulas, one condition: `torch.where`.",
)
def _(answer, t):
    t.agrees(answer, slow_features, probe(4, 5))
    t.agrees(answer, slow_features, torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0]))


@features.requires(
    "every shape and dtype works, and the dtype stays",
)
def _(answer, t):
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        t.agrees(answer, slow_features, probe(2, 3, 5, seed=1, dtype=dtype))
    t.agrees(answer, slow_features, strided(probe(3, 4, seed=2, scale=2)))
    t.agrees(answer, slow_features, probe(7, seed=3))
    for alone in (-2.0, 2.0):
        t.agrees(answer, slow_features, torch.tensor(alone))


@features.requires(
    "numbers far below 0 give a small feature, not 0",
    "What is 1 + (−1 + 0.00000001) in float32? Below 0 there is a formula without a 1.",
)
def _(answer, t):
    for dtype, low, high in (
        (torch.float32, -80, -9),
        (torch.float32, -86, -80),
        (torch.float64, -700, -30),
        (torch.bfloat16, -80, -6),
        (torch.float16, -9, -6),
    ):
        x = torch.linspace(low, high, 30, dtype=torch.float64).to(dtype)
        t.agrees(answer, torch.exp, x, relative=True)


@features.requires("its gradient is right")
def _(answer, t):
    t.gradients_agree(answer, slow_features, probe(3, 5, seed=4, scale=2))


@features.requires(
    "its gradient is finite for large numbers too",
    "`torch.where` computes both sides everywhere. What is e^200, or e^12 in float16, and "
    "what is infinity times 0 in the backward pass?",
)
def _(answer, t):
    t.gradients_agree(answer, slow_features, torch.tensor([-20.0, 90.0, 200.0, 1e4]))
    x = torch.tensor([-3.0, 12.0, 90.0, 200.0], dtype=torch.float16)
    t.gradients_agree(answer, slow_features, x)


@features.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, probe(3, 5))


def feature_fault(name, sentence, f):
    features.fault(name, sentence, f)


feature_fault(
    "rounds_to_zero",
    "This is elu(x) + 1, and right on paper. But elu(−20) is −1 + 0.000000002, which "
    "rounds to −1, and the feature to 0: a query all below −17 then has no weight at "
    "all, and divides 0 by 0. Below 0 write e^x itself.",
    lambda x: F.elu(x) + 1,
)
feature_fault(
    "nan_in_the_gradient",
    "e^x of a large x is infinite, on the side that is not chosen. Its gradient is 0 "
    "times infinity, NaN. Keep x from being large before the exponential.",
    lambda x: torch.where(x > 0, x + 1, x.exp()),
)
feature_fault(
    "nan_in_the_gradient_in_float16",
    "e^80, say, is a number in float32, but in float16 all from e^12 on are infinite, and "
    "the gradient on the side that is not chosen is NaN. The exponential is for what lies "
    "below 0: let nothing larger come to it.",
    lambda x: torch.where(x > 0, x + 1, x.clamp(max=80).exp()),
)
feature_fault(
    "no_one_added",
    "This is elu(x), which goes below 0. A weight must not be negative: add 1.",
    lambda x: F.elu(x),
)
feature_fault(
    "relu", "This is relu(x): flat at 0, without a gradient below.", lambda x: x.relu()
)
feature_fault(
    "relu_plus_one",
    "Below 0 it is 1 throughout. There it should be e^x.",
    lambda x: x.relu() + 1,
)
feature_fault("exponential", "It is e^x above 0 too; there it is x + 1.", torch.exp)
feature_fault(
    "softplus",
    "This is softplus, log(1 + e^x): positive as well, but another function.",
    F.softplus,
)
feature_fault(
    "silu_plus_one",
    "This is SiLU plus 1. The feature map is built from ELU.",
    lambda x: F.silu(x) + 1,
)
feature_fault(
    "softmax_over_features",
    "This is a softmax over the last dimension. Each number is mapped by itself.",
    lambda x: x.softmax(-1),
)
feature_fault(
    "sign_of_the_exponent",
    "Below 0 it is e^−x, which grows the further down x lies. It should fall, e^x.",
    lambda x: torch.where(x > 0, x + 1, (-x).clamp(max=80).exp()),
)
feature_fault(
    "sides_exchanged",
    "The two formulas are exchanged: e^x belongs below 0.",
    lambda x: torch.where(x < 0, x + 1, x.clamp(max=80).exp()),
)
feature_fault(
    "leaky",
    "Below 0 it is 1 plus a small slope, which becomes negative further down.",
    lambda x: F.leaky_relu(x) + 1,
)
feature_fault(
    "above_zero_missing_one",
    "Above 0 the 1 is missing: it is x + 1 there, so that both sides meet at 0.",
    lambda x: torch.where(x > 0, x, x.clamp(max=0).exp()),
)


# Linear attention ---------------------------------------------------------------------


def table_of_slow_weights(q, k, v, causal):
    """`slow_linear` for long texts, by a table."""
    w = slow_features(q) @ slow_features(k).mT
    w = w.tril(k.shape[-2] - q.shape[-2]) if causal else w
    return w @ v / w.sum(-1, keepdim=True)


def without_mask(answer):
    return lambda q, k, v: answer(q, k, v, False)


def causally(answer):
    return lambda q, k, v: answer(q, k, v, True)


def averages(t, run, n=4):
    """Weights sum to 1, however small they are: nothing is added to the divisor."""
    recorded, found = len(t.trace), []
    with t.unfinished():
        for low, dtype in ((0, torch.float32), (8, torch.float32), (20, torch.float64)):
            q, k, v = heads(t_q=n, t_k=n, seed=17, dtype=dtype)
            found.append(t.call(run, q - low, k - low, torch.ones_like(v)))
        if not all(isinstance(x, torch.Tensor) and x.shape == v.shape for x in found):
            return
        del t.trace[recorded:]  # what is added may be of any size: the mistake is one
    usual, *small = (x.detach().double() for x in found)
    least = min(x.min().item() for x in small)
    t.true(
        not (bool(((usual - 1).abs() < 0.05).all()) and 0 <= least < 0.99),
        "With values that are all 1 every average is 1. Yours is, for features near 1; "
        f"for features near e^−8 and e^−20 it falls to {least:.3g}.",
    )


def small_weights(t, run, oracle):
    """The averages where all features are small, and small ones far apart."""
    averages(t, run)
    for low, dtype, tolerance in ((8, torch.float32, 0.01), (20, torch.float64, 1e-5)):
        q, k, v = heads(t_q=4, t_k=4, seed=17, dtype=dtype)
        x = q - low, k - low, v
        # elu(x) + 1 is right to some digits here
        truth = oracle(*(y.double() for y in x))
        t.close(t.call(run, *x), truth, like=v, tolerance=tolerance)


def forgets_nothing(t, run):
    """No key counts the less the farther it lies back."""
    recorded, n = len(t.trace), 4
    q, k, _ = heads(t_q=n, t_k=n, seed=5)
    with t.unfinished():
        weights = t.call(run, q, k, torch.eye(n))
        if not isinstance(weights, torch.Tensor) or weights.shape != (n, n):
            return
        del t.trace[recorded:]  # whatever is left of it: the mistake is one
    ratio = weights.detach().double() / (slow_features(q) @ slow_features(k).mT)
    left = ratio.diagonal(-1) / ratio.diagonal()[1:]
    farther = ratio.diagonal(-2) / ratio.diagonal(-1)[1:]
    rate = left.mean().item()
    same = (torch.cat([left, farther]) - rate).abs().max() < 1e-3
    t.true(
        not (same and 0 < rate < 0.998),
        f"With every position that it lies back, a key counts {rate:.3g} times as much.",
    )


def hides_what_comes_later(t, run, q, k, v):
    """No output depends on a key or value after its query."""
    before = t.call(run, q, k, v)
    if not isinstance(before, torch.Tensor) or before.shape != v.shape:
        return
    for j in range(1, len(k)):
        other_k, other_v = k.clone(), v.clone()
        other_k[j], other_v[j] = k[j] + 1, v[j] + 3
        after = t.call(run, q, other_k, other_v)
        moved = ((after - before)[:j].abs() > 1e-3).any(dim=-1)
        first = int(moved.int().argmax()) if bool(moved.any()) else None
        t.true(
            first is None,
            f"The result of query {first} changes with key and value {j}, which come "
            "later.",
        )


@linear.requires(
    "without a mask, the values are averaged with weights in proportion to φ(q)·φ(k)",
    "For one query, write the sum of φ(q)·φ(k_j)·v_j over j. What can be taken out of "
    "the sum? Which other sum must it be divided by, and does that one have a last "
    "dimension to divide along?",
)
def _(answer, t):
    averages(t, without_mask(answer))
    t.agrees(answer, slow_linear, *heads(t_q=4, t_k=5), False)
    t.agrees(answer, slow_linear, *heads(t_q=3, t_k=8, d=2, d_v=7, seed=3), False)
    t.agrees(answer, slow_linear, *heads(t_q=1, t_k=1, d=9, d_v=2, seed=4), False)


@linear.requires(
    "without a mask there may be more queries than keys",
    "Only with `causal=True` are the queries the last of the keys' positions.",
)
def _(answer, t):
    t.agrees(answer, slow_linear, *heads(t_q=6, t_k=3, d=4, d_v=2, seed=18), False)


@linear.requires(
    "causal, no query sees a later key, in neither of the two sums",
    "The sums up to each position, its own included, are running totals. Which function "
    "of torch keeps running totals?",
)
def _(answer, t):
    forgets_nothing(t, causally(answer))
    hides_what_comes_later(t, causally(answer), *heads(t_q=5, t_k=5, seed=5))
    t.agrees(answer, slow_linear, *heads(t_q=4, t_k=4, seed=5), True)
    t.agrees(answer, slow_linear, *heads(t_q=7, t_k=7, d=3, d_v=4, seed=6), True)
    t.agrees(answer, slow_linear, *heads(t_q=1, t_k=1, seed=7), True)


@linear.requires(
    "batches and heads in front are each treated by themselves",
    "Count dimensions from the end.",
)
def _(answer, t):
    for causal in (False, True):
        t.agrees(answer, slow_linear, *heads(3, t_q=4, t_k=4, seed=8), causal=causal)
        t.agrees(answer, slow_linear, *heads(2, 3, t_q=5, t_k=5, seed=9), causal=causal)


@linear.requires(
    "with fewer queries than keys, the queries are the last positions",
    "Query 0 has the running total up to position T_k − T_q.",
)
def _(answer, t):
    for t_q, t_k in ((2, 6), (1, 5), (3, 4)):
        t.agrees(answer, slow_linear, *heads(2, t_q=t_q, t_k=t_k, seed=t_k), True)
    for causal in (True, False):
        x = heads(2, 3, t_q=3, t_k=5, seed=14)
        t.agrees(answer, slow_linear, *x, causal)


@linear.requires("hundreds of positions and wider heads work too")
def _(answer, t):
    x = heads(t_q=190, t_k=201, d=20, d_v=17, seed=15)
    for causal in (True, False):
        t.agrees(answer, table_of_slow_weights, *x, causal)


@linear.requires(
    "a later key is not in the sums at all, however large it is",
    "Add up what a query sees. To take the rest away from the sum of all leaves rounding "
    "errors of the size of that sum.",
)
def _(answer, t):
    q, k, v = heads(t_q=5, t_k=5, seed=16)
    k[-1] = 1e7
    t.agrees(answer, slow_linear, q, k, v, True)


@linear.requires(
    "however small the weights are, they are divided by their sum and nothing else",
    "Is something added to the divisor, or is there a least value for it? φ is above 0 "
    "everywhere, and so is the sum.",
)
def _(answer, t):
    for causal, run in ((False, without_mask(answer)), (True, causally(answer))):
        small_weights(t, run, lambda *x, causal=causal: slow_linear(*x, causal))


@linear.requires("gradients reach queries, keys and values")
def _(answer, t):
    t.gradients_agree(answer, slow_linear, *heads(2, t_q=3, t_k=5, seed=10), False)


@linear.requires("gradients reach them through the running totals too")
def _(answer, t):
    t.gradients_agree(answer, slow_linear, *heads(2, t_q=3, t_k=5, seed=11), True)


@linear.requires(
    "large numbers, other dtypes, and memory that is not contiguous work too"
)
def _(answer, t):
    q, k, v = heads(2, t_q=4, t_k=6, seed=12)
    for causal in (False, True):
        t.agrees(answer, slow_linear, 100 * q, 100 * k, v, causal)
        t.agrees(answer, slow_linear, strided(q), strided(k), strided(v), causal)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            x = heads(2, t_q=4, t_k=6, seed=13, dtype=dtype)
            t.agrees(answer, slow_linear, *x, causal)


@linear.requires(
    "time and memory grow in step with the length",
    "If a T_q × T_k table of weights appears anywhere, the order of the products is the "
    "wrong one.",
)
def _(answer, t):
    for causal in (False, True):
        grows_linearly(
            t,
            answer,
            causal,
            asking=(1, 2),
            what="Sum φ(k)ᵀv over the keys first: a table of d × d_v numbers, however "
            "long the text.",
        )


@linear.requires("it creates nothing on another device")
def _(answer, t):
    t.any_device(answer, *heads(2, t_q=5, t_k=7), True)
    t.any_device(answer, *heads(2, t_q=5, t_k=7), False)


@linear.requires(
    "causal with more queries than keys is a ValueError that names both",
    "Without a mask it is allowed.",
)
def _(answer, t):
    for t_q, t_k in ((7, 5), (6, 5)):
        x, because = heads(t_q=t_q, t_k=t_k), f"{t_q} queries and {t_k} keys, causal"
        refuses(answer, t, *x, True, mentions=(t_q, t_k), because=because)


def phi(x):
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def faded(x, dim, rate=0.9):
    """The running total of what fades from one position to the next."""
    total, totals = 0, []
    for now in x.unbind(dim):
        total = rate * total + now
        totals.append(total)
    return torch.stack(totals, dim)


def summed(
    map_q=phi,
    map_k=phi,
    map_v=lambda v: v,
    running=lambda x, dim: x.cumsum(dim),
    below=lambda q, z: (q * z).sum(-1, keepdim=True),
    shift=None,
):
    """A right answer, with its parts open to change."""

    def answer(q, k, v, causal):
        t_q, t_k = q.shape[-2], k.shape[-2]
        if causal and t_q > t_k:
            raise ValueError(f"{t_q} queries, {t_k} keys")
        q, k, v = map_q(q), map_k(k), map_v(v)
        s, z = k[..., :, None] * v[..., None, :], k
        if causal:
            first = t_k - t_q if shift is None else shift
            s = running(s, -3)[..., first : first + t_q, :, :]
            z = running(z, -2)[..., first : first + t_q, :]
        else:
            s, z = s.sum(-3, keepdim=True), z.sum(-2, keepdim=True)
        top = (q[..., None, :] @ s).squeeze(-2)
        return top / below(q, z)

    return answer


linear.fault(
    "not_normalised",
    "The sum of the weighted values is not divided by the sum of the weights, so it "
    "grows with the text.",
    summed(below=lambda q, z: 1.0),
)
linear.fault(
    "divided_by_the_sum_of_keys",
    "The divisor is the sum of the key features alone. The weights are φ(q)·φ(k), so "
    "the query belongs into it.",
    summed(below=lambda q, z: z.sum(-1, keepdim=True)),
)
linear.fault(
    "divisor_without_its_last_dimension",
    "The divisor has lost its last dimension: `(…, T_q)` meets `(…, T_q, d_v)` from the "
    "right, so query 0's sum meets column 0 of the values. Keep a dimension of 1, "
    "`keepdim=True` or `[..., None]`.",
    summed(below=lambda q, z: (q * z).sum(-1)),
)
linear.fault(
    "divisor_summed_over_the_queries",
    "The divisor is summed over the last dimension but one, the queries. φ(q)·z sums "
    "over the features, and gives a number for each query.",
    summed(below=lambda q, z: (q * z).sum(-2, keepdim=True)),
)
linear.fault(
    "one_divisor_for_all",
    "One divisor, summed over everything, serves all queries. Each has its own.",
    summed(below=lambda q, z: (q * z).sum()),
)
linear.fault(
    "product_of_two_sums",
    "The features of the query are summed, and those of the keys, before they meet. "
    "φ(q)·z multiplies feature by feature, and then sums.",
    summed(below=lambda q, z: (q * z.sum(-1, keepdim=True)).sum(-1, keepdim=True)),
)
linear.fault(
    "something_added_to_the_divisor",
    "Something like 1e-6 is added to the divisor, as the authors' code does, or a least "
    "value is set for it. Where all features are small, that is more than the sum "
    "itself, and the output is no average any more. φ is above 0, and so is the sum: "
    "nothing need be added.",
    summed(below=lambda q, z: (q * z).sum(-1, keepdim=True) + 1e-6),
)
linear.fault(
    "divisor_not_causal",
    "The divisor sums over all keys, those after the query too.",
    lambda q, k, v, causal: (
        summed(below=lambda q, z: 1.0)(q, k, v, causal)
        / (phi(q) * phi(k).sum(-2, keepdim=True)).sum(-1, keepdim=True)
    ),
)
linear.fault(
    "values_not_causal",
    "The weighted values are summed over all keys, those after the query too; only the "
    "divisor stops at the query.",
    lambda q, k, v, causal: (
        summed(below=lambda q, z: 1.0)(q, k, v, False)
        / (1 / summed(below=lambda q, z: 1.0)(q, k, v * 0 + 1, causal)[..., :1]) ** -1
    ),
)
linear.fault(
    "causal_ignored",
    "Every query sees every key, with `causal=True` too.",
    lambda q, k, v, causal: (
        summed()(q, k, v, False)
        if not causal or q.shape[-2] <= k.shape[-2]
        else summed()(q, k, v, True)
    ),
)
linear.fault(
    "always_causal",
    "Later keys are hidden with `causal=False` too.",
    lambda q, k, v, causal: summed()(q, k, v, True),
)
linear.fault(
    "itself_hidden",
    "A query does not see its own position: the running total stops one too early.",
    summed(running=lambda x, dim: x.cumsum(dim).roll(1, dim)),
)
linear.fault(
    "sums_from_the_end",
    "The running totals begin at the end of the text: a query sees itself and what "
    "comes later.",
    summed(running=lambda x, dim: x.flip(dim).cumsum(dim).flip(dim)),
)
linear.fault(
    "later_keys_taken_away",
    "The later keys are taken away from the sum over all. Where they are large, what is "
    "left is rounding error. Add up what the query sees.",
    summed(
        running=lambda x, dim: (
            x.sum(dim, keepdim=True) - x.flip(dim).cumsum(dim).flip(dim) + x
        )
    ),
)
linear.fault(
    "aligned_top_left",
    "The queries are taken for the first positions. They are the last `T_q` of the "
    "`T_k`.",
    summed(shift=0),
)
linear.fault(
    "running_total_over_features",
    "The running total of the keys runs over their features; it should run over time.",
    summed(running=lambda x, dim: x.cumsum(-3 if dim == -3 else -1)),
)
linear.fault(
    "itself_left_out",
    "A query does not see its own position, and the first one sees nothing: 0 / 0 is "
    "NaN. The sums run to the query's own position, which counts.",
    summed(running=lambda x, dim: x.cumsum(dim) - x),
)
linear.fault(
    "forgets",
    "The sums are multiplied by a number below 1 before the next position is added. "
    "Newer models do that; here nothing is forgotten.",
    summed(running=lambda x, dim: faded(x, dim)),
)
linear.fault(
    "running_total_over_dimension_1",
    "The running totals run along dimension 1, which is time only where one dimension "
    "stands in front. Count from the end.",
    summed(running=lambda x, dim: x.cumsum(1)),
)
linear.fault(
    "running_total_over_dimension_0",
    "The running totals run along dimension 0, which is time only where nothing stands "
    "in front. Count from the end.",
    summed(running=lambda x, dim: x.cumsum(0)),
)
linear.fault(
    "s_turned_round",
    "S is turned round, (d_v, d). It is φ(k)ᵀv, (d, d_v), so that a query can be "
    "multiplied by it.",
    lambda q, k, v, causal: (
        summed()(q, k, v, True)
        if causal
        else phi(q) @ (v.mT @ phi(k)) / (phi(q) @ phi(k).sum(-2)[..., None])
    ),
)
linear.fault(
    "queries_not_mapped",
    "The queries are used as they are, so that weights are negative. φ belongs on both.",
    summed(map_q=lambda x: x),
)
linear.fault(
    "keys_not_mapped",
    "The keys are used as they are, so that weights are negative. φ belongs on both.",
    summed(map_k=lambda x: x),
)
linear.fault(
    "nothing_mapped",
    "Queries and keys are used as they are, so that weights are negative and their sum "
    "may be 0. φ makes them positive.",
    summed(map_q=lambda x: x, map_k=lambda x: x),
)
linear.fault(
    "z_not_mapped",
    "z is the sum of the keys as they are. Both sums take φ(k), so that the divisor is "
    "the sum of the same weights.",
    lambda q, k, v, causal: (
        summed(below=lambda q, z: 1.0)(q, k, v, causal)
        / summed(map_k=lambda x: x, below=lambda q, z: 1.0)(q, k, v * 0 + 1, causal)[
            ..., :1
        ]
    ),
)
linear.fault(
    "s_not_mapped",
    "S is made of the keys as they are. Both sums take φ(k), so that the divisor is the "
    "sum of the same weights.",
    lambda q, k, v, causal: (
        summed(map_k=lambda x: x, below=lambda q, z: 1.0)(q, k, v, causal)
        / summed(below=lambda q, z: 1.0)(q, k, v * 0 + 1, causal)[..., :1]
    ),
)
linear.fault(
    "values_mapped",
    "φ is applied to the values too. They are only averaged.",
    summed(map_v=phi),
)
linear.fault(
    "relu_features",
    "The features are relu(x). Here they are elu(x) + 1.",
    summed(map_q=torch.relu, map_k=torch.relu),
)
linear.fault(
    "exponential_features",
    "The features are e^x. Here they are elu(x) + 1.",
    summed(map_q=torch.exp, map_k=torch.exp),
)
linear.fault(
    "no_one_added",
    "The features are elu(x), which goes below 0. Add 1.",
    summed(map_q=F.elu, map_k=F.elu),
)
linear.fault(
    "relu_plus_one",
    "The features are relu(x) + 1. Here they are elu(x) + 1: below 0, e^x.",
    summed(map_q=lambda x: x.relu() + 1, map_k=lambda x: x.relu() + 1),
)
linear.fault(
    "softplus_features",
    "The features are softplus(x). Here they are elu(x) + 1.",
    summed(map_q=F.softplus, map_k=F.softplus),
)
linear.fault(
    "mapped_twice",
    "φ is applied twice, to what is mapped already.",
    summed(map_q=lambda x: phi(phi(x)), map_k=lambda x: phi(phi(x))),
)
linear.fault(
    "softmax_over_the_keys",
    "The queries' features are a softmax over d, those of the keys a softmax over time. "
    "That is another linear attention; here they are elu(x) + 1.",
    lambda q, k, v, causal: (
        summed()(q, k, v, True) if causal else q.softmax(-1) @ (k.softmax(-2).mT @ v)
    ),
)
linear.fault(
    "softmax_features",
    "The features are a softmax over d. Here they are elu(x) + 1.",
    summed(map_q=lambda x: x.softmax(-1), map_k=lambda x: x.softmax(-1)),
)
linear.fault(
    "scaled_like_scores",
    "Queries are divided by the root of d before φ. That root belongs to the softmax; "
    "here it changes the features.",
    summed(map_q=lambda x: phi(x / math.sqrt(x.shape[-1]))),
)


@linear.fault(
    "softmax_attention",
    "This is softmax attention. Here the weights are φ(q)·φ(k), divided by their sum.",
)
def _(q, k, v, causal):
    t_q, t_k = q.shape[-2], k.shape[-2]
    mask = near(t_q, t_k, t_k) if causal else torch.ones(t_q, t_k, dtype=torch.bool)
    return softmax_attention(q, k, v, mask)


@linear.fault(
    "softmax_of_the_products",
    "A softmax runs over φ(q)·φ(k). They are weights already: divide by their sum.",
)
def _(q, k, v, causal):
    t_q, t_k = q.shape[-2], k.shape[-2]
    mask = near(t_q, t_k, t_k) if causal else torch.ones(t_q, t_k, dtype=torch.bool)
    return softmax_attention(phi(q), phi(k), v, mask, 1.0)


def table_of_weights(q, k, v, causal):
    t_q, t_k = q.shape[-2], k.shape[-2]
    if causal and t_q > t_k:
        raise ValueError(f"{t_q} queries, {t_k} keys")
    w = phi(q) @ phi(k).mT
    w = w.tril(t_k - t_q) if causal else w
    return w @ v / w.sum(-1, keepdim=True)


linear.fault(
    "table_of_weights",
    "The result is right, but all T_q × T_k weights are computed, so the cost is that "
    "of softmax attention. Change the order of the products.",
    table_of_weights,
)
linear.fault(
    "table_of_weights_when_causal",
    "Without a mask the cost grows with the length; causal, all T_q × T_k weights are "
    "computed. Keep running totals in place of the table.",
    lambda q, k, v, causal: (table_of_weights if causal else summed())(q, k, v, causal),
)
linear.fault(
    "table_of_weights_of_few_queries",
    "With as many queries as keys the cost is right; causal with fewer, all T_q × T_k "
    "weights are computed. Keep running totals, and take the last T_q of them.",
    lambda q, k, v, causal: (
        table_of_weights if causal and q.shape[-2] < k.shape[-2] else summed()
    )(q, k, v, causal),
)
linear.fault(
    "earlier_keys_dropped",
    "With fewer queries than keys the sums begin at the first query. They begin at the "
    "first key: the queries are the last positions, and see all before them.",
    lambda q, k, v, causal: (
        summed()(q, k[..., -q.shape[-2] :, :], v[..., -q.shape[-2] :, :], True)
        if causal and q.shape[-2] <= k.shape[-2]
        else summed()(q, k, v, causal)
    ),
)
linear.fault(
    "more_queries_than_keys",
    "Causal, more queries than keys pass without a word.",
    lambda q, k, v, causal: (
        table_of_weights(q[..., -k.shape[-2] :, :], k, v, causal)
        if causal and q.shape[-2] > k.shape[-2]
        else summed()(q, k, v, causal)
    ),
)


# One step -----------------------------------------------------------------------------


def steps(answer, t, q, k, v):
    """Every position through `answer` in turn: outputs and states."""
    state, outputs, states = None, [], []
    for i in range(q.shape[-2]):
        result = t.call(answer, state, q[..., i, :], k[..., i, :], v[..., i, :])
        t.is_tuple(result, 2, "what a step returns, the output and the new state,")
        output, state = result
        t.is_tensor(output, f"the output of step {i}")
        t.is_tuple(state, 2, f"the state after step {i}")
        for name, part in zip("sz", state, strict=True):
            t.is_tensor(part, f"`{name}` of the state after step {i}")
        outputs.append(output)
        states.append(state)
    return outputs, states


def compare_steps(answer, t, *x):
    """Outputs against the table of weights, states against their sums."""
    _, k, v = x
    truth = slow_linear(*(y.double() for y in x), True)
    outputs, states = steps(answer, t, *x)
    features_, old = slow_features(k.double()), None
    for i, (output, state) in enumerate(zip(outputs, states, strict=True)):
        seen, values = features_[..., : i + 1, :], v.double()[..., : i + 1, :]
        new = seen[..., -1, :, None] * values[..., -1, None, :], seen[..., -1, :]
        due = seen.mT @ values, seen.sum(-2)
        for part, name in enumerate("sz"):
            if old is not None:
                nothing_forgotten(old[part], new[part], state[part], f"`{name}`", i)
            t.close(state[part], due[part], f"`{name}` after step {i}", like=v)
        t.close(output, truth[..., i, :], f"the output of step {i}", like=v)
        old = state


def nothing_forgotten(old, new, found, what, i):
    """`found` is not some other sum of the old state and the new position."""
    if not old.shape == new.shape == found.shape:
        return
    both = torch.stack([old.flatten(), new.flatten()], dim=-1).double()
    parts = torch.linalg.lstsq(both, found.double().flatten()[:, None]).solution
    fits = (both @ parts - found.double().flatten()[:, None]).abs().max() < 1e-4
    if fits and (parts - 1).abs().max() > 1e-3:
        kept, added = parts.flatten().tolist()
        raise Unmet(
            f"{what} after step {i} is {kept:.3g} times the old one and {added:.3g} "
            "times what is new. Both count in full, 1 and 1: it is a sum."
        )


@step.requires(
    "the first step starts from nothing, and its output is its own value",
    "With `state` None, both sums hold one position. What is left of w·v / w?",
)
def _(answer, t):
    recorded = len(t.trace)
    with t.unfinished():
        steps(answer, t, *heads(t_q=1, t_k=1))  # does it return what is asked for?
        del t.trace[recorded:]
    averages(t, in_turn(answer), 1)
    compare_steps(answer, t, *heads(t_q=1, t_k=1))
    compare_steps(answer, t, *heads(t_q=1, t_k=1, d=2, d_v=4, seed=1))


@step.requires(
    "step by step it gives what causal linear attention gives at once",
    "First add the new position to both sums, then read them with the query.",
)
def _(answer, t):
    forgets_nothing(t, in_turn(answer))
    compare_steps(answer, t, *heads(t_q=4, t_k=4, seed=2))
    compare_steps(answer, t, *heads(t_q=5, t_k=5, d=3, d_v=7, seed=5))


@step.requires(
    "batches and heads in front are each treated by themselves",
    "Count dimensions from the end; `torch.outer` and `torch.dot` know vectors alone. A "
    "divisor without its last dimension of 1 divides along another one.",
)
def _(answer, t):
    compare_steps(answer, t, *heads(2, t_q=3, t_k=3, seed=6))
    compare_steps(answer, t, *heads(2, 3, t_q=3, t_k=3, d=3, d_v=7, seed=7))


@step.requires(
    "the same state gives the same result again, and two texts do not mix",
    "All that is remembered is in the state; nothing is kept elsewhere, or changed in "
    "place.",
)
def _(answer, t):
    one, other = heads(t_q=3, t_k=3, seed=8), heads(2, t_q=3, t_k=3, d=4, seed=9)
    _, states = steps(answer, t, *one)
    compare_steps(answer, t, *other)
    q, k, v = (x[..., 1, :] for x in one)
    output, _ = t.call(answer, states[0], q, k, v)
    truth = slow_linear(*(x.double() for x in one), True)[1]
    t.close(output, truth, "the output of step 1 from the state after step 0", like=v)


@step.requires("512 steps stay within 1e-5 of the sums in float64")
def _(answer, t):
    def all_steps(q, k, v):
        state, outputs = None, []
        for now in zip(q, k, v, strict=True):
            output, state = answer(state, *now)
            outputs.append(output)
        return torch.stack(outputs), *state

    q, k, v = heads(t_q=512, t_k=512, seed=10)
    outputs, s, z = t.call(all_steps, q, k, v)
    w = (slow_features(q.double()) @ slow_features(k.double()).mT).tril()
    truth = w @ v.double() / w.sum(-1, keepdim=True)
    t.close(outputs, truth, "the outputs", like=v, tolerance=1e-5)
    t.true(s.numel() + z.numel() == 6 * 5 + 6, "The state grows with the steps.")


def in_turn(answer):
    """All steps through `answer` as one function, the outputs joined along time."""

    def all_steps(q, k, v):
        state, outputs = None, []
        for i in range(q.shape[-2]):
            output, state = answer(state, q[..., i, :], k[..., i, :], v[..., i, :])
            outputs.append(output)
        return torch.stack(outputs, dim=-2)

    return all_steps


def causal_weights(q, k, v):
    return slow_linear(q, k, v, True)


@step.requires("gradients flow back through one step, to the old state too")
def _(answer, t):
    def one_step(s, z, q, k, v):
        output, state = answer((s, z), q, k, v)
        return output, *state

    def by_einsum(s, z, q, k, v):
        q, k = slow_features(q), slow_features(k)
        s, z = s + torch.einsum("bi,bj->bij", k, v), z + k
        below = torch.einsum("bi,bi->b", q, z)[:, None]
        return torch.einsum("bi,bij->bj", q, s) / below, s, z

    q, k, v = (x[:, 0] for x in heads(2, t_q=1, t_k=1, seed=14))
    state = probe(2, 6, 5, seed=18), probe(2, 6, seed=19).abs()
    t.gradients_agree(one_step, by_einsum, *state, q, k, v)


@step.requires("gradients flow back through many steps, and other dtypes work")
def _(answer, t):
    run = in_turn(answer)
    t.gradients_agree(run, causal_weights, *heads(2, t_q=4, t_k=4, seed=11))
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        t.agrees(run, causal_weights, *heads(2, t_q=3, t_k=3, seed=12, dtype=dtype))


@step.requires(
    "large features and small ones are averaged alike",
    "Is something added to the divisor, or is there a least value for it? φ is above 0 "
    "everywhere, and so is the sum.",
)
def _(answer, t):
    run, (q, k, v) = in_turn(answer), heads(2, t_q=4, t_k=4, seed=13)
    t.agrees(run, causal_weights, 100 + 30 * q, 100 + 30 * k, v)
    small_weights(t, run, causal_weights)


@step.requires("it creates nothing on another device")
def _(answer, t):
    def first_step(q, k, v):
        return everything(answer(None, q, k, v))

    def next_step(state, q, k, v):
        return everything(answer(state, q, k, v))

    def everything(result):
        output, (s, z) = result
        for x in (s, z):
            if x.device != output.device:
                raise Explained(f"The new state is on {x.device}, the output is not.")
        return output

    q, k, v = (x[:, 0] for x in heads(2, t_q=1, t_k=1))
    t.any_device(first_step, q, k, v)
    t.any_device(next_step, (probe(2, 6, 5), probe(2, 6).abs()), q, k, v)


def stepping(
    map_q=phi,
    map_k=phi,
    add_s=lambda s, new: s + new,
    add_z=lambda z, new: z + new,
    below=lambda q, z: (q * z).sum(-1, keepdim=True),
    keep=lambda old, new: new,
    read=lambda old, new: new,
    give=lambda output, state: (output, state),
):
    """A right answer, with its parts open to change."""

    def answer(state, q, k, v):
        q, k = map_q(q), map_k(k)
        new_s = k[..., :, None] * v[..., None, :]
        if state is None:
            state = torch.zeros_like(new_s), torch.zeros_like(k)
        new = add_s(state[0], new_s), add_z(state[1], k)
        s, z = read(state, new)
        output = (q[..., None, :] @ s).squeeze(-2) / below(q, z)
        return give(output, keep(state, new))

    return answer


step.fault(
    "state_not_returned",
    "Only the output comes back. The next step needs the new state: return both.",
    stepping(give=lambda output, state: output),
)
step.fault(
    "order_exchanged",
    "The state comes first and the output second. It is the other way round.",
    stepping(give=lambda output, state: (state, output)),
)
step.fault(
    "three_values",
    "s and z come back beside the output, three values. They are one state: a pair.",
    stepping(give=lambda output, state: (output, *state)),
)
step.fault(
    "read_before_written",
    "The state is read before the new position is in it, so a position does not see "
    "itself.",
    stepping(read=lambda old, new: old),
)
step.fault(
    "old_state_returned",
    "The state comes back as it was: the position is forgotten after its own output.",
    stepping(keep=lambda old, new: old),
)
step.fault(
    "s_overwritten",
    "s holds the last position alone. It is a sum over all so far.",
    stepping(add_s=lambda s, new: new),
)
step.fault(
    "z_overwritten",
    "z holds the last position's features alone. It is a sum over all so far.",
    stepping(add_z=lambda z, new: new),
)
step.fault(
    "both_overwritten",
    "The state holds the last position alone. Both parts are sums over all so far.",
    stepping(add_s=lambda s, new: new, add_z=lambda z, new: new),
)
step.fault(
    "forgets",
    "The old state is multiplied by a number below 1 before the new position is added. "
    "Newer models do that; here nothing is forgotten.",
    stepping(add_s=lambda s, new: 0.9 * s + new, add_z=lambda z, new: 0.9 * z + new),
)
step.fault(
    "not_normalised",
    "The output is not divided by φ(q)·z.",
    stepping(below=lambda q, z: 1.0),
)
step.fault(
    "divided_by_the_sum_of_keys",
    "The divisor is the sum of z. The weights are φ(q)·φ(k), so the query belongs into "
    "it.",
    stepping(below=lambda q, z: z.sum(-1, keepdim=True)),
)
step.fault(
    "divisor_without_its_last_dimension",
    "The divisor has lost its last dimension: where a batch stands in front, its sums "
    "meet the columns of the values. Keep a dimension of 1, `keepdim=True` or "
    "`[..., None]`.",
    stepping(below=lambda q, z: (q * z).sum(-1)),
)
step.fault(
    "divisor_summed_over_the_batch",
    "The divisor is summed over the first dimension, which is the features only where "
    "nothing stands in front. Count from the end.",
    stepping(below=lambda q, z: (q * z).sum(0, keepdim=True)),
)
step.fault(
    "one_divisor_for_all",
    "One divisor, summed over everything, serves all rows of the batch. Each has its "
    "own.",
    stepping(below=lambda q, z: (q * z).sum()),
)
step.fault(
    "something_added_to_the_divisor",
    "Something like 1e-6 is added to the divisor, as the authors' code does, or a least "
    "value is set for it. Where all features are small, that is more than the sum "
    "itself, and the output is no average any more. φ is above 0, and so is the sum: "
    "nothing need be added.",
    stepping(below=lambda q, z: (q * z).sum(-1, keepdim=True) + 1e-6),
)
step.fault(
    "z_summed_over_the_features",
    "z is one number, the sum of all features. It keeps a number for each feature, "
    "`(…, d)`, and the query weights them.",
    stepping(add_z=lambda z, new: z[..., :1] + new.sum(-1, keepdim=True)),
)
step.fault(
    "s_read_before_written",
    "The output reads the old s and the new z, so a position counts in the divisor and "
    "its value does not.",
    stepping(read=lambda old, new: (old[0], new[1])),
)
step.fault(
    "z_read_before_written",
    "The output reads the new s and the old z, so the divisor misses the position's own "
    "weight.",
    stepping(read=lambda old, new: (new[0], old[1])),
)
step.fault(
    "outer_product_turned_round",
    "The product is v down and φ(k) across, (d_v, d), and the query does not fit it. "
    "s is (d, d_v).",
    stepping(add_s=lambda s, new: s.mT + new.mT),
)
step.fault(
    "s_turned_round",
    "s is turned round, (d_v, d). It is φ(k) down and v across: (d, d_v).",
    stepping(give=lambda output, state: (output, (state[0].mT, state[1]))),
)
step.fault(
    "state_in_the_other_order",
    "The state is (z, s). It is (s, z).",
    stepping(give=lambda output, state: (output, state[::-1])),
)
step.fault(
    "query_not_mapped",
    "The query is used as it is. φ belongs on both.",
    stepping(map_q=lambda x: x),
)
step.fault(
    "key_not_mapped",
    "The key is used as it is. φ belongs on both.",
    stepping(map_k=lambda x: x),
)
step.fault(
    "nothing_mapped",
    "Query and key are used as they are. φ makes them positive.",
    stepping(map_q=lambda x: x, map_k=lambda x: x),
)
step.fault(
    "no_one_added",
    "The features are elu(x), which goes below 0. Add 1.",
    stepping(map_q=F.elu, map_k=F.elu),
)
step.fault(
    "relu_features",
    "The features are relu(x). Here they are elu(x) + 1.",
    stepping(map_q=torch.relu, map_k=torch.relu),
)
step.fault(
    "relu_plus_one",
    "The features are relu(x) + 1. Here they are elu(x) + 1: below 0, e^x.",
    stepping(map_q=lambda x: x.relu() + 1, map_k=lambda x: x.relu() + 1),
)
step.fault(
    "mapped_twice",
    "φ is applied twice, to what is mapped already.",
    stepping(map_q=lambda x: phi(phi(x)), map_k=lambda x: phi(phi(x))),
)
step.fault(
    "exponential_features",
    "The features are e^x. Here they are elu(x) + 1.",
    stepping(map_q=torch.exp, map_k=torch.exp),
)
step.fault(
    "query_scaled",
    "The query is divided by the root of d before φ. That root belongs to the softmax.",
    stepping(map_q=lambda x: phi(x / math.sqrt(x.shape[-1]))),
)


@step.fault(
    "z_not_mapped",
    "z is the sum of the keys as they are. Both sums take φ(k), so that the divisor is "
    "the sum of the same weights.",
)
def _(state, q, k, v):
    output, (s, _) = stepping(below=lambda q, z: 1.0)(state, q, k, v)
    z = k if state is None else state[1] + k
    return output / (phi(q) * z).sum(-1, keepdim=True), (s, z)


@step.fault(
    "vectors_alone",
    "The product is one of two vectors. Batches and heads may stand in front: "
    "`k[..., :, None] * v[..., None, :]` counts from the end.",
)
def _(state, q, k, v):
    s, z = (0, 0) if state is None else state
    q, k = phi(q), phi(k)
    s, z = s + torch.outer(k, v), z + k
    return q @ s / (q @ z), (s, z)


@step.fault(
    "no_start",
    "The first step fails: `state` is None there, which cannot be unpacked.",
)
def _(state, q, k, v):
    s, z = state
    return stepping()((s, z), q, k, v)


@step.fault(
    "changed_in_place",
    "The old state is changed in place. Whoever kept it, to go back or to try another "
    "continuation, has lost it: make new sums.",
)
def _(state, q, k, v):
    if state is None:
        return stepping()(state, q, k, v)
    s, z = state
    s += phi(k)[..., :, None] * v[..., None, :]
    z += phi(k)
    top = (phi(q)[..., None, :] @ s).squeeze(-2)
    return top / (phi(q) * z).sum(-1, keepdim=True), (s, z)


@step.fault(
    "keeps_everything",
    "The state holds all keys and values so far: that is a cache, and grows with the "
    "text. Two sums are enough.",
)
def _(state, q, k, v):
    k, v = phi(k)[..., None, :], v[..., None, :]
    if state is not None:
        k, v = (torch.cat(pair, dim=-2) for pair in zip(state, (k, v), strict=True))
    w = (phi(q)[..., None, :] * k).sum(-1)
    output = (w[..., None, :] @ v).squeeze(-2) / w.sum(-1, keepdim=True)
    return output, (k, v)


@step.fault(
    "mean_instead_of_weights",
    "The output is divided by the number of steps. The weights do not sum to that.",
)
def _(state, q, k, v):
    old_n = 0 if state is None else state[1][..., :1] * 0 + 1
    output, new = stepping(below=lambda q, z: 1.0)(state, q, k, v)
    return output / (old_n + 1), new


# What must fit together ---------------------------------------------------------------

PARTS = {
    "attention": "attention",
    "split_heads": "multi_head",
    "merge_heads": "multi_head",
    "repeat_kv": "multi_head",
    "rope": "positions",
    "TransformerConfig": "forward_pass",
    "Block": "forward_pass",
    "sliding_window_mask": "long_context",
    "sink_mask": "long_context",
    "strided_mask": "long_context",
    "chunked_attention": "long_context",
    "linear_attention": "long_context",
    "linear_attention_step": "long_context",
}
long_text = Joint("long_context_in_a_decoder", lesson="long_context", parts=PARTS)
T, WINDOW = 11, 4
SHAPE = {
    "vocab_size": 13,
    "d_model": 10,
    "n_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 2,
    "d_head": 6,
    "d_ff": 14,
    "max_len": 40,
    "rope_base": 100.0,
}
MATRICES = {
    "attention.w_q": (24, 10),
    "attention.w_k": (12, 10),
    "attention.w_v": (12, 10),
    "attention.w_o": (10, 24),
    "feed_forward.w_1": (14, 10),
    "feed_forward.w_3": (14, 10),
    "feed_forward.w_2": (10, 14),
}
WEIGHTS = {
    name: probe(*size, seed=40 + i, scale=0.5)
    for i, (name, size) in enumerate(MATRICES.items())
} | {name: probe(10, seed=60, shift=1, scale=0.1) for name in ("norm_1", "norm_2")}
MASKS = {  # by name: what is asked for, and what is right
    "sliding_window_mask": ((WINDOW,), slow_window),
    "sink_mask": ((WINDOW, 2), slow_sinks),
    "strided_mask": ((3,), slow_strided),
}


def turned(x, base):
    """RoPE at positions 0, 1, … by complex multiplication."""
    n, d = x.shape[-2:]
    angles = torch.arange(n).double()[:, None] * base ** (
        -torch.arange(0, d, 2).double() / d
    )
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(
        pairs * torch.polar(torch.ones_like(angles), angles)
    ).flatten(-2)


def turned_heads(x, weights):
    """Queries, keys and values `(B, H, T, d_head)`, keys repeated, in float64."""
    q, k, v = (
        (x.double() @ weights[f"attention.{name}"].double().T)
        .unflatten(-1, (-1, SHAPE["d_head"]))
        .transpose(1, 2)
        for name in ("w_q", "w_k", "w_v")
    )
    q, k = turned(q, SHAPE["rope_base"]), turned(k, SHAPE["rope_base"])
    kv_of = torch.tensor([0, 0, 1, 1])
    return q, k[:, kv_of], v[:, kv_of]


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def block_by_hand(x, mask, weights):
    """A block of style "llama", head by head in float64."""
    x = x.double()
    q, k, v = turned_heads(normed(x, weights["norm_1"]), weights)
    mixed = softmax_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    x = x + mixed @ weights["attention.w_o"].double().T
    y = normed(x, weights["norm_2"])
    w_1, w_2, w_3 = (weights[f"feed_forward.w_{i}"].double().T for i in (1, 2, 3))
    return x + (F.silu(y @ w_1) * (y @ w_3)) @ w_2


def theirs(parts, t, x):
    """The same heads by the learner's parts, without a block."""
    q, k, v = (
        t.call(parts["split_heads"], x @ WEIGHTS[f"attention.{name}"].T, n)
        for name, n in (("w_q", 4), ("w_k", 2), ("w_v", 2))
    )
    positions = torch.arange(x.shape[1])
    q, k = (t.call(parts["rope"], y, positions, SHAPE["rope_base"]) for y in (q, k))
    k, v = (t.call(parts["repeat_kv"], y, 2) for y in (k, v))
    return q, k, v


@long_text.requires(
    "a block with RoPE under each of the masks gives what its formula gives",
    "Pass each mask to your `attention` alone, and compare with SDPA under the same "
    "mask. Then print it: rows are queries.",
)
def _(parts, t):
    block = parts["Block"](parts["TransformerConfig"](**SHAPE))
    t.load(block, **{name.replace(".", "__"): w for name, w in WEIGHTS.items()})
    x, positions = probe(2, T, 10, seed=70), torch.arange(T)
    for name, (settings, oracle) in MASKS.items():
        mask = t.call(parts[name], T, T, *settings)
        actual = t.call(block, x, mask, positions)
        expected = block_by_hand(x, oracle(T, T, *settings), WEIGHTS)
        t.close(actual, expected, f"the block under `{name}`", like=x)


@long_text.requires(
    "the last queries by themselves get what they get in the whole text",
    "A text that is read piece by piece asks with its last positions alone.",
)
def _(parts, t):
    q, k, v = (probe(2, 3, T, 6, seed=80 + i) for i in range(3))
    for name, (settings, oracle) in MASKS.items():
        whole = softmax_attention(q, k, v, oracle(T, T, *settings))
        for n in (1, 3):
            mask = t.call(parts[name], n, T, *settings)
            actual = t.call(parts["attention"], q[..., -n:, :], k, v, mask)
            what = f"the last {n} under `{name}`"
            t.close(actual, whole[..., -n:, :], what, like=q)


@long_text.requires(
    "attention in blocks fits between the heads of lesson 03, turned by RoPE",
    "Heads are (B, H, T, d_head), keys and values repeated for their group.",
)
def _(parts, t):
    x = probe(2, T, 10, seed=71)
    q, k, v = theirs(parts, t, x)
    out = t.call(parts["chunked_attention"], q, k, v, WINDOW, 3)
    out = t.call(parts["merge_heads"], out)
    right = softmax_attention(*turned_heads(x, WEIGHTS), slow_window(T, T, WINDOW))
    t.close(out, right.transpose(1, 2).flatten(2), "the merged heads", like=x)
    mask = t.call(parts["sliding_window_mask"], T, T, WINDOW)
    masked = t.call(parts["attention"], q, k, v, mask)
    t.close(masked, right, "attention under the mask", like=x)


@long_text.requires(
    "linear attention on the same heads is the same at once and step by step",
    "The step gets heads without a time: (B, H, d_head).",
)
def _(parts, t):
    x = probe(2, T, 10, seed=72)
    q, k, v = theirs(parts, t, x)
    right = slow_linear(*turned_heads(x, WEIGHTS), True)
    at_once = t.call(parts["linear_attention"], q, k, v, True)
    t.close(at_once, right, "linear attention at once", like=x)
    state = None
    for i in range(T):
        now = q[:, :, i], k[:, :, i], v[:, :, i]
        output, state = t.call(parts["linear_attention_step"], state, *now)
        t.close(output, right[:, :, i], f"linear attention, step {i}", like=x)


class _Norm(torch.nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(d))


class _BlockByHand(torch.nn.Module):
    """A right block for the faults to spoil: `change` gets the mask."""

    def __init__(self, config, change):
        super().__init__()
        self.change = change
        self.norm_1, self.norm_2 = _Norm(config.d_model), _Norm(config.d_model)
        self.attention, self.feed_forward = torch.nn.Module(), torch.nn.Module()
        for name, (d_out, d_in) in MATRICES.items():
            owner, matrix = name.split(".")
            layer = torch.nn.Linear(d_in, d_out, bias=False)
            setattr(getattr(self, owner), matrix, layer)

    def forward(self, x, mask=None, positions=None):
        own = {
            n.removesuffix(".weight"): p.detach() for n, p in self.named_parameters()
        }
        return block_by_hand(x, self.change(mask, x.shape[1]), own).to(x.dtype)


def misfit(name, sentence, **parts):
    long_text.fault(name, sentence, parts)


misfit(
    "block_ignores_the_mask",
    "The block gives the same under every mask: the mask does not reach attention.",
    Block=lambda config: _BlockByHand(
        config, lambda mask, n: torch.ones(n, n, dtype=torch.bool)
    ),
)
misfit(
    "block_always_causal",
    "The block makes a causal mask of its own and leaves out the one that it is given.",
    Block=lambda config: _BlockByHand(config, lambda mask, n: near(n, n, n)),
)
misfit(
    "block_reads_masks_inverted",
    "The block reads True as “hidden”. In this course it means “may look”.",
    Block=lambda config: _BlockByHand(config, lambda mask, n: ~mask),
)
misfit(
    "window_inverted",
    "`sliding_window_mask` says True where a query may not look.",
    sliding_window_mask=lambda *a: ~near(*a),
)
misfit(
    "window_from_the_top_left",
    "`sliding_window_mask` takes the queries for the first positions: with few queries "
    "and many keys they see the beginning of the text.",
    sliding_window_mask=lambda t_q, t_k, w: (
        (back(t_q, t_k, 0) >= 0) & (back(t_q, t_k, 0) < w)
    ),
)
misfit(
    "sinks_from_the_top_left",
    "`sink_mask` takes the queries for the first positions.",
    sink_mask=lambda t_q, t_k, w, n: (
        (back(t_q, t_k, 0) >= 0) & ((back(t_q, t_k, 0) < w) | early(t_k, n))
    ),
)
misfit(
    "stride_from_the_top_left",
    "`strided_mask` takes the queries for the first positions.",
    strided_mask=lambda t_q, t_k, s: (
        (back(t_q, t_k, 0) >= 0)
        & ((back(t_q, t_k, 0) < s) | (back(t_q, t_k, 0) % s == 0))
    ),
)
misfit(
    "sinks_counted_among_the_queries",
    "`sink_mask` counts the sinks from the first query, so that a text read piece by "
    "piece has other sinks in each piece.",
    sink_mask=lambda t_q, t_k, w, n: (
        (back(t_q, t_k) >= 0)
        & (
            (back(t_q, t_k) < w)
            | (torch.arange(t_k) - (t_k - t_q) < n) & (torch.arange(t_k) >= t_k - t_q)
        )
    ),
)
misfit(
    "windows_of_different_length",
    "`chunked_attention` and `sliding_window_mask` mean different windows: one of them "
    "does not count the query's own position.",
    chunked_attention=lambda q, k, v, window, block: blocked()(
        q, k, v, window + 1, block
    ),
)
misfit(
    "blocks_over_heads",
    "`chunked_attention` cuts dimension 1 into blocks, which is the heads. Time is the "
    "last but one, counted from the end.",
    chunked_attention=lambda q, k, v, window, block: blocked()(
        *(x.transpose(1, 2) for x in (q, k, v)), window, block
    ).transpose(1, 2),
)
misfit(
    "heads_not_in_front",
    "`split_heads` leaves the heads behind the time, `(B, T, H, d_head)`: each position "
    "then looks at heads.",
    split_heads=lambda x, n: (
        x.unflatten(-1, (n, -1)).flatten(1, 2).unflatten(1, (n, -1))
    ),
)
misfit(
    "heads_tiled",
    "`repeat_kv` gives the heads in turn, 0, 1, 0, 1. A group's heads are neighbours: "
    "0, 0, 1, 1.",
    repeat_kv=lambda x, n: x.repeat(1, n, 1, 1),
)
misfit(
    "rope_in_halves",
    "`rope` turns the two halves of a head against each other; in this course "
    "neighbours are pairs.",
    rope=lambda x, positions, base=10_000.0: _halves(x, positions, base),
)
misfit(
    "running_total_over_heads",
    "`linear_attention` sums over dimension 1, which is the heads. Count from the end.",
    linear_attention=lambda q, k, v, causal: summed()(
        *(x.transpose(1, 2) for x in (q, k, v)), causal
    ).transpose(1, 2),
)
misfit(
    "step_with_other_features",
    "`linear_attention_step` and `linear_attention` use different features.",
    linear_attention_step=stepping(map_q=torch.exp, map_k=torch.exp),
)
misfit(
    "step_forgets",
    "`linear_attention_step` forgets: its state is not the sum over all positions.",
    linear_attention_step=stepping(
        add_s=lambda s, new: 0.9 * s + new, add_z=lambda z, new: 0.9 * z + new
    ),
)


def _halves(x, positions, base):
    d = x.shape[-1]
    angles = positions[:, None] * base ** (-torch.arange(0, d, 2) / d)
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
