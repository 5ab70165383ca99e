"""The tokenizer room against transformers, and its answers to bad folders."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from hybridsched.data import Tokenizer, stop_token_ids
from hybridsched.demo import task
from hybridsched.errors import DataError

# Written for this test; uses what templates of the Qwen family use: namespaces, slicing, loop variables, tojson,
# tool calls, macros, break, generation blocks, and variables that may be undefined.
QWEN_LIKE = """\
{%- macro head(role) -%}
<|im_start|>{{ role }}
{% endmacro -%}
{%- if tools %}
    {{- head('system') + 'Tools:\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if ns.last < 0 %}
    {{- raise_exception('a chat needs a user message') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {{- 'calls ' + message.tool_calls | tojson(indent=1) }}
    {%- endif %}
    {{- head(message['role']) }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content.split('</think>')[-1].lstrip('\n') if loop.index0 < ns.last else message.content }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- eos_token + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- head('assistant') }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{% endif %}
"""


def write_qwen_like(folder: Path) -> Path:
    """A byte-level BPE (bytes and a few merges), with a post-processor that adds a bos token when allowed to."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("o", "n")]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in ("<think>", "</think>")])
    bos = ("<|endoftext|>", backend.token_to_id("<|endoftext|>"))
    backend.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[bos])
    backend.enable_truncation(4)  # as some published files have it; must not cut prompts
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": [
            {"name": "default", "template": QWEN_LIKE},
            {"name": "tool_use", "template": "with tools: " + QWEN_LIKE},
        ],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_like(tmp_path_factory.mktemp("tokenizers") / "qwen")


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers") / "demo"
    task.write_tokenizer(folder)
    return folder


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


USER = {"role": "user", "content": "  on the <tin> é世🙂 \n in it\t"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "be <|im_end|> kind"}, USER],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, USER],
    [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": "<é>", "y": 1.5}}]},
        USER,
    ],
]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"tools": [{"type": "function", "function": {"name": "f", "description": "<b>"}}]},
    {"eos_token": "<|endoftext|>"},
    {"add_generation_prompt": False},
]


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_the_qwen_like_template_gives_the_tokens_of_transformers(qwen_folder: Path, variables: dict[str, Any]) -> None:
    ours, theirs = Tokenizer.from_folder(qwen_folder), reference(qwen_folder)
    for chat in CHATS:
        expected = theirs.apply_chat_template(
            chat, tokenize=True, return_dict=False, **({"add_generation_prompt": True} | variables)
        )
        assert expected == ours.apply_chat_template(chat, **variables)
        assert len(expected) > 4


def test_a_key_without_a_value_counts_as_absent(qwen_folder: Path) -> None:
    """parquet gives every row every key; transformers came to the same conclusion between 5.19 and 5.24."""
    tokenizer = Tokenizer.from_folder(qwen_folder)
    absent, empty = {"role": "user", "content": "x"}, {"role": "user", "content": "x", "tool_calls": None}
    assert tokenizer.apply_chat_template([absent]) == tokenizer.apply_chat_template([empty])


