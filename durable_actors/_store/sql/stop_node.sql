-- stop_node: an engine has stopped in good order. Claims that it could not give back count as interrupted (reap_claims).
-- params   $1 incarnation text
-- returns  nothing
-- locks    its own row
update durable.nodes set seen_at = now(), stopped_at = now() where incarnation = $1::text
