import pytest

from pipeline.core.sites import ActivationKey, Site, activation_keys


@pytest.mark.parametrize(
    ("key", "name", "hook_name"),
    [
        (ActivationKey(5, Site.resid_post), "blocks.5.resid_post", "blocks.5.hook_resid_post"),
        (ActivationKey(0, Site.attn_out), "blocks.0.attn_out", "blocks.0.hook_attn_out"),
        (ActivationKey(2, Site.q), "blocks.2.q", "blocks.2.attn.hook_rot_q"),
        (ActivationKey(2, Site.v), "blocks.2.v", "blocks.2.attn.hook_v"),
        (ActivationKey(0, Site.attn_z), "blocks.0.attn_z", "blocks.0.attn.hook_z"),
        (ActivationKey(0, Site.mlp_post), "blocks.0.mlp_post", "blocks.0.mlp.hook_post"),
        (ActivationKey(-1, Site.embed), "embed", "hook_embed"),
        (ActivationKey(-1, Site.final_norm), "final_norm", "ln_final.hook_normalized"),
    ],
)
def test_names_and_their_inverse(key, name, hook_name):
    assert key.name == name
    assert key.hook_name() == hook_name
    assert ActivationKey.parse(name) == key


@pytest.mark.parametrize(("layer", "site"), [(-1, Site.resid_post), (0, Site.embed), (3, Site.final_norm)])
def test_a_layer_belongs_to_the_sites_that_have_one(layer, site):
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
