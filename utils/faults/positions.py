"""Lesson 04: mistakes with positions."""

from utils.exercises.positions import (
    LearnedPositions,
    alibi_bias,
    alibi_in_attention,
    alibi_slopes,
    ntk_base,
    ntk_in_rope,
    rope,
    rope_in_multi_head,
    sinusoidal,
)

# Sinusoidal positions -----------------------------------------------------------------

EXPONENTS = "-torch.arange(0, d_model, 2) / d_model"
WAVES = "torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)"
BY_COLUMN = "torch.where(torch.arange(d_model) % 2 == 0, angles.sin(), angles.cos())"

sinusoidal.fault(
    "halves",
    "All sines stand in the left half and all cosines in the right one. Others do it "
    "like that, and it works as well; here, as in the paper, they take turns.",
    (WAVES, "torch.cat((angles.sin(), angles.cos()), dim=-1)"),
)
sinusoidal.fault(
    "divided_by_the_frequency",
    "The position is divided by the frequency instead of multiplied: the angles grow "
    "from pair to pair, where the waves should get longer.",
    ("[:, None] * frequencies", "[:, None] / frequencies"),
)
sinusoidal.fault(
    "index_doubled",
    "The exponent runs twice as fast as it should. If your index already counts 0, 2, "
    "4, …, it is 2i, and the formula's 2 must not come on top.",
    (EXPONENTS, "-2 * torch.arange(0, d_model, 2) / d_model"),
)
sinusoidal.fault(
    "two_for_each_column",
    "Every column has a frequency of its own, and twice the exponent. i counts pairs: "
    "columns 2i and 2i + 1 share the frequency of 2i.",
    (EXPONENTS, "-2 * torch.arange(d_model) / d_model"),
    (WAVES, BY_COLUMN),
)
sinusoidal.fault(
    "cosine_first",
    "Cosine and sine have changed places: the sine comes first.",
    ("(angles.sin(), angles.cos())", "(angles.cos(), angles.sin())"),
)
sinusoidal.fault(
    "new_dimension_in_front",
    "Sines and cosines are stacked in front, so that they do not meet in one row.",
    ("dim=-1", "dim=0"),
)

# Learned positions --------------------------------------------------------------------

LOOK_UP = "return self.table(positions)"

LearnedPositions.fault(
    "positions_ignored",
    "It returns the first T rows, whatever the positions are. With a cache, or with "
    "padding on the left, the first token is not at position 0.",
    (
        LOOK_UP,
        "rows = self.table.weight[: positions.shape[-1]]\n"
        "        return rows.expand(*positions.shape, -1)",
    ),
)
LearnedPositions.fault(
    "padding_row",
    "Row 0 is declared as padding, and never gets a gradient. Position 0 is a position "
    "like any other.",
    ("(max_len, d_model)", "(max_len, d_model, padding_idx=0)"),
)

# RoPE ---------------------------------------------------------------------------------

TOP = "if positions.dim() == 2:"
LINED_UP = "positions = positions.view(len(positions), *[1] * (x.dim() - 3), -1)"
POWER = "base ** (-pairs / d_head)"
ANGLES = f"angles = positions[..., None].float() * {POWER}"
BOTH = "cos, sin = angles.cos(), angles.sin()"
PAIRS = "even, odd = x[..., 0::2], x[..., 1::2]"
HALVES = "even, odd = x.chunk(2, dim=-1)"
TURNED = "torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)"
IN_HALVES = TURNED.replace("stack", "cat")
FLAT = "turned.flatten(-2)"
TWICE_EACH = f"angles = angles.repeat_interleave(2, dim=-1)\n    {BOTH}"
TWICE_ALL = f"angles = torch.cat((angles, angles), dim=-1)\n    {BOTH}"

