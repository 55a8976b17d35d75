-- touch_node: an engine is still there.
-- params   $1 incarnation text
-- returns  nothing
-- locks    its own row, SKIP LOCKED: nobody waits for what only people read
update durable.nodes set seen_at = now()
 where incarnation = (select n.incarnation from durable.nodes n where n.incarnation = $1::text for update skip locked)
