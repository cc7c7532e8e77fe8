"""The torch side of bench_gpu.py: python gpu_torch.py MODEL TOKENS ROWS. Does one measurement per line of input."""

import sys
import time
from pathlib import Path

import torch
from bench_gpu import LENGTH, answer, captured_layer
from transformers import AutoConfig, AutoModel


class _Stop(Exception):
    """Raised by the hook."""


def main() -> None:
    model_path, num_tokens, rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    config = AutoConfig.from_pretrained(model_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = AutoModel.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ids = torch.randint(0, config.vocab_size, (rows, LENGTH), device=device)
    on_host = torch.empty((2, rows, LENGTH, config.hidden_size), dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    kept: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: object, output: torch.Tensor | tuple) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)
        raise _Stop

    blocks = model.h if hasattr(model, "h") else model.layers
    blocks[captured_layer(config.to_dict())].register_forward_hook(keep)

    @torch.inference_mode()
    def run() -> float:
        steps = max(1, num_tokens // (rows * LENGTH))
        began = time.perf_counter()
        for step in range(steps):
            try:
                model(ids, use_cache=False)
            except _Stop:
                on_host[step % 2].copy_(kept.pop(), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return steps * rows * LENGTH / (time.perf_counter() - began)

    run()
    answer(torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    for _ in sys.stdin:
        answer(run())


if __name__ == "__main__":
    main()
