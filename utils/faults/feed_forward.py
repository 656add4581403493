"""Lesson 05: mistakes with the feed-forward network."""

from utils.exercises.feed_forward import (
    FeedForward,
    SwiGLU,
    block_parameters,
    gelu,
    parameters_of_a_block,
    silu,
    swiglu_width,
    two_layer_stack,
)

# SiLU ---------------------------------------------------------------------------------

SIGMOID = "torch.sigmoid(x)"
X_SIGMOID = f"x * {SIGMOID}"

silu.fault(
    "relu",
    "This is ReLU: it cuts negative numbers off.",
    (X_SIGMOID, "torch.relu(x)"),
)
silu.fault(
    "sigmoid_alone",
    "This is the sigmoid alone. SiLU multiplies it by x.",
    (X_SIGMOID, SIGMOID),
)
silu.fault(
    "gelu",
    "This is GELU; SiLU's factor is the sigmoid of x.",
    (X_SIGMOID, "nn.functional.gelu(x)"),
)
silu.fault(
    "gelu_sigmoid",
    "The sigmoid is taken of 1.702·x. That approximates GELU; SiLU uses x itself.",
    (SIGMOID, "torch.sigmoid(1.702 * x)"),
)
silu.fault(
    "twice_the_slope",
    "The factor is ½(1 + tanh x). That is the sigmoid of 2x; the sigmoid of x has "
    "tanh(x/2).",
    (SIGMOID, "0.5 * (1 + torch.tanh(x))"),
)
silu.fault(
    "python_function",
    "`math` works on single numbers. `torch` has functions of the same names that take "
    "every number of a tensor.",
    (SIGMOID, "1 / (1 + math.exp(-x))"),
)
silu.fault(
    "exp_over_exp",
    "The sigmoid is written as exp(x) / (1 + exp(x)). From 89 on both are infinite, "
    "and inf/inf is NaN.",
    (X_SIGMOID, "x * torch.exp(x) / (1 + torch.exp(x))"),
)
silu.fault(
    "exp_of_minus_x",
    "It is written with 1 + exp(−x), which is infinite in float32 from x = −88.7 down, "
    "in float16 from −11.1: the result is 0 there, and its gradient NaN.",
    (X_SIGMOID, "x / (1 + torch.exp(-x))"),
)
silu.fault(
    "exp_clamped",
    "In float16 the result is 0 from x = −11.1 down, where exp(−x) leaves the range. A "
    "bound that float32 can hold does not help there.",
    (X_SIGMOID, "x / (1 + torch.exp((-x).clamp(max=80)))"),
)
silu.fault(
    "rounded_away",
    "The sigmoid is the sum or difference of two numbers near 1, such as 1 + tanh(x/2) "
    "or 1 − sigmoid(−x). In float16 they are rounded to the same: the tail is 0.",
    (X_SIGMOID, "0.5 * x * (1 + torch.tanh(0.5 * x))"),
)
silu.fault(
    "where",
    "Two formulas are joined by `where`. The values are right, but autograd goes "
    "through the branch that was not chosen too, and there 0·inf is NaN.",
    (
        X_SIGMOID,
        "torch.where(x > 0, x / (1 + torch.exp(-x)), "
        "x * torch.exp(x) / (1 + torch.exp(x)))",
    ),
)
silu.fault(
    "factor_detached",
    "The sigmoid is cut from the graph. The values are right, the gradient lacks the "
    "part that comes from the sigmoid.",
    (SIGMOID, f"{SIGMOID}.detach()"),
)

# GELU ---------------------------------------------------------------------------------

ERF = "torch.erf(x / math.sqrt(2))"
GELU = f"0.5 * x * (1 + {ERF})"
TANH = "torch.tanh(math.sqrt(2 / math.pi) * "

gelu.fault(
    "tanh_form",
    "This is the tanh form, an approximation from the paper that GPT-2 uses. It "
    "differs by up to 5e-4 from the exact function, which this course uses.",
    (ERF, f"{TANH}(x + 0.044715 * x**3))"),
)
gelu.fault(
    "sigmoid_form",
    "This is x·sigmoid(1.702·x), the cruder of the paper's two approximations: it is "
    "off by up to 0.02. The exact function uses erf.",
    (GELU, "x * torch.sigmoid(1.702 * x)"),
)
gelu.fault(
    "silu",
    "This is SiLU: its factor is the sigmoid of x.",
    (GELU, "silu(x)"),
)
gelu.fault(
    "no_root",
    "erf is taken of x itself. erf belongs to a normal distribution with variance ½; "
    "for variance 1, x must be divided by a constant first.",
    (ERF, "torch.erf(x)"),
)
gelu.fault(
    "python_function",
    "`math.erf` works on single numbers. `torch` has a function of the same name that "
    "takes every number of a tensor.",
    (ERF, "math.erf(x / math.sqrt(2))"),
)
gelu.fault(
    "half_of_the_one_alone",
    "The half is taken of the 1 and not of erf, so that the factor goes from −½ to 1½ "
    "instead of from 0 to 1.",
    (GELU, f"x * (0.5 + {ERF})"),
)
gelu.fault(
    "no_one",
    "erf goes from −1 to 1. Without the 1 added to it negative numbers come out "
    "positive.",
    (GELU, f"0.5 * x * {ERF}"),
)

