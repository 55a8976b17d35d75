"""`insert` and `signal`."""

from __future__ import annotations

from types import ModuleType

import durable_actors as da
import pytest
from durable_actors.machine import isolated_registry
from tests.cli.conftest import Shell


@pytest.mark.usefixtures("shop")
def test_insert_prints_the_id_and_writes_the_row(shell: Shell):
    number = int(
        shell.ok(
            *("insert", "shop:Checkout", "--state", '{"order": 7}'),
            *("--priority", "5", "--unique-key", "order:7", "--partition-key", "p", "--queue", "fast"),
            *("--in", "2h", "--step", "ship"),
        )
    )
    assert shell.row(
        number, "fsm, step, state, priority, convert_from(unique_key, 'UTF8'), partition_key, queue"
    ) == ("shop:Checkout", "ship", {"order": 7}, 5, "order:7", "p", "fast")
    assert shell.row(number, "eligible_at - now() between interval '1:59' and interval '2:00'") == (True,)


@pytest.mark.usefixtures("shop")
def test_insert_a_job_from_stdin_as_json(shell: Shell):
    found = shell.json("insert", "shop:send", "--module", "shop", "--args", "-", stdin='{"to": "a"}')
    assert found == {"id": found["id"], "new": True}
    assert shell.row(found["id"], "queue, state") == ("mail", {"to": "a"})


def test_a_machine_is_found_by_its_place(shell: Shell, shop: ModuleType):
    """Also if it has another name."""
    with isolated_registry(empty=False):

        class Outer:
            @staticmethod
            @da.job(name="a name of its own")
            async def renamed(args: dict) -> None: ...

        shop.Outer = Outer  # type: ignore[attr-defined]
        number = int(shell.ok("insert", "shop:Outer.renamed", "--max-attempts", "3"))
        assert shell.row(number, "fsm, max_attempts") == ("a name of its own", 3)
        assert "no machine is named 'shop:Outer.other'" in shell.refused("insert", "shop:Outer.other")
        assert "no machine is named 'shop:Outer'" in shell.refused("insert", "shop:Outer")


@pytest.mark.usefixtures("shop")
def test_insert_at_an_instant(shell: Shell):
    number = int(shell.ok("insert", "shop:send", "--at", "2099-01-31T08:00+01:00"))
    assert shell.row(number, "eligible_at = '2099-01-31T07:00Z'") == (True,)


@pytest.mark.usefixtures("shop")
def test_insert_a_duplicate(shell: Shell):
    insert = ("insert", "shop:send", "--unique-key", "k")
    first = int(shell.ok(*insert))
    assert shell.refused(*insert) == f"durable-actors: unique key 'k' is occupied by instance {first}\n"
    assert shell.json(*insert, "--on-duplicate", "return") == {"id": first, "new": False}
    assert "--meta" in shell.refused(*insert, "--meta", "{", code=2)
    assert "meta must be a dict" in shell.refused(*insert, "--meta", "[]")
    labelled = shell.ok("insert", "shop:send", "--tag", "a", "--tag", "b", "--meta", '{"k": 1}')
    found = shell.json("show", labelled.strip())
    assert (found["tags"], found["meta"]) == (["a", "b"], {"k": 1})
    assert shell.json(*insert, "--on-duplicate", "skip") == {"id": None, "new": False}
    assert shell.ok(*insert, "--on-duplicate", "skip") == ""


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["Checkout"], 1, "give its module (--module shop.machines)"),
        (["Checkout", "--module", "shop"], 1, "did you mean 'shop:Checkout'?\n"),
        (["shop:Checkout", "--state", '{"order": "x"}'], 1, "at $.order: Expected `int`, got `str`"),
        (["shop:Checkout", "--state", "{order"], 2, "Error: --state: JSON is malformed"),
        (["shop:Checkout", "--state", "hello"], 2, "quote a text like this"),
        (["shop:Checkout", "--state", '{"order": 1}', "--step", "nope"], 1, "has no step 'nope'"),
        (["shop:Checkout", "--state", '{"order": 1}', "--priority", "99999"], 1, "priority"),
        (["shop:send", "--in", "soon"], 2, "'soon' is not a duration"),
        (["shop:send", "--at", "tomorrow"], 2, "is not an ISO instant"),
        (["shop:send", "--in", "1", "--at", "2099-01-01"], 2, "cannot be combined"),
        (["shop:send", "--module", "shop/machines.py"], 1, "give the name of the module: shop.machines"),
        (["no_such_module_at_all:Thing"], 1, "No module named 'no_such_module_at_all'"),
        (["shop:send", "--schema", "x; drop table y"], 1, "is not a valid schema name"),
        (["shop:send", "--schema", "elsewhere"], 1, 'schema "elsewhere" does not exist'),
    ],
    ids=str,
)
def test_insert_refuses(shell: Shell, arguments: list[str], code: int, text: str):
    assert text in shell.refused("insert", *arguments, code=code)
    assert shell.conn.execute("select count(*) from durable.gen_durable").fetchone() == (0,)


