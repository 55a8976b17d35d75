"""What a caller says about a command is checked, its secrets are not stored; receipts and requests are read."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import attrs
import durable_actors as da
import pytest
from durable_actors._store.commands import (
    Command,
    Request,
    is_secret,
    plan_command,
    read_receipt,
    read_request,
)


def stored(meta: dict[str, Any]) -> Any:
    return json.loads(plan_command(meta=meta).data)


def test_nothing_needs_to_be_said():
    assert plan_command() == Command()
    assert Command().params() == [None, None, None, b"{}"]


def test_what_is_said_arrives():
    command = plan_command(by="ada", reason="the bank is back", idempotency_key="k", meta={"ticket": 7})
    assert command.params() == [b"ada", b"the bank is back", b"k", b'{"ticket":7}']


@pytest.mark.parametrize("option", ["by", "reason", "idempotency_key"])
@pytest.mark.parametrize("value", ["", "a\0b", "\ud800", 7, b"ada", "x" * 2001, ["ada"]], ids=repr)
def test_texts_that_cannot_be_stored(option: str, value: object):
    with pytest.raises(da.ConfigError, match=option) as raised:
        plan_command(**{option: value})
    assert raised.value.option == option


def test_a_key_fits_its_index_in_bytes():
    assert plan_command(idempotency_key="é" * 250).idempotency_key == "é" * 250
    with pytest.raises(da.ConfigError, match="idempotency_key"):
        plan_command(idempotency_key="é" * 251)


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    "meta",
    [[1], "text", 7, {"a": object()}, {"a": float("nan")}, {"a": "\0"}, {"a": "x" * 70_000}, deep(50_000)],
    ids=["list", "text", "number", "object", "nan", "nul", "large", "deep"],
)
def test_meta_is_a_json_object(meta: object):
    with pytest.raises(da.ConfigError, match="meta") as raised:
        plan_command(meta=meta)
    assert raised.value.option == "meta"


@attrs.frozen
class Login:
    user: str
    password: str


def test_secrets_are_redacted_wherever_they_are():
    assert stored(
        {
            "ticket": 7,
            "password": "p",
            "login": {"Authorization": "Bearer p", "user": "ada"},
            "calls": [{"api_key": "p", "url": "x"}, [{"refreshToken": {"value": "p"}}]],
            "record": Login("ada", "p"),
            "token": None,
        }
    ) == {
        "ticket": 7,
        "password": "[redacted]",
        "login": {"Authorization": "[redacted]", "user": "ada"},
        "calls": [{"api_key": "[redacted]", "url": "x"}, [{"refreshToken": "[redacted]"}]],
        "record": {"user": "ada", "password": "[redacted]"},
        "token": "[redacted]",
    }


@pytest.mark.parametrize(
    "name",
    [
        "token", "TOKEN", "access-token", "access_token", "accessToken", "X-Auth-Token", "secret", "client_secret",
        "Client Secret", "secrets", "password", "db.password", "PASSWORD_HASH", "passwd", "passphrase", "pwd",
        "authorization", "Proxy-Authorization", "auth", "api_key", "api-key", "apiKey", "X-API-KEY",
        "aws_access_key_id", "private_key", "credentials", "cookie", "Set-Cookie", "ｐａｓｓｗｏｒｄ",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["ticket", "author", "key", "partition_key", "user", "reason", "pass_rate", ""]
)
def test_names_of_no_secrets(name: str):
    assert not is_secret(name)


def test_a_receipt_is_read_whatever_a_hand_wrote():
    row = [b"7", b"infinity", b"retry", b"instance", b"1", None, None, None, b"[1]", None]
    found = read_receipt(row)
    assert (found.id, found.by, found.data, found.result) == (7, None, {"data": [1]}, None)


AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        (b'{"kind": "cancel"}', Request("cancel")),
        (
            b'{"kind": "cancel", "by": "ada", "reason": "r", "at": "2026-01-02T03:04:05+00:00"}',
            Request("cancel", "ada", "r", AT),
        ),
        (b'{"kind": "cancel", "by": 7, "reason": [], "at": "soon"}', Request("cancel")),
        (b'{"kind": "cancel", "at": "2026-01-02T03:04:05"}', Request("cancel")),
        (b'{"kind": "cancel", "at": "infinity"}', Request("cancel")),
        (b'{"kind": 7}', None),
        (b"{}", None),
        (b"[]", None),
        (b"null", None),
        (b'"cancel"', None),
        (b"1e100000", None),
    ],
)
def test_a_request_is_read_and_what_is_none_is_not(raw: bytes, found: Request | None):
    assert read_request(raw) == found