rope.fault(
    "half_split",
    "This is RoPE in the other convention, which pairs number i with number i + "
    "d_head/2, as most published checkpoints do. It is right in itself; here the pairs "
    "are neighbours.",
    (PAIRS, HALVES),
    (TURNED, IN_HALVES),
    (FLAT, "turned"),
)
rope.fault(
    "angles_of_neighbours_on_halves",
    "Two conventions are mixed: the angles are laid out for neighbouring pairs, but "
    "the rotation pairs the two halves, so lengths are not kept.",
    (BOTH, TWICE_EACH),
    (PAIRS, HALVES),
    (TURNED, "x * cos + torch.cat((-odd, even), dim=-1) * sin"),
    (FLAT, "turned"),
)
rope.fault(
    "angles_of_halves_on_neighbours",
    "Two conventions are mixed: the rotation pairs neighbours, but the angles are laid "
    "out for halves, so the two numbers of a pair are turned by different angles.",
    (BOTH, TWICE_ALL),
    (TURNED, "x * cos + torch.stack((-odd, even), dim=-1).flatten(-2) * sin"),
    (FLAT, "turned"),
)
rope.fault(
    "not_interleaved_again",
    "The pairs are turned rightly, but the results are put back as two halves instead "
    "of taking turns. Scores do not notice; weights loaded from elsewhere do.",
    (TURNED, IN_HALVES),
    (FLAT, "turned"),
)
rope.fault(
    "new_dimension_in_front",
    "The two numbers of a pair are stacked in front, so that they do not meet in a "
    "row.",
    (TURNED, TURNED.replace("dim=-1", "dim=0")),
)
rope.fault(
    "sine_and_cosine_exchanged",
    "Sine and cosine have changed places. At position 0 the angle is 0 and x must stay "
    "as it is: each number is multiplied by the cosine, its partner by the sine.",
    (BOTH, "cos, sin = angles.sin(), angles.cos()"),
)
rope.fault(
    "clockwise",
    "The pairs turn the wrong way, by minus the angle: the complex conjugate. Scores "
    "of a model trained like this are fine, but weights from elsewhere are not.",
    (BOTH, "cos, sin = angles.cos(), -angles.sin()"),
)
rope.fault(
    "mirrored",
    "A sign is wrong, and the pair is mirrored instead of turned. Mirrored queries and "
    "keys give scores that depend on the sum of their positions.",
    ("even * cos - odd * sin", "even * cos + odd * sin"),
    ("even * sin + odd * cos", "even * sin - odd * cos"),
)
rope.fault(
    "both_signs",
    "Both numbers of the pair get the same sign in front of their partner's sine. A "
    "rotation has one minus and one plus, or lengths are not kept.",
    ("even * cos - odd * sin", "even * cos + odd * sin"),
)
rope.fault(
    "divided_by_the_frequency",
    "The position is divided by the frequency instead of multiplied. Later pairs must "
    "turn more slowly, not faster. Position 0 and the first pair do not show it.",
    (POWER, "base ** (pairs / d_head)"),
)
rope.fault(
    "index_doubled",
    "The exponent runs twice as fast as it should: an index that counts 0, 2, 4, … is "
    "2i already, or d_head/2 stands where d_head should.",
    (POWER, "base ** (-2 * pairs / d_head)"),
)
rope.fault(
    "positions_ignored",
    "It counts 0, 1, 2, … whatever positions are handed in. With a cache the next "
    "token would always be the first.",
    (TOP, f"positions = torch.arange(x.shape[-2], device=x.device)\n    {TOP}"),
)
rope.fault(
    "relative_to_the_first",
    "Positions are counted from the first one that is handed in. With a cache the next "
    "token would always be the first.",
    (TOP, f"positions = positions - positions[..., :1]\n    {TOP}"),
)
rope.fault(
    "cached_table",
    "A table of angles from an earlier call is used again although the positions have "
    "changed. Keep the frequencies if you like; the angles depend on the positions.",
    (
        BOTH,
        "key = positions.shape, d_head, base\n"
        "    kept = rope.__dict__.setdefault(key, angles.detach())\n"
        "    cos, sin = kept.cos(), kept.sin()",
    ),
)
rope.fault(
    "heads_for_time",
    "The positions are laid along the second dimension. That is time while x has three "
    "dimensions, but with heads time is the third: count from the end.",
    (TOP, f"x = x.transpose(1, 2) if x.dim() > 3 else x\n    {TOP}"),
    (
        f"return {FLAT}",
        f"turned = {FLAT}\n"
        "    return (turned.transpose(1, 2) if x.dim() > 3 else turned)",
    ),
)
rope.fault(
    "batch_lined_up_with_heads",
    "Positions (B, T) meet heads (B, H, T, …), and broadcasting, which counts from the "
    "end, lines B up with H: it crashes, or gives every head another row's positions.",
    (LINED_UP, "pass"),
)
rope.fault(
    "always_for_heads",
    "Positions (B, T) get one more dimension after B whatever x has. How many "
    "dimensions stand between B and T is a question to x.",
    (LINED_UP, "positions = positions[:, None]"),
)
rope.fault(
    "one_row_for_all",
    "The first row's positions are used for every row of the batch. With padding on "
    "the left the rows stand at different positions.",
    (LINED_UP, "positions = positions[0]"),
)
rope.fault(
    "base_ignored",
    "The base is 10,000 whatever is asked for.",
    (POWER, "10_000.0 ** (-pairs / d_head)"),
)
rope.fault(
    "angles_in_half_precision",
    "The angle is computed in the dtype of x. In bfloat16 the whole numbers past 256 "
    "have gaps, and position 3001 is 3008.",
    (ANGLES, f"angles = positions[..., None].to(x.dtype) * ({POWER}).to(x.dtype)"),
)
rope.fault(
    "angles_rounded_to_x",
    "The angle is rounded to the dtype of x before sine and cosine are taken: in "
    "bfloat16 3001 radians become 3008. Sine and cosine may be rounded; the angle may "
    "not.",
    (ANGLES, ANGLES.replace("positions", "(positions") + ").to(x.dtype)"),
)

