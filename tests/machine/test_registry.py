"""Who is registered, who replaces whom, and how a machine is found."""

import subprocess
import sys
import textwrap
import threading

import durable_actors.machine as da
import pytest
from durable_actors.errors import DefinitionError, UnknownMachine


def define(name="shop:Checkout", version=1, qualname="Checkout"):
    async def start(self, ctx):
        return da.Done()

    body = {"__module__": __name__, "__qualname__": qualname, "start": da.step(start)}
    return type(da.Machine)("Checkout", (da.Machine,), body, name=name, version=version)


def test_versions_coexist_and_the_newest_is_found(registry):
    first, second = define(version=1, qualname="V1"), define(version=2, qualname="V2")
    assert registry.get("shop:Checkout", 1) is first.__durable__
    assert registry.get("shop:Checkout", 2) is second.__durable__
    assert registry.get("shop:Checkout", 3) is None
    assert registry.find("shop:Checkout") is second.__durable__
    assert registry.find("shop:Checkout", 1) is first.__durable__
    assert registry.find(first) is first.__durable__
    assert ("shop:Checkout", 1) in registry
    assert set(registry.specs) == {("shop:Checkout", 1), ("shop:Checkout", 2)}


def test_a_reload_replaces(registry):
    old, new = define(), define()
    assert registry.get("shop:Checkout", 1) is new.__durable__
    assert registry.find(old) is old.__durable__
    assert len(registry) == 1


def test_another_definition_of_the_same_name_is_refused(registry):
    first = define()
    with pytest.raises(DefinitionError, match=r"shop:Checkout v1 is defined twice.*name= or version="):
        define(qualname="Other")
    assert registry.get("shop:Checkout", 1) is first.__durable__


def test_a_function_that_defines_a_class_can_run_twice():
    def scope():
        class Machine(da.Machine):
            @da.step
            async def start(self, ctx): ...

        return Machine

    assert scope() is not scope()


def test_a_job_and_a_machine_share_the_names():
    define(name="x")
    with pytest.raises(DefinitionError, match="defined twice"):
        da.job(name="x")(lambda args: None)


def test_the_generation_tells_of_changes(registry):
    before = registry.generation
    machine = define()
    middle = registry.generation
    registry.unregister(machine)
    assert before < middle < registry.generation
    assert len(registry) == 0
    registry.unregister(machine)  # not there: no error


def test_unregister_by_name(registry):
    define(version=1, qualname="V1")
    define(version=2, qualname="V2")
    registry.unregister("shop:Checkout", 1)
    assert list(registry.specs) == [("shop:Checkout", 2)]
    registry.unregister("shop:Checkout")
    assert not registry.specs


def test_isolated_registries_nest(registry):
    define()
    with da.isolated_registry() as inner:
        assert da.current_registry() is inner
        assert len(inner) == 0
        define(name="inner")
    with da.isolated_registry(empty=False) as inner:
        assert len(inner) == 1
        define(name="inner")
        assert len(inner) == 2
    assert da.current_registry() is registry
    assert len(registry) == 1


def test_an_error_leaves_the_isolated_registry(registry):
    with pytest.raises(KeyError), da.isolated_registry():
        raise KeyError
    assert da.current_registry() is registry


def test_iterating_while_another_registers(registry):
    define(name="a", qualname="A")
    for index, _ in enumerate(registry.specs):
        define(name=f"b{index}", qualname=f"B{index}")
    assert len(registry) == 2


def test_threads_that_register_at_once(registry):
    ready = threading.Barrier(4)

    def work(number):
        ready.wait()
        for index in range(100):
            da.job(name=f"{number}-{index}")(lambda args: None)

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry) == 400


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shop:Chekout", r"did you mean 'shop:Checkout'\?"),
        ("Checkout", r"did you mean 'shop:Checkout'\?"),
        ("zzzzzz", "registered are shop:Checkout"),
        ("shop:Refund", "registered are shop:Checkout"),  # the module alone is no likeness
    ],
)
def test_an_unknown_name_lists_near_ones(registry, name, text):
    define()
    with pytest.raises(UnknownMachine, match=text):
        registry.find(name)


def test_an_unknown_version(registry):
    define(version=3)
    with pytest.raises(UnknownMachine, match=r"has no version 1 here; registered are 3"):
        registry.find("shop:Checkout", 1)


def test_an_empty_registry(registry):
    with pytest.raises(UnknownMachine, match="import the module that defines it"):
        registry.find("shop:Checkout")


def test_what_is_no_machine(registry):
    machine = define()
    for value, text in [
        (machine(), "pass the class Checkout, not an object of it"),
        (da.Machine, "abstract base"),
        (int, "int is not a machine: inherit from da.Machine"),
        (len, "is not a job: decorate it with @da.job"),
        (5, "its class, its job function or its name"),
        (None, "its class, its job function or its name"),
    ]:
        with pytest.raises(UnknownMachine, match=text):
            registry.find(value)


def test_a_name_is_never_imported(registry, monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    for name in ("this:Zen", "this", "os:system"):
        with pytest.raises(UnknownMachine):
            registry.find(name)
        assert registry.get(name, 1) is None
    assert "this" not in sys.modules


SCRIPT = textwrap.dedent("""
    import durable_actors.machine as da

    class M(da.Machine):
        @da.step
        async def start(self, ctx): ...

    @da.job
    def j(args): ...

    print(M.__durable__.name, j.__durable__.name)
    if __name__ == "__main__":
        import app.work  # the worker's way to the same text: a reload, not a duplicate
        assert app.work.M is not M
        assert da.current_registry().find("app.work:M").definition is app.work.M
""")


def test_a_module_run_with_dash_m_has_its_real_name(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()
    (tmp_path / "app" / "work.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "app.work"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["app.work:M app.work:j"] * 2


def test_a_script_is_called_main(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.split("if __name__")[0])
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("__main__:M __main__:j", "")
