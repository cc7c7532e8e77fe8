"""SAEs for what TransformerLens computes have the same features for what the checkpoint computes."""

import copy
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.schema import CaptureConfig
from pipeline.core.errors import ConfigError
from pipeline.models.registry import open_model
from pipeline.models.sae.loading import open_sae
from pipeline.planning.encoders import open_encoders
from tests.models import sae_files, torch_saes
from tests.models.hf_reference import save_random, torch
from tests.models.sae_files import D_IN, decode_dense, encode_dense, write_json, write_sparsify

LAYER = 3
NAME = f"blocks.{LAYER}.attn_z"


def heads(model, tokens) -> tuple[np.ndarray, np.ndarray]:
    """The input of the layer's output projection, and the model's output, both [tokens, D]."""
    outputs = []
    projection = model.h[LAYER].attn.c_proj
    handle = projection.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0][0].numpy()))
    with torch.no_grad():
        hidden = model(tokens).last_hidden_state[0].numpy()
    handle.remove()
    return outputs[0], hidden


def test_features_are_those_of_heads_without_biases(tmp_path: Path):
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_embd=D_IN, n_head=3, n_layer=LAYER + 1, vocab_size=64, n_positions=32)
    model = GPT2Model(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + ("ln_" in name and "weight" in name))
    model.save_pretrained(tmp_path / "gpt2")
    folded = copy.deepcopy(model)
    attention, norm = folded.h[LAYER].attn, folded.h[LAYER].ln_1
    with torch.no_grad():
        values = slice(2 * D_IN, None)
        without = -norm.bias @ attention.c_attn.weight[:, values]  # cancels the norm's bias
        attention.c_proj.bias += (attention.c_attn.bias[values] - without) @ attention.c_proj.weight
        attention.c_attn.bias[values] = without
    tokens = torch.randint(0, 64, (1, 32))
    (x, hidden), (x_folded, hidden_folded) = heads(model, tokens), heads(folded, tokens)
    np.testing.assert_allclose(hidden, hidden_folded, atol=1e-4)
    assert np.abs(x - x_folded).max() > 0.1
    state = torch_saes.state_dict("hook_z", np.random.default_rng(0))
    address = str(torch_saes.write("hook_z", tmp_path, state, torch.save))
    capture = CaptureConfig(layers=[LAYER], sites=["attn_z"], encode={NAME: address})
    [encoder] = open_encoders(capture, open_model(str(tmp_path / "gpt2")))
    features = torch_saes.features("hook_z", state, x_folded)
    np.testing.assert_allclose(encode_dense(encoder.sae, x), features, atol=1e-4)
    out = features @ state["W_dec"] + state["b_dec"] + (x - x_folded)
    np.testing.assert_allclose(decode_dense(encoder.sae, features, x), out, atol=1e-4)
    shape = {"model_type": "qwen2", "hidden_size": D_IN, "intermediate_size": 24, "vocab_size": 64}
    shape |= {"num_hidden_layers": LAYER + 1, "num_attention_heads": 3, "num_key_value_heads": 3}
    write_json(tmp_path / "qwen2" / "config.json", shape)
    with pytest.raises(ConfigError, match="is an SAE for GPT-2's heads"):
        open_encoders(capture, open_model(str(tmp_path / "qwen2"), init="random"))


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_an_sae_from_before_a_norms_weights_reads_what_follows_them(family: str, tmp_path: Path, caplog):
    """Gemma Scope's transcoders read the MLP's input before the norm's weights; the site mlp_in is after them."""
    model = save_random(family, tmp_path / "model")
    weights = dict(model.model.layers[2].named_parameters())
    norm = "pre_feedforward_layernorm" if family == "gemma2" else "post_attention_layernorm"
    scale = weights[f"{norm}.weight"].detach().numpy() + (family == "gemma2")
    rng, address = np.random.default_rng(0), "gemma-scope-2b-pt-transcoders/layer_{}/width_16k/average_l0_5"
    encoder = sae_files.normal(rng, len(scale), sae_files.WIDTH)
    tensors = {"W_enc": encoder, "W_dec": encoder.T, **dict.fromkeys(("b_enc", "threshold"), encoder[0])}
    for layer in (2, 3):
        (tmp_path / address.format(layer)).mkdir(parents=True)
        np.savez(tmp_path / address.format(layer) / "params.npz", **tensors, b_dec=encoder[:, 0])
    encode = {
        "blocks.2.mlp_in": f"{tmp_path}/{address.format(2)}",
        "blocks.1.mlp_in": f"{tmp_path}/{address.format(3)}",
    }
    capture = CaptureConfig(layers=[1, 2], sites=["mlp_in"], encode=encode)
    other, sae = (encoder.sae for encoder in open_encoders(capture, open_model(str(tmp_path / "model"))))
    normalised = sae_files.normal(rng, 50, len(scale))
    np.testing.assert_allclose((normalised * scale) @ sae.read("w_enc"), normalised @ encoder, rtol=1e-4, atol=1e-4)
    assert sae.spec.is_transcoder is True
    np.testing.assert_array_equal(other.read("w_enc"), encoder)  # of another layer: encoded as it is, and said
    assert [message.split(" was trained on ")[1] for message in caplog.messages] == [
        "blocks.3.ln2.hook_normalized, but it encodes blocks.1.mlp_in (blocks.1.mlp.hook_in)"
    ]


