-- commit_deletes: commit `Done` of machines with `keep=0`: the row is deleted by the fenced statement itself, with all that belongs to it.
-- params   arrays, one element per outcome: $1 id bigint[] · $2 claim uuid[] · $3 visit bigint[] · $4 result text[] (null: JSON null). Of visit
--          one element may stand for all; results may be empty: null for all · $5 accept late commits boolean
--          $6 token of this group uuid, or null · $7 tokens of groups whose fate is known by now uuid[]
-- returns  per committed row: id, visit, status, null, inbox, null. A missing id was stale: nothing of it was changed
-- moves    done · finished
-- locks    the rows, in the planner's order, as commit_outcomes does: a claim has one owner. Then their signals, records and checkpoints
-- index    gen_durable_pkey (driven from the arrays), journal_pkey, flushes_pkey
-- keeps    I1, I3, I4: what the fence refuses is neither deleted nor written. What somebody may look for stays, as done, for the janitor:
--          children, what others come after, what a step inserted (child_uid: its re-run finds it), rows whose unique key outlives their
--          end. "finished" (the row of this group in durable.flushes) tells a commit of unknown fate where the row cannot.
-- fence    as commit_outcomes. A request to cancel or to pause comes too late for an instance that is done
-- cost     a row that goes costs one version less than an update and then a delete: no new version, no index entry, a third of the WAL.
--          A job that records failed attempts alone, and had none, has no records: rev 2 is "inserted, claimed"
with gone as (
    delete from durable.gen_durable g
     using (select u.id, u.claim, coalesce(u.visit, ($3::bigint[])[1]) as visit, u.result::jsonb as result
              from unnest($1::bigint[], $2::uuid[], $3::bigint[], $4::text[]) u(id, claim, visit, result)) o
     where g.id = o.id and g.claim_id = o.claim and g.visit = o.visit and g.locked_by is not null
       and ($5::boolean or g.lease_expires_at > clock_timestamp())
       and g.parent_id is null and g.child_uid is null and g.links is null
       and (g.unique_key is null or not 'done' = any (g.unique_scope))
    returning g.id, g.visit, g.inbox, g.journal, g.rev, o.result
), kept as (
    update durable.gen_durable g
       set status = 'done', hold = 0, result = coalesce(o.result::jsonb, 'null'),
           rev = least(g.rev, 9223372036854775806) + 1, round = least(g.round, 2147483646) + 1,
           eligible_at = durable.now(), last_error = null, error_type = null, traceback = null,
           locked_by = null, lease_expires_at = null, finished_at = durable.now(),
           awaits = null, await_step = null, await_deadline = null, manual = null,
           children_pending = 0, wake_on_failure = false, updated_at = durable.now()
      from (select u.id, u.claim, coalesce(u.visit, ($3::bigint[])[1]) as visit, u.result
              from unnest($1::bigint[], $2::uuid[], $3::bigint[], $4::text[]) u(id, claim, visit, result)
             where u.id not in (select x.id from gone x)) o
     where g.id = o.id and g.claim_id = o.claim and g.visit = o.visit and g.locked_by is not null
       and ($5::boolean or g.lease_expires_at > clock_timestamp())
    returning g.id, g.visit, g.inbox, case when g.inbox then durable.drop_inbox(g.id) end
), noted as (
    insert into durable.flushes (token, kept)
    select $6::uuid, case when (select count(*) from gone) < cardinality($1::bigint[])
                          then array(select u.id from unnest($1::bigint[]) u(id) where u.id not in (select x.id from gone x)) end
     where $6::uuid is not null
), known as (
    delete from durable.flushes f where f.token = any ($7::uuid[])
), forgotten as (
    select durable.forget(array_agg(x.id order by x.id)) as records from gone x
     where x.journal > 1 or (x.journal = 1 and x.rev > 2) having count(*) > 0
)
select x.id, x.visit, 'done', null, x.inbox, (select f.records from forgotten f) from gone x
union all
select x.id, x.visit, 'done', null, x.inbox, null from kept x
