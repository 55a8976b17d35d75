-- delete_done: delete instances that this transaction has just committed as done, with all that belongs to them: machines with `keep=0`.
-- params   $1 id bigint[]
-- returns  id, how many records of the journal went with it (null: it kept none)
-- moves    deleted
-- locks    the rows are ours; then their records
-- index    gen_durable_pkey, journal_pkey
-- keeps    I4: only rows that this transaction has written, so a stale outcome deletes nothing. What somebody may look for stays for
--          the janitor: children, what a step inserted (child_uid: its re-run finds it), rows that occupy a unique key.
-- cost     a rider: nothing is sent when no machine of the group has `keep=0`. The last one: the others read these rows.
with gone as (
    delete from durable.gen_durable g
     where g.id = any ($1::bigint[]) and g.xmin = pg_current_xact_id()::xid and g.status = 'done'
       and g.unique_guard is null and g.parent_id is null and g.child_uid is null
    returning g.id, g.journal
)
select x.id, case when x.journal > 0 then durable.forget(array[x.id]) end from gone x
