"""A trained model for the learner's own parts: SmolLM2-135M-Instruct, from PyPI."""

from utils.real_model.generating import CachedReader, answer_pieces, chat_prompt
from utils.real_model.gguf_file import PATTERN
from utils.real_model.loading import load, load_or_explain
from utils.real_model.model_package import ModelProblem, model_file

__all__ = [
    "PATTERN",
    "CachedReader",
    "ModelProblem",
    "answer_pieces",
    "chat_prompt",
    "load",
    "load_or_explain",
    "model_file",
]
