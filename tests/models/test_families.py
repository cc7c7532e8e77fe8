"""Differences between families: sites and their names, older files, refused configurations."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_parity import ALTERNATING, GEMMA4, LLAMA3_ROPE, SECTIONS

from pipeline.config.schema import CaptureConfig
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.sites import FINAL_NORM, ActivationKey, Site
from pipeline.job.job import end_tokens
from pipeline.models.registry import Model, open_model
from pipeline.planning.capture import captured_keys
from tests.models.hf_reference import save_random, tiny_config, transformers
from tests.models.loaded_leaves import DEVICE, assert_same_leaves, loaded_leaves

pytestmark = pytest.mark.heavy
LAST = ActivationKey(3, Site.resid_post)


def edit_config(path: Path, edit) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))


EXPERTS = {"router_logits", "router_weights", "router_indices", "expert_out"}
NEURONS = {"mlp_pre", "mlp_pre_linear", "mlp_post"}
LACKING = {
    "gpt_neox": ({}, EXPERTS | {"resid_mid", "mlp_pre_linear"}),
    "sequential gpt_neox": ({"use_parallel_residual": False}, EXPERTS | {"mlp_pre_linear"}),
    "bert": ({}, EXPERTS | {"final_norm", "mlp_pre_linear"}),
    "gpt2": ({}, EXPERTS | {"mlp_pre_linear"}),
    "phi": ({}, EXPERTS | {"resid_mid", "mlp_pre_linear"}),
    "gemma2": ({}, EXPERTS),
    "mixtral": ({}, NEURONS),
}


@pytest.mark.parametrize("case", LACKING)
def test_the_refusal_of_a_missing_site_lists_the_familys_sites(case: str, tmp_path) -> None:
    overrides, lacking = LACKING[case]
    model = opened(tmp_path, config_of(case.split()[-1], **overrides))
    assert set(Site) - set(model.sites) == lacking
    for site in lacking:
        with pytest.raises(ConfigError, match=rf"{site}.*the model has embed, resid_pre, attn_in, q, .*, resid_post"):
            captured_keys(CaptureConfig(layers=[1], sites=[site]), model)


ALL = [0, 1, 2, 3]
KINDS = {  # of layers: overrides, the sites that no layer has, and the layers that have a site
    "qwen3_moe": ({"mlp_only_layers": [1]}, set(), {"router_logits": [0, 2, 3], "mlp_post": [1], "mlp_out": ALL}),
    "qwen3_5_text": (
        {},
        EXPERTS,
        {"q": [3], "v": [3], "attn_z": [3], "head_out": [3], "attn_entropy": [3], "attn_out": ALL},
    ),
    "nemotron_h": (
        {},
        EXPERTS | {"resid_mid", "mlp_pre_linear"},
        {"attn_out": [0, 2, 3], "mlp_out": [1], "k": [2], "resid_post": ALL},
    ),
    "gemma4_text": (GEMMA4, set(), {"k": [0, 1], "v": [0, 1], "attn_pattern": ALL, "q": ALL}),
}


@pytest.mark.parametrize("family", KINDS)
def test_a_layer_has_the_sites_of_its_kind(family: str, tmp_path) -> None:
    overrides, lacking, layers_of = KINDS[family]
    model = opened(tmp_path, config_of(family, **overrides))
    assert set(Site) - set(model.sites) == lacking
    for site, layers in layers_of.items():
        for asked in ("all", layers):
            captured = captured_keys(CaptureConfig(layers=asked, sites=[site]), model)
            assert [key.layer for key in captured] == layers
        for layer in {*ALL} - {*layers}:
            with pytest.raises(
                ConfigError, match=rf"{site}, which layer {layer} lacks. .*{', '.join(map(str, layers))}"
            ):
                captured_keys(CaptureConfig(layers=[layer, *layers], sites=[site]), model)


HOOKS = [
    ("llama", "blocks.1.q", "blocks.1.attn.hook_rot_q"),
    ("gpt2", "blocks.1.q", "blocks.1.attn.hook_q"),
    ("gpt_neo", "blocks.1.k", "blocks.1.attn.hook_k"),
    ("gptj", "blocks.1.k", "blocks.1.attn.hook_rot_k"),
    ("cohere2", "blocks.2.q", "blocks.2.attn.hook_rot_q"),
    ("cohere2", "blocks.3.q", "blocks.3.attn.hook_q"),
    ("gpt2", "blocks.1.resid_post", "blocks.1.hook_resid_post"),
    ("smollm3", "blocks.2.q", "blocks.2.attn.hook_rot_q"),
    ("smollm3", "blocks.3.q", "blocks.3.attn.hook_q"),
    ("bert", "blocks.1.resid_mid", "blocks.1.hook_mlp_in"),
    ("bert", "blocks.1.resid_post", "blocks.1.hook_normalized_resid_post"),
    ("bert", "embed", "hook_full_embed"),
]


@pytest.mark.parametrize(("family", "name", "hook_name"), HOOKS)
def test_sites_have_their_transformer_lens_names(family: str, name: str, hook_name: str, tmp_path) -> None:
    assert opened(tmp_path, config_of(family)).hook_name(ActivationKey.parse(name)) == hook_name


def flat_rope(config: dict, theta: str = "rope_theta", fraction: str = "partial_rotary_factor") -> None:
    """Replaces `rope_parameters` by the attributes of older files."""
    rope = config.pop("rope_parameters")
    config[theta] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config[fraction] = rope.pop("partial_rotary_factor")
    is_default = rope == {"rope_type": "default"}
    config["rope_scaling"] = None if is_default else {"type": rope.pop("rope_type")} | rope


def older(*absent: str, **more: object) -> Callable[[dict], None]:
    """Makes a configuration an older one, without some attributes, and with others, of which transformers reads few."""

    def edit(config: dict) -> None:
        if "rope_theta" in config.get("rope_parameters", ()):
            flat_rope(config)
        for key in absent:
            del config[key]
        config |= more

    return edit


def older_text(*absent: str, **more: object) -> Callable[[dict], None]:
    """The same for the language model of a checkpoint with vision."""
    return lambda config: older(*absent, **more)(config["text_config"])


def older_gpt_neox(config: dict) -> None:
    flat_rope(config, "rotary_emb_base", "rotary_pct")
    del config["attention_bias"], config["is_decoder"]


def older_gemma3(config: dict) -> None:
    ropes = config.pop("rope_parameters")
    del config["layer_types"]
    config |= {"rope_parameters": ropes["full_attention"], "sliding_window_pattern": 2}
    flat_rope(config)
    config["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]


def published_gemma3(config: dict) -> None:
    older_gemma3(config["text_config"])
    del config["text_config"]["model_type"]


def published_qwen2_vl(config: dict) -> None:
    """The language model's attributes are not in `text_config`."""
    text = config.pop("text_config")
    flat_rope(text)
    text["rope_scaling"]["type"] = "mrope"
    config |= text | {"model_type": config["model_type"]}
    del config["layer_types"]


