-- register_node: record that an engine has started.
-- params   $1 incarnation text · $2 node text · $3 about jsonb
-- returns  nothing
-- locks    its own row
insert into durable.nodes (incarnation, node, about) values ($1::text, $2::text, $3::jsonb)
on conflict (incarnation) do update set seen_at = pg_catalog.now(), stopped_at = null, about = excluded.about
