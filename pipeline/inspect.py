"""What is in a store? `python -m pipeline.inspect store.path=... [inspect.html=page.html]` looks at it.

Prints what the store holds and, from a sample of its rows, the norms of its activations; `inspect.html` writes that and
pictures as one HTML page that loads nothing else, `inspect.png` the charts alone, where matplotlib is installed (the
extra `png`). Works on unfinished and on remote stores.

    inspect.tokens     token slots to sample (16384)
    inspect.seed       of the sample (0)
    inspect.tokenizer  where tokenizer.json is; otherwise where the run had it; token ids are shown if it is not there

Exit codes: 0 done; 1 the store cannot be reached; 2 there is no store, or a setting is wrong; 42 interrupted.
"""

from pipeline.cluster.startup import prepare_process

if __name__ == "__main__":
    prepare_process()

import sys
from dataclasses import fields

from pipeline.core.addresses import unusable_path
from pipeline.core.errors import EXIT_OK, ConfigError, PipelineError
from pipeline.inspection.report import Settings, inspect

USAGE = "python -m pipeline.inspect store.path=... [inspect.html=...] [inspect.png=...] [inspect.tokens=16384]"


def main(arguments: list[str]) -> int:
    """Inspects the store that `arguments` name and returns the exit code."""
    try:
        inspect(parse(arguments))
    except PipelineError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return EXIT_OK


def parse(arguments: list[str]) -> Settings:
    """Raises ConfigError."""
    keys = {"store.path": "path"} | {f"inspect.{f.name}": f.name for f in fields(Settings) if f.name != "path"}
    given: dict[str, str | int] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key not in keys or not value:
            raise ConfigError(f"{argument!r} is no setting. Usage: {USAGE}")
        given[keys[key]] = value.strip("'\"")
    if "path" not in given:
        raise ConfigError(f"usage: {USAGE}")
    for name in {"html", "png"} & set(given):
        if reason := unusable_path(str(given[name]), f"inspect.{name}"):
            raise ConfigError(reason)
    for name, least in (("tokens", 1), ("seed", 0)):
        if name in given:
            text = str(given[name])
            if not text.isdecimal() or int(text) < least:
                raise ConfigError(f"inspect.{name}={text}: expected a whole number, at least {least}.")
            given[name] = int(text)
    return Settings(**given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
