"""Prompts: files to rows (``prompts``), rows to tokens (``tokenizer``), tokens to a seeded stream (``stream``)."""

from __future__ import annotations

from hybridsched.data.prompts import LoadReport, MalformedRow, PromptRow, load_rows
from hybridsched.data.stream import PromptSet, PromptStream, SyntheticPrompts, synthetic_prompts
from hybridsched.data.tokenizer import Tokenizer, stop_token_ids

__all__ = [
    "LoadReport",
    "MalformedRow",
    "PromptRow",
    "PromptSet",
    "PromptStream",
    "SyntheticPrompts",
    "Tokenizer",
    "load_rows",
    "stop_token_ids",
    "synthetic_prompts",
]
