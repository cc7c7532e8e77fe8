from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.composing import PACKAGE
from pipeline.core.errors import ArgumentError
from pipeline.core.sites import ActivationKey, ByName, Site, activation_keys, find_array, site_name, spelled
from pipeline.models.architecture import Experts
from pipeline.models.registry import open_model

RUNNING = Path(__file__).parents[2] / "docs" / "running.md"


HOOKS = {key.name: key.hook_name() for key in activation_keys((1, 3), tuple(Site))}
ALONE = {name: HOOKS[name] for name in ("blocks.3.resid_post", "blocks.3.attn_entropy", "embed")}


@pytest.mark.parametrize("name", HOOKS)
def test_arrays_are_found_by_our_and_by_transformerlens_names(name):
    for spelling in {name, name.removeprefix("blocks.")} | ({HOOKS[name]} if "attn_entropy" not in name else set()):
        assert find_array(spelling, HOOKS) == name
    key = ActivationKey.parse(name)
    assert spelled(key) == spelled(name) == name
    assert ByName({name: 5})[name] == ByName({name: 5})[key] == 5


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("resid_post", "blocks.3.resid_post"),
        ("hook_resid_post", "blocks.3.resid_post"),
        ("hook_embed", "embed"),
        ("blocks.3.attn.hook_pattern", None),  # which is the pattern, not its entropy
        ("blocks.3.hook_mlp_in", None),  # another place
        ("blocks.1.resid_post", None),
        ("", None),
    ],
)
def test_a_name_without_the_layer_is_found_if_only_one_array_has_it(given, found):
    assert find_array(given, ALONE) == found


@pytest.mark.parametrize(
    ("given", "site"),
    [
        *(("resid_post", "resid_post"), ("hook_resid_post", "resid_post"), ("attn.hook_z", "attn_z")),
        *(("attn.hook_pattern", "attn_pattern"), ("hook_mlp_in", "hook_mlp_in"), ("hook_q", "hook_q"), ("x", "x")),
    ],
)
def test_sites_may_be_named_as_transformerlens_hooks(given, site):
    assert site_name(given) == site


@pytest.mark.parametrize("given", [None, 5, (1,), (1, "q"), b"q", ["q"]])
def test_what_is_no_name_is_refused(given):
    with pytest.raises(ArgumentError):
        spelled(given)


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
    rows = table_rows(RUNNING.read_text())
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
