"""The attributes of tokenizer_config.json: applied, compared with tokenizer.json, without effect on ids, or refused.

tokenizer.json determines how a text is divided, as in transformers' fast tokenizers. An attribute that says something
else is refused, because versions and classes of transformers differ in which of the two they follow.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pipeline.core.errors import InputError
from pipeline.core.messages import shown

_REMEDY = "Remove the attribute if tokenizer.json alone gives the right ids."
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COMPARED = _words("add_prefix_space do_lower_case keep_accents strip_accents tokenize_chinese_chars")
# The others are about decoding, padding, truncation, other files, or how tokenizer.json was made.
_KNOWN = _COMPARED | _words(
    """
    added_tokens_decoder extra_special_tokens additional_special_tokens chat_template
    add_bos_token add_eos_token tokenizer_class auto_map model_max_length max_len max_length stride truncation
    truncation_side truncation_strategy padding padding_side pad_to_multiple_of pad_token_type_id model_input_names
    clean_up_tokenization_spaces errors trim_offsets spaces_between_special_tokens skip_special_tokens
    clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output return_token_type_ids
    return_attention_mask use_default_system_prompt response_schema response_template chat_control_tokens verbose
    name_or_path _name_or_path special_tokens_map_file tokenizer_file vocab_file merges_file vocab_size processor_class
    backend is_local local_files_only files_loaded legacy from_slow use_fast device_map slow_tokenizer_class
    transformers_version _commit_hash trust_remote_code wordpieces_prefix bos_token_id eos_token_id pad_token_id
    unk_token_id fast model_type max_len_single_sentence max_len_sentences_pair return_tensors
    """
)
# The only values of these with which transformers gives the ids of tokenizer.json.
_ALLOWED: dict[str, Any] = {
    **{"do_basic_tokenize": True, "remove_space": True, "split_by_punct": False, "fix_mistral_regex": False},
    **{"never_split": [], "sp_model_kwargs": {}, "init_inputs": [], "split_special_tokens": False},
}
_CLASSES_IN_PYTHON = _words(  # which divide texts even beside a tokenizer.json
    """
    BertJapaneseTokenizer BertweetTokenizer BioGptTokenizer ByT5Tokenizer CanineTokenizer CTRLTokenizer EsmTokenizer
    FlaubertTokenizer MistralCommonBackend MistralCommonTokenizer PhobertTokenizer RoCBertTokenizer XLMTokenizer
    """
)
_CLASSES_OF_FILES = ("None", "PreTrainedTokenizer", "TokenizersBackend")  # that take tokenizer.json as it is
_END_OF_TEXT = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_DEFAULT_TOKENS: dict[str, dict[str, str | None]] = {  # of classes, for attributes that tokenizer_config.json lacks
    "GPT2Tokenizer": _END_OF_TEXT,
    "GPTNeoXTokenizer": _END_OF_TEXT | {"pad_token": "<|padding|>"},
    "Qwen2Tokenizer": _END_OF_TEXT | {"pad_token": "<|endoftext|>", "bos_token": None},
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {name + "_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
}
_BERT_CLASSES = ("BertTokenizer", "ElectraTokenizer")  # whose defaults overrule tokenizer.json


class TokenizerSettings:
    """The attributes of a tokenizer_config.json, and of the files that transformers merges into it."""

    def __init__(self, where: str, config: Mapping[str, Any]) -> None:
        """Raises InputError for an attribute that is unknown, or not supported."""
        self._where = where
        self._config = dict(config)
        self._class = str(config.get("tokenizer_class")).removesuffix("Fast")  # PreTrainedTokenizer, GPT2Tokenizer, ...
        self._has_early_files = False
        for name, value in config.items():
            is_known = name in _KNOWN or name.endswith("_token")
            if not is_known and value is not None and value != _ALLOWED.get(name):
                raise InputError(f"{where}: {name} is {shown(value)}, which may change the ids of a text. {_REMEDY}")
        if self._class in _CLASSES_IN_PYTHON:
            raise InputError(f"{where}: tokenizer_class is {self._class}, whose Python code divides texts. {_REMEDY}")
        code = config.get("auto_map")
        if code and (not isinstance(code, dict) or code.get("AutoTokenizer")):
            raise InputError(f"{where}: auto_map names the folder's own code, which is never run. {_REMEDY}")
        extra = config.get("extra_special_tokens")
        self._own_tokens = extra if isinstance(extra, dict) else {}
        if not extra or self._own_tokens:
            self._config["extra_special_tokens"] = self._config.pop("additional_special_tokens", None)

    def add_early_files(self, special_tokens_map: Mapping[str, Any], added_tokens: Mapping[str, Any]) -> None:
        """Adds what special_tokens_map.json and added_tokens.json say. Raises InputError."""
        self._has_early_files = True
        extra, more = self._config["extra_special_tokens"] or [], special_tokens_map.get("extra_special_tokens") or []
        self._config |= special_tokens_map
        if isinstance(extra, list) and isinstance(more, list):
            self._config["extra_special_tokens"] = [*extra, *(token for token in more if token not in extra)]
        special = {token.content for token in (*self._named().values(), *self._extra())}
        self._config["added_tokens_decoder"] = {
            str(number): {"content": text, "special": text in special, "normalized": text not in special}
            for text, number in added_tokens.items()
        }
        self._config["extra_special_tokens"] = self._config["extra_special_tokens"] or special_tokens_map.get(
            "additional_special_tokens"
        )

    def named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... and the model's own: the variables that transformers gives to chat templates."""
        return {name: token.content for name, token in self._named().items()}

    def apply(self, tokenizer: Tokenizer) -> list[object]:
        """Changes the tokenizer as transformers does. Returns what has changed, as JSON. Raises InputError for what
        disagrees with the tokenizer."""
        self._compare(tokenizer)
        if self._class != "LlamaTokenizer" or all(part["type"] != "ByteLevel" for part in _parts(tokenizer)):
            self._config = _DEFAULT_TOKENS.get(self._class, {}) | self._config
        before = tokenizer.get_added_tokens_decoder()
        self._add_tokens(tokenizer)
        after = tokenizer.get_added_tokens_decoder()
        return [[i, repr(after[i])] for i in sorted(after) if repr(after[i]) != repr(before.get(i))]

    def _add_tokens(self, tokenizer: Tokenizer) -> None:
        """In transformers' order, which determines the ids (TokenizersBackend.__init__)."""
        existing = tokenizer.get_added_tokens_decoder()
        decoder = self._decoder() | (existing if self._has_early_files else {})
        lacking = [token.content for number, token in existing.items() if number not in decoder]
        if lacking and not self._has_early_files and self._class not in _CLASSES_OF_FILES:
            raise InputError(
                f"{self._where}: added_tokens_decoder lacks {shown(lacking[0])} of tokenizer.json, whose id then "
                "depends on the version of transformers. Add it, or remove added_tokens_decoder."
            )
        known_forms = {repr(token) for token in existing.values()}
        new = [token for _, token in sorted(decoder.items()) if repr(token) not in known_forms]
        known = {token.content for token in (*existing.values(), *new)}
        named = self._named().values()
        for token in (*named, *self._extra()):
            if token.content not in known:
                known.add(token.content)
                new.append(token)
        for token in new:
            token.special = token.special or token.content in {other.content for other in named}
        tokenizer.add_tokens(new)
        for number, token in decoder.items():
            if token.content and (given := tokenizer.token_to_id(token.content)) != number:
                raise InputError(
                    f"{self._where}: added_tokens_decoder gives {shown(token.content)} the id {number}, but with "
                    f"tokenizer.json it gets {given}. Correct one of them."
                )

    def _decoder(self) -> dict[int, AddedToken]:
        value = self._config.get("added_tokens_decoder") or {}
        try:
            return {int(number): _added_token(token) for number, token in value.items()}
        except (AttributeError, TypeError, ValueError):
            name = "added_tokens.json" if self._has_early_files else "added_tokens_decoder"
            raise wrong_value(self._where, name, value, "tokens by their id") from None

    def _named(self) -> dict[str, AddedToken]:
        values = dict.fromkeys(_NAMED_TOKENS) | {
            name: value
            for name, value in self._config.items()
            if name.endswith("_token") and not isinstance(value, bool)  # not add_bos_token
        }
        extra = self._config.get("extra_special_tokens")
        values |= self._own_tokens | (extra if isinstance(extra, dict) else {})
        return {name: self._token(name, value) for name, value in values.items() if value}

    def _extra(self) -> list[AddedToken]:
        extra = self._config.get("extra_special_tokens") or []
        if not isinstance(extra, list | dict):
            raise wrong_value(self._where, "extra_special_tokens", extra, "a list of tokens")
        return [] if isinstance(extra, dict) else [self._token("extra_special_tokens", token) for token in extra]

    def _token(self, name: str, value: object) -> AddedToken:
        try:
            return _added_token({"content": value} if isinstance(value, str) else value)
        except (AttributeError, TypeError):
            raise wrong_value(self._where, name, value, "a string, or an object with the string content") from None

    def _compare(self, tokenizer: Tokenizer) -> None:
        """Raises InputError for an attribute that tokenizer.json contradicts."""
        parts = _parts(tokenizer)
        kinds = {part["type"] for part in parts}
        spaces = {_adds_space(part) for part in parts} - {None}
        made_with = {"do_lower_case": "Lowercase" in kinds, "keep_accents": "StripAccents" not in kinds}
        made_with |= {"add_prefix_space": True in spaces} if spaces else {}
        claims = {name: self._config[name] for name in _COMPARED if self._config.get(name) is not None}
        for part in parts:
            if part["type"] == "BertNormalizer":
                strips = part["lowercase"] if part["strip_accents"] is None else part["strip_accents"]
                made_with |= {"do_lower_case": part["lowercase"], "strip_accents": strips}
                made_with |= {"tokenize_chinese_chars": part["handle_chinese_chars"]}
                if self._class.endswith(_BERT_CLASSES):
                    claims = {"do_lower_case": True, "tokenize_chinese_chars": True} | claims
                    claims.setdefault("strip_accents", claims["do_lower_case"])
        for name, value in made_with.items():
            if claims.get(name, value) != value:
                default = "" if name in self._config else ", the default of its tokenizer_class"
                raise InputError(
                    f"{self._where}: {name} is {shown(claims[name])}{default}, but tokenizer.json was made with "
                    f"{value}. Correct one of them; `AutoTokenizer.from_pretrained(...).save_pretrained(...)` makes "
                    "them agree."
                )


