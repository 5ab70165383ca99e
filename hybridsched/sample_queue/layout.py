"""The segment format as a table: every column with its type, unit and meaning. Format version 2.

A segment is an HDF5 file with one group per kind of row; the columns of a group are equally long 1-D contiguous
datasets. Ragged data is concatenated, and a count column says how many entries belong to each row (CF "contiguous
ragged array"). Rows are in writing order, so a cumulative sum of the counts gives the offsets.

    /samples        one row per sample          /responses   one row per response     /runs   one row per version run
    /prompt_tokens  concatenated over samples   /tokens      concatenated over responses
    /meta/json      UTF-8 JSON objects concatenated over samples (samples/meta_len bytes each):
                    prompt_uid, data_source, ground_truth, extra_info, failures {response index: text}

Within a version columns may be added; readers ignore what they do not know. A changed meaning is a new version.
Every dataset carries ``xxh3_64`` (of its bytes, 16 hex digits), ``units`` and ``description``. Attribute strings have
fixed length, because HDF5 protects those by its own checksum and variable-length ones not.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridsched.model import FinishReason

SCHEMA = "hybridsched.samples"
SCHEMA_VERSION = 2  #: version 1, never released, had crc32: twenty times slower than xxh3-64
CHECKSUM = "xxh3_64"  #: attribute of every dataset

FINISH_CODES: tuple[FinishReason, ...] = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED)


@dataclass(frozen=True, slots=True)
class Column:
    """One dataset of the format. dtype is a little-endian numpy string."""

    name: str
    dtype: str
    units: str
    description: str

    @property
    def group(self) -> str:
        """Name of the group the dataset lies in."""
        return self.name.partition("/")[0]


_FINISH_TEXT = ", ".join(f"{code} = {reason.value}" for code, reason in enumerate(FINISH_CODES))
_SECONDS = "seconds since 1970-01-01T00:00:00Z"

COLUMNS: tuple[Column, ...] = (
    Column("samples/sample_uid", "<i8", "1", "position in the run's prompt stream"),
    Column("samples/epoch", "<i4", "1", "pass over the data set"),
    Column("samples/issue", "<i4", "1", "how often the sample was issued before"),
    Column("samples/prompt_len", "<i4", "tokens", "row size in prompt_tokens"),
    Column("samples/n_responses", "<i4", "1", "row size in responses"),
    Column("samples/meta_len", "<i4", "bytes", "row size in meta/json"),
    Column("prompt_tokens/id", "<i4", "1", "prompt token ids"),
    Column("responses/sample", "<i4", "1", "row in samples"),
    Column("responses/n_tokens", "<i4", "tokens", "row size in tokens"),
    Column("responses/n_masked", "<i4", "tokens", "tokens with mask 0"),
    Column("responses/n_runs", "<i4", "1", "row size in runs"),
    Column("responses/reward", "<f8", "1", "reward, NaN = none"),
    Column("responses/finish", "|u1", "1", f"why it ended: {_FINISH_TEXT}"),
    Column("responses/oldest_lineage", "<i4", "1", "lineage of the oldest token's weights, -1 = no token"),
    Column("responses/oldest_number", "<i4", "1", "number of the oldest token's weights, -1 = no token"),
    Column("responses/newest_lineage", "<i4", "1", "lineage of the newest token's weights, -1 = no token"),
    Column("responses/newest_number", "<i4", "1", "number of the newest token's weights, -1 = no token"),
    Column("responses/t_start", "<f8", _SECONDS, "generation began"),
    Column("responses/t_end", "<f8", _SECONDS, "generation ended"),
    Column("tokens/id", "<i4", "1", "response token ids"),
    Column("tokens/logprob", "<f4", "nat", "log-probability of the token when it was sampled"),
    Column("tokens/mask", "|u1", "1", "1 = sampled by the policy"),
    Column("runs/response", "<i4", "1", "row in responses"),
    Column("runs/lineage", "<i4", "1", "lineage of the weights"),
    Column("runs/number", "<i4", "1", "number of the weights"),
    Column("runs/start", "<i4", "tokens", "first token of the run in its response"),
    Column("runs/end", "<i4", "tokens", "one past the last token of the run"),
    Column("runs/kept_kv", "|u1", "1", "1 = sampled on KV cache of older weights"),
    Column("meta/json", "|u1", "bytes", "UTF-8 JSON objects, concatenated over samples"),
)

TOKEN_COLUMNS = frozenset({"prompt_tokens/id", "tokens/id", "tokens/logprob", "tokens/mask"})
INFO_COLUMNS = tuple(column.name for column in COLUMNS if column.name not in TOKEN_COLUMNS)
GROUPS = tuple(dict.fromkeys(column.group for column in COLUMNS))