# The classic network ------------------------------------------------------------------

HIDDEN = "self.activation(self.w_1(x))"
DOWN = "self.w_2(hidden)"

FeedForward.fault(
    "no_activation",
    "The activation is never called. Two linear maps in a row are one linear map.",
    (HIDDEN, "self.w_1(x)"),
)
FeedForward.fault(
    "activation_last",
    "The activation comes after `w_2`. It belongs in between: there it keeps the two "
    "maps from being one, and the output may take any value.",
    (HIDDEN, "self.w_1(x)"),
    (DOWN, f"self.activation({DOWN})"),
)
FeedForward.fault(
    "activation_first",
    "The activation is applied to the input, before `w_1`.",
    (HIDDEN, "self.w_1(self.activation(x))"),
)

# SwiGLU -------------------------------------------------------------------------------

GATE = "silu(self.w_1(x))"
PRODUCT = "gate * self.w_3(x)"

SwiGLU.fault(
    "bracket",
    "The bracket is misplaced: SiLU is taken of the product of gate and up. It belongs "
    "around the gate alone.",
    (GATE, "self.w_1(x)"),
    (PRODUCT, f"silu({PRODUCT})"),
)
SwiGLU.fault(
    "exchanged",
    "Gate and up are exchanged: SiLU goes around `w_1`'s result, not `w_3`'s. Nothing "
    "but the values shows it, and trained weights give nonsense.",
    (GATE, "silu(self.w_3(x))"),
    (PRODUCT, "gate * self.w_1(x)"),
)
SwiGLU.fault(
    "no_gate",
    "There is no gate: SiLU of one map goes straight to `w_2`, and the other map is "
    "never used.",
    (PRODUCT, "gate"),
)
SwiGLU.fault(
    "gate_twice",
    "`w_1`'s result is the gate and is multiplied by itself; `w_3` is never used.",
    (PRODUCT, "gate * self.w_1(x)"),
)
SwiGLU.fault(
    "no_activation",
    "Gate and up are multiplied without SiLU; that is the bilinear variant.",
    (GATE, "self.w_1(x)"),
)
SwiGLU.fault(
    "sigmoid_gate",
    "The gate is a sigmoid. That is GLU, the first of the family; SwiGLU's is SiLU.",
    (GATE, "torch.sigmoid(self.w_1(x))"),
)
SwiGLU.fault(
    "gelu_gate",
    "The gate uses GELU. That variant is called GEGLU.",
    (GATE, "gelu(self.w_1(x))"),
)
SwiGLU.fault(
    "relu_gate",
    "The gate uses ReLU. That variant is called ReGLU.",
    (GATE, "torch.relu(self.w_1(x))"),
)
SwiGLU.fault(
    "silu_on_both",
    "SiLU is applied to gate and up. Up stays as it is, so that the product can have "
    "any sign and size.",
    (PRODUCT, "gate * silu(self.w_3(x))"),
)
SwiGLU.fault(
    "added",
    "Gate and up are added. A gate multiplies.",
    (PRODUCT, "gate + self.w_3(x)"),
)
SwiGLU.fault(
    "exp_of_minus_x",
    "SiLU is written with 1 + exp(−gate) here, which is infinite where the gate is "
    "below −89, and the gradient NaN. Use your own `silu`.",
    (GATE, "self.w_1(x) / (1 + torch.exp(-self.w_1(x)))"),
)

# Counting -----------------------------------------------------------------------------

MULTIPLES = "-(-8 * d_model // (3 * multiple_of))"
TIMES = "n_multiples * multiple_of"

