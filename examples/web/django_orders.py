"""Django: save a model and insert its durable work in one `atomic()`, also inside a savepoint.

Pass `django.db.connection` as it is. What is rolled back takes its instances with it.

Run it: `python examples/web/django_orders.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import attrs
import django
import durable_actors as da
import trio
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict


@attrs.frozen
class Order:
    number: int


class Fulfil(da.Machine[Order], name="examples:django fulfil"):
    @da.step(initial=True)
    async def ship(self, ctx: da.Context[Order]) -> da.Outcome:
        return da.Done({"shipped": ctx.state.number})


def set_up(dsn: str) -> None:
    """What `manage.py` and your settings do."""
    given = conninfo_to_dict(dsn)
    names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "NAME": "dbname"}
    database = {name: str(given.get(key, "")) for name, key in names.items()}
    settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", **database}})
    django.setup()


def web_process(dsn: str) -> list[int]:
    set_up(dsn)
    from django.db import connection, models, transaction  # noqa: PLC0415 - after the settings

    class ShopOrder(models.Model):
        number = models.IntegerField(primary_key=True)

        class Meta:
            app_label = "shop"

    @transaction.atomic
    def checkout(number: int) -> int:
        ShopOrder.objects.create(number=number)
        return da.sync.insert(connection, Fulfil, state=Order(number), unique_key=f"order:{number}")

    with connection.schema_editor() as editor:
        editor.create_model(ShopOrder)
    placed = [checkout(1)]
    with transaction.atomic():
        placed.append(checkout(2))  # a savepoint
        try:
            with transaction.atomic():
                checkout(3)
                raise ValueError("out of stock")  # rolls back the savepoint, and with it order 3 and its work
        except ValueError as exc:
            print("order 3:", exc)
    print("orders:", [order.number for order in ShopOrder.objects.order_by("number")])
    with connection.schema_editor() as editor:
        editor.delete_model(ShopOrder)
    connection.close()
    return placed


async def main() -> None:
    async with da.open_engine() as engine:  # the worker: usually a process of its own
        for number in await trio.to_thread.run_sync(web_process, engine.dsn):
            print("instance", number, "→", await da.result(number, timeout=30))
        print("instances:", len(await da.list_instances(da.Filter(machine=Fulfil))))


if __name__ == "__main__":
    trio.run(main)
