"""Random damage to the files of a checkpoint. Opening any files must end in a model or in one clear error.

`python -m tests.models.fuzz_checkpoints FIRST STOP` runs the cases of these seeds and prints one JSON line for each.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from pipeline.config import composing
from pipeline.core.errors import PipelineError
from pipeline.core.sites import ActivationKey, Site
from pipeline.data.text.tokenizer import load_tokenizer
from pipeline.job.metrics import peak_rss_mib
from pipeline.models.registry import open_model
from tests.damaging import DEEP, damaged_bytes, damaged_value, to_json
from tests.models.hf_reference import PLACES, tiny_config
from tests.models.test_parity import FAMILIES

TINY = composing.PACKAGE / "assets" / "tiny-qwen2"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def write_checkpoint(folder: Path, rng: random.Random) -> list[str]:
    """Writes a sound checkpoint, in one file or two. Returns the names of the files that may be damaged."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, folder / name)
    if rng.random() < 0.5:
        shutil.copyfile(TINY / "model.safetensors", folder / "model.safetensors")
        weights = ["model.safetensors"]
    else:
        write_shards(folder)
        weights = [INDEX, SHARDS[0]]
    return ["config.json", "config.json", *weights, *weights, "tokenizer.json", "tokenizer_config.json"]


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Splits a safetensors file into header and tensors."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: bytes, tensors: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + tensors


def write_shards(folder: Path) -> None:
    header, tensors = split((TINY / "model.safetensors").read_bytes())
    header.pop("__metadata__", None)
    names = sorted(header)
    weight_map = {}
    for file, chosen in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        entries, parts, position = {}, [], 0
        for name in chosen:
            start, stop = header[name]["data_offsets"]
            entries[name] = header[name] | {"data_offsets": [position, position + stop - start]}
            parts.append(tensors[start:stop])
            position += stop - start
            weight_map[name] = file
        (folder / file).write_bytes(joined(json.dumps(entries).encode(), b"".join(parts)))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def damage_file(file: Path, rng: random.Random) -> str:
    """Damages one file. Returns what was done."""
    content = file.read_bytes()
    kind = rng.choice(["bytes", "value", "value", "value", "kind"]) if rng.random() < 0.9 else "length"
    if kind == "length" and file.suffix == ".safetensors":
        length = rng.choice([0, 1, 2, 7, len(content), len(content) - 8, 2**31, 2**63, 2**64 - 1, rng.randrange(9000)])
        file.write_bytes(length.to_bytes(8, "little") + content[8:])
    elif kind == "kind" and rng.random() < 0.4:
        _KINDS[rng.randrange(len(_KINDS))](file)
    elif kind in ("value", "kind"):
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            if file.suffix == ".safetensors":
                header, tensors = split(content)
                text = to_json(damaged_value(header, rng), rng)
                file.write_bytes(joined(text, tensors))
                break
            text = to_json(damaged_value(json.loads(content), rng), rng)
            file.write_bytes(text)
            if DEEP.encode() in content or b"[" * 50 in text or len(text) > 10**6:
                break
            content = text
    else:
        file.write_bytes(damaged_bytes(content, rng))
    return f"{kind} of {file.name}"


def _sparse(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.truncate(1 << 40)


def _replaced(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


_KINDS = [
    _sparse,
    _replaced(os.mkfifo),
    _replaced(os.mkdir),
    _replaced(lambda file: None),
    _replaced(lambda file: file.symlink_to(file)),
    _replaced(lambda file: file.symlink_to("/dev/zero")),
    _replaced(lambda file: file.symlink_to(file.parent)),
]


def write_family(folder: Path, rng: random.Random) -> str:
    """Writes a damaged config.json of a random family, to be opened with random weights."""
    name = rng.choice(sorted(PLACES))
    config = json.loads(tiny_config(name, **FAMILIES.get(name, {})).to_json_string())
    for _ in range(rng.choice([1, 1, 2, 3])):
        config = damaged_value(config, rng)
    (folder / "config.json").write_bytes(to_json(config, rng))
    return f"config.json of {name}"


def use(folder: Path, init: str) -> None:
    """Does what the start of a job does with a checkpoint: open, plan, identify, load a layer, tokenise."""
    model = open_model(str(folder), init=init)
    last = model.num_layers - 1
    keys = (ActivationKey(min(1, last), Site.resid_post),)
    model.weight_bytes((ActivationKey(last, Site.resid_post), *keys), "bfloat16")
    model.identity()
    if init == "random":
        return
    model.load(keys, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert model.checkpoint.generation_config is not None
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode(["A text, 12 words; naïve\n", ""])
    tokenizer.decode(ids[0])
    tokenizer.token_texts()
    assert tokenizer.chat_identity() != ""


def run_case(seed: int, folder: Path) -> dict[str, Any]:
    """Damages a new checkpoint in `folder` and uses it. `outcome`: ok, an exit code, or another exception."""
    rng = random.Random(seed)
    if rng.random() < 0.25:
        init, damages = "random", [write_family(folder, rng)]
    else:
        init, files = "checkpoint", write_checkpoint(folder, rng)
        damages = [damage_file(folder / rng.choice(files), rng)]
    began = time.process_time()  # of the CPU, since other processes may take turns
    message = ""
    try:
        use(folder, init)
        outcome: str | int = "ok"
    except PipelineError as error:
        outcome, message = error.exit_code, str(error)
    except BaseException as error:
        outcome, message = type(error).__name__, str(error)[:300]
    return {
        "seed": seed,
        "damages": damages,
        "outcome": outcome,
        "message": message,
        "cpu_s": time.process_time() - began,
        "peak_mib": peak_rss_mib(),
    }


def main(first: int, stop: int) -> None:
    for seed in range(first, stop):
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_case(seed, Path(folder))), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
