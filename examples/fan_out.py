"""Fan out, fan in: a parent starts children, waits for all of them in the database, and goes on with their results.

Start and wait are one commit: no child is lost, none is started twice. A failed child opens the barrier like any other;
the parent decides what its failure means.

Run it: `python examples/fan_out.py`. Without DURABLE_DSN it brings its own Postgres.
"""

from __future__ import annotations

import attrs
import durable_actors as da
import trio


@attrs.frozen
class Page:
    text: str


@attrs.frozen
class Book:
    pages: list[str]


@da.job(name="examples:count_words", queue="words", max_attempts=2, backoff=lambda _attempt: 0.05)
async def count_words(args: Page) -> int:
    if "�" in args.text:
        raise ValueError("this page cannot be read")
    return len(args.text.split())


class CountBook(da.Machine[Book], name="examples:count_book"):
    @da.step(initial=True)
    async def split(self, ctx: da.Context[Book]) -> da.Outcome:
        children = [da.Child(count_words, args=Page(text)) for text in ctx.state.pages]
        return da.ScheduleChildren(self.add_up, children)

    @da.step
    async def add_up(self, ctx: da.Context[Book]) -> da.Outcome:
        good = [child.result for child in ctx.children if child.status == "done"]
        bad = [child.last_error for child in ctx.children if child.status == "failed"]
        return da.Done({"words": sum(good), "pages": len(good), "unreadable": bad})


async def main() -> None:
    pages = ["the quick brown fox", "jumps over", "� � �", "the lazy dog"]
    async with da.open_engine():
        book = await da.insert(CountBook, state=Book(pages))
        assert book is not None
        print(f"{len(pages)} pages →", await da.result(book, timeout=30))


if __name__ == "__main__":
    trio.run(main)
