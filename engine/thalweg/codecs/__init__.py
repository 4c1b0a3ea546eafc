"""Bytes to record batches. CPU only: no await, no I/O; a bad record is isolated and its neighbours flow."""

from __future__ import annotations

from importlib import import_module

from thalweg.codecs.codec import Codec
from thalweg.core.topology import CodecPlan
from thalweg.errors import Permanent


def codec_of(plan: CodecPlan) -> Codec:
    """The codec of a source. Avro's libraries are an extra: `Permanent` says so where they are missing."""
    from thalweg.codecs.plain import PlainCodec
    from thalweg.codecs.text import CsvCodec, JsonCodec

    if plan.type == "avro":
        try:
            made: Codec = import_module("thalweg.codecs.avro").AvroCodec(plan)
        except ModuleNotFoundError as error:
            raise Permanent(
                f"codec avro needs {error.name}, which is not installed", remedy="pip install 'thalweg[avro]'"
            ) from None
        return made
    if plan.type == "json":
        return JsonCodec(plan)
    return CsvCodec(plan) if plan.type == "csv" else PlainCodec(plan)


__all__ = ["Codec", "codec_of"]