# ALiBi --------------------------------------------------------------------------------

SLOPES = "geometric(power) + extra"
SECOND = "[0::2]"
GEOMETRIC = "2 ** (-8 * h / n) for h in range(1, n + 1)"

alibi_slopes.fault(
    "starts_at_one",
    "The slopes start at 1, that is 2^0. They start at 2^(−8/n): count the heads from "
    "1.",
    ("range(1, n + 1)", "range(n)"),
)
alibi_slopes.fault(
    "one_formula_for_all",
    "One geometric sequence is used for every number of heads. The authors' code, "
    "which the published models use, treats numbers that are no power of two in its "
    "own way.",
    (SLOPES, "geometric(n_heads)"),
)
alibi_slopes.fault(
    "cut_from_the_next_power",
    "The first n slopes of the next larger power of two are taken. They are all steep: "
    "no head is left that sees far.",
    (SLOPES, "geometric(2 ** math.ceil(math.log2(n_heads)))[:n_heads]"),
)
alibi_slopes.fault(
    "extra_without_skipping",
    "The extra slopes are the first ones of the longer sequence, without skipping "
    "every second: half of them repeat slopes that are there already.",
    (SECOND, ""),
)
alibi_slopes.fault(
    "halves_whatever_n",
    "Each slope is half the one before, however many heads there are. The ratio is "
    "2^(−8/n), which is a half for 8 heads only.",
    (GEOMETRIC, "0.5**h for h in range(1, n + 1)"),
)
alibi_slopes.fault(
    "whole_exponents",
    "8/n is cut off to a whole number, by `//` or `int`. With more than 8 heads it is "
    "a fraction.",
    ("2 ** (-8 * h / n)", "2.0 ** (-(8 // n) * h)"),
)

QUERIES = "keys[t_k - t_q :]"
DISTANCE = "(queries[:, None] - keys).abs()"
PENALTY = "-alibi_slopes(n_heads)[:, None, None] * distance"

alibi_bias.fault(
    "top_left",
    "The queries are taken for the first positions. They are the last: with a cache, "
    "one query stands at the end of all keys.",
    (QUERIES, "keys[:t_q]"),
)
alibi_bias.fault(
    "zero_times_infinity",
    "A 0/1 mask is multiplied by −∞, and 0 · ∞ is NaN. Later keys are the mask's "
    "business: leave any number there.",
    (PENALTY, f"{PENALTY} + (keys > queries[:, None]) * -torch.inf"),
)
alibi_bias.fault(
    "heads_last",
    "The heads stand in the last dimension. Scores are (B, H, T_q, T_k), so the bias "
    "must be (H, T_q, T_k) to line up with them.",
    (PENALTY, f"({PENALTY}).permute(1, 2, 0)"),
)
alibi_bias.fault(
    "slopes_on_the_keys",
    "Slopes (n_heads,) times distances (t_q, t_k): broadcasting, which counts from the "
    "end, lines the heads up with the keys. The slopes need two more dimensions.",
    ("(n_heads)[:, None, None]", "(n_heads)"),
)
alibi_bias.inherits(alibi_slopes, "starts_at_one", "one_formula_for_all")

