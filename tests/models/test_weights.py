import json

import jax
import numpy as np
import pytest

from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.models import quantised_weights
from pipeline.models.checkpoints.checkpoint import Checkpoint
from pipeline.models.checkpoints.leaf_reading import read_leaf
from pipeline.models.leaves import needed_leaves, num_params, quantised_leaves
from pipeline.models.registry import open_model
from tests.models.hf_reference import NUM_LAYERS, save_random
from tests.models.loaded_leaves import DEVICE, assert_same_leaves, loaded_leaves

EVERYTHING = activation_keys(tuple(range(NUM_LAYERS)), tuple(Site))
LAYER = {
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
}


def key(name: str) -> ActivationKey:
    return ActivationKey.parse(name)


def layers(*numbers: int) -> set[str]:
    return {f"model.layers.{number}.{name}.weight" for number in numbers for name in LAYER}


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("embed", set()),
        ("blocks.0.resid_pre", set()),
        ("blocks.2.resid_pre", layers(0, 1)),
        ("blocks.2.attn_in", layers(0, 1, 2)),
        ("blocks.2.mlp_out", layers(0, 1, 2)),
        ("blocks.1.resid_post", layers(0, 1)),
        ("final_norm", layers(*range(NUM_LAYERS)) | {"model.norm.weight"}),
    ],
)
def test_only_the_needed_tensors_are_read(name: str, needed: set[str], tmp_path, monkeypatch) -> None:
    save_random("llama", tmp_path)
    model = open_model(str(tmp_path))
    read = []
    rows = Checkpoint.rows
    monkeypatch.setattr(
        Checkpoint, "rows", lambda self, tensor, *span: read.append(tensor) or rows(self, tensor, *span)
    )
    params = model.load((key(name),), "float32", DEVICE)
    assert sorted(read) == sorted(needed | {"model.embed_tokens.weight"})
    assert sum(array.size for array in jax.tree.leaves(params)) == num_params(model.leaves((key(name),)))


@pytest.mark.parametrize(
    "index",
    [np.s_[:, 1:3], np.s_[1:3, 2:4, 5:7], np.s_[0:1, :, :, 8:16], np.s_[2:3, 3:4, 7:8, 31:32]],
)
def test_a_part_of_a_leaf_equals_that_part_of_the_whole(index: tuple[slice, ...], tmp_path) -> None:
    """A process reads such parts if weights are divided among devices."""
    save_random("llama", tmp_path)
    model = open_model(str(tmp_path))
    q = needed_leaves(model.arch, model.table, (key("blocks.2.resid_post"),))["runs"][0]["attention"]["q"]
    index += (slice(None),) * (len(q.shape) - len(index))
    ((whole, part),) = read_leaf(model.checkpoint, q, np.dtype(np.float32), [(slice(None),) * len(q.shape), index])
    assert whole.shape == q.shape == (3, 4, 8, 32)
    np.testing.assert_array_equal(part, whole[index])


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("quantised", [None, "int8", "int4"])
def test_rows_of_several_parts_are_read_once(axis: int, quantised: str | None, tmp_path, monkeypatch) -> None:
    """Four devices of a process need the parts, divided along any axis."""
    save_random("llama", tmp_path, num_hidden_layers=4)
    model = open_model(str(tmp_path))
    o = needed_leaves(model.arch, model.table, (key("blocks.3.resid_post"),))["runs"][0]["attention"]["o"]
    monkeypatch.setattr(quantised_weights, "_GROUP", 2)
    o = quantised_leaves(o, quantised)
    size = o.shape[axis] // 4
    whole = [slice(None)] * len(o.shape)
    parts = [(*whole[:axis], slice(i * size, (i + 1) * size), *whole[axis + 1 :]) for i in range(4)]
    rows, read = [], model.checkpoint.rows

    def counted(name: str, start: int, stop: int) -> np.ndarray:
        rows.append((name, start, stop))
        return read(name, start, stop)

    monkeypatch.setattr(model.checkpoint, "rows", counted)
    values, *scales = read_leaf(model.checkpoint, o, o.dtype("float32"), parts)
    for of_parts in scales:
        num_axes = 2 if quantised == "int8" else 4
        assert [scale.shape for scale in of_parts] == [part.shape[:num_axes] for part in values]
    assert np.concatenate(values, axis=axis).shape == o.shape
    assert len(set(rows)) == len(rows)
    assert sum(stop - start for _, start, stop in rows) == 4 * 32  # four tensors' rows


