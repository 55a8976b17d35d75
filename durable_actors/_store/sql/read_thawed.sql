-- read_thawed: throttled rows of a queue whose token has come, to be given to the pick by id; when the next ones are due.
-- params   $1 schema text · $2 queue text · $3 how many rows int · $4 slots of steps that have ended, to be looked at in any case text[]
-- returns  per row: its id, null; then, if more are throttled: null, seconds until the next of them may run float8
-- locks    try-lock of a key under which nothing is throttled any more: its line in limit_waits is deleted. SKIP LOCKED
-- index    limit_waits_due, gen_durable_throttled, gen_durable_slots
-- cost     the keys that are due, and the rows that they may let go; not the rows that are throttled
select t.id, t.soon from durable.thaw($1::text, $2::text, $3::int, $4::text[]) t