@contextmanager
def library_errors(subject: str) -> Iterator[None]:
    """Raises InputError for an error of the library `tokenizers`."""
    try:
        yield
    except BaseException as error:
        if not is_from_tokenizers(error):
            raise
        raise InputError(f"{subject}: {error!s:.300}. Download or save it again.") from error


def is_from_tokenizers(error: BaseException) -> bool:
    """Whether the library raises such errors: a plain Exception, a ValueError for text that is not UTF-8, an
    OverflowError for an id, or Rust's panic, which is not an Exception and cannot be imported."""
    is_panic = type(error).__name__ == "PanicException"
    return type(error) is Exception or isinstance(error, ValueError | OverflowError) or is_panic


def wrong_value(where: str, key: str, value: object, expected: str) -> InputError:
    return InputError(f"{where}: {key} is {shown(value)}, expected {expected}. Download or save it again.")


def _added_token(value: Any) -> AddedToken:
    """Raises AttributeError or TypeError."""
    fields = {"special": True} | {name: field for name, field in value.items() if name != "__type"}
    if not isinstance(fields.get("content"), str):
        raise TypeError
    return AddedToken(**fields)


def _parts(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The parts of the normaliser and the pre-tokenizer, as in tokenizer.json."""
    both = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    remaining, parts = [json.loads(component.__getstate__()) for component in both if component is not None], []
    while remaining:
        part = remaining.pop()
        parts.append(part)
        remaining += part.get("normalizers", part.get("pretokenizers", []))
    return parts


def _adds_space(part: Mapping[str, Any]) -> bool | None:
    """Whether a part puts a space before a text; None for a part of a kind that never does."""
    if part["type"] == "Metaspace":
        return part["prepend_scheme"] != "never"
    return part["type"] == "Prepend" or part.get("add_prefix_space")  # the normaliser ByteLevel lacks it
