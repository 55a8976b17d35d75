-- register_node: an engine has started. Forgets incarnations that were last seen a week ago.
-- params   $1 incarnation text · $2 node text · $3 about jsonb
-- returns  nothing
-- locks    its own row; the old ones SKIP LOCKED
with old as (
    delete from durable.nodes n
     where n.incarnation = any (array(
        select y.incarnation from durable.nodes y
         where y.seen_at < now() - interval '7 days' and y.incarnation <> $1::text for update skip locked))
)
insert into durable.nodes (incarnation, node, about) values ($1::text, $2::text, $3::jsonb)
on conflict (incarnation) do update set seen_at = now(), stopped_at = null, about = excluded.about
