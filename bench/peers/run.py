"""`python -m bench.peers.run '{...}'`: one peer once; prints its figures as JSON."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from bench.meter import Meter
from bench.peers.finish import Finish


def main(order: dict[str, Any]) -> None:
    peer = importlib.import_module(f"bench.peers.{order['peer']}_peer")
    peer.run(
        order["dsn"], Finish(order["count"], Meter(order["dsn"], order["postmaster"])), **order["settings"]
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