def twice_qwen2_vl(config: dict) -> None:
    """As transformers 4.53 writes it: the language model's attributes are also outside of `text_config`, and not all
    have its values."""
    older_text()(config)
    config["text_config"]["sliding_window"] = None
    config |= config["text_config"] | {"model_type": config["model_type"], "sliding_window": 7}


def older_nemotron_h(config: dict) -> None:
    """As published, with a pattern of letters and attributes that only the model's own code reads."""
    names = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    config["hybrid_override_pattern"] = "".join(names[name] for name in config.pop("layers_block_type"))
    more = {"attention_head_dim": 8, "auto_map": {"AutoModel": "x.Y"}, "num_hidden_layers": 9, "rms_norm_eps": 1e-5}
    older("moe_latent_size", "mtp_layers_block_type", "time_step_max", **more)(config)


def older_olmo3(config: dict) -> None:
    config["rope_parameters"] = config["rope_parameters"]["full_attention"]
    older("layer_types")(config)


def older_phi3(config: dict) -> None:
    older(attention_bias=False, auto_map={})(config)
    del config["rope_scaling"]["original_max_position_embeddings"]


THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}
PARTIAL = {"rope_parameters": THETA["rope_parameters"] | {"partial_rotary_factor": 0.75}}
HALF = {"rope_parameters": THETA["rope_parameters"] | {"partial_rotary_factor": 0.5}}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
OLMO3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
PHI3_ROPE = {"rope_type": "longrope", "rope_theta": 300.0, "partial_rotary_factor": 0.75}
PHI3_ROPE |= {"short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0, 5.0, 6.0]}
EVERY_SECOND = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}
MSCALE_ROPE = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 24}
MSCALE = {"rope_parameters": MSCALE_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3}}
OWN_CODE = {"moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "auto_map": {"AutoModel": "modeling.X"}}
DEEPSEEK = ("head_dim", "qk_head_dim", "output_router_logits")
DEEPSEEK_V3 = OWN_CODE | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}
COHERE2 = {"sliding_window_pattern": 4, "layer_switch": 4, "order_of_interleaved_layers": "local_attn_first"}
COHERE2 |= {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0, "use_qk_norm": False, "use_parallel_block": True}
COHERE2 |= {"use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_embedding": False}
LFM2 = {"block_ff_dim": 48, "intermediate_size": 9, "tie_embedding": True, "block_dim": 32, "block_norm_eps": 1e-9}
LFM2 |= {"num_heads": 3, "conv_dim": 32, "conv_dim_out": 32, "block_use_swiglu": True, "use_pos_enc": True}
MINIMAX = {"rotary_dim": 4, "attn_type_list": [1] * 4, "use_mtp": True, "num_mtp_modules": 0, "use_qk_norm": True}
MINIMAX |= {"mtp_transformer_layers": 1, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"}
MINIMAX |= {"use_routing_bias": True, "shared_intermediate_size": 0, "mlp_intermediate_size": 9}
MINIMAX |= {"layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0}
OPT = {"prefix": "</s>", "output_projection": True, "activation_dropout": 0.1}
OPT |= {"learned_embeddings": True, "scale_embeddings": False}
STARCODER2 = {"activation_function": "gelu", "attention_softmax_in_fp32": True, "layer_norm_epsilon": 1e-9}
STARCODER2 |= {"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True}
STARCODER2 |= {"scale_attention_softmax_in_fp32": True}
SECTIONED = {"rope_parameters": SECTIONS}
OLDER = {  # of each family: the newer configuration, and what makes it an older one
    "deepseek_v2": (MSCALE, older(*DEEPSEEK, scoring_func="softmax", **OWN_CODE)),
    "deepseek_v3": (MSCALE, older(*DEEPSEEK, **DEEPSEEK_V3)),
    "deepseek_v32": (MSCALE, older(*DEEPSEEK, "layer_types", "mlp_layer_types", **DEEPSEEK_V3)),
    "cohere2": (THETA | {"sliding_window": 7}, older("layer_types", **COHERE2)),
    **dict.fromkeys(("cohere", "granite", "granitemoe", "olmo", "seed_oss"), (THETA, older())),
    **dict.fromkeys(("glm", "glm4", "glm4_moe", "phi", "stablelm"), (PARTIAL, older())),
    "gpt_neo": ({}, older("attention_layers", gradient_checkpointing=False)),
    "gpt_neox": (HALF, older_gpt_neox),
    "gptj": ({}, older(gradient_checkpointing=False, rotary=True, scale_attn_weights=True, n_ctx=512)),
    "gpt_oss": (
        {"sliding_window": 7},
        older("layer_types", "swiglu_alpha", "rope_scaling", experts_per_token=2, initial_context_length=4096),
    ),
    "gemma2": (
        EVERY_SECOND,
        older("layer_types", cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh", sliding_window_size=7),
    ),
    "gemma3_text": (EVERY_SECOND | {"rope_parameters": GEMMA3_ROPES}, older_gemma3),
    "gemma3": (EVERY_SECOND | {"rope_parameters": GEMMA3_ROPES}, published_gemma3),
    "gemma4_text": (
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        older(
            *("per_layer_config", "rope_parameters", "layer_types"), global_head_dim=12, num_global_key_value_heads=1
        ),
    ),
    "lfm2": (THETA, older("layer_types", **LFM2)),
    "llama4": (
        {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "rope_parameters": LLAMA3_ROPE},
        older_text(
            *("moe_layers", "layer_types"), no_rope_layers=[], for_llm_compressor=False, attn_temperature_tuning=4
        ),
    ),
    "minimax_m2": ({}, older("partial_rotary_factor", **MINIMAX)),
    "mistral3": ({"head_dim": 6}, older_text()),
    "nemotron_h": ({}, older_nemotron_h),
    "olmo3": (EVERY_SECOND | {"rope_parameters": OLMO3_ROPES, "layer_types": None}, older_olmo3),
    "opt": ({}, older("enable_bias", "layer_norm_elementwise_affine", **OPT)),
    "phi3": ({"original_max_position_embeddings": 64, "rope_parameters": PHI3_ROPE}, older_phi3),
    "qwen2_5_vl": (SECTIONED, published_qwen2_vl),
    "qwen2_vl": (SECTIONED, twice_qwen2_vl),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), (SECTIONED, older_text())),
    "exaone4": (THETA | {"sliding_window": 7, "sliding_window_pattern": 3}, older("layer_types")),
    "starcoder2": (THETA, older(**STARCODER2)),
    "smollm3": (
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7},
        older("no_rope_layers", "layer_types", max_window_layers=28, pretraining_tp=2),
    ),
}


def opened(path: Path, config: dict) -> Model:
    (path / "config.json").write_text(json.dumps(config))
    return open_model(str(path), init="random")


def config_of(family: str, **overrides: object) -> dict:
    return json.loads(tiny_config(family, **overrides).to_json_string(use_diff=False))


@pytest.mark.parametrize("family", OLDER)
def test_an_older_config_gives_the_same_architecture(family: str, tmp_path) -> None:
    overrides, make_older = OLDER[family]
    config = config_of(family, **overrides)
    newer = opened(tmp_path, config)
    make_older(config)
    assert opened(tmp_path, config).arch == newer.arch


LINEAR = {"rope_type": "linear", "factor": 4.0}
REFUSED = [
    ("cohere2", {"use_parallel_block": False}, "use_parallel_block is False"),
    ("cohere2", {"sliding_window": None}, "expected a length as sliding_window"),
    ("starcoder2", {"norm_type": "rms_norm"}, "norm_type is 'rms_norm'"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4}, "got 6 in 4 groups, of which it uses 2"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "at most 4 experts of a token, got 5"),
    ("deepseek_v3", {"topk_group": 4}, "got 6 in 3 groups, of which it uses 4"),
    ("deepseek_v32", {"layer_types": ["indexed_attention", "full_attention"] * 2}, "indexed_attention as layer_types"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "'all'.*implemented: vision"),
    ("gemma4_text", {"vocab_size_per_layer_input": 198}, "implemented: 199"),
    ("gemma4_text", {"num_kv_shared_layers": 4}, "expected a layer of each kind"),
    ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 10}}}, "none for other layers"),
    ("gemma4_text", {"per_layer_config": {"3": {"sliding_window": 3}}}, "3 sets sliding"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "expected 1 as attn_type_list"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
    ("gpt_neo", {"attention_layers": ["global", "block"] * 2}, "expected lists of global"),
    ("gpt_neo", {"attention_layers": None, "attention_types": [[["global"], 3]]}, "for 4 layers in total"),
    ("gpt_neo", {"attention_layers": None, "attention_types": [3]}, "for 4 layers in total"),
    ("gpt_neo", {"attention_layers": None, "attention_types": [[["global"], 10**15]]}, "for 4 layers in total"),
    ("gptj", {"rotary_dim": 10}, "an even number of a head's 8 dimensions to rotate, got 10"),
    ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim is 16"),
    ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings"),
    ("mistral3", {"text_config": {"model_type": "mistral4"}}, "'mistral4'.*implemented: mistral, ministral3"),
    ("ministral3", {"rope_parameters": LINEAR}, "has no 'llama_4_scaling_beta'"),
    ("qwen2_5_vl", {"hidden_size": 64}, "sets hidden_size=64"),
    ("lfm2", {"tie_embedding": False}, "tie_embedding is False"),
    ("lfm2", {"layer_types": ["sliding_attention"] * 4}, "expected conv or full_attention"),
    ("nemotron_h", {"layers_block_type": ["mlp", "moe"]}, r"'moe'\]; layers with experts are not implemented"),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "MX"}, "got 'MX'"),
    ("nemotron_h", {"n_groups": 4}, "expected a multiple of n_groups"),
    ("olmo3", {"rope_parameters": None, "rope_theta": 1e4}, "transformers 4 and 5 disagree"),
    ("olmo3", {"rope_parameters": LINEAR}, "rope_parameters sets rope_type='linear'"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "expected 4 numbers as no_rope_layers"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window with a sliding_window"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_configurations_that_are_not_implemented_are_refused(family: str, changes: dict, message: str, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, config_of(family) | changes)


@pytest.mark.parametrize("family", ["phi3", "gpt_oss"])
def test_random_weights_in_a_fused_tensor_differ(family: str, tmp_path) -> None:
    save_random(family, tmp_path)
    layers, *_ = open_model(str(tmp_path), init="random").load((LAST,), "float32", DEVICE)["runs"]
    gate, up = ("experts_gate", "experts_up") if family == "gpt_oss" else ("gate", "up")
    matrices = [*(layers["attention"][name] for name in ("q", "k", "v")), layers["mlp"][gate], layers["mlp"][up]]
    starts = {tuple(np.asarray(matrix[0]).ravel()[:4].tolist()) for matrix in matrices}
    assert len(starts) == len(matrices)


def test_latent_attention_has_parts_of_fused_tensors_and_heads_of_two_sizes(tmp_path) -> None:
    save_random("deepseek_v3", tmp_path)
    model = open_model(str(tmp_path))
    leaves = model.leaves((ActivationKey(2, Site.k),))["runs"][-1]["attention"]
    assert (leaves["kv_down"].part, leaves["k_rotary"].part) == (range(18), range(18, 24))
    assert {model.width(ActivationKey(0, site)) for site in (Site.q, Site.k)} == {64}
    assert {model.width(ActivationKey(0, site)) for site in (Site.v, Site.attn_z)} == {28}


def test_layers_for_multi_token_prediction_are_not_read(tmp_path) -> None:
    save_random("deepseek_v3", tmp_path)
    expected = loaded_leaves(open_model(str(tmp_path)), (LAST,))
    tensors = load_file(tmp_path / "model.safetensors")
    further = {
        f"model.layers.4.{name}.weight": np.ones((3, 4), np.float32) for name in ("eh_proj", "mlp.gate", "enorm")
    }
    save_file(tensors | further, tmp_path / "model.safetensors")
    assert_same_leaves(loaded_leaves(open_model(str(tmp_path)), (LAST,)), expected)
    edit_config(tmp_path, lambda config: config.update(num_nextn_predict_layers=0))
    with pytest.raises(CheckpointError, match=r"model.layers.4.eh_proj.weight is unexpected"):
        open_model(str(tmp_path))


def test_rows_are_no_longer_than_what_an_indexer_chooses(tmp_path) -> None:
    save_random("deepseek_v32", tmp_path, **MSCALE)
    model = open_model(str(tmp_path))
    assert model.max_positions == 96
    edit_config(tmp_path, lambda config: config.update(index_topk=2048))
    assert open_model(str(tmp_path)).arch == replace(model.arch, max_positions=512)  # the rotation is the same


def test_deepseek_chooses_experts_in_float32(tmp_path) -> None:
    """Corrections rounded to bfloat16 would choose other experts."""
    save_random("deepseek_v3", tmp_path)
    model = open_model(str(tmp_path))
    keys = tuple(ActivationKey(2, site) for site in (Site.router_logits, Site.router_weights))
    params = model.load(keys, "bfloat16", DEVICE)
    router = params["runs"][-1]["mlp"]
    assert {name: router[name].dtype for name in ("router", "router_correction")} == {
        "router": jnp.bfloat16,
        "router_correction": jnp.float32,
    }
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(router["router_correction"], model.checkpoint.rows(name, 0, 6))
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    captured = jax.jit(model.apply, static_argnames="keys")(params, tokens, jnp.ones_like(tokens), tokens, keys=keys)
    assert {str(values.dtype) for values in captured.values()} == {"float32"}
    logits = np.asarray(captured[keys[0]])
    assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(np.float32))


