"""A schema registry over HTTP, in Confluent's REST dialect (Karapace and Apicurio's compatibility API speak it too).

Translates one lookup into requests and answers into a schema, None or an error class. It never caches and never tries
again: the runtime does.

Paths: `/schemas/ids/{id}`, `/schemas/guids/{guid}`, and for what a schema refers to
`/subjects/{subject}/versions/{version}?deleted=true` (a schema in use may refer to a version deleted softly since), resolved
transitively. An error's body is `{"error_code": …, "message": …}`; codes 404xx say that a thing does not exist, while a bare 404
means that there is no such path, so no registry there.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import httpx

from thalweg.errors import Permanent, Transient
from thalweg.ports import RegisteredSchema

ACCEPT: Final = "application/vnd.schemaregistry.v1+json, application/json"
TIMEOUT_S: Final = 10.0
REFERENCES_MAX: Final = 1_000  # of one schema, transitively; more is a fault of the registry
OPTIONS: Final = frozenset({"username", "password", "token", "ca", "timeout_s"})


class HttpSchemaRegistry:
    """`options`: `username` and `password` (basic) or `token` (bearer), `ca` (path of a PEM bundle), `timeout_s` (a request).

    Raises `Permanent` for options that make no sense.
    """

    def __init__(self, url: str, options: Mapping[str, str], *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        unknown = sorted(set(options) - OPTIONS)
        if unknown:
            raise Permanent(f"schema registry: unknown option {unknown[0]}", remedy=f"Write one of {', '.join(sorted(OPTIONS))}")
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise Permanent(f"schema registry: its URL cannot be read: {error}") from None
        if base.scheme not in ("http", "https") or not base.host:
            raise Permanent("schema registry: its URL must begin with http:// or https:// and name a host")
        user, secret = options.get("username", base.username), options.get("password", base.password)
        auth = httpx.BasicAuth(user, secret) if user else None
        headers = {"Accept": ACCEPT}
        if "token" in options:
            if auth is not None:
                raise Permanent("schema registry: both a username and a token are given", remedy="Keep one of them")
            headers["Authorization"] = f"Bearer {options['token']}"
        self.url = str(base.copy_with(username=None, password=None, query=None, fragment=None)).rstrip("/")
        self._client = httpx.AsyncClient(
            auth=auth,
            headers=headers,
            timeout=_seconds(options.get("timeout_s")),
            verify=_trust(options.get("ca")) if base.scheme == "https" else False,
            follow_redirects=True,
            transport=transport,
        )

    async def by_id(self, schema_id: int) -> RegisteredSchema | None:
        """The schema of a framing v0 id."""
        return await self._schema(f"/schemas/ids/{schema_id}")

    async def by_guid(self, guid: str) -> RegisteredSchema | None:
        """The schema of a framing v1 GUID (Confluent Platform 8.0 and later)."""
        return await self._schema(f"/schemas/guids/{quote(guid, safe='')}")

    async def close(self) -> None:
        """Drop the connections."""
        await self._client.aclose()

    async def _schema(self, path: str) -> RegisteredSchema | None:
        found = await self._get(path)
        if found is None:
            return None
        texts: dict[str, str] = {}
        seen: set[tuple[str, str]] = set()
        todo = _references(found)
        while todo:
            name, subject, version = todo.pop(0)
            if (subject, version) in seen:
                continue
            seen.add((subject, version))
            if len(seen) > REFERENCES_MAX:
                raise Permanent(f"a schema refers to more than {REFERENCES_MAX} others", where=self.url + path)
            other = await self._get(f"/subjects/{quote(subject, safe='')}/versions/{quote(version, safe='')}?deleted=true")
            if other is not None:  # where it is gone the codec says which type is missing
                texts[name] = str(other.get("schema", ""))
                todo += _references(other)
        return RegisteredSchema(str(found.get("schemaType") or "AVRO").upper(), str(found.get("schema", "")), texts)

    async def _get(self, path: str) -> dict[str, Any] | None:
        where = self.url + path
        try:
            answer = await self._client.get(where)
        except httpx.HTTPError as error:
            if isinstance(error.__cause__ or error.__context__, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY" in str(
                error
            ):
                raise Permanent(
                    "the schema registry's certificate is not trusted", where=self.url, remedy="Name its CA with the option ca"
                ) from None
            raise Transient(f"the schema registry does not answer: {error or type(error).__name__}", where=where) from None
        try:
            body = answer.json()
        except ValueError:
            body = None
        code = body.get("error_code") if isinstance(body, dict) else None
        status = answer.status_code
        if status == 200 and isinstance(body, dict) and isinstance(body.get("schema"), str):
            return body
        if status == 404 and isinstance(code, int) and 40_400 <= code < 40_500:
            return None
        if status in (401, 403):
            raise Permanent(
                f"the schema registry refuses us (HTTP {status})", where=where, remedy="Check username and password, or token"
            )
        if status in (408, 425, 429) or status >= 500:
            raise Transient(f"the schema registry answers HTTP {status}", where=where)
        if status == 404:
            raise Permanent("there is no such path on the schema registry", where=where, remedy="Check its URL and version")
        raise Permanent(f"the schema registry gives HTTP {status} and no schema", where=where, remedy="Check its URL")


def _references(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, subject and version of what a schema refers to."""
    listed = found.get("references") or ()
    return [(str(r["name"]), str(r["subject"]), str(r["version"])) for r in listed if {"name", "subject", "version"} <= r.keys()]


def _seconds(text: str | None) -> float:
    try:
        found = TIMEOUT_S if text is None else float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 3_600:
        raise Permanent(f"schema registry: timeout_s is {text!r}", remedy="Write a number of seconds, such as 10")
    return found


def _trust(ca: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise Permanent(f"schema registry: {ca} cannot be read as a CA bundle: {error}") from None
