-- journal_outcomes: record the outcomes that this transaction has written, for instances that are journaled.
-- params   arrays, one element per outcome: $1 id bigint[] · $2 claim uuid[] · $3 kind text[] · $4 step text[] · $5 visit bigint[] (before
--          the outcome, as step) · $6 attempt int[] · $7 seconds float8[] (how long it ran, or null) · $8 node text · $9 round int[] ·
--          $10 end of the lease timestamptz[], or null · $11 whether it wrote the partition key boolean[] · $12 the error of a handled
--          failure text[] (JSON), or null, where the row does not keep it · $13 the definition that ran it text[], or null: the one that the instance was
--          started with. Of kind, step, visit, attempt and round one element may stand for
--          all; seconds, leases and $11 to $13 may be empty: null for all.
-- returns  nothing
-- locks    none new
-- index    gen_durable_pkey, journal_pkey
-- keeps    the record is written by the transaction of the outcome, or not at all: only rows that this transaction has written, under
--          that claim. A stale outcome leaves no record.
-- cost     a rider: nothing is sent when no instance of the group is journaled
insert into durable.journal (instance_id, rev, visit, seconds, claim_id, attempt, kind, step, to_step, node, error, data)
select g.id, g.rev, u.visit, u.seconds, g.claim_id, u.attempt, u.kind, u.step,
       case when u.kind = 'next' then g.step when u.kind = 'parked' then g.await_step when u.kind = 'asked' then g.manual ->> 'then' end,
       $8::text,
       case when g.last_error is not null
            then jsonb_strip_nulls(jsonb_build_object('type', g.error_type, 'text', g.last_error, 'traceback', g.traceback))
            else u.handled::jsonb end,
       -- Most records need no more than a constant: to build an object takes as long as to insert it.
       case when g.journal = 2 and u.round = 0 and u.rekeyed is not true and u.definition is null and (u.kind = 'done' or (u.kind = 'next' and g.locked_by is not null) or
                                                    (u.kind = 'next' and g.eligible_at <= g.updated_at))
            then case when g.locked_by is null then '{"folded": {}}'::jsonb else '{"folded": {}, "keeps_claim": true}' end
            else jsonb_strip_nulls(jsonb_build_object(
                     'folded', case when g.journal < 3 then '{}'::jsonb end,
                     'definition', u.definition,
                     'round', nullif(u.round, 0),
                     'renewed_until', u.lease,
                     'late', case when u.lease <= durable.now() then true end,
                     'keeps_claim', case when g.locked_by is not null then true end,
                     'lease_until', g.lease_expires_at,
                     'eligible_at', case when u.kind = 'retry' or (u.kind = 'next' and g.eligible_at > g.updated_at) then g.eligible_at end,
                     'awaits', case when u.kind = 'parked' then to_jsonb(g.awaits) end,
                     'deadline', g.await_deadline,
                     'to_attempt', case when u.kind = 'failed' and g.attempt <> u.attempt then g.attempt end))
                 || case when u.kind = 'asked' then jsonb_build_object('boundary', g.manual) else '{}' end
                 || case when u.rekeyed then jsonb_build_object('columns', jsonb_build_object('partition_key', g.partition_key)) else '{}' end
                 || case when g.journal < 4 then '{}'
                         when g.finished_at is null then jsonb_build_object('state', g.state)
                         when u.kind = 'done' then jsonb_build_object('result', g.result)
                         else '{}' end
       end
  from (select i.id, i.claim, coalesce(i.kind, ($3::text[])[1]) as kind, coalesce(i.step, ($4::text[])[1]) as step,
               coalesce(i.visit, ($5::bigint[])[1]) as visit, coalesce(i.attempt, ($6::int[])[1]) as attempt, i.seconds,
               coalesce(i.round, ($9::int[])[1]) as round, i.lease, i.rekeyed, i.handled, i.definition
          from unnest($1::bigint[], $2::uuid[], $3::text[], $4::text[], $5::bigint[], $6::int[], $7::float8[], $9::int[], $10::timestamptz[],
                      $11::boolean[], $12::text[], $13::text[])
               i(id, claim, kind, step, visit, attempt, seconds, round, lease, rekeyed, handled, definition)) u
  join durable.gen_durable g on g.id = u.id and g.claim_id = u.claim
 where g.xmin = pg_current_xact_id()::xid
   -- A record of this rev exists only if a hand has changed the row's; verify reports it. "on conflict" would insert speculatively.
   and (select true from durable.journal j where j.instance_id = g.id and j.rev = g.rev) is null
