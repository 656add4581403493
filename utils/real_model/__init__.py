"""A trained model for the learner's own parts: SmolLM2-135M-Instruct, from PyPI."""

from utils.real_model.generating import CachedReader, answer_pieces, chat_prompt
from utils.real_model.gguf_file import PATTERN, as_float32
from utils.real_model.loading import load, load_or_explain, open_or_explain
from utils.real_model.model_package import ModelProblem, model_file

__all__ = [
    "PATTERN",
    "CachedReader",
    "ModelProblem",
    "answer_pieces",
    "as_float32",
    "chat_prompt",
    "load",
    "load_or_explain",
    "model_file",
    "open_or_explain",
]
