"""Text to tokens and back, with the chat template, from the files of a Hugging Face folder.

Owns: reading tokenizer.json, tokenizer_config.json and chat_template.jinja, and rendering the template in a sandbox
the way the transformers library does (same variables, whitespace rules, filters), so that the tokens are the same.
Invariants: no truncation or padding ever; the chat template decides about special tokens, nothing is added to its
text; unknown or damaged files end in a DataError that names the file and the cure.
Does not: import torch or transformers, contact a hub, or tokenize in threads (the controller must stay light).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from hybridsched.errors import DataError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: Arguments of transformers' function that are no template variables; passing them would silently do nothing.
_NOT_TEMPLATE_VARIABLES = frozenset(
    (
        *("messages", "conversation", "chat_template", "tokenize", "tokenizer_kwargs", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "continue_final_message"),
    )
)


class Tokenizer:
    """The tokenizer of one model. Make it with ``from_folder``."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        source: str,
    ) -> None:
        """`special_tokens`: bos_token, eos_token, ... as text. `chat_templates`: name -> Jinja source ("default")."""
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special = dict(special_tokens)
        self._source = source
        self._templates = {name: self._compile(name, text) for name, text in chat_templates.items()}
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        for name, token in self._special.items():
            if token not in vocabulary:
                raise DataError(
                    f"{source}: {name} is {token!r}, but tokenizer.json does not have that token. "
                    "The folder mixes files of two models, or was saved incompletely: save it again."
                )
        self._ids = {name: vocabulary[token] for name, token in self._special.items()}

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json`` (needed), ``tokenizer_config.json`` and ``chat_template.jinja`` (if there).

        Raises DataError when the folder or tokenizer.json is missing, or a file is damaged.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise DataError(f"tokenizer folder {folder} does not exist. Set actor_rollout_ref.model.path to it.")
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise DataError(
                f"{folder} has no tokenizer.json. Save it there once with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(folder), or set actor_rollout_ref.model."
                "tokenizer_path to a folder that has one."
            )
        try:
            backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror or error}. Check its permissions.") from error
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise DataError(f"{file} is damaged: {error}. Copy or save the tokenizer again.") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(_read_json(folder / "special_tokens_map.json"), config)
        templates = _chat_templates(folder, config)
        return cls(backend, special_tokens=special, chat_templates=templates, source=str(folder))

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token, None when the tokenizer names none."""
        return self._ids.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the begin-of-sequence token, None when the tokenizer names none."""
        return self._ids.get("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token; the end-of-sequence token stands in when there is none."""
        return self._ids.get("pad_token", self.eos_token_id)

    @property
    def vocab_size(self) -> int:
        """Largest token id + 1, added tokens included (a model's table may be padded beyond it)."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        """True when chat messages can be rendered."""
        return bool(self._templates)

    # -- text <-> tokens -----------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text` as it is; `add_special_tokens` lets the tokenizer's post-processor add e.g. bos."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids (numpy integers too). Ids the tokenizer does not know give no text."""
        known = [int(i) for i in ids]
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of chat `messages` under the chat template.

        Variables as in transformers: ``add_generation_prompt`` (here True unless given), ``tools``, ``documents``,
        the special tokens by name, and whatever else the template understands (``enable_thinking``, ...).
        Raises DataError without a chat template, or with the template's own complaint.
        """
        self.check_template_variables(variables)
        template = self._template_for(variables.get("tools"))
        context: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        context |= self._special
        context |= variables
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            return template.render(messages=plain, **context)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template of {self._source} refuses these messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise DataError(
                f"the chat template of {self._source} fails on these messages ({type(error).__name__}: {error}). "
                "Check the messages and data.apply_chat_template_kwargs against the template."
            ) from error

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of ``render_chat(messages, **variables)``."""
        return self.encode(self.render_chat(messages, **variables))

    def encode_prompt(self, prompt: Sequence[Mapping[str, Any]] | str, **variables: Any) -> list[int]:
        """Tokens of one prompt of the data set.

        Chat messages go through the chat template. A plain string does too, as one user message; without a chat
        template it is encoded as it is.
        """
        if not isinstance(prompt, str):
            return self.apply_chat_template(prompt, **variables)
        if self.has_chat_template:
            return self.apply_chat_template([{"role": "user", "content": prompt}], **variables)
        return self.encode(prompt)

    # -- templates -----------------------------------------------------------------------------------------------------

    def check_template_variables(self, variables: Mapping[str, Any]) -> None:
        """Raise DataError for names that chat templates do not see."""
        wrong = _NOT_TEMPLATE_VARIABLES & variables.keys()
        if wrong:
            raise DataError(
                f"data.apply_chat_template_kwargs: {', '.join(sorted(wrong))}: not a variable of chat templates, it "
                "would have no effect here. Remove it."
            )

    def require_chat_template(self) -> None:
        """Raise DataError when there is no chat template."""
        if not self._templates:
            raise DataError(
                f"{self._source} has no chat template, but the prompts are chat messages. Add chat_template.jinja to "
                "the folder, set actor_rollout_ref.model.tokenizer_path to the tokenizer of the chat model, or use "
                "plain strings as prompts."
            )

    def _template_for(self, tools: Any) -> jinja2.Template:
        self.require_chat_template()
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise DataError(
                f"{self._source} has chat templates {', '.join(sorted(self._templates))}, but none named 'default'."
            )
        return self._templates["default"]

    def _compile(self, name: str, text: str) -> jinja2.Template:
        try:
            return _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"chat template {name!r} of {self._source} is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error


def stop_token_ids(folder: str | Path, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """Ids that end a response, ascending and without repetition.

    ``eos_token_id`` (one or a list) of generation_config.json, or of config.json when the former says nothing; plus
    the eos token of `tokenizer`. Empty when nobody names one. Raises DataError for a damaged file or value.
    """
    where = Path(folder).expanduser()
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(where / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise DataError(f"{where / name}: eos_token_id should be a token id or a list of them, it is {value!r}.")
        found.update(ids)
        break
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


# -- files ------------------------------------------------------------------------------------------------------------


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty when the file is not there."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}. Check its permissions.") from error
    except ValueError as error:
        raise DataError(f"{file} is damaged (not JSON: {error}). Copy or save the folder again.") from error
    if not isinstance(value, dict):
        raise DataError(f"{file} is damaged (not a JSON object). Copy or save the folder again.")
    return value


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name as text; later sources win. A token is text or {"content": text, ...}."""
    tokens: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                tokens[name] = value
    return tokens


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name: files win over tokenizer_config.json, as in transformers."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found = {name: file for name, file in files.items() if file.is_file()}
    if found:
        try:
            return {name: file.read_text(encoding="utf-8") for name, file in found.items()}
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"a chat template in {folder} cannot be read: {error}") from error
    value = config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        try:
            return {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError) as error:
            raise DataError(
                f"{folder / 'tokenizer_config.json'}: chat_template should be text or a list of "
                "{name, template} objects."
            ) from error
    return {}


# -- the sandbox ------------------------------------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant says; for prompts it is a plain block."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> jinja2.Environment:
    """Jinja as chat templates expect it: immutable sandbox, trimmed blocks, and four helpers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escaping, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    # Templates that print today's date do so in transformers too; data.apply_chat_template_kwargs can fix the date.
    return datetime.datetime.now().strftime(pattern)  # local time, as the templates expect