def test_a_multimodal_checkpoint_has_its_end_token_in_text_config(tmp_path) -> None:
    save_random("mistral3", tmp_path, eos_token_id=7)
    (tmp_path / "generation_config.json").unlink()
    assert end_tokens(open_model(str(tmp_path)), None, None) == (7,)


NEWER = "model.language_model."
PREFIXES = {  # in files of transformers 4 and 5
    **dict.fromkeys(("gemma3", "mistral3"), ("language_model.model.", NEWER)),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl"), ("model.", NEWER)),
    "gemma4_unified": (NEWER, NEWER),
    "llama4": ("language_model.model.", "language_model.model."),
}


@pytest.mark.parametrize("family", PREFIXES)
def test_a_language_model_has_the_same_weights_under_older_and_newer_names(family: str, tmp_path) -> None:
    """Published files have the names of transformers 4."""
    model = save_random(family, tmp_path / "older", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "newer", save_original_format=False)
    older, newer = (open_model(str(tmp_path / name)) for name in ("older", "newer"))
    assert (older.checkpoint.prefix, newer.checkpoint.prefix) == PREFIXES[family]
    assert any("vision" in name or "visual" in name for name in older.checkpoint.names)
    leaves = [loaded_leaves(model, (FINAL_NORM, LAST), with_head=True) for model in (older, newer)]
    assert_same_leaves(*leaves)
    for name, end in (("['final_norm']", "language_model.norm.weight"), ("['head']", "lm_head.weight")):
        weights = (p for key, p in model.named_parameters() if key.replace("model.model.", "model.").endswith(end))
        np.testing.assert_array_equal(leaves[0][name], next(weights).detach().numpy())


