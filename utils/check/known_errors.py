"""What common errors of Python and PyTorch mean, whatever the exercise."""

import re

MEANINGS = (
    (
        RuntimeError,
        "modified by an inplace operation",
        "The numbers that autograd keeps for the way back have been overwritten in "
        "place (by a method whose name ends in _, by `+=` or by assigning to some "
        "elements). Make a new tensor instead.",
    ),
    (
        RuntimeError,
        "Boolean value of Tensor with more than one value is ambiguous",
        "`if`, `and`, `or` and `not` ask whether a whole tensor is true, which several "
        "values do not decide. To ask whether there is a tensor, write `is not None`; "
        "to combine values, use `&`, `|` and `~`.",
    ),
    (
        RuntimeError,
        "a leaf Variable that requires grad is being used in an in-place operation",
        "A parameter, or an input that wants a gradient, is changed in place while "
        "autograd watches. Make a new tensor, or change it under `torch.no_grad()`.",
    ),
    (
        RuntimeError,
        "does not require grad and does not have a grad_fn",
        "Nothing leads back from the result: a `detach()`, `.data`, `.item()` or "
        "`torch.no_grad()` has cut the graph.",
    ),
    (
        RuntimeError,
        r"view size is not compatible with input tensor's size and stride",
        "`view` needs numbers that lie in memory in the order of the new shape, which "
        "they do not after a transpose or a slice: `reshape` copies where it must.",
    ),
    (
        RuntimeError,
        r"expected (m1 and m2|mat1 and mat2|scalar type|self and mat2).* dtype|"
        r"expected scalar type",
        "Two tensors of different dtype meet: create constants in the dtype of the "
        "input, and convert back what you computed in another.",
    ),
    (
        TypeError,
        r"bad operand type for unary ~: 'NoneType'|'NoneType' object|"
        r"for [-+*/@&|]+: '?NoneType|and 'NoneType'|must be Tensor, not NoneType",
        "Something is None where a value is needed: an argument that may be left out, "
        "or the result of a function without a `return`.",
    ),
    (
        AttributeError,
        "cannot assign module before Module.__init__",
        "A layer is assigned before `super().__init__()` has been called. Call it "
        "first: it prepares what layers are registered in.",
    ),
    (
        AttributeError,
        "cannot assign parameters before Module.__init__",
        "A parameter is assigned before `super().__init__()` has been called. Call it "
        "first: it prepares what parameters are registered in.",
    ),
)


def meaning_of(error) -> str:
    """A sentence, or nothing for an error that says enough itself."""
    text = str(error)
    for kind, pattern, sentence in MEANINGS:
        if isinstance(error, kind) and re.search(pattern, text):
            return sentence
    return ""
