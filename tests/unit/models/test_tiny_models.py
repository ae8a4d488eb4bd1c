"""The test models themselves: they load, wander, and their tokenizer is exact."""

import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_models import FAMILIES, TinyModel, prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_depends_on_the_prompt_and_does_not_repeat_one_token(
    family: str, tiny_model: TinyModel
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family))
    texts = []
    for seed in (0, 1):
        ids = torch.tensor([prompt_ids(20, seed=seed)])
        out = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
        texts.append(out[0, 20:].tolist())
    assert texts[0] != texts[1]
    assert min(len(set(text)) for text in texts) >= 4


@given(st.text(max_size=40))
def test_tokenizer_round_trips_any_text(tokenizer_folder: str, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 1 + len(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.fixture(scope="module")
def tokenizer_folder(tiny_model: TinyModel) -> str:
    return str(tiny_model())


def test_the_network_is_out_of_reach() -> None:
    with pytest.raises(RuntimeError, match="without a network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