def test_a_checkpoint_of_many_files_equals_one_file(tmp_path) -> None:
    save_random("qwen2", tmp_path / "one")
    save_random("qwen2", tmp_path / "many", max_shard_size="30KB")
    one, many = (loaded_leaves(open_model(str(tmp_path / name)), EVERYTHING) for name in ("one", "many"))
    assert_same_leaves(many, one)


def test_random_weights_depend_on_seed_and_tensor_only(tmp_path) -> None:
    save_random("qwen2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    one, same, other = (open_model(str(tmp_path), init="random", seed=seed) for seed in (1, 1, 2))
    assert one.identity() == same.identity() != other.identity()
    single = loaded_leaves(one, activation_keys((0, 1, 2, 3), (Site.resid_post,)))
    stacked = loaded_leaves(same, (key("blocks.3.resid_post"),))
    q = "['attention']['q']"
    for layer in range(NUM_LAYERS):
        np.testing.assert_array_equal(single[f"['runs'][{layer}]{q}"], stacked[f"['runs'][0]{q}"][layer])
    changed = loaded_leaves(other, (key("blocks.0.resid_post"),))
    assert np.abs(single[f"['runs'][0]{q}"] - changed[f"['runs'][0]{q}"]).max() > 0.01
    assert abs(stacked["['embed']"].std() - 0.02) < 0.001
    assert (stacked["['runs'][0]['mlp']['norm']"] == 1).all()


def test_flops_count_the_matrix_products(tmp_path) -> None:
    save_random("llama", tmp_path)
    model = open_model(str(tmp_path))
    mean_keys = 65 / 2  # 1 + 2 + ... + 64, over 64 queries
    attention = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32) + 4 * mean_keys * 32
    mlp = 2 * 3 * 32 * 48
    head_out = 2 * 32 * 32
    for names, expected in {
        "embed": 0,
        "blocks.1.resid_pre": attention + mlp,
        "blocks.1.q": 2 * attention + mlp,  # all of the last layer's attention
        "blocks.1.attn_out": 2 * attention + mlp,
        "blocks.1.mlp_in": 2 * attention + 2 * mlp,
        "blocks.0.mlp_out blocks.1.attn_out": 2 * attention + mlp,
        "blocks.1.head_out blocks.1.attn_out": 2 * attention + mlp + head_out,
        "blocks.1.attn_out blocks.1.resid_post": 2 * attention + 2 * mlp,
    }.items():
        assert model.flops_per_token(tuple(map(key, names.split())), length=64) == expected, names


def test_flops_of_a_delta_net_count_its_chunks(tmp_path) -> None:
    save_random("qwen3_5_text", tmp_path)
    model = open_model(str(tmp_path))
    d_model, heads, values, key_dim, value_dim = 32, 2, 4, 16, 10
    matrices = 2 * d_model * (2 * heads * key_dim + 3 * values * value_dim)
    with_keys = 2 * 64 * (2 * heads * key_dim + values * key_dim)
    with_state = 2 * 3 * values * key_dim * value_dim
    chunk = with_keys + 2 * 64 * 2 * values * value_dim + with_state
    for length in (64, 256):
        assert model.flops_per_token((key("blocks.0.attn_out"),), length) == matrices + chunk


def test_random_weights_are_finite_in_a_tensor_of_many_values(tmp_path) -> None:
    """With more values than random bits, rounding at the end of the range would occur a few times."""
    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "vocab_size": 1 << 22}
    (tmp_path / "config.json").write_text(json.dumps(config))
    embed = loaded_leaves(open_model(str(tmp_path), init="random"), (key("embed"),))["['embed']"]
    assert embed.size == 1 << 26
    assert np.isfinite(embed).all()
    assert np.std(embed) == pytest.approx(0.02, rel=1e-3)