def test_a_module_that_breaks_is_told_in_one_line(shell: Shell, tmp_path, monkeypatch):
    (tmp_path / "broken_shop_of_a_test.py").write_text("x = 1\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = shell.refused("insert", "x", "--module", "broken_shop_of_a_test")
    assert "ZeroDivisionError: division by zero (broken_shop_of_a_test.py, line 2" in said
    verbose = shell.run("-v", "insert", "x", "--module", "broken_shop_of_a_test")
    assert "Traceback" in verbose.stderr


def parked(shell: Shell, **columns: object) -> int:
    return shell.add(status="awaiting_signal", awaits=["paid"], **columns)


def test_signal_by_id_and_by_key(shell: Shell):
    number = parked(shell, unique_key=b"order:1")
    assert shell.ok("signal", number, "other", '{"a": [1]}') == "sent\n"
    assert shell.row(number, "status") == ("awaiting_signal",)
    assert shell.json("signal", "order:1", "paid") == {"target": "order:1", "outcome": "sent"}
    assert shell.row(number, "status") == ("runnable",)
    rows = shell.conn.execute("select name, payload from durable.signals order by id").fetchall()
    assert rows == [("other", {"a": [1]}), ("paid", None)]


def test_signal_twice_with_a_dedup_key(shell: Shell):
    number = parked(shell)
    send = ("signal", number, "paid", "-", "--dedup-key", "evt-1")
    assert shell.ok(*send, stdin='"x"') == "sent\n"
    assert shell.ok(*send, stdin='"x"') == "duplicate\n"
    assert shell.conn.execute("select count(*) from durable.signals").fetchone() == (1,)


def test_a_key_of_digits(shell: Shell):
    parked(shell, unique_key=b"12345")
    assert "there is no instance 12345" in shell.refused("signal", "12345", "paid")
    assert shell.ok("signal", "12345", "paid", "--key") == "sent\n"


def test_signal_refuses(shell: Shell):
    done = shell.add(status="done")
    assert f"signal 'paid': instance {done} has ended: done" in shell.refused("signal", done, "paid")
    assert "unique key 'nobody'" in shell.refused("signal", "nobody", "paid")
    assert "is not an instance id" in shell.refused("signal", "99999999999999999999", "paid")
    assert "PAYLOAD" in shell.refused("signal", done, "paid", "{broken", code=2)
    assert "name=''" in shell.refused("signal", done, "")


@pytest.mark.parametrize("name", ["'; drop table durable.signals; --", "[red]x[/red]", "käse\n🧀", "%s $1"])
def test_a_name_is_only_a_name(shell: Shell, name: str):
    number = parked(shell, unique_key=name.encode())
    assert shell.ok("signal", name, name, "--dedup-key", name) == "sent\n"
    assert shell.conn.execute("select name, dedup_key, target_id from durable.signals").fetchall() == [
        (name, name, number)
    ]
