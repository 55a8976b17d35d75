-- read_fair_keys: which fair keys of a queue have due rows, and which due rows have no key. Before each pick of a fair queue.
-- params   $1 queue text · $2 priorities smallint[], most urgent first · $3 the key after which to begin text[], one for each, '' for the
--          first · $4 due keys to find int · $5 keys to look at int · rows without a key: $6 priorities smallint[] · $7 $8 the position after
--          which to begin timestamptz[], bigint[], as in pick_instances · $9 rows to read per priority int
-- returns  'k', priority, a key with a due row · 'e', priority, the key after which to go on, '' if that was the last: for each priority
--          that was looked at · 'p', priority, null, ids without a key bigint[] or null, how many rows were read, position of the last one
-- locks    none
-- index    gen_durable_fair: one probe for each key; gen_durable_pick: as many rows as $9 says
select case when f.is_due is null then 'e' else 'k' end, f.at_priority, f.at_key, null::bigint[], 0::bigint, null::timestamptz, null::bigint
  from durable.fair_keys($1::text, $2::smallint[], $3::text[], $4::int, $5::int) f
union all
select 'p', p.priority, null, r.ids, r.n, r.ats[r.n], r.all_ids[r.n]
  from unnest($6::smallint[], $7::timestamptz[], $8::bigint[]) p(priority, at, id)
 cross join lateral (
    select array_agg(w.id) filter (where w.fair_key is null) as ids, count(*) as n, array_agg(w.eligible_at) as ats, array_agg(w.id) as all_ids
      from (select g.id, g.eligible_at, g.fair_key
              from durable.gen_durable g
             where durable.offered(g.status, g.hold) and g.queue = $1::text and g.priority = p.priority
               and durable.due(g.eligible_at) and (g.eligible_at, g.id) > (p.at, p.id)
             order by g.eligible_at, g.id limit $9::int) w) r
