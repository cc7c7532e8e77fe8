from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.composing import PACKAGE
from pipeline.core import sites
from pipeline.core.sites import ActivationKey, Site, activation_keys
from pipeline.models.architecture import Experts
from pipeline.models.registry import open_model

RUNNING = Path(__file__).parents[2] / "docs" / "running.md"


@pytest.mark.parametrize(
    ("key", "name", "hook_name"),
    [
        (ActivationKey(5, Site.resid_post), "blocks.5.resid_post", "blocks.5.hook_resid_post"),
        (ActivationKey(0, Site.attn_out), "blocks.0.attn_out", "blocks.0.hook_attn_out"),
        (ActivationKey(2, Site.q), "blocks.2.q", "blocks.2.attn.hook_rot_q"),
        (ActivationKey(2, Site.v), "blocks.2.v", "blocks.2.attn.hook_v"),
        (ActivationKey(0, Site.attn_z), "blocks.0.attn_z", "blocks.0.attn.hook_z"),
        (ActivationKey(0, Site.head_out), "blocks.0.head_out", "blocks.0.attn.hook_result"),
        (ActivationKey(0, Site.mlp_post), "blocks.0.mlp_post", "blocks.0.mlp.hook_post"),
        (ActivationKey(-1, Site.embed), "embed", "hook_embed"),
        (ActivationKey(-1, Site.final_norm), "final_norm", "ln_final.hook_normalized"),
    ],
)
def test_names_are_parsed_into_the_same_key(key, name, hook_name):
    assert key.name == name
    assert key.hook_name() == hook_name
    assert ActivationKey.parse(name) == key


@pytest.mark.parametrize(("layer", "site"), [(-1, Site.resid_post), (0, Site.embed), (3, Site.final_norm)])
def test_a_layer_that_does_not_match_the_site_is_refused(layer, site):
    with pytest.raises(ValueError, match=site):
        ActivationKey(layer, site)


def test_keys_come_in_the_order_of_the_forward_pass():
    sites = (Site.final_norm, Site.resid_post, Site.mlp_post, Site.attn_z, Site.k, Site.resid_pre, Site.embed)
    keys = activation_keys((3, 1), sites)
    assert [key.name for key in keys] == [
        "embed",
        *(f"blocks.1.{site}" for site in ("resid_pre", "k", "attn_z", "mlp_post", "resid_post")),
        *(f"blocks.3.{site}" for site in ("resid_pre", "k", "attn_z", "mlp_post", "resid_post")),
        "final_norm",
    ]


def table_rows(text: str) -> list[list[str]]:
    """The cells of the rows that begin with a site's name."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [row for row in rows if row[0].strip("`") in list(Site)]


def test_the_documents_have_the_table_of_sites():
    rows = table_rows(sites.__doc__)
    assert rows == table_rows(RUNNING.read_text())
    assert [row[0] for row in rows] == [f"`{site}`" for site in Site]
    model = open_model(str(PACKAGE / "assets" / "tiny-qwen2"))
    model = replace(model, arch=replace(model.arch, experts=Experts("S" * 6, 5, 3, 8, sums_to_one=True)))
    arch = model.arch
    sizes = {"D": arch.d_model, "N * H": arch.num_heads * arch.head_dim, "K * H": arch.num_kv_heads * arch.head_dim}
    sizes |= {"F": arch.d_mlp, "N": arch.num_heads, "E": 5, "A": 3, "A * D": 3 * arch.d_model}
    sizes |= {"N * D": arch.num_heads * arch.d_model, "N * T": arch.num_heads * 7}
    for site, (_, _, width, hook) in zip(Site, rows, strict=True):
        key = ActivationKey(3 if site.per_layer else -1, site)
        assert model.width(key, 7) == sizes[width]
        assert hook.replace("L", "3") == f"`{key.hook_name()}`"