@pytest.mark.parametrize(("site", "place", "norm"), [("mlp_in", "ln2", "post_attention"), ("attn_in", "ln1", "input")])
@pytest.mark.parametrize("architecture", ["standard", "gated", "topk", "skip_transcoder"])
def test_all_arrays_of_an_sae_from_before_a_norms_weights_change(architecture, site, place, norm, tmp_path: Path):
    """Features and reconstructions, which are of what precedes the weights, unless the SAE is a transcoder."""
    model = save_random("llama", tmp_path / "model")
    scale = model.get_parameter(f"model.layers.2.{norm}_layernorm.weight").detach().numpy()
    rng, metadata = np.random.default_rng(0), {"hook_name": f"blocks.2.{place}.hook_normalized"}
    config = {"rescale_acts_by_decoder_norm": True} if architecture == "topk" else {}
    options = {"num_inputs": len(scale), "metadata": metadata, **config}
    address = str(sae_files.write_saelens(tmp_path / "sae", architecture, rng, **options).folder)
    capture = CaptureConfig(layers=[2], sites=[site], encode={f"blocks.2.{site}": address})
    [encoder] = open_encoders(capture, open_model(str(tmp_path / "model")))
    trained, x = open_sae(address), sae_files.normal(rng, 50, len(scale))
    values = encode_dense(trained, x)
    assert 0 < np.count_nonzero(values) < values.size
    np.testing.assert_allclose(encode_dense(encoder.sae, x * scale), values, rtol=1e-4, atol=1e-4)
    out = decode_dense(trained, values, x) * (1 if trained.spec.is_transcoder else scale)
    np.testing.assert_allclose(decode_dense(encoder.sae, values, x * scale), out, rtol=1e-4, atol=1e-4)
    sae_files.write_saelens(tmp_path / "sae", architecture, rng, **options, normalize_activations="layer_norm")
    with pytest.raises(ConfigError, match=r"before the norm's weights, and scales its input \(layer_norm\)"):
        open_encoders(capture, open_model(str(tmp_path / "model")))


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
@pytest.mark.parametrize(("module", "site"), [("mlp", "mlp_out"), ("self_attn", "attn_out")])
def test_outputs_of_modules_differ_from_sites_that_are_after_a_norm(family, module, site, tmp_path: Path, caplog):
    model = save_random(family, tmp_path / "model")
    address = tmp_path / f"layers.2.{module}"
    write_sparsify(address, np.random.default_rng(0), num_inputs=model.config.hidden_size)
    capture = CaptureConfig(layers=[2], sites=[site], encode={f"blocks.2.{site}": str(address)}, encode_top=3)
    open_encoders(capture, open_model(str(tmp_path / "model")))
    message = f"hook_out, but it encodes blocks.2.{site} (blocks.2.hook_{site}, after the norm that follows the module)"
    warnings = [record.message for record in caplog.records if record.name == "pipeline"]
    assert [message in text for text in warnings] == ([] if family == "llama" else [True])
