"""Makes one store of several: `python -m pipeline.merge from=... from=... store.path=...`, of one configuration.

For workers that could not fill one store: each is run with its share of the streams (`run.worker_index`) and a
`store.path` of its own. Blocks are copied as they are into the store at store.path, which may be a new one, one of the
sources, or what an interrupted merge has left. It is marked complete if every stream is at its end, and verified. The
sources stay.

Exit codes: 0 merged and sound, be it complete or not; 1 a problem was found, or a store cannot be reached; 2 the stores
do not fit together, or one is none; 42 interrupted, merge again to go on.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys

from tqdm import tqdm

from pipeline.core.errors import EXIT_OK, ConfigError, StoreError
from pipeline.store.check.reporting import verify_and_print
from pipeline.store.write.finalizing import finalize
from pipeline.store.write.merging import merge_stores

_USAGE = "usage: python -m pipeline.merge from=... [from=...] store.path=..."


def main(arguments: list[str]) -> int:
    """Merges the stores that `arguments` name and returns the exit code."""
    try:
        sources, path = parse(arguments)
        with tqdm(unit="block", desc="merge", file=sys.stderr) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            store = merge_stores(sources, path, progress)
        obstacle = finalize(store)
        code = verify_and_print(path)
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if code == EXIT_OK:
        print(f"{path}: {'complete' if obstacle is None else f'not completed: {obstacle}'}")
    return code


def parse(arguments: list[str]) -> tuple[list[str], str]:
    """The values of `from` and of `store.path`. Raises ConfigError."""
    given = [argument.partition("=")[::2] for argument in arguments]
    values = {key: [value.strip("'\"") for k, value in given if k == key] for key in ("from", "store.path")}
    sources, paths = values["from"], values["store.path"]
    if not sources or len(paths) != 1 or len(sources) + 1 != len(given) or not all((*sources, *paths)):
        raise ConfigError(_USAGE)
    return sources, paths[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