def assert_same_language_model(whole: Path, text: Path, vision: str) -> None:
    """Asserts that `whole`, which also has tensors for vision, has the architecture and weights of `text`."""
    model, expected = open_model(str(whole)), open_model(str(text))
    assert (model.arch, model.head) == (expected.arch, expected.head)
    assert any(vision in name for name in model.checkpoint.names)
    assert_same_leaves(loaded_leaves(model, (LAST,)), loaded_leaves(expected, (LAST,)))


VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2}
MTP = "mtp.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(("family", "name"), [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")])
def test_the_language_model_of_a_checkpoint_with_vision_is_read(family: str, name: str, tmp_path) -> None:
    """As published: with tensors for vision and multi-token prediction, and all experts in one tensor."""
    text = save_random(f"{family}_text", tmp_path / "text", num_key_value_heads=4)
    config = getattr(transformers, f"{name}Config")(text_config=text.config.to_dict(), vision_config=VISION)
    whole = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path / "whole", save_original_format=False)
    file = tmp_path / "whole" / "model.safetensors"
    save_file(load_file(file) | {MTP: np.ones(32, np.float32)}, file)
    published = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    edit_config(tmp_path / "whole", lambda config: config["text_config"].update(published))
    assert_same_language_model(tmp_path / "whole", tmp_path / "text", "visual")
    edit_config(tmp_path / "whole", lambda config: config["text_config"].update(attn_output_gate=False))
    with pytest.raises(CheckpointError, match="text_config: attn_output_gate is False"):
        open_model(str(tmp_path / "whole"))


