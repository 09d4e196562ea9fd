"""A tiny model that writes short texts: its tokens are bytes, and quotes and the end are likelier than the rest."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import make_byte_model

# Logits above the others, which differ by about one. An answer has about twenty bytes, and so has a string of JSON.
ABOVE = 5.0


def make_writing_model(folder: Path) -> Path:
    """Save it into `folder`. Random weights as of `make_byte_model`, and a constant part in the hidden state."""
    make_byte_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    likelier = [tokenizer.eos_token_id, *tokenizer.encode('"', add_special_tokens=False)]
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 8.0
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        hidden = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states[-1]
        head[likelier, 0] = ABOVE / hidden[..., 0].mean()
    model.save_pretrained(folder)
    return folder
