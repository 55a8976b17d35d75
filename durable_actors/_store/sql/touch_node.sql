-- touch_node: an engine is still there.
-- params   $1 incarnation text
-- returns  nothing
-- locks    its own row
update durable.nodes set seen_at = now() where incarnation = $1::text
