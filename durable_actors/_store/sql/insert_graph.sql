-- insert_graph: write which children come after which, in the transaction that inserted them.
-- params   arrays, one element per child that comes after others or comes before some: $1 id bigint[] · $2 those that it comes after
--          text[] (each an array literal, or null) · $3 whether any end of those is good enough boolean[], or empty: false for all ·
--          $4 those that come after it text[] (as $2)
-- returns  nothing
-- locks    the new rows
-- keeps    arrays, not a row per edge: a million edges between 1,000 and 1,000 children are 2,000 rows
insert into durable.graph (id, needs, any_end, waits, feeds, owed)
select u.id, u.needs::bigint[], coalesce(u.any_end, false), coalesce(cardinality(u.needs::bigint[]), 0), u.feeds::bigint[], u.feeds::bigint[]
  from unnest($1::bigint[], $2::text[], $3::boolean[], $4::text[]) u(id, needs, any_end, feeds)
