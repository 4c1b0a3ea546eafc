"""The registry adapter: what each answer of a registry becomes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from thalweg.adapters.registry import HttpSchemaRegistry
from thalweg.errors import Permanent, Transient

Handler = Callable[[httpx.Request], httpx.Response]
URL = "http://registry.test:8081/base/"
GUID = "89791762-2336-4186-9674-299b90a802e2"


def answering(status: int, body: Any) -> Handler:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda request: httpx.Response(status, content=content)


def registry(handler: Handler, **options: str) -> HttpSchemaRegistry:
    return HttpSchemaRegistry(URL, options, transport=httpx.MockTransport(handler))


async def test_ids_and_guids_have_their_paths() -> None:
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(200, json={"schema": '"int"'})

    one = registry(handler)
    found = await one.by_id(7)
    assert found is not None
    assert (found.kind, found.text, found.references) == ("AVRO", '"int"', {})
    assert await one.by_guid(GUID) == found
    await one.close()
    assert asked == ["http://registry.test:8081/base/schemas/ids/7", f"http://registry.test:8081/base/schemas/guids/{GUID}"]


async def test_references_are_followed_once_each_and_through_circles() -> None:
    held = {
        "/base/schemas/ids/1": {
            "schema": "top",
            "schemaType": "PROTOBUF",
            "references": [{"name": "a", "subject": "s/a", "version": 2}],
        },
        "/base/subjects/s%2Fa/versions/2?deleted=true": {
            "schema": "A",
            "references": [{"name": "b", "subject": "b", "version": 1}, {"name": "a", "subject": "s/a", "version": 2}],
        },
        "/base/subjects/b/versions/1?deleted=true": {
            "schema": "B",
            "references": [{"name": "a", "subject": "s/a", "version": 2}, {"name": "gone", "subject": "gone", "version": 1}],
        },
    }
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        asked.append(path)
        if path not in held:
            return httpx.Response(404, json={"error_code": 40401, "message": "no subject"})
        return httpx.Response(200, json=held[path])

    found = await registry(handler).by_id(1)
    assert found is not None
    assert (found.kind, found.text, found.references) == ("PROTOBUF", "top", {"a": "A", "b": "B"})
    assert len(asked) == len(set(asked)) == 4


@pytest.mark.parametrize("code", [40401, 40402, 40403])
async def test_what_is_not_there_is_none(code: int) -> None:
    assert await registry(answering(404, {"error_code": code, "message": "not found"})).by_id(1) is None


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (404, {"error_code": 404, "message": "HTTP 404 Not Found"}, Permanent),
        (404, b"<html>", Permanent),
        (401, {"error_code": 401, "message": "no"}, Permanent),
        (403, b"", Permanent),
        (422, {"error_code": 42201, "message": "bad"}, Permanent),
        (200, b"<html>welcome</html>", Permanent),
        (200, [], Permanent),
        (200, {"no": "schema"}, Permanent),
        (429, b"", Transient),
        (408, b"", Transient),
        (500, {"error_code": 50001, "message": "store"}, Transient),
        (502, b"bad gateway", Transient),
        (503, b"", Transient),
    ],
)
async def test_errors_by_what_may_be_done(status: int, body: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="schema registry") as caught:
        await registry(answering(status, body), username="me", password="s3cret").by_id(1)
    assert "s3cret" not in str(caught.value)
    assert "registry.test" in str(caught.value)


@pytest.mark.parametrize("failure", [httpx.ConnectError("refused"), httpx.ReadTimeout(""), httpx.RemoteProtocolError("cut")])
async def test_a_connection_that_fails_is_transient(failure: httpx.TransportError) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise failure

    with pytest.raises(Transient, match=r"does not answer: ."):
        await registry(handler).by_id(1)


async def test_an_untrusted_certificate_is_permanent() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")

    with pytest.raises(Permanent, match="ca"):
        await registry(handler).by_id(1)


async def test_a_port_without_a_listener() -> None:
    """On a real socket: a port that was just bound and given back."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    one = HttpSchemaRegistry(f"http://127.0.0.1:{port}", {"timeout_s": "5"})
    with pytest.raises(Transient):
        await one.by_id(1)
    await one.close()


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        (URL, {}, None),
        (URL, {"username": "me", "password": "p"}, "Basic " + base64.b64encode(b"me:p").decode()),
        ("http://me:p@registry.test", {}, "Basic " + base64.b64encode(b"me:p").decode()),
        (URL, {"token": "t0ken"}, "Bearer t0ken"),
    ],
)
async def test_credentials(url: str, options: dict[str, str], expected: str | None) -> None:
    sent: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("Authorization"))
        return httpx.Response(200, json={"schema": "x"})

    one = HttpSchemaRegistry(url, options, transport=httpx.MockTransport(handler))
    await one.by_id(1)
    assert sent == [expected]
    assert "me" not in one.url


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("ftp://x", {}, "http"),
        ("registry:8081", {}, "http"),
        ("http://", {}, "host"),
        (URL, {"user": "x"}, "unknown option user"),
        (URL, {"timeout_s": "soon"}, "timeout_s"),
        (URL, {"timeout_s": "0"}, "timeout_s"),
        (URL, {"token": "t", "username": "u"}, "both"),
        ("https://registry.test", {"ca": "/nowhere/ca.pem"}, "CA bundle"),
    ],
)
def test_options_that_make_no_sense(url: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(Permanent, match=words):
        HttpSchemaRegistry(url, options)
