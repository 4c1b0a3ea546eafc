"""Bytes to record batches. CPU only: no await, no I/O; a bad record is isolated and its neighbours flow."""

from __future__ import annotations

from importlib import import_module

import pyarrow as pa

from thalweg.arrow import name_of
from thalweg.codecs.codec import Codec
from thalweg.codecs.plain import ArrowCodec, BytesCodec
from thalweg.codecs.text import CsvCodec, JsonCodec
from thalweg.core.topology import CodecPlan
from thalweg.errors import Permanent

__all__ = ["Codec", "codec_of", "plan_faults"]


def plan_faults(plan: CodecPlan) -> list[str]:
    """What of `plan` its codec cannot do, one sentence each with the remedy; [] when it can run."""
    if plan.type not in ("json", "csv", "avro", "bytes", "arrow"):
        return [f"there is no codec {plan.type!r}; write json, csv, avro, bytes or arrow"]
    if plan.type in ("json", "csv"):
        if plan.schema is None:
            return [f"codec {plan.type} needs a schema; name its columns and their types"]
        flat = plan.type == "csv"
        faults = [
            f"column {field.name}: codec {plan.type} cannot read {name_of(field.type)}; declare it as string"
            for field in plan.schema
            if _unreadable(field.type, flat)
        ]
        if plan.type == "csv" and (len(plan.delimiter.encode()) != 1 or plan.delimiter in "\r\n"):
            faults.append(f"delimiter {plan.delimiter!r} is not one byte; write one, such as ',' or ';'")
        if plan.type == "csv" and (len(plan.quote.encode()) > 1 or plan.quote in ("\r", "\n", plan.delimiter)):
            faults.append(f"quote {plan.quote!r} is not one byte of its own; write '\"', or '' for none")
        return faults
    if plan.type == "avro" and plan.framing not in ("confluent", "none"):
        return [f"there is no framing {plan.framing!r}; write confluent or none"]
    if plan.type == "avro" and plan.framing == "none" and plan.avro_schema is None:
        return ["codec avro with framing none needs a schema file"]
    if plan.type == "avro" and plan.framing == "confluent" and plan.registry_url is None:
        return ["codec avro with framing confluent needs a registry; name its URL, or write framing: none and a schema file"]
    return []


def _unreadable(kind: pa.DataType, flat: bool) -> bool:
    types = pa.types
    if types.is_list(kind):
        return flat or _unreadable(kind.value_type, flat)
    if types.is_struct(kind):
        return flat or any(_unreadable(field.type, flat) for field in kind)
    return bool(types.is_map(kind))


def codec_of(plan: CodecPlan) -> Codec:
    """The codec for `plan`. Raises `Permanent` where it cannot be had: an extra not installed, a plan with faults."""
    faults = plan_faults(plan)
    if faults:
        raise Permanent("; ".join(faults))
    made: Codec
    if plan.type == "json":
        made = JsonCodec(plan)
    elif plan.type == "csv":
        made = CsvCodec(plan)
    elif plan.type == "bytes":
        made = BytesCodec(plan)
    elif plan.type == "arrow":
        made = ArrowCodec(plan)
    else:
        try:
            avro = import_module("thalweg.codecs.avro")
        except ModuleNotFoundError as error:
            raise Permanent(
                f"the avro codec needs {error.name}, which is not installed", remedy="pip install 'thalweg[avro]'"
            ) from None
        made = avro.AvroCodec(plan)
    return made