def test_the_language_model_of_gemma4_is_read(tmp_path) -> None:
    """As published: with a vision tower, and key tensors of layers that share the keys of others."""
    text = save_random("gemma4_text", tmp_path / "text", final_logit_softcapping=30.0, **GEMMA4)
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision |= {"head_dim": 4, "num_hidden_layers": 1, "patch_size": 2, "position_embedding_size": 16}
    config = transformers.Gemma4Config(text_config=text.config.to_dict(), vision_config=vision, audio_config=None)
    whole = transformers.Gemma4ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.save_pretrained(tmp_path / "whole", save_original_format=False)
    file = tmp_path / "whole" / "model.safetensors"
    unused = "model.language_model.layers.3.self_attn.k_norm.weight"
    save_file(load_file(file) | {unused: np.ones(12, np.float32)}, file)
    assert_same_language_model(tmp_path / "whole", tmp_path / "text", "vision_tower")


@pytest.mark.parametrize("family", ["bert", "gpt2", "opt"])
def test_a_checkpoint_without_head_gives_the_same_weights(family: str, tmp_path) -> None:
    model = save_random(family, tmp_path / "with")
    model.base_model.save_pretrained(tmp_path / "without")
    with_head, without = (loaded_leaves(open_model(str(tmp_path / name)), (LAST,)) for name in ("with", "without"))
    assert_same_leaves(without, with_head)