def test_the_demo_template_gives_the_tokens_of_transformers(demo_folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(demo_folder), reference(demo_folder)
    chat = [{"role": "user", "content": "count on from 4187"}]
    expected = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert expected == ours.apply_chat_template(chat) == task.prompt_ids(4187)


def test_a_saved_template_file_is_used(qwen_folder: Path, tmp_path: Path) -> None:
    reference(qwen_folder).save_pretrained(tmp_path)  # writes chat_template.jinja
    assert (tmp_path / "chat_template.jinja").is_file()
    ours = Tokenizer.from_folder(tmp_path)
    for variables in VARIABLES[:4]:
        expected = Tokenizer.from_folder(qwen_folder).apply_chat_template(CHATS[1], **variables)
        assert expected == ours.apply_chat_template(CHATS[1], **variables)


def test_a_template_file_wins_over_the_config(qwen_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    shutil.copytree(qwen_folder, folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert Tokenizer.from_folder(folder).render_chat([{"role": "user", "content": "hi"}]) == "hi!"


@pytest.mark.parametrize("text", ["", "on the tin", "  é世🙂\n", "<|im_start|>in<think>"])
def test_encode_and_decode_are_those_of_transformers(qwen_folder: Path, text: str) -> None:
    ours, theirs = Tokenizer.from_folder(qwen_folder), reference(qwen_folder)
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=True) == theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(np.array(ids, np.int32), skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_facts(qwen_folder: Path, demo_folder: Path) -> None:
    qwen, demo = Tokenizer.from_folder(qwen_folder), Tokenizer.from_folder(demo_folder)
    assert (qwen.bos_token_id, qwen.eos_token_id, qwen.pad_token_id, qwen.vocab_size) == (None, 263, 261, 266)
    assert (demo.bos_token_id, demo.eos_token_id, demo.pad_token_id, demo.vocab_size) == (1, 2, 0, 32)
    assert qwen.has_chat_template


def test_the_end_token_pads_when_nothing_else_does(qwen_folder: Path, tmp_path: Path) -> None:
    folder = copy_with(qwen_folder, tmp_path, pad_token=None)
    assert Tokenizer.from_folder(folder).pad_token_id == 263


def copy_with(source: Path, tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_a_plain_string_is_one_user_message(demo_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(demo_folder)
    assert tokenizer.encode_prompt("count on from 7") == task.prompt_ids(7)


def test_a_plain_string_without_template_is_encoded_as_it_is(demo_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(copy_with(demo_folder, tmp_path, chat_template=None))
    assert tokenizer.encode_prompt("count on from 7") == task.prompt_ids(7)[2:-1]


def test_chat_messages_without_template_are_refused_with_the_cure(demo_folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(copy_with(demo_folder, tmp_path, chat_template=None))
    with pytest.raises(DataError, match=r"has no chat template.*Add chat_template.jinja"):
        tokenizer.apply_chat_template([USER])


def test_the_template_may_refuse_messages(demo_folder: Path) -> None:
    with pytest.raises(DataError, match="refuses these messages: this model knows the roles user and assistant, not x"):
        Tokenizer.from_folder(demo_folder).apply_chat_template([{"role": "x", "content": ""}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content + 1 }}", "fails on these messages \\(TypeError"),
        ("{{ messages[0].missing.deeper }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages: .*append"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{% if %}", "is not valid Jinja: line 1"),
    ],
)
def test_a_broken_or_hostile_template_is_a_data_error(
    demo_folder: Path, tmp_path: Path, template: str, message: str
) -> None:
    folder = copy_with(demo_folder, tmp_path, chat_template=template)
    with pytest.raises(DataError, match=message):
        Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "hi"}])


def test_arguments_that_are_no_template_variables_are_refused(demo_folder: Path) -> None:
    with pytest.raises(DataError, match="apply_chat_template_kwargs: tokenize: not a variable"):
        Tokenizer.from_folder(demo_folder).apply_chat_template([USER], tokenize=False)


def test_today_can_be_printed(demo_folder: Path, tmp_path: Path) -> None:
    folder = copy_with(demo_folder, tmp_path, chat_template="{{ strftime_now('%%') }}")
    assert Tokenizer.from_folder(folder).render_chat([]) == "%"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json. Save it there once"),
        ("tokenizer.json", "{", "tokenizer.json is damaged"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is damaged \\(not JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "eos_token is '<end>', but tokenizer.json does not"),
        ("tokenizer_config.json", '{"chat_template": [1]}', "should be text or a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x", "template": ""}]}', "none named 'default'"),
    ],
)
def test_a_damaged_folder_is_named_with_the_cure(
    demo_folder: Path, tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(demo_folder, folder)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(DataError, match=message):
        Tokenizer.from_folder(folder).apply_chat_template([USER])


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist\. Set actor_rollout_ref.model.path"):
        Tokenizer.from_folder(tmp_path / "none")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [9, 5, 9]}, {"eos_token_id": 7}, (5, 9)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({"temperature": 1.0}, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": [7]}, (7,)),
        (None, None, ()),
    ],
)
def test_stop_token_ids(tmp_path: Path, generation: Any, config: Any, expected: tuple[int, ...]) -> None:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    assert stop_token_ids(tmp_path) == expected


def test_the_tokenizers_end_is_a_stop_token_too(demo_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_token_ids(tmp_path, Tokenizer.from_folder(demo_folder)) == (2, 7)


def test_a_wrong_stop_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(DataError, match="should be a token id or a list of them, it is '</s>'"):
        stop_token_ids(tmp_path)


def test_the_data_room_imports_no_heavy_library() -> None:
    code = (
        "import sys, hybridsched.data; print(sorted({'torch', 'transformers', 'pyarrow', 'h5py'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
