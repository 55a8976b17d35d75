"""What the statements of schedules mean where there are none; see `statements`. Schedules are not modelled."""

from __future__ import annotations

from durable_actors._postgres.driver.statement import Params
from tests.simulation import literals as lit
from tests.simulation.statements import Rows, Scene, meaning, shown
from tests.simulation.tables import Tx


@meaning
def due_schedules(scene: Scene, tx: Tx, params: Params) -> Rows:
    return [shown(None, lit.instant(tx.now), None, None, None)]
