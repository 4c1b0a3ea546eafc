"""What the runtime asks of a codec. Sans-I/O: a codec names the schemas it lacks, the runtime fetches and teaches them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import pyarrow as pa

from thalweg.core.batch import Decoded
from thalweg.ports import RegisteredSchema


class Codec(Protocol):
    """Turns an envelope's values into columns. One instance a source; not shared between threads at once."""

    def wants(self, envelope: pa.RecordBatch) -> frozenset[Hashable]:
        """Schema references in this envelope that were not taught yet: `int` ids, or `str` GUIDs."""
        ...

    def learn(self, reference: Hashable, schema: RegisteredSchema | None) -> None:
        """Teach one. None: the registry says there is no such schema, so its records are refused (`schema-unknown`)."""
        ...

    def decode(self, envelope: pa.RecordBatch) -> Decoded:
        """Decode all of it. Never raises for bad payload: bad records are in `Decoded.refused`, their neighbours in `rows`.

        The schema of `rows` does not depend on the data, except where a registry brings a newer schema.
        """
        ...
