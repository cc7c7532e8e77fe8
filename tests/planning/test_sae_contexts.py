"""What SAEs were trained on is compared with the run's model, contexts and special tokens; differences are said."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import composing
from pipeline.config.choices import Contexts, Packing, Positions, Windows
from pipeline.config.schema import BatchConfig, CaptureConfig, ModelConfig, ParquetData, RunConfig
from pipeline.core.errors import ConfigError
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.models.registry import open_model
from pipeline.planning.encoders import open_encoders
from pipeline.planning.sae_contexts import compare_contexts, with_sae_contexts
from tests.models import sae_files

ASSETS = composing.PACKAGE / "assets/tiny-qwen2"
SAME = {"model_name": "Owner/Tiny-Model", "hook_name": "blocks.1.hook_resid_post", "context_size": 128}
SAME |= {"prepend_bos": True, "dataset_path": "owner/texts", "disable_concat_sequences": False}
RUN = RunConfig(
    data=ParquetData(path="owner/texts", prefix="<|endoftext|>"),
    batch=BatchConfig(length=128, packing=Packing.concat, windows=Windows.restart),
    capture=CaptureConfig(layers=[1, 2], sites=["resid_post"]),
)
NO_BOS = replace(RUN, data=replace(RUN.data, prefix=None))
PACKED = replace(RUN, batch=BatchConfig(length=128))
LAST = replace(RUN, capture=replace(RUN.capture, positions=Positions.last))
CASES: dict[str, tuple[dict, RunConfig, list[str]]] = {
    "the same": ({}, RUN, []),
    "nothing known": (dict.fromkeys(SAME), replace(NO_BOS, batch=BatchConfig()), []),
    "model": ({"model_name": "gpt2-small"}, RUN, ["was trained on gpt2-small, but model.path is .*tiny-model"]),
    "length": ({"context_size": 1024}, RUN, [r"of 1,024 tokens, but batch.length is 128. Set batch.length=1024"]),
    "no BOS here": ({}, NO_BOS, ["begin with BOS, but no document.* data.prefix is None. Set data.prefix"]),
    "no BOS there": ({"prepend_bos": False}, RUN, ["without BOS.*Set data.special_tokens=none and data.prefix=null"]),
    "packed": ({}, PACKED, ["all begin with BOS.*Set batch.windows=restart", "joined documents.*packing is pack"]),
    "alone": ({"disable_concat_sequences": True}, RUN, ["of one document, but batch.packing is concat"]),
    "separator": (
        {"sequence_separator_token": "eos"},
        RUN,
        ["the token eos between documents, but batch.separator is"],
    ),
    "special tokens": ({"exclude_special_tokens": True}, RUN, ["without special tokens.*TokenFilter.drop_tokens"]),
    "some tokens": ({"exclude_special_tokens": [0, 7]}, RUN, [r"without the tokens \[0, 7\]"]),
    "positions": ({"seqpos_slice": [5, None]}, RUN, [r"the positions slice\(5, None\) of contexts"]),
}


def open_case(tmp_path: Path, config: RunConfig, *changes: dict):
    """The configuration with a model of 3 layers and an SAE for each of `changes` of what it was trained on."""
    folder = tmp_path / "tiny-model"
    folder.mkdir()
    shape = {"model_type": "qwen2", "hidden_size": sae_files.D_IN, "intermediate_size": 24, "vocab_size": 64}
    shape |= {"num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3}
    (folder / "config.json").write_text(json.dumps(shape))
    addresses = {}
    for layer, changed in enumerate(changes, 1):
        metadata = {name: value for name, value in (SAME | changed).items() if value is not None}
        hook = {"hook_name": f"blocks.{layer}.hook_resid_post"} if "hook_name" in metadata else {}
        sae = tmp_path / f"sae-{layer}"
        sae_files.write_saelens(sae, "standard", np.random.default_rng(0), metadata=metadata | hook)
        addresses[f"blocks.{layer}.resid_post"] = str(sae)
    capture = replace(config.capture, encode=addresses)
    config = replace(config, model=ModelConfig(path=str(folder)), capture=capture)
    encoders = open_encoders(capture, open_model(str(folder), init="random"))
    return config, encoders, load_tokenizer(str(ASSETS), prefix=config.data.prefix)


@pytest.mark.parametrize("case", CASES)
def test_differences_are_said_once(case: str, tmp_path: Path, caplog):
    changed, config, expected = CASES[case]
    config, encoders, tokenizer = open_case(tmp_path, config, changed, changed)
    caplog.set_level(logging.INFO)
    compare_contexts(config, encoders, tokenizer)
    assert len(caplog.messages) == len(expected), caplog.messages
    for message, pattern in zip(caplog.messages, expected, strict=True):
        assert re.search(pattern, message)
        assert message.startswith("capture.encode: the SAE of blocks.1.resid_post and of 1 more")


JOINED = BatchConfig(length=128, packing=Packing.concat, windows=Windows.restart)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{}, {}], JOINED),
        ([{"sequence_separator_token": "bos"}], JOINED),
        ([{"sequence_separator_token": "eos"}], replace(JOINED, separator="<|endoftext|>")),
        ([{"sequence_separator_token": 1}], replace(JOINED, separator="<|im_start|>")),
        ([{"prepend_bos": False}], replace(JOINED, windows=Windows.continued, separator="")),
        (
            [{"prepend_bos": False, "sequence_separator_token": "bos"}],
            replace(JOINED, windows=Windows.continued, separator="<|endoftext|>"),
        ),
        ([{"disable_concat_sequences": True}], replace(JOINED, packing=Packing.pack)),
        ([{"disable_concat_sequences": None, "prepend_bos": None}], BatchConfig(length=128, packing=Packing.pad)),
        ([{}, {"context_size": 64}], "were trained on different contexts"),
        ([{"context_size": None}], "do not tell their contexts' size"),
        ([{"sequence_separator_token": "sep"}], "has no token sep"),
    ],
)
def test_rows_are_set_from_what_saes_were_trained_on(changes: list[dict], expected, tmp_path: Path, caplog):
    batch = BatchConfig(length=7, packing=Packing.pad, contexts=Contexts.sae)
    config, encoders, tokenizer = open_case(tmp_path, replace(RUN, batch=batch), *changes)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            with_sae_contexts(config, encoders, tokenizer)
        return
    found = with_sae_contexts(config, encoders, tokenizer)
    assert found.batch == replace(expected, contexts=Contexts.sae)
    caplog.clear()
    compare_contexts(found, encoders, tokenizer)
    assert not [message for message in caplog.messages if "batch." in message]