def test_norms_named_as_in_tensorflow_are_read(tmp_path) -> None:
    save_random("bert", tmp_path)
    model = open_model(str(tmp_path))
    norm = "bert.encoder.layer.1.output.LayerNorm.weight"
    expected = model.checkpoint.rows(norm, 0, 32).copy()
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file)
    np.testing.assert_array_equal(open_model(str(tmp_path)).checkpoint.rows(norm, 0, 32), expected)


def test_the_program_of_alternating_layers_does_not_grow_with_depth(tmp_path) -> None:
    sizes = []
    for repeats in (2, 6):
        path = tmp_path / str(repeats)
        save_random("gemma3_text", path, num_hidden_layers=4, sliding_window=7, layer_types=ALTERNATING)

        def deepen(config: dict, repeats: int = repeats) -> None:
            config |= {"num_hidden_layers": 4 * repeats, "layer_types": ALTERNATING * repeats}

        edit_config(path, deepen)
        model = open_model(str(path), init="random")
        keys = (ActivationKey(4 * repeats - 1, Site.resid_post),)
        params = model.load(keys, "float32", DEVICE)
        ids = jnp.zeros((1, 16), jnp.int32)
        sizes.append(str(jax.make_jaxpr(lambda p, x, m=model, k=keys: m.apply(p, x, x, x, k))(params, ids)).count("\n"))
    assert sizes[0] == sizes[1]
