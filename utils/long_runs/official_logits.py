"""What the official implementation makes of a question, from the same file."""

from importlib.metadata import version

import torch

from utils.real_model import chat_prompt, model_file

ABOUT = (
    "Logits of SmolLM2-135M-Instruct by `transformers`, which reads the same file: "
    "of the token that follows a prompt, in float32. Needs requirements-dev.txt."
)
MINUTES = 1
SETTINGS = [{"question": "What is the capital of France?"}]
EVERY = 2_500  # of 49,152 tokens


def official_model():
    """`transformers`' model with the file's weights, and which keys did not fit."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(model_file())
    config = LlamaConfig(**load_gguf_checkpoint(path)["config"])
    model = LlamaForCausalLM(config).eval()
    held = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    keys = model.load_state_dict(held["tensors"], strict=False)
    model.tie_weights()
    return model, keys


@torch.no_grad()
def measure(question) -> dict:
    """The ids, logits of twenty tokens spread over the vocabulary, and the top five."""
    from transformers import AutoTokenizer

    path, (model, _) = model_file(), official_model()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompt = chat_prompt([("user", question)])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    logits = model(torch.tensor([ids])).logits[0, -1]
    top, spread = logits.topk(5).indices.tolist(), range(0, len(logits), EVERY)
    return {
        "transformers": version("transformers"),
        "prompt": prompt,
        "ids": ids,
        "top": {str(i): logits[i].item() for i in top},
        "logits": {str(i): logits[i].item() for i in spread},
    }
