-- touch_node: record that an engine is alive.
-- params   $1 incarnation text
-- returns  nothing
-- locks    its own row, SKIP LOCKED: a row that only operators read is not worth a wait
update durable.nodes set seen_at = pg_catalog.now()
 where incarnation = (select n.incarnation from durable.nodes n where n.incarnation = $1::text for update skip locked)
