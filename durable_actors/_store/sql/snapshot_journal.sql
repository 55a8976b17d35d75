-- snapshot_journal: record the row of a live instance as it is, if it has moved often since retention did so last. Never waits.
-- params   $1 id bigint · $2 moves bigint
-- returns  the rev of the snapshot; nothing if it was not due, the row moves or is locked, is paused or to be cancelled, waits for a person, or has a
--          time without end
-- moves    snapshot
-- locks    FOR NO KEY UPDATE SKIP LOCKED on the row: a row that is locked is moving
-- index    gen_durable_pkey, checkpoints_pkey, journal_pkey
-- fence    the rev that the snapshot has: of two janitors one writes
-- keeps    everything but `rev`. A claim stays what it is: its fence is not `rev`. The record has what the records before it tell beyond the
--          row: who started it, and how many children its barrier needs. Who paused it a row does not tell, so such a row is left alone.
with seen as materialized (
    select g.id, g.rev, c.rev as before
      from durable.gen_durable g
      left join durable.checkpoints c on c.thread = 'snapshot of run:' || g.id
     where g.id = $1::bigint and g.rev - greatest(coalesce(c.rev, 0), 0) >= $2::bigint
), free as materialized (
    select g.id, s.before
      from seen s
      join durable.gen_durable g on g.id = s.id and g.rev = s.rev
     where g.finished_at is null and g.journal between 2 and 4 and g.hold <> 4 and g.request is null and (g.manual is null or g.status <> 'awaiting_signal')
       and isfinite(g.eligible_at) and isfinite(g.inserted_at) and isfinite(coalesce(g.await_deadline, g.inserted_at))
       and isfinite(coalesce(g.lease_expires_at, g.inserted_at))
       for no key update of g skip locked
), taken as (
    update durable.gen_durable g
       set rev = least(g.rev, 9223372036854775806) + 1
      from free f
     where g.id = f.id
    returning g.id, g.rev, f.before, durable.note(
        g.id, g.rev, 'snapshot', g.step, null, g.visit, g.attempt, 0, further => jsonb_strip_nulls(jsonb_build_object(
            'retention', true,
            'parent', (select j.data -> 'parent' from durable.journal j where g.parent_id is not null and j.instance_id = g.id
                        order by j.rev limit 1),
            'needed', case when g.status = 'awaiting_children' then (
                select coalesce(j.data -> 'needed', j.data -> 'children_pending') from durable.journal j
                 where j.instance_id = g.id and ((j.kind = 'spawned' and j.visit = g.visit - 1)
                                                 or (j.kind = 'snapshot' and j.visit = g.visit and j.data ? 'needed'))
                 order by j.rev desc limit 1) end))
        || jsonb_build_object(
            'row', to_jsonb(g) - 'request' - case when g.journal < 4 then array['state', 'result'] else '{}' end
                   || jsonb_build_object('unique_key', chr(92) || 'x' || encode(g.unique_key, 'hex'),
                                         'unique_guard', null,
                                         'child_args', chr(92) || 'x' || encode(g.child_args, 'hex'),
                                         'claim_token_hash', chr(92) || 'x' || encode(g.claim_token_hash, 'hex'),
                                         'fingerprint', chr(92) || 'x' || encode(g.fingerprint, 'hex'))))
)
insert into durable.checkpoints as c (thread, rev, format, projection)
select 'snapshot of run:' || t.id, t.rev, 0, coalesce(to_jsonb(t.before), 'null') from taken t
on conflict (thread) do update set rev = excluded.rev, format = excluded.format, projection = excluded.projection, at = excluded.at
returning c.rev
