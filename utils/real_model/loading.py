"""Fills the learner's parts, or the reference, with the real model's weights."""

import os

import torch

from utils.real_model.gguf_file import PATTERN, read
from utils.real_model.model_package import ModelProblem, model_file
from utils.real_model.prepacked_linear import prepack_linears


def load(config_class, transformer, tokenizer, **changes):
    """A `Transformer` and a `BPETokenizer` that hold the real model.

    config_class, transformer, tokenizer: the classes, the learner's or the reference.
    changes: fields of the configuration to set otherwise, such as `max_len`.
    """
    path = model_file()
    try:
        contents = read(path)
        weights = contents.weights
        config = config_class(**(contents.sizes | changes))
        try:
            with torch.device("meta"):
                model = transformer(config)
        except Exception:  # an answer that reads values while it is built
            model = transformer(config)
        fill(model, weights)
        prepack_linears(model)
        vocab, merges = contents.vocab, contents.merges
        return model.eval(), tokenizer(vocab, merges, contents.special_tokens, PATTERN)
    except MemoryError:
        pass
    except (RuntimeError, OSError) as error:  # PyTorch's, and the operating system's
        if "memory" not in str(error):
            raise
    # Outside the handler, where what was read so far is free again.
    raise ModelProblem(
        "there is not enough memory for the model, which needs about 1.5 GB while it "
        "loads: close other programs or notebooks and run this cell again."
    )


def open_or_explain():
    """What the model's file holds; without it None, after a sentence that says why."""
    return _explained(lambda: read(model_file()))


def load_or_explain(config_class, transformer, tokenizer, **changes):
    """As `load`; without the model `(None, None)`, after a sentence that says why."""
    found = _explained(lambda: load(config_class, transformer, tokenizer, **changes))
    return found or (None, None)


def _explained(reading):
    try:
        return reading()
    except ModelProblem as problem:
        if os.environ.get("COURSE_BUILD"):
            raise  # a solution notebook is stored with the model's outputs
        print(f"Without the real model: {problem}")
        return None


def fill(model, weights: dict) -> None:
    """Put the weights into a model's parameters, by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = set(parameters)
    for name, value in weights.items():
        found = next((n for n in (f"{name}.weight", name) if n in parameters), None)
        if found is None:
            raise ModelProblem(
                f"your Transformer has no parameter `{name}.weight`: run the check of "
                "its exercise, which says how the parts are named."
            )
        if parameters[found].shape != value.shape:
            raise ModelProblem(
                f"your Transformer's `{found}` has shape "
                f"{tuple(parameters[found].shape)}, the file's has "
                f"{tuple(value.shape)}: run the check of its exercise."
            )
        module = model.get_submodule(found.rpartition(".")[0])
        old = parameters[found]
        new = torch.nn.Parameter(value, requires_grad=False)
        setattr(module, found.rpartition(".")[2], new)
        same = [n for n, p in parameters.items() if p is old]
        for other in same:  # a tied matrix has two names
            owner = model.get_submodule(other.rpartition(".")[0])
            setattr(owner, other.rpartition(".")[2], new)
        missing -= set(same)
    if missing:
        raise ModelProblem(
            f"the file holds no values for {', '.join(sorted(missing)[:4])}: has your "
            "Transformer parameters that the exercise did not ask for?"
        )
