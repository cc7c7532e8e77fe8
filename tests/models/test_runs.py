from dataclasses import replace

import pytest

from pipeline.config.composing import PACKAGE
from pipeline.core.sites import ActivationKey
from pipeline.models.architecture import DeltaNet, Experts
from pipeline.models.registry import open_model
from pipeline.models.runs import LayerRun, layer_runs

ARCH = replace(open_model(str(PACKAGE / "assets" / "tiny-qwen2")).arch, num_layers=8)
CASES = {
    "embed": [],
    "blocks.0.resid_pre": [],
    "blocks.0.resid_post": [LayerRun(0, 1)],
    "blocks.5.resid_pre": [LayerRun(0, 5)],
    "blocks.5.q": [LayerRun(0, 5), LayerRun(5, 6)],
    "blocks.0.attn_z": [LayerRun(0, 1)],
    "blocks.5.attn_out": [LayerRun(0, 5), LayerRun(5, 6)],
    "blocks.5.k blocks.5.mlp_out": [LayerRun(0, 5), LayerRun(5, 6)],
    "blocks.5.k blocks.6.resid_pre": [LayerRun(0, 5), LayerRun(5, 6)],
    "blocks.5.k blocks.6.q": [LayerRun(0, 5), LayerRun(5, 6), LayerRun(6, 7)],
    "blocks.5.resid_post": [LayerRun(0, 6)],
    "final_norm": [LayerRun(0, 8)],
    "embed final_norm blocks.7.resid_post": [LayerRun(0, 8)],
    "blocks.5.attn_out blocks.5.resid_post": [LayerRun(0, 5), LayerRun(5, 6)],
    "blocks.2.resid_post blocks.3.resid_pre": [LayerRun(0, 3)],
    "blocks.2.attn_out blocks.6.resid_post": [LayerRun(0, 2), LayerRun(2, 3), LayerRun(3, 7)],
    "blocks.0.resid_post blocks.1.resid_post": [LayerRun(0, 1), LayerRun(1, 2)],
}


@pytest.mark.parametrize("names", CASES)
def test_runs_cover_only_the_needed_layers(names: str) -> None:
    keys = [ActivationKey.parse(name) for name in names.split()]
    assert list(layer_runs(keys, ARCH)) == CASES[names]


SPARSE_CASES = {
    "embed": [],
    "blocks.0.resid_post": [LayerRun(0, 1)],
    "blocks.3.resid_post": [LayerRun(0, 1), LayerRun(1, 4)],
    "blocks.3.router_logits": [LayerRun(0, 1), LayerRun(1, 3), LayerRun(3, 4)],
    "blocks.6.resid_pre": [LayerRun(0, 1), LayerRun(1, 5), LayerRun(5, 6)],
    "final_norm": [LayerRun(0, 1), LayerRun(1, 5), LayerRun(5, 8)],
}


@pytest.mark.parametrize("names", SPARSE_CASES)
def test_dense_and_sparse_layers_are_in_separate_runs(names: str) -> None:
    arch = replace(ARCH, experts=Experts("DSSSSDDD", 4, 2, 8, sums_to_one=True))
    keys = [ActivationKey.parse(name) for name in names.split()]
    assert list(layer_runs(keys, arch)) == SPARSE_CASES[names]


PERIODIC_CASES = {  # pattern of layers: first, stop and period of each run
    "DDDADDDA": [(0, 8, 4)],
    "DDDADDDADD": [(0, 8, 4), (8, 10, 1)],
    "AADDDD": [(0, 2, 1), (2, 6, 1)],
    "DADDAAD": [(0, 1, 1), (1, 2, 1), (2, 4, 1), (4, 6, 1), (6, 7, 1)],
    "DADDDADDDA": [(0, 8, 4), (8, 9, 1), (9, 10, 1)],
}


@pytest.mark.parametrize("pattern", PERIODIC_CASES)
def test_repeated_patterns_of_layers_become_one_run(pattern: str) -> None:
    arch = replace(ARCH, num_layers=len(pattern), delta=DeltaNet(pattern, 2, 2, 8, 8, 4))
    runs = layer_runs([ActivationKey.parse("final_norm")], arch)
    assert [(run.first, run.stop, run.period) for run in runs] == PERIODIC_CASES[pattern]
    assert sorted(layer for run in runs for stack in run.stacks for layer in stack) == list(range(len(pattern)))
    assert all(len({pattern[layer] for layer in stack}) == 1 for run in runs for stack in run.stacks)