# The NTK base -------------------------------------------------------------------------

EXPONENT = "(d_head / (d_head - 2))"
FACTOR = f"factor ** {EXPONENT}"

ntk_base.fault(
    "exponent_one",
    "The base is multiplied by the factor alone (or by a power that // rounds to 1). "
    "The slowest pair's exponent is not −1, so it is stretched too little.",
    (FACTOR, "factor"),
)
ntk_base.fault(
    "exponent_upside_down",
    "The exponent is upside down.",
    (EXPONENT, "((d_head - 2) / d_head)"),
)

# Parts together -----------------------------------------------------------------------

ROTATED = "q, k = rotate(q), rotate(k)"

rope_in_multi_head.fault(
    "before_the_split",
    "`MultiHeadAttention` turns queries and keys before they are split into heads. "
    "RoPE then takes all heads for one wide one: split first, then turn.",
    ("split_heads(self.w_q(x)", "split_heads(rotate(self.w_q(x))"),
    ("split_heads(self.w_k(x)", "split_heads(rotate(self.w_k(x))"),
    (ROTATED, "pass"),
    edited="MultiHeadAttention",
)
rope_in_multi_head.fault(
    "along_heads",
    "`MultiHeadAttention` hands over (B, T, H, d_head), and `rope` lays its positions "
    "along the heads. Hand over (B, H, T, d_head): time stands before d_head.",
    (ROTATED, "q, k = (rotate(y.transpose(1, 2)).transpose(1, 2) for y in (q, k))"),
    edited="MultiHeadAttention",
)
rope_in_multi_head.fault(
    "values_too",
    "`MultiHeadAttention` turns the values as well. Position is for the scores; a "
    "turned value brings its absolute position into the output.",
    (ROTATED, "q, k, v = rotate(q), rotate(k), rotate(v)"),
    edited="MultiHeadAttention",
)
rope_in_multi_head.fault(
    "queries_only",
    "`MultiHeadAttention` turns the queries and forgets the keys. Then scores depend "
    "on the query's position instead of on the distance.",
    (ROTATED, "q = rotate(q)"),
    edited="MultiHeadAttention",
)
rope_in_multi_head.fault(
    "rope_of_one_row",
    "`rope` gives every row of the batch the first row's positions. Where rows are "
    "padded on the left, theirs differ.",
    (LINED_UP, "positions = positions[0]"),
    edited="rope",
)

alibi_in_attention.fault(
    "mask_from_the_top_left",
    "`causal_mask` takes the queries for the first positions, `alibi_bias` for the "
    "last. With one query and many keys the mask leaves it one key, the farthest.",
    ("diagonal=t_k - t_q", "diagonal=0"),
    edited="causal_mask",
)
alibi_in_attention.fault(
    "bias_from_the_top_left",
    "`alibi_bias` takes the queries for the first positions, `causal_mask` for the "
    "last: the nearest keys are taken for future ones, and pay the most.",
    (QUERIES, "keys[:t_q]"),
    edited="alibi_bias",
)
alibi_in_attention.fault(
    "bias_of_one_head",
    "`alibi_bias` gives one bias for all heads, (T_q, T_k). It broadcasts without a "
    "word, and every head sees equally far.",
    (PENALTY, f"({PENALTY})[0]"),
    edited="alibi_bias",
)

ntk_in_rope.fault(
    "factor_alone",
    "`ntk_base` multiplies the base by the factor alone. In `rope` the slowest pair's "
    "exponent is −(d_head − 2)/d_head, so it is stretched by less than the factor.",
    (FACTOR, "factor"),
    edited="ntk_base",
)
ntk_in_rope.fault(
    "base_ignored",
    "`rope` takes a base and uses 10,000 all the same: stretching it does nothing.",
    (POWER, "10_000.0 ** (-pairs / d_head)"),
    edited="rope",
)
