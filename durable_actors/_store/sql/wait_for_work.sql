-- wait_for_work: wait on the server until one of several queues has a due row.
-- params   $1 queues text[] · $2 seconds between two looks float8 · $3 patience in seconds float8
-- returns  per queue with a due row: its name, the priority of that row, null, and per queue in which a throttled row may have its token:
--          its name, null, null; no row after so many seconds without. Then, if children are to
--          be cancelled, a row of nulls: that does not end the wait, or children that somebody has locked would make it spin. Then the
--          machines that are paused in these queues, as of the end of the wait: queue, null, machine
-- locks    none
-- index    gen_durable_pick: one probe per look, queue and priority on offer; pauses_pkey, cascades_next, limit_waits_due: one page each
select found_queue, found_priority, null from durable.wait_for_work($1::text[], $2::float8, $3::float8)
union all
select null, null, null where durable.has_cascades()
union all
select m.queue, null, m.fsm from durable.paused_machines($1::text[]) m