swiglu_width.fault(
    "rounded_down",
    "It is rounded down, so that the network is smaller than the one it replaces.",
    (MULTIPLES, "8 * d_model // (3 * multiple_of)"),
)
swiglu_width.fault(
    "nearest",
    "It is rounded to the nearest multiple; the width must not fall below 8/3·d_model.",
    (MULTIPLES, "round(8 * d_model / 3 / multiple_of)"),
)
swiglu_width.fault(
    "cut_off_first",
    "The fraction is cut off before the rounding, as Llama's own code does. With small "
    "multiples the result falls below 8/3·d_model.",
    (MULTIPLES, "-(-(8 * d_model // 3) // multiple_of)"),
)
swiglu_width.fault(
    "always_up",
    "A width that is a multiple already goes up to the next one.",
    (MULTIPLES, "8 * d_model // (3 * multiple_of) + 1"),
)
swiglu_width.fault(
    "four_times",
    "This is the classic width, 4·d_model. With three matrices in place of two that is "
    "half as many parameters again.",
    (MULTIPLES, "-(-4 * d_model // multiple_of)"),
)
swiglu_width.fault(
    "no_multiple",
    "8/3·d_model is rounded up to a whole number, but not to a multiple.",
    (MULTIPLES, "-(-8 * d_model // 3)"),
    (TIMES, "n_multiples"),
)
swiglu_width.fault(
    "multiple_ignored",
    "It is rounded to a multiple of 32 whatever `multiple_of` says.",
    (MULTIPLES, "-(-8 * d_model // (3 * 32))"),
    (TIMES, "n_multiples * 32"),
)

D_KV = "n_kv_heads * (d_model // n_heads)"
ATTENTION = "2 * d_model * d_model + 2 * d_model * d_kv"
NETWORK = "(3 if gated else 2) * d_model * d_ff"

block_parameters.fault(
    "kv_heads_ignored",
    "Keys and values are counted as if every head had its own.",
    (D_KV, "d_model"),
)
block_parameters.fault(
    "kv_matrices_divided_by_kv_heads",
    "The width of keys and values is d_model divided by n_kv_heads. They hold "
    "n_kv_heads heads, each as wide as a query head.",
    (D_KV, "d_model // n_kv_heads"),
)
block_parameters.fault(
    "no_output",
    "`w_o` is missing: after the heads are merged one more matrix follows.",
    (ATTENTION, ATTENTION[4:]),
)
block_parameters.fault(
    "keys_without_values",
    "Keys and values are counted once. They are two matrices.",
    (ATTENTION, "2 * d_model * d_model + d_model * d_kv"),
)
block_parameters.fault(
    "heads_full_width",
    "Every head is counted d_model wide. The heads share that width.",
    (ATTENTION, "2 * d_model * d_model * (n_heads + n_kv_heads)"),
)
block_parameters.fault(
    "gate_ignored",
    "Two matrices are counted whether there is a gate or not. The gate is a third.",
    ("(3 if gated else 2)", "2"),
)
block_parameters.fault(
    "gate_reversed",
    "`gated` is read the other way round.",
    ("(3 if gated else 2)", "(2 if gated else 3)"),
)
block_parameters.fault(
    "width_assumed",
    "4·d_model is taken for the width, whatever d_ff says.",
    (NETWORK, NETWORK.replace("d_ff", "4 * d_model")),
)

# Parts together -----------------------------------------------------------------------

CALL = "attention(q, k, v, mask)"

two_layer_stack.fault(
    "residual_twice",
    "The feed-forward network adds its input to its result, and the block adds it once "
    "more: the stream counts twice where the two meet.",
    (DOWN, f"x + {DOWN}"),
    edited="FeedForward",
)
two_layer_stack.fault(
    "tanh_gelu",
    "The `gelu` that FeedForward was given is the tanh form; the stream is off by a "
    "little, everywhere.",
    (ERF, f"{TANH}(x + 0.044715 * x**3))"),
    edited="gelu",
)
two_layer_stack.fault(
    "mask_reversed",
    "Attention takes the mask's True for “hidden”, while `causal_mask` means “may "
    "look”.",
    (CALL, "attention(q, k, v, ~mask)"),
    edited="MultiHeadAttention",
)
two_layer_stack.fault(
    "mask_ignored",
    "Attention does not use the mask that it is given: every position sees the future.",
    (CALL, "attention(q, k, v)"),
    edited="MultiHeadAttention",
)

parameters_of_a_block.fault(
    "gate_not_counted",
    "The count has two matrices for a network with a gate; the module has three.",
    ("(3 if gated else 2)", "2"),
    edited="block_parameters",
)
parameters_of_a_block.fault(
    "classic_width",
    "`swiglu_width` gives the classic width, so that the gated network is half as "
    "large again as the one that it replaces.",
    (MULTIPLES, "-(-4 * d_model // multiple_of)"),
    edited="swiglu_width",
)
