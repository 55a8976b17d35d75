-- read_paths: which step led to which, in the journals of some instances. For the graph of a machine.
-- params   $1 id bigint[] · $2 records of each that are looked at, the newest ones, int
-- returns  per way, in the order of the last time: step, kind, the step that it led to or null, whether it failed the instance, how often, the highest rev
-- locks    none
-- index    journal_pkey, backwards
-- cost     linear in the records that are looked at
select r.step, r.kind, r.to_step, r.failed, count(*), max(r.rev)
  from unnest($1::bigint[]) i(id)
 cross join lateral (
    select j.step, j.kind, j.to_step, j.rev, coalesce((j.data ->> 'failed')::boolean, false) as failed
      from durable.journal j
     where j.instance_id = i.id
     order by j.rev desc limit $2::int) r
 where r.step is not null
   and r.kind in ('next', 'retry', 'parked', 'spawned', 'done', 'failed', 'crashed', 'reaped', 'asked', 'proceeded', 'approved', 'rejected', 'timed_out',
                  'compensating')
 group by r.step, r.kind, r.to_step, r.failed
 order by max(r.rev), r.step, r.kind, r.to_step
