-- stop_node: record that an engine has stopped cleanly. Claims that it could not release count as interrupted (reap_claims).
-- params   $1 incarnation text
-- returns  nothing
-- locks    its own row
update durable.nodes set seen_at = pg_catalog.now(), stopped_at = pg_catalog.now() where incarnation = $1::text
