-- stop_node: an engine has stopped in good order.
-- params   $1 incarnation text
-- returns  nothing
-- locks    its own row
update durable.nodes set seen_at = now(), stopped_at = now() where incarnation = $1::text
